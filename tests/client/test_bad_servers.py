"""Servers that say too much, or nothing: what is taken of it, how long it is waited for, and what is said of it."""

import base64
import json
import math
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from wsproto.events import Request

from tests.client.peers import (
    CREATED,
    DONE,
    PONG,
    QUICK,
    UPDATED,
    Raw,
    Script,
    error_event,
    names,
    nap,
    reads_nothing,
    run,
    scripted,
    silence,
    text_event,
    to_the_loss,
)
from tests.server.frames import PING, TEXT, frame
from tests.server.frames import PONG as PONG_FRAME
from voicechat_client import ClientError, ClientLimits, EndedError, LostError, ServerFaultError, connect
from voicechat_client.conversation import MESSAGE_BYTES
from voicechat_client.link import Link
from voicechat_client.reaching import LinkLimits
from voicechat_core import wire
from voicechat_core.errors import InputError

SPOKEN = Path(__file__).parents[1] / "data" / "spoken.wav"
NEWS = {"type": "session.of_a_later_version"}
SOON = ClientLimits(silent_seconds=0.4, close_seconds=0.3)


def audio_event(index: int) -> dict[str, Any]:
    audio = base64.b64encode(bytes(3528)).decode()
    return {
        "type": "response.audio.delta", "event_id": "e", "frame_index": index, "delta": audio,
        "audio_codes": list(range(31)),
    }  # fmt: skip


# ---- too much


async def answers_without_end(raw: Raw) -> None:
    await raw.begin()
    await raw.hear()
    index = 0
    while True:
        block = range(index, index + 100)
        await raw.stream.send_all(b"".join(frame(TEXT, json.dumps(audio_event(each)), masked=False) for each in block))
        index += 100


def test_frames_without_end() -> None:
    """As many as the input can have are given, then one error with both numbers; and leaving takes no time."""

    async def main() -> None:
        async with scripted(answers_without_end) as place:
            async with connect(place) as conversation:
                await conversation.update()
                await conversation.append(silence(10 * 1280 + 5))
                heard, fault = await to_the_loss(conversation, ServerFaultError)
                assert heard == ["SessionUpdated"] + ["ResponseAudioDelta"] * 11
                assert "gave 12 frames and skipped 0; the 12805 samples" in str(fault)
                with pytest.raises(ServerFaultError):
                    await conversation.append(silence(1))
                began = trio.current_time()
            assert trio.current_time() - began < 0.5

    run(main)


def test_frames_without_end_into_files(tmp_path: Path) -> None:
    """The command: status 10, both numbers, and what could be right is kept, in files that do not grow."""
    out, both = tmp_path / "a.wav", tmp_path / "b.wav"

    async def main() -> None:
        async with scripted(answers_without_end) as place:
            words = ["send", str(SPOKEN), "--url", place, "--out", str(out), "--stereo", str(both), "--json"]
            command = [sys.executable, "-m", "voicechat_client", *words]
            found = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        told = json.loads(found.stdout)
        assert found.returncode == 10
        assert told["error"].startswith(f"the server gave {told['frames'] + 1} frames and skipped 0; the ")
        assert out.stat().st_size == 44 + 2 * 1764 * told["frames"]
        assert told["frames"] <= told["sent_samples"] // 1280 + 2
        assert both.stat().st_size <= 44 + 4 * 1764 * (told["frames"] + 1)

    run(main)


def test_a_flood_of_what_may_be_said_can_be_left() -> None:
    """Ctrl-C cancels: that has its turn while a server says what nobody is given."""

    async def floods(raw: Raw) -> None:
        await raw.begin()
        while True:
            await raw.stream.send_all(frame(TEXT, json.dumps(NEWS), masked=False) * 1000)

    async def main() -> None:
        async with scripted(floods) as place:
            began = trio.current_time()
            with trio.move_on_after(0.3):
                async with connect(place, limits=QUICK) as conversation:
                    await conversation.update()
                    await names(conversation)
            assert trio.current_time() - began < 1.3

    run(main)


