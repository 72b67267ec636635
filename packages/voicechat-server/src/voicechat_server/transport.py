"""One WebSocket connection as the rest of the server knows it: receive, send, close, remote.

    async def talk(socket: Transport) -> None:
        await socket.send(await socket.receive())

    await upgrade(stream, Handshake("/v1/realtime", key), talk)

``upgrade`` puts it on trio-websocket, ``memory_transport`` on two channels, for tests. This file alone knows the
library, and nothing that a peer does leaves it as another exception than ``Gone``:

- The library's reader runs in a nursery of its own. What it raises (a ping while we close, a second oversize message)
  ends the connection, not the server.
- It is given the few lines of the request that we have checked, never the peer's own. So it has nothing to refuse, and
  no key in any header reaches it.
- It leaves peers without a close frame after bad UTF-8 or a reserved close code, and its own after an oversize message
  is lost in a reset. We send what it owes, and hear the peer out before the socket is closed.
- It waits for a peer's close frame, or for one that does not read, without limit. We wait ``close_seconds``.
- A send that is cancelled may have written half a frame. After it the connection is dead.
- It keeps every fragment of a message, empty ones too. We end a connection that brings many bytes and no message.
- It reads nothing, not even a ping, while ``waiting_messages`` are not received. Whoever uses it must keep receiving.

Knows no message of the protocol, no HTTP but those lines, and no model.
"""

import contextlib
import logging
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_server_stream
from wsproto.utilities import LocalProtocolError

__all__ = [
    "Gone",
    "Handshake",
    "MemoryPeer",
    "MemoryTransport",
    "SocketLimits",
    "Talk",
    "Transport",
    "hang_up",
    "memory_transport",
    "remote_address",
    "upgrade",
]

_log: Final = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 2.0  # a round trip to anywhere; who does not answer within it loses nothing by being cut off
BYTES_A_READ: Final = 65536  # some ten appends of a second; the library's own 4 KiB are six reads for one of them
CLOSE_FRAME: Final = 0x88  # the first byte of a close frame that is whole
BROKEN: Final = (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError)
TOO_BIG: Final = 1009
OUR_VERDICTS: Final = (1002, 1007, TOO_BIG)  # codes with which a peer is judged, and not told by the library


class Gone(Exception):  # noqa: N818 (to leave is no error)
    """The connection is over: the peer left, or broke it, or it was closed on this side.

    Attributes:
        code: the close code of the peer, or with which it was judged; 1006 where there was none; None if unknown.
    """

    def __init__(self, code: int | None = None) -> None:
        super().__init__(f"the connection is over, code {code}")
        self.code = code


class Transport(Protocol):
    """A connection that is open. One task may receive while another sends."""

    @property
    def remote(self) -> str:
        """The peer's address, for the log."""

    async def receive(self) -> str | bytes:
        """The next message: text, or the bytes of a binary one. A cancelled call loses nothing.

        Raises:
            Gone: when no more will come.
        """

    async def send(self, text: str) -> None:
        """Write a text message; waits while the peer does not read. To cancel it ends the connection.

        Raises:
            Gone: when it cannot be written.
        """

    async def close(self, code: int, reason: str) -> None:
        """End the connection. Never raises, cannot be cancelled, and is over in a bounded time; again does nothing."""


Talk = Callable[[Transport], Awaitable[None]]


@dataclass(frozen=True)
class Handshake:
    """What the library is told of a request that was checked: a path, ``Sec-WebSocket-Key``, the subprotocol to answer.

    Attributes:
        target: ASCII, without spaces.
        key: 24 characters of base64.
        subprotocol: one that the peer offered, or None.
        early: bytes that came behind the request; frames of a peer that did not wait for the answer.
    """

    target: str
    key: str
    subprotocol: str | None = None
    early: bytes = b""

    def request(self) -> bytes:
        """The request, reduced to the lines that a WebSocket needs."""
        lines = [
            f"GET {self.target} HTTP/1.1",
            "Host: here",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {self.key}",
        ]
        if self.subprotocol is not None:
            lines.append(f"Sec-WebSocket-Protocol: {self.subprotocol}")
        return "\r\n".join([*lines, "", ""]).encode("ascii")


