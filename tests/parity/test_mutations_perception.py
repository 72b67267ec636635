"""Plausible wrong perceptions: each runs and has the right shape, and the goldens must tell it from the right one.

Several are found in other implementations. The first test of each group shows that the same comparison passes
without a mutation.
"""

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from voicechat_core.nn import conformer, mel, rnnt
from voicechat_core.nn.perception import Perception
from voicechat_core.nn.rnnt import Lstm, RnntDecoder, RnntJoint, RnntState, greedy_decode
from voicechat_core.nn.subsampling import ConvSubsampling, StridedConv, encoded_length

# Of the parity tests; a mutation must miss them tenfold.
TOLERANCE = 5e-6
RNNT_TOLERANCE = 2e-6

PREFIX = "stt_model.perception."

sinusoids = conformer.sinusoids


def error(found, expected):
    """Largest difference relative to the largest expected value."""
    assert found.shape == expected.shape
    return (mx.abs(found - expected).max() / mx.abs(expected).max()).item()


@pytest.fixture
def build(golden):
    """The golden's perception, its encoder config changed where a test wants a wrong one."""

    def made(**changes):
        audio = golden.config.audio_config
        encoder = msgspec.structs.replace(audio.encoder, **changes)
        return golden.fill(Perception(msgspec.structs.replace(audio, encoder=encoder)), PREFIX)

    return made


@pytest.fixture(scope="module")
def exact(golden):
    return golden.stage("perception_exact")


def clip_error(perception, stage):
    return error(perception(stage["wav"], nvidia_edges=True).encoded, stage["encoded"])


# ------------------------------------------------------------------------------------------- perception


def test_unchanged(build, exact):
    assert clip_error(build(), exact) <= TOLERANCE


def test_reflected_edges(build, exact, monkeypatch):
    def reflect(y, width):
        return mx.concatenate([y[:, width:0:-1], y, y[:, -2 : -width - 2 : -1]], axis=1)

    monkeypatch.setattr(mel, "pad_edges", reflect)
    perception = build()
    rows = perception.preprocessor(exact["wav"], mask_last=True)
    assert mx.abs(rows - exact["mel"].swapaxes(1, 2))[:, :2].max().item() > 0.1
    assert clip_error(perception, exact) > 10 * TOLERANCE
    # Also what a session hears: the first frames.
    encoded = perception.encoder(perception.preprocessor(exact["wav"]))
    assert error(encoded[:, :80], exact["encoded"][:, :80]) > 10 * TOLERANCE


def test_last_mel_row_kept(build, golden):
    """The tail unmasked and counted: the last frame differs, the others do not."""
    perception = build()
    for clip in ("exact", "odd"):
        stage = golden.stage(f"perception_{clip}")
        rows = perception.preprocessor(stage["wav"])
        encoded = perception.encoder(rows, rows.shape[1])
        assert error(encoded[:, -1], stage["encoded"][:, -1]) > 10 * TOLERANCE
        complete = stage["wav"].shape[1] // 1280
        assert error(encoded[:, :complete], stage["encoded"][:, :complete]) <= TOLERANCE


def test_padding_frame_not_hidden(build, golden):
    """A clip whose masked last mel row opens a frame of its own gives one frame more than NVIDIA counts."""
    perception, tape = build(), golden.stage("e2e_plain")
    rows = perception.preprocessor(tape["wav"], mask_last=True)
    length = rows.shape[1] - 1
    if encoded_length(rows.shape[1]) == encoded_length(length):
        pytest.skip("this folder's clip has no padding frame")
    assert error(perception.encoder(rows, length), tape["encoded"]) <= TOLERANCE
    x = perception.encoder.pre_encode(rows, length)
    heard = perception.encoder.heard(perception.encoder.new_heard(), x.shape[1])
    for layer in perception.encoder.layers:
        x, _ = layer(x, layer.new_state(), heard)
    for wrong in (x, perception.encoder(rows, rows.shape[1])):
        assert error(wrong[:, -1], tape["encoded"][:, -1]) > 10 * TOLERANCE
        assert error(wrong[:, :-1], tape["encoded"][:, :-1]) <= TOLERANCE


def test_zero_mel_rows_before_the_first(build, exact):
    """NVIDIA's cached stream: eight mel rows of zeros stand before row 0 when frame 1 is computed, and only then."""
    encoder, rows = build().encoder, exact["mel"].swapaxes(1, 2)
    subsample, frames, state = encoder.pre_encode, [], encoder.pre_encode.new_state()
    for t in range(80):
        at = slice(0, 1) if t == 0 else slice(8 * t - 7, 8 * t + 1)
        frame, state = subsample.step(rows[:, at], state)
        frames.append(frame)
    _, zeros = subsample.step(mx.zeros((1, 1, 128)), subsample.new_state())
    _, zeros = subsample.step(mx.pad(rows[:, :1], [(0, 0), (7, 0), (0, 0)]), zeros)
    frames[1], _ = subsample.step(rows[:, 1:9], zeros)
    x = mx.concatenate(frames, axis=1)
    heard = encoder.heard(encoder.new_heard(), x.shape[1])
    for layer in encoder.layers:
        x, _ = layer(x, layer.new_state(), heard)
    assert error(x[:, :1], exact["encoded"][:, :1]) <= TOLERANCE
    assert error(x[:, 1:2], exact["encoded"][:, 1:2]) > 10 * TOLERANCE
    # Attention and convolution carry it on.
    assert error(x[:, 2:], exact["encoded"][:, 2:80]) > 10 * TOLERANCE


def test_periodic_window(build, exact, monkeypatch):
    def periodic(length):
        return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)).astype(np.float32)

    monkeypatch.setattr(mel, "hann_window", periodic)
    assert clip_error(build(), exact) > 10 * TOLERANCE


