"""One session of the model thread, as Trio holds it. Waits for nothing but Trio's own events."""

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import trio

from voicechat_core.errors import AudioError, SessionClosedError, VoiceChatError
from voicechat_core.events import AudioFrame, Cancelled, Done
from voicechat_server.mailbox import SAMPLE_RATE, Mailbox
from voicechat_server.model_messages import (
    Cancel,
    Close,
    Command,
    Delivery,
    Failed,
    Flush,
    Respond,
    Result,
    Skipped,
    Wake,
)

__all__ = ["WorkerEndedError", "WorkerSession"]


class WorkerEndedError(VoiceChatError):
    """The model thread has ended, or was never started."""


class WorkerSession:
    """One session on the model thread. ``Worker.open`` makes them; one task takes the results, one pushes.

    The results are the core's events, ``Skipped``, ``Responded``, ``OutputRefused`` and ``Failed``. The last one is
    ``Done``, ``Cancelled``, or a ``Failed`` that ``ended``; after it, pushing and ending do nothing.
    """

    def __init__(
        self,
        generation: int,
        mailbox: Mailbox,
        send: Callable[[Command], None],
        watch: Callable[[Delivery], None] | None = None,
    ) -> None:
        self.generation = generation
        self.watch = watch  # for the worker, which tells it
        self.frames = 0
        self.skipped_frames = 0
        self._mailbox = mailbox
        self._send = send
        self._opened = trio.Event()
        self._refused: BaseException | None = None
        self._results: deque[Result] = deque()  # bounded by the thread: it steps no session that has too many waiting
        self._news = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()
        self._flushed = False
        self._cancelled = False
        self._over = False  # its last result has come, or nobody wants it
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- what it says of itself

    @property
    def queued_samples(self) -> int:
        """Samples that were pushed and that no finished frame has read: how far the model is behind what it was given.

        With live audio up to 1,279 are no delay: a frame waits for its last sample.
        """
        return self._mailbox.queued

    @property
    def lag_seconds(self) -> float:
        """The same in seconds."""
        return self.queued_samples / SAMPLE_RATE

    @property
    def waiting_results(self) -> int:
        """Results that the thread has given and that were not taken."""
        return self._mailbox.waiting

    # ---- what can be done with it

    async def opened(self) -> None:
        """Wait until the session is open.

        Raises:
            Exception: why it could not be: ``InputError`` for a bad seed or prompt, ``ModelError``, whatever the model
                raised, ``WorkerEndedError``, ``SessionClosedError`` if it was closed before.
        """
        await self._opened.wait()
        if self._refused is not None:
            raise self._refused

    async def push(self, samples: npt.NDArray[np.int16]) -> None:
        """Hear 16 kHz samples ``[S]``, all of them, as soon as there is room for any; they are copied.

        It waits only while as much is queued as may be, so a reader that pushes what it reads pauses there. Cancelled
        meanwhile, it has pushed nothing. After the session's last result it does nothing.

        Raises:
            AudioError: for samples of another shape or type.
            SessionClosedError: after ``flush``.
        """
        pcm = _pcm(samples)
        if self._flushed:
            raise SessionClosedError("samples were pushed after the session was flushed")
        await trio.lowlevel.checkpoint()
        while not self._ending and self._mailbox.full():
            await self._room.park()
        if not self._ending and self._mailbox.put(pcm):
            self._send(Wake(self.generation))

    def flush(self, *, pad_partial: bool = True) -> None:
        """End the session after what was pushed; its last result is then ``Done``. See ``Session.flush``."""
        if not self._flushed and not self._ending:
            self._flushed = True
            self._send(Flush(self.generation, pad_partial))

    def respond(self, call_id: str, output: object) -> None:
        """Give a call its output. Whether it was taken is a result: ``Responded`` or ``OutputRefused``."""
        if not self._ending:
            self._send(Respond(self.generation, call_id, output))

    def cancel(self) -> None:
        """End the session after the frame in flight, if any: from now on ``Cancelled`` is the only result.

        Results that were not taken yet are dropped. ``Cancelled.frames`` counts all frames that the model ran.
        """
        if self._ending:
            return
        self._cancelled = True
        self._results.clear()
        self._room.unpark_all()
        if self._opened.is_set():
            self._send(Cancel(self.generation))
            return
        self._mailbox.shut()  # nothing is opened if that has not begun
        self._opened.set()
        self.hear((Cancelled(0),))
        self._send(Cancel(self.generation))

    def close(self) -> None:
        """Drop the session: nothing of it is heard any more, and the thread frees it after the frame in flight."""
        if self._closed:
            return
        self._closed = self._over = True
        self._results.clear()
        self._mailbox.shut()
        self._send(Close(self.generation))
        if not self._opened.is_set():
            self.hear_opened(SessionClosedError("the session was closed before it was open"))
        self._wake_all()

    async def receive(self) -> Result:
        """The next result. Cancelled, it has taken none.

        Raises:
            trio.EndOfChannel: after the last one, and when the session is closed or could not be opened.
        """
        await trio.lowlevel.checkpoint()
        while not self._results:
            if self._over:
                raise trio.EndOfChannel
            await self._news.park()
        result = self._results.popleft()
        if self._mailbox.took(1):
            self._send(Wake(self.generation))
        return result

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Result:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    # ---- news, which the worker passes on

    @property
    def _ending(self) -> bool:
        return self._cancelled or self._over

    def hear_opened(self, refused: BaseException | None = None) -> None:
        """It is open, or ``refused``."""
        if self._opened.is_set():
            return
        self._refused = refused
        self._over = self._over or refused is not None
        self._opened.set()
        self._wake_all()

    def hear(self, results: tuple[Result, ...], *, room: bool = False) -> None:
        """More results; ``room``: there is room for input again."""
        for result in results:
            self.frames += isinstance(result, AudioFrame)
            self.skipped_frames += result.frames if isinstance(result, Skipped) else 0
            last = isinstance(result, Done | Cancelled) or (isinstance(result, Failed) and result.ended)
            if not self._over and (last or not self._cancelled):
                self._results.append(result)
            self._over = self._over or last
        self._news.unpark_all()
        if room or self._over:
            self._room.unpark_all()

    def hear_end(self, why: "WorkerEndedError") -> None:
        """The thread has ended before the session has."""
        if not self._opened.is_set():
            self.hear_opened(why)
        self.hear((Failed(why, ended=True),))

    def _wake_all(self) -> None:
        self._news.unpark_all()
        self._room.unpark_all()


def _pcm(samples: npt.NDArray[np.int16]) -> bytes:
    array = np.asarray(samples)
    if array.ndim != 1 or array.dtype != np.int16:
        raise AudioError(f"samples are {array.dtype} of shape {array.shape}; int16 [S] is needed")
    return array.tobytes()
