"""What is to be sent: a file, or a pipe whose other end may be silent while everything else goes on.

    async with opened(path) as recording:
        await recording.read(1280)

A file is read where it is asked for. A pipe is read in a thread, which is left behind when it is cancelled: nothing
else ends a read that waits.
"""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import trio

from voicechat_core.audio_stream import AudioReader

__all__ = ["Pcm16", "Recording", "opened"]

Pcm16 = npt.NDArray[np.int16]
Result = TypeVar("Result")


class Recording:
    """Made by ``opened``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._may_wait = not os.path.isfile(path)  # noqa: PTH113 - false also for what cannot be a path
        self._waiting = False
        self._left = False
        self._reader: AudioReader | None = None

    @property
    def seconds(self) -> float | None:
        """How long it is; None if it does not say."""
        assert self._reader is not None
        return self._reader.seconds

    async def open(self) -> None:
        """Read its header."""
        await self._call(self._open)

    def _open(self) -> None:
        self._reader = AudioReader(self._path)

    async def read(self, count: int) -> Pcm16:
        """The next samples ``[count]`` at 16 kHz, fewer at the end, then none.

        Raises:
            AudioError: naming the file and what is wrong with it, once everything before was given.
        """
        reader = self._reader
        assert reader is not None
        return await self._call(lambda: reader.read_pcm16(count))

    def close(self) -> None:
        """Let go of the file; a thread that still waits in it does so when it is let go."""
        if self._waiting:
            self._left = True
        elif self._reader is not None:
            self._reader.close()

    async def _call(self, work: Callable[[], Result]) -> Result:
        if not self._may_wait:
            await trio.lowlevel.checkpoint()
            return work()
        self._waiting = True
        return await trio.to_thread.run_sync(self._in_thread, work, abandon_on_cancel=True)

    def _in_thread(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        finally:
            self._waiting = False
            if self._left and self._reader is not None:
                self._reader.close()


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Recording]:
    """A recording, for as long as the block lasts; ``-`` is standard input.

    Raises:
        AudioError: naming the file, if it cannot be used.
    """
    recording = Recording(path)
    try:
        await recording.open()
        yield recording
    finally:
        recording.close()
