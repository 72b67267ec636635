"""Keys and values of past positions, in a buffer that doubles when it is full.

One append writes its slots in place, so a step moves none of the past; doublings copy it as often as the logarithm of
its length. There are three kinds of memory:

* everything: n positions take less than 2 n slots (or BLOCK of them);
* a window: queries see the latest ``window`` positions, and what no query can see is dropped when the buffer is full;
* bounded: the first ``pinned`` positions for ever and the ``newest`` after them in a ring. Once that is full nothing
  is moved or copied again, and a step attends to what is kept, however long the session.

Keys come rotated by their positions, so attention does not care in which order they lie.

Many positions at once are an ``append``. A single one, a frame of a session under way, is a ``reserve``, which moves
the counters on and is the host's, and a ``store``, which is arrays only: its graph depends on the capacity alone.
"""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from voicechat_core.errors import InputError

__all__ = [
    "KVCache",
    "Place",
    "append",
    "attention_mask",
    "bounded",
    "grown",
    "new_kv_cache",
    "reserve",
    "rewound",
    "roomy",
    "store",
    "trimmed",
]

# The smallest buffer, 20 s of frames; all others are this times a power of two, or end with a full ring.
BLOCK = 256


@dataclass
class KVCache:
    """Keys and values ``[B, H, capacity, D]``; the first ``length`` slots are filled, ``position`` were seen.

    With ``newest`` None the slots hold the latest ``length`` positions in their order. Otherwise slot s < ``pinned``
    belongs to position s, and those after it are a ring of ``newest`` slots (of ``window``, where that is less).
    """

    keys: mx.array
    values: mx.array
    length: int = 0
    position: int = 0
    pinned: int = 0
    newest: int | None = None


def new_kv_cache(batch: int, heads: int, head_dim: int, dtype: mx.Dtype = mx.float32) -> KVCache:
    """An empty cache."""
    empty = mx.zeros((batch, heads, 0, head_dim), dtype)
    return KVCache(empty, mx.zeros_like(empty))


def append(
    cache: KVCache, keys: mx.array, values: mx.array, window: int | None = None
) -> tuple[KVCache, mx.array, mx.array]:
    """Store ``n`` new positions ``[B, H, n, D]`` and return what their queries may look at.

    A cache is given the same ``window`` every time.

    Returns the new cache and keys and values ``[B, H, m, D]``: every position kept that one of the queries may see,
    with a window the latest ``window - 1 + n``. ``attention_mask(n, m, window)`` is the mask that goes with them.

    Raises:
        InputError: for several positions at once that do not fit before a ring turns: a later one would overwrite
            what an earlier one may see. One at a time is always right.
    """
    n = keys.shape[2]
    if cache.newest is None:
        cache, start = _with_room(cache, n, window)
    else:
        cache, start = _with_room_in_ring(cache, n, _ring_slots(cache.newest, window))
    cache.keys[:, :, start : start + n] = keys
    cache.values[:, :, start : start + n] = values
    result = replace(cache, length=max(cache.length, start + n), position=cache.position + n)
    kept = slice(_first_visible(result, n, window), result.length)
    return result, result.keys[:, :, kept], result.values[:, :, kept]


@dataclass(frozen=True)
class Place:
    """Where one position's keys and values go, and what its query sees: the slots from ``first`` to ``end``."""

    slot: int
    first: int
    end: int
    capacity: int
    position: int

    def arrays(self) -> tuple[mx.array, mx.array]:
        """The slot ``[1]`` int32, and which slots are seen ``[1, 1, 1, capacity]``: the mask of an attention."""
        seen = np.zeros((1, 1, 1, self.capacity), bool)
        seen[..., self.first : self.end] = True
        return mx.array([self.slot], mx.int32), mx.array(seen)


def reserve(cache: KVCache, window: int | None = None) -> Place:
    """Make room for one more position and count it; what ``append`` would do, but for the keys and values themselves.

    ``cache`` changes. Its slot holds nothing sensible until ``store`` has been called.
    """
    if cache.newest is None:
        roomy, slot = _with_room(cache, 1, window)
    else:
        roomy, slot = _with_room_in_ring(cache, 1, _ring_slots(cache.newest, window))
    cache.keys, cache.values, cache.position = roomy.keys, roomy.values, cache.position + 1
    cache.length = max(roomy.length, slot + 1)
    first = _first_visible(cache, 1, window)
    return Place(slot, first, cache.length, cache.keys.shape[2], cache.position - 1)