COMMITTED = {"type": "input_audio_buffer.committed", "event_id": "e"}
LAG = {
    "type": "session.lag", "event_id": "e", "behind_ms": 5, "frames_waiting": 1, "frames_skipped": 0, "policy": "wait",
}  # fmt: skip


@pytest.mark.parametrize(
    "event", [CREATED, UPDATED, COMMITTED, LAG, PONG, text_event(0)], ids=lambda event: event["type"]
)
def test_what_is_said_without_end(event: dict[str, Any]) -> None:
    async def floods(raw: Raw) -> None:
        await raw.begin()
        while True:
            await raw.stream.send_all(frame(TEXT, json.dumps(event), masked=False) * 100)

    async def main() -> None:
        async with scripted(floods) as place, connect(place) as conversation:
            await conversation.update()
            heard, fault = await to_the_loss(conversation, ServerFaultError)
            assert len(heard) <= 4
            assert f" of {event['type']}; the 1 messages and 0 samples that it was sent" in str(fault)

    run(main)


# ---- messages that are none


def floods(first: bytes, block: bytes) -> Script:
    """Without end, and it reads nothing."""

    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.write(first)
        while True:
            await raw.stream.send_all(block)

    return script


EMPTY = floods(frame(TEXT, first=0x01, masked=False), frame(0, first=0, masked=False) * 1000)
SMALL = ClientLimits(message_chars=2000, message_parts=5000, close_seconds=0.3)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (EMPTY, "in more than 5000 parts (message_parts)"),
        (floods(b"\x01\x00", frame(0, b"xy", first=0, masked=False) * 10), "longer than 2000 characters"),
        (floods(b"\x81\x7f" + struct.pack("!Q", 2**62), b"x" * 65536), "longer than 2000 characters (message_chars)"),
        (floods(frame(TEXT, "y" * 2001, masked=False), b"\x00\x00"), "longer than 2000 characters"),
        (floods(frame(2, b"y" * 2001, masked=False), b"\x00\x00"), "longer than 2000 characters"),
    ],
)
def test_messages_without_end(script: Script, words: str) -> None:
    """Whose message it is, and whose limit."""

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=SMALL) as conversation:
            await conversation.update()
            began = trio.current_time()
            heard, fault = await to_the_loss(conversation, ServerFaultError)
            assert heard == ["SessionUpdated"]
            assert str(fault).startswith("a message of the server ")
            assert words in str(fault)
            assert str(fault).endswith("which is this client's own limit")
        assert trio.current_time() - began < 2

    run(main)


def test_a_message_that_is_too_long_for_what_it_says() -> None:
    """Neither texts nor whatever else a message may hold grow without end."""

    async def main(event: dict[str, Any], words: str) -> None:
        async def script(raw: Raw) -> None:
            await raw.begin(event)
            await trio.sleep_forever()

        async with scripted(script) as place, connect(place) as conversation:
            await conversation.update()
            heard, fault = await to_the_loss(conversation, ServerFaultError)
            assert heard == ["SessionUpdated"]
            assert words in str(fault)

    many = "y" * 10**6
    run(partial(main, text_event(0, many, many), "said 1000000 characters by response.text.delta; the 0 samples"))
    run(partial(main, {**text_event(0), "event_id": many}, "characters; 16408 at most"))
    run(partial(main, error_event("a", many), "error has 1000"))


def test_messages_of_the_size_that_is_allowed() -> None:
    """And many more of them than one may have parts."""

    async def main() -> None:
        event = json.dumps(text_event(0, text="y" * 500))
        halves = [frame(TEXT, event[:300], first=0x01, masked=False), frame(0, event[300:], masked=False)]
        limits = ClientLimits(message_chars=len(event), message_parts=3)

        async def script(raw: Raw) -> None:
            await raw.begin()
            await raw.hear_audio(100)
            await raw.write(b"".join(halves * 100))
            await raw.say(DONE)
            await raw.close()

        async with scripted(script) as place, connect(place, limits=limits) as conversation:
            await conversation.update()
            await conversation.append(silence(100 * 1280))
            assert len(await names(conversation)) == 102

    run(main)