@pytest.mark.parametrize("context", [69, 71])
def test_another_left_context(build, exact, context):
    perception = build(att_context_size=(context, 0))
    assert clip_error(perception, exact) > 10 * TOLERANCE
    few = min(context, 70) + 1  # so far nothing is out of sight, whichever it is
    assert error(perception(exact["wav"]).encoded[:, :few], exact["encoded"][:, :few]) <= TOLERANCE


def test_distances_counted_from_the_future(build, exact, monkeypatch):
    monkeypatch.setattr(conformer, "sinusoids", lambda positions, dim: sinusoids(-positions, dim))
    assert clip_error(build(), exact) > 10 * TOLERANCE


def test_sines_and_cosines_in_halves(build, exact, monkeypatch):
    def halves(positions, dim):
        table = sinusoids(positions, dim)
        return mx.concatenate([table[:, ::2], table[:, 1::2]], axis=1)

    monkeypatch.setattr(conformer, "sinusoids", halves)
    assert clip_error(build(), exact) > 10 * TOLERANCE


def test_biases_of_content_and_position_exchanged(build, exact):
    perception = build()
    for layer in perception.encoder.layers:
        attention = layer.self_attn
        attention.pos_bias_u, attention.pos_bias_v = attention.pos_bias_v, attention.pos_bias_u
    assert clip_error(perception, exact) > 10 * TOLERANCE


def test_bins_before_channels(build, exact, monkeypatch):
    monkeypatch.setattr(ConvSubsampling, "project", lambda self, x: self.out(x.flatten(2)))
    assert clip_error(build(), exact) > 10 * TOLERANCE


def test_padding_shifted_by_one(build, exact, monkeypatch):
    """One zero before and two after, on the frequency axis only."""

    def shifted(self, x):
        x = mx.pad(x, [(0, 0), (0, 0), (1, 2), (0, 0)])
        return mx.conv2d(x, self.weight, stride=2, groups=self._groups)

    monkeypatch.setattr(StridedConv, "filtered", shifted)
    assert clip_error(build(), exact) > 10 * TOLERANCE


# ------------------------------------------------------------------------------------------- transcript


@pytest.fixture
def transcript(golden):
    """What greedy decoding makes of both clips, and what NVIDIA's makes of them."""
    audio = golden.config.audio_config
    decoder = golden.fill(RnntDecoder(audio.decoder), "stt_model.rnnt_decoder.")
    joint = golden.fill(RnntJoint(audio.joint), "stt_model.rnnt_joint.")
    stages = [golden.stage(f"perception_{clip}") for clip in ("exact", "odd")]

    def compared(max_symbols=10, expected_of=10):
        found = [greedy_decode(decoder, joint, s["encoded"][:, : s["encoded_len"].item()], max_symbols) for s in stages]
        names = (f"rnnt_tokens_ms{expected_of}", f"rnnt_frames_ms{expected_of}")
        return found, [tuple(s[name].tolist() for name in names) for s in stages]

    return compared


@pytest.fixture
def predictor_error(golden):
    decoder = golden.fill(RnntDecoder(golden.config.audio_config.decoder), "stt_model.rnnt_decoder.")
    stage = golden.stage("rnnt")
    return lambda: error(decoder(stage["targets"])[0], stage["predictor"])


def test_transcript_unchanged(transcript, predictor_error):
    found, expected = transcript()
    assert found == expected
    assert predictor_error() <= RNNT_TOLERANCE


def test_another_symbol_limit(transcript):
    found, expected = transcript(max_symbols=9)
    assert found != expected
    found, expected = transcript(max_symbols=3, expected_of=2)
    assert found != expected


def test_blank_advances_the_state(transcript, monkeypatch):
    decode = rnnt._decode_frame

    def advancing(decoder, joint, frame, state, max_symbols, special):
        labels, state = decode(decoder, joint, frame, state, max_symbols, special)
        proposal = state.proposal
        return labels, RnntState(joint.blank, proposal.h, proposal.c) if proposal else state

    monkeypatch.setattr(rnnt, "_decode_frame", advancing)
    found, expected = transcript()
    assert found != expected


def test_state_forgotten_after_each_frame(transcript, monkeypatch):
    decode = rnnt._decode_frame

    def forgetful(decoder, joint, frame, state, max_symbols, special):
        return decode(decoder, joint, frame, decoder.new_state(), max_symbols, special)

    monkeypatch.setattr(rnnt, "_decode_frame", forgetful)
    found, expected = transcript()
    assert found != expected


def test_start_from_an_embedding(predictor_error, monkeypatch):
    step = RnntDecoder.step

    def embedded(self, label, h, c):
        return step(self, mx.zeros((h.shape[1],), mx.int32) if label is None else label, h, c)

    monkeypatch.setattr(RnntDecoder, "step", embedded)
    assert predictor_error() > 10 * RNNT_TOLERANCE


def test_gates_in_another_order(predictor_error, monkeypatch):
    gates = Lstm._gates

    def exchanged(self, layer, x, h):
        i, f, g, o = mx.split(gates(self, layer, x, h), 4, axis=-1)
        return mx.concatenate([i, f, o, g], axis=-1)

    monkeypatch.setattr(Lstm, "_gates", exchanged)
    assert predictor_error() > 10 * RNNT_TOLERANCE


def test_one_bias_only(predictor_error, monkeypatch):
    gates = Lstm._gates
    monkeypatch.setattr(Lstm, "_gates", lambda self, layer, x, h: gates(self, layer, x, h) - self[f"bias_hh_l{layer}"])
    assert predictor_error() > 10 * RNNT_TOLERANCE
