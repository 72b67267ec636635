"""Peers that take their time, all at once and by the real clock: each is let go in the time that is documented for it.

They wait together, so that the whole takes as long as the longest of them.
"""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.server.clients import UPGRADE, append, calling, converse, noise
from tests.server.frames import CLOSE, TEXT, close_frame
from tests.server.server_process import ServerProcess, serving

pytestmark = [pytest.mark.trio, pytest.mark.usefixtures("unharmed")]

HEADER_SECONDS, WRITE_SECONDS = 3.0, 4.0  # by its options; 10 each if it is not told
CLOSE_SECONDS = 2.0  # for a close frame to be answered, and again for the peer to hang up
LATE = 5.0  # how much later than promised it may be on a busy machine; 10 s, if an option were not obeyed, is too late
TIMED_OUT = b"408 Request Timeout\n"


async def lasts(least: float, most: float, wait: Callable[[], Awaitable[bytes]]) -> bytes:
    """What comes to an end between ``least`` and ``most`` seconds from now."""
    began = trio.current_time()
    result = await wait()
    assert least - 0.1 <= trio.current_time() - began <= most + LATE
    return result


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One with less patience than usual."""
    options = ["--header-seconds", str(HEADER_SECONDS), "--write-seconds", str(WRITE_SECONDS)]
    with serving(tiny_path, tmp_path_factory.mktemp("server") / "log", *options) as process:
        yield process


@contextmanager
def most(seconds: float) -> Iterator[None]:
    began = trio.current_time()
    yield
    assert trio.current_time() - began <= seconds + LATE


async def silent(server: ServerProcess) -> None:
    async with calling(server) as client:
        assert await lasts(HEADER_SECONDS, HEADER_SECONDS, client.rest) == b""


async def half_a_request(server: ServerProcess) -> None:
    async with calling(server) as client:
        await client.write(UPGRADE[:-1])
        assert (await lasts(HEADER_SECONDS, HEADER_SECONDS, client.rest)).endswith(TIMED_OUT)


async def byte_by_byte(server: ServerProcess) -> None:
    async with calling(server) as client, trio.open_nursery() as nursery:

        async def write() -> None:
            for byte in UPGRADE:
                await client.write(bytes([byte]))
                await trio.sleep(0.5)

        nursery.start_soon(write)
        assert (await lasts(HEADER_SECONDS, HEADER_SECONDS, client.rest)).endswith(TIMED_OUT)
        nursery.cancel_scope.cancel()


async def idle_after_an_answer(server: ServerProcess) -> None:
    async with calling(server) as client:
        await client.write(b"GET /nothing HTTP/1.1\r\nHost: here\r\n\r\n")
        assert b"404" in await lasts(HEADER_SECONDS, HEADER_SECONDS, client.rest)


async def refused_and_deaf(server: ServerProcess) -> None:
    """It has its answer, and its close frame; it does not say goodbye."""
    async with calling(server) as client:
        await client.upgrade()
        assert (await client.hear())["error"]["code"] == "server_busy"
        got = await client.next()
        assert got == (CLOSE, (1013).to_bytes(2, "big") + b"busy")
        assert await lasts(0, 2 * CLOSE_SECONDS, client.rest) == b""


async def refused_and_talking(server: ServerProcess) -> None:
    """It has been told to go, and keeps sending."""
    async with calling(server) as client:
        await client.upgrade()
        assert (await client.hear())["error"]["code"] == "server_busy"

        async def talk() -> None:
            while True:
                await client.write(append(noise(1)))
                await trio.sleep(0.05)

        with most(2 * CLOSE_SECONDS), pytest.raises(trio.BrokenResourceError):
            await talk()


async def never_reads(server: ServerProcess, holds: trio.Event) -> None:
    """A session whose answer nobody takes: its socket fills, and some seconds later it is over."""
    async with calling(server, receive_buffer=4096) as client:
        await client.upgrade()
        await client.open_session()
        holds.set()
        await client.write(append(noise(60)))
        began = trio.current_time()
        while not server.is_ready():
            await trio.sleep(0.2)
        assert WRITE_SECONDS - 0.1 <= trio.current_time() - began <= WRITE_SECONDS + 3 * LATE
        assert server.sessions()[-1]["ended_by"] == "slow consumer"
        assert server.sessions()[-1]["code"] == 1008


async def test_all_of_them_and_those_who_are_served_meanwhile(server: ServerProcess) -> None:
    began = time.monotonic()
    async with trio.open_nursery() as nursery:
        holds = trio.Event()
        nursery.start_soon(never_reads, server, holds)
        await holds.wait()
        for peer in (silent, half_a_request, byte_by_byte, idle_after_an_answer, refused_and_deaf, refused_and_talking):
            for _ in range(3):
                nursery.start_soon(peer, server)
        while nursery.child_tasks:
            asked = trio.current_time()
            status, _ = await trio.to_thread.run_sync(server.get, "/health")
            assert status == 200
            assert trio.current_time() - asked < HEADER_SECONDS  # not as long as any of them takes
            await trio.sleep(0.1)
    assert time.monotonic() - began < 40  # one after the other they would take a minute


async def test_who_does_not_answer_a_close_keeps_no_slot(server: ServerProcess) -> None:
    """The next client is served while the server waits for the last one to say goodbye."""
    async with calling(server) as deaf:
        await deaf.upgrade()
        await deaf.open_session()
        await deaf.say("session.cancel")
        while (await deaf.next() or (CLOSE, b""))[0] == TEXT:
            pass
        began = trio.current_time()
        assert len(await converse(server, noise(0.08))) == 1
        assert trio.current_time() - began < CLOSE_SECONDS
        await deaf.write(close_frame(1000))
        assert await deaf.next() is None


async def test_many_who_say_nothing(server: ServerProcess) -> None:
    async with trio.open_nursery() as nursery:
        come, ready = trio.Event(), []

        async def stay() -> None:
            async with calling(server) as client:
                ready.append(client)
                await come.wait()

        for _ in range(80):
            nursery.start_soon(stay)
        while len(ready) < 80:
            await trio.sleep(0.01)
        assert len(await converse(server, noise(0.08))) == 1
        come.set()