def test_a_server_that_reads_nothing_is_heard() -> None:
    """What is wrong with its message is told at once, though a message of ours waits to be written, and without a limit
    on silence."""

    async def script(raw: Raw) -> None:
        await raw.begin()
        await trio.sleep(0.2)
        await raw.say(text_event(0, text="y" * 2000))
        await trio.sleep_forever()

    async def main() -> None:
        limits = ClientLimits(message_chars=2000, silent_seconds=math.inf, close_seconds=1.0)
        async with scripted(script) as place, connect(place, limits=limits) as conversation:
            await conversation.update()
            began = trio.current_time()
            with pytest.raises(ServerFaultError, match="a message of the server is longer"):
                await conversation.append(silence(16000 * 3600))
            assert trio.current_time() - began < 0.8

    run(main)


def test_pings_without_end_are_no_queue_of_pongs() -> None:
    """Of a server that reads nothing; what else it says is heard."""

    async def script(raw: Raw) -> None:
        await raw.begin()
        for _ in range(2000):
            await raw.stream.send_all(frame(PING, b"x" * 100, masked=False) * 20)
        await raw.say(DONE)
        await trio.sleep_forever()

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            with trio.move_on_after(0.2):
                await conversation.append(silence(16000 * 3600))
            assert (await names(conversation))[-1] == "ResponseDone"

    run(main)


def test_the_latest_ping_is_answered() -> None:
    """By a client whose own message stands before the pong."""
    pongs: list[bytes] = []

    async def script(raw: Raw) -> None:
        await raw.begin()
        await trio.sleep(0.3)
        await raw.write(b"".join(frame(PING, str(index), masked=False) for index in range(100)))
        await trio.sleep(0.3)
        for _ in range(200):
            found = await raw.next()
            assert found is not None
            if found[0] == PONG_FRAME:
                pongs.append(found[1])
                if found[1] == b"99":
                    break
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            with pytest.raises(ClientError):
                await conversation.append(silence(16000 * 3600))

    run(main)
    assert pongs[-1] == b"99"
    assert len(pongs) <= 3


@pytest.mark.parametrize("script", [EMPTY, floods(b"", frame(PING, b"x", masked=False) * 1000)])
def test_floods_can_be_left(script: Script) -> None:
    async def main() -> None:
        limits = ClientLimits(message_parts=10**9, close_seconds=0.3)
        async with scripted(script) as place:
            with trio.move_on_after(0.3) as scope:
                async with connect(place, limits=limits) as conversation:
                    await conversation.update()
                    await names(conversation)
            assert trio.current_time() - scope.deadline < 0.8

    run(main)


def test_others_have_their_turn_between_the_frames_of_one_read() -> None:
    """Ctrl-C, too: a read may hold thousands."""

    async def count(turns: list[None]) -> None:
        while True:
            turns.append(None)
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        ours, theirs = trio.testing.memory_stream_pair()
        link, server, turns = Link(ours, LinkLimits()), Raw(theirs), []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run, Request(host="h", target="/"))
            await server.accept()
            await link.settled.wait()
            await server.write(b"\x01\x00" + b"\x00\x00" * 10000 + b"\x80\x00")
            nursery.start_soon(count, turns)
            message = await link.receive()
            await link.cut()
            nursery.cancel_scope.cancel()
        assert message == ""
        assert len(turns) > 10000

    run(main)


# ---- nothing


def reads(*, pongs: bool, updates: bool = True, then: tuple[Any, ...] = ()) -> Callable[[Raw], Any]:
    """A server that hears all and says nothing but what it is told to."""

    async def script(raw: Raw) -> None:
        await (raw.begin(*then) if updates else _accepts(raw))
        while (found := await raw.next()) is not None:
            if pongs and found[0] == TEXT and json.loads(found[1])["type"] == "session.ping":
                await raw.say(PONG)

    return script


