"""Overlapping frames, their sum, and causal depthwise filters: each with a gradient of a few kernels.

MLX's own gradients of strided views, slices and grouped convolutions are scatters or one padded copy for every slice.
Here the gradient of cutting into frames is their overlapped sum, and the other way round; both are written as one sum
of slices, which ``mx.compile`` makes one kernel.
"""

from functools import partial
from typing import Any, cast

import mlx.core as mx

__all__ = ["depthwise", "frames", "overlap_add"]


def frames(samples: mx.array, size: int, hop: int) -> mx.array:
    """``[B, M * hop]`` to the frames ``[B, M - size / hop + 1, size]`` that begin every ``hop``, a part of ``size``."""
    cut = mx.custom_function(partial(_cut, size=size, hop=hop))
    cut.vjp(lambda primals, cotangent, output: _sum(cotangent, hop))
    return cast(mx.array, cut(samples))


def overlap_add(columns: mx.array, hop: int) -> mx.array:
    """``[B, F, size]`` laid ``hop`` apart and summed: ``[B, (F - 1) * hop + size]``."""
    size = columns.shape[2]
    lay = mx.custom_function(partial(_sum, hop=hop))
    lay.vjp(lambda primals, cotangent, output: _cut(cotangent, size, hop))
    return cast(mx.array, lay(columns))


def _cut(samples: mx.array, size: int, hop: int) -> mx.array:
    batch, length = samples.shape
    view = mx.as_strided(samples, (batch, (length - size) // hop + 1, size), (length, hop, 1))
    return mx.contiguous(view)


def _sum(columns: mx.array, hop: int) -> mx.array:
    batch, count, size = columns.shape
    shifts = size // hop
    padded = mx.pad(columns, [(0, 0), (shifts - 1, shifts - 1), (0, 0)])
    length = count + shifts - 1
    total = padded[:, shifts - 1 :, :hop]
    for j in range(1, shifts):
        start = shifts - 1 - j
        total = total + padded[:, start : start + length, j * hop : (j + 1) * hop]
    return total.reshape(batch, length * hop)


def depthwise(x: mx.array, weight: mx.array) -> mx.array:
    """``x`` ``[B, T, C]`` filtered along T by ``weight`` ``[C, k, 1]``, with ``k - 1`` zeros before its start."""
    return cast(mx.array, _depthwise(x, weight))


@mx.custom_function
def _depthwise(x: mx.array, weight: mx.array) -> mx.array:
    kernel = weight.shape[1]
    return _shifted_sum(mx.pad(x, [(0, 0), (kernel - 1, 0), (0, 0)]), weight, x.shape[1], list(range(kernel)))


@_depthwise.vjp
def _depthwise_gradient(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    x, weight = primals
    (batch, length, channels), kernel = x.shape, weight.shape[1]
    after = mx.pad(cotangent, [(0, 0), (0, kernel - 1), (0, 0)])
    before = mx.pad(x, [(0, 0), (kernel - 1, 0), (0, 0)])
    strides = ((length + kernel - 1) * channels, channels, channels, 1)
    windows = mx.as_strided(before, (batch, length, kernel, channels), strides)
    by_weight = (windows * cotangent[:, :, None]).sum((0, 1)).T[:, :, None]
    return _shifted_sum(after, weight, length, list(range(kernel - 1, -1, -1))), by_weight


def _shifted_sum(padded: mx.array, weight: mx.array, length: int, starts: list[int]) -> mx.array:
    """The sum over k of ``padded`` from ``starts[k]`` on, times the k-th coefficients."""
    total = padded[:, starts[0] : starts[0] + length] * weight[:, 0, 0]
    for k, start in enumerate(starts[1:], start=1):
        total = total + padded[:, start : start + length] * weight[:, k, 0]
    return total
