"""The transport: what peers do, and that nothing but ``Gone`` comes of it. Memory streams and a mock clock.

``converse`` runs ``upgrade`` on one end of a pair. After each hostile peer it has returned normally, or the test's own
nursery would raise; the clock says how long it took.
"""

import socket as sockets
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from tests.server.frames import ACCEPT, BINARY, CLOSE, KEY, PING, PONG, TEXT, Peer, close_frame, code_of, frame
from voicechat_server.transport import (
    Gone,
    Handshake,
    SocketLimits,
    Talk,
    Transport,
    hang_up,
    memory_transport,
    remote_address,
    upgrade,
)

HANDSHAKE = Handshake("/v1/realtime", KEY)
Pair = tuple[trio.abc.Stream, trio.abc.Stream]
MemoryStream = trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream]


@asynccontextmanager
async def converse(
    talk: Talk, *, pair: Pair | None = None, limits: SocketLimits | None = None, handshake: Handshake = HANDSHAKE
) -> AsyncIterator[Peer]:
    """A peer whose handshake is answered; at the end the server has let go of its stream."""
    ours, theirs = pair or memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: upgrade(ours, handshake, talk, limits=limits))
        peer = Peer(theirs)
        head = await peer.head()
        assert head.startswith(b"HTTP/1.1 101 ")
        assert b"sec-websocket-accept: " + ACCEPT in head.lower().replace(ACCEPT.lower(), ACCEPT)
        yield peer
    with pytest.raises(trio.ClosedResourceError):
        await ours.send_all(b"x")


class Heard:
    """A talk that receives until the peer is gone, then says how."""

    def __init__(self) -> None:
        self.messages: list[str | bytes] = []
        self.code: int | None = -1

    async def __call__(self, socket: Transport) -> None:
        try:
            while True:
                self.messages.append(await socket.receive())
        except Gone as gone:
            self.code = gone.code
            raise


async def echo(socket: Transport) -> None:
    while True:
        message = await socket.receive()
        await socket.send(message if isinstance(message, str) else message.hex())


async def forever(act: Callable[[], Awaitable[None]]) -> None:
    while True:
        await act()


async def hear_all(peer: Peer) -> list[tuple[int, bytes]]:
    frames = []
    while (got := await peer.next()) is not None:
        frames.append(got)
    return frames


# ---- the peaceful


@pytest.mark.trio
async def test_messages_go_both_ways_and_a_close_is_answered(autojump_clock: MockClock) -> None:
    async with converse(echo) as peer:
        await peer.write(frame(TEXT, "grüß dich"))
        assert await peer.next() == (TEXT, "grüß dich".encode())
        await peer.write(frame(BINARY, b"\x00\xff"))
        assert await peer.next() == (TEXT, b"00ff")
        await peer.write(frame(PING, b"here?"))
        assert await peer.next() == (PONG, b"here?")
        await peer.write(close_frame(1000, b"thanks"))
        assert code_of(await peer.next()) == 1000
        assert await peer.next() is None
        await peer.stream.aclose()
    assert trio.current_time() == 0.0


@pytest.mark.trio
async def test_byte_by_byte_and_in_fragments(autojump_clock: MockClock) -> None:
    heard = Heard()
    async with converse(heard) as peer:
        for byte in frame(TEXT, "one") + frame(TEXT, "tw", first=TEXT) + frame(PING) + frame(0, "o"):
            await peer.write(bytes([byte]))
        assert await peer.next() == (PONG, b"")
        await peer.write(close_frame(4001))
        assert [code_of(each) for each in await hear_all(peer)] == [4001]
        await peer.stream.aclose()
    assert heard.messages == ["one", "two"]
    assert heard.code == 4001


@pytest.mark.trio
async def test_frames_that_came_with_the_request_are_not_lost(autojump_clock: MockClock) -> None:
    first = frame(TEXT, "early")
    async with converse(echo, handshake=Handshake("/", KEY, early=first[:5])) as peer:
        await peer.write(first[5:])
        assert await peer.next() == (TEXT, b"early")
        await peer.stream.aclose()


