"""Keys and values of past positions: what a query may see, however the positions came in."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from voicechat_core.nn import kv_cache
from voicechat_core.nn.kv_cache import KVCache, append, attention_mask, new_kv_cache

HEADS, DIM = 2, 3

partitions = st.lists(st.integers(1, 7), min_size=1, max_size=12)
windows = st.none() | st.integers(1, 9)


@pytest.fixture
def small_blocks(monkeypatch):
    """Growth every few positions."""
    monkeypatch.setattr(kv_cache, "BLOCK", 4)


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
            assert capacity <= (window - 1) + max(parts) + 4


def test_growth_across_the_real_block():
    sizes = [capacity for _, _, capacity, _ in fed([1] * 258 + [255], None)]
    assert (sizes[0], sizes[255], sizes[256], sizes[-1]) == (256, 256, 512, 768)


def test_the_buffer_has_at_most_one_block_of_empty_slots():
    for n in (1, 255, 256, 257, 1000):
        cache, _, _ = append(new_kv_cache(1, HEADS, DIM), *numbered(0, n))
        assert 0 <= cache.keys.shape[2] - n <= kv_cache.BLOCK


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


@pytest.mark.parametrize("window", [None, 100])
def test_an_append_copies_no_buffer(window):
    heads, dim = 8, 128
    one = mx.ones((1, heads, 1, dim))
    cache, _, _ = append(new_kv_cache(1, heads, dim), one, one, window)
    mx.eval(cache.keys, cache.values)
    buffer = cache.keys.nbytes
    for _ in range(20):
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
