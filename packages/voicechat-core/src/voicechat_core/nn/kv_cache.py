"""Keys and values of past positions, in a buffer that grows by blocks.

One append writes one slot in place, so a frame costs the same whatever came before. With a window
only the latest ``window`` positions are kept: the rest is dropped each time the buffer is full.
"""

from dataclasses import dataclass

import mlx.core as mx

__all__ = ["KVCache", "append", "attention_mask", "new_kv_cache"]

# Slots added when the buffer is full: 20 s of frames. A whole copy every 256 steps costs each step 0.4 %
# of a copy, and at most 256 slots stand empty.
BLOCK = 256


@dataclass
class KVCache:
    """Keys and values ``[B, H, capacity, D]``; the first ``length`` slots are filled, ``position`` were seen."""

    keys: mx.array
    values: mx.array
    length: int = 0
    position: int = 0


def new_kv_cache(batch: int, heads: int, head_dim: int, dtype: mx.Dtype = mx.float32) -> KVCache:
    """An empty cache."""
    empty = mx.zeros((batch, heads, 0, head_dim), dtype)
    return KVCache(empty, mx.zeros_like(empty))


def append(
    cache: KVCache, keys: mx.array, values: mx.array, window: int | None = None
) -> tuple[KVCache, mx.array, mx.array]:
    """Store ``n`` new positions ``[B, H, n, D]`` and return what their queries may look at.

    Returns the new cache and keys and values ``[B, H, m, D]``: every position seen, or with a window the
    latest ``window - 1 + n``. ``attention_mask(n, m, window)`` is the mask that goes with them.
    """
    n = keys.shape[2]
    if cache.length + n > cache.keys.shape[2]:
        cache = _grow(cache, n, window)
    start, end = cache.length, cache.length + n
    cache.keys[:, :, start:end] = keys
    cache.values[:, :, start:end] = values
    first = 0 if window is None else max(0, end - (window - 1 + n))
    result = KVCache(cache.keys, cache.values, end, cache.position + n)
    return result, result.keys[:, :, first:end], result.values[:, :, first:end]


def _grow(cache: KVCache, n: int, window: int | None) -> KVCache:
    first = 0 if window is None else max(0, cache.length - (window - 1))
    kept = cache.length - first
    batch, heads, _, dim = cache.keys.shape
    room = mx.zeros((batch, heads, n + BLOCK - (kept + n) % BLOCK, dim), cache.keys.dtype)
    keys, values = (mx.concatenate([x[:, :, first : cache.length], room], axis=2) for x in (cache.keys, cache.values))
    return KVCache(keys, values, kept, cache.position)


def attention_mask(n: int, m: int, window: int | None = None) -> mx.array | None:
    """Which of ``m`` keys each of the last ``n`` positions sees: a boolean ``[n, m]``, or None for all.

    Query i stands at key ``m - n + i`` and sees key j iff ``0 <= m - n + i - j < window``.
    """
    if n == 1:
        return None
    distance = mx.arange(m - n, m)[:, None] - mx.arange(m)[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
