"""Synthesisers that anyone may use, each in a file: text in, samples and their rate out.

Which voices train and which only test is said in ``training.synthesize``; where they come from, in SOURCES.md.
A synthesiser's package is imported when it is first asked to speak.
"""

import importlib
import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Samples", "package", "session", "speak", "trimmed"]

Samples = NDArray[np.float64]


def package(name: str) -> Any:
    """A synthesiser's package, whose types nobody knows, imported when it is first needed."""
    return importlib.import_module(name)


def session(model: str) -> Any:
    """An ONNX model on one core."""
    onnxruntime = package("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def speak(voice: str, text: str, rng: random.Random) -> tuple[Samples, int]:
    """``text`` by ``voice`` (``synthesiser:name``) at a random pace and pitch, and its sample rate in Hz.

    Raises:
        ValueError: the synthesiser gave nothing.
    """
    synthesiser, name = voice.split(":", 1)
    samples, rate = package(f"training.voices.{synthesiser}").speak(name, text, rng)
    if len(samples) < rate // 10 or not np.abs(samples).max() > 0:
        raise ValueError(f"{voice} said nothing for {text!r}")
    return np.asarray(samples, np.float64), rate


def trimmed(samples: Samples, rate: int, threshold: float, before: float, after: float) -> Samples:
    """Without the silence around what is louder than ``threshold`` of the peak, but for so many seconds of it."""
    loud = np.flatnonzero(np.abs(samples) > threshold * np.abs(samples).max())
    return samples[max(0, loud[0] - round(before * rate)) : loud[-1] + round(after * rate)]
