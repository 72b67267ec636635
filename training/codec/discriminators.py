"""Judges that learn to tell made speech from real: three look at spectra, four at every 2nd, 3rd, 5th and 7th sample.

Only for training. They compute in the dtype of their weights (bfloat16 on a GPU, where cuDNN's float32 convolutions use
no tensor cores); their input's spectra are float32. In memory an image is ``[B, height, width, channels]``; tensor
cores want channels in eights, so an image has some of zeros, and a judge gives eight scores at each place.
"""

import mlx.core as mx
import mlx.nn as nn

from training.codec.losses import means, spectrum

__all__ = ["Judges", "judge_terms", "made_terms"]

SPECTRA = ((1024, 256), (512, 128), (256, 64))
PERIODS = (2, 3, 5, 7)
# Kernel and stride over frequency and time, of all layers but the last, which gives the scores.
SPECTRAL_LAYERS = (((3, 9), 1), ((9, 3), 2), ((9, 3), 2), ((9, 3), 2), ((3, 3), 1))
PERIODIC_LAYERS = ((1, 3), (2, 3), (4, 3), (4, 1))  # channels, stride over time

EIGHT = 8

Features = list[mx.array]


class Judge(nn.Module):
    """Convolutions over an image with leaky rectifiers between; gives the scores and what each layer found."""

    def __init__(self, layers: list[nn.Conv2d]) -> None:
        super().__init__()
        self.layers = layers

    def judge(self, image: mx.array) -> tuple[mx.array, Features]:
        """Scores, and every layer's output but the last's."""
        x = image.astype(self.layers[0].weight.dtype)
        x = mx.pad(x, [(0, 0), (0, 0), (0, 0), (0, EIGHT - x.shape[3])])
        found = []
        for layer in self.layers[:-1]:
            x = layer(x)
            x = mx.maximum(x, 0.1 * x)
            found.append(x)
        return self.layers[-1](x), found

    def __call__(self, samples: mx.array) -> tuple[mx.array, Features]:
        """Judge ``[B, S]``."""
        return self.judge(self.image(samples))

    def image(self, samples: mx.array) -> mx.array:
        """What it looks at."""
        raise NotImplementedError


class SpectralJudge(Judge):
    """Looks at real and imaginary parts, their magnitude's root taken."""

    def __init__(self, size: int, hop: int, channels: int) -> None:
        layers, before = [], EIGHT
        for (high, wide), stride in SPECTRAL_LAYERS:
            padding = (high // 2, wide // 2)
            layers.append(nn.Conv2d(before, channels, (high, wide), (stride, 1), padding))
            before = channels
        super().__init__([*layers, nn.Conv2d(channels, EIGHT, (3, 3), 1, (1, 1))])
        self._size, self._hop = size, hop

    def image(self, samples: mx.array) -> mx.array:
        """``[B, S]`` to ``[B, bins, frames, 2]``."""
        real, imaginary = spectrum(samples, self._size, self._hop)
        root = (mx.square(real) + mx.square(imaginary) + 1e-6) ** -0.25
        return mx.stack([real * root, imaginary * root], axis=-1).swapaxes(1, 2)


class PeriodicJudge(Judge):
    """Looks at the samples laid out in rows of one period; its kernels run along the columns."""

    def __init__(self, period: int, channels: int) -> None:
        layers, before = [], EIGHT
        for factor, stride in PERIODIC_LAYERS:
            layers.append(nn.Conv2d(before, factor * channels, (5, 1), (stride, 1), (2, 0)))
            before = factor * channels
        super().__init__([*layers, nn.Conv2d(before, EIGHT, (5, 1), 1, (2, 0))])
        self._period = period

    def image(self, samples: mx.array) -> mx.array:
        """``[B, S]`` to ``[B, S / period, period, 1]``; zeros fill the last row."""
        padded = mx.pad(samples, [(0, 0), (0, -samples.shape[1] % self._period)])
        return padded.reshape(samples.shape[0], -1, self._period, 1)


class Judges(nn.Module):
    """All of them."""

    def __init__(self, spectral_channels: int = 16, periodic_channels: int = 16) -> None:
        super().__init__()
        spectral = [SpectralJudge(size, hop, spectral_channels) for size, hop in SPECTRA]
        self.judges: list[Judge] = [*spectral, *(PeriodicJudge(p, periodic_channels) for p in PERIODS)]

    def __call__(self, samples: mx.array) -> list[tuple[mx.array, Features]]:
        """Each judge's scores and findings for ``[B, S]``."""
        return [judge(samples) for judge in self.judges]


def judge_terms(judges: Judges, real: mx.array, made: mx.array) -> dict[str, mx.array]:
    """The judges' loss: 1 for real, 0 for made (least squares), summed over judges."""
    halves = [mx.split(score.astype(mx.float32), 2) for score, _ in judges(mx.concatenate([real, made]))]
    return {
        "real": means([mx.square(1 - a) for a, _ in halves]).sum(),
        "made": means([mx.square(b) for _, b in halves]).sum(),
    }


def made_terms(judges: Judges, real: mx.array, made: mx.array) -> dict[str, mx.array]:
    """What the judges say of ``made``: their scores to be 1, their findings to be those of ``real``. Not weighted."""
    scores, apart, weights = [], [], []
    for (_, wanted), (score, found) in zip(judges(real), judges(made), strict=True):
        scores.append(mx.square(1 - score.astype(mx.float32)))
        apart += [mx.abs(mx.stop_gradient(a) - b) for a, b in zip(wanted, found, strict=True)]
        weights += [1 / len(found)] * len(found)
    return {"fooled": means(scores).sum(), "alike": (means(apart) * mx.array(weights)).sum()}