async def _accepts(raw: Raw) -> None:
    await raw.accept()
    await raw.say(CREATED)


@pytest.mark.parametrize(("pongs", "words"), [(True, "though it answers pings"), (False, "nor does it answer a ping")])
@pytest.mark.parametrize("what", ["audio", "commit", "cancel"])
def test_a_server_that_says_nothing_is_waited_for_so_long(pongs: bool, words: str, what: str) -> None:
    async def main() -> None:
        async with scripted(reads(pongs=pongs)) as place, connect(place, limits=SOON) as conversation:
            await conversation.update()
            began = trio.current_time()
            calls = {
                "audio": partial(conversation.append, silence(1280)),
                "commit": conversation.commit,
                "cancel": conversation.cancel,
            }
            await calls[what]()
            heard, lost = await to_the_loss(conversation)
            assert 0.35 < trio.current_time() - began < 1.5
            assert heard == ["SessionUpdated"] + ["SessionPong"] * pongs
            assert words in str(lost)
            assert "for 0.4 s (silent_seconds)" in str(lost)
            assert lost.exit_status == 9
            with pytest.raises(LostError, match="silent_seconds"):
                await conversation.append(silence(1)) if what == "audio" else await conversation.ping()

    run(main)


def test_a_ping_is_waited_for_so_long() -> None:
    """Also where no session was opened: that is all that the command does."""

    async def main(updates: bool) -> None:
        script = reads(pongs=False, updates=updates)
        async with scripted(script) as place, connect(place, limits=SOON) as conversation:
            if updates:
                await conversation.update()
            began = trio.current_time()
            with pytest.raises(LostError, match=r"for 0\.4 s .* nor does it answer a ping"):
                await conversation.ping()
            assert 0.35 < trio.current_time() - began < 1.5

    for updates in (True, False):
        run(partial(main, updates))


def test_who_does_nothing_but_ping_is_owed_nothing_else() -> None:
    """At every look a pong is on its way, and nothing else was ever said."""

    async def script(raw: Raw) -> None:
        await raw.begin()
        while (await raw.hear())["type"] == "session.ping":
            await trio.sleep(0.03)
            await raw.say(PONG)
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=SOON) as conversation:
            await conversation.update()
            for _ in range(40):
                await conversation.ping()
            await conversation.commit()
            assert (await names(conversation))[-1] == "ResponseDone"

    run(main)


def test_who_waits_to_send_is_told_too() -> None:
    async def main() -> None:
        async with scripted(reads_nothing) as place, connect(place, limits=SOON) as conversation:
            await conversation.update()
            with pytest.raises(LostError, match="nor does it answer a ping"):
                await conversation.append(silence(16000 * 3600))

    run(main)


def test_a_server_that_owes_nothing_may_say_nothing() -> None:
    async def main() -> None:
        async with scripted(reads(pongs=False)) as place, connect(place, limits=SOON) as conversation:
            await conversation.update()
            await conversation.append(silence(1279))
            await trio.sleep(1.2)
            await conversation.append(silence(1))

    run(main)


def test_a_slow_server_is_waited_for_as_long_as_it_says_something() -> None:
    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.hear()
        for index in range(5):
            await trio.sleep(0.25)
            await raw.say(audio_event(index))
        assert (await raw.hear())["type"] == "input_audio_buffer.commit"
        with trio.move_on_after(0.1):
            pytest.fail(f"it was asked whether it lives: {await raw.hear()}")
        await raw.say({**DONE, "frame_index": 5})
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=SOON) as conversation:
            await conversation.update()
            await conversation.append(silence(5 * 1280))
            await conversation.commit()
            assert (await names(conversation)).count("ResponseAudioDelta") == 5

    run(main)


