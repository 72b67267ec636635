"""One network's step over one frame: a function of arrays, run as it is written, or compiled.

MLX compiles a function for the shapes and types of the arrays that it is given, once for each, and knows nothing of
numbers that Python holds. So what changes from frame to frame comes in as arrays, and the counters of a state, which
say where its next position goes, are moved on before the step, by who prepares it.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import mlx.core as mx

from voicechat_core.nn import state as states

__all__ = ["Step"]

S = TypeVar("S")


class Step(Generic[S]):
    """``function(state, *inputs) -> (outputs, state)``, where inputs and outputs are arrays or nested tuples of them.

    Weights are constants of the compiled form. It must not be used after a weight was replaced.
    """

    def __init__(self, function: Callable[..., tuple[Any, S]], *, compiled: bool) -> None:
        self._function = function
        self._template: S | None = None  # the structure of the present state, for the time of a trace
        self._run = mx.compile(self._on_leaves) if compiled else None

    def __call__(self, state: S, *inputs: Any) -> Any:
        """The outputs. ``state`` becomes the next one: it holds the new arrays, and its counters stay."""
        if self._run is None:
            outputs, after = self._function(state, *inputs)
            states.assign(state, states.leaves(after))
            return outputs
        self._template = state
        outputs, leaves = self._run(inputs, states.leaves(state))
        self._template = None
        states.assign(state, leaves)
        return outputs

    def _on_leaves(self, inputs: tuple[Any, ...], leaves: list[mx.array]) -> tuple[Any, list[mx.array]]:
        assert self._template is not None
        outputs, after = self._function(states.with_leaves(self._template, leaves), *inputs)
        return outputs, states.leaves(after)
