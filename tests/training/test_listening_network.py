"""The training forms of the networks give what the served modules give, and their gradients are true."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from training.listening import network
from training.listening.convolutions import along_time, first_image, strided_image
from training.listening.lstm import predictions
from training.small import small_config
from voicechat_core.config import VoiceChatConfig
from voicechat_core.model import SttModel
from voicechat_core.weights import named_parameters

FRAMES = 83  # more than the 71 that attention sees
STILL = network.Dropout()


@pytest.fixture(scope="module")
def config() -> VoiceChatConfig:
    return small_config()


@pytest.fixture(scope="module")
def stt(config: VoiceChatConfig) -> SttModel:
    """Random weights of sensible size, every bias and scale included."""
    model, rng = SttModel(config), np.random.default_rng(1)
    weights = []
    for name, value in named_parameters(model):
        drawn = rng.standard_normal(value.shape).astype(np.float32)
        scale = 0.2 if value.ndim < 2 else float(np.prod(value.shape[1:])) ** -0.5
        weights.append((name, mx.array(drawn * scale + (value.ndim < 2 and name.endswith("weight")))))
    model.load_weights(weights, strict=False)
    return model


def worst(a: mx.array, b: mx.array) -> float:
    """The largest difference by the larger's size."""
    return float((mx.abs(a - b).max() / mx.abs(b).max()).item())


def test_a_window_is_encoded_as_a_session_hears_it(stt: SttModel) -> None:
    samples = 0.1 * mx.random.normal((2, network.samples_of(FRAMES)), key=mx.random.key(0))
    heard, _ = stt.perception.step(samples, stt.perception.new_state(2))
    mel = network.log_mel(stt.perception.preprocessor, samples)
    assert mel.shape == (2, 8 * FRAMES - 7, 128)
    encoded = network.encode(stt.perception.encoder, mel, STILL)
    assert encoded.shape == (2, FRAMES, 112)
    assert worst(encoded, heard.encoded) < 2e-5


@pytest.mark.parametrize("scan", [200, 30])
def test_the_trunk_is_the_served_one(stt: SttModel, monkeypatch: pytest.MonkeyPatch, scan: int) -> None:
    monkeypatch.setattr(network, "SCAN", scan)
    x = mx.random.normal((2, FRAMES, 128), key=mx.random.key(1))
    assert worst(network.think(stt.llm, x, None, STILL), stt.llm(x)) < 2e-5


def test_positions_before_a_shorter_prompt_leave_no_trace(stt: SttModel) -> None:
    x = mx.random.normal((2, 40, 128), key=mx.random.key(2))
    real = mx.arange(40) >= mx.array([[13], [0]])
    hidden = network.think(stt.llm, x * real[..., None], real, STILL)
    assert worst(hidden[:1, 13:], stt.llm(x[:1, 13:])) < 2e-5
    assert worst(hidden[1:], stt.llm(x[1:])) < 2e-5


def test_the_trunks_input_is_that_of_a_frame(stt: SttModel) -> None:
    audio = mx.random.normal((1, 3, 128), key=mx.random.key(3))
    text, function = mx.array([[12, 1, 400]]), mx.array([[12, 20, 639]])
    expected = audio + stt.embed_tokens(text) + 2.0 * stt.embed_tokens(function)
    assert worst(network.fuse(stt, audio, text, function, 2.0), expected) < 1e-6


def test_the_wave_of_both_layers_is_the_served_decoder(stt: SttModel) -> None:
    labels = mx.array([[5, 127, 0, 9], [128, 128, 3, 3]])
    assert worst(predictions(stt.rnnt_decoder, labels), stt.rnnt_decoder(labels)[0]) < 1e-5


