"""Every stage of the codec against a golden folder, as one table of errors."""

from collections.abc import Callable, Iterable

import mlx.core as mx

from tests.conftest import Golden
from voicechat_core.nn.codec import Codec

PREFIX = "tts_model.audio_codec."

# Float32 rounding through ten or so layers, relative to the largest latent; measured 8e-7 to 1.2e-6.
LATENTS = 5e-6
# Samples, full scale 1.0: one step of PCM16. Phases of several radians under magnitudes of up to 100 make float32
# coarse here: NVIDIA's samples lie 5e-6 to 8e-6 from a float64 rendering, ours 4e-6 to 1e-5; the two 9e-6 to
# 1.4e-5 apart.
SAMPLES = 3e-5

TOLERANCES = {
    "latents": LATENTS, "codes": 0.0, "dequantized": 0.0, "decoded": SAMPLES, "stream_decoded": SAMPLES,
    "stream_decoded_flush": SAMPLES, "silence_codes_38": 0.0, "codec_silence_tokens": 0.0,
}  # fmt: skip


def build(golden: Golden) -> Codec:
    """The golden's codec."""
    module = golden.fill(Codec(golden.config.codec_config), PREFIX)
    assert isinstance(module, Codec)
    return module


def stream(codec: Codec, codes: mx.array, chunk_frames: int = 1, *, flush: bool = False) -> mx.array:
    """Codes ``[B, T, Q]`` through ``step``, a chunk at a time."""
    state, parts = codec.new_state(codes.shape[0]), []
    for start in range(0, codes.shape[1], chunk_frames):
        samples, state = codec.step(codes[:, start : start + chunk_frames], state)
        parts.append(samples)
    return mx.concatenate([*parts, codec.flush(state)] if flush else parts, axis=1)


def difference(ours: mx.array, theirs: mx.array) -> float:
    """Largest difference."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(mx.abs(ours - theirs).max())


def mismatches(ours: mx.array, theirs: mx.array) -> float:
    """Number of integers that differ."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    return float((ours != theirs).sum())


def stage_errors(codec: Codec, golden: Golden, stages: Iterable[str] = TOLERANCES) -> dict[str, float]:
    """By name of the golden tensor: relative for latents, of full scale for samples, a count for integers."""
    stage = golden.stage("codec")
    codes, samples = stage["decode_codes"], stage["wav"][:, 0]
    silence = mx.zeros((1, 38 * codec.frame_samples))
    scale = float(mx.abs(stage["latents"]).max())
    measures: dict[str, Callable[[mx.array], float]] = {
        "latents": lambda theirs: difference(codec.encode(samples), theirs) / scale,
        "codes": lambda theirs: mismatches(codec.quantize(codec.encode(samples)), theirs),
        "dequantized": lambda theirs: difference(codec.dequantize(codes), theirs),
        "decoded": lambda theirs: difference(codec.decode(codes), theirs[:, 0]),
        "stream_decoded": lambda theirs: difference(stream(codec, codes), theirs[:, 0]),
        "stream_decoded_flush": lambda theirs: difference(stream(codec, codes, flush=True), theirs[:, 0]),
        "silence_codes_38": lambda theirs: mismatches(codec.quantize(codec.encode(silence)), theirs),
        "codec_silence_tokens": lambda theirs: mismatches(codec.silence_codes(), theirs),
    }
    return {name: measures[name](stage[name]) for name in stages}
