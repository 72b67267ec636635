"""What a frame asks of MLX, counted from outside: host waits, and primitives of the graphs that are waited for.

A primitive is a node of the graph on the CPU backend. Views cost nothing and are left out; each ``mx.fast`` operation
is one node on every GPU, so a stand-in of one node takes its place. With stand-ins the values mean nothing.
"""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

__all__ = ["VIEWS", "Counted", "counting", "one_node_each", "primitives"]

VIEWS = frozenset(
    {
        *("Broadcast", "Transpose", "Reshape", "ExpandDims", "Flatten", "Unflatten", "Squeeze"),
        *("Slice", "Split", "Depends", "AsStrided", "StopGradient"),
    }
)
NODE = re.compile(r'label ?= ?"([^"]+)", ?shape ?= ?rectangle')
ON_ARRAYS = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "__array__")
FAST = ("rms_norm", "layer_norm", "rope", "scaled_dot_product_attention")


class Counted:
    """Waits, and the primitives by name of what was not computed before them."""

    def __init__(self) -> None:
        self.waits = 0
        self.nodes: Counter[str] = Counter()
        self._inside = False

    @property
    def primitives(self) -> int:
        """Without views."""
        return sum(count for name, count in self.nodes.items() if name not in VIEWS)

    def a_frame(self, frames: int) -> dict[str, Any]:
        """Both, a frame; and the commonest primitives."""
        common = {name: count / frames for name, count in self.nodes.most_common() if name not in VIEWS}
        return {"host_waits": self.waits / frames, "primitives": self.primitives / frames, "by_name": common}

    def around(self, wait: Callable[..., Any], of: Callable[..., list[mx.array]]) -> Callable[..., Any]:
        """``wait``, counted; what is waited for within a wait is that wait."""

        @wraps(wait)
        def counted(*args: Any, **kwargs: Any) -> Any:
            arrays = [] if self._inside else of(*args)
            if not arrays:
                return wait(*args, **kwargs)
            self.waits += 1
            self.nodes += primitives(arrays)
            self._inside = True
            try:
                return wait(*args, **kwargs)
            finally:
                self._inside = False

        return counted

    def ahead_of(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        """``ask`` for values without a wait: their primitives are counted here, for later they are gone."""

        @wraps(ask)
        def counted(*args: Any) -> Any:
            self.nodes += primitives(_arrays(*args))
            return ask(*args)

        return counted


def primitives(arrays: list[mx.array]) -> Counter[str]:
    """Nodes by name, views too, of the graph of what is not computed yet."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return Counter(NODE.findall(text.getvalue()))


def _arrays(*args: Any) -> list[mx.array]:
    return [value for _, value in tree_flatten(list(args)) if isinstance(value, mx.array)]


def _first(*args: Any) -> list[mx.array]:
    return [args[0]] if args and isinstance(args[0], mx.array) else []


@contextmanager
def counting() -> Iterator[Counted]:
    """Count ``mx.eval``, reads of arrays and their conversions to NumPy."""
    counted = Counted()
    with ExitStack() as stack:
        stack.enter_context(patch.object(mx, "eval", counted.around(mx.eval, _arrays)))
        stack.enter_context(patch.object(mx, "async_eval", counted.ahead_of(mx.async_eval)))
        for owner, names in ((mx.array, ON_ARRAYS), (np, ("array", "asarray"))):
            for name in names:
                stack.enter_context(patch.object(owner, name, counted.around(getattr(owner, name), _first)))
        yield counted


@contextmanager
def one_node_each() -> Iterator[None]:
    """``mx.fast`` operations as single nodes; functions that are compiled must be compiled within."""
    with ExitStack() as stack:
        for name in FAST:
            stack.enter_context(patch.object(mx.fast, name, _stand_in))
        yield


def _stand_in(x: mx.array, *others: Any, **named: Any) -> mx.array:
    """One node that no compiler fuses with its neighbours, of bounded values, which depends on all inputs."""
    y = mx.softmax(x, axis=-1)
    inputs = _arrays(others, named)
    return mx.depends([y], inputs)[0] if inputs else y
