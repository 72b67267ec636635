"""One WebSocket to a server, as the rest of the client knows it: send, receive, close.

    async with trio.open_nursery() as nursery:
        link = await open_link(nursery, parse(url), key=key, tls=context)
        await link.send(text)
        text = await link.receive()
        await link.close()

wsproto says what bytes mean; this file alone knows it, and owns the stream. Three tasks, until the connection is over:

- One reads. It never waits to write while it can hear more, so that a server that reads nothing can still be heard,
  and be told what is wrong with it. The connection is over when it has ended, and then the others are cancelled.
- One writes messages. A send that is cancelled would leave half a frame, and everything that follows would be
  unreadable: so a call that is cancelled does not cancel it, its message was not begun, or goes out whole.
- One answers pings; of a server that does not read, only the latest, so that there is no queue of pongs.

They are shielded: a block that is cancelled would take them with it, and nobody would say goodbye. So whoever has a
link must close or cut it, and whatever happens while it is closed, it is cut. Nothing that a server does leaves this
file as another exception than ``Gone`` or one of ours, and nothing is raised into the nursery.

Knows no message of the protocol.
"""

import contextlib
import copy
import math
import ssl
from typing import Any, Final

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import LocalProtocolError

from voicechat_client.address import Address
from voicechat_client.reaching import BROKEN, BYTES_A_READ, LinkLimits, cut, dial, not_upgraded
from voicechat_core.keys import Key
from voicechat_core.terminal import printable

__all__ = ["Gone", "Link", "open_link"]

ABNORMAL: Final = 1006  # there was no close frame
TOO_BIG: Final = 1009
CLOSED_BY_PEER: Final = (ConnectionState.REMOTE_CLOSING, ConnectionState.CLOSED)


class Gone(Exception):  # noqa: N818 (to leave is no error)
    """The connection is over.

    Attributes:
        code: of the server's close frame; 1006 where there was none.
        reason: the server's.
        fault: what the server did that made us end it, in words; empty where we did not.
    """

    def __init__(self, code: int = ABNORMAL, reason: str = "", fault: str = "") -> None:
        super().__init__(code, reason, fault)
        self.code = code
        self.reason = reason
        self.fault = fault