@pytest.mark.trio
async def test_frames_between_request_and_answer_are_not_lost(autojump_clock: MockClock) -> None:
    ours, theirs = memory_stream_pair()
    await theirs.send_all(frame(TEXT, "early"))
    async with converse(echo, pair=(ours, theirs)) as peer:
        assert await peer.next() == (TEXT, b"early")
        await peer.stream.aclose()


@pytest.mark.trio
async def test_the_subprotocol_is_answered(autojump_clock: MockClock) -> None:
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: upgrade(ours, Handshake("/", KEY, "realtime"), echo))
        head = await Peer(theirs).head()
        await theirs.aclose()
    assert b"sec-websocket-protocol: realtime" in head.lower()


@pytest.mark.trio
@pytest.mark.parametrize(("code", "reason"), [(1000, ""), (1013, "busy"), (1008, "é" * 200)])
async def test_we_close(autojump_clock: MockClock, code: int, reason: str) -> None:
    async def talk(socket: Transport) -> None:
        await socket.close(code, reason)
        await socket.close(1011, "a second time does nothing")
        with pytest.raises(Gone):
            await socket.send("late")
        with pytest.raises(Gone):
            await socket.receive()

    async with converse(talk) as peer:
        got = await peer.next()
        assert code_of(got) == code
        assert got is not None
        assert reason.startswith(got[1][2:].decode())
        assert len(got[1]) > 2 or not reason
        await peer.write(close_frame(code))
        assert await peer.next() is None
        await peer.stream.aclose()
    assert trio.current_time() == 0.0


async def _return(socket: Transport) -> None:
    pass


async def _fail(socket: Transport) -> None:
    raise ValueError("a secret of ours")


async def _fail_inside(socket: Transport) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_fail, socket)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("talk", "payload"),
    [(_return, b"\x03\xe8"), (_fail, b"\x03\xf3internal error"), (_fail_inside, b"\x03\xf3internal error")],
)
async def test_a_talk_that_ends_without_close(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, talk: Talk, payload: bytes
) -> None:
    async with converse(talk) as peer:
        assert await peer.next() == (CLOSE, payload)
        await peer.stream.aclose()
    assert ("a secret of ours" in caplog.text) == (talk is not _return)


@pytest.mark.trio
@pytest.mark.parametrize("way", ["ping", "message", "half a frame"])
async def test_a_cancelled_talk_says_1001(autojump_clock: MockClock, way: str) -> None:
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                await upgrade(ours, HANDSHAKE, Heard())
            assert scope.cancelled_caught

        nursery.start_soon(run)
        peer = Peer(theirs)
        await peer.head()
        await peer.write({"ping": frame(PING), "message": frame(TEXT, "x"), "half a frame": frame(TEXT, "x")[:3]}[way])
        await wait_all_tasks_blocked()
        scope.cancel()
        frames = await hear_all(peer)
        assert code_of(frames[-1]) == 1001
        assert [opcode for opcode, _ in frames] == ([PONG, CLOSE] if way == "ping" else [CLOSE])
        await theirs.aclose()


# ---- the hostile


@pytest.mark.trio
@pytest.mark.parametrize("pings", [1, 50])
async def test_pings_while_we_close(autojump_clock: MockClock, pings: int) -> None:
    """The library's reader raises LocalProtocolError; the peer has our close frame all the same, and no reset."""

    async def talk(socket: Transport) -> None:
        await socket.close(1000, "done")

    async with converse(talk) as peer:
        assert await peer.next() == (CLOSE, b"\x03\xe8done")
        await peer.write(frame(PING) * pings + close_frame(1000))
        assert await peer.next() is None
        await peer.stream.aclose()
    assert trio.current_time() == 0.0


