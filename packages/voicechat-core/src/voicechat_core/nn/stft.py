"""The codec's short-time spectra: waveform to real and imaginary parts, and magnitude and phase to waveform.

With the published window of 16 and hop of 4 there are 9 bins, 18 real channels. Sizes this small are one matmul with a
constant matrix, float32 on every backend. The window is a periodic Hann. Column s covers the raw samples ``[s * hop,
s * hop + n_fft)``; the waveform proper starts ``edge`` = (n_fft - hop) / 2 = 6 raw samples later.

A stream keeps the columns that may still overlap with new ones and so runs ``lead`` = 8 samples late, the edge in
whole hops: ``stream[n] = whole[n - 8]``. Every sample it emits lies where all columns overlap.
"""

import math

import mlx.core as mx
import numpy as np

__all__ = ["Stft"]

# The decoder's magnitudes stay below this (RVQVAEModel in NVIDIA NeMo).
MAX_MAGNITUDE = 100.0


def hann(size: int) -> np.ndarray:
    """The periodic Hann window ``[size]``."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / size)


def forward_dft(size: int) -> np.ndarray:
    """``[size, 2 * bins]``: the real parts of a DFT, then the imaginary ones."""
    angles = 2 * np.pi * np.outer(np.arange(size), np.arange(size // 2 + 1)) / size
    return np.concatenate([np.cos(angles), -np.sin(angles)], axis=1)


def inverse_dft(size: int) -> np.ndarray:
    """``[2 * bins, size]``: real, then imaginary parts to samples. The first and last imaginary parts do not count."""
    bins = size // 2 + 1
    angles = 2 * np.pi * np.outer(np.arange(bins), np.arange(size)) / size
    scale = np.full((bins, 1), 2 / size)
    scale[[0, -1]] = 1 / size
    sines = -scale * np.sin(angles)
    sines[[0, -1]] = 0  # else sin(pi * n) would leave 1e-17 of the Nyquist's
    return np.concatenate([scale * np.cos(angles), sines])


def pad_edges(samples: mx.array, edge: int) -> mx.array:
    """``edge`` zeros at either end of ``[B, S]``."""
    return mx.pad(samples, [(0, 0), (edge, edge)])


def magnitude(logits: mx.array) -> mx.array:
    """``exp`` with a soft limit: ``100 * exp(-softplus(ln 100 - x))``, which is a scaled sigmoid."""
    return MAX_MAGNITUDE * mx.sigmoid(logits - math.log(MAX_MAGNITUDE))


def window_columns(columns: mx.array, window: mx.array) -> mx.array:
    """Clamp ``[B, S, n_fft]`` to the window and multiply by it: overlapped, they cannot exceed the window's squares."""
    return mx.clip(columns, -window, window) * window


def overlap_add(columns: mx.array, hop: int) -> mx.array:
    """``[B, S, n_fft]`` laid ``hop`` apart and summed: ``[B, (S - 1) * hop + n_fft]``."""
    batch, count, size = columns.shape
    shifts = size // hop
    total = mx.zeros((batch, count + shifts - 1, hop))
    for j in range(shifts):
        part = columns[:, :, j * hop : (j + 1) * hop]
        total = total + mx.pad(part, [(0, 0), (j, shifts - 1 - j), (0, 0)])
    return total.reshape(batch, -1)


