"""Every way in which a conversation ends before its end: what had arrived, and what is said of it."""

import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from tests.client.peers import (
    DONE,
    QUICK,
    Raw,
    closes,
    ends,
    error_event,
    names,
    nap,
    run,
    scripted,
    silence,
    text_event,
    to_the_loss,
)
from tests.server.frames import CLOSE, PING, TEXT, frame
from voicechat_client import (
    ClientLimits,
    LostError,
    ServerFaultError,
    connect,
)

# ---- how it ends


async def resets(raw: Raw) -> None:
    await nap()  # a reset takes back what has not been read
    raw.reset()


async def hangs_up(raw: Raw) -> None:
    await raw.stream.aclose()


async def closes_and_resets(raw: Raw) -> None:
    await raw.write(frame(CLOSE, struct.pack("!H", 1011) + b"failed", masked=False))
    await nap()
    raw.reset()


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        (resets, 1006, "server or the network is gone"),
        (hangs_up, 1006, "server or the network is gone"),
        (closes(1000), 1000, "before the end (1000)"),
        (closes(1001, "the server is shutting down"), 1001, "going away (1001 the server is shutting down)"),
        (closes(1008, "slow\nconsumer"), 1008, "by its rules (1008 slow\\nconsumer)"),
        (closes(1009), 1009, "too big (1009)"),
        (closes(1011, "model failure"), 1011, "failed (1011 model failure)"),
        (closes(1013, "busy"), 1013, "try again later"),
        (closes(4321, "odd"), 4321, "(4321 odd)"),
        (closes_and_resets, 1011, "failed"),
    ],
)
def test_a_connection_that_is_lost(how: Callable[[Raw], Awaitable[None]], code: int, words: str) -> None:
    """What had arrived is given first; then, as often as it is asked for, the error, a new one each time."""

    async def main() -> None:
        script = ends(how, text_event(0), error_event("inference_error", "no"), text_event(1))
        async with scripted(script) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            heard, lost = await to_the_loss(conversation)
            assert heard == ["SessionUpdated", "ResponseTextDelta", "Error", "ResponseTextDelta"]
            assert lost.code == code
            assert words in str(lost)
            assert str(lost).isprintable()
            assert "it said" not in str(lost)  # the error was not the last message
            with pytest.raises(LostError) as again:
                await anext(conversation)
            assert again.value is not lost
            assert (str(again.value), again.value.code) == (str(lost), code)
            with pytest.raises(LostError):
                await conversation.append(silence(1))

    run(main)


def test_a_close_frame_is_answered() -> None:
    answers: list[tuple[int, bytes] | None] = []

    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.write(frame(CLOSE, struct.pack("!H", 1001), masked=False))
        answers.extend([await raw.next(), await raw.next()])

    async def main() -> None:
        async with scripted(script) as place, connect(place) as conversation:
            await conversation.update()
            await to_the_loss(conversation)
            await nap()

    run(main)
    assert answers == [(CLOSE, struct.pack("!H", 1001)), None]  # and then we hang up


def test_the_last_words_before_a_loss() -> None:
    async def main() -> None:
        script = ends(closes(1008, "idle timeout"), error_event("invalid_request", "nothing\nwas said"))
        async with scripted(script) as place, connect(place) as conversation:
            await conversation.update()
            _, lost = await to_the_loss(conversation)
            assert str(lost).endswith('(1008 idle timeout); it said: "nothing was said"')

    run(main)


def test_a_loss_while_append_waits() -> None:
    """The server does not read, says why, and resets: both who sends and who listens are told why."""

    async def script(raw: Raw) -> None:
        await raw.begin(text_event(0))
        await nap()
        await raw.write(frame(CLOSE, struct.pack("!H", 1008) + b"slow", masked=False))
        await nap()
        raw.reset()

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            with pytest.raises(LostError) as caught:
                await conversation.append(silence(16000 * 3600))
            assert (caught.value.code, caught.value.reason) == (1008, "slow")
            heard, lost = await to_the_loss(conversation)
            assert "1008 slow" in str(lost)
            assert heard == ["SessionUpdated", "ResponseTextDelta"]

    run(main)


