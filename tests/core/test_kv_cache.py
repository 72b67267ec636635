"""Keys and values of past positions: what a query may see, however the positions came in, and what that copies."""

from itertools import accumulate

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from voicechat_core.errors import InputError
from voicechat_core.nn import kv_cache
from voicechat_core.nn import state as states
from voicechat_core.nn.kv_cache import (
    KVCache,
    append,
    attention_mask,
    bounded,
    grown,
    new_kv_cache,
    reserve,
    rewound,
    roomy,
    store,
    trimmed,
)

HEADS, DIM = 2, 3

partitions = st.lists(st.integers(1, 7), min_size=1, max_size=12)
windows = st.none() | st.integers(1, 9)
pins, bounds = st.integers(0, 11), st.integers(1, 12)


@pytest.fixture
def small_blocks(monkeypatch):
    """Growth every few positions."""
    monkeypatch.setattr(kv_cache, "BLOCK", 4)


@pytest.fixture
def moves(monkeypatch):
    """How many slots each growth or compaction copied, in their order."""
    return counted(monkeypatch)


def counted(patch):
    copied, moved = [], kv_cache._moved

    def counting(cache, first, capacity):
        copied.append(cache.length - first)
        return moved(cache, first, capacity)

    patch.setattr(kv_cache, "_moved", counting)
    return copied


def numbered(start, n, batch=1):
    """Keys whose every value is their position (from 1), and values that are its negative."""
    keys = mx.broadcast_to(mx.arange(start + 1, start + n + 1, dtype=mx.float32)[:, None], (batch, HEADS, n, DIM))
    return keys, -keys


def positions(keys):
    return np.array(keys)[0, 0, :, 0].astype(int).tolist()


def fed(parts, window):
    """The cache after each part, with what the append returned."""
    cache, seen, results = new_kv_cache(1, HEADS, DIM), 0, []
    for n in parts:
        cache, keys, values = append(cache, *numbered(seen, n), window)
        seen += n
        assert np.array_equal(np.array(values), -np.array(keys))
        assert (np.array(keys) == np.array(keys)[:1, :1, :, :1]).all()
        results.append((n, seen, cache.keys.shape[2], positions(keys)))
        assert cache.position == seen
    return results


