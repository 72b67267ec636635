"""Sound with the habits of speech: gliding harmonics, pauses, a little noise."""

import numpy as np
import torch


def speech_like(n_samples: int, rate_hz: int, rng: np.random.Generator) -> torch.Tensor:
    """``[1, n_samples]`` float32, peaks near 0.35."""
    t = np.arange(n_samples) / rate_hz
    pitch_hz = 120 + 40 * np.sin(2 * np.pi * 0.7 * t + rng.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch_hz) / rate_hz
    voice = sum(rng.uniform(0.2, 1) / k * np.sin(k * phase + rng.uniform(0, 6)) for k in range(1, 25))
    voice *= np.clip(np.sin(2 * np.pi * 1.3 * t + rng.uniform(0, 6)) + 0.3, 0, 1)
    loudest = np.abs(voice).max() or 1.0  # a short clip may fall into a pause altogether
    sound = 0.35 * voice / loudest + 0.003 * rng.standard_normal(n_samples)
    return torch.from_numpy(sound.astype(np.float32))[None]


def normal(shape: tuple[int, ...], rng: np.random.Generator, scale: float = 1.0) -> torch.Tensor:
    """Normal float32 numbers."""
    return torch.from_numpy(scale * rng.standard_normal(shape).astype(np.float32))


def integers(low: int, high: int, shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Integers of [low, high)."""
    return torch.from_numpy(rng.integers(low, high, shape))
