"""One connection's conversation, without its socket: what may come when, and what is answered.

    >>> protocol = Protocol(model="tiny", token=lambda: secrets.token_hex(8), now=trio.current_time())
    >>> commands = protocol.begin()                    # to be carried out in their order
    >>> commands = protocol.received(text, now)        # from the socket; bytes are a binary frame
    >>> commands = protocol.happened(Opened(), now)    # from the model's thread, or from the server
    >>> commands = protocol.tick(now)                  # at protocol.deadline, or whenever it suits

Rules of this file: no socket, no thread, no model, no clock (``now`` is seconds of any one clock). It never waits, and
nothing that a peer sends makes it raise. Who is admitted is decided before; the connection carries out the commands.

What is wrong with a message is one ``error``, and changes nothing else. A message that comes at the wrong time is
refused for that, whatever else is wrong with it.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from voicechat_core import events, wire
from voicechat_core.errors import InputError, WireError
from voicechat_core.strict_json import json_of, shown
from voicechat_server.exchange import (
    Cancel,
    Close,
    Command,
    Failed,
    Flush,
    Input,
    Lagging,
    Open,
    Opened,
    OpenFailed,
    OutputAccepted,
    OutputRefused,
    PeerLeft,
    Push,
    Respond,
    Said,
    Send,
    Stop,
)
from voicechat_server.telling import Telling

__all__ = ["Limits", "Protocol", "State"]


@dataclass(frozen=True)
class Binary:
    """A binary frame came."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


class State(enum.Enum):
    """Where a connection stands: a column of the table, but for the last."""

    CONFIGURING = "no session: waits for session.update"
    OPENING = "a session is being opened; audio is passed on and waits behind it"
    CLOSED_EARLY = "the same, and commit has come already"
    READY = "audio goes in, events come out"
    FULL = "the session has all the frames that it may have; it waits for commit"
    FLUSHING = "commit has come; the last events, then response.done"
    ENDED = "the last command is given: whatever comes is ignored"


# What comes, and how it is answered: by a method of Protocol, by one of REFUSALS, or (-) not at all.
TABLE_TEXT: Final = """
what_comes              CONFIGURING   OPENING       CLOSED_EARLY  READY         FULL          FLUSHING
SessionUpdate           open          update_again  update_again  update_again  update_again  update_again
InputAudioBufferAppend  too_early     push_ahead    too_late      push          too_much      too_late
InputAudioBufferCommit  too_early     commit_ahead  too_late      commit        commit        too_late
ConversationItemCreate  too_early     respond       respond       respond       respond       respond
SessionCancel           too_early     cancel        cancel        cancel        cancel        cancel
ResponseCancel          too_early     cancel        cancel        cancel        cancel        cancel
SessionPing             pong          pong          pong          pong          pong          pong
WireError               unreadable    unreadable    unreadable    unreadable    unreadable    unreadable
Binary                  binary        binary        binary        binary        binary        binary
Opened                  -             opened        opened_early  -             -             -
OpenFailed              -             not_opened    not_opened    -             -             -
Said                    -             -             -             tell          tell          tell
Failed                  -             failed        failed        failed        failed        failed
OutputAccepted          -             -             -             taken         taken         taken
OutputRefused           -             -             -             not_taken     not_taken     not_taken
Lagging                 -             -             -             lagging       lagging       lagging
Tick                    unconfigured  -             -             idle          idle          unfinished
PeerLeft                left          left          left          left          left          left
Stop                    stop          stop          stop          stop          stop          stop
"""
# The state after an answer; after any other it is the same, but cancel, left and stop end the connection, and these do
# so if: tell, the session is done; failed, it is lost (else READY becomes FULL); unconfigured, idle and unfinished,
# time is up.
NEXT: Final = {
    "open": State.OPENING,
    "commit_ahead": State.CLOSED_EARLY,
    "opened": State.READY,
    "opened_early": State.FLUSHING,
    "not_opened": State.CONFIGURING,
    "commit": State.FLUSHING,
}
# Answers that need no method: the message comes at the wrong time, and that is all it is told.
REFUSALS: Final = {
    "too_early": ("invalid_request", "send session.update before audio"),
    "update_again": ("invalid_request", "the active session cannot be reconfigured"),
    "too_much": ("inference_error", "the session has no frames left; commit or cancel it"),
    "too_late": ("invalid_request", "the input was committed; no more of it is taken"),
}

