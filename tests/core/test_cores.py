"""Halves on two CPU streams: the same rows, whichever stream made them, and one stream for what is small."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core import blas
from voicechat_core.nn import cores
from voicechat_core.nn.cores import WORTH_IT, by_halves


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Two cores, whatever this machine has; the shapes that a function was given."""
    monkeypatch.setattr(cores, "CORES", 2)
    monkeypatch.setattr(blas, "threads", lambda: 1)
    return []


def pair_sums(seen: list[tuple[int, ...]], before: int) -> object:
    """Each row and the ``before`` rows before it, summed; every sum twice, as rows of its own."""

    def function(x: mx.array) -> mx.array:
        seen.append(tuple(x.shape))
        rows = x.shape[1] - before
        total = sum((x[:, j : j + rows] for j in range(before + 1)), mx.array(0.0))
        return mx.repeat(total, 2, axis=1)

    return function


@pytest.mark.parametrize(("rows", "before"), [(2, 0), (9, 0), (9, 3), (2, 6)])
def test_two_halves_are_the_whole(cut: list[tuple[int, ...]], rows: int, before: int) -> None:
    if mx.default_device() != mx.cpu:
        pytest.skip("only a CPU is divided")
    x = mx.array(np.random.default_rng(0).standard_normal((2, before + rows, 3)), mx.float32)
    function = pair_sums(cut, before)
    divided = by_halves(function, x, WORTH_IT, before)
    assert sorted(shape[1] - before for shape in cut) == [rows // 2, rows - rows // 2]
    cut.clear()
    assert mx.array_equal(divided, by_halves(function, x, WORTH_IT - 1, before))
    assert [shape[1] - before for shape in cut] == [rows]


def test_one_row_and_one_core_are_not_divided(cut: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    by_halves(pair_sums(cut, 2), mx.zeros((1, 3, 1)), WORTH_IT, 2)
    monkeypatch.setattr(cores, "CORES", 1)
    by_halves(pair_sums(cut, 2), mx.zeros((1, 9, 1)), WORTH_IT, 2)
    assert [shape[1] for shape in cut] == [3, 9]


@pytest.mark.parametrize(("cores_here", "threads", "parts"), [(2, 2, 1), (3, 2, 1), (4, 2, 2)])
def test_cores_that_the_blas_uses_are_not_free(
    cut: list[tuple[int, ...]], cores_here: int, threads: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mx.default_device() != mx.cpu:
        pytest.skip("only a CPU is divided")
    monkeypatch.setattr(cores, "CORES", cores_here)
    monkeypatch.setattr(blas, "threads", lambda: threads)
    by_halves(pair_sums(cut, 0), mx.zeros((1, 8, 1)), WORTH_IT)
    assert [shape[1] for shape in cut] == [8 // parts] * parts


def test_each_thread_has_a_second_stream_of_its_own(cut: list[tuple[int, ...]]) -> None:
    """A stream may not be used by another thread than the one that made it."""
    x, results = mx.arange(12.0).reshape(1, 12, 1), []

    def work() -> None:
        results.append(by_halves(pair_sums(cut, 0), x, WORTH_IT)[0, :, 0].tolist())
        mx.clear_streams()

    mx.eval(by_halves(pair_sums(cut, 0), x, WORTH_IT))
    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert results == [[float(i // 2) for i in range(24)]] * 2
