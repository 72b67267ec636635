"""One WebSocket to a server, as the rest of the client knows it: send, receive, close.

    async with trio.open_nursery() as nursery:
        link = await open_link(nursery, parse(url), key=key, tls=context)
        await link.send(text)
        text = await link.receive()
        await link.close()

This file alone knows trio-websocket. Nothing that a server does leaves it as another exception than ``Gone`` or one of
ours, and nothing is raised into the nursery:

- The library's reader raises what it does not like (a rejection, a ping while we close) into its nursery. It has one of
  its own, where that ends the connection.
- Its handshake waits for ever when the server hangs up in it. We see the stream end, and keep the beginning of the
  answer, by which we say what it was.
- It leaves its stream open when the server closes first, and waits for a close frame without limit. The stream is ours,
  and we wait ``close_seconds``.
- A block that is cancelled would take the library's reader with it, and nobody would hear the server out. Its tasks are
  shielded, until the link is closed.
- A send that is cancelled leaves half a frame, and everything that follows is unreadable. One task writes, and a call
  that is cancelled does not cancel it: its message was not begun, or goes out whole.
- When a write fails, it throws away what has arrived and was not read. We do not tell it, and read on to the end.
- It keeps every fragment of a message, empty ones too. We end a connection that brings many bytes and no message.

Knows no message of the protocol.
"""

import contextlib
import math
import ssl
from typing import Final

import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_client_stream

from voicechat_client.address import Address
from voicechat_client.reaching import BROKEN, BYTES_A_READ, LinkLimits, cut, dial, not_upgraded
from voicechat_core.keys import Key
from voicechat_core.terminal import printable

__all__ = ["Gone", "Link", "open_link"]

ABNORMAL: Final = 1006  # there was no close frame


class Gone(Exception):  # noqa: N818 (to leave is no error)
    """The connection is over. ``code`` and ``reason`` are the server's close frame's; 1006 where there was none."""

    def __init__(self, code: int = ABNORMAL, reason: str = "") -> None:
        super().__init__(f"the connection is over, code {code}")
        self.code = code
        self.reason = reason


# ---- the stream


class _Line(trio.abc.Stream):
    """The stream as the library sees it. When the library closes it, it is closed to the library only."""

    def __init__(self, stream: trio.abc.Stream, limits: LinkLimits) -> None:
        self.stream = stream
        self.opening: trio.CancelScope | None = trio.CancelScope()  # around the handshake, while it lasts
        self.answer = b""  # what came in it
        self.unheard = 0  # bytes since the last message was received
        self.deaf = False  # the server takes nothing any more; it may still have said something
        self._limits = limits
        self._reading = trio.CancelScope()
        self._closed = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """The next bytes; the end, if the server may not send more."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            raise trio.ClosedResourceError
        # What has arrived is read in no time, and a server that takes nothing sends nothing new.
        seconds = self._limits.close_seconds if self.deaf else math.inf
        with trio.CancelScope(deadline=trio.current_time() + seconds) as self._reading:
            try:
                data = bytes(await self.stream.receive_some(max_bytes))
            except BROKEN:
                data = b""
            self._count(data)
            return data
        raise trio.ClosedResourceError

    def _count(self, data: bytes) -> None:
        if self.opening is not None:
            self.answer += data
            if not data or len(self.answer) > self._limits.answer_bytes:
                self.opening.cancel()
        self.unheard += len(data)
        if self.unheard > self._limits.unheard_bytes:
            self.shut()
            raise trio.BrokenResourceError("no message in all these bytes")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write; what cannot be written is dropped, and the line is ``deaf``."""
        if self.deaf or self._closed:
            await trio.lowlevel.checkpoint()
            return
        try:
            await self.stream.send_all(data)
        except BROKEN:
            self.deaf = True
            self._reading.deadline = trio.current_time() + self._limits.close_seconds
        except BaseException:
            self.deaf = True  # half a frame may have been written
            raise

    async def wait_send_all_might_not_block(self) -> None:
        """As the stream itself."""
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """The library is done with it."""
        self.shut()
        await trio.lowlevel.checkpoint()

    def shut(self) -> None:
        """The library is to be done with it: its reader ends."""
        self._closed = True
        self._reading.cancel()
        if self.opening is not None:
            self.opening.cancel()


# ---- the link