def store(cache: KVCache, keys: mx.array, values: mx.array, slot: mx.array) -> KVCache:
    """The cache with one position ``[B, H, 1, D]`` in ``slot`` ``[1]``; counters as they are. Consumes ``cache``."""
    kept = [mx.slice_update(old, new, slot, axes=(2,)) for old, new in ((cache.keys, keys), (cache.values, values))]
    return replace(cache, keys=kept[0], values=kept[1])


def _first_visible(cache: KVCache, n: int, window: int | None) -> int:
    """The first slot that one of the last n positions sees."""
    if window is None:
        return 0
    if cache.newest is None:
        return max(0, cache.length - (window - 1 + n))
    # A ring holds nothing that the window has passed. Of the pinned positions it passes the oldest first.
    return min(cache.pinned, max(0, cache.position - (window - 1 + n)))


def _with_room(cache: KVCache, n: int, window: int | None) -> tuple[KVCache, int]:
    """The cache with n free slots after the filled ones, and the first of them."""
    if cache.length + n > cache.keys.shape[2]:
        first = 0 if window is None else max(0, cache.length - (window - 1))
        needed = cache.length - first + n
        # Where the window drops something, half of the buffer stays free: the next move is at least as many
        # positions away as were moved, and the capacity below 4 * (window - 1 + n) or BLOCK.
        cache = _moved(cache, first, _capacity(2 * needed if first else needed))
    return cache, cache.length


def _with_room_in_ring(cache: KVCache, n: int, ring: int) -> tuple[KVCache, int]:
    """The cache with a slot for each of n positions, and the first of them."""
    start, end = cache.position, cache.pinned + ring
    if n > 1 and start + n > end:
        raise InputError(f"{n} positions at once after {start}, but only {end} are kept: append them one by one")
    if start >= end:
        return cache, cache.pinned + (start - cache.pinned) % ring
    if start + n > cache.keys.shape[2]:
        cache = _moved(cache, 0, min(_capacity(start + n), end))
    return cache, start


def grown(cache: KVCache, window: int | None = None) -> KVCache | None:
    """An empty cache of the capacity that this one will have when its buffer is full; None if it will keep its own.

    Its arrays are lazy: it is there to compile for, and takes no memory until somebody computes it.
    """
    capacity = cache.keys.shape[2]
    if cache.newest is None:
        first = 0 if window is None else max(0, capacity - (window - 1))
        needed = capacity - first + 1
        after = _capacity(2 * needed if first else needed)
    else:
        end = cache.pinned + _ring_slots(cache.newest, window)
        after = capacity if capacity >= end else min(_capacity(capacity + 1), end)
    if after == capacity:
        return None
    batch, heads, _, dim = cache.keys.shape
    empty = mx.zeros((batch, heads, after, dim), cache.keys.dtype)
    return KVCache(empty, mx.zeros_like(empty), capacity, capacity, cache.pinned, cache.newest)


