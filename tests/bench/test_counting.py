"""Counts of waits and primitives."""

import mlx.core as mx
import numpy as np
import pytest

from tests.bench.counting import Counted, counting, one_node_each, primitives
from tests.bench.own import Own, mute
from voicechat_core import VoiceChat


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def evaluated(*shape: int) -> mx.array:
    x = mx.ones(shape)
    mx.eval(x)
    return x


def test_what_is_computed_already_is_no_primitive() -> None:
    x = evaluated(2, 4)
    y = x @ x.T
    assert primitives([y]) == {"Transpose": 1, "Matmul": 1}
    mx.eval(y)
    assert primitives([y, y[:1].T]) == {"Slice": 1, "Transpose": 1}


def test_views_are_not_counted_and_chains_that_are_compiled_are_one() -> None:
    x = evaluated(2, 4)
    with counting() as plain:
        mx.eval(mx.exp(mx.sin(x).T))
    with counting() as compiled:
        mx.eval(mx.compile(lambda x: mx.exp(mx.sin(x)))(x).T)
    assert (plain.primitives, compiled.primitives) == (2, 1)
    assert plain.nodes["Transpose"] == compiled.nodes["Transpose"] == 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: mx.eval(x),
        lambda x: mx.eval([{"a": x}], x),
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: int(x),
        lambda x: float(x),
        lambda x: bool(x),
        lambda x: np.array(x),
        lambda x: np.asarray(x, dtype=np.float64),
        lambda x: range(x.astype(mx.int32)),
    ],
)
def test_each_way_to_wait_is_one(wait: object) -> None:
    x = evaluated() + 1
    with counting() as counted:
        wait(x)  # type: ignore[operator]
    assert counted.waits == 1
    assert counted.nodes["Add"] == 1


def test_a_wait_within_a_wait_is_that_wait() -> None:
    counted = Counted()
    x = evaluated(3) + 1
    inner = counted.around(lambda x: x, lambda x: [x])
    counted.around(inner, lambda x: [x])(x)
    assert (counted.waits, counted.primitives) == (1, 1)
    inner(x)
    assert counted.waits == 2


def test_other_conversions_do_not_wait() -> None:
    with counting() as counted:
        np.array([1, 2])
        mx.eval()
        mx.array(np.ones(3)) + 1
    assert (counted.waits, counted.primitives) == (0, 0)


def test_nothing_is_counted_afterwards() -> None:
    with counting() as counted:
        pass
    mx.eval(evaluated(3) + 1)
    assert counted.waits == 0


def test_a_fast_operation_is_one_node_with_all_that_it_needs() -> None:
    q, k = (evaluated(1, 2, 3, 4) for _ in range(2))
    mask = evaluated(3, 3)
    with one_node_each():
        found = mx.fast.scaled_dot_product_attention(q, k * 2, k * 3, scale=1.0, mask=mask + 1)
        normed = mx.compile(lambda x: mx.fast.rms_norm(x + 1, None, 1e-5) + 1)(q)
        counts, compiled = primitives([found]), primitives([normed])
    assert (counts["Softmax"], counts["Multiply"], counts["Add"]) == (1, 2, 1)
    assert compiled == {"CompiledBroadcastAdd": 2, "Softmax": 1}
    assert primitives([mx.fast.rms_norm(q, None, 1e-5)])["Rsqrt"] == 1


def test_what_is_asked_for_ahead_counts_but_is_no_wait() -> None:
    x = evaluated(2, 4)
    with counting() as counted:
        y = mx.exp(x)
        mx.async_eval(y)
        np.array(y)
    assert (counted.waits, counted.primitives) == (1, 1)


def test_our_frame_counted_from_outside_is_what_the_core_counts(tiny: VoiceChat) -> None:
    """The peer is counted from outside; of 593 primitives one chain more is fused by these stand-ins."""
    with one_node_each():
        ours = Own(mute(VoiceChat(tiny.model)))
        with counting() as counted:
            for _ in range(2):
                ours.frame()
    found, core = counted.a_frame(2), ours.count(1)
    assert core["host_waits"] == found["host_waits"] == 1
    assert core["primitives"] == pytest.approx(found["primitives"], abs=1)
    assert core["by_name"]["Matmul"] == found["by_name"]["Matmul"]
