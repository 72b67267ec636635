"""A conversation that has begun: what is sent, what is heard, and how it ends. Made by ``client.connect``.

Knows no socket: the link sends and receives texts.
"""

import copy
import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import trio

from voicechat_client.errors import ClientError, EndedError, LostError, ServerFaultError, SessionRefusedError
from voicechat_client.ledger import Ledger
from voicechat_client.link import Gone, Link
from voicechat_client.reaching import LinkLimits
from voicechat_core import wire
from voicechat_core.errors import InputError, WireError
from voicechat_core.terminal import printable

__all__ = ["ClientLimits", "Conversation", "shown"]

MOST_SAMPLES: Final = wire.INPUT_RATE  # in one message: a second
MESSAGE_BYTES: Final = 1000  # of a message that waits, beside its text: the objects that it is
SHOWN: Final = 300  # characters of a server's message in an error
LOOKS: Final = 20  # at a server that may be silent, in the time that it may
PONG_SECONDS: Final = 5.0  # at most, for one whose other words are overdue


@dataclass(frozen=True)
class ClientLimits(LinkLimits):
    """Of one conversation.

    Attributes:
        created_seconds: from the open WebSocket to ``session.created``, which a server sends at once.
        unread_bytes: of messages that wait for the iteration: a quarter of an hour of answer, beyond a server's usual
            session of ten minutes.
        silent_seconds: that a server may say nothing while it owes something: an answer to what it was sent, or the
            end. A frame of speech is 80 ms, so one that needs this long for it is of no use to anybody. A session
            that is being opened may take longer, as long as the server answers pings. ``math.inf`` for ever.
    """

    created_seconds: float = 10.0
    unread_bytes: int = 64 * 2**20
    silent_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.silent_seconds > 0:
            raise InputError(f"silent_seconds is {self.silent_seconds}; more than 0 is needed")


def shown(text: str) -> str:
    """What a server wrote, as it can be shown: one line, not too long."""
    return printable(text, " ")[:SHOWN]


class _Answer:
    """What a call waits for."""

    def __init__(self) -> None:
        self.event: wire.SessionUpdated | wire.SessionPong | wire.Error | None = None  # none: the conversation is over
        self.came = trio.Event()

    def give(self, event: wire.SessionUpdated | wire.SessionPong | wire.Error | None) -> None:
        """It has come, or will not come any more; the first counts."""
        if not self.came.is_set():
            self.event = event
            self.came.set()


