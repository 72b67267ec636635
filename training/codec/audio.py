"""The assistant's recordings as training sees them: one tape of sentences and silences, and clips to measure on."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import soundfile
from numpy.typing import NDArray

Pcm = NDArray[np.int16]

__all__ = ["LEAD_FRAMES", "Clips", "Recording", "clips", "read", "synthetic", "tape"]

BANK = "assistant"
# Silence before a sentence. The encoder looks back 2.3 frames (1,026 columns of 441), the decoder as far: after this
# the codec stands as it does in the middle of a conversation.
LEAD_FRAMES = 4
GAP = (3000, 14000)  # samples of silence between two sentences on the tape


@dataclass(frozen=True)
class Recording:
    """One sentence: what the bank says of it (``text``, ``seed``, ``split``, ``kind`` ...) and its samples, int16."""

    about: dict[str, Any]
    pcm: Pcm


def read(folder: Path, files: int | None = None) -> list[Recording]:
    """The recordings of the first ``files`` files of the bank (None: all) in the bank's order.

    Raises:
        FileNotFoundError: when one of these files is not there.
    """
    listed = json.loads((folder / f"{BANK}.json").read_text(encoding="utf-8"))
    used = len(listed["files"]) if files is None else min(files, len(listed["files"]))
    missing = [name for name in listed["files"][:used] if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder}: {', '.join(missing)} of {BANK}.json is missing; --files {used} asks for it")
    sound = [soundfile.read(folder / name, dtype="int16")[0] for name in listed["files"][:used]]
    items = [item for item in listed["items"] if item["file"] < used]
    return [Recording(i, sound[i["file"]][i["offset"] : i["offset"] + i["samples"]]) for i in items]


def synthetic(count: int, rate: int, seconds: float = 0.8, seed: int = 0) -> list[Recording]:
    """Sung vowels of random pitch, for smoke runs: harmonics under two formants, a soft start and end."""
    rng = np.random.default_rng(seed)
    return [_sung(rng, i, rate, seconds) for i in range(count)]


def _sung(rng: np.random.Generator, number: int, rate: int, seconds: float) -> Recording:
    time = np.arange(int(seconds * rng.uniform(0.7, 1.3) * rate)) / rate
    pitch, formants = rng.uniform(90, 220), rng.uniform((300, 900), (900, 2600))
    harmonics = pitch * np.arange(1, int(4000 / pitch))
    gains = np.exp(-np.square((harmonics[:, None] - formants) / 150)).sum(1) + 0.01
    wave = (gains[:, None] * np.sin(2 * np.pi * harmonics[:, None] * time)).sum(0)
    wave *= np.minimum(1, 20 * np.minimum(time, time[-1] - time)) * 0.3 / np.abs(wave).max()
    split = "held" if number % 5 == 4 else "train"
    about = {"text": f"vowel {number}", "seed": number, "split": split, "kind": "vowel"}
    return Recording(about, np.round(wave * 32767).astype(np.int16))


def tape(recordings: list[Recording], seed: int, at_least: int) -> NDArray[np.int16]:
    """Every training sentence once, in random order, with silences between; repeated until ``at_least`` samples."""
    rng = np.random.default_rng(seed)
    trained = [r for r in recordings if r.about["split"] == "train"]
    if not trained:
        raise ValueError("no recording is marked for training")
    pieces: list[NDArray[np.int16]] = []
    while sum(map(len, pieces)) < at_least:
        for i in rng.permutation(len(trained)):
            pieces += [trained[i].pcm, np.zeros(rng.integers(*GAP), np.int16)]
    return np.concatenate(pieces)


@dataclass(frozen=True)
class Clips:
    """Sentences in the rows of ``samples`` ``[N, S]`` float32, silence first; ``frames`` ``[N]`` of each are spoken."""

    samples: mx.array
    frames: NDArray[np.int32]


def clips(recordings: list[Recording], frame: int) -> Clips:
    """``LEAD_FRAMES`` of silence, a sentence, and silence up to the longest's end."""
    frames = np.array([-(-len(r.pcm) // frame) for r in recordings], np.int32)
    samples = np.zeros((len(recordings), (LEAD_FRAMES + int(frames.max())) * frame), np.float32)
    for row, recording in zip(samples, recordings, strict=True):
        start = LEAD_FRAMES * frame
        row[start : start + len(recording.pcm)] = recording.pcm / np.float32(32768)
    return Clips(mx.array(samples), frames)
