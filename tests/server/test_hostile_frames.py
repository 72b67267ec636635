"""What is no WebSocket frame, or a bad one, before a session and in the middle of one: the close code that says so."""

import pytest

from tests.server.clients import Client, append, calling, noise, said
from tests.server.frames import BINARY, CLOSE, PING, PONG, TEXT, close_frame, code_of, frame
from tests.server.server_process import ServerProcess

pytestmark = [pytest.mark.trio, pytest.mark.usefixtures("unharmed")]

LONGEST = 6 * 2**20  # characters of a message

BAD_FRAMES = {
    "bad UTF-8": (frame(TEXT, b"\xff\xfe"), 1007),
    "half a character": (frame(TEXT, b"ok \xe2\x82"), 1007),
    "bad UTF-8 in fragments": (frame(TEXT, b"\xe2", first=TEXT) + frame(0, b"\x28"), 1007),
    "close code 0": (close_frame(0), 1002),
    "close code 999": (close_frame(999), 1002),
    "close code 1004": (close_frame(1004), 1002),
    "close code 1005": (close_frame(1005), 1002),
    "close code 1006": (close_frame(1006), 1002),
    "close code 1015": (close_frame(1015), 1002),
    "a close reason of bad UTF-8": (close_frame(1000, b"\xff"), 1007),
    "half a close code": (frame(CLOSE, b"\x03"), 1002),
    "a long close frame": (close_frame(1000, b"x" * 124), 1002),
    "unmasked": (frame(TEXT, "{}", masked=False), 1002),
    "reserved bits": (frame(TEXT, "{}", first=0xF1), 1002),
    "compressed": (frame(TEXT, "{}", first=0xC1), 1002),
    "opcode 3": (frame(3, "{}"), 1002),
    "opcode 15": (frame(15, "{}"), 1002),
    "a long ping": (frame(PING, b"x" * 126), 1002),
    "a long pong": (frame(PONG, b"x" * 126), 1002),
    "a ping in fragments": (frame(PING, b"x", first=PING), 1002),
    "a continuation of nothing": (frame(0, "{}"), 1002),
    "a message inside another": (frame(TEXT, "{", first=TEXT) + frame(TEXT, "}"), 1002),
    "a length of 2^64 - 1": (b"\x81\xff" + b"\xff" * 8, 1002),
    "a length that could be shorter": (b"\x81\xfe\x00\x01" + b"\x00" * 5, 1002),
    "too long": (frame(TEXT, b" " * (LONGEST + 1)), 1009),
    "too long, binary": (frame(BINARY, b" " * (LONGEST + 1)), 1009),
    "too long, in fragments": (frame(TEXT, b" " * 2**20, first=TEXT) + frame(0, b" " * 2**20, first=0) * 6, 1009),
}


async def judged(client: Client) -> int:
    """The code of the close frame that comes, whatever comes before it; nothing comes behind it."""
    while (got := await client.next()) is not None and got[0] != CLOSE:
        assert got[0] == TEXT
    code = code_of(got)
    assert await client.next() is None
    return code


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_before_a_session_and_in_the_middle_of_one(server: ServerProcess, name: str) -> None:
    data, code = BAD_FRAMES[name]
    async with calling(server) as client:
        await client.upgrade()
        await client.write(data)
        assert await judged(client) == code
    server.wait_until_ready()
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session()
        await client.write(append(noise(10)))
        await client.hear_until("response.audio.delta")
        await client.write(data + said("session.cancel"))
        assert await judged(client) == code


async def test_the_longest_message(server: ServerProcess) -> None:
    async with calling(server) as client:
        await client.upgrade()
        ping = b'{"type": "session.ping"}'
        await client.write(frame(TEXT, ping + b" " * (LONGEST - len(ping))))
        assert [(await client.hear())["type"] for _ in range(2)] == ["session.created", "session.pong"]
        client.reset()


async def test_fragments_with_pings_between_them_are_one_message(server: ServerProcess) -> None:
    text = b'{"type": "session.ping"}'
    async with calling(server) as client:
        await client.upgrade()
        assert (await client.hear())["type"] == "session.created"
        first, *middle = (bytes([byte]) for byte in text)
        await client.write(frame(TEXT, first, first=TEXT))
        for index, byte in enumerate(middle):
            await client.write(frame(PING, b"%d" % index) + frame(0, byte, first=0))
            assert await client.next() == (PONG, b"%d" % index)
        await client.write(frame(0))
        assert (await client.hear())["type"] == "session.pong"
        client.reset()


async def test_a_frame_in_single_bytes(server: ServerProcess) -> None:
    async with calling(server) as client:
        await client.upgrade()
        for byte in said("session.ping"):
            await client.write(bytes([byte]))
        assert [(await client.hear())["type"] for _ in range(2)] == ["session.created", "session.pong"]
        client.reset()


async def test_a_flood_of_pings(server: ServerProcess) -> None:
    """Each is answered in its order, and what comes behind them is heard."""
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session()
        for start in range(0, 5000, 500):
            await client.write(b"".join(frame(PING, b"%d" % number) for number in range(start, start + 500)))
            for number in range(start, start + 500):
                assert await client.next() == (PONG, b"%d" % number)
        await client.write(said("session.ping") * 500)
        assert {(await client.hear())["type"] for _ in range(500)} == {"session.pong"}
        await client.say("session.cancel")
        assert (await client.hear_all())[1].code == 1000


@pytest.mark.parametrize("count", [1, 1000])
async def test_pings_while_the_server_closes(server: ServerProcess, count: int) -> None:
    """Behind the message that makes it close, and behind its close frame: no reset, no second close frame."""
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session()
        await client.write(said("session.cancel") + frame(PING, b"x") * count)
        got = await client.next()
        heard = []
        while got is not None and got[0] != CLOSE:
            heard.append(got)
            got = await client.next()
        assert [opcode for opcode, _ in heard if opcode != PONG] == [TEXT]
        assert got == (CLOSE, b"\x03\xe8cancelled")
        await client.write(frame(PING, b"y") * count + close_frame(1000))
        assert await client.next() is None


@pytest.mark.parametrize("code", [1000, 1001, 1011, 3000, 4999])
async def test_a_client_that_closes_gets_its_code_back(server: ServerProcess, code: int) -> None:
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session()
        await client.write(append(noise(10)) + close_frame(code, "grüße".encode()) + frame(PING) * 10)
        assert await judged(client) == code
    server.wait_until_ready()
    assert server.sessions()[-1]["ended_by"] == "the peer left"


async def test_a_half_closed_websocket_is_over(server: ServerProcess) -> None:
    """There is no such thing: who can say nothing more cannot be talked with."""
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session()
        await client.write(append(noise(10)) + said("input_audio_buffer.commit"))
        await client.stream.send_eof()
        await client.rest()
    server.wait_until_ready()
    assert server.sessions()[-1]["ended_by"] == "the peer left"
