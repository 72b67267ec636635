"""Records sessions, each into a folder of its own (see ``recording_files``), without a wait in the conversation.

    recordings = Recordings(directory, model="tiny", checkpoint=path, precision="auto")
    recordings.prepare()
    Worker(recordings.loading(load))
    ...
    async with recorded(recordings, session_id) as recorder:
        connection = Connection(..., saw=recorder.saw)
        ...
        recorder.ended(frames=..., ended_by=..., code=...)

What passes goes into a buffer, and one task has it written on a thread. A disk that is full, or too slow for the
buffer, ends the recording: one line in the log, a mark in session.json where that can still be written, and the
conversation goes on. The end of the block waits for the rest to be written, also when it is cancelled, but not for
long.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import trio

from voicechat_core import wire
from voicechat_core.errors import InputError
from voicechat_core.events import AudioFrame
from voicechat_core.strict_json import json_of
from voicechat_server.connection import Seen
from voicechat_server.exchange import Flush, Push
from voicechat_server.model_messages import Delivery, Opening, Responded, Skipped
from voicechat_server.recording_files import (
    FORMAT,
    BinaryFrame,
    Ending,
    Flushed,
    Folder,
    FrameRan,
    Item,
    OutputTaken,
    RecordingError,
    SessionFile,
    SkippedFrames,
    folder_name,
    versions,
)

if TYPE_CHECKING:
    from voicechat_core import VoiceChat

__all__ = ["Recorder", "RecordingLimits", "Recordings", "Watcher", "recorded"]

_log: Final = logging.getLogger(__name__)

THREADS: Final = 4  # of all recordings together: a disk that hangs keeps one for each session that it has hurt
ITEM_BYTES: Final = 512  # what a small thing costs in memory, about

OnDisk = Callable[[Callable[[], None]], Awaitable[None]]


@dataclass(frozen=True)
class RecordingLimits:
    """Of one recording.

    Attributes:
        waiting_bytes: that may wait for the disk. A peer may send 120 s and one message more at once, 9 MB of samples
            that came as 12 MB of text, faster than a disk takes them; this is half as much again. At the pace of
            speech it is five minutes.
        folder_bytes: of one folder. Ten minutes of speech are 60 MB, so this is for an hour and a half; what it stops
            is a peer that sends pings, or single samples, without end.
        tail_seconds: for the rest to be written at the end, while the peer waits for its close frame.
    """

    waiting_bytes: int = 32 * 2**20
    folder_bytes: int = 512 * 2**20
    tail_seconds: float = 2.0


class Watcher(Protocol):
    """What a connection is shown to, and its end."""

    def saw(self, what: Seen) -> None:
        """This has passed. Neither raises nor waits."""

    def ended(self, *, frames: int, ended_by: str, code: int) -> None:
        """The connection is over."""


class Nobody:
    """Watches where nothing is recorded."""

    def saw(self, what: Seen) -> None:
        """Do nothing."""

    def ended(self, *, frames: int, ended_by: str, code: int) -> None:
        """Do nothing."""


class Recordings:
    """Where a server's recordings go, and what is the same in all of them."""

    def __init__(
        self,
        directory: Path,
        *,
        model: str,
        checkpoint: Path,
        precision: str,
        limits: RecordingLimits | None = None,
        on_disk: OnDisk | None = None,
    ) -> None:
        """Where, and of what.

        Args:
            directory: gets a folder for each session.
            model: the name that peers are told.
            checkpoint: the directory that it is loaded from, as replay is to find it.
            precision: as it is asked for.
            limits: of each recording.
            on_disk: runs what blocks; by default a thread, which is left to itself when it is cancelled.
        """
        self.directory = directory
        self._model, self._checkpoint, self._precision = model, checkpoint, precision
        self.limits = limits or RecordingLimits()
        self._threads = trio.CapacityLimiter(THREADS)
        self.on_disk = on_disk or self._on_thread
        self._fingerprint, self._compiled = "", False

    def prepare(self) -> None:
        """See that a folder can be made, before the server starts.

        Raises:
            InputError: naming the directory, and why it cannot hold one.
        """
        probe = self.directory / f".probe-{datetime.now(UTC).timestamp()}"
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe.mkdir(mode=0o700)
            probe.rmdir()
        except OSError as error:
            raise InputError(f"{self.directory}: recordings cannot be written there: {error.strerror}") from error

    def loading(self, load: "Callable[[], VoiceChat]") -> "Callable[[], VoiceChat]":
        """``load``, which also notes the model's fingerprint, a look at every weight, and whether it is compiled."""

        def loaded() -> "VoiceChat":
            voicechat = load()
            self._fingerprint, self._compiled = voicechat.model.fingerprint, voicechat.model.compiled
            return voicechat

        return loaded

    def folder(self, session_id: str) -> Folder:
        """The folder of a session that begins now; nothing of it is on the disk yet."""
        now = datetime.now(UTC)
        session = SessionFile(
            format=FORMAT,
            session=session_id,
            started=now.isoformat(timespec="milliseconds"),
            model=self._model,
            checkpoint=str(self._checkpoint.absolute()),
            precision=self._precision,
            fingerprint=self._fingerprint,
            compiled=self._compiled,
            versions=versions(),
        )
        return Folder(self.directory / folder_name(session_id, now), session, self.limits.folder_bytes)

    async def _on_thread(self, work: Callable[[], None]) -> None:
        await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._threads)


