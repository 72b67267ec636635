"""Servers to talk to, on real sockets: one that does what a test says, byte by byte, and the real app."""

import base64
import gc
import hashlib
import json
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import trio

from tests.server.frames import CLOSE, TEXT, Peer, frame
from voicechat_client import ClientError, ClientLimits, Conversation, LostError

LONGEST = 20.0  # seconds of a test that hangs
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
CREATED = {
    "type": "session.created",
    "event_id": "e",
    "session": {
        "id": "sess_1",
        "state": "configuring",
        "input_audio_format": {"type": "pcm16", "sample_rate": 16000},
        "output_audio_format": {"type": "pcm16", "sample_rate": 22050},
    },
}
UPDATED = {"type": "session.updated", "event_id": "e", "session": {"id": "sess_1", "model": "fake"}}
DONE = {"type": "response.done", "event_id": "e", "frame_index": 0}
PONG = {"type": "session.pong", "event_id": "e"}


def run(main: Callable[[], Awaitable[None]]) -> None:
    """On Trio's real clock; whatever was left open is a warning here, and warnings are errors."""

    async def bounded() -> None:
        before = trio.lowlevel.current_statistics().tasks_living
        with trio.fail_after(LONGEST):
            await main()
        assert trio.lowlevel.current_statistics().tasks_living == before

    trio.run(bounded)
    gc.collect()


def error_event(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "event_id": "e", "error": {"code": code, "message": message}}


def text_event(index: int, delta: str = "x", text: str = "x") -> dict[str, Any]:
    fields = {"frame_index": index, "token_id": 1, "delta": delta, "text": text}
    return {"type": "response.text.delta", "event_id": "e", **fields}


class Raw(Peer):
    """A server's end of one connection."""

    hears_masked = True
    request = b""

    async def head(self) -> bytes:
        self.request = await super().head()
        return self.request

    async def write(self, data: bytes) -> None:
        with suppress(trio.BrokenResourceError):
            await self.stream.send_all(data)

    async def accept(self, behind: bytes = b"") -> None:
        """Answer the handshake, and with the same bytes whatever is to come ``behind`` it."""
        key = re.search(rb"(?i)sec-websocket-key: (\S+)", await self.head())
        assert key is not None
        token = base64.b64encode(hashlib.sha1(key[1] + GUID.encode()).digest()).decode()
        lines = ["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade"]
        await self.write("\r\n".join([*lines, f"Sec-WebSocket-Accept: {token}", "", ""]).encode() + behind)

    async def say(self, *messages: dict[str, Any] | str) -> None:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in messages]
        await self.write(b"".join(frame(TEXT, text, masked=False) for text in texts))

    async def begin(self, *messages: dict[str, Any]) -> None:
        """Up to a session that is open."""
        await self.accept()
        await self.say(CREATED)
        assert (await self.hear())["type"] == "session.update"
        await self.say(UPDATED, *messages)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """The close frame, then wait for the client to hang up."""
        await self.write(frame(CLOSE, struct.pack("!H", code) + reason.encode(), masked=False))
        while await self._more():
            pass

    async def goodbye(self) -> bytes:
        """What the client's close frame holds; it is answered, and the client has hung up."""
        held = b""
        while (found := await self.next()) is not None:
            if found[0] == CLOSE:
                held = found[1]
                await self.write(frame(CLOSE, held, masked=False))
        return held

    async def hear(self) -> dict[str, Any]:
        found = await self.next()
        assert found is not None
        assert found[0] == TEXT, found
        return json.loads(found[1])

    async def hear_audio(self, frames: int) -> None:
        """Messages of audio, up to so many frames of it: a server may say no more than they can have."""
        heard = 0
        while heard < frames * 2560:
            heard += len(base64.b64decode((await self.hear())["audio"]))

    def reset(self) -> None:
        """Close, and throw away what is on its way in both directions."""
        inner = self.stream.transport_stream if isinstance(self.stream, trio.SSLStream) else self.stream
        assert isinstance(inner, trio.SocketStream)
        inner.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        inner.socket.close()


Script = Callable[[Raw], Awaitable[None]]


@asynccontextmanager
async def scripted(*scripts: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server whose connections do one script after the other, the last one again and again. Yields host:port."""
    waiting = list(scripts)

    async def handle(stream: trio.SocketStream) -> None:
        script = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        line: trio.abc.Stream = stream
        if tls is not None:
            line = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        try:
            with suppress(EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
                await script(Raw(line))
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(line)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
        yield f"127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


# ---- the client's side


QUICK = ClientLimits(close_seconds=0.3)


def silence(samples: int) -> np.ndarray:
    return np.zeros(samples, np.int16)


async def names(conversation: Conversation) -> list[str]:
    return [type(event).__name__ async for event in conversation]


async def to_the_loss(conversation: Conversation, kind: type[ClientError] = LostError) -> tuple[list[str], Any]:
    """The names of what came, and the error that ended it."""
    heard: list[str] = []
    try:
        async for event in conversation:
            heard.append(type(event).__name__)
    except ClientError as error:
        if type(error) is kind:
            return heard, error
        raise
    raise AssertionError(f"it ended as it should, after {heard}")


async def nap() -> None:
    """Long enough for whatever is on its way between two sockets of this machine."""
    await trio.sleep(0.05)


# ---- scripts


async def reads_nothing(raw: Raw) -> None:
    await raw.begin()
    await trio.sleep_forever()


def ends(how: Callable[[Raw], Awaitable[None]], *messages: Any) -> Script:
    async def script(raw: Raw) -> None:
        await raw.begin(*messages)
        await how(raw)

    return script


def closes(code: int, reason: str = "") -> Callable[[Raw], Awaitable[None]]:
    return partial(Raw.close, code=code, reason=reason)
