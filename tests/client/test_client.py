"""A conversation: what is sent and heard, with the real server and with scripted ones; back-pressure."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import voicechat_client
from tests.client.peers import (
    CREATED,
    DONE,
    PONG,
    QUICK,
    UPDATED,
    Raw,
    names,
    nap,
    reads_nothing,
    run,
    scripted,
    silence,
    text_event,
)
from tests.server.frames import TEXT, frame
from voicechat_client import (
    ClientLimits,
    EndedError,
    SessionOptions,
    connect,
)
from voicechat_core import wire

SPOKEN = Path(__file__).parents[1] / "data" / "spoken.wav"


def test_it_needs_no_mlx() -> None:
    code = "import sys; sys.modules['mlx'] = None\nimport voicechat_client\nvoicechat_client.Answer().as_dict()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_exported_names() -> None:
    assert all(hasattr(voicechat_client, name) for name in voicechat_client.__all__)
    errors = {name for name in vars(voicechat_client.errors) if name.endswith("Error")}
    assert errors - {"InputError", "VoiceChatError"} <= set(voicechat_client.__all__)


# ---- with the real server


# ---- what is sent


def test_what_goes_out() -> None:
    heard: list[dict[str, Any]] = []

    async def script(raw: Raw) -> None:
        await raw.accept()
        await raw.say(CREATED)
        heard.append(await raw.hear())
        await raw.say(UPDATED)
        for _ in range(6):
            heard.append(await raw.hear())
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(f"ws://{place}/v1/realtime?a=b", key="k") as conversation:
            await conversation.update(SessionOptions(seed=2**64 - 1))
            samples = np.arange(33000).astype(np.int16)
            await conversation.append(samples)
            await conversation.append(samples[:0])
            await conversation.append(samples[::-2][:2])
            await conversation.commit(pad_partial=False)
            with pytest.raises(EndedError, match="committed"):
                await conversation.append(samples)
            with pytest.raises(EndedError, match="committed"):
                await conversation.commit()
            await conversation.cancel()
            assert await names(conversation) == ["SessionUpdated", "ResponseDone"]
        sent = [wire.decode_client(json.dumps(message)) for message in heard]
        assert sent[0] == wire.SessionUpdate(session=SessionOptions(seed=2**64 - 1))
        audio = [each.audio for each in sent[1:5]]
        assert [len(each) for each in audio] == [32000, 32000, 2000, 4]
        assert b"".join(audio[:3]) == samples.astype("<i2").tobytes()
        assert audio[3] == samples[::-2][:2].astype("<i2").tobytes()
        assert sent[5:] == [wire.InputAudioBufferCommit(pad_partial=False), wire.SessionCancel()]

    run(main)


def test_the_request_and_its_key() -> None:
    requests: list[bytes] = []

    async def script(raw: Raw) -> None:
        await raw.accept()
        requests.append(raw.request)
        await raw.say(CREATED, DONE)
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place:
            async with connect(f"http://{place}/a?b=c", key="s3cret"):
                pass
            assert requests[0].startswith(b"GET /a?b=c HTTP/1.1\r\n")
            lines = [line.lower() for line in requests[0].split(b"\r\n")]
            assert b"authorization: bearer s3cret" in lines
            assert f"host: {place}".encode() in lines
            async with connect(place):
                pass
            assert b"authorization" not in requests[1].lower()

    run(main)


def test_pings_are_told_apart() -> None:
    """Three at once, of which one gives up; each gets its own pong."""
    slow = trio.Event()

    async def script(raw: Raw) -> None:
        await raw.begin()
        for _ in range(3):
            await raw.hear()
        await raw.say(PONG)
        await nap()
        await raw.say(PONG)
        await slow.wait()
        await raw.say(PONG, DONE)
        await raw.close()

    async def main() -> None:
        took: dict[str, float] = {}

        async def ping(name: str) -> None:
            took[name] = await conversation.ping()

        async with scripted(script) as place, connect(place) as conversation, trio.open_nursery() as nursery:
            await conversation.update()
            nursery.start_soon(ping, "first")
            await nap()
            with trio.move_on_after(0.01):
                await conversation.ping()
            nursery.start_soon(ping, "third")
            await nap()
            await nap()
            assert set(took) == {"first"}
            slow.set()
            assert (await names(conversation)).count("SessionPong") == 3
        assert took["third"] >= 0.09

    run(main)


def test_a_ping_that_is_never_answered_ends_with_the_conversation() -> None:
    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.hear()
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(place) as conversation:
            await conversation.update()
            with pytest.raises(EndedError):
                await conversation.ping()
            with pytest.raises(EndedError):
                await conversation.append(silence(1))

    run(main)


# ---- back-pressure


def test_append_waits_while_the_server_does_not_read() -> None:
    async def main() -> None:
        async with scripted(reads_nothing) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            with trio.move_on_after(0.5) as scope:
                await conversation.append(silence(16000 * 3600))
            assert scope.cancelled_caught
            assert conversation.sent_samples < 16000 * 600  # what the sockets hold

    run(main)


def test_a_ping_that_was_not_sent_waits_for_no_pong() -> None:
    async def main() -> None:
        async with (
            scripted(reads_nothing) as place,
            connect(place, limits=QUICK) as conversation,
            trio.open_nursery() as nursery,
        ):
            await conversation.update()
            nursery.start_soon(conversation.append, silence(16000 * 3600))
            await trio.sleep(0.3)
            with trio.move_on_after(0.1):
                await conversation.ping()
            assert not conversation._pings
            nursery.cancel_scope.cancel()

    run(main)


def test_events_arrive_while_append_waits() -> None:
    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.hear_audio(100)
        for index in range(100):
            await raw.say(text_event(index))
        await trio.sleep_forever()

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(conversation.append, silence(16000 * 3600))
                for _ in range(101):
                    await anext(conversation)
                nursery.cancel_scope.cancel()

    run(main)


def test_events_that_are_not_taken_are_bounded_and_none_is_lost() -> None:
    """At the bound the client reads no further, so the server cannot write; when there is room, it goes on."""
    told = [0]
    messages, size = 400, 50_000

    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.hear_audio(messages)
        for index in range(messages):
            await raw.stream.send_all(frame(TEXT, json.dumps(text_event(index, text="y" * size)), masked=False))
            told[0] += 1
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        limits = ClientLimits(unread_bytes=10 * size)
        async with scripted(script) as place, connect(place, limits=limits) as conversation:
            await conversation.update()
            await conversation.append(silence(messages * 1280))
            await trio.sleep(0.5)
            assert 10 <= told[0] < 300  # ours and what the sockets hold; 400 would be 20 MB
            assert conversation._unread <= 11 * (size + 2000)
            heard = [event async for event in conversation]
            texts = [event for event in heard if isinstance(event, wire.ResponseTextDelta)]
            assert [event.frame_index for event in texts] == list(range(messages))
            assert conversation._unread == 0

    run(main)
