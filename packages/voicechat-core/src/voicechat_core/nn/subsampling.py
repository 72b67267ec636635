"""Convolutional subsampling by eight: 10 ms mel rows -> 80 ms frames.

NeMo's ``ConvSubsampling`` in its causal ``dw_striding`` form. The features are an image with axes time and
frequency; three 3x3 convolutions of stride 2 each have two zeros before and one after on both axes, so that
n rows become ``n // 2 + 1`` and frame t depends on mel rows ``8t - 14 ... 8t``.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import EncoderConfig
from voicechat_core.errors import InputError
from voicechat_core.nn.derived import Derived
from voicechat_core.nn.layout import Axes, CheckpointLayout
from voicechat_core.nn.linear import Linear

__all__ = ["ConvSubsampling", "SubsamplingState", "encoded_length"]

STAGES = 3
KERNEL = 3
STRIDE = 2


def halved(length: int) -> int:
    """Rows or bins that one stage makes of ``length``."""
    return length // STRIDE + 1


def encoded_length(length: int) -> int:
    """Encoder frames of ``length`` mel rows."""
    for _ in range(STAGES):
        length = halved(length)
    return length


class StridedConv(CheckpointLayout, nn.Module):
    """3x3 convolution of stride 2 over ``[B, T, F, C]``; its time axis comes padded, frequency it pads itself."""

    CHECKPOINT_AXES: ClassVar[dict[str, Axes]] = {"weight": (0, 2, 3, 1)}

    def __init__(self, channels_in: int, channels_out: int, groups: int = 1) -> None:
        super().__init__()
        self.weight = mx.zeros((channels_out, KERNEL, KERNEL, channels_in // groups))
        self.bias = mx.zeros((channels_out,))
        self._groups = groups

    def __call__(self, x: mx.array) -> mx.array:
        return self.filtered(x) + self.bias

    def filtered(self, x: mx.array) -> mx.array:
        """Without the bias."""
        padding = ([0, KERNEL - 1], [0, STRIDE - 1])  # before and after: time, frequency
        return mx.conv_general(x, self.weight, stride=STRIDE, padding=padding, groups=self._groups)


class PointwiseConv(CheckpointLayout, nn.Module):
    """1x1 convolution over ``[B, T, F, C]``: a matrix product on the channels."""

    CHECKPOINT_AXES: ClassVar[dict[str, Axes]] = {"weight": (0, 2, 3, 1)}

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.weight = mx.zeros((channels_out, 1, 1, channels_in))
        self.bias = mx.zeros((channels_out,))

    def __call__(self, x: mx.array) -> mx.array:
        return self.mixed(x) + self.bias

    def mixed(self, x: mx.array) -> mx.array:
        """Without the bias."""
        return x @ self.weight.squeeze((1, 2)).T


@dataclass
class SubsamplingState:
    """Per stage the input rows ``[B, r, F, C]`` that the next output shares: two zeros at first, then one row."""

    rows: list[mx.array]


class ConvSubsampling(nn.Module):
    """Mel rows ``[B, T, features]`` -> frames ``[B, T', D]``."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        channels = config.subsampling_conv_channels
        self.conv = [
            StridedConv(1, channels),
            nn.ReLU(),
            StridedConv(channels, channels, groups=channels),
            PointwiseConv(channels, channels),
            nn.ReLU(),
            StridedConv(channels, channels, groups=channels),
            PointwiseConv(channels, channels),
            nn.ReLU(),
        ]
        self.out = Linear(channels * encoded_length(config.feat_in), config.d_model)
        self._biases = [Derived(_joint_bias) for _ in self._stages()]
        self._features = config.feat_in
        self._channels = channels

    def __call__(self, mel: mx.array, length: int | None = None) -> mx.array:
        """A whole sequence: ``encoded_length(T)`` frames.

        With ``length`` the rows from there on, and what became of them, are zeroed before each stride and after
        the last one, as NeMo's ``MaskedConvSequential`` does with the padding of a batch.
        """
        x = _masked(mel[..., None], length)
        for stage, bias in zip(self._stages(), self._biases, strict=True):
            x = _run(stage, bias, mx.pad(x, [(0, 0), (KERNEL - 1, STRIDE - 1), (0, 0), (0, 0)]))
            length = None if length is None else halved(length)
            x = _masked(x, length)
        return self.project(x)

    def new_state(self, batch: int = 1) -> SubsamplingState:
        """The zeros before the first row."""
        rows, bins = [], self._features
        for channels in (1, self._channels, self._channels):
            rows.append(mx.zeros((batch, KERNEL - 1, bins, channels)))
            bins = halved(bins)
        return SubsamplingState(rows)

    def step(self, mel: mx.array, state: SubsamplingState) -> tuple[mx.array, SubsamplingState]:
        """The next n frames, of ``1 + 8 (n - 1)`` rows in the first step and of ``8 n`` in every later one.

        Raises ``InputError`` for any other number of rows.
        """
        _check_rows(mel.shape[1], first=state.rows[0].shape[1] == KERNEL - 1)
        x, kept = mel[..., None], []
        for stage, bias, before in zip(self._stages(), self._biases, state.rows, strict=True):
            x = mx.concatenate([before, x], axis=1)
            # Output o reads inputs 2o-2, 2o-1 and 2o; the next one starts at 2o: one row is kept.
            kept.append(x[:, -1:])
            x = _run(stage, bias, x)
        return self.project(x), SubsamplingState(kept)

    def _stages(self) -> tuple[list[nn.Module], ...]:
        """Each stride with what follows it."""
        return self.conv[:2], self.conv[2:5], self.conv[5:]

    def project(self, x: mx.array) -> mx.array:
        """``[B, T, F, C]`` -> ``[B, T, D]`` float32; PyTorch has the channels before the bins."""
        return self.out(x.swapaxes(2, 3).flatten(2)).astype(mx.float32)


def _run(stage: list[Any], joint_bias: Derived, x: mx.array) -> mx.array:
    """A strided convolution, where channels are mixed a 1x1 one, and the rectifier; one bias for both."""
    strided, *pointwise, rectify = stage
    if not pointwise:
        return cast(mx.array, rectify(strided(x)))
    (mix,) = pointwise
    return cast(mx.array, rectify(mix.mixed(strided.filtered(x)) + joint_bias(strided.bias, mix.weight, mix.bias)))


def _joint_bias(strided: mx.array, mix: mx.array, bias: mx.array) -> mx.array:
    """The bias of a strided convolution, mixed, and the mixture's own."""
    return mix.squeeze((1, 2)) @ strided + bias


def _masked(x: mx.array, length: int | None) -> mx.array:
    """``[B, T, F, C]`` with zeros from row ``length`` on."""
    if length is None or length >= x.shape[1]:
        return x
    return mx.pad(x[:, :length], [(0, 0), (0, x.shape[1] - length), (0, 0), (0, 0)])


def _check_rows(rows: int, *, first: bool) -> None:
    factor = STRIDE**STAGES
    if rows < 1 or rows % factor != int(first):
        expected = f"1 and a multiple of {factor}" if first else f"a multiple of {factor}"
        raise InputError(f"{rows} mel rows; {expected} needed in {'the first' if first else 'a later'} step")
