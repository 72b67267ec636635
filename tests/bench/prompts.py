"""Prompts of an exact number of positions, each another text."""

import random
from collections.abc import Callable

__all__ = ["prompt_of"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def prompt_of(positions: int, count: Callable[[str], int], seed: int) -> str:
    """A text of made-up words of which ``count`` says ``positions``; the same for the same seed.

    Raises:
        ValueError: when none of a thousand tries gives that number.
    """
    rng = random.Random(seed)
    text = ""
    for _ in range(1000):
        longer = f"{text} {''.join(rng.choices(LETTERS, k=rng.randint(1, 6)))}".strip()
        found = count(longer)
        if found == positions:
            return longer
        if found < positions:
            text = longer
    raise ValueError(f"no text of {positions} positions was found; {count(text)} were reached")
