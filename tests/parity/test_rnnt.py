"""The transcript branch against NVIDIA's: prediction network, joint network, greedy decoding."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from voicechat_core.nn.rnnt import RnntDecoder, RnntJoint, greedy_decode, greedy_step

# Float32 rounding relative to the largest value: at most 3.5e-7 measured.
TOLERANCE = 2e-6


def error(found, expected):
    """Largest difference relative to the largest expected value."""
    assert found.shape == expected.shape
    return (mx.abs(found - expected).max() / mx.abs(expected).max()).item()


@pytest.fixture(scope="module")
def decoder(golden):
    return golden.fill(RnntDecoder(golden.config.audio_config.decoder), "stt_model.rnnt_decoder.")


@pytest.fixture(scope="module")
def joint(golden):
    return golden.fill(RnntJoint(golden.config.audio_config.joint), "stt_model.rnnt_joint.")


@pytest.fixture(scope="module", params=["exact", "odd"])
def clip(golden, request):
    return golden.stage(f"perception_{request.param}")


def test_parameters_are_those_of_the_checkpoint(golden, decoder, joint):
    for module, prefix in ((decoder, "stt_model.rnnt_decoder."), (joint, "stt_model.rnnt_joint.")):
        ours = {prefix + name for name, _ in tree_flatten(module.parameters())}
        assert ours == {name for name in golden.weights if name.startswith(prefix)}


def test_prediction_network(golden, decoder):
    stage = golden.stage("rnnt")
    predicted, (h, c) = decoder(stage["targets"])
    assert error(predicted, stage["predictor"]) <= TOLERANCE
    assert error(h, stage["state_h"]) <= TOLERANCE
    assert error(c, stage["state_c"]) <= TOLERANCE


def test_joint_network(golden, joint):
    stage = golden.stage("rnnt")
    logits = joint(golden.stage("perception_exact")["encoded"][:, :6], stage["predictor"])
    # NVIDIA's joint normalises its logits on a CPU.
    log_probabilities = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert error(log_probabilities, stage["joint_logprobs"]) <= TOLERANCE


@pytest.mark.parametrize("max_symbols", [2, 10])
def test_greedy_labels_and_their_frames(decoder, joint, clip, max_symbols):
    encoded = clip["encoded"][:, : clip["encoded_len"].item()]
    labels, frames = greedy_decode(decoder, joint, encoded, max_symbols)
    assert labels == clip[f"rnnt_tokens_ms{max_symbols}"].tolist()
    assert frames == clip[f"rnnt_frames_ms{max_symbols}"].tolist()


def test_greedy_labels_frame_by_frame(decoder, joint, clip):
    state, labels, frames = decoder.new_state(), [], []
    for t in range(clip["encoded_len"].item()):
        found, state = greedy_step(decoder, joint, clip["encoded"][:, t : t + 1], state, 10)
        labels += found
        frames += [t] * len(found)
    assert labels == clip["rnnt_tokens_ms10"].tolist()
    assert frames == clip["rnnt_frames_ms10"].tolist()


def test_transcript_of_the_whole_loop(golden, decoder, joint):
    tape = golden.stage("e2e_plain")
    encoded = tape["encoded"][:, : tape["encoded_len"].item()]
    labels, frames = greedy_decode(decoder, joint, encoded, golden.config.audio_config.max_symbols)
    assert labels == tape["rnnt_tokens"].tolist()
    assert frames == tape["rnnt_frames"].tolist()