@dataclass(frozen=True)
class SocketLimits:
    """Of one connection.

    Attributes:
        message_chars: of one message; past it the peer gets 1009. 6 Mi hold 120 s of audio as base64, and more
            than that would not be queued anyway. Bytes, for a binary message.
        waiting_messages: that were read and not received. Enough that a burst of small ones is no stop and go.
        accept_seconds: in which the answer to the handshake, a hundred bytes, must be written.
        close_seconds: for the peer to answer a close and hang up.
    """

    message_chars: int = 6 * 2**20
    waiting_messages: int = 8
    accept_seconds: float = 10.0
    close_seconds: float = CLOSE_SECONDS

    @property
    def unheard_bytes(self) -> int:
        """That may come until a message is received: those that wait, one that is begun, one for frames; and a read.

        The library bounds a message's characters, not its fragments, which may be empty; it keeps each.
        """
        return (self.waiting_messages + 2) * self.message_chars + BYTES_A_READ


# ---- streams


def remote_address(stream: trio.abc.Stream) -> str:
    """``address:port`` of the peer, "unknown" where there is none, or none any more."""
    inner = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    if not isinstance(inner, trio.SocketStream):
        return "unknown"
    try:
        host, port, *_ = inner.socket.getpeername()
    except (OSError, ValueError):  # it has left already; or a Unix socket, which has no port
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def hang_up(stream: trio.abc.Stream, seconds: float = CLOSE_SECONDS) -> None:
    """Close a stream so that the peer gets what was written last. Never raises, in at most ``seconds``.

    To close a socket that holds unread bytes resets it, and a reset takes back what the peer has not read yet. So we
    say that we are done, and throw away what still comes until the peer is done too.
    """
    with trio.move_on_after(seconds, shield=True), contextlib.suppress(*BROKEN):
        if isinstance(stream, trio.abc.HalfCloseableStream):
            await stream.send_eof()
        while await stream.receive_some(BYTES_A_READ):
            pass
        await stream.aclose()
    await _cut(stream)


async def _cut(stream: trio.abc.Stream) -> None:
    with trio.CancelScope(shield=True), contextlib.suppress(*BROKEN):
        await trio.aclose_forcefully(stream)


class _Line(trio.abc.Stream):
    """A stream as the library sees it: first the request as we put it, then, once accepted, what the peer sends.

    When the library closes it, it is closed to the library only. The real stream is ``upgrade``'s to close.
    """

    def __init__(self, stream: trio.abc.Stream, handshake: Handshake, limits: SocketLimits) -> None:
        self.stream = stream
        self.unheard = 0  # bytes since the last message was received
        self._most_unheard = limits.unheard_bytes
        self._close_seconds = limits.close_seconds
        self.accepted = trio.Event()
        self.torn = False  # half a frame may have been written: nothing that follows could be understood
        self.close_sent = False
        self._request = handshake.request()
        self._early = handshake.early
        self._reading = trio.CancelScope()
        self._closed = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """The next bytes. What comes before the handshake is answered would be lost in the library, so it waits."""
        if self._request:
            await trio.lowlevel.checkpoint()
            request, self._request = self._request, b""
            return request
        with trio.CancelScope() as self._reading:
            if self._closed:
                raise trio.ClosedResourceError
            await self.accepted.wait()
            if self._early:
                early, self._early = self._early, b""
                return early
            data = bytes(await self.stream.receive_some(max_bytes))
            self.unheard += len(data)
            if self.babbles:
                raise trio.BrokenResourceError("no message in all these bytes")
            return data
        raise trio.ClosedResourceError

    @property
    def babbles(self) -> bool:
        """Whether the peer has sent too much that is no message."""
        return self.unheard > self._most_unheard

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write; the library writes one whole frame at a time. A close frame that was begun is not cancelled."""
        if self._closed or self.torn:
            raise trio.ClosedResourceError
        if not data or data[0] != CLOSE_FRAME:
            return await self._write(data)
        self.close_sent = True
        data = _without_words(bytes(data))
        with trio.move_on_after(self._close_seconds, shield=True):
            return await self._write(data)
        raise trio.BrokenResourceError("the peer does not read")

    async def _write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await self.stream.send_all(data)
        except BaseException:
            self.torn = True
            raise

    async def wait_send_all_might_not_block(self) -> None:
        """As the stream itself."""
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """The library is done with it."""
        self.shut()

    def shut(self) -> None:
        """The library is to be done with it: its reader ends."""
        self._closed = True
        self._reading.cancel()


def _without_words(frame: bytes) -> bytes:
    """A close frame, its reason left out where it is a verdict: then the words are the library's."""
    code = struct.unpack("!H", frame[2:4])[0] if len(frame) >= 4 else None
    return frame if code not in OUR_VERDICTS else bytes([CLOSE_FRAME, 2]) + frame[2:4]