@settings(deadline=None, max_examples=60)
@given(partitions, windows)
def test_an_append_returns_every_position_its_queries_may_see(parts, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", 4)
        for n, seen, _, keys in fed(parts, window):
            first = 0 if window is None else max(0, seen - (window - 1 + n))
            assert keys == list(range(first + 1, seen + 1))


@settings(deadline=None, max_examples=40)
@given(partitions, st.integers(1, 9))
def test_a_window_bounds_the_buffer(parts, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", 4)
        for _, _, capacity, _ in fed(parts * 4, window):
            assert capacity == 4 or capacity < 4 * (window - 1 + max(parts))


@settings(deadline=None, max_examples=60)
@given(partitions, windows)
def test_fewer_than_three_slots_are_copied_for_each_that_is_appended(parts, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", 4)
        copied = counted(patch)
        fed(parts * 5, window)
    assert sum(copied) < 3 * sum(parts * 5)


def one_by_one(count, window, cache=None):
    """The cache after ``count`` single positions, computed as it goes, and its capacity after each."""
    cache, one, capacities = cache or new_kv_cache(1, 1, 1), mx.ones((1, 1, 1, 1)), []
    for _ in range(count):
        cache, _, _ = append(cache, one, one, window)
        mx.eval(cache.keys, cache.values)
        capacities.append(cache.keys.shape[2])
    return cache, capacities


def test_ten_thousand_steps_copy_the_past_six_times(moves):
    _, capacities = one_by_one(10_000, None)
    assert moves == [0, 256, 512, 1024, 2048, 4096, 8192]
    assert capacities[0] == capacities[255] == 256
    assert capacities[256] == 512
    assert capacities[-1] == 16_384


def test_ten_thousand_steps_in_a_window_of_71_copy_70_slots_every_186_steps(moves):
    _, capacities = one_by_one(10_000, 71)
    # The first after 256 steps; 70 stay, and 186 more fill the buffer again.
    assert moves == [0] + [70] * (1 + (10_000 - 256 - 1) // 186)
    assert set(capacities) == {256}


@pytest.mark.parametrize(("window", "capacity"), [(1000, 2048), (1025, 4096)])
def test_ten_thousand_steps_in_a_wide_window_double_until_half_is_free(window, capacity, moves):
    _, capacities = one_by_one(10_000, window)
    kept, doublings = window - 1, [0, 256, 512]
    if window == 1025:
        doublings.append(1024)  # all of a full buffer is still to be seen: nothing to drop
    compactions = moves[len(doublings) :]
    assert moves[: len(doublings)] == doublings
    assert set(compactions) == {kept}
    assert len(compactions) <= 1 + 10_000 // (capacity - kept)
    assert capacities[-1] == max(capacities) == capacity


def test_growth_across_the_real_block():
    sizes = [capacity for _, _, capacity, _ in fed([1] * 258 + [255], None)]
    assert (sizes[0], sizes[255], sizes[256], sizes[-1]) == (256, 256, 512, 1024)


@pytest.mark.parametrize(
    ("n", "capacity"), [(1, 256), (255, 256), (256, 256), (257, 512), (512, 512), (513, 1024), (1000, 1024)]
)
def test_a_buffer_is_the_smallest_doubling_of_a_block_that_fits(n, capacity):
    at_once, _, _ = append(new_kv_cache(1, HEADS, DIM), *numbered(0, n))
    assert at_once.keys.shape[2] == at_once.values.shape[2] == capacity
    assert one_by_one(n, None)[1][-1] == capacity


@pytest.mark.usefixtures("small_blocks")
def test_dtype_and_batch_survive_growth():
    cache = new_kv_cache(3, HEADS, DIM, mx.bfloat16)
    for t in range(9):
        cache, keys, _ = append(cache, *numbered(t, 1, batch=3))
    assert (cache.keys.dtype, keys.shape) == (mx.bfloat16, (3, HEADS, 9, DIM))
    assert positions(keys.astype(mx.float32)) == list(range(1, 10))


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize(("n", "m"), [(2, 2), (5, 5), (3, 8), (9, 9)])
def test_the_mask_is_its_definition(n, m, window):
    mask = np.array(attention_mask(n, m, window))
    for i in range(n):
        for j in range(m):
            distance = (m - n + i) - j
            assert mask[i, j] == (distance >= 0 and (window is None or distance < window))


def test_one_query_sees_all_that_is_returned():
    assert attention_mask(1, 5) is None
    assert attention_mask(1, 5, window=5) is None


@settings(deadline=None, max_examples=30)
@given(partitions, windows)
def test_attention_in_parts_is_attention_at_once(parts, window):
    total = sum(parts)
    mx.random.seed(total)
    q, k, v = (mx.random.normal((1, HEADS, total, 4)) for _ in range(3))

    def attend(q, k, v):
        mask = attention_mask(q.shape[2], k.shape[2], window)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask=mask)

    whole = attend(q, k, v)
    cache, start, outputs = new_kv_cache(1, HEADS, 4), 0, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", 4)
        for n in parts:
            at = slice(start, start + n)
            cache, keys, values = append(cache, k[:, :, at], v[:, :, at], window)
            outputs.append(attend(q[:, :, at], keys, values))
            start += n
    # Values of order one, a softmax over at most 84 keys: float32 rounding is below 1e-6.
    assert mx.allclose(mx.concatenate(outputs, axis=2), whole, rtol=0, atol=2e-6)


def assert_appends_in_place(cache, window, steps):
    """Appends, each read by attention, that need no memory of the size of the buffer. Returns the last cache."""
    mx.eval(cache.keys, cache.values)
    one = mx.ones((1, cache.keys.shape[1], 1, cache.keys.shape[3]))
    buffer = cache.keys.nbytes
    for _ in range(steps):
        cache, keys, values = append(cache, one, one, window)
        read = mx.fast.scaled_dot_product_attention(one, keys, values, scale=1.0)
        del keys, values
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(read, cache.keys, cache.values)
        # A copy of either buffer would show as one whole buffer more.
        assert mx.get_peak_memory() - before < 0.25 * buffer
    assert isinstance(cache, KVCache)
    assert cache.keys.nbytes == buffer
    return cache


@pytest.mark.parametrize("window", [None, 100])
def test_an_append_copies_no_buffer(window):
    one = mx.ones((1, 8, 1, 128))
    cache = append(new_kv_cache(1, 8, 128), one, one, window)[0]
    assert_appends_in_place(cache, window, 20)


@pytest.mark.parametrize("window", [None, 280])
def test_a_full_ring_is_written_in_place(window):
    past = mx.ones((1, 8, 500, 128))
    cache = append(new_kv_cache(1, 8, 128), past, past, window)[0]
    cache = bounded(cache, pinned=20, newest=236, window=window)
    cache = assert_appends_in_place(cache, window, 260)  # more than once around
    assert (cache.position, cache.length, cache.keys.shape[2]) == (760, 256, 256)


# A bounded history.


def visible(t, window, pinned, newest):
    """The positions that the query at t sees: the definition."""
    near = range(t + 1) if window is None else range(max(0, t - window + 1), t + 1)
    return [p for p in near if p < pinned or t - p < newest]


def exact(parts, window):
    """A cache that keeps everything, after these parts."""
    cache = new_kv_cache(1, HEADS, DIM)
    for n in parts:
        cache, _, _ = append(cache, *numbered(cache.position, n), window)
    return cache


def stepped(cache, window):
    """One position more: the cache, and the positions returned, in the order of their slots."""
    cache, keys, values = append(cache, *numbered(cache.position, 1), window)
    assert np.array_equal(np.array(values), -np.array(keys))
    return cache, [p - 1 for p in positions(keys)]


def slots(window, pinned, newest):
    return pinned + (newest if window is None else min(newest, window))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 7), max_size=6), windows, pins, bounds)
