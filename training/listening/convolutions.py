"""Depthwise convolutions as sums of shifted products, with gradients of few kernels on every backend.

MLX's own convolutions are what is served; their gradients with one filter a channel are slow or missing, depending on
the backend. Inputs come padded. Nothing here knows a network.
"""

from collections.abc import Sequence

import mlx.core as mx

__all__ = ["along_time", "first_image", "strided_image"]

TAPS = 3  # of an image's filter, on either axis; its stride is 2


@mx.custom_function
def along_time(x: mx.array, weight: mx.array) -> mx.array:
    """One filter a channel: x ``[B, T + K - 1, C]``, weight ``[C, K, 1]`` -> ``[B, T, C]``; the last tap is now."""
    frames = x.shape[1] - weight.shape[1] + 1
    return _sum([x[:, k : k + frames] * weight[:, k, 0] for k in range(weight.shape[1])])


@along_time.vjp
def _along_time_gradient(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array
) -> tuple[mx.array, mx.array]:
    x, weight = primals
    (batch, length, channels), taps, frames = x.shape, weight.shape[1], cotangent.shape[1]
    wide = mx.pad(cotangent, [(0, 0), (taps - 1, taps - 1), (0, 0)])
    by_input = _sum([wide[:, taps - 1 - k : taps - 1 - k + length] * weight[:, k, 0] for k in range(taps)])
    strides = (length * channels, channels, channels, 1)
    windows = mx.as_strided(x, (batch, frames, taps, channels), strides)
    return by_input, (windows * cotangent[:, :, None]).sum(axis=(0, 1)).T[..., None]


def first_image(x: mx.array, weight: mx.array) -> mx.array:
    """3x3 filters of stride 2 over an image of one channel: ``[B, R, F]``, ``[C, 3, 3, 1]`` -> ``[B, R', F', C]``.

    It has no gradient for x: a matrix product over windows that are not differentiable.
    """
    batch, rows, bins = x.shape
    size = (batch, _halved(rows), _halved(bins), TAPS, TAPS)
    windows = mx.as_strided(mx.stop_gradient(x), size, (rows * bins, 2 * bins, 2, bins, 1))
    return windows.reshape(*size[:3], TAPS * TAPS) @ weight.reshape(-1, TAPS * TAPS).T


@mx.custom_function
def strided_image(x: mx.array, weight: mx.array) -> mx.array:
    """One 3x3 filter a channel, stride 2: x ``[B, R, F, C]``, weight ``[C, 3, 3, 1]`` -> ``[B, R', F', C]``."""
    rows, bins = _halved(x.shape[1]), _halved(x.shape[2])
    taps = [_under(x, i, j, rows, bins) * weight[:, i, j, 0] for i in range(TAPS) for j in range(TAPS)]
    return _sum(taps)


@strided_image.vjp
def _strided_image_gradient(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, _: mx.array
) -> tuple[mx.array, mx.array]:
    x, weight = primals
    batch, rows, bins, channels = cotangent.shape
    by_weight = [
        (_under(x, i, j, rows, bins) * cotangent).sum(axis=(0, 1, 2)) for i in range(TAPS) for j in range(TAPS)
    ]
    wide = mx.pad(cotangent, [(0, 0), (1, 1), (1, 1), (0, 0)])

    def phase(row: int, column: int) -> mx.array:
        """Inputs (2a + row, 2b + column), a up to and with ``rows``, from the taps that touch them."""
        terms = []
        for i in range(row, TAPS, 2):
            for j in range(column, TAPS, 2):
                a, b = 1 - i // 2, 1 - j // 2  # an input under tap 2 belongs to the output before
                terms.append(wide[:, a : a + rows + 1, b : b + bins + 1] * weight[:, i, j, 0])
        return _sum(terms)

    lines = [mx.stack([phase(row, 0), phase(row, 1)], axis=3) for row in (0, 1)]
    by_input = mx.stack(lines, axis=2).reshape(batch, 2 * (rows + 1), 2 * (bins + 1), channels)
    by_input = by_input[:, : x.shape[1], : x.shape[2]]
    return by_input, mx.stack(by_weight, axis=-1).reshape(weight.shape)


def _halved(length: int) -> int:
    return (length - TAPS) // 2 + 1


def _under(x: mx.array, i: int, j: int, rows: int, bins: int) -> mx.array:
    """The inputs that lie under tap (i, j)."""
    return x[:, i : i + 2 * rows - 1 : 2, j : j + 2 * bins - 1 : 2]


def _sum(terms: Sequence[mx.array]) -> mx.array:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