class Conversation:
    """With a server. Made by ``connect``.

    Several tasks may send at once, and one iterate.

    Attributes:
        created: the server's first message; ``created.session.recording`` is true where it keeps what it hears.
        session: the server's answer to ``update``; None before.
        sent_samples: that were handed to the connection so far.
    """

    def __init__(self, link: Link, created: wire.SessionCreated, limits: ClientLimits) -> None:
        self.created = created
        self.session: wire.SessionUpdated | None = None
        self.sent_samples = 0
        self._link = link
        self._limits = limits
        # Its length is bounded by bytes, see listen.
        self._heard, self._events = trio.open_memory_channel[tuple[int, wire.ServerEvent]](math.inf)
        self._unread = 0
        self._room = trio.Event()
        self._updating: _Answer | None = None
        self._pings: deque[_Answer] = deque()
        self._ledger = Ledger()
        self._began = trio.current_time()
        self._committed = False
        self._said = ""  # by an error that was the last message
        self._end: ClientError | None = None  # why nothing more can be sent or will be heard
        self._done = False

    # ---- what is sent

    async def update(self, options: wire.SessionOptions | None = None) -> wire.SessionUpdated:
        """Open the session, and wait until it is open. A long system prompt can take a server minutes.

        Audio may be appended meanwhile, by another task.

        Raises:
            SessionRefusedError: with the server's words. Another update may be tried.
            InputError: if it is open already, or being opened.
            ClientError: LostError or ServerFaultError.
        """
        if self.session is not None or self._updating is not None:
            raise InputError("the session is open already, or being opened: update is for once")
        answer = self._updating = _Answer()
        try:
            await self._send(wire.SessionUpdate(session=options or wire.SessionOptions()))
            await answer.came.wait()
        finally:
            self._updating = None
        if isinstance(answer.event, wire.SessionUpdated):
            return answer.event
        if isinstance(answer.event, wire.Error):
            raise SessionRefusedError(f"the server does not open the session: {shown(answer.event.error.message)}")
        raise self._ended()

    async def append(self, samples: npt.NDArray[np.int16]) -> None:
        """Let the server hear more; waits while it does not read.

        Many samples go out as messages of a second each. If the call is cancelled between two of them, the rest is not
        sent: ``sent_samples`` says how many were.

        Args:
            samples: int16 ``[S]`` at 16 kHz, mono; none are fine.

        Raises:
            InputError: for another type or number of axes.
            ClientError: EndedError after ``commit`` or the end; LostError or ServerFaultError.
        """
        if samples.dtype != np.int16 or samples.ndim != 1:
            raise InputError(f"samples are {samples.dtype} of shape {samples.shape}; int16 [S] is needed")
        self._require_input_open()
        await trio.lowlevel.checkpoint()
        for start in range(0, len(samples), MOST_SAMPLES):
            self._require_input_open()  # another task may have committed meanwhile
            part = samples[start : start + MOST_SAMPLES]
            await self._send(wire.InputAudioBufferAppend(audio=wire.bytes_of(part)))
            self.sent_samples += len(part)

    def _require_input_open(self) -> None:
        if self._committed:
            raise EndedError("the input was committed; no more of it is taken")

    async def commit(self, *, pad_partial: bool = True) -> None:
        """The input is complete: the last events come, and ``response.done``.

        Args:
            pad_partial: whether a frame that has begun is filled with zeros instead of dropped.

        Raises:
            ClientError: EndedError if it was committed before, also by a task that still waits for it, or the
                conversation is over; LostError or ServerFaultError.
        """
        if self._committed:
            raise EndedError("the input was committed before")
        self._committed = True
        try:
            await self._send(wire.InputAudioBufferCommit(pad_partial=pad_partial))
        except BaseException:
            self._committed = False  # it was not sent
            raise

    async def respond(self, call_id: str, output: object) -> None:
        """Answer a ``ResponseFunctionCallArgumentsDone``, where the session was opened with ``function_calls``.

        A call that waits no more, and an output that is too long, are an ``error`` of the server's; the conversation
        goes on.

        Args:
            call_id: the call's.
            output: anything that is JSON: text, a number, a dictionary.

        Raises:
            InputError: for an output that is no JSON.
            ClientError: EndedError after the end; LostError or ServerFaultError.
        """
        item = wire.FunctionCallOutput(call_id=call_id, output=output)
        await self._send(wire.ConversationItemCreate(item=item))

    async def cancel(self) -> None:
        """End the session at once: ``response.cancelled`` comes, behind what the server has said already.

        Raises:
            ClientError: EndedError if the conversation is over; LostError or ServerFaultError.
        """
        await self._send(wire.SessionCancel())

    async def ping(self) -> float:
        """Seconds until the server answers, by way of everything that waits to be sent or heard.

        Raises:
            ClientError: EndedError if the conversation is over before it does; LostError, also when no answer comes in
                ``silent_seconds`` and nothing else either; ServerFaultError.
        """
        began, answer = trio.current_time(), _Answer()
        self._pings.append(answer)
        try:
            await self._send(wire.SessionPing())
        except BaseException:
            with suppress(ValueError):
                self._pings.remove(answer)  # it was not sent
            raise
        await answer.came.wait()
        if answer.event is None:
            raise self._ended()
        return trio.current_time() - began

    async def aclose(self) -> None:
        """Hang up, in ``close_seconds``. Never raises, cannot be cancelled; leaving the block does it, too."""
        self._end = self._end or EndedError("the conversation was closed")
        if isinstance(self._end, ServerFaultError):
            await self._link.cut()  # who breaks the protocol may go on for ever, and never say goodbye
        else:
            await self._link.close()

    async def _send(self, event: wire.ClientEvent) -> None:
        if self._end is not None:
            raise self._ended()
        try:
            with self._ledger.sending(event):
                await self._link.send(wire.encode(event))
        except Gone as gone:
            raise self._ended(gone) from None

    # ---- what is heard

    def __aiter__(self) -> "Conversation":
        return self

    async def __anext__(self) -> wire.ServerEvent:
        """The next message. A cancelled call loses none.

        Raises:
            ClientError: LostError or ServerFaultError, when all that had arrived was given.
        """
        try:
            size, event = await self._events.receive()
        except trio.EndOfChannel:
            if self._done:
                raise StopAsyncIteration from None
            raise self._ended() from None
        self._unread -= size
        self._room.set()
        return event

    async def listen(self) -> None:
        """Take what the server says, until its end. ``connect`` runs it; raises nothing but Cancelled."""
        with self._heard:
            try:
                while not self._done:
                    await self._take(await self._link.receive())
                self._end = EndedError("the conversation has ended")
            except Gone as gone:
                self._end = self._end or self._lost(gone)
            except ServerFaultError as error:
                self._end = self._end or error
            finally:
                for answer in (self._updating, *self._pings):
                    if answer is not None:
                        answer.give(None)

    async def _take(self, message: str | bytes) -> None:
        event = _read(message)
        if event is None:
            return
        self._ledger.heard(event, characters=len(message), seconds=trio.current_time() - self._began)
        size = len(message) + MESSAGE_BYTES
        self._unread += size
        self._heard.send_nowait((size, event))
        self._notice(event)
        while self._unread > self._limits.unread_bytes:
            self._room = trio.Event()
            await self._room.wait()

    def _notice(self, event: wire.ServerEvent) -> None:
        """What a message means for those who wait for one, and for the end."""
        self._said = ""
        if isinstance(event, wire.SessionPong) and self._pings:
            self._pings.popleft().give(event)
        elif isinstance(event, wire.SessionUpdated):
            self.session = event
            if self._updating is not None:
                self._updating.give(event)
        elif isinstance(event, wire.Error):
            self._said = shown(event.error.message)
            if self._updating is not None and event.error.code == "session_initialization_failed":
                self._updating.give(event)
        elif isinstance(event, wire.ResponseDone | wire.ResponseCancelled):
            self._done = True

    # ---- what is not heard

    async def watch(self) -> None:
        """End the conversation when the server owes something and says nothing. ``connect`` runs it.

        Looks are counted, not seconds: a machine that slept, or a caller that held everything up, has missed nothing.
        """
        words, silent = 0, 0
        while self._end is None:
            await trio.sleep(self._limits.silent_seconds / LOOKS)
            silent = silent + 1 if words == self._ledger.words and self._is_owed() else 0
            words = self._ledger.words
            if silent >= LOOKS:
                silent = 0
                await self._judge(words)

    def _is_owed(self) -> bool:
        reading = self._unread <= self._limits.unread_bytes  # else the silence is ours
        return reading and (self._ledger.owed or self._ledger.owes_a_pong or self._updating is not None)

    async def _judge(self, words: int) -> None:
        alive = await self._answers_a_ping()
        # A prompt that is read takes its time; and pings are all that is owed to one who only pings.
        may_be_silent = alive and (self._updating is not None or not self._ledger.owed)
        if words != self._ledger.words or self._end is not None or may_be_silent:
            return
        pings = "though it answers pings" if alive else "nor does it answer a ping"
        self._end = LostError(
            f"the server owes an answer and has said nothing for {self._limits.silent_seconds:g} s (silent_seconds), "
            f"{pings}: its model hangs, or the network is gone"
        )
        await self._link.cut()

    async def _answers_a_ping(self) -> bool:
        with suppress(ClientError), trio.move_on_after(min(PONG_SECONDS, self._limits.silent_seconds)):
            await self.ping()
            return True
        return False

    # ---- the end

    def _ended(self, gone: Gone | None = None) -> ClientError:
        """A new error of why the conversation is over: each who is told gets one of its own."""
        if self._end is not None:
            return copy.copy(self._end)
        # The connection is, and what arrived is still being read.
        if gone is not None and gone.code != 1000:
            return self._lost(gone)
        return EndedError("the conversation has ended")

    def _lost(self, gone: Gone) -> ClientError:
        if gone.fault:
            return ServerFaultError(gone.fault)
        reason = shown(gone.reason)
        words = _what_happened(gone.code, reason)
        said = f'; it said: "{self._said}"' if self._said else ""
        return LostError(f"{words}{said}", gone.code, reason)


def _read(message: str | bytes) -> wire.ServerEvent | None:
    """A message; None for one of a later version."""
    if isinstance(message, bytes):
        raise ServerFaultError("the server sent a binary message; the protocol has none")
    try:
        return wire.decode_server(message)
    except WireError as error:
        if error.event_type is not None and error.event_type not in wire.SERVER_EVENTS:
            return None
        raise ServerFaultError(f"a message of the server cannot be read: {printable(str(error))}") from None


def _what_happened(code: int, reason: str) -> str:
    """In words, for the codes that a server has a use for."""
    why = f" ({code} {reason})" if reason else f" ({code})"
    if code == 1006:
        return "the connection broke in the middle (1006): the server or the network is gone"
    if code == 1001:
        return f"the server is going away{why}: try again when it is back"
    if code == 1008:
        return f"the server ended the session by its rules{why}"
    if code == 1009:
        return f"the server found a message of ours too big{why}"
    if code == 1011:
        return f"the server failed{why}: its log says more"
    if code in (1012, 1013):
        return f"the server ended the session{why}: try again later"
    return f"the server closed the connection before the end{why}"