def test_a_bounded_cache_shows_exactly_what_is_kept(parts, window, pinned, newest):
    full = slots(window, pinned, newest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", 4)
        cache = bounded(exact(parts, window), pinned, newest, window)
        for t in range(sum(parts), sum(parts) + 2 * full + 3):
            cache, found = stepped(cache, window)
            expected = visible(t, window, pinned, newest)
            assert sorted(found) == expected
            assert t >= full or found == expected
            assert (cache.position, cache.length) == (t + 1, min(t + 1, full))
            assert (cache.pinned, cache.newest) == (pinned, newest)


@settings(deadline=None, max_examples=80)
@given(partitions, windows, pins, bounds)
def test_parts_that_fit_are_exact_and_others_are_refused(parts, window, pinned, newest):
    full = slots(window, pinned, newest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", 4)
        cache = bounded(new_kv_cache(1, HEADS, DIM), pinned, newest, window)
        for start, n in zip(accumulate(parts, initial=0), parts, strict=False):
            if n > 1 and start + n > full:
                with pytest.raises(InputError, match=f"^{n} positions at once after {start}, but only {full} are kept"):
                    append(cache, *numbered(start, n), window)
                assert cache.position == start
                return
            cache, keys, _ = append(cache, *numbered(start, n), window)
            found, mask = np.array(positions(keys)) - 1, attention_mask(n, keys.shape[2], window)
            seen = np.ones((n, len(found)), bool) if mask is None else np.array(mask)
            for i in range(n):
                assert sorted(found[seen[i]].tolist()) == visible(start + i, window, pinned, newest)


@settings(deadline=None, max_examples=60)
@given(partitions, windows, pins, bounds)
def test_a_ring_grows_by_doubling_until_it_is_full_and_never_moves_again(parts, window, pinned, newest):
    full = slots(window, pinned, newest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", 4)
        cache = bounded(exact(parts, window), pinned, newest, window)
        copied = counted(patch)
        for _ in range(2 * full):
            moves_before = len(copied)
            cache, _ = stepped(cache, window)
            doubled = next(4 << k for k in range(20) if 4 << k >= min(cache.position, full))
            assert cache.keys.shape[2] == cache.values.shape[2] == min(doubled, full)
            assert cache.position <= full or len(copied) == moves_before
    assert len(copied) <= 5


def test_ten_thousand_steps_of_a_ring_copy_the_past_twice(moves):
    cache = bounded(new_kv_cache(1, 1, 1), pinned=37, newest=750)
    moves.clear()
    cache, capacities = one_by_one(10_000, None, cache)
    assert moves == [256, 512]
    assert sorted(set(capacities)) == [256, 512, 787]
    assert (cache.length, cache.position) == (787, 10_000)


@pytest.mark.parametrize("window", [None, 6])
def test_the_exact_cache_goes_on_beside_the_bounded_one(window):
    original = exact([9], window)
    copy = bounded(original, 2, 3, window)
    for t in range(9, 16):
        original, found = stepped(original, window)
        assert found == visible(t, window, t + 1, 1)
        copy, found = stepped(copy, window)
        assert sorted(found) == visible(t, window, 2, 3)


def test_the_bounded_cache_shares_no_buffer():
    original = exact([9], None)
    mx.eval(original.keys, original.values)
    mx.synchronize()
    before = mx.get_active_memory()
    copy = bounded(original, 2, 30)
    assert mx.get_active_memory() - before >= states.nbytes(copy) == 2 * 32 * HEADS * DIM * 4


@pytest.mark.usefixtures("small_blocks")
def test_a_bounded_cache_is_a_state_like_any_other():
    cache = bounded(exact([9], 6), 4, 3, 6)
    cache, _ = stepped(cache, 6)
    kept = states.copy(cache)
    assert [path for path, _ in states.arrays(kept)] == ["keys", "values"]
    doubled = states.map_arrays(lambda x: 2 * x, kept)
    assert (kept.length, kept.position, kept.pinned, kept.newest) == (7, 10, 4, 3)
    assert (doubled.length, doubled.position, doubled.pinned, doubled.newest) == (7, 10, 4, 3)
    assert positions(doubled.keys) == [2 * p for p in positions(cache.keys)]
    for t in range(10, 14):
        cache, _ = stepped(cache, 6)
        kept, found = stepped(kept, 6)
        assert sorted(found) == visible(t, 6, 4, 3)


def test_dtype_and_batch_survive_the_bound():
    cache, _, _ = append(new_kv_cache(3, HEADS, DIM, mx.bfloat16), *numbered(0, 9, batch=3))
    cache, keys, values = append(bounded(cache, 2, 3), *numbered(9, 1, batch=3))
    assert (cache.keys.dtype, values.dtype, keys.shape) == (mx.bfloat16, mx.bfloat16, (3, HEADS, 5, DIM))
    # Slots 2 to 4 are positions 2, 5, 8 and 3, 6, 9 and 4, 7, 10: the newest of each.
    assert positions(keys.astype(mx.float32)) == [1, 2, 9, 10, 8]


def test_a_bound_of_the_whole_history_changes_no_bit():
    mx.random.seed(0)
    q, k, v = (mx.random.normal((1, HEADS, 40, 4)) for _ in range(3))
    caches = [bounded(new_kv_cache(1, HEADS, 4), 3, 37, None), new_kv_cache(1, HEADS, 4)]
    for t in range(40):
        outputs = []
        for i, cache in enumerate(caches):
            caches[i], keys, values = append(cache, k[:, :, t : t + 1], v[:, :, t : t + 1])
            outputs.append(mx.fast.scaled_dot_product_attention(q[:, :, t : t + 1], keys, values, scale=0.5))
        assert mx.array_equal(*outputs)


@pytest.mark.parametrize(
    ("pinned", "newest", "message"),
    [(-1, 3, "^-1 pinned and 3 newest positions: at least 0 and 1"), (0, 0, "^0 pinned and 0 newest positions")],
)
def test_sizes_out_of_range_are_refused(pinned, newest, message):
    with pytest.raises(InputError, match=message):
        bounded(new_kv_cache(1, HEADS, DIM), pinned, newest)


def test_a_bounded_cache_is_not_bounded_again():
    with pytest.raises(InputError, match=r"^a cache of 2 pinned and 3 newest positions is bounded already$"):
        bounded(bounded(exact([9], None), 2, 3), 2, 3)


@pytest.mark.usefixtures("small_blocks")
def test_what_was_dropped_cannot_be_kept():
    cache = exact([1] * 30, 3)
    dropped = cache.position - cache.length
    assert dropped == 26
    for pinned, newest, oldest in ((1, 1, 0), (0, 30, 1), (2, 29, 0)):
        with pytest.raises(InputError, match=f"^the cache has dropped its first 26 positions, but position {oldest} "):
            bounded(cache, pinned, newest)
    assert bounded(cache, 0, 5).position == 30  # positions 26 to 29, and the present one to come
    with pytest.raises(InputError, match=r"^the cache has dropped its first 26 positions, but position 25 "):
        bounded(cache, 0, 6)
    assert bounded(cache, 40, 1, 5).position == 30  # all are pinned, but the window hides the first 26
    with pytest.raises(InputError, match=r"^the cache has dropped its first 26 positions, but position 25 "):
        bounded(cache, 40, 1, 6)


# ---- taken back


@settings(deadline=None, max_examples=40)
@given(partitions, st.integers(0, 12))
def test_a_rewound_cache_is_what_it_was(parts, back):
    """Values, length and capacity; and it shares nothing with the one it came from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", 4)
        total = sum(parts)
        back = min(back, total - 1)
        cache, then, seen = new_kv_cache(1, HEADS, DIM), new_kv_cache(1, HEADS, DIM), 0
        for n in parts:
            cache, *_ = append(cache, *numbered(seen, n))
            seen += n
        then, *_ = append(then, *numbered(0, total - back))
        found = rewound(cache, back)
        assert (found.length, found.position) == (total - back, total - back)
        assert found.keys.shape == then.keys.shape
        assert mx.array_equal(found.keys[:, :, : found.length], then.keys[:, :, : found.length])
        assert mx.array_equal(found.values[:, :, : found.length], then.values[:, :, : found.length])
        append(found, *numbered(99, 1))
        assert positions(cache.keys[:, :, :total]) == list(range(1, total + 1))


def test_what_was_dropped_cannot_be_taken_back(small_blocks):
    cache = new_kv_cache(1, HEADS, DIM)
    for seen in range(9):
        cache, *_ = append(cache, *numbered(seen, 1), 3)
    assert cache.length < cache.position
    assert rewound(cache, 1) is None


def test_more_than_there_was_cannot_be_taken_back():
    cache, *_ = append(new_kv_cache(1, HEADS, DIM), *numbered(0, 3))
    with pytest.raises(InputError, match="5 positions cannot be taken back: 3 were seen"):
        rewound(cache, 5)
    with pytest.raises(InputError, match="bounded"):
        rewound(bounded(cache, 1, 1), 1)


# One position at a time, in arrays.


def reserved(cache, window):
    """One position more by a place and arrays: the cache, and the positions that its mask shows, by slot."""
    place = reserve(cache, window)
    slot, mask = place.arrays()
    assert mask.shape == (1, 1, 1, cache.keys.shape[2])
    cache = store(cache, *numbered(place.position, 1), slot)
    return cache, (np.array(cache.keys)[0, 0, np.array(mask)[0, 0, 0], 0].astype(int) - 1).tolist()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 7), max_size=6), windows, pins, bounds, st.booleans())
def test_a_reserved_position_is_an_appended_one(parts, window, pinned, newest, ring):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", 4)
        one, other = (exact(parts, window) for _ in range(2))
        if ring:
            one, other = (bounded(cache, pinned, newest, window) for cache in (one, other))
        for _ in range(30):
            one, expected = stepped(one, window)
            other, found = reserved(other, window)
            assert found == expected
            assert (other.length, other.position, other.keys.shape) == (one.length, one.position, one.keys.shape)


def test_a_stored_position_is_written_in_place():
    cache = KVCache(mx.zeros((1, 2, 256, 512)), mx.zeros((1, 2, 256, 512)))
    mx.eval(cache.keys, cache.values)
    for _ in range(5):
        slot, _ = reserve(cache).arrays()
        new = mx.ones((1, 2, 1, 512))
        mx.eval(slot, new)
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        cache = store(cache, new, new, slot)
        mx.eval(cache.keys, cache.values)
        assert mx.get_peak_memory() - held < cache.keys.nbytes // 8


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 7), max_size=6), windows, pins, bounds, st.booleans())
def test_what_it_will_grow_to_is_known_before(parts, window, pinned, newest, ring):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", 4)
        cache = exact(parts, window)
        if ring:
            cache = bounded(cache, pinned, newest, window)
        for _ in range(60):
            capacity, full = cache.keys.shape[2], cache.keys.shape[2] == cache.length
            larger = grown(cache, window)
            cache, _ = reserved(cache, window)
            if full and cache.keys.shape[2] != capacity:
                assert larger is not None
                assert (larger.keys.shape, larger.values.shape) == (cache.keys.shape, cache.values.shape)
            if larger is None:
                assert cache.keys.shape[2] == capacity


@pytest.mark.parametrize("window", [None, 3, 300])
def test_a_trimmed_cache_holds_what_is_filled_and_goes_on_as_before(window):
    cache = exact([100, 57], window)
    kept = trimmed(cache)
    assert kept.keys.shape[2] == cache.length < cache.keys.shape[2]
    again = roomy(kept, cache.keys.shape[2])
    assert np.array_equal(np.array(again.keys)[:, :, : again.length], np.array(cache.keys)[:, :, : cache.length])
    for _ in range(120):
        cache, expected = stepped(cache, window)
        again, found = stepped(again, window)
        assert found == expected
        assert again.keys.shape == cache.keys.shape
