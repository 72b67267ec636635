"""Recorded questions: one long array of samples, and for each question where it lies and where it can be cut.

And how many frames the assistant takes to say an answer. Knows no ids and no timeline.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training import bank

__all__ = ["Durations", "Question", "Questions", "cuts", "gathered", "read_durations", "read_questions"]

Pcm = NDArray[np.int16]
HOP = 160  # 10 ms, the grain of a search for silence
QUIET, SHORTEST = 0.06, 4  # a gap: so much of the loudest hop, for so many hops
INNER = (0.25, 0.8)  # where in a question a gap may lie
CODEC_FRAME = 1764  # samples of an answer's frame, at the assistant's rate
LEAST_FRAMES = 4


@dataclass(frozen=True)
class Question:
    """Samples ``start`` to ``end`` of the array; ``cuts`` are silent places in between."""

    text: str
    voice: str
    split: str
    start: int
    end: int
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """All questions of a bank, and their ``samples`` int16 one after the other."""

    samples: Pcm
    items: tuple[Question, ...]

    def by_text(self) -> dict[str, list[Question]]:
        """The recordings of each sentence."""
        texts: dict[str, list[Question]] = {}
        for item in self.items:
            texts.setdefault(item.text, []).append(item)
        return texts


def read_questions(folder: Path, name: str) -> Questions:
    """The bank ``name`` at 16 kHz."""
    items, pieces = bank.read(folder, name)
    return gathered(zip(items, pieces, strict=True))


def gathered(pairs: Iterable[tuple[dict[str, str], Pcm]]) -> Questions:
    """Questions from their descriptions (``text``, ``voice``, ``split``) and samples."""
    questions, pieces, start = [], [], 0
    for item, piece in pairs:
        end = start + len(piece)
        found = tuple(start + place for place in cuts(piece))
        questions.append(Question(item["text"], item["voice"], item["split"], start, end, found))
        pieces.append(piece)
        start = end
    return Questions(np.concatenate(pieces), tuple(questions))


def cuts(samples: Pcm) -> tuple[int, ...]:
    """Samples in the middle of the silent places inside a question; at most three."""
    hops = len(samples) // HOP
    loud = np.sqrt(np.square(samples[: hops * HOP].reshape(hops, HOP).astype(np.float32)).mean(axis=1))
    quiet = np.concatenate([[False], loud < QUIET * loud.max(initial=1.0), [False]])
    edges = np.flatnonzero(quiet[1:] != quiet[:-1])
    first, last = (fraction * hops for fraction in INNER)
    runs = zip(edges[::2], edges[1::2], strict=True)
    middles = [(a + b) // 2 for a, b in runs if b - a >= SHORTEST and first <= a and b <= last]
    return tuple(int(middle) * HOP for middle in middles[:3])


class Durations:
    """Frames that an answer takes: as recorded (the longest, if there are several), else by its length."""

    def __init__(self, frames: dict[str, int]) -> None:
        self._frames = frames
        texts = list(frames)
        line = np.linalg.lstsq(np.array([_lengths(t) for t in texts]), np.array([frames[t] for t in texts]))[0]
        self._line = line

    def __call__(self, answer: str) -> int:
        """Frames of 80 ms."""
        known = self._frames.get(answer)
        return known if known is not None else max(LEAST_FRAMES, round(float(np.dot(_lengths(answer), self._line))))


def _lengths(text: str) -> tuple[float, float, float]:
    return 1.0, float(len(text)), float(len(text.split()))


def read_durations(folder: Path) -> Durations:
    """Of the bank ``assistant``."""
    frames: dict[str, int] = {}
    for item in json.loads((folder / "assistant.json").read_text(encoding="utf-8"))["items"]:
        frames[item["text"]] = max(frames.get(item["text"], 0), -(-item["samples"] // CODEC_FRAME))
    return Durations(frames)