INPUTS: Final = (
    *wire.CLIENT_EVENTS.values(), WireError, Binary, Opened, OpenFailed, Said, Failed,
    OutputAccepted, OutputRefused, Lagging, Tick, PeerLeft, Stop,
)  # fmt: skip


def _read_table(text: str) -> dict[type, dict[State, str]]:
    """The answer to each kind of input in each state."""
    head, *rows = (line.split() for line in text.strip().splitlines())
    answers = {name: dict(zip((State[state] for state in head[1:]), row, strict=True)) for name, *row in rows}
    return {kind: answers[kind.__name__] for kind in INPUTS}


TABLE: Final = _read_table(TABLE_TEXT)

FRAMES_A_SECOND: Final = 12.5
MOST_OUTPUTS: Final = 4  # of one call on their way to the model's thread: what waits there is bounded
LONGEST_MESSAGE: Final = 300  # characters of an error message; ours are shorter, unless they hold a peer's values


@dataclass(frozen=True)
class Limits:
    """How long a peer may take; ``math.inf`` for any time.

    Attributes:
        configure_seconds: until session.update. Who holds the only slot without using it gives it back.
        idle_seconds: in which a ready session neither hears nor says anything; WebSocket pings do not count.
        session_seconds: of a session, by the clock and in audio: the slot comes round, and the model's positions last.
            After the commit it has as long again.
        lag_seconds: audio that waits for the model before the peer is told of it: more than a few late frames.
        lag_every_seconds: least time between two session.lag.
        prompt_chars: of a peer's system prompt. The speech decoder takes a step for each of its tokens the first time,
            so a long one keeps the slot for minutes; this is two or three pages.
        output_chars: of a function's output, as JSON. The model reads a token of it a frame, 1,024 at most.
    """

    configure_seconds: float = 30.0
    idle_seconds: float = 120.0
    session_seconds: float = 600.0
    lag_seconds: float = 0.5
    lag_every_seconds: float = 1.0
    prompt_chars: int = 8192
    output_chars: int = 8192


