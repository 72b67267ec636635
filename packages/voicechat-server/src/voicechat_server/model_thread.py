"""The thread that owns the model: it loads, opens, steps and closes. Knows no Trio; ``worker`` is its other half.

Rules of this file:

1. Commands come in by one FIFO, news go out by one function, both plain values. Nothing of MLX leaves: what a session
   gives is NumPy, and an error leaves without its frames, whose variables hold arrays.
2. All commands that wait are obeyed, then one frame is run. So whatever is queued, a cancel waits for one frame.
3. Sessions take turns, a frame each. One that lacks samples, or whose consumer lags, is left alone until a wake.
4. A session's failure is that session's. Whatever else is raised here ends the thread, and is told.
5. At its end the thread gives everything back: MLX keeps streams for each thread, and a process can abort at its end
   if they were not cleared (see ``_give_back``).
"""

import gc
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from voicechat_core import AudioFrame, ContextLimitError, Event, InputError, VoiceChatError
from voicechat_server.mailbox import SAMPLE_RATE, Mailbox
from voicechat_server.model_messages import (
    Answered,
    Cancel,
    Close,
    Command,
    Delivery,
    Ended,
    Failed,
    Flush,
    Loaded,
    News,
    Open,
    Opened,
    OutputRefused,
    Ping,
    Refused,
    Released,
    Respond,
    Responded,
    Result,
    Skipped,
    Stop,
    Wake,
)

if TYPE_CHECKING:  # the model is the caller's to bring: without one, nothing here needs MLX
    from voicechat_core import Session, VoiceChat

__all__ = ["ModelThread"]

log = logging.getLogger(__name__)

LONGEST_SECONDS: Final = 1e9  # thirty years; of the largest floats, samples would be infinite


# ---- the thread


@dataclass(eq=False)
class _Seat:
    """An open session on the thread. ``pad_partial`` is None until it is flushed."""

    generation: int
    session: "Session"
    mailbox: Mailbox
    skip_beyond_samples: int | None
    pad_partial: bool | None = None


class _NotWantedError(Exception):
    """A session is being opened for nobody."""


