"""Samples between a device's thread and ours: one writes, the other reads, and neither ever waits.

There is no lock. Each side moves a count of its own and only looks at the other's; a count moves after the samples
that it counts were copied, so what a reader sees is there. One writer and one reader only. What finds no room is left
out and counted: the newest, because the writer may not touch what is being read.

Knows no devices and no rates.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["Ring", "Samples"]

Samples = npt.NDArray[np.float32]


class Ring:
    """At most ``capacity`` samples of each of ``channels``.

    Attributes, each moved by one side only:
        written: samples of a channel that were put in so far (the writer's).
        dropped: samples of a channel that found no room (the writer's).
        consumed: samples of a channel that were taken out so far (the reader's).
    """

    def __init__(self, capacity: int, channels: int = 1) -> None:
        self._samples: Samples = np.zeros((capacity, channels), np.float32)
        self.written = 0
        self.dropped = 0
        self.consumed = 0

    @property
    def available(self) -> int:
        """Samples of a channel that can be read now. The reader finds at least so many, the writer's room at least."""
        return self.written - self.consumed

    @property
    def room(self) -> int:
        """Samples of a channel that can be written now."""
        return len(self._samples) - self.available

    def write(self, block: Samples) -> int:
        """Copy of ``block [S, C]`` what fits, from its beginning; returns how many samples that were."""
        count = min(len(block), self.room)
        at = self.written % len(self._samples)
        first = min(count, len(self._samples) - at)
        self._samples[at : at + first] = block[:first]
        self._samples[: count - first] = block[first:count]
        self.written += count
        self.dropped += len(block) - count
        return count

    def read_into(self, out: Samples) -> int:
        """Fill ``out [S, C]`` from its beginning; returns how many samples were there. One channel serves any C."""
        count = min(len(out), self.available)
        at = self.consumed % len(self._samples)
        first = min(count, len(self._samples) - at)
        out[:first] = self._samples[at : at + first]
        out[first:count] = self._samples[: count - first]
        self.consumed += count
        return count

    def read(self) -> Samples:
        """All that is there, as a copy ``[S, C]``."""
        out = np.empty((self.available, self._samples.shape[1]), np.float32)
        self.read_into(out)
        return out
