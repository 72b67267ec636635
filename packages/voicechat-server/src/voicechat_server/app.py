"""The server: listeners, one model thread, one slot. Every task is in one nursery, and ends with it.

    async with Worker(load) as worker:
        await App(worker, Settings(model="tiny"), gate).run(listeners)

What a connection does ends that connection. What comes after ``stop`` is refused, sessions end with 1001, and ``run``
returns when they have, or after the deadline.
"""

import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import trio

from voicechat_core import wire
from voicechat_server.admission import Admission
from voicechat_server.auth import Gate
from voicechat_server.connection import Connection
from voicechat_server.exchange import Close
from voicechat_server.http import Answer, Request, Routes, serve
from voicechat_server.metrics import Metrics
from voicechat_server.protocol import Protocol
from voicechat_server.recording import Recordings, recorded
from voicechat_server.settings import Settings
from voicechat_server.transport import Gone, Transport
from voicechat_server.worker import Stage, Worker, WorkerEndedError

__all__ = ["App"]

_log: Final = logging.getLogger(__name__)

PING_SECONDS: Final = 5.0  # a frame lasts 80 ms; a thread that needs longer than this is not well


class App:
    """Belongs to the Trio that runs it."""

    def __init__(
        self,
        worker: Worker,
        settings: Settings,
        gate: Gate,
        metrics: Metrics | None = None,
        recordings: Recordings | None = None,
    ) -> None:
        """``metrics`` is what the worker's frames are told to as well; ``recordings`` None keeps nothing."""
        self.metrics = metrics or Metrics()
        self._recordings = recordings
        self._worker = worker
        self._settings = settings
        self._gate = gate
        self.admission = Admission()
        self._stopping = trio.Event()
        self._open = 0  # connections of any kind
        self._idle: set[trio.CancelScope] = set()  # of those that are no conversation
        self._talking: set[Connection] = set()
        self._routes = Routes(self._health, self._ready, self._metrics, self._home)

    def stop(self) -> None:
        """Accept nothing more, end the sessions, and let ``run`` return."""
        self._stopping.set()

    async def run(self, listeners: Sequence[trio.abc.Listener[trio.abc.Stream]]) -> None:
        """Serve until ``stop``."""
        async with trio.open_nursery() as connections, trio.open_nursery() as accepting:
            for listener in listeners:
                accepting.start_soon(self._accept, listener, connections)
            await self._stopping.wait()
            accepting.cancel_scope.cancel()
            for scope in self._idle:
                scope.cancel()
            connections.cancel_scope.deadline = trio.current_time() + self._settings.shutdown_seconds

    async def _accept(self, listener: trio.abc.Listener[trio.abc.Stream], connections: trio.Nursery) -> None:
        await trio.serve_listeners(self.serve, [listener], handler_nursery=connections)

    async def serve(self, stream: trio.abc.Stream) -> None:
        """One accepted connection, until it ends. Raises nothing but Cancelled."""
        if self._open >= self._settings.connections:
            self.metrics.turned_away.inc()
            await trio.aclose_forcefully(stream)
            return
        self._open += 1
        try:
            await self._serve(stream)
        finally:
            self._open -= 1

    async def _serve(self, stream: trio.abc.Stream) -> None:
        async def talk(transport: Transport, request: Request) -> None:
            self._idle.discard(scope)
            await self._talk(transport, request)

        with trio.CancelScope() as scope:
            self._idle.add(scope)
            try:
                await serve(
                    stream,
                    self._routes,
                    talk,
                    check=self._gate.refusal,
                    limits=self._settings.http_limits,
                    socket_limits=self._settings.socket_limits,
                )
            finally:
                self._idle.discard(scope)

    # ---- a conversation

    async def _talk(self, transport: Transport, request: Request) -> None:
        with self.admission.slot() as admitted:
            close = await (self._converse(transport) if admitted else self._refuse(transport))
        # The slot is free: who sees the close frame can come again.
        await transport.close(close.code, close.reason)

    async def _converse(self, transport: Transport) -> Close:
        self.metrics.sessions.inc()
        # While the model loads it has no fingerprint, and whoever comes is refused.
        recordings = self._recordings if self._worker.stage is Stage.READY else None
        protocol = Protocol(
            model=self._settings.model,
            token=_token,
            now=trio.current_time(),
            limits=self._settings.limits,
            system_prompt=self._settings.system_prompt,
            recording=recordings is not None,
        )
        return await self._record(transport, protocol, recordings)

    async def _record(self, transport: Transport, protocol: Protocol, recordings: Recordings | None) -> Close:
        began, close = trio.current_time(), Close(1011, "internal error")
        try:
            async with recorded(recordings, protocol.session_id) as watcher:
                connection = Connection(
                    transport,
                    self._worker,
                    protocol,
                    stopping=self._stopping,
                    write_seconds=self._settings.write_seconds,
                    tts_context_frames=self._settings.tts_context_frames,
                    tool_wait_frames=self._settings.tool_wait_frames,
                    saw=watcher.saw,
                )
                self._talking.add(connection)
                try:
                    close = await connection.run()
                finally:
                    self._talking.discard(connection)
                    watcher.ended(frames=protocol.frames, ended_by=protocol.ended_by or close.reason, code=close.code)
        finally:
            self.metrics.skipped.inc(protocol.frames_skipped)
            self.metrics.calls.inc(protocol.function_calls)
            self.metrics.calls_failed.inc(protocol.function_calls_failed)
            self._log(transport, protocol, trio.current_time() - began, close)
        return close

    def _log(self, transport: Transport, protocol: Protocol, seconds: float, close: Close) -> None:
        line = {
            "session": protocol.session_id,
            "remote": transport.remote,
            "seconds": round(seconds, 3),
            "frames": protocol.frames,
            "frames_skipped": protocol.frames_skipped,
            "ended_by": protocol.ended_by or close.reason,
            "code": close.code,
        }
        _log.info("%s", json.dumps(line))

    async def _refuse(self, transport: Transport) -> Close:
        self.metrics.busy.inc()
        message = "another session is active; try again when it has ended"
        body = wire.ErrorBody(code="server_busy", message=message)
        busy = wire.Error(event_id=f"event_{_token()}", error=body)
        with trio.move_on_after(self._settings.http_limits.write_seconds), suppress(Gone):
            await transport.send(wire.encode(busy))
        return Close(1013, "busy")

    # ---- plain HTTP

    async def _health(self) -> Answer:
        """Alive, and the model's thread answers, or loads."""
        if self._worker.stage is Stage.LOADING:
            return _json(200, {"status": "loading"})
        with trio.move_on_after(PING_SECONDS):
            try:
                seconds = await self._worker.ping()
            except WorkerEndedError:
                return _json(503, {"status": "the model thread has ended"})
            return _json(200, {"status": "ok", "model_thread_ms": round(1000 * seconds, 1)})
        return _json(503, {"status": "the model thread does not answer"})

    async def _ready(self) -> Answer:
        """Whether a session would be accepted now."""
        if self._stopping.is_set():
            return _json(503, {"ready": False, "why": "shutting down"})
        if self._worker.stage is not Stage.READY:
            return _json(503, {"ready": False, "why": f"the model is {self._worker.stage.value}"})
        if not self.admission.free:
            return _json(503, {"ready": False, "why": "busy"})
        return _json(200, {"ready": True})

    async def _metrics(self) -> Answer:
        self.metrics.slots_taken.set(self.admission.taken)
        self.metrics.model_ready.set(self._worker.stage is Stage.READY)
        self.metrics.model_sessions.set(self._worker.held_sessions)
        self.metrics.lag_seconds.set(max((connection.lag_seconds for connection in self._talking), default=0.0))
        self.metrics.connections.set(self._open)
        return Answer(200, self.metrics.text(), self.metrics.content_type)

    async def _home(self) -> Answer:
        text = (
            f"voicechat-server: {self._settings.model}\n\n"
            "Connect a WebSocket to /v1/realtime (JSON messages, base64 PCM16: 16 kHz in, 22.05 kHz out).\n"
            "/health  /ready  /metrics\n"
        )
        return Answer(200, text.encode())


def _token() -> str:
    return secrets.token_hex(8)


def _json(status: int, value: dict[str, object]) -> Answer:
    return Answer(status, json.dumps(value).encode(), "application/json")