class ModelThread:
    """What the thread does. ``run`` is its body; ``commands`` and ``halt`` are for others, the rest is its own."""

    def __init__(
        self,
        load: "Callable[[], VoiceChat]",
        tell: Callable[[News], None],
        *,
        warm_prompt_tokens: int,
        warm_prompt: str | None = None,
        warm_context_frames: int | None = None,
    ) -> None:
        """``tell`` passes news on; it is called on the thread and must not block."""
        self.commands: SimpleQueue[Command] = SimpleQueue()  # bounded by its senders, see ``worker``
        self._load: Callable[[], VoiceChat] | None = load
        self._tell = tell
        self._warm_prompt_tokens = warm_prompt_tokens
        self._warm_prompt = warm_prompt
        self._warm_context_frames = warm_context_frames
        self._halted = threading.Event()
        self._voicechat: VoiceChat | None = None
        self._frame_samples = 0
        self._first_frame_samples = 0
        self._seats: dict[int, _Seat] = {}
        self._waiting: deque[Command] = deque()  # taken from the queue and not obeyed yet
        self._ready: deque[_Seat] = deque()  # those that may have a frame to run, each once

    def halt(self) -> None:
        """From any thread: stop after the frame, the opening or the loading that runs now."""
        if not self._halted.is_set():
            self._halted.set()
            self.commands.put(Stop())

    def run(self) -> None:
        """Load, obey and step until halted; then give everything back, and tell that it has ended."""
        error: BaseException | None = None
        try:
            self.load()
            while self.turn():
                pass
        except BaseException as failure:
            self._log_unless_ours(failure, "the model thread failed")
            error = _bare(failure)
        try:
            self._give_back()
        except BaseException as failure:
            log.exception("the model thread could not clean up")
            error = error or _bare(failure)
        self._tell(Ended(error))

    def load(self) -> None:
        """Load the model and warm it up, unless halted."""
        if self._halted.is_set() or self._load is None:
            return
        voicechat, self._load = self._load(), None
        self._first_frame_samples = voicechat.first_frame_samples
        self._frame_samples = voicechat.model.config.input_frame_samples
        self._voicechat = voicechat
        with suppress(_NotWantedError):
            self._while_opening()
            self._warm_up(voicechat)
            self._tell(Loaded())

    def turn(self, *, wait: bool = True) -> bool:
        """Obey all commands that wait, then run at most one frame. Returns whether to go on.

        With nothing to run it waits for a command, unless it is not to ``wait``.
        """
        if wait and not self._ready and not self._waiting and not self._halted.is_set():
            self._waiting.append(self.commands.get())
        self._take_commands()
        while self._waiting:
            self._obey(self._waiting.popleft())
        if self._ready and not self._halted.is_set():
            self._advance(self._ready.popleft())
        return not self._halted.is_set()

    @property
    def idle(self) -> bool:
        """Whether it would wait for a command now."""
        return not self._ready and not self._waiting and self.commands.empty()

    # ---- commands

    def _take_commands(self) -> None:
        for _ in range(self.commands.qsize()):
            self._waiting.append(self.commands.get())

    def _obey(self, command: Command) -> None:
        if isinstance(command, Ping):
            self._tell(Answered())
        elif isinstance(command, Open):
            self._open(command)
        elif isinstance(command, Close):
            self._close(command.generation)
        elif not isinstance(command, Stop) and (seat := self._seats.get(command.generation)):
            self._obey_for(seat, command)

    def _obey_for(self, seat: _Seat, command: Wake | Flush | Respond | Cancel) -> None:
        if isinstance(command, Respond):
            self._deliver(seat, [self._responded(seat, command)])
            return
        if isinstance(command, Cancel):
            results = seat.session.cancel()
            self._leave(seat)
            self._deliver(seat, results)
            return
        if isinstance(command, Flush):
            seat.pad_partial = command.pad_partial
        if seat not in self._ready:
            self._ready.append(seat)

    def _responded(self, seat: _Seat, command: Respond) -> Result:
        try:
            seat.session.respond(command.call_id, command.output)
        except InputError as error:
            return OutputRefused(command.call_id, _bare(error))
        return Responded(command.call_id, command.output)

    def _open(self, command: Open) -> None:
        if command.mailbox.is_shut or self._halted.is_set():
            return
        try:
            seat = self._seat(command)
        except _NotWantedError:
            return
        except Exception as error:
            self._log_unless_ours(error)
            self._tell(Refused(command.generation, _bare(error)))
            return
        self._seats[command.generation] = seat
        self._ready.append(seat)
        self._tell(Opened(command.generation))

    def _seat(self, command: Open) -> _Seat:
        assert self._voicechat is not None  # the loop begins after loading
        opening = command.opening
        bound = self._skip_bound(opening.skip_beyond_seconds)
        session = self._voicechat.session(
            system_prompt=opening.system_prompt,
            seed=opening.seed,
            max_frames=opening.max_frames,
            tts_context_frames=opening.tts_context_frames,
            tools=opening.tools,
            tool_wait_frames=opening.tool_wait_frames,
            progress=lambda done: self._while_opening(command.mailbox),
        )
        return _Seat(command.generation, session, command.mailbox, bound)

    def _while_opening(self, mailbox: Mailbox | None = None) -> None:
        """A long prompt takes minutes: meanwhile pings are answered, and it is given up when nobody wants it."""
        self._take_commands()
        for ping in [waiting for waiting in self._waiting if isinstance(waiting, Ping)]:
            self._waiting.remove(ping)
            self._tell(Answered())
        if self._halted.is_set() or (mailbox is not None and mailbox.is_shut):
            raise _NotWantedError

    def _skip_bound(self, seconds: float | None) -> int | None:
        if seconds is None:
            return None
        least = self._frame_samples / SAMPLE_RATE  # or a frame could be dropped for ever just before it is complete
        if not (math.isfinite(seconds) and seconds >= least):
            raise InputError(f"skip_beyond_seconds is {seconds!r}; at least {least:g}, one frame, is needed")
        return int(min(seconds, LONGEST_SECONDS) * SAMPLE_RATE)

    def _close(self, generation: int) -> None:
        if seat := self._seats.get(generation):
            seat.session.cancel()
            self._leave(seat)
        self._tell(Released(generation))

    def _leave(self, seat: _Seat) -> None:
        """The session has ended: nothing of it is stepped, heard or kept any more."""
        del self._seats[seat.generation]
        with suppress(ValueError):
            self._ready.remove(seat)
        seat.mailbox.shut()

    # ---- frames

    def _advance(self, seat: _Seat) -> None:
        """One frame of a session, if it has one and its consumer keeps up."""
        if not seat.mailbox.may_step():
            return
        results: list[Result] = [*self._skipped(seat)]
        begun = time.perf_counter()
        wanted = self._frame_samples if seat.session.frame_index else self._first_frame_samples
        samples = seat.mailbox.take(wanted)
        if samples is not None:
            self._heard(seat, samples, results)
        elif seat.pad_partial is not None:
            self._finished(seat, results)
        else:
            return  # and nothing was skipped: skipping leaves a frame
        ran = any(isinstance(result, AudioFrame) for result in results)
        self._deliver(seat, results, time.perf_counter() - begun if ran else None)
        if seat.generation in self._seats:
            self._ready.append(seat)

    def _skipped(self, seat: _Seat) -> Iterator[Skipped]:
        if seat.skip_beyond_samples is not None:
            frames = seat.mailbox.skip(seat.skip_beyond_samples, self._frame_samples)
            if frames:
                yield Skipped(frames, frames * self._frame_samples)

    def _heard(self, seat: _Seat, pcm: bytes, results: list[Result]) -> None:
        """Push what one frame reads. What it gave before a failure stays."""
        try:
            for event in seat.session.push(np.frombuffer(pcm, np.int16)):
                results.append(event)
        except ContextLimitError as error:
            seat.mailbox.shut()  # it can hear no more, only be flushed
            results.append(Failed(_bare(error), ended=False))
        except Exception as error:
            self._fail(seat, error, results)

    def _finished(self, seat: _Seat, results: list[Result]) -> None:
        """The frame that has begun, if it is to be padded, and ``Done``."""
        rest = np.frombuffer(seat.mailbox.take_rest(), np.int16)
        try:
            for result in self._flushed(seat, rest):
                results.append(result)
        except Exception as error:
            self._fail(seat, error, results)
        else:
            self._leave(seat)

    def _flushed(self, seat: _Seat, rest: npt.NDArray[np.int16]) -> Iterator[Result]:
        yield from seat.session.push(rest)  # less than a frame: no events
        try:
            yield from seat.session.flush(pad_partial=bool(seat.pad_partial))
        except ContextLimitError as error:
            yield Failed(_bare(error), ended=False)
            yield from seat.session.flush()  # the padded frame is dropped: this ends

    def _fail(self, seat: _Seat, error: Exception, results: list[Result]) -> None:
        self._log_unless_ours(error)
        results.append(Failed(_bare(error), ended=True))
        self._leave(seat)

    def _deliver(self, seat: _Seat, results: "list[Result] | list[Event]", seconds: float | None = None) -> None:
        room = seat.mailbox.stepped(len(results))
        self._tell(Delivery(seat.generation, tuple(results), room, seconds))

    # ---- beginning and end

    def _warm_up(self, voicechat: "VoiceChat") -> None:
        """What is done for the first time is done before the first user comes: prompts, kernels, buffers."""
        frames = self._warm_context_frames
        voicechat.warm_up(self._warm_prompt_tokens, tts_context_frames=frames)
        session = voicechat.session(
            system_prompt=self._warm_prompt,
            tts_context_frames=frames,
            progress=lambda done: self._while_opening(),
        )
        for _ in session.push(np.zeros(2 * self._frame_samples, np.int16)):  # the first two frames are cold
            pass
        session.cancel()

    def _give_back(self) -> None:
        """Drop the model and every session, then MLX's memory and streams of this thread.

        Only the last of it matters for a clean exit. Of 30 processes that ended together with this thread (MLX 0.32.4
        on a CPU), 15 aborted without any of this ("terminate called without an active exception"), 27 with all of it
        but ``clear_streams``, and none with it; MLX wants it called at the end of every thread. Of 30 that ended after
        the thread was joined, none aborted in either case.
        """
        self._seats.clear()
        self._ready.clear()
        self._voicechat = self._load = None
        gc.collect()  # reference cycles hold arrays, too
        mlx = sys.modules.get("mlx.core")
        if mlx is not None:
            mlx.synchronize()
            mlx.clear_cache()
            mlx.clear_streams()

    def _log_unless_ours(self, error: BaseException, what: str = "a session failed") -> None:
        """An error that nobody raised on purpose: its traceback is seen here or never."""
        if not isinstance(error, VoiceChatError):
            log.error("%s", what, exc_info=error)


def _bare(error: BaseException) -> BaseException:
    """``error`` without its frames and causes."""
    traceback.clear_frames(error.__traceback__)
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
