"""One connection: carries out what the protocol says, between the socket and the model's thread.

Four tasks in one nursery, each waiting for one thing: the reader for the peer, the pump for the session's results, the
writer for the socket to take a message, the ticker for time. The first three meet in the protocol, one at a time, so
that what it says goes out in the order in which it was said.

The reader never waits for the model, but for room: while as much audio is queued as may be, it reads no further, and
TCP holds the peer back.

What passes is shown to ``saw``, once it has: a recorder, or nobody.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from voicechat_core import wire
from voicechat_core.errors import VoiceChatError
from voicechat_core.tools import WAIT_FRAMES
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
from voicechat_server.model_messages import Delivery, Opening, Responded, Result, Skipped
from voicechat_server.model_messages import Failed as SessionFailed
from voicechat_server.model_messages import OutputRefused as SessionRefusedOutput
from voicechat_server.protocol import Protocol as Conversation
from voicechat_server.transport import Gone, Transport
from voicechat_server.worker import Stage, Worker, WorkerSession

__all__ = ["Connection", "Seen"]

# What an observer is shown: a message of the peer, that a session is asked for, samples that it was given, that it was
# flushed, what it gave, and a message that the socket took.
Seen = str | bytes | Opening | Push | Flush | Delivery | wire.ServerEvent

TICK_SECONDS: Final = 1.0  # how late a time limit may be, and how often the peer may be told of lag
FRAME_SAMPLES: Final = 1280
PEER_LEFT: Final = Close(1000, "the peer left")  # to whom nothing can be said


class Connection:
    """One admitted peer, from ``session.created`` to the close that ``run`` returns."""

    def __init__(
        self,
        transport: Transport,
        worker: Worker,
        conversation: Conversation,
        *,
        stopping: trio.Event,
        write_seconds: float = 10.0,
        tts_context_frames: int | None = None,
        tool_wait_frames: int = WAIT_FRAMES,
        saw: Callable[[Seen], None] = lambda what: None,
    ) -> None:
        """A peer that was admitted.

        Args:
            transport: to the peer.
            worker: of the model.
            conversation: that has just begun.
            stopping: is set when the server shuts down.
            write_seconds: see ``Settings``.
            tts_context_frames: see ``Settings``.
            tool_wait_frames: see ``Settings``.
            saw: shown all that passes; must neither raise nor wait.
        """
        self._transport = transport
        self._worker = worker
        self._conversation = conversation
        self._stopping = stopping
        self._write_seconds = write_seconds
        self._tts_context_frames = tts_context_frames
        self._tool_wait_frames = tool_wait_frames
        self._saw = saw
        self._session: WorkerSession | None = None
        self._close = Close(1011, "the connection ended without a word")
        self._turn = trio.Lock()  # in which the protocol is told something and its answer goes out
        # No room: a message is handed over when the writer is free, so nothing old lies before a cancel's answer.
        self._outbox, self._outgoing = trio.open_memory_channel[wire.ServerEvent | None](0)
        self._nursery: trio.Nursery | None = None

    async def run(self) -> Close:
        """Talk until the protocol has said its last word; what the socket is to be closed with.

        When it returns, the session is closed, so that the slot can be given away before the close frame is sent.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._write)
                loading = self._worker.stage is Stage.LOADING
                await self._turn_with(lambda: self._conversation.begin(loading=loading))
                for task in (self._read, self._tick, self._watch_for_stop):
                    nursery.start_soon(task)
        finally:
            if self._session is not None:
                self._session.close()
        # The protocol's last word may have been said, and not been heard: then this is how it ended.
        self._conversation.ended_by = self._close.reason
        return self._close

    @property
    def lag_seconds(self) -> float:
        """Audio that waits for the model."""
        return self._session.lag_seconds if self._session is not None else 0.0

    # ---- the four tasks

    async def _read(self) -> None:
        while True:
            try:
                message = await self._transport.receive()
            except Gone:
                await self._tell(PeerLeft())
                self._end(PEER_LEFT)
                return
            self._saw(message)
            await self._turn_with(partial(self._conversation.received, message, trio.current_time()))

    async def _pump(self, session: WorkerSession) -> None:
        try:
            await session.opened()
        except Exception as error:  # whatever the model raised; the protocol says what of it may be told
            await self._tell(OpenFailed(error))
            return
        await self._tell(Opened())
        async for result in session:
            await self._tell(self._input_of(session, result))

    async def _write(self) -> None:
        async for message in self._outgoing:
            if message is None:
                break
            with trio.move_on_after(self._write_seconds) as scope:
                try:
                    await self._transport.send(wire.encode(message))
                    self._saw(message)
                except Gone:  # the reader may be waiting for room, and would see it minutes later
                    self._end(PEER_LEFT)
                    return
            if scope.cancelled_caught:
                self._end(Close(1008, "slow consumer"))
                return

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_SECONDS)
            if self._session is not None:
                await self._tell(self._lag(self._session))
            await self._turn_with(lambda: self._conversation.tick(trio.current_time()))

    async def _watch_for_stop(self) -> None:
        await self._stopping.wait()
        await self._tell(Stop(1001, "the server is shutting down"))

    # ---- the protocol's turn

    async def _tell(self, news: Input) -> None:
        await self._turn_with(lambda: self._conversation.happened(news, trio.current_time()))

    async def _turn_with(self, turn: Callable[[], list[Command]]) -> None:
        pushes: list[Push] = []
        async with self._turn:
            for command in turn():
                if isinstance(command, Push):
                    pushes.append(command)
                else:
                    await self._carry_out(command)
        # Outside of the turn: a push may wait for room, and there is room only while results are taken.
        for push in pushes:
            if self._session is not None:
                await self._session.push(push.samples)
                self._saw(push)

    async def _carry_out(self, command: Command) -> None:
        if isinstance(command, Send):
            await self._outbox.send(command.message)
        elif isinstance(command, Open):
            self._open(command)
        elif isinstance(command, Flush):
            if self._session is not None:
                self._session.flush(pad_partial=command.pad_partial)
                self._saw(command)
        elif isinstance(command, Respond):
            if self._session is not None:
                self._session.respond(command.call_id, command.output)
        elif isinstance(command, Cancel):
            if self._session is not None:
                self._session.cancel()
        elif isinstance(command, Close):
            await self._outbox.send(None)  # taken when everything before it is written
            self._end(command)

    def _open(self, command: Open) -> None:
        assert self._nursery is not None
        if self._session is not None:  # of an update that failed
            self._session.close()
        skip = command.lag.max_seconds if command.lag.policy == "skip" else None
        opening = Opening(
            command.system_prompt,
            command.seed,
            command.max_frames,
            self._tts_context_frames,
            skip_beyond_seconds=skip,
            tools=command.function_calls,
            tool_wait_frames=self._tool_wait_frames,
        )
        self._saw(opening)
        try:
            self._session = self._worker.open(opening, watch=self._saw)
        except VoiceChatError as error:
            self._session = None
            self._nursery.start_soon(self._tell, OpenFailed(error))
        else:
            self._nursery.start_soon(self._pump, self._session)

    def _end(self, close: Close) -> None:
        assert self._nursery is not None
        self._close = close
        self._nursery.cancel_scope.cancel()

    # ---- what the worker says, in the protocol's words

    def _input_of(self, session: WorkerSession, result: Result) -> Input:
        if isinstance(result, Skipped):
            return self._lag(session)
        if isinstance(result, SessionFailed):
            return Failed(result.error, result.ended)
        if isinstance(result, SessionRefusedOutput):
            return OutputRefused(result.call_id, result.error)
        if isinstance(result, Responded):
            return OutputAccepted(result.call_id)
        return Said(result)

    def _lag(self, session: WorkerSession) -> Lagging:
        return Lagging(session.lag_seconds, math.ceil(session.queued_samples / FRAME_SAMPLES), session.skipped_frames)
