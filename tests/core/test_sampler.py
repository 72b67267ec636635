"""The sampler's arithmetic against renderings in plain NumPy."""

import math

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from voicechat_core.nn.sampler import (
    choose_component,
    depth_sum,
    gumbel,
    passes,
    quantize,
    schedule,
    square_norms,
    top_p,
)

Floats = npt.NDArray[np.float32]


def test_published_schedule() -> None:
    assert schedule(31, 8, 3.0) == [0, 0, 0, 1, 1, 3, 4, 22]
    assert passes(31, 8, 3.0) == ((0, 1), (1, 1), (2, 3), (5, 4), (9, 22))


@given(st.integers(1, 64), st.integers(1, 16), st.floats(1, 6))
def test_passes_cover_every_level_once_in_order(levels: int, iterations: int, exponent: float) -> None:
    covered = [level for start, count in passes(levels, iterations, exponent) for level in range(start, start + count)]
    assert covered == list(range(levels))
    assert all(count > 0 for _, count in passes(levels, iterations, exponent))


def sorted_top_p(logits: Floats, p: float) -> set[int]:
    """Indices kept: from the likeliest down, until what has been kept has mass p."""
    mass = np.exp(logits.astype(np.float64) - logits.max())
    mass /= mass.sum()
    kept: set[int] = set()
    total = 0.0
    for index in np.argsort(-logits, kind="stable"):
        if kept and total >= p:
            break
        kept.add(int(index))
        total += mass[index]
    return kept


@given(st.integers(0, 2**32 - 1), st.integers(1, 80), st.floats(0.05, 0.99), st.floats(0.1, 8))
def test_top_p_keeps_what_a_sort_keeps(seed: int, size: int, p: float, spread: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)
    kept = np.array(top_p(mx.array(logits)[None], p))[0]
    found, expected = set(np.flatnonzero(np.isfinite(kept)).tolist()), sorted_top_p(logits, p)
    # Float32 sums may decide the last entry the other way when the mass is p to six digits.
    mass = np.exp(logits - logits.max())
    at_edge = abs(float(mass[sorted(expected)].sum() / mass.sum()) - p) < 1e-5
    assert found == expected or (at_edge and len(found ^ expected) == 1)
    assert np.array_equal(kept[sorted(found)], logits[sorted(found)])


@pytest.mark.parametrize("p", [0.0, 0.05])
def test_top_p_always_keeps_the_likeliest(p: float) -> None:
    kept = np.array(top_p(mx.array([[0.0, 50.0, 1.0]]), p))
    assert np.isfinite(kept).tolist() == [[False, True, False]]


def test_gumbel_is_finite_at_the_ends() -> None:
    ends = np.array(gumbel(mx.array([0.0, 0.5, 1 - 2**-24])))
    expected = [-math.log(-math.log(1e-8)), -math.log(math.log(2)), -math.log(1e-8)]
    assert np.allclose(ends[:2], expected[:2], rtol=1e-5)
    assert np.isfinite(ends).all()
    assert ends[2] > 16


def test_component_draw_follows_the_probabilities() -> None:
    """4,000 draws: a share of 0.6 has a standard deviation of 0.008, so 0.04 is five of them."""
    logits = mx.log(mx.array([0.6, 0.3, 0.1]))
    u = mx.random.uniform(shape=(4000, 3), key=mx.random.key(3))
    chosen = np.array(choose_component(mx.broadcast_to(logits, u.shape), 1.0, u))
    shares = np.bincount(chosen, minlength=3) / len(chosen)
    assert np.abs(shares - [0.6, 0.3, 0.1]).max() < 0.04


def test_dropped_component_is_never_drawn() -> None:
    logits, u = mx.log(mx.array([[0.6, 0.37, 0.03]])), mx.array([0.1, 0.1, 0.999999])
    assert choose_component(logits, 1.0, u).item() == 2
    assert choose_component(logits, 0.95, u).item() != 2


def test_equal_components_give_the_lowest() -> None:
    assert choose_component(mx.zeros((1, 4)), 1.0, mx.full((4,), 0.5)).item() == 0


