"""Exact counts: the machinery on graphs and frames that can be counted by hand, and a frame of ``deep``."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core import ModelError, VoiceChat, counts, load
from voicechat_core.compilation import Compile, wanted
from voicechat_core.counts import (
    fast_ops_as_one,
    host_waits,
    host_waits_per_frame,
    primitives,
    primitives_per_frame,
)
from voicechat_core.nn import rnnt
from voicechat_core.synthetic import synthesize

# What a frame of ``deep`` costs, as it is written and compiled. These are exact counts: a change that changes one
# changes it here. Compiled it must stay below 1,900; the peer takes 4,796.
DEEP_PRIMITIVES = {"off": 2820, "on": 1859}


@pytest.fixture
def x() -> mx.array:
    found = mx.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mx.eval(found)
    return found


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with as many layers as the published one; it takes seconds to make."""
    path = tmp_path_factory.mktemp("counts") / "deep"
    synthesize(path, preset="deep")
    return path


# ---- primitives


def test_each_primitive_counts_once_however_often_it_is_used(x: mx.array) -> None:
    y = mx.exp(x)
    assert primitives(y + y, mx.sin(y)) == {"Exp": 1, "Add": 1, "Sin": 1}
    assert primitives(y, y) == {"Exp": 1}


def test_views_are_free(x: mx.array) -> None:
    y = x.reshape(3, 2).T[None].flatten()
    a, b = mx.split(mx.unflatten(y, 0, (2, 3))[:, 1:], 2)
    assert primitives(mx.broadcast_to(a, (5, 1, 2)), mx.stop_gradient(b).squeeze(0)) == {}
    assert primitives(mx.as_strided(x, (2, 2), (1, 1)), mx.depends(x, [y])) == {}
    assert primitives(mx.contiguous(y)) == {"Contiguous": 1}


def test_what_is_computed_costs_nothing(x: mx.array) -> None:
    y = mx.exp(x)
    mx.eval(y)
    assert primitives(mx.sin(y)) == {"Sin": 1}
    assert primitives(y) == {}


def test_a_compiled_chain_is_one(x: mx.array) -> None:
    def chain(x: mx.array) -> mx.array:
        return mx.exp(x) * 2.0 + x

    assert primitives(chain(x)).total() == 3
    [(name, count)] = primitives(mx.compile(chain)(x)).items()
    assert (name.startswith("Compiled"), count) == (True, 1)


# ---- mx.fast


def attention(q: mx.array, more: dict[str, Any]) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, q[:, :2], q[:, 2:], scale=1.0, **more)


def fast_calls() -> dict[str, Callable[[], mx.array]]:
    x, w = mx.random.normal((2, 5, 8)), mx.random.normal((8,))
    half, heads = x.astype(mx.bfloat16), mx.random.normal((1, 4, 3, 8))
    mask, periods, at = mx.array(np.tri(3) > 0), mx.abs(mx.random.normal((4,))), mx.array(5)
    mx.eval(x, w, half, heads, mask, periods, at)
    return {
        "rms_norm": lambda: mx.fast.rms_norm(x, w, 1e-5),
        "rms_norm without a weight": lambda: mx.fast.rms_norm(x, None, 1e-5),
        "rms_norm of halves": lambda: mx.fast.rms_norm(half, None, 1e-5),
        "layer_norm": lambda: mx.fast.layer_norm(x, w, w, 1e-5),
        "rope by its base": lambda: mx.fast.rope(heads, 8, traditional=False, base=1e4, scale=1.0, offset=3),
        "rope by periods": lambda: mx.fast.rope(
            half[None], 8, traditional=False, base=None, scale=1.0, offset=at, freqs=periods
        ),
        "attention": lambda: attention(heads, {}),
        "causal attention": lambda: attention(heads, {"mask": "causal"}),
        "masked attention": lambda: attention(heads, {"mask": mask}),
        "attention with scores": lambda: attention(heads, {"mask": mx.array(np.zeros((3, 3), np.float32))}),
    }  # fmt: skip


@pytest.mark.parametrize("name", fast_calls())
def test_a_fast_function_is_one_primitive(name: str) -> None:
    call = fast_calls()[name]
    true = call()
    with fast_ops_as_one() as called:
        found = call()
        traced = mx.compile(lambda: mx.exp(call()))()
    assert primitives(found) == {"Concatenate": 1}
    assert sorted(primitives(traced)) == ["Concatenate", "Exp"]
    assert (found.shape, found.dtype) == (true.shape, true.dtype)
    assert list(called.values()) == [2]
    mx.eval(found)


def test_a_fast_function_needs_all_that_it_is_given(x: mx.array) -> None:
    """Else what made these would be missed: also what is no number of the result's kind."""
    row = x[:1].flatten()
    with fast_ops_as_one():
        normal = mx.fast.layer_norm(mx.exp(x), mx.sin(row), mx.cos(row), 1e-5)
        assert primitives(normal) == {"Concatenate": 1, "Exp": 1, "Sin": 1, "Cos": 1}
        q = x[None, None]
        seen = mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0, mask=mx.abs(x[:, :2]) > 2)
        assert primitives(seen) == {"Concatenate": 1, "Abs": 1, "Greater": 1}
        turned = mx.fast.rope(q[..., :2], 2, traditional=False, base=None, scale=1.0, offset=0, freqs=mx.exp(row[:1]))
        assert primitives(turned) == {"Concatenate": 1, "Exp": 1}