@asynccontextmanager
async def recorded(recordings: Recordings | None, session_id: str) -> AsyncIterator[Watcher]:
    """Record what is shown to the watcher in the block; to nobody, where there are no recordings.

    An exception that leaves the block leaves it in a group, as with a nursery.
    """
    if recordings is None:
        yield Nobody()
        return
    recorder = Recorder(recordings.folder(session_id), session_id, recordings.limits, recordings.on_disk)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(recorder.run)
        try:
            yield recorder
        finally:
            await recorder.close()


class Recorder:
    """One recording. ``saw`` and ``ended`` are for the connection, the rest is ``recorded``'s."""

    def __init__(self, folder: Folder, session_id: str, limits: RecordingLimits, on_disk: OnDisk) -> None:
        self._folder = folder
        self._session_id = session_id
        self._limits = limits
        self._on_disk = on_disk
        self._began = trio.current_time()
        self._frames = 0  # that the session gave; a connection has one session that gives any
        self._items: list[tuple[float, Item]] = []
        self._waiting_bytes = 0  # of these and of those that are being written: see RecordingLimits
        self._news = trio.lowlevel.ParkingLot()
        self._writing = trio.CancelScope(shield=True)
        self._written = trio.Event()
        self._over = False  # nothing more is taken
        self._closed = False  # and the connection has ended
        self._given_up = False
        self._failure: str | None = None
        self._ending: Ending | None = None

    # ---- what it is shown

    def saw(self, what: Seen) -> None:
        """Keep it until it is written."""
        if self._over:
            return
        at = self._now()
        for item in self._items_of(at, what):
            self._items.append((at, item))
            self._waiting_bytes += _size(item)
        if self._waiting_bytes > self._limits.waiting_bytes:
            self._fail(f"the disk is too slow: more than {self._limits.waiting_bytes} bytes wait for it")
        self._news.unpark_all()

    def ended(self, *, frames: int, ended_by: str, code: int) -> None:
        """The connection is over, by this, and the socket is closed with that code."""
        self._ending = Ending(frames=frames, seconds=self._now(), ended_by=ended_by, code=code)

    def _now(self) -> float:
        return round(trio.current_time() - self._began, 6)

    def _items_of(self, at: float, what: Seen) -> Iterator[Item]:
        if isinstance(what, Delivery):
            yield from self._delivered(at, what)
        elif isinstance(what, bytes):
            yield BinaryFrame(at=at, size=len(what))
        elif isinstance(what, Flush):
            yield Flushed(at=at, pad_partial=what.pad_partial)
        else:
            yield what

    def _delivered(self, at: float, delivery: Delivery) -> Iterator[Item]:
        for result in delivery.results:
            if isinstance(result, Skipped):
                yield SkippedFrames(at=at, before_frame=self._frames, frames=result.frames)
            elif isinstance(result, Responded):
                yield OutputTaken(at=at, before_frame=self._frames, call_id=result.call_id, output=result.output)
            elif isinstance(result, AudioFrame):
                if delivery.seconds is not None:
                    yield FrameRan(at=at, frame_index=self._frames, seconds=round(delivery.seconds, 6))
                self._frames += 1

    # ---- the task that has it written

    async def run(self) -> None:
        """Write until it is closed, or cannot go on. Raises nothing; is cancelled by ``close`` alone."""
        with self._writing:
            try:
                await self._block(self._folder.begin)
                while batch := await self._batch():
                    await self._block(partial(self._folder.write, batch))
                    self._waiting_bytes -= sum(_size(item) for _, item in batch)
            except Exception as error:  # whatever it is, the conversation goes on
                self._fail(_reason(error), error)
            if not self._closed:
                await self._say_how_it_stands()  # at once: the process may be killed before the conversation ends
            while not self._closed:
                await self._news.park()
            await self._say_how_it_stands(last=True)
        self._written.set()

    async def close(self) -> None:
        """Take no more, and wait until everything is written, in a bounded time. Cannot be cancelled."""
        self._over = self._closed = True
        self._news.unpark_all()
        with trio.move_on_after(self._limits.tail_seconds, shield=True):
            await self._written.wait()
            return
        self._given_up = True
        self._fail(f"the disk is too slow: the rest was not written within {self._limits.tail_seconds:g} seconds")
        self._writing.cancel()

    async def _batch(self) -> list[tuple[float, Item]]:
        """All that waits; nothing if no more will come."""
        while not self._items and not self._over:
            await self._news.park()
        batch, self._items = self._items, []
        return batch

    async def _say_how_it_stands(self, *, last: bool = False) -> None:
        try:
            await self._block(lambda: self._folder.say(self._ending, self._failure), last=last)
        except Exception as error:
            self._fail(_reason(error), error)

    async def _block(self, work: Callable[[], None], *, last: bool = False) -> None:
        """Run what blocks. Whoever is the last to use the files closes them, be it a thread that was given up."""
        begun = False

        def working() -> None:
            nonlocal begun
            begun = True
            try:
                work()
            finally:
                if last or self._given_up:
                    self._folder.close()

        try:
            await self._on_disk(working)
        finally:
            if not begun:  # given up before there was a thread for it
                self._folder.close()

    def _fail(self, reason: str, error: Exception | None = None) -> None:
        """End the recording."""
        self._over = True
        self._items.clear()
        if self._failure is None:
            self._failure = reason
            ours = None if isinstance(error, OSError | RecordingError) else error  # of our making: its place matters
            message = "%s: the recording in %s is not complete: %s"
            _log.error(message, self._session_id, self._folder.path, reason, exc_info=ours)


def _size(item: Item) -> int:
    """Bytes of memory, about."""
    match item:
        case str():
            return ITEM_BYTES + len(item)
        case Push(samples):
            return ITEM_BYTES + samples.nbytes
        case Opening():
            return ITEM_BYTES + len(item.system_prompt or "")
        case wire.ResponseAudioDelta():
            return ITEM_BYTES + len(item.delta)
        case OutputTaken(output=output):
            return ITEM_BYTES + len(json_of(output, "the output"))
        case wire.ResponseFunctionCallArgumentsDone(arguments=text) | wire.ResponseFunctionCallFailed(written=text):
            return ITEM_BYTES + len(text)
        case wire.ResponseTextDelta() | wire.ResponseFunctionDelta():
            return ITEM_BYTES + len(item.text)
        case wire.ConversationItemInputAudioTranscriptionDelta():
            return ITEM_BYTES + len(item.transcript)
    return ITEM_BYTES


def _reason(error: Exception) -> str:
    """Of a disk by its own words; of anything else by its name."""
    if isinstance(error, OSError):
        return f"it cannot be written: {error.strerror or type(error).__name__}"
    return str(error) if isinstance(error, RecordingError) else f"it cannot be written: {type(error).__name__}"
