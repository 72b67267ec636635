"""Causal ConvNeXt blocks and the rate-changing convolutions between them, channels last.

Choices:

* A convolution whose stride is its kernel sees non-overlapping blocks, so it is a reshape and one matmul.
  Its weight lies in memory as that matmul wants it.
* Only the depthwise convolution looks back. Its state is its last ``kernel - 1`` inputs; zeros at the start are
  the causal padding, so a whole sequence and a stream are one code path.
"""

from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.nn import gelu  # the exact one, with erf

from voicechat_core.nn.layout import Axes, CheckpointLayout

__all__ = ["BlockConv1d", "BlockConvTranspose1d", "ConvNeXt", "ConvStack", "DepthwiseConv1d"]

NORM_EPS = 1e-6
EXPANSION = 4


class BlockConv1d(CheckpointLayout, nn.Module):
    """Conv1d with stride equal to its kernel: ``[B, T * kernel, in] -> [B, T, out]``."""

    CHECKPOINT_AXES: ClassVar[dict[str, Axes]] = {"weight": (2, 1, 0)}

    def __init__(self, in_channels: int, out_channels: int, kernel: int = 1, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((kernel, in_channels, out_channels))
        if bias:
            self.bias = mx.zeros((out_channels,))

    def __call__(self, x: mx.array) -> mx.array:
        """Convolve ``x``; its length is a multiple of the kernel."""
        kernel, in_channels, out_channels = self.weight.shape
        blocks = x.reshape(x.shape[0], x.shape[1] // kernel, kernel * in_channels)
        weight = self.weight.reshape(kernel * in_channels, out_channels)
        return mx.addmm(self.bias, blocks, weight) if "bias" in self else blocks @ weight


class BlockConvTranspose1d(CheckpointLayout, nn.Module):
    """ConvTranspose1d with stride equal to its kernel, no bias: ``[B, T, in] -> [B, T * kernel, out]``."""

    CHECKPOINT_AXES: ClassVar[dict[str, Axes]] = {"weight": (0, 2, 1)}

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = mx.zeros((in_channels, kernel, out_channels))

    def __call__(self, x: mx.array) -> mx.array:
        """Convolve ``x``: each input column makes ``kernel`` output columns of its own."""
        in_channels, kernel, out_channels = self.weight.shape
        y = x @ self.weight.reshape(in_channels, kernel * out_channels)
        return y.reshape(x.shape[0], x.shape[1] * kernel, out_channels)


class DepthwiseConv1d(CheckpointLayout, nn.Module):
    """One filter a channel, no padding: ``[B, T + kernel - 1, C] -> [B, T, C]``."""

    CHECKPOINT_AXES: ClassVar[dict[str, Axes]] = {"weight": (0, 2, 1)}

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, kernel, 1))
        self.bias = mx.zeros((channels,))

    def __call__(self, x: mx.array) -> mx.array:
        """Convolve ``x``, whose first ``kernel - 1`` columns are only looked at."""
        # Shifted sums are faster on a CPU, but next to the pointwise matmuls neither reaches 2 % of a block.
        return mx.conv1d(x, self.weight, groups=x.shape[2]) + self.bias


class ConvNeXt(nn.Module):
    """Depthwise convolution, channel norm, a four times wider pointwise pair, residual (Liu et al. 2022)."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.dwconv = DepthwiseConv1d(channels, kernel)
        self.norm = nn.LayerNorm(channels, eps=NORM_EPS)
        self.pwconv1 = BlockConv1d(channels, EXPANSION * channels, bias=True)
        self.pwconv2 = BlockConv1d(EXPANSION * channels, channels, bias=True)

    def new_tail(self, batch: int) -> mx.array:
        """The inputs before the first one: zeros ``[B, kernel - 1, C]``."""
        channels, kernel, _ = self.dwconv.weight.shape
        return mx.zeros((batch, kernel - 1, channels))

    def step(self, x: mx.array, tail: mx.array) -> tuple[mx.array, mx.array]:
        """``x [B, T, C]`` after ``tail``: the output of the same shape, and the tail for what follows."""
        context = mx.concatenate([tail, x], axis=1)
        y = self.pwconv2(gelu(self.pwconv1(self.norm(self.dwconv(context)))))
        # A mere slice would keep the whole of ``context`` alive between steps.
        return x + y, mx.contiguous(context[:, x.shape[1] :])


class ConvStack(nn.Module):
    """Layers one after another; the state is one tail for each ConvNeXt block, in order."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = layers

    def new_state(self, batch: int = 1) -> list[mx.array]:
        """The state before the first input."""
        return [layer.new_tail(batch) for layer in self.layers if isinstance(layer, ConvNeXt)]

    def step(self, x: mx.array, tails: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
        """``x [B, T, in]`` through every layer, and the new tails."""
        before, after = iter(tails), []
        for layer in self.layers:
            if isinstance(layer, ConvNeXt):
                x, tail = layer.step(x, next(before))
                after.append(tail)
            else:
                x = layer(x)
        return x, after
