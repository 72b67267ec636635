"""One network's step over one frame: a function of arrays, run as it is written, or compiled.

MLX compiles a function for the shapes and types of the arrays that it is given, once for each, and knows nothing of
numbers that Python holds. So what changes from frame to frame comes in as arrays, and the counters of a state, which
say where its next position goes, are moved on before the step, by who prepares it.
"""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import mlx.core as mx

from voicechat_core.nn import cuda
from voicechat_core.nn import state as states

__all__ = ["Step"]

S = TypeVar("S")


class Step(Generic[S]):
    """``function(state, *inputs) -> (outputs, state)``, where inputs and outputs are arrays or nested tuples of them.

    Weights are constants of the compiled form. It must not be used after a weight was replaced.
    """

    def __init__(self, function: Callable[..., tuple[Any, S]], *, compiled: bool) -> None:
        self._function = function
        self._compiled = compiled
        self._here = _OfAThread[S]()

    @property
    def compiled(self) -> bool:
        """Whether it is compiled, not run as it is written."""
        return self._compiled

    def __call__(self, state: S, *inputs: Any) -> Any:
        """The outputs. ``state`` becomes the next one: it holds the new arrays, and its counters stay."""
        if self._compiled:
            outputs, leaves = self._run(state, inputs)
        else:
            with cuda.allowed():
                outputs, after = self._function(state, *inputs)
            leaves = states.leaves(after)
        states.assign(state, leaves)
        return outputs

    def prepare(self, state: S, *inputs: Any) -> bool:
        """Compile for arrays like these, of which nothing is computed: they may be lazy. ``state`` stays as it is.

        False if there is nothing to do: this thread has prepared it for such arrays before, or it is not compiled.
        """
        shapes = tuple(x.shape for x in states.leaves(state))
        if not self._compiled or shapes in self._here.prepared:
            return False
        self._run(state, inputs)
        self._here.prepared.add(shapes)
        return True

    def _run(self, state: S, inputs: tuple[Any, ...]) -> tuple[Any, list[mx.array]]:
        here = self._here
        if here.run is None:
            here.run = mx.compile(_on_leaves(self._function, here.template))
        here.template[:] = [state]
        try:
            result: tuple[Any, list[mx.array]] = here.run(inputs, states.leaves(state))
            return result
        finally:
            here.template.clear()


class _OfAThread(threading.local, Generic[S]):
    """A thread's own compiled form, as MLX has it: its cache is a thread's, and finds a function by its address.

    A function that several threads called would be forgotten by the last of them only, and another one at the same
    address, of a model that was loaded later, would be taken for it by the others.
    """

    def __init__(self) -> None:
        self.run: Callable[..., Any] | None = None
        self.template: list[S] = []  # the structure of the present state, for the time of a trace
        self.prepared: set[tuple[tuple[int, ...], ...]] = set()


def _on_leaves(function: Callable[..., tuple[Any, S]], template: list[S]) -> Callable[..., tuple[Any, list[mx.array]]]:
    """The function with its state as a list of arrays, which is what MLX compiles.

    Not a method: a step that held itself would keep the weights until Python looks for cycles.
    """

    def on_leaves(inputs: tuple[Any, ...], leaves: list[mx.array]) -> tuple[Any, list[mx.array]]:
        with cuda.allowed():
            outputs, after = function(states.with_leaves(template[0], leaves), *inputs)
        return outputs, states.leaves(after)

    return on_leaves