def test_casts_are_counted(x: mx.array) -> None:
    with fast_ops_as_one():
        found = mx.fast.rms_norm(x.astype(mx.bfloat16), x[:1].flatten(), 1e-5)
    assert primitives(found) == {"Concatenate": 1, "AsType": 2}


def test_everything_is_put_back(x: mx.array) -> None:
    before = [mx.fast.rms_norm, mx.fast.rope, mx.eval, mx.array.item, mx.array.__bool__, np.array]
    with pytest.raises(KeyError), fast_ops_as_one(), host_waits():
        raise KeyError(mx.fast.rms_norm is before[0])
    assert [mx.fast.rms_norm, mx.fast.rope, mx.eval, mx.array.item, mx.array.__bool__, np.array] == before
    with fast_ops_as_one(), host_waits():
        assert [mx.fast.rms_norm, mx.eval, np.array] != [before[0], before[2], before[5]]


# ---- the host's waits


def test_all_that_a_host_waits_by(x: mx.array) -> None:
    with host_waits() as waits:
        mx.eval(x + 1)
        assert (x[0, 0] + 1).item() == 2
        assert x.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert (int(x[0, 1]), float(x[0, 2]), bool(x[0, 0]), [7, 8, 9][mx.array(2)]) == (2, 3.0, True, 9)
        assert np.array(x).sum() == np.asarray(x).sum() == np.array([x[0], x[1]]).sum() == 21
        assert np.array([x[0, 0], x[0, 1]]).sum() == 3  # by whatever it asks them
    expected = {"eval": 1, "item": 1, "tolist": 1, "__int__": 1, "__float__": 1, "__bool__": 1, "__index__": 1}
    assert waits.by == {**expected, "np.array": 3, "np.asarray": 1}
    assert (waits.frame, waits.labels) == (11, 0)


def test_what_waits_for_nothing(x: mx.array) -> None:
    with host_waits() as waits:
        mx.async_eval(x + 1)
        samples = np.array([1.0, 2.0], np.float32)
        mx.array(np.asarray(samples)) + x[:, :2]
    assert (waits.frame, waits.labels, waits.by) == (0, 0, {})


def test_waits_for_labels_are_counted_apart(x: mx.array) -> None:
    with host_waits() as waits:
        assert rnnt._number(mx.argmax(x).astype(mx.int32)) == 5
        assert (x + 1)[1, 2].item() == 7
    assert (waits.frame, waits.labels, waits.by) == (1, 1, {"item": 2})


def test_a_failing_wait_counts(x: mx.array) -> None:
    with host_waits() as waits:
        with pytest.raises(ValueError, match="length-1 arrays"):
            x.item()
        assert x[0, 0].item() == 1
    assert waits.by == {"item": 2}


# ---- a frame


def test_a_frame_of_tiny_is_counted_the_same_each_time(tiny: VoiceChat) -> None:
    first, again = primitives_per_frame(tiny), primitives_per_frame(tiny)
    assert first == again
    assert first["Convolution"] > 0 < first["DynamicSliceUpdate"]


def test_a_count_leaves_the_model_as_it_was(tiny: VoiceChat) -> None:
    def heard() -> list[bytes]:
        samples = 0.05 * np.random.default_rng(1).standard_normal(5 * 1280)
        events = tiny.session(system_prompt="").push(samples.astype(np.float32))
        return [np.asarray(event.samples).tobytes() for event in events if hasattr(event, "samples")]

    before = heard()
    primitives_per_frame(tiny)
    assert heard() == before
    assert len(before) == 5


def test_more_work_in_a_frame_is_seen(tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is said and in what is remembered; a compiled chain is as good as its parts."""
    before = primitives_per_frame(tiny)
    true = counts.VoiceChat.session

    def session(self: VoiceChat, **options: Any) -> Any:
        found = true(self, **options)
        step = found._step

        def more(index: int, frames: Any) -> Any:
            state = found._live.codec
            state.columns = mx.erf(state.columns)
            mx.async_eval(mx.tan(mx.array(frames)))
            return step(index, frames)

        monkeypatch.setattr(found, "_step", more)
        return found

    monkeypatch.setattr(counts.VoiceChat, "session", session)
    assert primitives_per_frame(tiny) - before == {"Erf": 1, "Tan": 1}


def test_a_graph_that_is_not_built_anew_is_no_count(tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "fast_ops_as_one", lambda: nullcontext(Counter()))
    with pytest.raises(ModelError, match="was not built anew"):
        primitives_per_frame(tiny)


@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_frame_of_deep(compile: Compile, deep: Path) -> None:
    if compile == "on" and not wanted("auto"):
        pytest.skip("nothing is compiled here")
    voicechat = load(deep, compile=compile)
    assert primitives_per_frame(voicechat).total() == DEEP_PRIMITIVES[compile]
    waits = host_waits_per_frame(voicechat)
    assert (waits.frame, waits.labels, waits.by["np.array"]) == (1, waits.by["item"], 1)
    assert waits.labels > 0