@pytest.mark.trio
async def test_pings_behind_the_message_that_makes_us_close(autojump_clock: MockClock) -> None:
    async def talk(socket: Transport) -> None:
        await socket.receive()
        await socket.close(1000, "done")

    async with converse(talk) as peer:
        await peer.write(frame(TEXT, "end") + frame(PING) * 50 + frame(TEXT, "more") * 50)
        frames = await hear_all(peer)
        await peer.stream.aclose()
    assert frames[-1] == (CLOSE, b"\x03\xe8done")
    assert {opcode for opcode, _ in frames[:-1]} <= {PONG}


@pytest.mark.trio
@pytest.mark.parametrize(
    ("bytes_", "code"),
    [
        (frame(TEXT, b"\xff\xfe"), 1007),
        (frame(TEXT, b"ok \xe2\x82"), 1007),
        (close_frame(999), 1002),
        (close_frame(1005), 1002),
        (close_frame(1006), 1002),
        (close_frame(1015), 1002),
        (close_frame(1000, b"\xff"), 1007),
        (frame(CLOSE, b"\x03"), 1002),
        (frame(TEXT, "unmasked", masked=False), 1002),
        (frame(TEXT, "reserved bits", first=0xF1), 1002),
        (frame(3, "reserved opcode"), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(PING, b"x", first=PING), 1002),
        (frame(0, "continues nothing"), 1002),
        (frame(TEXT, "a", first=TEXT) + frame(TEXT, "b"), 1002),
        (b"\x81\xff" + b"\xff" * 8, 1002),
    ],
)
async def test_what_is_no_frame_gets_a_close_frame(autojump_clock: MockClock, bytes_: bytes, code: int) -> None:
    heard = Heard()
    async with converse(heard) as peer:
        await peer.write(frame(TEXT, "first") + bytes_ + frame(TEXT, "last"))
        frames = await hear_all(peer)
        await peer.stream.aclose()
    assert [code_of(each) for each in frames] == [code]
    assert (heard.messages, heard.code) == (["first"], code)


@pytest.mark.trio
async def test_close_frames_without_a_code(autojump_clock: MockClock) -> None:
    heard = Heard()
    async with converse(heard) as peer:
        await peer.write(frame(CLOSE) + frame(PING) * 3)
        assert [opcode for opcode, _ in await hear_all(peer)] == [CLOSE]
        await peer.stream.aclose()
    assert heard.code == 1005


@pytest.mark.trio
@pytest.mark.parametrize("opcode", [TEXT, BINARY])
async def test_the_longest_message_and_one_that_is_longer(autojump_clock: MockClock, opcode: int) -> None:
    heard = Heard()
    async with converse(heard, limits=SocketLimits(message_chars=1000)) as peer:
        await peer.write(frame(opcode, b"x" * 1000))
        await peer.write(frame(opcode, b"y" * 1001) * 3 + frame(PING) * 3)
        frames = await hear_all(peer)
        await peer.stream.aclose()
    assert [code_of(each) for each in frames] == [1009]
    assert [len(each[1]) for each in frames if each] == [2]  # and no words, which would be the library's
    assert [len(message) for message in heard.messages] == [1000]
    assert heard.code == 1009


@pytest.mark.trio
async def test_a_message_in_a_thousand_fragments_is_as_long_as_all_of_them(autojump_clock: MockClock) -> None:
    heard = Heard()
    async with converse(heard, limits=SocketLimits(message_chars=1000)) as peer:
        await peer.write(frame(TEXT, "x", first=TEXT) + frame(0, "x", first=0) * 1000)
        assert [code_of(each) for each in await hear_all(peer)] == [1009]
        await peer.stream.aclose()