def test_a_server_that_says_no_more_and_reads_nothing() -> None:
    """It has hung up on its side only: who waits to send is told, instead of waiting for ever."""

    async def script(raw: Raw) -> None:
        await raw.begin()
        assert isinstance(raw.stream, trio.SocketStream)
        await trio.sleep(0.2)
        await raw.stream.send_eof()
        await trio.sleep_forever()

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            with pytest.raises(LostError, match="1006"):
                await conversation.append(silence(16000 * 3600))

    run(main)


def test_what_arrived_is_given_when_a_write_fails() -> None:
    """The library drops what it has not read as soon as it cannot write; ours does not."""

    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.hear_audio(200)
        await raw.say(*(text_event(index) for index in range(200)))
        await raw.write(frame(CLOSE, struct.pack("!H", 1011) + b"failed", masked=False))
        await trio.sleep_forever()

    async def main() -> None:
        limits = ClientLimits(unread_bytes=3000, waiting_messages=1, close_seconds=1)
        async with scripted(script) as place, connect(place, limits=limits) as conversation:
            await conversation.update()
            await conversation.append(silence(200 * 1280))
            await nap()  # a few are read, the others wait in the socket
            inner = conversation._link._stream

            async def fails(data: Any) -> None:
                await trio.lowlevel.checkpoint()
                raise trio.BrokenResourceError

            inner.send_all = fails  # type: ignore[method-assign]
            await conversation.append(silence(1))
            heard, lost = await to_the_loss(conversation)
            assert len(heard) == 201
            assert lost.code == 1011

    run(main)


def test_who_cannot_write_hears_why() -> None:
    """The write fails first; the close frame is still on its way."""

    async def script(raw: Raw) -> None:
        await raw.begin()
        await trio.sleep(0.3)
        await raw.write(frame(CLOSE, struct.pack("!H", 1008) + b"slow", masked=False))

    async def fails(data: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise trio.BrokenResourceError

    async def main() -> None:
        async with scripted(script) as place, connect(place) as conversation:
            await conversation.update()
            conversation._link._stream.send_all = fails  # type: ignore[method-assign]
            with pytest.raises(LostError, match="1008 slow"):
                await conversation.append(silence(16000 * 5))

    run(main)


def test_a_loss_while_nobody_listens() -> None:
    """At its bound the client has read no further, yet who sends hears of it, and the block can be left."""

    async def main() -> None:
        script = ends(closes(1011, "failed"), text_event(0), text_event(1))
        limits = ClientLimits(unread_bytes=1, close_seconds=0.3)
        async with scripted(script) as place, connect(place, limits=limits) as conversation:
            await conversation.update()
            await nap()
            with pytest.raises(LostError, match="1011 failed"):
                await conversation.append(silence(16000 * 3))

    run(main)


def test_a_connection_that_takes_nothing_and_says_no_more() -> None:
    async def script(raw: Raw) -> None:
        await raw.begin()
        await trio.sleep(0.2)
        await raw.say(text_event(0))
        await trio.sleep_forever()

    async def fails(data: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise trio.BrokenResourceError

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            await nap()
            conversation._link._stream.send_all = fails  # type: ignore[method-assign]
            await conversation.append(silence(1))
            heard, lost = await to_the_loss(conversation)
            assert heard == ["SessionUpdated", "ResponseTextDelta"]
            assert lost.code == 1006

    run(main)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("not json", "cannot be read"),
        ("[]", "a JSON object is needed"),
        ({"type": "response.done", "event_id": "e"}, "frame_index"),
        ({"type": "response.done\x1b", "event_id": 3}, None),
        ({"type": "of.a.later.version", "any": "thing"}, None),
    ],
)
def test_messages_that_cannot_be_read(message: Any, words: str | None) -> None:
    """A fault, but for types that are not known: those are skipped."""

    async def main() -> None:
        async with scripted(ends(closes(1000), text_event(0), message, DONE)) as place, connect(place) as conversation:
            await conversation.update()
            if words is None:
                assert await names(conversation) == ["SessionUpdated", "ResponseTextDelta", "ResponseDone"]
                return
            heard, lost = await to_the_loss(conversation, ServerFaultError)
            assert heard == ["SessionUpdated", "ResponseTextDelta"]
            assert words in str(lost)
            assert lost.exit_status == 10
            with pytest.raises(ServerFaultError):
                await conversation.commit()

    run(main)


