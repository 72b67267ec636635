"""Log-mel spectrogram: samples -> one row of 128 features every 10 ms.

The front end of NeMo's ``AudioToMelSpectrogramPreprocessor`` without dither and without normalisation:
pre-emphasis, zeros around the clip, a symmetric Hann window, power spectrum, Slaney's filterbank, logarithm.
Window and filterbank follow from the config; nothing here is read from a checkpoint.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from voicechat_core.config import PreprocessorConfig
from voicechat_core.errors import InputError

__all__ = ["LogMel", "MelState", "filterbank", "hann_window"]

# Added to the energies before the logarithm, so that digital silence is ln 2^-24 = -16.6 and not -inf.
GUARD = 2.0**-24

# Slaney's Auditory Toolbox (1998): linear below 1 kHz, where mel 15 lies, and 27 mels to each factor of 6.4 above.
HZ_PER_MEL = 200 / 3
KNEE_HZ = 1000.0
KNEE_MEL = KNEE_HZ / HZ_PER_MEL
LOG_STEP = np.log(6.4) / 27


def hann_window(length: int) -> NDArray[np.float32]:
    """The symmetric Hann window ``[length]``: both ends are zero.

    The phases are rounded to float32 as PyTorch's are; of its 400 values ten then differ, in the last bit.
    """
    phases = np.arange(length, dtype=np.float32) * np.float32(2 * np.pi / (length - 1))
    return (0.5 - 0.5 * np.cos(phases.astype(np.float64)).astype(np.float32)).astype(np.float32)


def hz_to_mel(hz: float) -> float:
    """Slaney's mel scale."""
    return hz / HZ_PER_MEL if hz < KNEE_HZ else KNEE_MEL + float(np.log(hz / KNEE_HZ)) / LOG_STEP


def mel_to_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of ``hz_to_mel``."""
    return np.where(mel < KNEE_MEL, mel * HZ_PER_MEL, KNEE_HZ * np.exp(LOG_STEP * (mel - KNEE_MEL)))


def filterbank(config: PreprocessorConfig) -> NDArray[np.float32]:
    """Triangular mel filters of equal area ``[features, n_fft // 2 + 1]``, from 0 Hz to half the sample rate.

    Rounded to float32 before and after the area normalisation, as librosa does, so that the values are librosa's.
    """
    nyquist = config.sample_rate / 2
    bins = np.linspace(0, nyquist, config.n_fft // 2 + 1)
    edges = mel_to_hz(np.linspace(hz_to_mel(0.0), hz_to_mel(nyquist), config.features + 2))
    low, centre, high = (edges[i : i + config.features, None] for i in range(3))
    triangles = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre))
    weights = np.maximum(0, triangles).astype(np.float32)
    return (weights * (2.0 / (high - low))).astype(np.float32)


def preemphasize(samples: mx.array, coefficient: float) -> mx.array:
    """``x[n] - coefficient * x[n - 1]`` for all samples but the first: ``[B, S + 1] -> [B, S]``."""
    return samples[:, 1:] - coefficient * samples[:, :-1]


def pad_edges(emphasized: mx.array, width: int) -> mx.array:
    """Zeros on both ends of a whole clip ``[B, S] -> [B, S + 2 * width]``, as NVIDIA pads; not a reflection."""
    return mx.pad(emphasized, [(0, 0), (width, width)])


@dataclass
class MelState:
    """The raw samples ``[B, n]`` that the next row's transform still reads, with one more for the pre-emphasis."""

    tail: mx.array


class LogMel(nn.Module):
    """Samples ``[B, S]`` in [-1, 1] -> log-mel energies ``[B, T, features]``, always float32.

    Row i is centred on sample ``hop * i`` and depends on the ``lookahead`` samples on either side only.
    """

    def __init__(self, config: PreprocessorConfig) -> None:
        super().__init__()
        self.hop = config.hop_samples
        self.lookahead = config.window_samples // 2
        self._n_fft = config.n_fft
        self._preemphasis = config.preemph
        # At the end of the transform's samples: where the window lies changes phases only, and those are dropped.
        self._before = config.n_fft - config.window_samples
        self._window = mx.array(np.pad(hann_window(config.window_samples), (self._before, 0)))
        self._filterbank = mx.array(filterbank(config).T)

    def __call__(self, samples: mx.array, *, mask_last: bool = False) -> mx.array:
        """A whole clip: ``S // hop + 1`` rows. ``mask_last`` sets the last one to 0.0, as NVIDIA does."""
        samples = mx.pad(samples.astype(mx.float32), [(0, 0), (1, 0)])
        emphasized = pad_edges(preemphasize(samples, self._preemphasis), self.lookahead)
        mel = self._rows(mx.pad(emphasized, [(0, 0), (self._before, 0)]))
        if mask_last:
            mel = mx.pad(mel[:, :-1], [(0, 0), (0, 1), (0, 0)])
        return mel

    def new_state(self, batch: int = 1) -> MelState:
        """Before the first sample there is silence, up to the left edge of row 0 and one sample more."""
        return MelState(mx.zeros((batch, self._before + self.lookahead + 1)))

    def step(self, samples: mx.array, state: MelState) -> tuple[mx.array, MelState]:
        """The rows that become due with these samples: row i with sample ``hop * i + lookahead - 1``.

        Encoder frame 0 takes one row, that of the first ``lookahead`` samples; each later frame takes eight,
        those of the next 1280. A caller that keeps to these groups gets the same bits whatever it was fed in.
        Raises ``InputError`` for a number of samples that does not end with a row.
        """
        count, samples = samples.shape[1], mx.concatenate([state.tail, samples.astype(mx.float32)], axis=1)
        if count == 0 or (samples.shape[1] - self._window.size - 1) % self.hop:
            raise InputError(f"{count} samples: {self.lookahead} and whole rows of {self.hop} first, then whole rows")
        mel = self._rows(preemphasize(samples, self._preemphasis))
        return mel, MelState(samples[:, self.hop * mel.shape[1] :])

    def _rows(self, emphasized: mx.array) -> mx.array:
        """Every whole window of ``[B, S]``, one each ``hop`` samples."""
        batch, samples = emphasized.shape
        rows = max(0, (samples - self._n_fft) // self.hop + 1)
        windows = mx.as_strided(emphasized, (batch, rows, self._n_fft), (samples, self.hop, 1)) * self._window
        spectrum = mx.fft.rfft(windows)
        power = mx.square(spectrum.real) + mx.square(spectrum.imag)
        return mx.log(power @ self._filterbank + GUARD)