@pytest.mark.trio
@pytest.mark.parametrize("babble", [frame(0, "", first=0), frame(PONG, b"x" * 100)])
async def test_bytes_without_end_that_make_no_message(autojump_clock: MockClock, babble: bytes) -> None:
    """The library would keep each empty fragment. 300 bytes are what two waiting messages and two more may have."""
    heard = Heard()
    limits = SocketLimits(message_chars=75, waiting_messages=2)
    most = 300 + 65536
    async with converse(heard, limits=limits) as peer:
        await peer.write(frame(TEXT, "x" * 70) * 2000)  # more bytes in a row, but messages
        await wait_all_tasks_blocked()
        await peer.write(frame(TEXT, "y", first=TEXT))
        await peer.write(babble * ((most - 7) // len(babble)))
        await wait_all_tasks_blocked()
        assert (len(heard.messages), heard.code) == (2000, -1)
        await peer.write(babble * 20)
        assert [code_of(each) for each in await hear_all(peer)] == [1009]
        await peer.stream.aclose()
    assert (len(heard.messages), heard.code) == (2000, 1009)


@pytest.mark.trio
@pytest.mark.parametrize("data", [b"", frame(TEXT, "hello")[:4], frame(PING)[:1]])
async def test_a_peer_that_vanishes(autojump_clock: MockClock, data: bytes) -> None:
    heard = Heard()
    async with converse(heard) as peer:
        await peer.write(data)
        await peer.stream.aclose()
    assert (heard.messages, heard.code) == ([], 1006)


@pytest.mark.trio
async def test_what_was_said_before_leaving_is_heard(autojump_clock: MockClock) -> None:
    heard = Heard()
    async with converse(heard) as peer:
        await peer.write(frame(TEXT, "a") + frame(TEXT, "b"))
        await peer.stream.aclose()
    assert (heard.messages, heard.code) == (["a", "b"], 1006)


@pytest.mark.trio
async def test_a_peer_that_leaves_before_it_is_answered(autojump_clock: MockClock) -> None:
    ours, theirs = memory_stream_pair()
    await theirs.aclose()
    heard = Heard()
    await upgrade(ours, HANDSHAKE, heard)
    assert heard.code in (-1, 1006)


@pytest.mark.trio
async def test_a_peer_that_does_not_read_the_answer(autojump_clock: MockClock) -> None:
    ours, _theirs = lockstep_stream_pair()
    heard = Heard()
    await upgrade(ours, HANDSHAKE, heard, limits=SocketLimits(accept_seconds=7.0))
    assert heard.code == -1  # there was no conversation
    assert trio.current_time() == 7.0
    with pytest.raises(trio.ClosedResourceError):
        await ours.send_all(b"x")


@pytest.mark.trio
async def test_a_peer_that_never_answers_our_close(autojump_clock: MockClock) -> None:
    async def talk(socket: Transport) -> None:
        await socket.close(1008, "idle")

    async with converse(talk) as peer:
        assert await peer.next() == (CLOSE, b"\x03\xf0idle")
        before = trio.current_time()
    assert trio.current_time() - before == 2.0


@pytest.mark.trio
async def test_a_peer_that_never_reads_cannot_hold_a_send_or_a_close(autojump_clock: MockClock) -> None:
    times: list[float] = []

    async def talk(socket: Transport) -> None:
        with trio.move_on_after(10):
            await socket.send("x" * 1000)
        times.append(trio.current_time())
        with pytest.raises(Gone):
            await socket.send("y")
        with pytest.raises(Gone):
            await socket.receive()
        await socket.close(1008, "slow consumer")
        times.append(trio.current_time())

    ours, theirs = lockstep_stream_pair()
    async with converse(talk, pair=(ours, theirs)) as peer:
        await trio.sleep(20)  # by the mock clock
        torn = await peer.rest()
    assert times == [10.0, 10.0]
    assert torn == b"\x81\x7e\x03\xe8" + b"x" * 1000  # and no close frame behind it


@pytest.mark.trio
async def test_close_is_bounded_while_another_send_waits(autojump_clock: MockClock) -> None:
    async def talk(socket: Transport) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_until_gone, socket)
            await wait_all_tasks_blocked()
            before = trio.current_time()
            await socket.close(1008, "slow consumer")
            assert trio.current_time() - before == 2.0

    async with converse(talk, pair=lockstep_stream_pair()):
        await trio.sleep(20)


async def _send_until_gone(socket: Transport) -> None:
    with pytest.raises(Gone):
        await forever(lambda: socket.send("x" * 1000))


def stalling(stream: MemoryStream, calls: list[int]) -> None:
    """Let a stream take its first write, then ten bytes of each other."""
    original = stream.send_stream.send_all

    async def slow(data: bytes | bytearray | memoryview) -> None:
        calls.append(len(data))
        handshake = len(calls) == 1
        await original(data if handshake else bytes(data)[:10])
        if not handshake:
            await trio.sleep_forever()

    stream.send_stream.send_all = slow  # type: ignore[method-assign]


@pytest.mark.trio
async def test_after_half_a_frame_nothing_is_sent(autojump_clock: MockClock) -> None:
    """A close frame would be read as the rest of the first."""
    ours, theirs = memory_stream_pair()
    calls: list[int] = []
    stalling(ours, calls)

    async def talk(socket: Transport) -> None:
        with trio.move_on_after(1):
            await socket.send("x" * 100)
        await socket.close(1008, "slow consumer")

    async with converse(talk, pair=(ours, theirs)) as peer:
        assert await peer.rest() == b"\x81\x64" + b"x" * 8
        await peer.stream.aclose()
    assert calls == [129, 102, 1]  # the last is the look of ``converse`` whether the stream is closed
    assert trio.current_time() == 1.0


@pytest.mark.trio
async def test_after_half_a_pong_nothing_is_sent(autojump_clock: MockClock) -> None:
    """The same, where the library's reader was writing."""
    ours, theirs = memory_stream_pair()
    calls: list[int] = []
    stalling(ours, calls)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: upgrade(ours, HANDSHAKE, Heard()))
        peer = Peer(theirs)
        await peer.head()
        await peer.write(frame(PING, b"x" * 100))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            assert await peer.rest() == b"\x8a\x64" + b"x" * 8
    assert calls == [129, 102]


