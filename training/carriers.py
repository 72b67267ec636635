"""Sentences to hear words in: what the speech decoder practises on beside answers. Knows the domain's words only."""

import random
from functools import cache

from training.domain import CITIES, DAYS, NAMES, SAID_WORDS, TINY_NAME, finite_turns, introduction

__all__ = ["answer_words", "carriers", "lists"]


def _words(text: str) -> list[str]:
    """Words of an answer as a listener would write them, case kept."""
    return [word for word in (part.strip(".,!?") for part in text.split()) if word]


@cache
def answer_words() -> tuple[str, ...]:
    """Every word that it may have to say, in lower case but for names."""
    proper = {*NAMES, *CITIES, *DAYS, TINY_NAME, "I"}
    texts = [*(turn.answer for turn in finite_turns(held=None)), *map(introduction, NAMES), *SAID_WORDS]
    words = {word if word in proper else word.lower() for text in texts for word in _words(text)}
    return tuple(sorted(words))


CARRIERS = (
    "{A} {b} {c}.", "{A} is {b}.", "The {a} is {b}.", "I say {a}.", "You say {a} and {b}.", "{A}, {b}, {c}.",
    "{A} comes after {b}.", "It is {a} {b}.", "My {a} is {b}.", "{A} plus {b} is {c}.", "{A}! You are {b}.",
    "I am {a}, {b}.",
)  # fmt: skip


LETTERS = {"a", "am", "an", "I"}  # read as letters when they stand alone or first; other answers hold them


def _upper(word: str) -> str:
    return word[:1].upper() + word[1:]


def carriers(rounds: int = 5, seed: int = 0) -> list[str]:
    """Sentences to hear words in, not to answer with: every word in ``rounds`` of them in each of three places.

    The places are the first word that changes, the second, and the third where a sentence has one.
    """
    rng, sentences = random.Random(f"carriers {seed}"), []
    words = [word for word in answer_words() if word not in LETTERS]
    for turn in range(rounds):
        columns = [rng.sample(words, len(words)) for _ in range(3)]
        for i, (a, b, c) in enumerate(zip(*columns, strict=True)):
            form = CARRIERS[(i + turn) % len(CARRIERS)]
            sentences.append(_upper(form.format(a=a, b=b, c=c, A=_upper(a))))
    return sentences


def lists(count: int, seed: int = 0) -> list[str]:
    """``count`` different sentences of two to five words in no order, so that each word is heard beside every other.

    A third have commas between the words: pauses, as in counting.
    """
    rng, sentences = random.Random(f"lists {seed}"), dict[str, None]()
    words = [word for word in answer_words() if word not in LETTERS]
    while len(sentences) < count:
        joint = rng.choice((" ", " ", ", "))
        sentences.setdefault(_upper(joint.join(rng.sample(words, rng.choice((2, 3, 3, 4, 4, 5))))) + ".")
    return list(sentences)