class Link:
    """A connection that is open. Made by ``open_link``. One task may receive while others send."""

    def __init__(self, line: _Line, limits: LinkLimits) -> None:
        self._line = line
        self._limits = limits
        self._library: WebSocketConnection | None = None
        # Shielded, so that a block that is cancelled still says goodbye. Whoever has a link closes or cuts it.
        self._tasks = trio.CancelScope(shield=True)
        self._closing = trio.CancelScope()  # around the library's own close
        self._settled = trio.Event()  # the handshake has succeeded or failed
        self._reader_over = trio.Event()
        self._writer_over = trio.Event()
        # No room: a message is handed over when the one before it is written.
        self._outbox, self._outgoing = trio.open_memory_channel[str](0)
        self._closed = False

    async def send(self, text: str) -> None:
        """Write a text message; waits while the server does not read. A cancelled call has not sent it.

        Raises:
            Gone: when it cannot be written.
        """
        if not self._over:
            with contextlib.suppress(*BROKEN):
                return await self._outbox.send(text)
        # A write fails before the server's close frame is read, which says why.
        with trio.move_on_after(self._limits.close_seconds):
            await self._reader_over.wait()
        raise self._gone()

    async def receive(self) -> str | bytes:
        """The next message: text, or the bytes of a binary one. A cancelled call loses nothing.

        Raises:
            Gone: when no more will come.
        """
        assert self._library is not None
        try:
            message = await self._library.get_message()
        except ConnectionClosed:
            raise self._gone() from None
        self._line.unheard = 0
        return message

    async def close(self, code: int = 1000) -> None:
        """Write what was handed over, say goodbye, hang up, in ``close_seconds``; again does nothing.

        Never raises, and cannot be cancelled.
        """
        if not self._closed:
            self._closed = True
            with trio.move_on_after(self._limits.close_seconds, shield=True):
                await self._part(code)
        await self.cut()

    async def cut(self) -> None:
        """Hang up at once. Never raises, cannot be cancelled."""
        with trio.CancelScope(shield=True):
            self._line.shut()
            self._tasks.cancel()
            self._outbox.close()
            await self._reader_over.wait()
            await self._writer_over.wait()
            await cut(self._line.stream)

    # ---- inside

    @property
    def _over(self) -> bool:
        return self._library is None or self._library.closed is not None

    def _gone(self) -> Gone:
        closed = self._library.closed if self._library is not None else None
        return Gone(closed.code, printable(closed.reason or "")) if closed else Gone()

    async def _part(self, code: int) -> None:
        self._outbox.close()
        await self._writer_over.wait()
        if self._library is not None and not self._line.deaf:
            # Whatever it raises, the connection ends here; and without a reader nobody hears the server's close frame.
            with self._closing, contextlib.suppress(Exception):
                await self._library.aclose(code)

    async def run(self, address: Address, headers: list[tuple[bytes, bytes]]) -> None:
        """The library's reader and our writer, until the link is cut. Raises nothing."""
        with self._tasks:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                await self._read(address, headers)

    async def _read(self, address: Address, headers: list[tuple[bytes, bytes]]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                await self._shake_hands(nursery, address, headers)
        except* Exception:
            pass  # what the library raises of a server; how the connection ended, it has noted before
        finally:
            self._reader_over.set()
            self._settled.set()
            self._outbox.close()
            self._closing.cancel()

    async def _shake_hands(self, nursery: trio.Nursery, address: Address, headers: list[tuple[bytes, bytes]]) -> None:
        assert self._line.opening is not None
        with self._line.opening:
            self._library = await wrap_client_stream(
                nursery,
                self._line,  # type: ignore[arg-type] # any stream will do
                address.place,
                address.target,
                extra_headers=headers,
                message_queue_size=self._limits.waiting_messages,
                max_message_size=self._limits.message_chars,
                receive_buffer_size=BYTES_A_READ,
            )
        self._line.opening = None
        if self._library is None:
            nursery.cancel_scope.cancel()
        else:
            self._line.answer = b""
        self._settled.set()

    async def _write(self) -> None:
        try:
            with self._outgoing:
                async for text in self._outgoing:
                    assert self._library is not None  # nobody has a link that is not open
                    await self._library.send_message(text)
                    if self._line.deaf:
                        return
        except Exception:  # ConnectionClosed, and what leaks of wsproto
            return
        finally:
            self._writer_over.set()


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
    stream = await dial(address, tls, limits)
    link = Link(line := _Line(stream, limits), limits)
    nursery.start_soon(link.run, address, [key.header()] if key is not None else [])
    try:
        with trio.move_on_after(limits.handshake_seconds):
            await link._settled.wait()
        if link._library is None:
            raise not_upgraded(address, line.answer, limits.handshake_seconds if not link._settled.is_set() else None)
    except BaseException:
        await link.cut()
        raise
    return link