class Link:
    """A connection that is open. Made by ``open_link``. One task may receive while others send."""

    def __init__(self, stream: trio.abc.Stream, limits: LinkLimits) -> None:
        self.opened = False
        self.answer = b""  # what came until it was
        self.settled = trio.Event()  # it is open, or will not be
        self._stream = stream
        self._limits = limits
        self._protocol = WSConnection(ConnectionType.CLIENT)
        # No room: a message is handed over when the one before it is written.
        self._outbox, self._outgoing = trio.open_memory_channel[str](0)
        self._inbox, self._incoming = trio.open_memory_channel[str | bytes](limits.waiting_messages)
        self._pongs, self._due_pongs = trio.open_memory_channel[Event](1)
        self._parts: list[Any] = []  # of a message that has begun: all text, or all bytes
        self._size = 0  # of all these
        self._pen = trio.Lock()  # one frame after the other
        self._deaf = False  # the server takes nothing any more; it may still have said something
        self._reading = trio.CancelScope()
        self._written = trio.Event()  # all that was handed over, or all that can be
        self._ended = trio.Event()  # no more will come
        self._why = Gone()
        self._tasks = trio.CancelScope(shield=True)
        self._over = trio.Event()  # the tasks have ended and the stream is closed

    async def send(self, text: str) -> None:
        """Write a text message; waits while the server does not read. A cancelled call has not sent it.

        Raises:
            Gone: when it cannot be written.
        """
        with contextlib.suppress(*BROKEN):
            return await self._outbox.send(text)
        # A write fails before the server's close frame is read, which says why.
        with trio.move_on_after(self._limits.close_seconds):
            await self._ended.wait()
        raise copy.copy(self._why)

    async def receive(self) -> str | bytes:
        """The next message: text, or the bytes of a binary one. A cancelled call loses nothing.

        Raises:
            Gone: when no more will come.
        """
        try:
            return await self._incoming.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise copy.copy(self._why) from None

    async def close(self, code: int = 1000) -> None:
        """Write what was handed over, say goodbye, hang up, in ``close_seconds``; again does nothing.

        Raises nothing of the connection's, and cannot be cancelled. A Ctrl-C in it comes out when all is cut.
        """
        try:
            with trio.move_on_after(self._limits.close_seconds, shield=True):
                # What nobody wants any more does not hold the reader up: a server may only read while it can write.
                self._incoming.close()
                self._outbox.close()
                await self._written.wait()
                await self._put(CloseConnection(code=code))
                await self._ended.wait()
        finally:
            await self.cut()

    async def cut(self) -> None:
        """Hang up at once. Never raises, cannot be cancelled."""
        self._tasks.cancel()
        with trio.CancelScope(shield=True):
            await self._over.wait()

    async def run(self, request: Request) -> None:
        """Open it, read and write, until the connection is over or the link is cut. Raises nothing."""
        try:
            with self._tasks:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._answer_pings)
                    await self._read(request)
                    nursery.cancel_scope.cancel()
        finally:
            try:
                await cut(self._stream)
            finally:
                self._over.set()

    # ---- writing

    async def _write(self) -> None:
        try:
            with self._outgoing:
                async for text in self._outgoing:
                    await self._put(TextMessage(data=text))
        finally:
            self._written.set()

    async def _answer_pings(self) -> None:
        with self._due_pongs:
            async for pong in self._due_pongs:
                await self._put(pong)

    async def _put(self, event: Event) -> None:
        """Write a frame. Behind a close frame, or where the server takes nothing, it is dropped."""
        async with self._pen:
            if self._deaf:
                return
            try:
                await self._stream.send_all(self._protocol.send(event))
            except LocalProtocolError:  # behind a close frame
                return
            except BROKEN:
                self._stop_writing()
            except BaseException:
                self._deaf = True  # half a frame may have been written
                raise

    def _stop_writing(self) -> None:
        self._deaf = True
        self._outbox.close()
        self._reading.deadline = trio.current_time() + self._limits.close_seconds

    # ---- reading

    async def _read(self, request: Request) -> None:
        try:
            await self._put(request)
            while not self._ended.is_set():
                await self._hear(await self._more())
        finally:
            self._end()

    async def _more(self) -> bytes:
        """The next bytes; none at the end."""
        # What has arrived is read in no time, and a server that takes nothing sends nothing new.
        seconds = self._limits.close_seconds if self._deaf else math.inf
        with (
            trio.CancelScope(deadline=trio.current_time() + seconds) as self._reading,
            contextlib.suppress(*BROKEN),
        ):
            return bytes(await self._stream.receive_some(BYTES_A_READ))
        return b""

    async def _hear(self, data: bytes) -> None:
        if not data:
            return self._end()
        if not self.opened:
            self.answer += data
        try:
            self._protocol.receive_data(data)
        except Exception:  # only the answer to the handshake is looked at here; ``answer`` tells what it was
            return self._end()
        for event in self._protocol.events():
            await trio.lowlevel.checkpoint()  # a read may hold thousands of frames, and others have their turn
            await self._obey(event)
            if self._ended.is_set():
                break
        return None

    async def _obey(self, event: Event) -> None:
        match event:
            case AcceptConnection():
                self.opened, self.answer = True, b""
                self.settled.set()
            case RejectConnection():
                self._end()
            case TextMessage() | BytesMessage():
                await self._collect(event)
            case Ping():
                with contextlib.suppress(trio.WouldBlock):
                    self._due_pongs.receive_nowait()  # the latest ping is the one to answer
                self._pongs.send_nowait(event.response())
            case CloseConnection() if self._protocol.state in CLOSED_BY_PEER:
                await self._part(event.response(), Gone(event.code, printable(event.reason or "")))
            case CloseConnection():  # wsproto's wish: it has met what it cannot read
                fault = f"the server does not keep to the WebSocket protocol: {printable(event.reason or '')}"
                await self._part(event, Gone(fault=fault))

    async def _collect(self, part: TextMessage | BytesMessage) -> None:
        """A message comes in one part or many."""
        self._parts.append(part.data)
        self._size += len(part.data)
        if self._size > self._limits.message_chars:
            await self._refuse(f"is longer than {self._limits.message_chars} characters (message_chars)")
        elif len(self._parts) > self._limits.message_parts:
            await self._refuse(f"comes in more than {self._limits.message_parts} parts (message_parts)")
        elif part.message_finished:
            message = ("" if isinstance(part, TextMessage) else b"").join(self._parts)
            self._parts, self._size = [], 0
            with contextlib.suppress(trio.BrokenResourceError):  # nobody wants to know any more
                await self._inbox.send(message)

    async def _refuse(self, why: str) -> None:
        fault = f"a message of the server {why}, which is this client's own limit"
        await self._part(CloseConnection(code=TOO_BIG, reason="too big"), Gone(fault=fault))

    async def _part(self, goodbye: Event, why: Gone) -> None:
        """It is over, and who waits is told so first: to say goodbye may have to wait for the server."""
        self._end(why)
        with trio.move_on_after(self._limits.close_seconds):
            await self._put(goodbye)

    def _end(self, why: Gone | None = None) -> None:
        """No more will come; the first reason counts."""
        if not self._ended.is_set():
            self._why = why or Gone()
            self._ended.set()
            self.settled.set()
            self._inbox.close()
            self._outbox.close()
            self._pongs.close()


async def open_link(
    nursery: trio.Nursery,
    address: Address,
    *,
    key: Key | None = None,
    tls: ssl.SSLContext | None = None,
    limits: LinkLimits | None = None,
) -> Link:
    """Connect. Its tasks live in ``nursery`` until it is closed, which must be done, and raise nothing there.

    Args:
        nursery: for its tasks.
        address: where to.
        key: is shown to the server.
        tls: whom to trust, where the address asks for TLS.
        limits: of the connection.

    Raises:
        ClientError: ConnectError, TlsError, NotAllowedError or NotVoiceChatError.
    """
    limits = limits or LinkLimits()
    link = Link(await dial(address, tls, limits), limits)
    headers = [key.header()] if key is not None else []
    nursery.start_soon(link.run, Request(host=address.place, target=address.target, extra_headers=headers))
    try:
        with trio.move_on_after(limits.handshake_seconds):
            await link.settled.wait()
        if not link.opened:
            raise not_upgraded(address, link.answer, limits.handshake_seconds if not link.settled.is_set() else None)
    except BaseException:
        await link.cut()
        raise
    return link
