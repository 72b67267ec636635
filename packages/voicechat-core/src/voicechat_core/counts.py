"""What a frame costs in exact counts, which no machine and no mood of a machine changes.

* The primitives of one steady frame: every node of the graph of its outputs and its new state, as MLX would run it,
  but for views, which compute nothing. Each ``mx.fast`` function counts as one, as it is one kernel on a GPU; MLX's CPU
  backend writes it out. The transcript branch is left out: it waits for each label, and how many there are is a matter
  of what is said.
* The host's waits: where a frame stops to see values. Those of the transcript branch are counted apart.

For measuring only: functions of MLX and NumPy are replaced meanwhile, for the whole process.
"""

import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from sys import _getframe
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from voicechat_core.errors import ModelError
from voicechat_core.session import Session
from voicechat_core.tokenizer import RnntVocabulary
from voicechat_core.voicechat import VoiceChat

__all__ = ["HostWaits", "fast_ops_as_one", "host_waits", "host_waits_per_frame", "primitives", "primitives_per_frame"]

# What computes nothing: another shape, or another name for the same numbers.
VIEWS = frozenset(
    (
        "Broadcast", "Transpose", "Reshape", "ExpandDims", "Flatten", "Unflatten", "Squeeze", "Slice", "Split",
        "Depends", "AsStrided", "StopGradient",
    )
)  # fmt: skip
NODE = re.compile(r'label ?= ?"([^"]+)", ?shape ?= ?rectangle')  # of a drawn graph; its arrays are drawn otherwise
STEADY = 6  # frames before the one that is counted: by then nothing is done for the first time
LOUDNESS = 0.05

Replaced = tuple[Any, str, Callable[..., Any]]


@contextmanager
def _replaced(*replacements: Replaced) -> Iterator[None]:
    """Attributes of modules and classes are others while it lasts."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, function in replacements:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


# ---- primitives


def primitives(*arrays: mx.array) -> Counter[str]:
    """The primitives that are still to be run for ``arrays``, by name and without views; a shared one counts once.

    What is computed already costs nothing. The name of a compiled chain begins with ``Compiled``.
    """
    drawing = StringIO()
    mx.export_to_dot(drawing, *arrays)
    return Counter(name for name in NODE.findall(drawing.getvalue()) if name not in VIEWS)


@contextmanager
def fast_ops_as_one() -> Iterator[Counter[str]]:
    """While it lasts, ``mx.fast`` functions give what has the right shape and dtype, and is one primitive.

    The numbers are not theirs: what is made in here is to be counted, not to be run. Gives how often each was called.
    What the same thread has compiled before keeps the true functions.
    """
    called: Counter[str] = Counter()
    fast = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")
    stand_ins = [(mx.fast, name, partial(_as_one, name, getattr(mx.fast, name), called)) for name in fast]
    with _replaced(*stand_ins):
        yield called


def _as_one(name: str, true: Callable[..., mx.array], called: Counter[str], *given: Any, **more: Any) -> mx.array:
    """One concatenation that needs every array of a call; the rest of it are views.

    Casts stay apart, as in MLX: it takes all numbers in the dtype of the result, but for positions and masks.
    """
    called[name] += 1
    result = true(*given, **more)  # for its shape; it is never run
    arrays = [x for x in (*given, *more.values()) if isinstance(x, mx.array)]
    joined = [x for x in arrays if mx.issubdtype(x.dtype, mx.floating) and name != "rope"] or arrays[:1]
    flat = [x.flatten() for x in joined]
    while sum(x.size for x in flat) < result.size or len(flat) < 2:  # of one array alone there is no concatenation
        flat.append(flat[0])
    one = mx.concatenate(flat)[: result.size].reshape(result.shape)
    others = [x for x in arrays if all(x is not y for y in joined)]
    return mx.depends(one, others) if others else one


# ---- the host's waits


@dataclass
class HostWaits:
    """How often the host stopped for values: in a frame, and apart from these, for transcript labels; by what."""

    frame: int = 0
    labels: int = 0
    by: Counter[str] = field(default_factory=Counter)
    _inside: bool = False

    def count(self, name: str, true: Callable[..., Any], seen: Callable[..., bool], *given: Any, **more: Any) -> Any:
        """Call ``true``, and count that as one wait, whatever it calls itself, if ``seen`` says so of its arguments."""
        if self._inside or not seen(*given):
            return true(*given, **more)
        self._inside = True
        try:
            return true(*given, **more)
        finally:
            self._inside = False
            self.by[name] += 1
            if _for_labels():
                self.labels += 1
            else:
                self.frame += 1


def _for_labels() -> bool:
    """Whether the transcript branch is who asks."""
    frame: Any = _getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "voicechat_core.nn.rnnt":
            return True
        frame = frame.f_back
    return False


READS = ("item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__index__")
TO_NUMPY = ("array", "asarray", "asanyarray", "ascontiguousarray", "copy")


@contextmanager
def host_waits() -> Iterator[HostWaits]:
    """Count while it lasts: ``mx.eval``, what makes Python's numbers of an array, and what makes NumPy's of one.

    A conversion that names neither (``memoryview(x)``) is not seen.
    """
    waits = HostWaits()
    with _replaced(*_seams(waits.count)):
        yield waits


def _seams(told: Callable[..., Any]) -> list[Replaced]:
    """Everything by which a host can see values, calling ``told(name, the true function, whether it is one, ...)``."""
    always, of_arrays = (lambda *given: True), (lambda *given: bool(given) and _has_arrays(given[0]))
    seams: list[Replaced] = [(mx, "eval", partial(told, "eval", mx.eval, always))]
    seams += [(mx.array, name, _method(partial(told, name, getattr(mx.array, name), always))) for name in READS]
    return seams + [(np, name, partial(told, f"np.{name}", getattr(np, name), of_arrays)) for name in TO_NUMPY]


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a class binds; a partial one it would not."""
    return lambda *given, **more: function(*given, **more)


