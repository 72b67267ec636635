"""The arithmetic of drawing one frame's codes: schedule, component choice, residual quantization. Knows no weights.

The codes of a frame are fixed in passes, coarse levels first. Each pass draws, from a mixture of Gaussians, the
latent that is *not yet coded*, and quantizes it level by level from its own first level; what remains after the
pass is dropped, for the next one draws anew. All of it is float32 whatever the network's precision: one rounded
logit or distance changes a code.
"""

import math
from functools import cache
from itertools import pairwise

import mlx.core as mx
import numpy as np

__all__ = [
    "Draws",
    "choose_component",
    "depth_sum",
    "gumbel",
    "passes",
    "quantize",
    "schedule",
    "square_norms",
    "top_p",
]

Draws = tuple[mx.array, mx.array]
"""One step's random numbers, float32: uniforms in [0, 1) ``[passes, N]`` and standard normals ``[passes, L]``."""

EPSILON = 1e-8  # inside both logarithms of the Gumbel draw


def schedule(num_quantizers: int, num_iterations: int, exponent: float) -> list[int]:
    """Levels fixed by each iteration: 0 0 0 1 1 3 4 22 for 31 levels, 8 iterations, exponent 3.

    After a share r of the iterations ``ceil((1 - r ** e) ** (1 / e) * levels)`` levels are still open.
    """
    rates = [i / num_iterations for i in range(num_iterations)]
    still_open = [math.ceil((1 - r**exponent) ** (1 / exponent) * num_quantizers) for r in rates] + [0]
    return [before - after for before, after in pairwise(still_open)]


@cache
def passes(num_quantizers: int, num_iterations: int, exponent: float) -> tuple[tuple[int, int], ...]:
    """First level and number of levels of each pass; an iteration that fixes none is no pass and draws nothing."""
    counts = [count for count in schedule(num_quantizers, num_iterations, exponent) if count]
    return tuple((sum(counts[:i]), count) for i, count in enumerate(counts))


def top_p(logits: mx.array, p: float) -> mx.array:
    """Logits ``[..., N]`` with all but the most likely entries at -inf.

    An entry goes if it and all less likely ones together have a mass of at most 1 - p; the likeliest stays.
    """
    order = mx.argsort(logits, axis=-1)
    ascending = mx.take_along_axis(logits, order, axis=-1)
    mass = mx.cumsum(mx.softmax(ascending, axis=-1), axis=-1)
    kept = (mass > 1 - p) | _is_last(logits.shape[-1])
    return mx.put_along_axis(logits, order, mx.where(kept, ascending, -mx.inf), axis=-1)


@cache
def _is_last(size: int) -> mx.array:
    """False but for the last place: a constant, so that a frame does not make it anew."""
    return mx.array(np.arange(size) == size - 1)


def gumbel(u: mx.array) -> mx.array:
    """Standard Gumbel draws from uniform ones in [0, 1)."""
    return -mx.log(-mx.log(u + EPSILON) + EPSILON)


def choose_component(logits: mx.array, p: float, u: mx.array) -> mx.array:
    """Index ``[...]`` of the mixture component drawn from float32 logits ``[..., N]`` with uniforms ``u`` ``[N]``."""
    # Logits serve as well as the logarithms of probabilities, which are all smaller by the same number.
    return mx.argmax(top_p(logits, p) + gumbel(u), axis=-1)


def square_norms(tables: mx.array) -> mx.array:
    """Squared length of each code vector: ``[Q, K, L]`` -> float32 ``[Q, K]``."""
    return mx.square(tables.astype(mx.float32)).sum(axis=-1)


def quantize(
    latent: mx.array, depth: mx.array | None, tables: mx.array, norms: mx.array, start: int, count: int
) -> tuple[list[mx.array], mx.array]:
    """Code ``latent`` with levels ``start`` to ``start + count - 1``, each taking what the one before left.

    ``latent`` ``[B, T, L]`` is the residual after the levels below ``start``, whose sum is ``depth`` ``[B, T, L]``, or
    None where there are none. Tables ``[Q, K, L]`` and ``norms`` ``[Q, K]`` (``square_norms``) are float32. Returns the
    codes of these levels (each ``[B, T]``; of equal distances the lowest id) and the sum with them, added in ascending
    order.
    """
    codes, residual = [], latent
    for level in range(start, start + count):
        table = tables[level : level + 1].squeeze(0)  # a view, where an index would be a gather
        code = mx.argmin(mx.addmm(norms[level : level + 1], residual, table.T, alpha=-2), axis=-1)
        vector = table[code]
        residual, depth = residual - vector, vector if depth is None else depth + vector
        codes.append(code)
    assert depth is not None  # a pass has a level
    return codes, depth


def depth_sum(codes: mx.array, tables: mx.array) -> mx.array:
    """Sum of the code vectors, ``[B, T, Q]`` -> float32 ``[B, T, L]``; the id K, one past the last, adds nothing."""
    levels, size, _ = tables.shape
    rows = _first_rows(levels, size) + mx.minimum(codes, size - 1)
    vectors = tables.reshape(levels * size, -1)[rows].astype(mx.float32)
    return mx.where(codes[..., None] < size, vectors, 0).sum(axis=-2)


@cache
def _first_rows(levels: int, size: int) -> mx.array:
    """Where each level begins in the tables put one below the other, ``[Q]`` int32: a constant."""
    return mx.array(np.arange(levels, dtype=np.int32) * size)
