"""The model's thread, as Trio sees it: open sessions, push samples, take results. Nothing here waits for the model.

    async with Worker(lambda: voicechat_core.load("checkpoint")) as worker:
        await worker.loaded()
        with worker.open(Opening(system_prompt="Be concise.", seed=0)) as session:
            await session.opened()
            await session.push(samples)  # waits only while 120 s are queued
            session.flush()
            async for result in session:
                ...

Every wait is for a Trio event and can be cancelled at once; the thread (``model_thread``) goes on by itself. Results
carry the generation of the session they belong to, and what comes for a session that was closed is dropped: nothing of
one session reaches the next. Commands are a FIFO, so a session is closed before the next one is opened.

A frame in flight is never interrupted. Cancel, close and stop are obeyed after it.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import trio

from voicechat_core.errors import VoiceChatError
from voicechat_server.mailbox import SAMPLE_RATE, Mailbox
from voicechat_server.model_messages import (
    Answered,
    Close,
    Command,
    Delivery,
    Failed,
    Loaded,
    News,
    Open,
    Opened,
    Opening,
    Ping,
    Refused,
    Released,
    Result,
    Skipped,
)
from voicechat_server.model_thread import ModelThread
from voicechat_server.worker_session import WorkerEndedError, WorkerSession

if TYPE_CHECKING:
    from voicechat_core import VoiceChat

__all__ = [
    "MOST_INPUT_SECONDS",
    "MOST_RESULTS",
    "Failed",
    "FrameTime",
    "Opening",
    "Result",
    "Skipped",
    "Stage",
    "Worker",
    "WorkerBusyError",
    "WorkerEndedError",
    "WorkerSession",
]

# Of one session: what a client may send ahead, a recording for instance. 3.8 MB. A push goes in whole, so a session
# holds at most this and one push more.
MOST_INPUT_SECONDS: Final = 120.0
# Of one session: some 20 s of speech and text that its consumer has not taken. The frame that passes the bound still
# comes, with its calls, and the last words of a session: at most 24 more.
MOST_RESULTS: Final = 256
# Sessions that the thread has not closed yet. How many may talk is for admission to say; this only bounds what a flood
# of connections can leave in the FIFO during one long frame. A session has at most six commands there (open, two
# wakes, flush, cancel, close) and four outputs for each call that waits, 64; a ping and a stop come to that: 1,122 in
# all.
MOST_SESSIONS: Final = 16
WARM_PROMPT_TOKENS: Final = 256  # a page of instructions
STOP_SECONDS: Final = 10.0  # a frame, and giving back a model's memory


class WorkerBusyError(VoiceChatError):
    """The thread has too many sessions to close before it could open another."""


class Stage(Enum):
    """Of the thread's life."""

    NEW = "not started"
    LOADING = "loading"
    READY = "ready"
    ENDED = "ended"


@dataclass(frozen=True)
class FrameTime:
    """How long a frame took on the thread."""

    generation: int
    frame_index: int
    seconds: float