def full_overlap(columns: mx.array, hop: int) -> mx.array:
    """The hops of ``overlap_add`` that all columns overlap, ``[B, S - n_fft / hop + 1, hop]``, in one operation."""
    shifts, count = columns.shape[2] // hop, columns.shape[1]
    parts = [columns[:, shifts - 1 - j : count - j, j * hop : (j + 1) * hop] for j in range(shifts)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def crop(raw: mx.array, ends: int) -> mx.array:
    """``[B, R]`` without ``ends`` samples at either end."""
    return raw[:, ends : raw.shape[1] - ends]


class Stft:
    """One window and hop, and both directions. No weights; what a stream keeps is outside."""

    def __init__(self, n_fft: int, hop: int) -> None:
        self.n_fft, self.hop = n_fft, hop
        self.edge = (n_fft - hop) // 2
        self.lead = -(-self.edge // hop) * hop
        window = hann(n_fft)
        self._window = mx.array(window, mx.float32)
        self._analysis = mx.array(window[:, None] * forward_dft(n_fft), mx.float32)
        self._synthesis = mx.array(inverse_dft(n_fft), mx.float32)
        self._envelope = float(np.square(window)[::hop].sum())  # where all columns overlap: 1.5

    def analyse(self, samples: mx.array) -> mx.array:
        """``[B, S]`` to spectra ``[B, S / hop, 2 * bins]``: real parts, then imaginary parts, nothing scaled."""
        hops = pad_edges(samples, self.edge).reshape(samples.shape[0], -1, self.hop)
        count = samples.shape[1] // self.hop
        columns = [hops[:, j : j + count] for j in range(self.n_fft // self.hop)]
        return mx.concatenate(columns, axis=2) @ self._analysis

    def synthesise(self, channels: mx.array) -> mx.array:
        """Magnitude logits and phases ``[B, S, 2 * bins]`` to windowed columns ``[B, S, n_fft]``."""
        logits, phase = mx.split(channels, 2, axis=2)
        size = magnitude(logits)
        spectrum = mx.concatenate([size * mx.cos(phase), size * mx.sin(phase)], axis=2)
        return window_columns(spectrum @ self._synthesis, self._window)

    def silent_columns(self, batch: int, samples: int) -> mx.array:
        """Columns of zeros, ``samples`` long."""
        return mx.zeros((batch, samples // self.hop, self.n_fft))

    def new_kept(self, batch: int = 1) -> mx.array:
        """The columns ``[B, 4, n_fft]`` that a stream keeps, before its first: silence on either side of the lead."""
        return self.silent_columns(batch, 2 * self.lead)

    def stream(self, columns: mx.array, kept: mx.array) -> tuple[mx.array, mx.array]:
        """New columns ``[B, S, n_fft]`` to the samples ``[B, S * hop]`` that are now complete, and what is kept."""
        columns = mx.concatenate([kept, columns], axis=1)
        # A slice keeps a frame's columns alive, 28 kB, and saves a copy.
        return self._complete(columns), columns[:, -kept.shape[1] :]

    def flush(self, kept: mx.array) -> mx.array:
        """The last ``lead`` samples ``[B, 8]`` of a stream that ends here, as if silence followed."""
        return self._complete(mx.concatenate([kept, self.silent_columns(kept.shape[0], self.lead)], axis=1))

    def tail(self, kept: mx.array) -> mx.array:
        """The last ``lead`` samples ``[B, 8]`` of a stream that ends here, as the end of a whole inverse has them.

        Where fewer columns overlap, ``flush`` divides by the full envelope all the same, as NVIDIA's stream does.
        """
        samples, edge = self.flush(kept), self.edge
        return mx.concatenate([samples[:, :-edge], samples[:, -edge:] * self._edge_gain()[:, -edge:]], axis=1)

    def _complete(self, columns: mx.array) -> mx.array:
        """``[B, S, n_fft]`` to the samples that all columns overlap, without what a stream has no use for."""
        hops = full_overlap(columns, self.hop) / self._envelope
        # They begin ``n_fft - hop`` = 2 ``edge`` raw samples in; a stream begins at ``edge + lead``.
        return crop(hops.reshape(columns.shape[0], -1), self.lead - self.edge)

    def whole(self, stream: mx.array) -> mx.array:
        """A flushed stream ``[B, S + 8]`` to the waveform ``[B, S]`` of a whole inverse: no lead, and its own two ends.

        A whole inverse divides the first and last ``edge`` samples by the smaller envelope they have.
        """
        samples, edge = stream[:, self.lead :], self.edge
        gain = self._edge_gain()
        first, last = samples[:, :edge] * gain[:, :edge], samples[:, -edge:] * gain[:, -edge:]
        return mx.concatenate([first, samples[:, edge:-edge], last], axis=1)

    def _edge_gain(self) -> mx.array:
        """The full envelope over the one at either end of a whole inverse, ``[1, n]``; only its ends differ from 1."""
        squares = mx.broadcast_to(mx.square(self._window), (1, self.n_fft, self.n_fft))
        return self._envelope / crop(overlap_add(squares, self.hop), self.edge)
