"""Where a turn's tokens stand: densely after BOS, as served, or each at the time of its speech, to learn from.

Which token a word is, dense text does not say plainly: a network may learn the first word's and fill in the rest from
the sound before it. With each token a little before its speech it is plain. A paced training begins so and ends dense.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["DENSE", "STAGES", "VARIANTS", "Variant", "Words", "positions", "stage_of"]

FRAMES_A_LETTER = 0.45
RIDGE = 0.5
PAUSE, TAIL = 2.0, 2.0  # frames, before the fit: of a mark inside a sentence, and after its end


@dataclass(frozen=True)
class Variant:
    """A layout: tokens stand ``share`` of the way from dense to their speech, ``lead`` frames early; ``jitter``."""

    share: float
    lead: float = 1.0
    jitter: float = 0.0


DENSE = Variant(0.0, 0.0)
VARIANTS = (DENSE, Variant(1.0, 2.0), Variant(1.0, 2.0, 0.6), Variant(1.0, 2.0, 0.6), Variant(0.66), Variant(0.33))
# The share of the variants, from so much of the run on.
STAGES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0.0, (0.06, 0.28, 0.28, 0.28, 0.05, 0.05)),
    (0.25, (0.25, 0.19, 0.19, 0.19, 0.09, 0.09)),
    (0.50, (0.50, 0.12, 0.12, 0.12, 0.07, 0.07)),
    (0.80, (0.85, 0.03, 0.03, 0.03, 0.03, 0.03)),
)


def stage_of(progress: float) -> int:
    """Index of the stage that the progress of a run is in."""
    return sum(progress >= start for start, _ in STAGES) - 1


def spans(text: str) -> list[tuple[int, int, str]]:
    """Start, end and lower case of each word."""
    return [(m.start(), m.end(), m.group().lower()) for m in re.finditer(r"[A-Za-z']+", text)]


def marks(text: str) -> list[int]:
    """Where pauses are: marks inside a sentence."""
    return [m.start() for m in re.finditer(r"[,.!?]", text.strip()[:-1])]


@dataclass(frozen=True)
class Words:
    """How many frames each word takes, and a pause, and the silence at the end of a recording."""

    frames: dict[str, float]
    pause: float
    tail: float

    @classmethod
    def fit(cls, texts: Sequence[str], lengths: NDArray[np.int32]) -> Self:
        """By ridge regression on the lengths of whole sentences."""
        known = sorted({word for text in texts for *_, word in spans(text)})
        index = {word: i for i, word in enumerate(known)}
        counts = np.zeros((len(texts), len(known) + 2))
        for row, text in zip(counts, texts, strict=True):
            for *_, word in spans(text):
                row[index[word]] += 1
            row[-2:] = len(marks(text)), 1
        before = np.array([max(1.0, FRAMES_A_LETTER * len(word)) for word in known] + [PAUSE, TAIL])
        normal = counts.T @ counts + RIDGE * np.eye(len(before))
        found = np.maximum(before + np.linalg.solve(normal, counts.T @ (lengths - counts @ before)), 0.5)
        return cls(dict(zip(known, found[:-2].tolist(), strict=True)), float(found[-2]), float(found[-1]))

    def times(self, text: str, pieces: Sequence[str], length: int) -> NDArray[np.float64]:
        """When the speech of each piece of the text begins, in frames of a recording of this length."""
        each = np.zeros(len(text) + 1)
        for start, end, word in spans(text):
            each[start:end] = self.frames.get(word, FRAMES_A_LETTER * (end - start)) / (end - start)
        for mark in marks(text):
            each[mark] += self.pause
        so_far = np.concatenate([[0.0], np.cumsum(each)])
        ends = np.cumsum([len(piece) for piece in pieces])
        starts = [end - len(piece.lstrip()) for end, piece in zip(ends, pieces, strict=True)]
        return np.asarray(so_far[np.minimum(starts, len(text))] * length / (so_far[-1] + self.tail))


def positions(times: NDArray[np.float64], variant: Variant, rng: np.random.Generator) -> NDArray[np.int32]:
    """Frames after BOS at which the tokens of these times stand, ascending from at least 1."""
    wanted = times - variant.lead
    if variant.jitter:
        wanted = wanted - rng.uniform(-0.7, 1.0) + variant.jitter * rng.standard_normal(len(times))
    result, last = [], 0
    for value in wanted:
        last = max(last + 1, 1 + int(variant.share * max(0.0, value)))
        result.append(last)
    return np.array(result, np.int32)