# ---- the library


class WebSocket:
    """A ``Transport`` on trio-websocket. Made by ``upgrade``."""

    def __init__(self, library: WebSocketConnection, line: _Line, close_seconds: float) -> None:
        self._library = library
        self._line = line
        self._remote = remote_address(line.stream)
        self._close_seconds = close_seconds
        self._closing = trio.CancelScope()  # around the library's own close
        self._reader_over = trio.Event()
        self._dead = False  # by a cancelled send
        self._closed = False

    @property
    def remote(self) -> str:
        """The peer's address."""
        return self._remote

    async def receive(self) -> str | bytes:
        """The next message."""
        if self._dead:
            raise Gone(self._code())
        try:
            message = await self._library.get_message()
        except ConnectionClosed:
            raise Gone(self._code()) from None
        if not self._line.babbles:
            self._line.unheard = 0
        return message

    async def send(self, text: str) -> None:
        """Write a text message."""
        if self._dead:
            raise Gone(self._code())
        try:
            await self._library.send_message(text)
        except (ConnectionClosed, LocalProtocolError):  # the second is known to leak (trio-websocket #175)
            raise Gone(self._code()) from None
        except trio.Cancelled:
            self._dead = self._line.torn = True
            self._line.shut()
            raise

    async def close(self, code: int, reason: str) -> None:
        """Send a close frame, wait for the peer's, hang up."""
        if self._closed:
            return
        self._closed = True
        with trio.move_on_after(self._close_seconds, shield=True):
            if not self._line.torn:
                await self._close_by_library(code, reason)
            self._line.shut()
            await self._reader_over.wait()
            if not self._line.torn:
                await self._pay_close_frame(code)
                await hang_up(self._line.stream, self._close_seconds)
        await _cut(self._line.stream)

    def reader_ended(self) -> None:
        """Nobody will hear the peer's close frame: do not wait for it."""
        self._reader_over.set()
        self._closing.cancel()

    def _code(self) -> int | None:
        if self._line.babbles:
            return TOO_BIG
        closed = self._library.closed
        return int(closed.code) if closed else None

    async def _close_by_library(self, code: int, reason: str) -> None:
        try:
            with self._closing:
                await self._library.aclose(code, reason)
        except Exception as error:  # whatever it is, the connection ends here
            _log.debug("%s: closing: %s", self._remote, type(error).__name__)

    async def _pay_close_frame(self, code: int) -> None:
        """Send the close frame that the library did not."""
        if self._line.close_sent:
            return
        judged = self._code()
        payload = struct.pack("!H", judged if judged in OUR_VERDICTS else code)
        with contextlib.suppress(*BROKEN):
            await self._line.stream.send_all(bytes([CLOSE_FRAME, len(payload)]) + payload)


async def upgrade(
    stream: trio.abc.Stream, handshake: Handshake, talk: Talk, *, limits: SocketLimits | None = None
) -> None:
    """Answer a handshake, let ``talk`` have the connection, close it. Raises nothing but Cancelled.

    If ``talk`` has not closed it: 1000 after it returns or is ``Gone``, 1011 after any other exception, which is
    logged, and 1001 when it is cancelled.
    """
    limits = limits or SocketLimits()
    line = _Line(stream, handshake, limits)
    try:
        async with trio.open_nursery() as nursery:
            socket = await nursery.start(_read, line, handshake.subprotocol, limits)
            await _converse(socket, talk)
            nursery.cancel_scope.cancel()
    except* Gone:
        _log.debug("%s: left during the handshake", remote_address(stream))
    finally:
        await _cut(stream)