def test_a_session_may_take_long_to_open_while_pings_are_answered() -> None:
    """A long prompt; and one that does not come while the server is dead is given up."""

    async def main() -> None:
        async with scripted(reads(pongs=True, updates=False)) as place, connect(place, limits=SOON) as conversation:
            with trio.move_on_after(1.5) as scope:
                await conversation.update()
            assert scope.cancelled_caught
        async with scripted(reads(pongs=False, updates=False)) as place, connect(place, limits=SOON) as conversation:
            with pytest.raises(LostError, match="nor does it answer a ping"):
                await conversation.update()

    run(main)


def test_who_does_not_listen_waits_for_nobody() -> None:
    """At its bound the client reads no further: the silence is its own."""

    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.hear()
        await raw.say(*(audio_event(index) for index in range(12)), {**DONE, "frame_index": 12})
        await raw.close()

    async def main() -> None:
        limits = ClientLimits(silent_seconds=0.4, unread_bytes=1, waiting_messages=1)
        async with scripted(script) as place, connect(place, limits=limits) as conversation:
            await conversation.update()
            await conversation.append(silence(12 * 1280))
            await conversation.commit()
            await trio.sleep(1.0)
            assert (await names(conversation))[-1] == "ResponseDone"

    run(main)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_limit_that_cannot_be(seconds: float) -> None:
    with pytest.raises(InputError, match="silent_seconds is"):
        ClientLimits(silent_seconds=seconds)


def test_no_limit() -> None:
    async def main() -> None:
        limits = ClientLimits(silent_seconds=math.inf, close_seconds=0.3)
        async with scripted(reads(pongs=False)) as place, connect(place, limits=limits) as conversation:
            await conversation.update()
            await conversation.commit()
            with trio.move_on_after(0.3) as scope:
                await names(conversation)
            assert scope.cancelled_caught

    run(main)


# ---- two tasks


def test_one_of_two_commits_is_refused() -> None:
    """Also while the first one waits, and a long append between them is ended where it is."""

    async def main() -> None:
        async with scripted(reads_nothing) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            told: list[str] = []

            async def refused(call: Callable[[], Any]) -> None:
                with pytest.raises(EndedError) as caught:
                    await call()
                told.append(str(caught.value))

            async with trio.open_nursery() as nursery:
                with trio.move_on_after(0.3):
                    await conversation.append(silence(16000 * 3600))
                nursery.start_soon(conversation.commit)
                await nap()
                await refused(conversation.commit)
                await refused(partial(conversation.append, silence(1)))
                nursery.cancel_scope.cancel()
            assert told == ["the input was committed before", "the input was committed; no more of it is taken"]
            with trio.move_on_after(0.1) as scope:
                await conversation.commit()  # the one that was cancelled has not been sent
            assert scope.cancelled_caught

    run(main)


def test_an_append_that_a_commit_overtakes_ends_there() -> None:
    heard: list[str] = []

    async def script(raw: Raw) -> None:
        await raw.begin()
        await nap()
        while (message := await raw.hear())["type"] != "input_audio_buffer.commit":
            heard.append(message["type"])
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(place) as conversation:
            await conversation.update()

            async def append() -> None:
                with pytest.raises(EndedError, match="committed"):
                    await conversation.append(silence(16000 * 60))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(append)
                await trio.testing.wait_all_tasks_blocked()
                await conversation.commit()
            await names(conversation)  # what was handed over has been heard then
            assert conversation.sent_samples == 16000 * len(heard)

    run(main)


def test_the_default_holds_a_quarter_of_an_hour() -> None:
    """Of the largest frames that a server sends, and not much more."""
    event = wire.ResponseAudioDelta(
        event_id="event_0123456789abcdef",
        frame_index=11249,
        delta=bytes(3528),
        audio_codes=(1023,) * 31,
        text_token=100000,
        function_token=100000,
    )
    minutes = ClientLimits().unread_bytes / (len(wire.encode(event)) + MESSAGE_BYTES) / 750
    assert 14 < minutes < 16
