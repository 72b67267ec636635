"""When each chunk of a recording is sent: by absolute deadlines, so that an hour does not drift.

Sample n of a recording that is spoken from ``began`` on is there at ``began + n / rate``. A chunk is sent when its last
sample is there, as a microphone would. Who is late (the server did not read) sends the next ones without a pause, and
is on time again.
"""

from typing import Literal

import trio

__all__ = ["Pace", "Pacer"]

Pace = Literal["realtime", "fast"]


class Pacer:
    """Of one recording. It begins with the first ``wait``."""

    def __init__(self, pace: Pace, rate: int) -> None:
        """``rate`` is in samples a second."""
        self._waits = pace == "realtime"
        self._rate = rate
        self._samples = 0
        self._began: float | None = None

    async def wait(self, samples: int) -> None:
        """Wait until the next ``samples`` are spoken. ``fast`` only lets others run."""
        now = trio.current_time()
        if self._began is None:
            self._began = now
        self._samples += samples
        if self._waits:
            await trio.sleep_until(self._began + self._samples / self._rate)
        else:
            await trio.lowlevel.checkpoint()
