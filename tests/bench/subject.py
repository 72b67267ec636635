"""What is compared: a VoiceChat, ours or the peer's, that opens sessions and runs frames of a given noise.

Knows neither of the two: this and ``serving`` are all that their processes share.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["FRAME_SAMPLES", "STAGES", "FrameTime", "Subject", "noise"]

STAGES = ("perception", "rnnt", "language", "tts", "codec")
FRAME_SAMPLES = 1280  # 80 ms at 16 kHz
LOUDNESS = 0.05


@dataclass(frozen=True)
class FrameTime:
    """One frame's milliseconds; ``stages_ms`` is empty unless the session was opened for stages."""

    total_ms: float
    stages_ms: dict[str, float] = field(default_factory=dict)


class Subject(Protocol):
    """One of the two, with its checkpoint loaded."""

    def facts(self) -> dict[str, Any]:
        """Versions, libraries, device: what must be equal, and what a reader should know."""

    def open(self, prompt: str | None, *, staged: bool = False) -> float:
        """Begin a session in place of the last one; None is the checkpoint's own prompt. Milliseconds that it took."""

    def frame(self) -> FrameTime:
        """Run the session's next frame, to the last sample on the host."""

    def count(self, frames: int) -> dict[str, Any]:
        """Host waits and primitives a frame, the mean of the session's next ``frames``."""


def noise(seed: int = 0) -> Iterator[npt.NDArray[np.float32]]:
    """Quiet noise, 1,280 samples a frame: the same for whoever asks."""
    rng = np.random.default_rng(seed)
    while True:
        yield (LOUDNESS * rng.standard_normal(FRAME_SAMPLES)).astype(np.float32)
