"""What a session remembers, as values outside the networks.

A state is a small dataclass whose fields are arrays, integers, ``None``, other states, or lists of
these. The functions here walk any such value, so that a new state needs no code of its own.

A step consumes the state it is given: MLX updates a buffer in place only while nothing else holds
it. Whoever wants to keep a state takes a ``copy`` first.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import mlx.core as mx

from voicechat_core.errors import InputError

__all__ = [
    "arrays",
    "assign",
    "copy",
    "evaluate",
    "filled",
    "leaves",
    "map_arrays",
    "nbytes",
    "numbers",
    "parts",
    "replaced",
    "with_leaves",
]

S = TypeVar("S")
T = TypeVar("T")

_known: dict[type[Any], tuple[str, ...]] = {}  # fields by class: states are walked several times in a frame


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


def replaced(kind: type[T], function: Callable[[T], T], state: S) -> S:
    """The same state with ``function`` applied to each part of it that is a ``kind``."""
    return _replaced(kind, function, state)  # type: ignore[no-any-return]


def parts(kind: type[T], state: object) -> list[T]:
    """Each part of a state that is a ``kind``, in field order."""
    found: list[T] = []
    replaced(kind, lambda part: found.append(part) or part, state)  # type: ignore[func-returns-value]
    return found


def _replaced(kind: type[Any], function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([_replaced(kind, function, item) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _replaced(kind, function, getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    return value


def arrays(state: object) -> Iterator[tuple[str, mx.array]]:
    """Each array of a state with its dotted path, in field order."""
    return ((path, leaf) for path, leaf in _leaves(state) if isinstance(leaf, mx.array))


def numbers(state: object) -> Iterator[tuple[str, int | None]]:
    """Each integer of a state, and each ``None``, with its dotted path, in field order."""
    return ((path, leaf) for path, leaf in _leaves(state) if not isinstance(leaf, mx.array))


def _leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    children: list[tuple[str, object]] = []
    if isinstance(state, list | tuple):
        children = [(str(i), item) for i, item in enumerate(state)]
    elif dataclasses.is_dataclass(state):
        children = [(f.name, getattr(state, f.name)) for f in dataclasses.fields(state)]
    else:
        yield path, state
    for name, child in children:
        yield from _leaves(child, f"{path}.{name}" if path else name)


def leaves(state: object) -> list[mx.array]:
    """The arrays of a state alone, in field order. Several times in every frame: it makes nothing but the list."""
    found: list[mx.array] = []
    _collect(state, found)
    return found


def _collect(value: Any, found: list[mx.array]) -> None:
    if isinstance(value, mx.array):
        found.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, found)
    elif hasattr(value, "__dataclass_fields__"):
        for name in _names(type(value)):
            _collect(getattr(value, name), found)


def _names(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a dataclass."""
    if kind not in _known:
        _known[kind] = tuple(field.name for field in dataclasses.fields(kind))
    return _known[kind]


def with_leaves(state: S, values: Iterable[mx.array]) -> S:
    """The same state with other arrays in the places of its own, in field order."""
    given = iter(values)
    return map_arrays(lambda _: next(given), state)


def assign(state: object, values: Iterable[mx.array]) -> None:
    """Put other arrays in the places of a state's own, in field order.

    The state itself changes: whoever still holds it holds nothing old, so that the old arrays' memory can be reused.
    """
    _assign(state, iter(values))


def _assign(value: Any, given: Iterator[mx.array]) -> None:
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, mx.array):
                value[index] = next(given)
            else:
                _assign(item, given)
    elif hasattr(value, "__dataclass_fields__"):
        for name in _names(type(value)):
            item = getattr(value, name)
            if isinstance(item, mx.array):
                setattr(value, name, next(given))
            else:
                _assign(item, given)


def filled(like: S, arrays: Mapping[str, mx.array], numbers: Mapping[str, int | None]) -> S:
    """A state of the structure of ``like`` with its leaves by path: the inverse of the two functions above.

    Raises:
        InputError: for a path that is missing or left over, or an array of another kind than the one in ``like``.
    """
    given = {**arrays, **numbers}
    result = _filled(like, given, "")
    if given:
        raise InputError(f"a state of this model has no {', '.join(sorted(given)[:3])}")
    return result  # type: ignore[no-any-return]


def _filled(like: Any, given: dict[str, Any], path: str) -> Any:
    def child(name: object, value: Any) -> Any:
        return _filled(value, given, f"{path}.{name}" if path else str(name))

    if isinstance(like, list | tuple):
        return type(like)([child(i, item) for i, item in enumerate(like)])
    if dataclasses.is_dataclass(like) and not isinstance(like, type):
        return type(like)(**{f.name: child(f.name, getattr(like, f.name)) for f in dataclasses.fields(like)})
    if path not in given:
        raise InputError(f"{path} is missing from the state")
    value = given.pop(path)
    if _kind(value) != _kind(like):
        raise InputError(f"{path} is {_kind(value)}; {_kind(like)} is needed")
    return value


def _kind(leaf: Any) -> str:
    """What must agree: an array's type and number of axes (lengths change as a session goes on)."""
    return f"{leaf.dtype} of {leaf.ndim} axes" if isinstance(leaf, mx.array) else "a number"


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
