"""What the stages run on: sound, text and codes that are drawn, or questions from WAVs."""

from math import prod

import numpy as np
import soundfile
import soxr
import torch

from . import signals
from .settings import (
    BOS,
    CODEC_HOP,
    CODEC_RATES,
    EOS,
    FRAME_SAMPLES,
    PAD,
    ROOT,
    SOURCE_RATE_HZ,
    TARGET_RATE_HZ,
    Settings,
)

CODEC_FRAME_SAMPLES = prod(CODEC_RATES) * CODEC_HOP


def drawn_sound(settings: Settings, name: str) -> torch.Tensor:
    """``[1, samples]``: ``exact`` ends on a frame and outlasts the encoder's left context, the others do not."""
    inputs = settings.inputs
    stream, samples = {
        "exact": ("perception_exact", inputs["exact_frames"] * FRAME_SAMPLES),
        "odd": ("perception_odd", inputs["odd_samples"]),
        "clip": ("clip", inputs["clip_samples"]),
    }[name]
    return signals.speech_like(samples, SOURCE_RATE_HZ, settings.inputs_for(stream))


def drawn_text(settings: Settings, vocab_size: int) -> torch.Tensor:
    """``[steps]``: BOS, words with pads between, EOS, pads, words."""
    ids = signals.integers(3, vocab_size, (settings.inputs["tts_steps"],), settings.inputs_for("tts"))
    ids[[3, 11]] = PAD
    ids[0], ids[15], ids[16:20] = BOS, EOS, PAD
    return ids


def drawn_for_codec(settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """``[1, 1, samples]`` to encode and ``[1, frames, levels]`` to decode."""
    frames, rng = settings.inputs["codec_frames"], settings.inputs_for("codec")
    wav = signals.speech_like(CODEC_FRAME_SAMPLES * frames, TARGET_RATE_HZ, rng)[None]
    sizes = (1, frames, settings.tts["num_quantizers"])
    return wav, signals.integers(0, settings.tts["codebook_size"], sizes, rng)


def question(settings: Settings, name: str) -> torch.Tensor:
    """``[1, samples]`` of a recording as it is."""
    samples, rate_hz = soundfile.read(ROOT / settings.recordings[name], dtype="float32")
    if rate_hz != SOURCE_RATE_HZ or samples.ndim != 1:
        raise SystemExit(f"{settings.recordings[name]}: {rate_hz} Hz, shape {samples.shape}; mono at 16000 is needed")
    return torch.from_numpy(samples)[None]


def conversation(settings: Settings, name: str) -> torch.Tensor:
    """It with silence behind it: as many whole frames as a clip has."""
    asked, samples = question(settings, name), settings.inputs["clip_frames"] * FRAME_SAMPLES
    if asked.shape[1] > samples:
        raise SystemExit(f"{settings.recordings[name]}: {asked.shape[1]} samples; clip_frames holds {samples}")
    return torch.nn.functional.pad(asked, (0, samples - asked.shape[1]))


def answer(text: torch.Tensor, steps: int) -> slice:
    """So many positions of ``[positions]`` text ids from the one before the first BOS on; the last ones without any."""
    turns = (text == BOS).nonzero().flatten().tolist()
    latest = len(text) - steps
    first = max(0, min(turns[0] - 1, latest)) if turns else latest
    return slice(first, first + steps)


def loudest(sound: torch.Tensor, frames: int) -> torch.Tensor:
    """``[1, 1, samples]`` at the codec's rate: the loudest ``frames`` of ``[1, samples]``."""
    heard = soxr.resample(sound[0].numpy(), SOURCE_RATE_HZ, TARGET_RATE_HZ).astype(np.float32)
    whole = heard[: len(heard) // CODEC_FRAME_SAMPLES * CODEC_FRAME_SAMPLES].reshape(-1, CODEC_FRAME_SAMPLES)
    energy = np.convolve(np.square(whole, dtype=np.float64).sum(1), np.ones(frames), "valid")
    first = int(energy.argmax())
    return torch.from_numpy(whole[first : first + frames].reshape(1, 1, -1).copy())
