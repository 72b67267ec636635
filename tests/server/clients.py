"""A client of a real server, on a real socket: it speaks the native dialect, well or badly, and can be reset.

    async with calling(server) as client:
        await client.upgrade()
        await client.open_session(seed=1)
        ...

What is not read stays unread, so that each test says what comes and in which order.
"""

import base64
import json
import socket as sockets
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import trio

from tests.server.frames import CLOSE, KEY, PING, PONG, TEXT, Peer, close_frame, frame
from tests.server.server_process import HOST, NET, ServerProcess

Message = dict[str, Any]

UPGRADE = (
    "GET /v1/realtime HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n\r\n"
).encode()


class Closed(Exception):  # noqa: N818 (how a conversation ends)
    """The server has closed, with this; or it hung up without a close frame (1006)."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class Client(Peer):
    """One connection to a server."""

    stream: trio.SocketStream

    # ---- the socket

    async def upgrade(self) -> None:
        await self.write(UPGRADE)
        head = await self.head()
        assert head.startswith(b"HTTP/1.1 101 "), head

    def reset(self) -> None:
        """Vanish: the server gets an RST, and what it has not been sent yet is lost."""
        self.stream.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()

    # ---- messages

    async def say(self, kind: str, **fields: Any) -> None:
        await self.write(said(kind, **fields))

    async def hear(self) -> Message:
        """The next message.

        Raises:
            Closed: when there is none; the close frame is answered first.
        """
        while True:
            got = await self.next()
            if got is None:
                raise Closed(1006)
            opcode, payload = got
            if opcode == TEXT:
                message: Message = json.loads(payload)
                return message
            if opcode == CLOSE:
                await self.write(close_frame(1000))
                raise Closed(int.from_bytes(payload[:2], "big"), payload[2:].decode())
            assert opcode in (PING, PONG), got

    async def hear_until(self, kind: str) -> list[Message]:
        """All messages up to the first of that kind."""
        heard = [await self.hear()]
        while heard[-1]["type"] != kind:
            heard.append(await self.hear())
        return heard

    async def hear_all(self) -> tuple[list[Message], Closed]:
        """All that still come, and how it ended; behind the close frame nothing may come but the end."""
        heard: list[Message] = []
        try:
            while True:
                heard.append(await self.hear())
        except Closed as closed:
            assert await self.next() is None
            return heard, closed

    # ---- conversations

    async def open_session(self, **session: Any) -> None:
        """From the upgrade to ``session.updated``."""
        assert (await self.hear())["type"] == "session.created"
        await self.say("session.update", session=session)
        updated = await self.hear()
        assert updated["type"] == "session.updated", updated

    async def answered(self, samples: np.ndarray, **session: Any) -> list[Message]:
        """A whole conversation that ends as it should: the messages of its frames."""
        await self.open_session(**session)
        await self.write(append(samples))
        await self.say("input_audio_buffer.commit")
        heard, closed = await self.hear_all()
        assert (closed.code, closed.reason) == (1000, "done"), (heard[-1:], closed)
        assert heard[-1]["type"] == "response.done", heard[-1]
        return [message for message in heard if message["type"] == "response.audio.delta"]


def said(kind: str, **fields: Any) -> bytes:
    """The frame of a message."""
    return frame(TEXT, json.dumps({"type": kind, **fields}))


def append(samples: np.ndarray) -> bytes:
    """The frame of a message with 16-bit samples."""
    audio = base64.b64encode(samples.astype("<i2").tobytes()).decode()
    return said("input_audio_buffer.append", audio=audio)


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    """Something to hear, int16 at 16 kHz."""
    return np.random.default_rng(seed).integers(-3000, 3000, int(seconds * 16000), dtype=np.int16)


def frames_of(audio: Sequence[Message]) -> list[tuple[int, int, int, list[int]]]:
    """Index, ids and codes of ``response.audio.delta`` messages."""
    return [(m["frame_index"], m["text_token"], m["function_token"], m["audio_codes"]) for m in audio]


@asynccontextmanager
async def calling(server: ServerProcess, *, receive_buffer: int | None = None) -> AsyncIterator[Client]:
    """A connection that nothing was sent on. Hung up at the end, in good order; it may be over before."""
    with trio.fail_after(NET):
        socket = trio.socket.socket()
        if receive_buffer is not None:
            socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, receive_buffer)
        await socket.connect((HOST, server.port))
        stream = trio.SocketStream(socket)
        try:
            yield Client(stream)
        finally:
            socket.close()


async def converse(server: ServerProcess, samples: np.ndarray, **session: Any) -> list[Message]:
    """A client without faults: it must be accepted, and served to the end."""
    async with calling(server) as client:
        await client.upgrade()
        return await client.answered(samples, **session)
