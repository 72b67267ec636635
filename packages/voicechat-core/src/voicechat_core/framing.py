"""Any chunk of samples -> the frames that are due. Pure NumPy; knows no model.

Frame k is due as soon as the last sample that it reads is there. Perception reads up to ``lookahead`` samples into a
frame's own 1,280: frame k ends with sample ``1280 k + lookahead - 1``, 67 ms before all of it has arrived. So the
first frame takes ``lookahead`` samples, every later one 1,280, whatever the chunks were: chunks do not matter.
"""

from collections import deque
from typing import Any, Self

import numpy as np
import numpy.typing as npt

__all__ = ["Framing"]

Samples = npt.NDArray[np.float32]


class Framing:
    """Samples that no frame has taken yet. Its caller bounds them: see ``drop`` and ``room``."""

    def __init__(self, frame_samples: int, lookahead: int, *, wait_for_full_frame: bool = False) -> None:
        """``wait_for_full_frame`` holds each frame back until its last sample is there; the frames are the same."""
        self._frame_samples = frame_samples
        self._lookahead = lookahead
        self._wait = wait_for_full_frame
        self._chunks: deque[Samples] = deque()
        self._pending = 0
        self.received = 0
        self.taken = 0

    def push(self, samples: Samples) -> None:
        """Add ``[S]`` samples; they are kept as they are, so the caller must not change them."""
        if samples.size:
            self._chunks.append(samples)
            self._pending += samples.size
            self.received += samples.size

    @property
    def due(self) -> bool:
        """Whether the next frame can be taken."""
        end = self._frame_samples * (self.taken + 1) if self._wait else self._end(self.taken + 1)
        return self.received >= end

    def take(self) -> Samples:
        """The samples of the next frame, which is due: ``[lookahead]`` for the first one, else ``[1280]``."""
        wanted = self._end(self.taken + 1) - self._end(self.taken)
        self.taken += 1
        self._pending -= wanted
        parts = []
        while wanted:
            chunk = self._chunks.popleft()
            parts.append(chunk[:wanted])
            if chunk.size > wanted:
                self._chunks.appendleft(chunk[wanted:])
            wanted -= parts[-1].size
        return np.concatenate(parts)

    def pad(self) -> None:
        """Zeros up to the end of a frame that has begun, so that ``ceil(received / 1280)`` frames come in all."""
        self.push(np.zeros(-self.received % self._frame_samples, np.float32))

    def room(self, frames: int) -> int:
        """How many more samples ``frames`` frames in all can use."""
        return max(0, frames * self._frame_samples - self.received)

    def drop(self) -> int:
        """Forget what is pending; returns how many samples that were."""
        dropped, self._pending = self._pending, 0
        self.received -= dropped
        self._chunks.clear()
        return dropped

    def saved(self) -> tuple[dict[str, Any], Samples]:
        """What ``restore`` needs: numbers, and the pending samples ``[S]``."""
        pending = np.concatenate([np.zeros(0, np.float32), *self._chunks])
        return {"received": self.received, "taken": self.taken}, pending

    def restore(self, numbers: dict[str, Any], pending: Samples) -> Self:
        """Go on where ``saved`` was called."""
        self.drop()
        self.push(pending)
        self.received, self.taken = numbers["received"], numbers["taken"]
        return self

    def _end(self, frames: int) -> int:
        """Samples that the first ``frames`` frames read."""
        return self._frame_samples * (frames - 1) + self._lookahead if frames else 0
