"""JSON from somebody else, read strictly: what it is asked for, or one short ``WireError``; and to somebody else.

Stricter than ``json.loads``: no NaN or Infinity, no key twice (parsers disagree on which one counts), no lone
surrogates (such text cannot be written as UTF-8 again), no numbers out of all range. An error names the field, what is
there and what is needed, in words of its own: a library's never reach a peer, and of a long value only the beginning.
"""

import json
import math
import re
import types
import typing
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import UNSET

from voicechat_core.errors import InputError, WireError

__all__ = ["json_of", "parse_object", "parse_value", "refusal", "scalar", "shown", "struct_of"]

Struct = TypeVar("Struct")
CONTAINERS = (dict, list, tuple)

SHOWN_CHARACTERS = 40  # of a value in an error message
MOST_NESTED = 64  # levels of what is written: whoever is told of it, deep in calls of its own, can read it again
LONGEST_INTEGER = 40  # digits; the largest number of the protocol, a seed, has 20


class _UnfitError(Exception):
    """What is wrong with a text, to be said of it."""


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object that ``text`` is; bytes are UTF-8.

    Raises:
        WireError: for anything else.
    """
    value = parse_value(text)
    if not isinstance(value, dict):
        raise WireError(f"the message is {shown(value)}; a JSON object is needed")
    return value


def parse_value(text: str | bytes, what: str = "the message") -> Any:
    """The JSON value that ``text`` is, of whatever kind; ``what`` it is, for the error.

    Raises:
        WireError: when it is none.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_int=_int, parse_float=_float, parse_constant=_refuse)
        if not text.isascii() or "\\u" in text:  # a long base64 string need not be looked through
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise WireError(f"{what} is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise WireError(f"{what} is not JSON: character {error.pos} cannot stand there") from None
    except UnicodeDecodeError as error:
        raise WireError(f"{what} is not UTF-8: byte {error.start} cannot stand there") from None
    except UnicodeEncodeError as error:
        raise WireError(f"{what} holds the lone surrogate {error.object[error.start]!r}") from None
    except _UnfitError as fault:
        raise WireError(f"{what} {fault}") from None
    return value


def json_of(value: object, what: str) -> str:
    """A value as JSON in ASCII; ``what`` it is, for the error. A library's scalar is the number that it holds.

    Raises:
        InputError: when it cannot be JSON.
    """
    try:
        text = json.dumps(value, allow_nan=False, default=scalar)
    except RecursionError:
        raise InputError(f"{what} is nested too deeply; {MOST_NESTED} levels are the most") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} is no JSON value: {error}") from None
    if (levels := _levels(value)) > MOST_NESTED:
        raise InputError(f"{what} has {levels} levels; {MOST_NESTED} are the most")
    return text


def scalar(value: object) -> object:
    """What a JSON encoder does not know, as Python's own value: NumPy's 5 is a 5. An array is no scalar.

    Raises:
        TypeError: when it is none.
    """
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        plain: object = item()
        if type(plain) is not type(value):  # a number for which Python has none is its own item
            return plain
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def struct_of(kind: type[Struct], data: dict[str, Any]) -> Struct:
    """``data`` as a msgspec struct. Each field's annotation carries a ``Meta`` whose description ends "... is needed".

    Raises:
        WireError: for a field that is missing or of another type or range.
    """
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InputError):  # of the struct's own check
            raise WireError(str(error.__cause__)) from None
        raise refusal(kind, data, _path(str(error))) from None


def refusal(kind: type, data: dict[str, Any], path: list[str]) -> WireError:
    """The error that the field at ``path`` of ``data`` is not what ``kind`` needs there."""
    value: Any = data
    for name in path:
        value = value[int(name)] if isinstance(value, list) else value.get(name, UNSET)
    found = "is missing" if value is UNSET else f"is {shown(value)}"
    where = re.sub(r"\.([0-9]+)", r"[\1]", ".".join(path))
    return WireError(f"{where} {found}; {_needed(kind, path)} is needed")


def shown(value: object) -> str:
    """A JSON value as it may stand in a message: containers by kind, text as a literal and cut."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "an object"
        case list():
            return "an array"
        case str() if len(value) > SHOWN_CHARACTERS:
            return f"{value[:SHOWN_CHARACTERS]!r}... ({len(value)} characters)"
    return repr(value)


def _levels(value: object) -> int:
    """How deep the arrays and objects of a JSON value are nested; 0 without any."""
    depth, level = 0, [value]
    while inside := [
        each.values() if isinstance(each, dict) else each for each in level if isinstance(each, CONTAINERS)
    ]:
        depth, level = depth + 1, [each for values in inside for each in values]
    return depth


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _UnfitError(f"has the key {shown(key)} twice in one object")
        found[key] = value
    return found


def _int(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise _UnfitError(f"holds a number of {len(digits)} characters; {LONGEST_INTEGER} at most are read")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _UnfitError(f"holds a number out of range: {digits[:SHOWN_CHARACTERS]}")
    return value


def _refuse(name: str) -> NoReturn:
    raise _UnfitError(f"holds {name}, which is not JSON")


def _path(message: str) -> list[str]:
    """Where msgspec found a fault: ["session", "seed"]."""
    at = re.search(r"`\$([^`]*)`$", message)
    path = re.findall(r"[^.\[\]]+", at[1]) if at else []
    missing = re.search("missing required field `([^`]+)`", message)
    return [*path, missing[1]] if missing else path


def _needed(hint: Any, path: list[str]) -> str:
    """How the annotation at the end of ``path`` describes itself."""
    description = ""
    for name in path:
        # Elements of an array have no names.
        hint = typing.get_args(hint)[0] if name.isdecimal() else typing.get_type_hints(hint, include_extras=True)[name]
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            hint = typing.get_args(hint)[0]  # "or null" goes without saying
        hint, meta = typing.get_args(hint)
        description = meta.description
    return description