class Protocol:
    """One connection from its first message to its last command."""

    def __init__(
        self,
        *,
        model: str,
        token: Callable[[], str],
        now: float,
        limits: Limits | None = None,
        system_prompt: str | None = None,
        recording: bool = False,
    ) -> None:
        """A connection that is admitted, at ``now``.

        Args:
            model: the name of what is served, whatever a peer asks for.
            token: gives 16 new hexadecimal digits, for the names of the session and of every message.
            now: seconds.
            limits: how long a peer may take.
            system_prompt: for sessions that ask for none in particular; None for the checkpoint's own.
            recording: whether the peer is told that it is recorded.
        """
        self.state = State.CONFIGURING
        self.session_id = f"sess_{token()}"
        self.function_calls = self.function_calls_failed = 0  # that the peer was told
        self.ended_by = ""  # why, in a word or two for the log, once the state is ENDED
        self._model = model
        self._token = token
        self._limits = limits or Limits()
        self._system_prompt = system_prompt
        self._recording = recording
        self._configure_by = now + self._limits.configure_seconds
        self._configure_left = 0.0  # kept while a session is being opened
        self._session_until = math.inf
        self._active_at = now
        self._sent_ahead = 0  # messages of audio that wait for the session to open
        self._early_commit = Flush(pad_partial=True)
        # Calls of one frame, the last that has any, without an output so far; how many of each are on their way.
        self._awaited: dict[str, int] = {}
        self._awaited_frame = -1
        self._telling = Telling(self._event_id)
        self._skips_told = 0
        self._lag_told_at = -math.inf
        self._lag = Lagging(0.0, 0, 0)
        self._policy: wire.Policy = "wait"

    @property
    def deadline(self) -> float:
        """When ``tick`` is due, infinity if never; it moves with whatever comes."""
        if self.state is State.CONFIGURING:
            return self._configure_by
        if self.state in (State.READY, State.FULL):
            return min(self._session_until, self._active_at + self._limits.idle_seconds)
        return self._session_until if self.state is State.FLUSHING else math.inf

    @property
    def frames(self) -> int:
        """How many frames the peer was told."""
        return self._telling.frames

    @property
    def frames_skipped(self) -> int:
        """How many frames of input were skipped, as far as is known here."""
        return self._lag.frames_skipped

    # ---- what comes

    def begin(self, *, loading: bool = False) -> list[Command]:
        """The first message; or, while the model is not there yet, the only one."""
        if loading:
            return [self._error("model_loading", "the model is still loading; try again"), *self._end(1013, "loading")]
        recording = wire.CreatedSession(id=self.session_id, recording=True)
        session = recording if self._recording else wire.CreatedSession(id=self.session_id)
        return [Send(wire.SessionCreated(event_id=self._event_id(), session=session))]

    def received(self, data: str | bytes, now: float) -> list[Command]:
        """A frame from the peer, text or (bytes) binary."""
        if self.state is State.ENDED:
            return []
        self._active_at = now
        if isinstance(data, bytes):
            return self._answer(Binary(), now)
        try:
            message: wire.ClientEvent | WireError = self._bounded(wire.decode_client(data))
        except WireError as error:
            message = error
        return self._answer(message, now)

    def _bounded(self, message: wire.ClientEvent) -> wire.ClientEvent:
        if isinstance(message, wire.SessionUpdate):
            chars, most = len(message.session.system_prompt or ""), self._limits.prompt_chars
            if chars > most:
                text = f"session.update: session.system_prompt has {chars} characters; at most {most} are taken"
                raise WireError(text, code="session_initialization_failed", event_type="session.update")
        elif isinstance(message, wire.ConversationItemCreate):
            chars, most = len(json_of(message.item.output, "item.output")), self._limits.output_chars
            if chars > most:
                text = f"conversation.item.create: item.output has {chars} characters as JSON; at most {most} are taken"
                raise WireError(text, event_type="conversation.item.create")
        return message

    def happened(self, what: Input, now: float) -> list[Command]:
        """Anything that does not come from the peer."""
        return self._answer(what, now)

    def tick(self, now: float) -> list[Command]:
        """Time has passed; at any time, and in time at ``deadline``."""
        return self._answer(Tick(), now)

    def _answer(self, what: Input | Binary | Tick | wire.ClientEvent | WireError, now: float) -> list[Command]:
        if self.state is State.ENDED:
            return []
        name = TABLE[type(what)][self.state]
        if name in REFUSALS:
            return [self._error(*REFUSALS[name])]
        if name == "-":
            return []
        answer: Callable[..., list[Command]] = getattr(self, f"_{name}")
        commands = answer(what, now)
        self.state = NEXT.get(name, self.state)
        return commands

    # ---- answers to the peer

    def _open(self, update: wire.SessionUpdate, now: float) -> list[Command]:
        asked = update.session
        frames = min(asked.max_streaming_seconds or math.inf, self._limits.session_seconds) * FRAMES_A_SECOND
        self._configure_left = max(0.0, self._configure_by - now)
        self._sent_ahead = 0
        self._policy = asked.lag.policy
        prompt = self._system_prompt if asked.system_prompt is None else asked.system_prompt
        max_frames = None if math.isinf(frames) else math.ceil(frames)
        return [Open(prompt, asked.seed, max_frames, asked.lag, asked.function_calls)]

    def _push(self, append: wire.InputAudioBufferAppend, now: float) -> list[Command]:
        samples = wire.samples_of(append.audio)
        return [Push(samples)] if samples.size else []

    def _push_ahead(self, append: wire.InputAudioBufferAppend, now: float) -> list[Command]:
        self._sent_ahead += 1
        return self._push(append, now)

    def _commit(self, commit: wire.InputAudioBufferCommit, now: float) -> list[Command]:
        self._session_until = now + self._limits.session_seconds  # what was heard has as long again to be answered
        committed = Send(wire.InputAudioBufferCommitted(event_id=self._event_id()))
        return [committed, Flush(commit.pad_partial)]

    def _commit_ahead(self, commit: wire.InputAudioBufferCommit, now: float) -> list[Command]:
        self._sent_ahead += 1
        self._early_commit = Flush(commit.pad_partial)
        return []

    def _respond(self, create: wire.ConversationItemCreate, now: float) -> list[Command]:
        """The session decides which output it takes, in their order; who sends a better one need not wait for that."""
        call_id = create.item.call_id
        on_their_way = self._awaited.get(call_id)
        if on_their_way is None:
            return [self._not_an_output(f"no call {shown(call_id)} waits for an output")]
        if on_their_way == MOST_OUTPUTS:
            many = f"{MOST_OUTPUTS} outputs of {shown(call_id)} are being looked at"
            return [self._not_an_output(f"{many}; another one may be sent when one of them is refused")]
        self._awaited[call_id] += 1
        return [Respond(call_id, create.item.output)]

    def _cancel(self, cancel: wire.SessionCancel | wire.ResponseCancel, now: float) -> list[Command]:
        cancelled = Send(wire.ResponseCancelled(event_id=self._event_id(), frame_index=self.frames))
        return [Cancel(), *self._unsaid_lag(now), cancelled, *self._end(1000, "cancelled")]

    def _pong(self, ping: wire.SessionPing, now: float) -> list[Command]:
        return [Send(wire.SessionPong(event_id=self._event_id()))]

    def _unreadable(self, error: WireError, now: float) -> list[Command]:
        kind = wire.CLIENT_EVENTS.get(error.event_type or "")
        name = TABLE[kind][self.state] if kind else ""
        if kind is None and error.event_type is not None and self.state is State.CONFIGURING:
            name = "too_early"  # an unknown type, as long as nothing but session.update makes sense
        if name in REFUSALS:
            return [self._error(*REFUSALS[name])]
        return [self._error(error.code, str(error))]

    def _binary(self, binary: Binary, now: float) -> list[Command]:
        return [self._error("invalid_request", "binary frames are not understood; messages are JSON in text frames")]

    # ---- answers to the session

    def _opened(self, opened: Opened, now: float) -> list[Command]:
        self._active_at = now
        self._session_until = now + self._limits.session_seconds
        session = wire.UpdatedSession(id=self.session_id, model=self._model)
        return [Send(wire.SessionUpdated(event_id=self._event_id(), session=session))]

    def _opened_early(self, opened: Opened, now: float) -> list[Command]:
        committed = Send(wire.InputAudioBufferCommitted(event_id=self._event_id()))
        return [*self._opened(opened, now), committed, self._early_commit]

    def _not_opened(self, failure: OpenFailed, now: float) -> list[Command]:
        self._configure_by = now + self._configure_left
        message = _told(failure.error, "the session could not be opened")
        if self._sent_ahead:
            message += f"; dropped with it: {self._sent_ahead} messages of input that were sent ahead"
        return [self._error("session_initialization_failed", message)]

    def _tell(self, said: Said, now: float) -> list[Command]:
        self._active_at = now
        self._notice_calls(said.event)
        sent: list[Command] = [Send(message) for message in self._telling.tell(said.event)]
        if isinstance(said.event, events.Done):
            return [*self._unsaid_lag(now), *sent, *self._end(1000, "done")]
        if isinstance(said.event, events.Cancelled):
            return [*self._unsaid_lag(now), *sent, *self._end(1000, "cancelled")]
        return sent

    def _notice_calls(self, event: events.Event) -> None:
        if isinstance(event, events.ToolCallFailed):
            self.function_calls_failed += 1
        elif isinstance(event, events.ToolCall):
            self.function_calls += 1
            if event.frame_index != self._awaited_frame:  # the model waits for one frame's calls at a time
                self._awaited, self._awaited_frame = {}, event.frame_index
            self._awaited[event.call_id] = 0

    def _taken(self, accepted: OutputAccepted, now: float) -> list[Command]:
        """The peer hears of it when the model reads it."""
        self._awaited.pop(accepted.call_id, None)
        return []

    def _not_taken(self, refused: OutputRefused, now: float) -> list[Command]:
        if refused.call_id in self._awaited:
            self._awaited[refused.call_id] -= 1
        return [self._not_an_output(_told(refused.error, "the output could not be given to the model"))]

    def _not_an_output(self, message: str) -> Send:
        return self._error("invalid_request", f"conversation.item.create: {message}")

    def _failed(self, failure: Failed, now: float) -> list[Command]:
        if failure.ended:
            answer = self._error("inference_error", "the model failed; the session is over")
            return [answer, *self._unsaid_lag(now), *self._end(1011, "model failure")]
        if self.state is State.READY:
            self.state = State.FULL
        return [self._error("inference_error", _told(failure.error, "a frame failed; the session can be committed"))]

    # ---- lag

    def _lagging(self, lag: Lagging, now: float) -> list[Command]:
        self._lag = lag
        skipped = lag.frames_skipped > self._skips_told
        behind = lag.waiting_seconds >= self._limits.lag_seconds
        if not (skipped or behind) or now < self._lag_told_at + self._limits.lag_every_seconds:
            return []
        return self._tell_lag(now)

    def _unsaid_lag(self, now: float) -> list[Command]:
        """At the end: frames that were skipped after the last time, so that none is dropped silently."""
        return self._tell_lag(now) if self._lag.frames_skipped > self._skips_told else []

    def _tell_lag(self, now: float) -> list[Command]:
        self._lag_told_at = now
        self._skips_told = self._lag.frames_skipped
        lag = wire.SessionLag(
            event_id=self._event_id(),
            behind_ms=round(1000 * self._lag.waiting_seconds),
            frames_waiting=self._lag.frames_waiting,
            frames_skipped=self._lag.frames_skipped,
            policy=self._policy,
        )
        return [Send(lag)]

    # ---- the end

    def _unconfigured(self, tick: Tick, now: float) -> list[Command]:
        if now < self._configure_by:
            return []
        return self._time_out("configure timeout", f"no session within {self._limits.configure_seconds:g} seconds", now)

    def _idle(self, tick: Tick, now: float) -> list[Command]:
        limits = self._limits
        if now >= self._session_until:
            return self._time_out("session limit", f"a session may last {limits.session_seconds:g} seconds", now)
        if now >= self._active_at + limits.idle_seconds:
            return self._time_out("idle timeout", f"nothing was said for {limits.idle_seconds:g} seconds", now)
        return []

    def _unfinished(self, tick: Tick, now: float) -> list[Command]:
        """Somebody who hardly reads would keep the slot for hours."""
        if now < self._session_until:
            return []
        seconds = self._limits.session_seconds
        return self._time_out("session limit", f"an answer may take {seconds:g} seconds after the commit", now)

    def _time_out(self, reason: str, message: str, now: float) -> list[Command]:
        error = self._error("invalid_request", message)
        return [*self._abandoned(), *self._unsaid_lag(now), error, *self._end(1008, reason)]

    def _left(self, left: PeerLeft, now: float) -> list[Command]:
        commands = self._abandoned()
        self.state, self.ended_by = State.ENDED, "the peer left"
        return commands

    def _stop(self, stop: Stop, now: float) -> list[Command]:
        return [*self._abandoned(), *self._unsaid_lag(now), *self._end(stop.code, stop.reason)]

    def _abandoned(self) -> list[Command]:
        return [] if self.state is State.CONFIGURING else [Cancel()]

    def _end(self, code: int, reason: str) -> list[Command]:
        self.state, self.ended_by = State.ENDED, reason
        return [Close(code, reason)]

    # ---- small things

    def _event_id(self) -> str:
        return f"event_{self._token()}"

    def _error(self, code: str, message: str) -> Send:
        body = wire.ErrorBody(code=code, message=message[:LONGEST_MESSAGE])
        return Send(wire.Error(event_id=self._event_id(), error=body))


def _told(error: BaseException, otherwise: str) -> str:
    """What a peer is told of an error: its text where it is about what the peer asked for, else nothing of it."""
    return str(error) if isinstance(error, InputError) else otherwise