def _has_arrays(value: object) -> bool:
    return isinstance(value, mx.array) or (isinstance(value, list | tuple) and any(map(_has_arrays, value)))


# ---- of a live session's frame


def host_waits_per_frame(voicechat: VoiceChat) -> HostWaits:
    """Those of one steady frame of quiet noise. The labels' depend on what is heard; the frame's do not."""
    session, rng = _steady(voicechat)
    with host_waits() as waits:
        _push(session, rng)
    return waits


def primitives_per_frame(voicechat: VoiceChat) -> Counter[str]:
    """Those of one steady frame's outputs and new state, without the transcript branch's.

    It is built anew on a thread of its own, for compiled steps belong to the thread that traced them: here they are
    traced once more, with each ``mx.fast`` function as one. Nothing of that is run.
    """
    session, rng = _steady(VoiceChat(replace(voicechat.model, rnnt_vocabulary=RnntVocabulary(()))))
    found: list[Counter[str] | BaseException] = []

    def build(device: mx.Device = mx.default_device()) -> None:  # noqa: B008 - of the thread that asks
        mx.set_default_device(device)
        try:
            found.append(_graph_of(session, rng))
        except BaseException as error:
            found.append(error)
        finally:
            mx.clear_streams()  # see "The server's model lives on one thread" in docs/architecture.md

    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class _EnoughError(Exception):
    """The frame wants to see values: its graph is complete."""


def _graph_of(session: Session, rng: np.random.Generator) -> Counter[str]:
    """All that the next frame would evaluate until it looks at a value, each node once."""
    asked: list[mx.array] = []

    def note(*values: Any) -> None:
        asked.extend(x for x in _leaves(values) if isinstance(x, mx.array))

    def told(name: str, true: Callable[..., Any], seen: Callable[..., bool], *given: Any, **more: Any) -> Any:
        if name == "eval":
            return note(*given)
        if seen(*given):
            raise _EnoughError
        return true(*given, **more)

    with fast_ops_as_one() as called, _replaced(*_seams(told), (mx, "async_eval", note)), suppress(_EnoughError):
        _push(session, rng)
    if not called or not asked:
        raise ModelError("the frame's graph was not built anew: nothing of it could be counted")
    return primitives(*asked)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _steady(voicechat: VoiceChat) -> tuple[Session, np.random.Generator]:
    """A session without a prompt that has run its first frames, and the noise that it goes on hearing."""
    session, rng = voicechat.session(system_prompt=""), np.random.default_rng(0)
    for _ in range(STEADY):
        _push(session, rng)
    return session, rng


def _push(session: Session, rng: np.random.Generator) -> None:
    """One frame of quiet noise; its events are dropped."""
    samples: npt.NDArray[np.float32] = (LOUDNESS * rng.standard_normal(1280)).astype(np.float32)
    deque(session.push(samples), maxlen=0)
