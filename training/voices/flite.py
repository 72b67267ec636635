"""CMU Flite's voices by its own command (the Debian package ``flite``): slt, rms, kal16, and awb for tests."""

import random
import subprocess
import tempfile
from pathlib import Path

import soundfile

from training.voices import Samples

__all__ = ["speak"]


def speak(name: str, text: str, rng: random.Random) -> tuple[Samples, int]:
    """Pace from 0.8 to 1.18, pitch shifted; kal16 is a diphone voice and takes its mean pitch in Hz instead."""
    pitch = (
        f"int_f0_target_mean={rng.uniform(85, 150):.0f}"
        if name == "kal16"
        else f"f0_shift={rng.uniform(0.85, 1.2):.2f}"
    )
    settings = [f"duration_stretch={rng.uniform(0.85, 1.25):.2f}", pitch]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "said.wav"
        options = [part for setting in settings for part in ("--setf", setting)]
        subprocess.run(["flite", "-voice", name, *options, "-t", text, "-o", str(file)], check=True)
        samples, rate = soundfile.read(file)
    return samples, rate
