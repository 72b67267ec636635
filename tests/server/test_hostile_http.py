"""What is no request, or a bad one, on the port of a real server: an answer that is documented, then the end."""

import re

import pytest

from tests.server.clients import UPGRADE, calling, said
from tests.server.frames import CLOSE, TEXT, close_frame
from tests.server.server_process import ServerProcess

pytestmark = [pytest.mark.trio, pytest.mark.usefixtures("unharmed")]

HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2

# What is sent, and the status it gets. Nothing behind it is answered.
NO_REQUESTS = {
    "TLS": (CLIENT_HELLO, 400),
    "zeros": (b"\x00" * 1000, 400),
    "binary": (b"\xff\xfe\xfd\r\n\r\n", 400),
    "words": (b"hello\r\n\r\n", 400),
    "no version": (b"GET /health\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/9.9": (HEALTH.replace(b"1.1", b"9.9"), 505),
    "no Host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "two Hosts": (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "two Hosts, upgrade": (UPGRADE.replace(b"Host: here", b"Host: a\r\nHost: b"), 400),
    "space in a name": (b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "zero in a value": (b"GET /health HTTP/1.1\r\nHost: a\x00\r\n\r\n", 400),
    "two lengths": (HEALTH[:-2] + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "a negative length": (HEALTH[:-2] + b"Content-Length: -1\r\n\r\n", 400),
    "an unknown encoding": (HEALTH[:-2] + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    "a large header": (HEALTH[:-2] + b"Cookie: " + b"c" * 16384 + b"\r\n\r\n", 431),
    "a huge header": (HEALTH[:-2] + b"Cookie: " + b"c" * 2**20 + b"\r\n\r\n", 431),
    "a huge target": (b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\nHost: here\r\n\r\n", 431),
    "many headers": (HEALTH[:-2] + b"A: b\r\n" * 50_000 + b"\r\n", 431),
    "a body": (b"POST /health HTTP/1.1\r\nHost: here\r\nContent-Length: 65\r\n\r\n" + HEALTH, 405),
    "an upgrade elsewhere": (UPGRADE.replace(b"/v1/realtime", b"/v1/other"), 404),
    "an upgrade by POST": (UPGRADE.replace(b"GET", b"POST"), 405),
    "an old WebSocket": (UPGRADE.replace(b"Version: 13", b"Version: 8"), 426),
    "no key": (UPGRADE.replace(b"Sec-WebSocket-Key", b"X-Key"), 400),
    "two keys": (UPGRADE[:-2] + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", 400),
    "a short key": (UPGRADE.replace(b"==", b""), 400),
    "an upgrade with a body": (UPGRADE[:-2] + b"Content-Length: 5\r\n\r\nhello", 400),
    "a foreign page": (UPGRADE[:-2] + b"Origin: https://evil.example\r\n\r\n", 403),
    "no page": (UPGRADE[:-2] + b"Origin: null\r\n\r\n", 403),
}
BODIES = {
    400: b"400 Bad Request\n",
    403: b'{"error": {"message": "origin not allowed for /v1/realtime", "type": "invalid_request_error"}}',
    404: b"404 Not Found\n",
    405: b"405 Method Not Allowed\n",
    426: b"426 Upgrade Required\n",
    431: b"431 Request Header Fields Too Large\n",
    501: b"501 Not Implemented\n",
    505: b"505 HTTP Version Not Supported\n",
}


@pytest.mark.parametrize("name", NO_REQUESTS)
async def test_one_answer_and_the_end(server: ServerProcess, name: str) -> None:
    data, status = NO_REQUESTS[name]
    async with calling(server) as client:
        await client.write(data)
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"\r\nconnection: close" in head.lower()
    assert body == BODIES[status]


async def test_resets_behind_all_of_these(server: ServerProcess) -> None:
    """Health checkers and scanners do that: a plain GET, then an RST."""
    whole = {name: data for name, (data, _) in NO_REQUESTS.items()}
    for data in [
        b"",
        b"G",
        HEALTH[:-1],
        HEALTH,
        HEALTH * 50,
        UPGRADE[:-1],
        UPGRADE + b"\xff" * 100,
        *whole.values(),
    ] * 3:
        async with calling(server) as client:
            await client.write(data)
            client.reset()


async def test_half_closed_sockets(server: ServerProcess) -> None:
    """Who has said all that it wants to say is still answered; half a request is a bad one; silence is nothing."""
    for data, status in (
        (HEALTH, b"200 OK"),
        (HEALTH[:-1], b"400 Bad Request"),
        (CLIENT_HELLO[:5], b"400 Bad Request"),
    ):
        async with calling(server) as client:
            await client.write(data)
            await client.stream.send_eof()
            answer = await client.rest()
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert answer.count(b"HTTP/1.1") == 1
    async with calling(server) as client:
        await client.stream.send_eof()
        assert await client.rest() == b""


async def test_pipelined_requests(server: ServerProcess) -> None:
    """Each is answered in its turn, an upgrade too; what is no request ends them."""
    async with calling(server) as client:
        await client.write(HEALTH * 100 + UPGRADE + said("session.ping"))
        for _ in range(100):
            head = await client.head()
            assert head.startswith(b"HTTP/1.1 200 ")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
            await client.body(int(length[16:]))
        assert (await client.head()).startswith(b"HTTP/1.1 101 ")
        assert [(await client.hear())["type"] for _ in range(2)] == ["session.created", "session.pong"]
        await client.write(close_frame(1000))
        assert await client.next() == (CLOSE, b"\x03\xe8")
        assert await client.next() is None
    async with calling(server) as client:
        await client.write(HEALTH * 2 + b"hello\r\n\r\n" + HEALTH * 2)
        assert re.findall(rb"HTTP/1.1 (\d+)", await client.rest()) == [b"200", b"200", b"400"]


async def test_requests_inside_a_websocket_are_no_frames(server: ServerProcess) -> None:
    async with calling(server) as client:
        await client.write(UPGRADE + HEALTH)
        assert (await client.head()).startswith(b"HTTP/1.1 101 ")
        opcode, payload = await client.next() or (0, b"")
        assert opcode in (TEXT, CLOSE)  # session.created may have come first
        if opcode == TEXT:
            opcode, payload = await client.next() or (0, b"")
        assert (opcode, payload[:2]) == (CLOSE, (1002).to_bytes(2, "big"))
        assert await client.next() is None
