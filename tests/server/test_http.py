"""The server's port: plain requests, the upgrade, and what else comes. Memory streams and a mock clock.

``serving`` is a server of memory streams: any number of clients, all of whose handlers must have returned normally at
the end; ``alive`` is the next client, who is served.
"""

import logging
import socket as sockets
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair

from tests.server.frames import CLOSE, KEY, TEXT, Peer, close_frame, code_of, frame
from voicechat_server.auth import Gate, Key
from voicechat_server.http import Answer, HttpLimits, Request, Routes, serve
from voicechat_server.transport import SocketLimits, Transport

SECRET = "s3cret-key"
UPGRADE = {
    "Host": "here",
    "Upgrade": "websocket",
    "Connection": "keep-alive, Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": KEY,
}


def says(text: str, status: int = 200) -> Answer:
    return Answer(status, text.encode())


@pytest.fixture(autouse=True)
def _no_errors(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What peers do is no error of ours: nothing is logged as one."""
    yield
    if "fails" not in request.node.name:
        assert [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []


async def health() -> Answer:
    return says("well\n")


async def ready() -> Answer:
    return says("busy\n", 503)


async def metrics() -> Answer:
    return Answer(200, b"frames_total 1\n", "text/plain; version=0.0.4")


async def home() -> Answer:
    return Answer(200, b"<p>here</p>", "text/html; charset=utf-8")


ROUTES = Routes(health, ready, metrics, home)


def ask(path: str = "/health", method: str = "GET", **headers: str) -> bytes:
    return request(f"{method} {path} HTTP/1.1", {"Host": "here", **headers})


def request(line: str, headers: dict[str, str]) -> bytes:
    block = [line, *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*block, "", ""]).encode("latin-1")


def upgrade_request(path: str = "/v1/realtime", **changes: str | None) -> bytes:
    changed = {name.replace("_", "-"): value for name, value in changes.items()}
    kept = {name: value for name, value in {**UPGRADE, **changed}.items() if value is not None}
    return request(f"GET {path} HTTP/1.1", kept)


class Port:
    """A server without a network."""

    def __init__(self, nursery: trio.Nursery, routes: Routes, gate: Gate, limits: HttpLimits) -> None:
        self.nursery = nursery
        self.routes = routes
        self.gate = gate
        self.limits = limits
        self.asked: list[Request] = []
        self.returned = 0

    async def talk(self, socket: Transport, request: Request) -> None:
        self.asked.append(request)
        while True:
            message = await socket.receive()
            await socket.send(message if isinstance(message, str) else "binary")

    async def handle(self, stream: trio.abc.Stream) -> None:
        limits = SocketLimits(message_chars=1000)
        await serve(stream, self.routes, self.talk, check=self.gate.refusal, limits=self.limits, socket_limits=limits)
        self.returned += 1

    def connect(self, *, lockstep: bool = False) -> Peer:
        ours, theirs = lockstep_stream_pair() if lockstep else memory_stream_pair()
        self.nursery.start_soon(self.handle, ours)
        return Peer(theirs)

    async def alive(self) -> None:
        """The next clients are served: one by HTTP, one by WebSocket."""
        assert await get(self.connect(), ask()) == (200, b"well\n")
        peer = self.connect()
        await peer.write(upgrade_request(Authorization=f"Bearer {SECRET}"))
        assert (await peer.head()).startswith(b"HTTP/1.1 101 ")
        await peer.write(frame(TEXT, "hello"))
        assert await peer.next() == (TEXT, b"hello")
        await peer.write(close_frame(1000))
        assert code_of(await peer.next()) == 1000
        await peer.stream.aclose()


@asynccontextmanager
async def serving(
    *, routes: Routes = ROUTES, gate: Gate | None = None, limits: HttpLimits | None = None
) -> AsyncIterator[Port]:
    async with trio.open_nursery() as nursery:
        port = Port(nursery, routes, gate or Gate(None), limits or HttpLimits())
        yield port
        before = port.returned
        await port.alive()
    assert port.returned >= before + 2


async def answer(peer: Peer, *, head_only: bool = False) -> tuple[int, dict[str, str], bytes]:
    """The next response: status, headers by lower-case name, body."""
    first, *lines = (await peer.head()).decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = b"" if head_only else await peer.body(int(headers["content-length"]))
    return int(first.split()[1]), headers, body


async def get(peer: Peer, data: bytes) -> tuple[int, bytes]:
    """Status and body of one request, after which this peer leaves."""
    await peer.write(data)
    status, _, body = await answer(peer)
    await peer.stream.aclose()
    return status, body


# ---- plain HTTP


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "status", "body", "kind"),
    [
        ("/health", 200, b"well\n", "text/plain; charset=utf-8"),
        ("/ready", 503, b"busy\n", "text/plain; charset=utf-8"),
        ("/metrics", 200, b"frames_total 1\n", "text/plain; version=0.0.4"),
        ("/", 200, b"<p>here</p>", "text/html; charset=utf-8"),
        ("/health?verbose=1", 200, b"well\n", "text/plain; charset=utf-8"),
        ("http://here:80/health", 200, b"well\n", "text/plain; charset=utf-8"),
        ("HTTP://here", 200, b"<p>here</p>", "text/html; charset=utf-8"),
        ("/healthy", 404, b"404 Not Found\n", "text/plain; charset=utf-8"),
        ("/health/", 404, b"404 Not Found\n", "text/plain; charset=utf-8"),
        ("/../etc/passwd", 404, b"404 Not Found\n", "text/plain; charset=utf-8"),
        ("*", 404, b"404 Not Found\n", "text/plain; charset=utf-8"),
        ("/v1/realtime", 426, b"426 Upgrade Required\n", "text/plain; charset=utf-8"),
    ],
)
async def test_get_and_head(autojump_clock: MockClock, path: str, status: int, body: bytes, kind: str) -> None:
    """Both on one connection, which is kept."""
    async with serving() as port:
        peer = port.connect()
        await peer.write(ask(path))
        got, headers, text = await answer(peer)
        assert (got, text, headers["content-type"]) == (status, body, kind)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers.get("connection") in (None, "Upgrade")
        await peer.write(ask(path, "HEAD"))
        got, headers, _ = await answer(peer, head_only=True)
        assert (got, int(headers["content-length"])) == (status, len(body))
        await peer.write(ask())
        assert (await answer(peer))[2] == b"well\n"
        await peer.stream.aclose()
    assert trio.current_time() == 0.0


@pytest.mark.trio
async def test_byte_by_byte_and_many_at_once(autojump_clock: MockClock) -> None:
    async with serving() as port:
        peer = port.connect()
        for byte in ask():
            await peer.write(bytes([byte]))
        assert (await answer(peer))[2] == b"well\n"
        await peer.write(ask() * 20 + ask("/metrics", Connection="close") + ask())
        assert [(await answer(peer))[0] for _ in range(20)] == [200] * 20
        assert (await answer(peer))[1]["connection"] == "close"
        assert await peer.rest() == b""
        await peer.stream.aclose()


@pytest.mark.trio
async def test_http_1_0_is_answered_and_closed(autojump_clock: MockClock) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await peer.rest()).endswith(b"\r\n\r\nwell\n")
        await peer.stream.aclose()


@pytest.mark.trio
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PRI", "get"])
@pytest.mark.parametrize(("path", "allow"), [("/health", "GET, HEAD"), ("/v1/realtime", "GET")])
async def test_other_methods(autojump_clock: MockClock, method: str, path: str, allow: str) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(ask(path, method))
        status, headers, _ = await answer(peer)
        assert (status, headers["allow"]) == (405, allow)
        await peer.stream.aclose()


@pytest.mark.trio
async def test_a_body_is_not_read_as_a_request(autojump_clock: MockClock) -> None:
    async with serving() as port:
        for name, value, body in (("Content-Length", "100", b""), ("Transfer-Encoding", "chunked", b"FF\r\n")):
            for method, expected in (("POST", 405), ("GET", 200)):
                peer = port.connect()
                await peer.write(ask("/health", method, **{name: value}) + body + ask())
                status, got, _ = await answer(peer)
                assert (status, got["connection"]) == (expected, "close")
                assert await peer.rest() == b""
                await peer.stream.aclose()


@pytest.mark.trio
async def test_another_upgrade_is_ignored(autojump_clock: MockClock) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(ask(Upgrade="h2c", Connection="Upgrade") + ask())
        assert [(await answer(peer))[0] for _ in range(2)] == [200, 200]
        await peer.stream.aclose()


@pytest.mark.trio
async def test_a_route_that_fails_or_hangs(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> Answer:
        raise OSError("/a/path/of/ours")

    async def hangs() -> Answer:
        await trio.sleep_forever()
        raise AssertionError

    async with serving(routes=replace(ROUTES, ready=broken, metrics=hangs)) as port:
        peer = port.connect()
        await peer.write(ask("/ready") + ask("/metrics") + ask())
        assert (await answer(peer))[::2] == (500, b"500 Internal Server Error\n")
        assert trio.current_time() == 0.0
        assert (await answer(peer))[::2] == (503, b"503 Service Unavailable\n")
        assert trio.current_time() == 10.0
        assert (await answer(peer))[0] == 200
        await peer.stream.aclose()
    assert "/a/path/of/ours" in caplog.text  # in our log, and there alone


# ---- what is no request


@pytest.mark.trio
@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # a TLS ClientHello
        b"\x00" * 100,
        b"\xff\xfe\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n folded\x00\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_garbage(autojump_clock: MockClock, data: bytes) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(data)
        status, headers, body = await answer(peer)
        assert (status, body, headers["connection"]) == (400, b"400 Bad Request\n", "close")
        assert await peer.rest() == b""
        await peer.stream.aclose()
    assert trio.current_time() == 0.0


@pytest.mark.trio
@pytest.mark.parametrize("data", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ask().replace(b"1.1", b"3.0")])
async def test_another_version_of_http(autojump_clock: MockClock, data: bytes) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(data)
        assert (await answer(peer))[::2] == (505, b"505 HTTP Version Not Supported\n")
        assert await peer.rest() == b""
        await peer.stream.aclose()


@pytest.mark.trio
async def test_an_unknown_transfer_encoding(autojump_clock: MockClock) -> None:
    async with serving() as port:
        assert (await get(port.connect(), ask(method="POST", **{"Transfer-Encoding": "gzip"})))[0] == 501


@pytest.mark.trio
@pytest.mark.parametrize(
    "data", [ask()[:-1], ask()[:-2], b"GET", b"~" * 100, b"\x80\x2e\x01\x00\x02", ask() + b"GET /"]
)
async def test_half_a_request_and_silence(autojump_clock: MockClock, data: bytes) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(data)
        if data.startswith(ask()):
            assert (await answer(peer))[0] == 200
        status, headers, body = await answer(peer)
        assert (status, body, headers["connection"]) == (408, b"408 Request Timeout\n", "close")
        assert trio.current_time() == 10.0
        await peer.stream.aclose()


@pytest.mark.trio
async def test_half_a_request_and_the_end(autojump_clock: MockClock) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(ask()[:-2])
        assert isinstance(peer.stream, trio.StapledStream)
        await peer.stream.send_eof()
        assert (await peer.rest()).startswith(b"HTTP/1.1 400 ")
        gone = port.connect()
        await gone.write(ask()[:-2])
        await gone.stream.aclose()
    assert trio.current_time() == 0.0


@pytest.mark.trio
@pytest.mark.parametrize("first", [b"", ask()])
async def test_silence_is_no_request(autojump_clock: MockClock, first: bytes) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(first)
        if first:
            await answer(peer)
        assert await peer.rest() == b""
        assert trio.current_time() == 10.0
        await peer.stream.aclose()


@pytest.mark.trio
async def test_a_header_that_comes_slowly(autojump_clock: MockClock) -> None:
    """A byte a second is not a new ten seconds each."""
    async with serving() as port:
        peer = port.connect()
        for byte in ask()[:9]:
            await peer.write(bytes([byte]))
            await trio.sleep(1)  # by the mock clock
        assert (await answer(peer))[0] == 408
        assert trio.current_time() == 10.0
        await peer.stream.aclose()


@pytest.mark.trio
@pytest.mark.parametrize("pieces", [1, 7, 10_000])
@pytest.mark.parametrize(("extra", "status"), [(0, 200), (1, 431), (100_000, 431)])
async def test_the_largest_header_block_and_a_larger_one(
    autojump_clock: MockClock, pieces: int, extra: int, status: int
) -> None:
    limit = 16 * 1024
    data = ask(Cookie="c" * (limit - len(ask(Cookie="")) + extra))
    assert len(data) == limit + extra
    async with serving() as port:
        peer = port.connect()
        size = max(1, len(data) // pieces)
        for start in range(0, len(data), size):
            await peer.write(data[start : start + size])
        got, headers, _ = await answer(peer)
        assert (got, headers.get("connection")) == (status, "close" if status == 431 else None)
        await peer.stream.aclose()


@pytest.mark.trio
async def test_a_peer_that_does_not_read_its_answer(autojump_clock: MockClock) -> None:
    async with serving() as port:
        peer = port.connect(lockstep=True)
        await peer.write(ask())
        await trio.sleep(13)  # by the mock clock: ten to write, two to hang up
        assert port.returned == 1
        with pytest.raises(trio.BrokenResourceError):
            await peer.write(ask())


@pytest.mark.trio
async def test_a_cancelled_server_lets_go_within_two_seconds(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        port = Port(nursery, ROUTES, Gate(None), HttpLimits())
        idle, talking = port.connect(), port.connect()
        await talking.write(upgrade_request())
        await talking.head()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            assert code_of(await talking.next()) == 1001
            assert await talking.next() is None
            assert await idle.rest() == b""
    assert trio.current_time() == 2.0


# ---- the upgrade


@pytest.mark.trio
async def test_the_upgrade_hands_over_the_request_and_what_followed(autojump_clock: MockClock) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(ask())
        assert (await answer(peer))[0] == 200
        await peer.write(upgrade_request("/v1/realtime?model=m&x=1", **{"User-Agent": "test"}) + frame(TEXT, "early"))
        head = await peer.head()
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"sec-websocket-protocol" not in head.lower()
        assert b"sec-websocket-extensions" not in head.lower()
        assert await peer.next() == (TEXT, b"early")
        await peer.write(close_frame(1000))
        assert code_of(await peer.next()) == 1000
        await peer.stream.aclose()
    asked = port.asked[0]
    assert (asked.method, asked.path, asked.query) == ("GET", "/v1/realtime", "model=m&x=1")
    assert asked.values(b"user-agent") == [b"test"]
    assert "model=m" not in repr(asked)


@pytest.mark.trio
async def test_a_check_that_fails_lets_nobody_in(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    def check(headers: object) -> None:
        raise ValueError("a bug of ours")

    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        port = Port(nursery, ROUTES, Gate(None), HttpLimits())
        nursery.start_soon(lambda: serve(ours, ROUTES, port.talk, check=check))
        peer = Peer(theirs)
        await peer.write(upgrade_request())
        assert await peer.rest() == b""
        await theirs.aclose()
    assert port.asked == []
    assert "a bug of ours" in caplog.text


@pytest.mark.trio
@pytest.mark.parametrize(
    "changes",
    [
        {"Host": "bad..host"},
        {"Connection": "\xff, upgrade"},
        {"Upgrade": "WebSocket"},
        {"Sec_WebSocket_Protocol": "\xff\xfe"},
        {"Sec_WebSocket_Extensions": "permessage-deflate; \xff"},
    ],
)
async def test_headers_that_trip_the_library_do_not_reach_it(
    autojump_clock: MockClock, changes: dict[str, str]
) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(upgrade_request(**changes))
        assert (await peer.head()).startswith(b"HTTP/1.1 101 ")
        await peer.stream.aclose()


@pytest.mark.trio
@pytest.mark.parametrize(
    ("data", "status", "header"),
    [
        (upgrade_request("/other"), 404, None),
        (upgrade_request("/health"), 404, None),
        (upgrade_request().replace(b"GET", b"POST"), 405, ("allow", "GET")),
        (upgrade_request(Connection="keep-alive"), 400, None),
        (upgrade_request(Connection=None), 400, None),
        (upgrade_request(Sec_WebSocket_Key=None), 400, None),
        (upgrade_request(Sec_WebSocket_Key="short"), 400, None),
        (upgrade_request(Sec_WebSocket_Key="\xff" * 24), 400, None),
        (upgrade_request(Sec_WebSocket_Version="8"), 426, ("sec-websocket-version", "13")),
        (upgrade_request(Sec_WebSocket_Version=None), 426, ("sec-websocket-version", "13")),
        (upgrade_request(Content_Length="5"), 400, None),
        (upgrade_request(Host=None), 400, None),
    ],
)
async def test_an_upgrade_that_is_refused(
    autojump_clock: MockClock, data: bytes, status: int, header: tuple[str, str] | None
) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(data + frame(TEXT, "early"))
        got, headers, _ = await answer(peer)
        assert got == status
        assert headers["connection"] == "close"
        assert header is None or headers[header[0]] == header[1]
        assert await peer.rest() == b""
        await peer.stream.aclose()
    assert len(port.asked) == 1  # the client after it


@pytest.mark.trio
async def test_a_refused_key_and_a_refused_origin(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bearer = {"Authorization": f"Bearer {SECRET}"}
    async with serving(gate=Gate(Key(SECRET))) as port:
        peer = port.connect()
        await peer.write(upgrade_request(Authorization="Bearer wrong-guess", Origin="https://evil.example"))
        status, headers, body = await answer(peer)
        assert (status, headers["www-authenticate"], headers["content-type"]) == (401, "Bearer", "application/json")
        message = "a valid API key is needed for /v1/realtime"
        assert body == b'{"error": {"message": "%s", "type": "invalid_request_error"}}' % message.encode()
        await peer.stream.aclose()
        status, body = await get(port.connect(), upgrade_request(Origin="https://evil.example", **bearer))
        assert status == 403
        message = "origin not allowed for /v1/realtime"
        assert body == b'{"error": {"message": "%s", "type": "invalid_request_error"}}' % message.encode()
    assert SECRET not in caplog.text
    assert "wrong-guess" not in caplog.text
    assert SECRET not in repr(port.asked)


@pytest.mark.trio
async def test_a_browsers_key_is_not_echoed(autojump_clock: MockClock) -> None:
    protocols = f"realtime, openai-insecure-api-key.{SECRET}, openai-beta.realtime-v1"
    async with serving(gate=Gate(Key(SECRET))) as port:
        peer = port.connect()
        await peer.write(upgrade_request(Sec_WebSocket_Protocol=protocols))
        head = await peer.head()
        assert b"\r\nsec-websocket-protocol: realtime\r\n" in head.lower() + b"\r\n"
        assert SECRET.encode() not in head
        await peer.stream.aclose()
    assert SECRET not in repr(port.asked)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(TEXT, b"\xff"), 1007),
        (close_frame(1005), 1002),
        (frame(TEXT, "x" * 1001), 1009),
        (b"GET / HTTP/1.1\r\n\r\n", 1002),
    ],
)
async def test_hostile_frames_after_the_upgrade(autojump_clock: MockClock, data: bytes, code: int) -> None:
    async with serving() as port:
        peer = port.connect()
        await peer.write(upgrade_request() + data)
        await peer.head()
        assert code_of(await peer.next()) == code
        assert await peer.next() is None
        await peer.stream.aclose()


# ---- real sockets


@asynccontextmanager
async def listening(context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Port, int]]:
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with trio.open_nursery() as nursery:
        port = Port(nursery, ROUTES, Gate(None), HttpLimits())

        async def handle(stream: trio.SocketStream) -> None:
            await port.handle(stream if context is None else trio.SSLStream(stream, context, server_side=True))

        nursery.start_soon(trio.serve_listeners, handle, [listener])
        yield port, listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


def reset(stream: trio.SocketStream) -> None:
    stream.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


@pytest.mark.trio
async def test_resets_at_every_point_and_the_next_client_is_served() -> None:
    points = [
        b"",
        b"GET",
        ask(),
        ask() * 3,
        ask("/nowhere"),
        b"\x16\x03\x01",
        upgrade_request()[:50],
        upgrade_request(),
    ]
    points += [upgrade_request() + more for more in (frame(TEXT, "x"), frame(TEXT, "x")[:3], close_frame(1000))]
    async with listening() as (_, number):
        for data in points * 3:
            stream = await trio.open_tcp_stream("127.0.0.1", number)
            await stream.send_all(data)
            reset(stream)
        stream = await trio.open_tcp_stream("127.0.0.1", number)
        assert await get(Peer(stream), ask()) == (200, b"well\n")
        stream = await trio.open_tcp_stream("127.0.0.1", number)
        peer = Peer(stream)
        await peer.write(upgrade_request() + frame(TEXT, "hello"))
        await peer.head()
        assert await peer.next() == (TEXT, b"hello")
        await peer.write(close_frame(1000))
        assert await peer.next() == (CLOSE, b"\x03\xe8")
        assert await peer.next() is None
        await stream.aclose()


@pytest.mark.trio
async def test_plain_http_to_a_tls_port_ends_the_connection() -> None:
    """No certificate is needed for that: the handshake does not come so far."""
    async with listening(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) as (port, number):
        for data in (ask(), b"\x16\x03\x01\x00\x05hello", b""):
            stream = await trio.open_tcp_stream("127.0.0.1", number)
            await stream.send_all(data)
            await stream.send_eof()
            assert b"well" not in await Peer(stream).rest()
            await stream.aclose()
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert port.returned == 3
