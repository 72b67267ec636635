"""Some of many, fairly: every voice as often as every other, and of each voice every kind of question."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

__all__ = ["balanced"]

T = TypeVar("T")


def balanced(items: Sequence[T], count: int, voice: Callable[[T], str], kind: Callable[[T], str]) -> list[T]:
    """``count`` of ``items``, always the same; all of them in their own order if there are no more."""
    if count >= len(items):
        return list(items)
    rng = random.Random("balanced")
    voices: dict[str, dict[str, list[T]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        voices[voice(item)][kind(item)].append(item)
    by_voice = []
    for kinds in voices.values():
        shuffled = [rng.sample(some, len(some)) for some in kinds.values()]
        by_voice.append(_in_turns(rng.sample(shuffled, len(shuffled))))
    return _in_turns(by_voice)[:count]


def _in_turns(rows: Iterable[Sequence[T]]) -> list[T]:
    """The first of each row, the second of each row that has one, and so on."""
    nothing = object()
    return [x for column in zip_longest(*rows, fillvalue=nothing) for x in column if x is not nothing]  # type: ignore[misc]
