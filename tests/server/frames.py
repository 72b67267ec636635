"""A peer that writes WebSocket frames by hand, good ones and others, and reads what the server writes."""

import struct

import trio

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # of that key: RFC 6455, 1.3
MASK = b"\x0f\xf0\x55\xaa"


def frame(opcode: int, payload: bytes | str = b"", *, first: int | None = None, masked: bool = True) -> bytes:
    """A client's frame; ``first`` is its first byte where that is to be an odd one."""
    data = payload.encode() if isinstance(payload, str) else payload
    if len(data) < 126:
        size, extra = len(data), b""
    elif len(data) < 2**16:
        size, extra = 126, struct.pack("!H", len(data))
    else:
        size, extra = 127, struct.pack("!Q", len(data))
    head = bytes([0x80 | opcode if first is None else first, size | (0x80 if masked else 0)]) + extra
    if not masked:
        return head + data
    return head + MASK + scrambled(data, MASK)


def scrambled(data: bytes, mask: bytes) -> bytes:
    """Masked; and of masked bytes, what they were."""
    whole = (mask * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data, "big") ^ int.from_bytes(whole, "big")).to_bytes(len(data), "big")


def close_frame(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, struct.pack("!H", code) + reason)


class Peer:
    """One end of a stream: the client's, whose server never masks what it sends.

    At the server's end (``hears_masked``) every frame must be masked.
    """

    hears_masked = False

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._buffer = b""

    async def write(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def _more(self) -> bool:
        """Whether anything came; a reset counts as the end."""
        try:
            data = await self.stream.receive_some(65536)
        except trio.BrokenResourceError:
            return False
        self._buffer += data
        return bool(data)

    async def head(self) -> bytes:
        """The next header block; EOFError when the stream ends before."""
        while b"\r\n\r\n" not in self._buffer:
            if not await self._more():
                raise EOFError(f"the stream ended after {self._buffer!r}")
        block, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        return block

    async def body(self, size: int) -> bytes:
        while len(self._buffer) < size:
            assert await self._more()
        body, self._buffer = self._buffer[:size], self._buffer[size:]
        return body

    async def next(self) -> tuple[int, bytes] | None:
        """The next frame's opcode and payload; None at the end of the stream."""
        while True:
            parsed = self._parse()
            if parsed is not None:
                return parsed
            if not await self._more():
                assert self._buffer == b"", f"half a frame: {self._buffer[:20]!r}"
                return None

    def _parse(self) -> tuple[int, bytes] | None:
        data = self._buffer
        if len(data) < 2:
            return None
        assert bool(data[1] & 0x80) == self.hears_masked, f"masked or not: {data[:2]!r}"
        start, size = 2, data[1] & 0x7F
        if size == 126:
            start, size = 4, int.from_bytes(data[2:4], "big")
        elif size == 127:
            start, size = 10, int.from_bytes(data[2:10], "big")
        mask = data[start : start + 4] if self.hears_masked else b""
        start += 4 if self.hears_masked else 0
        if len(data) < start + size:
            return None
        self._buffer = data[start + size :]
        payload = data[start : start + size]
        return data[0] & 0x0F, scrambled(payload, mask) if mask else payload

    async def rest(self) -> bytes:
        """All until the end, as bytes."""
        while await self._more():
            pass
        rest, self._buffer = self._buffer, b""
        return rest


def code_of(close: tuple[int, bytes] | None) -> int:
    """The code of a close frame."""
    assert close is not None
    assert close[0] == CLOSE, close
    return int.from_bytes(close[1][:2], "big")