class Worker:
    """One model on one thread. Its methods belong to the Trio that started it.

    Use it as ``async with``: the thread is no daemon, and one that is never stopped keeps the process alive.
    """

    def __init__(
        self,
        load: "Callable[[], VoiceChat]",
        *,
        most_input_seconds: float = MOST_INPUT_SECONDS,
        most_results: int = MOST_RESULTS,
        most_sessions: int = MOST_SESSIONS,
        warm_prompt_tokens: int = WARM_PROMPT_TOKENS,
        warm_prompt: str | None = None,
        warm_context_frames: int | None = None,
        frame_took: Callable[[FrameTime], None] | None = None,
    ) -> None:
        """Does nothing yet.

        Args:
            load: called on the thread.
            most_input_seconds: of one session.
            most_results: of one session.
            most_sessions: that the thread has not closed yet.
            warm_prompt_tokens: up to which a session's own prompt takes one scan.
            warm_prompt: of the session that warms the model up; one that no session could have is an error of loading.
            warm_context_frames: the ``tts_context_frames`` of sessions to come, whose steps are compiled ahead.
            frame_took: called in Trio, before a frame's results can be taken; it must not raise.
        """
        self._most_input = int(most_input_seconds * SAMPLE_RATE)
        self._most_results = most_results
        self._most_sessions = most_sessions
        self._frame_took = frame_took
        self._side = ModelThread(
            load,
            self._tell,
            warm_prompt_tokens=warm_prompt_tokens,
            warm_prompt=warm_prompt,
            warm_context_frames=warm_context_frames,
        )
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._generations = itertools.count(1)
        self._sessions: dict[int, WorkerSession] = {}
        self._held: set[int] = set()  # generations that the thread has not released
        self._pong: trio.Event | None = None  # of the one ping that may be under way
        self._loaded = trio.Event()
        self._ended = trio.Event()
        self._stage = Stage.NEW
        self._load_error: Exception | None = None
        self.error: BaseException | None = None  # what ended the thread; None while it runs or if it was stopped
        self.dropped_results = 0

    # ---- what it says of itself

    @property
    def stage(self) -> Stage:
        """Where the thread is in its life."""
        return self._stage

    @property
    def alive(self) -> bool:
        """Whether the thread runs, as far as it has told; ``ping`` finds out whether it answers."""
        return self._stage in (Stage.LOADING, Stage.READY)

    @property
    def held_sessions(self) -> int:
        """Sessions that the thread has not closed yet, those that wait to be opened included."""
        return len(self._held)

    # ---- its life

    def start(self) -> None:
        """Start the thread, which begins to load.

        Raises:
            WorkerEndedError: when it was started or stopped before.
        """
        if self._stage is not Stage.NEW:
            raise WorkerEndedError(f"a worker starts once, and this one is {self._stage.value}")
        self._token = trio.lowlevel.current_trio_token()
        self._run_side()
        self._stage = Stage.LOADING  # its news come to Trio later than this

    async def loaded(self) -> None:
        """Wait until the model is loaded and warm. To cancel this stops nothing.

        Raises:
            Exception: what ``load`` raised.
            WorkerEndedError: when it was stopped before it had loaded, or the thread has ended since.
        """
        await self._loaded.wait()
        if self._stage is Stage.ENDED:
            raise self._load_error or self._why_ended()

    async def ended(self) -> None:
        """Wait until the thread has ended, by itself (then ``error`` says why) or because it was stopped."""
        await self._ended.wait()

    async def ping(self) -> float:
        """The seconds until the thread answers: at most one frame, or as long as it loads or opens a session.

        The time-out is the caller's. Pings at the same time share one answer, so they cost the thread nothing.

        Raises:
            WorkerEndedError: when it does not run, or ends meanwhile.
        """
        self._require_alive()
        begun = trio.current_time()
        if self._pong is None:
            self._pong = trio.Event()
            self._send(Ping())
        await self._pong.wait()
        self._require_alive()
        return trio.current_time() - begun

    async def stop(self, seconds: float = STOP_SECONDS) -> bool:
        """Let the running frame, opening or loading finish, close everything, and join the thread.

        May be called at any time and again. Sessions that are open get a ``Failed`` as their last result.

        Returns:
            Whether the thread was joined within ``seconds``. If not it still ends when it can, and holds the process
            until then.
        """
        self._side.halt()
        if self._stage is Stage.NEW:
            self._end(None)
        with trio.move_on_after(seconds):
            await self._ended.wait()
            await self._join()
        return self._ended.is_set() and not (self._thread and self._thread.is_alive())

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with trio.CancelScope(shield=True):
            await self.stop()

    # ---- sessions

    def open(self, opening: Opening, *, watch: Callable[[Delivery], None] | None = None) -> "WorkerSession":
        """Ask for a session; ``opened`` says whether it came to be. Use it as ``with``: that closes it.

        While the model loads this is allowed, and waits for it. ``watch`` is told what the session gives and what its
        frames took, in Trio, before it can be taken; it must not raise.

        Raises:
            WorkerBusyError: when too many sessions wait to be closed.
            WorkerEndedError: when the thread does not run.
        """
        self._require_alive()
        if len(self._held) >= self._most_sessions:
            raise WorkerBusyError(f"{len(self._held)} sessions are not closed yet; {self._most_sessions} may be")
        generation, mailbox = next(self._generations), Mailbox(self._most_input, self._most_results)
        session = WorkerSession(generation, mailbox, self._send, watch)
        self._sessions[generation] = session
        self._held.add(generation)
        self._send(Open(generation, opening, mailbox))
        return session

    # ---- commands out, news in

    def _send(self, command: Command) -> None:
        if isinstance(command, Close):  # whatever is still on its way for this session is dropped from here on
            self._sessions.pop(command.generation, None)
        if self.alive:
            self._side.commands.put(command)

    def _tell(self, news: News) -> None:
        """On the model thread: pass news on to Trio, which hears them in this order."""
        assert self._token is not None
        try:
            self._token.run_sync_soon(self._hear, news)
        except trio.RunFinishedError:  # nobody is left to listen
            self._side.halt()

    def _hear(self, news: News) -> None:
        if isinstance(news, Delivery):
            self._hear_results(news)
        elif isinstance(news, Opened | Refused):
            if session := self._sessions.get(news.generation):
                session.hear_opened(news.error if isinstance(news, Refused) else None)
        elif isinstance(news, Released):
            self._held.discard(news.generation)
        elif isinstance(news, Answered):
            self._answer_pings()
        elif isinstance(news, Loaded):
            self._stage = Stage.READY
            self._loaded.set()
        else:
            self._end(news.error)

    def _hear_results(self, news: Delivery) -> None:
        session = self._sessions.get(news.generation)
        if session is None:
            self.dropped_results += len(news.results)
            return
        if news.seconds is not None and self._frame_took is not None:
            self._frame_took(FrameTime(news.generation, session.frames, news.seconds))
        if session.watch is not None:
            session.watch(news)
        session.hear(news.results, room=news.room)

    def _answer_pings(self) -> None:
        if self._pong is not None:
            self._pong.set()
            self._pong = None

    def _end(self, error: BaseException | None) -> None:
        """The thread has ended, or will never begin: wake everybody who waits."""
        self._stage, self.error = Stage.ENDED, error
        if not self._loaded.is_set() and isinstance(error, Exception):
            self._load_error = error
        for session in list(self._sessions.values()):
            session.hear_end(self._why_ended())
        self._held.clear()
        self._answer_pings()
        self._loaded.set()
        self._ended.set()

    def _why_ended(self) -> WorkerEndedError:
        """By name only: what a library says stays in the log."""
        if self.error is None:
            return WorkerEndedError(f"the model thread does not run: {self._stage.value}")
        ended = WorkerEndedError(f"the model thread has ended: {type(self.error).__name__}")
        ended.__cause__ = self.error
        return ended

    def _require_alive(self) -> None:
        if not self.alive:
            raise self._why_ended()

    # ---- the thread itself; a worker without one has others

    def _run_side(self) -> None:
        self._thread = threading.Thread(target=self._side.run, name="model", daemon=False)
        self._thread.start()

    async def _join(self) -> None:
        if self._thread is not None:
            await trio.to_thread.run_sync(self._thread.join, abandon_on_cancel=True)