def trimmed(cache: KVCache) -> KVCache:
    """A copy of what is filled: how a cache is kept while nobody appends to it. ``roomy`` is the way back."""
    keys, values = (mx.contiguous(x[:, :, : cache.length]) for x in (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values)


def roomy(cache: KVCache, capacity: int) -> KVCache:
    """A trimmed cache in a buffer of the capacity that it had."""
    return _moved(cache, 0, capacity)


def _capacity(slots: int) -> int:
    """The smallest buffer that holds them. Equal histories have equal shapes, however they were cut into parts."""
    capacity = BLOCK
    while capacity < slots:
        capacity *= 2
    return capacity


def _moved(cache: KVCache, first: int, capacity: int) -> KVCache:
    """The slots from ``first`` on in a new buffer. The one place that copies the past of a session under way."""
    kept = cache.length - first
    batch, heads, _, dim = cache.keys.shape
    room = mx.zeros((batch, heads, capacity - kept, dim), cache.keys.dtype)
    keys, values = (mx.concatenate([x[:, :, first : cache.length], room], axis=2) for x in (cache.keys, cache.values))
    return replace(cache, keys=keys, values=values, length=kept)


def _ring_slots(newest: int, window: int | None) -> int:
    """A position that the window hides is not worth a slot."""
    return newest if window is None else min(newest, window)


def bounded(cache: KVCache, pinned: int, newest: int, window: int | None = None) -> KVCache:
    """What a cache that keeps everything becomes when it may keep the first ``pinned`` and the ``newest`` positions.

    From then on a query at position t sees the key of position p iff ``t - p < window and (p < pinned or
    t - p < newest)``: never more than before, and all of it while ``t < pinned + newest``.

    Args:
        cache: one with ``newest`` None, of any length. It stays usable: the result shares no buffer with it.
        pinned: positions at the start that stay.
        newest: positions after these that stay, the present one counted.
        window: the one that the cache is given at every append.

    Raises:
        InputError: for sizes out of range, a cache that is bounded already, or one that dropped what must be kept.
    """
    if pinned < 0 or newest < 1:
        raise InputError(f"{pinned} pinned and {newest} newest positions: at least 0 and 1 are needed")
    if cache.newest is not None:
        raise InputError(f"a cache of {cache.pinned} pinned and {cache.newest} newest positions is bounded already")
    ring, dropped = _ring_slots(newest, window), cache.position - cache.length
    if dropped > (oldest := _oldest_needed(cache.position, pinned, ring, window)):
        raise InputError(f"the cache has dropped its first {dropped} positions, but position {oldest} must be kept")
    positions = _positions_by_slot(cache.position, pinned, ring)
    # Slots whose position was dropped are read by nobody: anything may stand there.
    sources = mx.array([max(p - dropped, 0) for p in positions], mx.int32)
    keys, values = (mx.take(x, sources, axis=2) for x in (cache.keys, cache.values))
    kept = KVCache(keys, values, len(positions), cache.position, pinned, newest)
    result = _moved(kept, 0, min(_capacity(len(positions)), pinned + ring))
    mx.eval(result.keys, result.values)
    return result


def _oldest_needed(position: int, pinned: int, ring: int, window: int | None) -> int:
    """The first past position that the query at ``position``, or a later one, may look at."""
    seen_by_window = 0 if window is None else max(0, position - window + 1)
    return seen_by_window if seen_by_window < pinned else max(pinned, position - ring + 1)


def _positions_by_slot(position: int, pinned: int, ring: int) -> list[int]:
    """The position that belongs in each filled slot after ``position`` positions."""
    latest = position - 1
    in_ring = range(pinned, min(position, pinned + ring))
    return [*range(min(position, pinned)), *(latest - (latest - slot) % ring for slot in in_ring)]


def attention_mask(n: int, m: int, window: int | None = None) -> mx.array | None:
    """Which of ``m`` keys each of the last ``n`` positions sees: a boolean ``[n, m]``, or None for all.

    Query i stands at key ``m - n + i`` and sees key j iff ``0 <= m - n + i - j < window``.
    """
    if n == 1:
        return None
    distance = mx.arange(m - n, m)[:, None] - mx.arange(m)[None, :]
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def rewound(cache: KVCache, positions: int) -> KVCache | None:
    """A copy of a cache as it was before its latest ``positions``, in a buffer as large as then.

    None where a window has dropped something. Only for a cache that keeps everything.

    Raises:
        InputError: for more positions than there were, and for a bounded cache.
    """
    if cache.newest is not None:
        raise InputError("a bounded cache has overwritten what it would be taken back to")
    if not 0 <= positions <= cache.position:
        raise InputError(f"{positions} positions cannot be taken back: {cache.position} were seen")
    if cache.length < cache.position:
        return None
    length = cache.length - positions
    kept = KVCache(cache.keys[:, :, :length], cache.values[:, :, :length], length, length)
    result = _moved(kept, 0, _capacity(length))
    mx.eval(result.keys, result.values)
    return result
