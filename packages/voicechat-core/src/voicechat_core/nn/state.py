"""What a session remembers, as values outside the networks.

A state is a small dataclass whose fields are arrays, integers, ``None``, other states, or lists of
these. The functions here walk any such value, so that a new state needs no code of its own.

A step consumes the state it is given: MLX updates a buffer in place only while nothing else holds
it. Whoever wants to keep a state takes a ``copy`` first.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import mlx.core as mx

__all__ = ["arrays", "copy", "evaluate", "map_arrays", "nbytes"]

S = TypeVar("S")


def map_arrays(function: Callable[[mx.array], mx.array], state: S) -> S:
    """The same state with ``function`` applied to each of its arrays."""
    return _map(function, state)  # type: ignore[no-any-return]


def _map(function: Callable[[mx.array], mx.array], value: Any) -> Any:
    if isinstance(value, mx.array):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([_map(function, item) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _map(function, getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    return value


def arrays(state: object, path: str = "") -> Iterator[tuple[str, mx.array]]:
    """Each array of a state with its dotted path, in field order."""
    if isinstance(state, mx.array):
        yield path, state
        return
    children: list[tuple[str, object]] = []
    if isinstance(state, list | tuple):
        children = [(str(i), item) for i, item in enumerate(state)]
    elif dataclasses.is_dataclass(state):
        children = [(f.name, getattr(state, f.name)) for f in dataclasses.fields(state)]
    for name, child in children:
        yield from arrays(child, f"{path}.{name}" if path else name)


def copy(state: S) -> S:
    """A state that shares no buffer with the original."""
    result = map_arrays(lambda x: mx.array(x), state)
    evaluate(result)
    return result


def nbytes(state: object) -> int:
    """Bytes held by all arrays of a state."""
    return sum(x.nbytes for _, x in arrays(state))


def evaluate(state: object) -> None:
    """Compute every pending array of a state."""
    mx.eval([x for _, x in arrays(state)])