@pytest.mark.trio
async def test_a_cancelled_receive_loses_nothing(autojump_clock: MockClock) -> None:
    heard = Heard()

    async def talk(socket: Transport) -> None:
        with trio.move_on_after(1):
            await socket.receive()
        await heard(socket)

    async with converse(talk) as peer:
        await trio.sleep(2)
        await peer.write(frame(TEXT, "a"))
        await peer.stream.aclose()
    assert heard.messages == ["a"]


@pytest.mark.trio
async def test_pings_are_answered_while_up_to_eight_messages_wait(autojump_clock: MockClock) -> None:
    go = trio.Event()

    async def talk(socket: Transport) -> None:
        await go.wait()
        for _ in range(9):
            await socket.receive()
        await socket.close(1000, "")

    async with converse(talk) as peer:
        await peer.write(frame(TEXT, "x") * 8 + frame(PING, b"1"))
        assert await peer.next() == (PONG, b"1")
        await peer.write(frame(TEXT, "x") + frame(PING, b"2"))
        with trio.move_on_after(60):
            raise AssertionError(f"{await peer.next()} was read while nine messages waited")
        go.set()
        assert await peer.next() == (PONG, b"2")
        assert code_of(await peer.next()) == 1000
        await peer.stream.aclose()


@pytest.mark.trio
async def test_a_flood_of_pings_to_a_peer_that_reads_no_pongs(autojump_clock: MockClock) -> None:
    async def talk(socket: Transport) -> None:
        await trio.sleep(5)
        await socket.close(1008, "idle")

    ours, theirs = lockstep_stream_pair()
    async with converse(talk, pair=(ours, theirs)) as peer:
        with pytest.raises(trio.BrokenResourceError):
            await forever(lambda: peer.write(frame(PING) * 100))
    assert trio.current_time() == 7.0  # five that the talk takes, two for the close


