"""How far a waveform is from the one it should be: magnitudes and log-mels at six resolutions.

A spectrum is a frame matrix times a constant matrix, in float32: an FFT would be as exact, but its complex results need
more kernels before and after. With TF32 the quiet upper bands would drown in rounding, so training runs without.
"""

from functools import lru_cache
from typing import cast

import mlx.core as mx
import numpy as np

from training.codec.framing import frames
from voicechat_core.nn.mel import hz_to_mel, mel_to_hz
from voicechat_core.nn.stft import forward_dft, hann

__all__ = ["log_mel_distance", "means", "number", "reconstruction", "spectrum"]

# Window, hop, mel bands.
RESOLUTIONS = ((64, 16, 10), (128, 32, 20), (256, 64, 40), (512, 128, 80), (1024, 256, 80), (2048, 512, 128))
REPORTED = (1024, 256, 80)
FLOOR = 1e-4  # of a band's magnitude, times the square root of the window
REPORTED_FLOOR = 1e-5
TINY = 1e-8


@lru_cache
def _analysis(size: int) -> mx.array:
    """A windowed DFT ``[size, 2 * bins]``: real parts, then imaginary ones."""
    return mx.array(hann(size)[:, None] * forward_dft(size), mx.float32)


@lru_cache
def _bands(size: int, bands: int, rate: int) -> mx.array:
    """Slaney's triangles ``[bins, bands]``, each summing to one over the floor; a band narrower than a bin has none."""
    return mx.array(_triangles(size, bands, rate)[0].T / (FLOOR * size**0.5), mx.float32)


@lru_cache
def _areas(size: int, bands: int, rate: int) -> mx.array:
    """The same with equal areas over the frequency, as they are usually reported."""
    unit, sums, widths = _triangles(size, bands, rate)
    return mx.array((unit * sums * (2 / widths)).T, mx.float32)


def _triangles(size: int, bands: int, rate: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Triangles ``[bands, bins]`` of sum one, their sums with a peak of one, and their widths in hertz."""
    bins = np.linspace(0, rate / 2, size // 2 + 1)
    edges = mel_to_hz(np.linspace(hz_to_mel(0.0), hz_to_mel(rate / 2), bands + 2))
    low, centre, high = (edges[i : i + bands, None] for i in range(3))
    peaks = np.maximum(0, np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)))
    sums = peaks.sum(1, keepdims=True)
    return peaks / np.maximum(sums, 1e-9), sums, high - low


def spectrum(samples: mx.array, size: int, hop: int) -> tuple[mx.array, mx.array]:
    """Real and imaginary parts ``[B, 1 + S // hop, bins]`` of ``[B, S]``; zeros before and after, frames centred."""
    length = samples.shape[1]
    padded = mx.pad(samples, [(0, 0), (size // 2, size // 2 - length % hop)])
    product = frames(padded, size, hop) @ _analysis(size)
    real, imaginary = mx.split(product, 2, axis=2)
    return real, imaginary


def _magnitude(samples: mx.array, size: int, hop: int) -> mx.array:
    real, imaginary = spectrum(samples, size, hop)
    return mx.sqrt(mx.square(real) + mx.square(imaginary) + TINY)


def means(values: list[mx.array]) -> mx.array:
    """The mean of each array, float32 ``[n]``.

    Sums times one vector: a constant of its own for each mean would make as many kernels to compile, forth and back.
    """
    scales = mx.array([1 / value.size for value in values], mx.float32)
    return mx.stack([value.astype(mx.float32).sum() for value in values]) * scales


def reconstruction(made: mx.array, wanted: mx.array, rate: int) -> mx.array:
    """A scalar for two batches ``[B, S]``: log-mel distance and three tenths of the relative magnitudes', averaged."""
    logs, apart, level = [], [], []
    for size, hop, bands in RESOLUTIONS:
        a, b = _magnitude(made, size, hop), mx.stop_gradient(_magnitude(wanted, size, hop))
        triangles = _bands(size, bands, rate)
        logs.append(mx.abs(mx.log(mx.maximum(a @ triangles, 1.0)) - mx.log(mx.maximum(b @ triangles, 1.0))))
        apart.append(mx.abs(a - b))
        level.append(b)
    return (means(logs) + 0.3 * means(apart) / (means(level) + 1e-3)).mean()


def log_mel_distance(made: mx.array, wanted: mx.array, rate: int) -> float:
    """The figure that is reported: mean absolute difference of 80 log-mels (natural logarithm)."""
    size, hop, bands = REPORTED
    areas = _areas(size, bands, rate)
    logs = [mx.log(mx.maximum(_magnitude(x, size, hop) @ areas, REPORTED_FLOOR)) for x in (made, wanted)]
    return number(mx.abs(logs[0] - logs[1]).mean())


def number(value: mx.array) -> float:
    """A scalar's value; waits for it."""
    return cast(float, value.item())
