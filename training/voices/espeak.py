"""The variants of eSpeak NG by its own command (the Debian package ``espeak-ng``)."""

import random
import subprocess

import numpy as np

from training.voices import Samples

__all__ = ["RATE", "speak"]

RATE = 22050
WAV_HEADER = 44  # bytes; the lengths in it are not to be trusted when it is written to a pipe


def speak(name: str, text: str, rng: random.Random) -> tuple[Samples, int]:
    """125 to 185 words a minute, pitch 35 to 65."""
    settings = ["-s", str(rng.randint(125, 185)), "-p", str(rng.randint(35, 65))]
    wav = subprocess.run(["espeak-ng", "-v", name, *settings, "--stdout", text], capture_output=True, check=True).stdout
    samples = np.frombuffer(wav[WAV_HEADER : len(wav) - len(wav) % 2], "<i2")
    return samples / 32768.0, RATE