# ---- real sockets


@asynccontextmanager
async def connected(handler: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[trio.SocketStream]:
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handler, [listener])
        stream = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        yield stream
        await stream.aclose()
        await wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_who_is_cut_off_in_mid_message_still_learns_why() -> None:
    """Without hearing the peer out the socket is reset, and the close frame taken back."""

    async def serve(stream: trio.SocketStream) -> None:
        await upgrade(stream, HANDSHAKE, Heard(), limits=SocketLimits(message_chars=1000))

    async with connected(serve) as stream:
        peer = Peer(stream)
        await peer.head()
        await peer.write(frame(TEXT, b"x" * 2_000_000))
        assert code_of(await peer.next()) == 1009
        assert await peer.next() is None


@pytest.mark.trio
async def test_a_reset_is_gone() -> None:
    heard = Heard()
    over = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        await upgrade(stream, HANDSHAKE, heard)
        over.set()

    async with connected(serve) as stream:
        await Peer(stream).head()
        stream.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
        stream.socket.close()
        await over.wait()
    assert heard.code == 1006


@pytest.mark.trio
async def test_remote_is_an_address_and_a_port() -> None:
    seen: list[str] = []

    async def serve(stream: trio.SocketStream) -> None:
        async def talk(socket: Transport) -> None:
            seen.append(socket.remote)

        await upgrade(stream, HANDSHAKE, talk)
        assert remote_address(stream) == "unknown"

    async with connected(serve) as stream:
        port = stream.socket.getsockname()[1]
        await Peer(stream).head()
        await stream.aclose()
    assert seen == [f"127.0.0.1:{port}"]
    assert remote_address(memory_stream_pair()[0]) == "unknown"


@pytest.mark.trio
async def test_hang_up_waits_for_a_peer_at_most_two_seconds(autojump_clock: MockClock) -> None:
    ours, theirs = memory_stream_pair()
    await ours.send_all(b"last words")
    with trio.CancelScope() as scope:
        scope.cancel()
        await hang_up(ours)
    assert trio.current_time() == 2.0
    assert await Peer(theirs).rest() == b"last words"
    await hang_up(ours)  # again, and at once
    assert trio.current_time() == 2.0


# ---- in memory


@pytest.mark.trio
async def test_the_memory_transport_is_a_transport(autojump_clock: MockClock) -> None:
    server, peer = memory_transport(unheard=1)
    transport: Transport = server
    await peer.say("a")
    await peer.say(b"b")
    assert [await transport.receive(), await transport.receive()] == ["a", b"b"]
    await transport.send("c")
    assert await peer.hear() == "c"
    await transport.send("d")
    await transport.close(1013, "busy")
    await transport.close(1000, "")
    assert peer.closed == (1013, "busy")
    assert await peer.hear() == "d"
    for over in (peer.hear, lambda: peer.say("x"), transport.receive, lambda: transport.send("x")):
        with pytest.raises(Gone):
            await over()
    assert transport.remote == "memory"


@pytest.mark.trio
async def test_a_memory_peer_leaves(autojump_clock: MockClock) -> None:
    transport, peer = memory_transport()
    await peer.say("last")
    peer.leave(1000)
    with pytest.raises(Gone):
        await transport.send("x")
    assert await transport.receive() == "last"
    with pytest.raises(Gone) as gone:
        await transport.receive()
    assert gone.value.code == 1000
    await transport.close(1000, "")


@pytest.mark.trio
async def test_a_memory_peer_that_does_not_hear(autojump_clock: MockClock) -> None:
    transport, peer = memory_transport()
    with trio.move_on_after(10) as scope:
        await transport.send("x")
    assert scope.cancelled_caught
    for over in (transport.receive, peer.hear):
        with pytest.raises(Gone):
            await over()