def plain_component(logits: mx.array, p: float, u: mx.array) -> mx.array:
    """The draw as the specification words it: logarithms of the kept components' probabilities, plus Gumbel's."""
    order = mx.argsort(logits, axis=-1)
    ascending = mx.take_along_axis(logits, order, axis=-1)
    mass = mx.cumsum(mx.softmax(ascending, axis=-1), axis=-1)
    kept = (mass > 1 - p) | (mx.arange(logits.shape[-1]) == logits.shape[-1] - 1)
    kept = mx.put_along_axis(mx.full(logits.shape, -mx.inf), order, mx.where(kept, ascending, -mx.inf), axis=-1)
    noise = -mx.log(-mx.log(u + 1e-8) + 1e-8)
    return mx.argmax(kept - mx.logsumexp(kept, axis=-1, keepdims=True) + noise, axis=-1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size", [5, 64, 1024])
@pytest.mark.parametrize("grid", [None, 4.0])
def test_component_is_that_of_the_plain_draw(size: int, grid: float | None, compiled: bool) -> None:
    """2,000 draws each; on a grid of few values for both, so that most logits, edges of top-p and scores are ties."""
    choose = mx.compile(choose_component) if compiled else choose_component
    keys = [mx.random.split(key) for key in mx.random.split(mx.random.key(size), 20)]
    tied = 0
    for first, second in keys:
        logits, u = 2 * mx.random.normal((100, size), key=first), mx.random.uniform(shape=(100, size), key=second)
        if grid is not None:
            logits, u = mx.round(logits * grid / 4) * 4 / grid, mx.floor(u * grid) / grid
            scores = logits + gumbel(u)
            tied += int(((scores == scores.max(axis=-1, keepdims=True)).sum(axis=-1) > 1).sum())
        assert mx.array_equal(choose(logits, 0.95, u), plain_component(logits, 0.95, u))
    assert grid is None or tied > 50


def numpy_quantize(latent: Floats, tables: Floats, start: int, count: int) -> list[int]:
    codes, rest = [], latent.astype(np.float64)
    for level in range(start, start + count):
        codes.append(int(np.argmin(((rest - tables[level]) ** 2).sum(-1))))
        rest = rest - tables[level][codes[-1]]
    return codes


@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(1, 3))
def test_quantize_takes_the_nearest_code_vector(seed: int, start: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    tables, latent = rng.standard_normal((8, 16, 6)).astype(np.float32), rng.standard_normal(6).astype(np.float32)
    depth = rng.standard_normal(6).astype(np.float32)
    table = mx.array(tables)
    codes, total = quantize(
        mx.array(latent)[None, None], mx.array(depth)[None, None], table, square_norms(table), start, count
    )
    expected = numpy_quantize(latent, tables, start, count)
    assert [code.item() for code in codes] == expected
    for level, code in enumerate(expected, start):
        depth = depth + tables[level][code]
    assert np.array_equal(np.array(total)[0, 0], depth)


@pytest.mark.parametrize("first", [False, True])
def test_codes_and_sums_are_those_of_the_distances_written_out(first: bool) -> None:
    """Equal to the bit: the product's factor of 2 rounds nothing. Without levels before, the sum begins with none."""
    tables = mx.random.normal((6, 64, 32), key=mx.random.key(0))
    latent, depth = (mx.random.normal((300, 1, 32), key=mx.random.key(n)) for n in (1, 2))
    norms, residual, total = square_norms(tables), latent, mx.zeros_like(depth) if first else depth
    codes, found = quantize(latent, None if first else depth, tables, norms, 1, 4)
    for code, level in zip(codes, range(1, 5), strict=True):
        assert mx.array_equal(code, mx.argmin(norms[level] - 2 * (residual @ tables[level].T), axis=-1))
        residual, total = residual - tables[level][code], total + tables[level][code]
    assert mx.array_equal(found, total)


def test_equal_distances_give_the_lowest_code() -> None:
    tables = mx.array([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [-1.0, 0.0]]])
    codes, _ = quantize(mx.array([[[0.0, 0.2]]]), mx.zeros((1, 1, 2)), tables, square_norms(tables), 0, 1)
    assert codes[0].item() == 1


def test_depth_sum_skips_the_id_past_the_last() -> None:
    tables = mx.array(np.arange(12, dtype=np.float32).reshape(2, 3, 2))
    codes = mx.array([[[0, 2], [3, 1], [3, 3]]])
    assert depth_sum(codes, tables).tolist() == [[[10.0, 12.0], [8.0, 9.0], [0.0, 0.0]]]
    assert depth_sum(codes, tables.astype(mx.bfloat16)).dtype == mx.float32


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_square_norms_are_float32(dtype: mx.Dtype) -> None:
    norms = square_norms(mx.array([[[3.0, 4.0]]]).astype(dtype))
    assert norms.dtype == mx.float32
    assert norms.item() == 25