async def _read(
    line: _Line, subprotocol: str | None, limits: SocketLimits, task_status: trio.TaskStatus[WebSocket]
) -> None:
    """The library's reader, in a nursery of its own: what it raises ends here."""
    socket: WebSocket | None = None
    try:
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(limits.accept_seconds):
                library = await _accept(nursery, line, subprotocol, limits)
                socket = WebSocket(library, line, limits.close_seconds)
            if socket is None:
                nursery.cancel_scope.cancel()
            else:
                task_status.started(socket)
    except* Exception as group:
        names = [type(error).__name__ for error in group.exceptions]
        _log.debug("%s: the reader was ended by %s", remote_address(line.stream), names)
    finally:
        if socket is not None:
            socket.reader_ended()
    if socket is None:
        raise Gone


async def _accept(
    nursery: trio.Nursery, line: _Line, subprotocol: str | None, limits: SocketLimits
) -> WebSocketConnection:
    request = await wrap_server_stream(
        nursery,
        line,
        message_queue_size=limits.waiting_messages,
        max_message_size=limits.message_chars,
        receive_buffer_size=BYTES_A_READ,
    )
    library = await request.accept(subprotocol=subprotocol)
    line.accepted.set()
    return library


async def _converse(socket: WebSocket, talk: Talk) -> None:
    code, reason = 1001, "going away"  # if it is cancelled
    try:
        await talk(socket)
        code, reason = 1000, ""
    except* Gone:
        code, reason = 1000, ""
    except* Exception:
        code, reason = 1011, "internal error"
        _log.exception("%s: the conversation failed", socket.remote)
    finally:
        await socket.close(code, reason)


# ---- in memory, for tests


class MemoryTransport:
    """A ``Transport`` without a network. Made by ``memory_transport``."""

    def __init__(
        self, inbox: trio.MemoryReceiveChannel[str | bytes], outbox: trio.MemorySendChannel[str], remote: str
    ) -> None:
        self.closed: tuple[int, str] | None = None  # how this side closed it
        self.left_code: int | None = None  # how the peer did
        self._inbox = inbox
        self._outbox = outbox
        self._remote = remote
        self._dead = False

    @property
    def remote(self) -> str:
        """The name that it was given."""
        return self._remote

    async def receive(self) -> str | bytes:
        """The next message."""
        try:
            return await self._inbox.receive()
        except (trio.ClosedResourceError, trio.EndOfChannel):
            raise Gone(self.left_code) from None

    async def send(self, text: str) -> None:
        """Write a text message."""
        try:
            await self._outbox.send(text)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise Gone(self.left_code) from None
        except trio.Cancelled:
            self._shut()
            raise

    async def close(self, code: int, reason: str) -> None:
        """End the connection; at once, as the peer always answers."""
        if self.closed is None:
            self.closed = (code, reason)
            self._shut()
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()

    def _shut(self) -> None:
        self._inbox.close()
        self._outbox.close()


class MemoryPeer:
    """The other end of a ``MemoryTransport``."""

    def __init__(
        self,
        transport: MemoryTransport,
        outbox: trio.MemorySendChannel[str | bytes],
        inbox: trio.MemoryReceiveChannel[str],
    ) -> None:
        self._transport = transport
        self._outbox = outbox
        self._inbox = inbox

    @property
    def closed(self) -> tuple[int, str] | None:
        """The code and the reason with which the other side closed the connection, None while it has not."""
        return self._transport.closed

    async def say(self, message: str | bytes) -> None:
        """Send text or, as bytes, a binary message.

        Raises:
            Gone: when the other side has closed.
        """
        try:
            await self._outbox.send(message)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise Gone from None

    async def hear(self) -> str:
        """The next text.

        Raises:
            Gone: when the other side has closed, and all that it sent was heard.
        """
        try:
            return await self._inbox.receive()
        except (trio.ClosedResourceError, trio.EndOfChannel):
            raise Gone from None

    def leave(self, code: int = 1006) -> None:
        """Close or, with 1006, just vanish: what was said is still received, what was not heard is lost."""
        self._transport.left_code = code
        self._outbox.close()
        self._inbox.close()


def memory_transport(
    *, waiting: int = 8, unheard: int = 0, remote: str = "memory"
) -> tuple[MemoryTransport, MemoryPeer]:
    """Two ends. ``waiting`` messages may wait to be received, ``unheard`` texts to be heard, before a sender waits."""
    to_server, server_inbox = trio.open_memory_channel[str | bytes](waiting)
    to_peer, peer_inbox = trio.open_memory_channel[str](unheard)
    transport = MemoryTransport(server_inbox, to_peer, remote)
    return transport, MemoryPeer(transport, to_server, peer_inbox)
