"""The voice of the answers: "heart" of hibari-tts, in the package itself; it also asks, at other paces."""

import math
import random
from functools import cache
from typing import Any

import numpy as np

from training.voices import Samples, package

__all__ = ["RATE", "answer", "phonemes", "speak"]

RATE = 24000


@cache
def _hibari() -> Any:
    return package("hibari").Hibari(threads=1)


def answer(text: str, seed: int) -> Samples:
    """An answer, always at its own pace; ``seed`` draws the breath in it."""
    return np.asarray(_hibari()(text, seed=seed), np.float64)


def phonemes(text: str) -> str:
    """How ``text`` is pronounced in American English, in the alphabet that Kokoro's models read."""
    return " ".join(_hibari().phonemize(text))


VARIED = 0.3  # of the voice's pitch and of its vocal tract's length, up or down, as a logarithm


def speak(name: str, text: str, rng: random.Random) -> tuple[Samples, int]:
    """A question at 0.8 to 1.2 of its pace, sometimes in the tone of a statement.

    ``name`` is ``heart``, or ``varied``: another speaker each time, larger or smaller, by sounding at another rate.
    """
    said = text + rng.choice((".", "?", ""))
    seed, pace = rng.randrange(1000), rng.uniform(0.8, 1.2)
    higher = math.exp(rng.uniform(-VARIED, VARIED)) if name == "varied" else 1.0
    return np.asarray(_hibari()(said, seed=seed, speed=pace / higher), np.float64), round(RATE * higher)
