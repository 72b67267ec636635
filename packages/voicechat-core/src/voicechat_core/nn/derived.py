"""Values that follow from weights, computed once."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

__all__ = ["Derived", "is_traced"]


def is_traced(x: Any) -> bool:
    """Whether ``x`` stands for an input of a function that is being compiled, or follows from one: it has no value."""
    try:
        mx.eval(x)
    except ValueError:
        return True
    return False


class Derived:
    """What a function makes of parameters, an array or a tuple of them; made again only when one is another array.

    It is evaluated at once: a step that is traced meanwhile then holds its value, not the way to it. Where the
    parameters themselves are inputs of what is traced, as in training, nothing is kept.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._sources: tuple[mx.array, ...] = ()
        self._value: Any = None

    def __call__(self, *sources: mx.array) -> Any:
        """``function(*sources)``."""
        same = len(sources) == len(self._sources) and all(a is b for a, b in zip(sources, self._sources, strict=True))
        if self._value is None or not same:
            value = self._function(*sources)
            if is_traced(value):
                return value
            self._sources, self._value = sources, value
        return self._value
