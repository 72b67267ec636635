"""The transducer's loss against the sum over every alignment, finite differences, and NeMo's numbers."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from training.listening import rnnt_loss
from training.listening.rnnt_loss import agrees, plain_lattice, transducer_loss

Logits = NDArray[np.float64]


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def by_every_alignment(logits: Logits, labels: list[int]) -> float:
    """Minus the log of the sum over all orders of T blanks and the labels that end with a blank."""
    frames, log_p, total = logits.shape[0], log_softmax(logits), 0.0
    places = range(frames - 1 + len(labels))
    for said_at in itertools.combinations(places, len(labels)):
        t = u = 0
        path = 0.0
        for place in places:
            if place in said_at:
                path += log_p[t, u, labels[u]]
                u += 1
            else:
                path += log_p[t, u, -1]
                t += 1
        total += np.exp(path + log_p[t, u, -1])
    return -float(np.log(total))


def loss_of(logits: Logits, labels: list[list[int]], lengths: list[int]) -> mx.array:
    return transducer_loss(mx.array(logits.astype(np.float32)), mx.array(labels), mx.array(lengths))


def test_it_is_the_sum_over_every_alignment() -> None:
    logits = 2 * np.random.default_rng(0).standard_normal((4, 5, 4, 6))
    labels, lengths = [[0, 3, 3], [4, 1, 0], [2, 2, 2], [1, 0, 0]], [3, 2, 0, 1]
    expected = [
        by_every_alignment(logits[b, :, : lengths[b] + 1], labels[b][: lengths[b]]) for b in range(len(lengths))
    ]
    assert np.allclose(loss_of(logits, labels, lengths).tolist(), expected, rtol=1e-5)


def test_one_frame_says_all_its_labels() -> None:
    logits = np.random.default_rng(1).standard_normal((1, 1, 3, 4))
    log_p = log_softmax(logits[0, 0])
    expected = -(log_p[0, 2] + log_p[1, 0] + log_p[2, -1])
    assert loss_of(logits, [[2, 0]], [2]).item() == pytest.approx(expected, rel=1e-5)


def test_nothing_behind_the_last_label_matters() -> None:
    logits = np.random.default_rng(2).standard_normal((1, 6, 5, 4))
    before = loss_of(logits, [[1, 2, 0, 0]], [2]).item()
    logits[:, :, 3:] += 5 * np.random.default_rng(3).standard_normal(logits[:, :, 3:].shape)
    assert loss_of(logits, [[1, 2, 3, 1]], [2]).item() == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_its_gradient_is_that_of_finite_differences(compiled: bool) -> None:
    rng = np.random.default_rng(4)
    logits, labels, lengths = rng.standard_normal((2, 4, 3, 4)), [[2, 1], [0, 3]], [2, 1]

    def total(x: mx.array) -> mx.array:
        # Weights that differ by sample: the cotangent is not one.
        return (transducer_loss(x, mx.array(labels), mx.array(lengths)) * mx.array([1.0, 3.0])).sum()

    gradient = mx.grad(total)
    found = np.array((mx.compile(gradient) if compiled else gradient)(mx.array(logits.astype(np.float32))))
    exact = np.zeros_like(logits)
    for index in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[index] = 1e-5
        b = index[0]
        of = [
            by_every_alignment((logits + sign * step)[b, :, : lengths[b] + 1], labels[b][: lengths[b]])
            for sign in (1, -1)
        ]
        exact[index] = (of[0] - of[1]) / 2e-5 * (1.0, 3.0)[b]
    assert np.abs(found - exact).max() < 1e-4
    assert np.abs(found).max() > 0.1


def test_nemos_numbers() -> None:
    """RNNTLossPytorch of NeMo 3.0.0 on the same logits: losses, and the gradient's absolute sum."""
    rng = np.random.default_rng(3)
    logits = 2 * rng.standard_normal((4, 9, 5, 7)).astype(np.float32)
    labels = mx.array(rng.integers(0, 6, (4, 4)))
    lengths = mx.array([4, 0, 2, 3])
    losses = transducer_loss(mx.array(logits), labels, lengths)
    assert np.allclose(losses.tolist(), [32.235996, 31.85545, 28.812153, 20.191418], rtol=1e-6)
    gradient = mx.grad(lambda x: transducer_loss(x, labels, lengths).sum())(mx.array(logits))
    assert mx.abs(gradient).sum().item() == pytest.approx(69.4896, rel=1e-5)


