"""What a room, a microphone and a line do to speech, drawn anew for every window inside the training step.

Draws from ``mx.random``; nothing of it is served.
"""

import math

import mlx.core as mx

__all__ = ["hide_parts", "in_a_room"]

TAPS = 9
GAIN = (-2.2, 0.6)  # natural logarithms: -19 to +5 dB
NOISE = (-9.5, -4.7)  # -83 to -41 dB of full scale
SILENT, BURSTING, HUMMING = 0.12, 0.3, 0.2  # shares of windows: no noise at all, noise in bursts, a tone
BURST, LOUDER = 0.03, 3.0  # share of frames, and how much louder at most (logarithm)
RATE = 16000
ECHOING, ECHOES, FARTHEST = 0.4, 2, 900.0  # share of windows, echoes of each, samples of delay at most
BANDS, WIDEST_BAND = 2, 14.0  # mel bins
GAPS, WIDEST_GAP = 2, 14.0  # mel rows


def in_a_room(x: mx.array) -> mx.array:
    """Windows ``[B, T, S]`` of T frames -> ``[B, T * S]``: filtered, with echoes, louder or softer, noise and tones."""
    batch, frames, width = x.shape
    total = frames * width
    taps = 0.12 * mx.random.normal((batch, TAPS)) * _uniform(batch, 0, 1) + (mx.arange(TAPS) == TAPS // 2)
    speech = _echoed(_filtered(x.reshape(batch, total), taps)) * mx.exp(_uniform(batch, *GAIN))
    color = _uniform(batch, 0.3, 1) * (mx.arange(TAPS) == TAPS // 2) + _uniform(batch, 0, 4) / TAPS
    noise = _filtered(mx.random.normal((batch, total)), color).reshape(x.shape)
    level = mx.exp(_uniform(batch, *NOISE)) * (_uniform(batch, 0, 1) >= SILENT)
    bursts = (mx.random.uniform(shape=(batch, frames)) < BURST) & (_uniform(batch, 0, 1) < BURSTING)
    loudness = level * mx.exp(bursts * mx.random.uniform(high=LOUDER, shape=(batch, frames)))
    noise = (noise * loudness[..., None]).reshape(batch, total)
    return speech + noise + _tone(batch, total) * level


def hide_parts(mel: mx.array) -> mx.array:
    """Some bands and moments of ``[B, R, F]`` set to the window's mean (SpecAugment, Park et al. 2019)."""
    batch, rows, bins = mel.shape
    hidden = mx.zeros((batch, 1, 1), mx.bool_)
    for _ in range(BANDS):
        hidden = hidden | _stretch(batch, bins, WIDEST_BAND)[:, None]
    for _ in range(GAPS * rows // 1000 + 1):  # as many a second, however long the window
        hidden = hidden | _stretch(batch, rows, WIDEST_GAP)[:, :, None]
    return mx.where(hidden, mel.mean(axis=(1, 2), keepdims=True), mel)


def _stretch(batch: int, length: int, widest: float) -> mx.array:
    """One stretch for each window: ``[B, length]``, true inside."""
    first, place = _uniform(batch, 0, length), mx.arange(length)
    return (place >= first) & (place < first + _uniform(batch, 0, widest))


def _echoed(x: mx.array) -> mx.array:
    """``[B, N]`` and a few weaker copies of it, a little later, in some windows."""
    batch, length = x.shape
    is_echoing = _uniform(batch, 0, 1) < ECHOING
    total = x
    for _ in range(ECHOES):
        delay = _uniform(batch, 30, FARTHEST)
        loudness = _uniform(batch, 0.1, 0.6) * mx.exp(-2 * delay / FARTHEST) * is_echoing
        at = mx.arange(length) - delay.astype(mx.int32)
        total = total + loudness * mx.where(at >= 0, mx.take_along_axis(x, mx.maximum(at, 0), axis=1), 0.0)
    return total


def _tone(batch: int, total: int) -> mx.array:
    """A steady tone of 40 Hz to 4 kHz in some of the windows, as loud as noise."""
    hertz = mx.exp(_uniform(batch, math.log(40), math.log(4000)))
    cycles = (hertz / RATE) * mx.arange(total)
    is_humming = _uniform(batch, 0, 1) < HUMMING
    return mx.sin(2 * math.pi * (cycles - mx.floor(cycles))) * is_humming


def _filtered(x: mx.array, taps: mx.array) -> mx.array:
    """``[B, N]`` under a filter of its own a row ``[B, TAPS]``, centred."""
    wide, length = mx.pad(x, [(0, 0), (TAPS // 2, TAPS // 2)]), x.shape[1]
    total = wide[:, :length] * taps[:, :1]
    for tap in range(1, TAPS):
        total = total + wide[:, tap : tap + length] * taps[:, tap : tap + 1]
    return total


def _uniform(batch: int, low: float, high: float) -> mx.array:
    """One number for each window: ``[B, 1]``."""
    return mx.random.uniform(low, high, (batch, 1))