def odd(data: bytes) -> Callable[[Raw], Awaitable[None]]:
    async def how(raw: Raw) -> None:
        await raw.write(data)
        while await raw.next() is not None:
            pass

    return how


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(TEXT, b"\xff\xfe", masked=False), "codec can't decode byte 0xff"),
        (frame(TEXT, b"masked"), "masked"),
        (frame(3, b"reserved", masked=False), "opcode 0x3"),
        (frame(TEXT, b"x", first=0xC1, masked=False), "Reserved bit"),
        (frame(PING, b"x" * 200, masked=False), "Control frame"),
        (frame(0, b"x", masked=False), "CONTINUATION"),
        (frame(CLOSE, b"\x03", masked=False), "1 byte"),
        *(
            (frame(CLOSE, struct.pack("!H", code), masked=False), "CLOSE with invalid code")
            for code in (0, 999, 5000, 65535)
        ),
        *((frame(CLOSE, struct.pack("!H", code), masked=False), "local-only reason") for code in (1005, 1006, 1015)),
        (frame(CLOSE, struct.pack("!H", 1000) + b"\xff", masked=False), "CLOSE reason"),
    ],
)
def test_frames_that_are_none(data: bytes, words: str) -> None:
    """The server's fault, told as such; what came before is given."""

    async def main() -> None:
        async with scripted(ends(odd(data), text_event(0))) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            heard, fault = await to_the_loss(conversation, ServerFaultError)
            assert heard == ["SessionUpdated", "ResponseTextDelta"]
            assert str(fault).startswith("the server does not keep to the WebSocket protocol: ")
            assert words in str(fault)
            with pytest.raises(ServerFaultError):
                await conversation.append(silence(1))

    run(main)


def test_a_server_that_breaks_the_protocol_is_told() -> None:
    told: list[tuple[int, bytes] | None] = []

    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.write(frame(TEXT, b"\xff\xfe", masked=False))
        told.append(await raw.next())

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            await to_the_loss(conversation, ServerFaultError)
            await nap()

    run(main)
    assert told[0] is not None
    assert told[0][0] == CLOSE
    assert told[0][1][:2] == struct.pack("!H", 1007)


def test_a_binary_message_is_a_fault() -> None:
    async def main() -> None:
        async with scripted(ends(odd(frame(2, b"x", masked=False)))) as place, connect(place, limits=QUICK) as talk:
            await talk.update()
            with pytest.raises(ServerFaultError, match="binary"):
                await names(talk)

    run(main)


def test_websocket_pings_are_answered_also_while_we_close() -> None:
    answered: list[tuple[int, bytes] | None] = []

    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.write(frame(PING, b"one", masked=False))
        answered.append(await raw.next())
        closed = await raw.next()
        assert closed is not None
        assert closed[0] == CLOSE
        await raw.write(frame(PING, b"two", masked=False) * 3)
        await raw.write(frame(CLOSE, closed[1], masked=False))

    async def main() -> None:
        async with scripted(script) as place, connect(place) as conversation:
            await conversation.update()
            await nap()
            began = trio.current_time()
        assert trio.current_time() - began < 1  # and not close_seconds
        await nap()
        assert answered == [(10, b"one")]

    run(main)