def test_each_sample_takes_every_blank_and_every_label_once() -> None:
    blank, label = (mx.random.normal((3, 7, 5), key=mx.random.key(k)) for k in (0, 1))
    lengths = mx.array([4, 2, 0])
    label = mx.where(mx.arange(5) < lengths[:, None, None], label, rnnt_loss.NONE)
    _, blank_arcs, label_arcs = plain_lattice(blank, label, lengths)
    assert np.allclose(blank_arcs.sum(axis=2).tolist(), np.ones((3, 7)), atol=1e-5)
    expected = (np.arange(5) < np.array(lengths)[:, None]).astype(float)
    assert np.allclose(label_arcs.sum(axis=1).tolist(), expected, atol=1e-5)


def as_the_kernels(blank: mx.array, label: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The two kernels' text, word for word, with their threads one after the other between two barriers."""
    batch, frames, places = blank.shape
    blanks, labels, ends = np.array(blank), np.array(label), np.array(lengths)
    likelihood = np.zeros(batch, np.float32)
    reached, by_blank, by_label = (np.full((batch, frames * places), np.nan, np.float32) for _ in range(3))
    for b in range(batch):
        flat_blank, flat_label = blanks[b].ravel(), labels[b].ravel()
        rows, mine = np.full((2, places), np.nan, np.float32), np.full(places, rnnt_loss.NONE, np.float32)
        for d in range(frames + places - 1):
            for u in range(places):
                t, value, cell = d - u, np.float32(rnnt_loss.NONE), (d - u) * places + u
                if 0 <= t < frames:
                    stay = mine[u] + flat_blank[cell - places] if t > 0 else rnnt_loss.NONE
                    below = rows[(d + 1) & 1][u - 1] + flat_label[cell - 1] if u > 0 else rnnt_loss.NONE
                    value = np.float32(0) if d == 0 else np.logaddexp(stay, below)
                    reached[b, cell] = value
                    if t == frames - 1 and u == ends[b]:
                        likelihood[b] = value + flat_blank[cell]
                mine[u] = rows[d & 1][u] = value
        rows, mine = np.full((2, places), np.nan, np.float32), np.full(places, rnnt_loss.NONE, np.float32)
        for d in range(frames + places - 2, -1, -1):
            for u in range(places):
                t, value, cell = d - u, np.float32(rnnt_loss.NONE), (d - u) * places + u
                if 0 <= t < frames:
                    behind = mine[u] if t < frames - 1 else (0.0 if u == ends[b] else rnnt_loss.NONE)
                    above = rows[(d + 1) & 1][u + 1] if u < ends[b] else rnnt_loss.NONE
                    through_blank, through_label = flat_blank[cell] + behind, flat_label[cell] + above
                    value = np.logaddexp(through_blank, through_label)
                    by_blank[b, cell] = np.exp(reached[b, cell] + through_blank - likelihood[b])
                    by_label[b, cell] = np.exp(reached[b, cell] + through_label - likelihood[b])
                mine[u] = rows[d & 1][u] = value
    arcs = (mx.array(x.reshape(batch, frames, places)) for x in (by_blank, by_label))
    return mx.array(likelihood), *arcs


def test_the_kernels_algorithm_is_the_plain_form() -> None:
    """The kernels cannot run here; what they do, can."""
    assert agrees(lattice=as_the_kernels, places=9) < 1e-3


def test_a_form_that_is_wrong_is_noticed() -> None:
    def wrong(blank: mx.array, label: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        likelihood, by_blank, by_label = plain_lattice(blank, label, lengths)
        return likelihood, by_blank, by_label + 0.01 * (mx.arange(label.shape[2]) == 3)

    with pytest.raises(ArithmeticError, match=r"differ by 0\.0"):
        agrees(lattice=wrong, places=9)
    with pytest.raises(ArithmeticError, match="nan"):
        agrees(lattice=lambda b, a, n: (mx.full((5,), float("nan")), b, a), places=9)
