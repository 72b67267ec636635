"""Constants that follow from several parameters: computed when first needed, and again when a parameter is another."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

__all__ = ["Folded"]


class Folded:
    """What ``function`` makes of parameters: an array, or a list or tuple of arrays; evaluated at once.

    So a step that is traced for compilation finds a constant and not its computation.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._sources: tuple[mx.array, ...] = ()
        self._value: Any = None

    def __call__(self, *sources: mx.array) -> Any:
        """``function(*sources)``; the value of the last call if these are the arrays that it was made of."""
        known = len(sources) == len(self._sources)
        if not known or any(a is not b for a, b in zip(sources, self._sources, strict=True)):
            self._sources, self._value = sources, self._function(*sources)
            mx.eval(self._value)
        return self._value
