"""Starting weights: what must hold of them for a training to begin well."""

import mlx.core as mx
import numpy as np
import pytest

from training.initial import initialise
from training.small import small_config
from voicechat_core.model import Networks
from voicechat_core.weights import named_parameters


@pytest.fixture(scope="module")
def networks() -> Networks:
    result = Networks(small_config())
    initialise(result, seed=3)
    return result


def weights_of(networks: Networks) -> dict[str, np.ndarray]:
    floating = ((n, v) for n, v in named_parameters(networks) if mx.issubdtype(v.dtype, mx.floating))
    return {name: np.array(value) for name, value in floating}


def test_the_seed_decides(networks: Networks) -> None:
    again, other = Networks(small_config()), Networks(small_config())
    initialise(again, seed=3)
    initialise(other, seed=4)
    mine = weights_of(networks)
    assert all(np.array_equal(value, mine[name]) for name, value in weights_of(again).items())
    assert not np.array_equal(weights_of(other)["stt_model.lm_head.weight"], mine["stt_model.lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("stt_model.perception.encoder.pre_encode.conv.0.weight", 9),
        ("stt_model.perception.encoder.pre_encode.conv.0.bias", 9),
        ("stt_model.perception.encoder.layers.0.conv.depthwise_conv.weight", 9),
        ("stt_model.perception.proj.bias", 112),
        ("stt_model.rnnt_decoder.prediction.dec_rnn.lstm.bias_hh_l1", 96),
        ("stt_model.llm.layers.0.mixer.conv1d.bias", 4),
        ("stt_model.lm_head.weight", 128),
        ("tts_model.tts_model.mog_head.proj_mus.weight", 160),
        ("tts_model.audio_codec.encoder.layers.4.weight", 32 * 7),
        ("tts_model.audio_codec.encoder.layers.1.pwconv1.bias", 32),
    ],
)
def test_uniform_within_the_root_of_the_inputs(networks: Networks, name: str, inputs: int) -> None:
    value = weights_of(networks)[name]
    bound = inputs**-0.5
    assert np.abs(value).max() <= bound
    assert np.abs(value).max() > 0.7 * bound


def test_norms_begin_as_the_identity(networks: Networks) -> None:
    weights = weights_of(networks)
    assert (weights["stt_model.llm.norm_f.weight"] == 1).all()
    assert (weights["stt_model.perception.encoder.layers.2.norm_out.weight"] == 1).all()
    assert (weights["stt_model.perception.encoder.layers.2.norm_out.bias"] == 0).all()
    assert (weights["tts_model.tts_model.backbone.norm.weight"] == 0).all()  # one is added to it


def test_memories_reach_from_four_positions_to_four_hundred(networks: Networks) -> None:
    bias = weights_of(networks)["stt_model.llm.layers.0.mixer.dt_bias"]
    sizes = np.logaddexp(bias, 0)
    assert 0.003 <= sizes.min() < sizes.max() <= 0.3


def test_the_frozen_projection_keeps_lengths_within_its_stretch(networks: Networks) -> None:
    stretch = np.linalg.svd(weights_of(networks)["tts_model.tts_model.audio_prompt_projection_W"], compute_uv=False)
    assert 0.4 - 1e-3 <= stretch.min() < stretch.max() <= 2.5 + 1e-3
