"""Transducer parts against naive renderings; the greedy loop against one that remembers nothing."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from voicechat_core.config import DecoderConfig, JointConfig
from voicechat_core.errors import ModelError
from voicechat_core.nn.rnnt import RnntDecoder, RnntJoint, greedy_decode, greedy_step, propose, resolve
from voicechat_core.nn.state import copy

CLASSES, HIDDEN, JOINT, DIM = 12, 8, 10, 6
BLANK = CLASSES


def networks(seed: int = 0, blank_bias: float = 0.0) -> tuple[RnntDecoder, RnntJoint]:
    rng = np.random.default_rng(seed)
    decoder = RnntDecoder(DecoderConfig(pred_hidden=HIDDEN, vocab_size=CLASSES))
    joint = RnntJoint(JointConfig(joint_hidden=JOINT, encoder_hidden=DIM, pred_hidden=HIDDEN, num_classes=CLASSES))
    for module in (decoder, joint):
        module.update(tree_map(lambda v: mx.array(rng.normal(0, 0.8, v.shape).astype(np.float32)), module.parameters()))
    bias = joint.joint_net[2].bias
    joint.joint_net[2].bias = bias + blank_bias * (mx.arange(CLASSES + 1) == BLANK)
    return decoder, joint


def frames(count: int, seed: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 1, (1, count, DIM)).astype(np.float32))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def naive_predictions(decoder: RnntDecoder, labels: list[int]) -> np.ndarray:
    """Outputs before any label and after each, in float64: one gate at a time."""
    w = {k: np.array(v, np.float64) for k, v in decoder.prediction.dec_rnn.lstm.parameters().items()}
    table = np.array(decoder.prediction.embed.weight, np.float64)
    h, c, outputs = np.zeros((2, HIDDEN)), np.zeros((2, HIDDEN)), []
    for x in [np.zeros(HIDDEN), *table[labels]]:
        for layer in range(2):
            gate = {}
            for index, name in enumerate("ifgo"):
                block = slice(index * HIDDEN, (index + 1) * HIDDEN)
                total = w[f"weight_ih_l{layer}"][block] @ x + w[f"weight_hh_l{layer}"][block] @ h[layer]
                gate[name] = total + w[f"bias_ih_l{layer}"][block] + w[f"bias_hh_l{layer}"][block]
            c[layer] = sigmoid(gate["f"]) * c[layer] + sigmoid(gate["i"]) * np.tanh(gate["g"])
            h[layer] = sigmoid(gate["o"]) * np.tanh(c[layer])
            x = h[layer].copy()
        outputs.append(x)
    return np.array(outputs)


def naive_greedy(decoder: RnntDecoder, joint: RnntJoint, encoded: mx.array, limit: int) -> tuple[list[int], list[int]]:
    """The whole history predicted anew for every symbol."""
    labels: list[int] = []
    origins: list[int] = []
    for t in range(encoded.shape[1]):
        for _ in range(limit):
            predicted = mx.array(naive_predictions(decoder, labels)[-1:].astype(np.float32))[None]
            label = int(np.argmax(np.array(joint(encoded[:, t : t + 1], predicted))))
            if label == BLANK:
                break
            labels.append(label)
            origins.append(t)
    return labels, origins


def test_the_prediction_network_is_an_lstm_from_zero_with_torch_gates() -> None:
    decoder, _ = networks()
    labels = [3, 0, 11, 3, 3, 7]
    outputs, (h, c) = decoder(mx.array([labels]))
    np.testing.assert_allclose(np.array(outputs[0]), naive_predictions(decoder, labels), atol=1e-6)
    assert h.shape == c.shape == (2, 1, HIDDEN)
    np.testing.assert_array_equal(np.array(h[1]), np.array(outputs[:, -1]))


def test_the_joint_is_the_rectified_sum_of_two_projections() -> None:
    _, joint = networks()
    encoded, predicted = frames(3)[0], np.random.default_rng(2).normal(0, 1, (4, HIDDEN)).astype(np.float32)
    logits = np.array(joint(encoded[None], mx.array(predicted)[None]))
    w = {name: (np.array(m.weight), np.array(m.bias)) for name, m in (("e", joint.enc), ("p", joint.pred))}
    w_out, b_out = np.array(joint.joint_net[2].weight), np.array(joint.joint_net[2].bias)
    for t in range(3):
        for u in range(4):
            hidden = w["e"][0] @ np.array(encoded[t]) + w["e"][1] + w["p"][0] @ predicted[u] + w["p"][1]
            np.testing.assert_allclose(logits[0, t, u], w_out @ np.maximum(hidden, 0) + b_out, atol=1e-5)


@pytest.mark.parametrize(("seed", "limit"), [(0, 10), (1, 2), (2, 3)])
def test_greedy_decoding_is_that_of_a_loop_without_memory(seed: int, limit: int) -> None:
    decoder, joint = networks(seed, blank_bias=2.5)
    encoded = frames(25)
    labels, origins = greedy_decode(decoder, joint, encoded, limit)
    assert (labels, origins) == naive_greedy(decoder, joint, encoded, limit)
    counts = np.bincount(origins, minlength=25)
    assert (counts == 0).any()  # blanks are met ...
    assert counts.any()  # ... and labels


def test_frames_one_by_one_give_the_labels_of_the_clip() -> None:
    decoder, joint = networks(blank_bias=2.5)
    encoded = frames(30)
    state, labels = decoder.new_state(), []
    for t in range(30):
        found, state = greedy_step(decoder, joint, encoded[:, t : t + 1], state, 10)
        labels += found
        state = copy(state)
    assert labels == greedy_decode(decoder, joint, encoded, 10)[0]


def test_a_proposal_resolved_later_is_the_step() -> None:
    """With a wait for each label and one for the blank, and none before it is resolved."""
    decoder, joint = networks(blank_bias=2.5)
    encoded = frames(30)
    state, other, counts = decoder.new_state(), decoder.new_state(), set[int]()
    for t in range(30):
        pending = propose(decoder, joint, encoded[:, t : t + 1], state)
        assert (pending.best.shape, pending.best.dtype) == ((), mx.int32)
        later = mx.square(encoded).sum()  # other work, queued behind it
        found, state, waits = resolve(decoder, joint, pending, 4)
        expected, other = greedy_step(decoder, joint, encoded[:, t : t + 1], other, 4)
        assert found == expected
        assert waits == min(len(found) + 1, 4)
        assert later.item() > 0
        counts.add(len(found))
    assert mx.array_equal(state.h, other.h)
    assert min(counts) == 0 < max(counts)


def test_special_labels_are_waited_for() -> None:
    decoder, joint = networks(blank_bias=-1e6)
    everything = frozenset(range(CLASSES))
    found, _, waits = resolve(decoder, joint, propose(decoder, joint, frames(1), decoder.new_state()), 3, everything)
    assert (found, waits) == ([], 3)


def test_replaced_weights_are_followed() -> None:
    decoder, other = networks()[0], networks(seed=7)[0]
    labels = mx.array([[3, 0, 11]])
    decoder(labels)
    decoder.update(other.parameters())
    np.testing.assert_array_equal(np.array(decoder(labels)[0]), np.array(other(labels)[0]))


def test_without_blank_every_frame_has_the_most_symbols_allowed() -> None:
    decoder, joint = networks(blank_bias=-1e6)
    _, origins = greedy_decode(decoder, joint, frames(4), 10)
    assert origins == [t for t in range(4) for _ in range(10)]


def test_special_labels_count_and_steer_but_are_not_stored() -> None:
    decoder, joint = networks(blank_bias=-1e6)
    encoded = frames(4)
    labels, origins = greedy_decode(decoder, joint, encoded, 5)
    special = frozenset(labels[:1])
    kept = [(label, t) for label, t in zip(labels, origins, strict=True) if label not in special]
    found, found_origins = greedy_decode(decoder, joint, encoded, 5, special)
    assert list(zip(found, found_origins, strict=True)) == kept
    assert 0 < len(kept) < len(labels)


def test_a_run_of_blanks_predicts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, joint = networks(blank_bias=1e6)
    calls, step = [], RnntDecoder.step

    def counted(self: RnntDecoder, *args: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        calls.append(args)
        return step(self, *args)

    monkeypatch.setattr(RnntDecoder, "step", counted)
    assert greedy_decode(decoder, joint, frames(20), 10) == ([], [])
    assert len(calls) == 1


def test_nothing_is_predicted_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, joint = networks(blank_bias=-1e6)
    calls, step = [], RnntDecoder.step

    def counted(self: RnntDecoder, *args: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        calls.append(args)
        return step(self, *args)

    monkeypatch.setattr(RnntDecoder, "step", counted)
    greedy_decode(decoder, joint, frames(4), 3)
    assert len(calls) == 4 * 3


def test_no_frames_give_no_labels() -> None:
    assert greedy_decode(*networks(), mx.zeros((1, 0, DIM)), 10) == ([], [])


def test_the_lowest_of_equal_logits_wins() -> None:
    decoder, joint = networks()
    joint.joint_net[2].weight = mx.zeros_like(joint.joint_net[2].weight)
    joint.joint_net[2].bias = mx.array([0.0] * 4 + [1.0] * 4 + [0.0] * 4 + [1.0])
    assert greedy_decode(decoder, joint, frames(1), 2) == ([4, 4], [0, 0])


def test_a_logit_that_is_not_a_number_is_an_error() -> None:
    decoder, joint = networks()
    encoded = mx.concatenate([frames(2), mx.full((1, 1, DIM), mx.nan)], axis=1)
    with pytest.raises(ModelError, match="not a number"):
        greedy_decode(decoder, joint, encoded, 10)
    with pytest.raises(ModelError, match="not a number"):
        greedy_step(decoder, joint, encoded[:, 2:], decoder.new_state(), 10)