def test_the_waves_gradient_is_the_served_decoders(stt: SttModel) -> None:
    labels = mx.array([[5, 127, 0, 9], [1, 8, 3, 3]])
    pull = mx.random.normal((2, 5, 96), key=mx.random.key(4))

    def gradients(of: object) -> dict[str, mx.array]:
        def total(decoder: nn.Module) -> mx.array:
            return (of(decoder) * pull).sum()  # type: ignore[operator]

        _, tree = nn.value_and_grad(stt.rnnt_decoder, total)(stt.rnnt_decoder)
        return {f"{k}": v for k, v in _leaves(tree)}

    found, expected = gradients(lambda d: predictions(d, labels)), gradients(lambda d: d(labels)[0])
    assert found.keys() == expected.keys()
    assert len(found) == 9
    for name, value in expected.items():
        assert worst(found[name], value) < 1e-5, name


def _leaves(tree: object, path: str = "") -> list[tuple[str, mx.array]]:
    if isinstance(tree, mx.array):
        return [(path, tree)]
    assert isinstance(tree, dict)
    return [leaf for key, child in tree.items() for leaf in _leaves(child, f"{path}.{key}")]


def served_image(x: mx.array, weight: mx.array) -> mx.array:
    return mx.conv2d(x, weight, stride=2, groups=x.shape[3] if weight.shape[3] == 1 else 1)


@pytest.mark.parametrize(("rows", "bins"), [(11, 9), (12, 10), (11, 10)])
def test_a_strided_image_and_its_gradients(rows: int, bins: int) -> None:
    keys = mx.random.split(mx.random.key(5), 3)
    x, weight = mx.random.normal((2, rows, bins, 4), key=keys[0]), mx.random.normal((4, 3, 3, 1), key=keys[1])
    expected = served_image(x, weight)
    assert worst(strided_image(x, weight), expected) < 1e-6
    pull = mx.random.normal(expected.shape, key=keys[2])
    found = mx.grad(lambda a, b: (strided_image(a, b) * pull).sum(), argnums=(0, 1))(x, weight)
    wanted = mx.grad(lambda a, b: (served_image(a, b) * pull).sum(), argnums=(0, 1))(x, weight)
    assert [worst(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True)] == [True, True]


def test_the_first_image_and_its_weights_gradient() -> None:
    keys = mx.random.split(mx.random.key(6), 3)
    x, weight = mx.random.normal((2, 12, 9), key=keys[0]), mx.random.normal((4, 3, 3, 1), key=keys[1])
    expected = mx.conv2d(x[..., None], weight, stride=2)
    assert worst(first_image(x, weight), expected) < 1e-6
    pull = mx.random.normal(expected.shape, key=keys[2])
    found = mx.grad(lambda w: (first_image(x, w) * pull).sum())(weight)
    assert worst(found, mx.grad(lambda w: (mx.conv2d(x[..., None], w, stride=2) * pull).sum())(weight)) < 1e-5


def test_a_filter_along_time_and_its_gradients() -> None:
    keys = mx.random.split(mx.random.key(7), 3)
    x, weight = mx.random.normal((2, 14, 6), key=keys[0]), mx.random.normal((6, 5, 1), key=keys[1])
    expected = mx.conv1d(x, weight, groups=6)
    assert worst(along_time(x, weight), expected) < 1e-6
    pull = mx.random.normal(expected.shape, key=keys[2])
    found = mx.grad(lambda a, b: (along_time(a, b) * pull).sum(), argnums=(0, 1))(x, weight)
    wanted = mx.grad(lambda a, b: (mx.conv1d(a, b, groups=6) * pull).sum(), argnums=(0, 1))(x, weight)
    assert [worst(a, b) < 1e-5 for a, b in zip(found, wanted, strict=True)] == [True, True]


def test_dropout_keeps_the_mean() -> None:
    mx.random.seed(0)
    first, second = (drop(mx.ones((201, 203))) for drop in network.Dropout(0.25).branches(2, (201, 203)))
    assert sorted(set(np.array(first).ravel().round(4).tolist())) == [0.0, pytest.approx(1.3333)]
    assert abs(first.mean().item() - 1) < 0.01
    assert 0.3 < (first != second).mean().item() < 0.45
