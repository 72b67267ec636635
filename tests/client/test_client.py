"""A conversation: what is sent and heard, with the real server and with scripted ones; back-pressure."""

import json
import math
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
    closes,
    ends,
    names,
    nap,
    reads_nothing,
    real_app,
    run,
    scripted,
    silence,
    text_event,
    to_the_loss,
)
from tests.server import processes
from tests.server.fake_worker import FakeVoiceChat
from tests.server.frames import TEXT, frame
from voicechat_client import (
    Answer,
    ClientLimits,
    EndedError,
    LostError,
    SessionOptions,
    SessionRefusedError,
    connect,
)
from voicechat_core import wire
from voicechat_core.audio import float_to_pcm16, read_audio
from voicechat_core.errors import InputError
from voicechat_server.app import Settings
from voicechat_server.protocol import Limits

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


def test_a_conversation_from_created_to_done() -> None:
    async def main() -> None:
        async with real_app() as (place, app):
            async with connect(place) as conversation:
                assert conversation.created.session.state == "configuring"
                assert conversation.session is None
                updated = await conversation.update(SessionOptions(seed=7, system_prompt="Be kind."))
                assert updated.session.state == "ready"
                assert conversation.session == updated
                for size in (1, 0, 1279, 50000):
                    await conversation.append(silence(size))
                assert conversation.sent_samples == 51280
                assert 0 < await conversation.ping() < 5
                await conversation.commit()
                answer, kinds = Answer(seed=7), []
                async for event in conversation:
                    kinds.append(type(event).__name__)
                    answer.add(event)
                assert answer.frames == math.ceil(51280 / 1280)
                assert answer.text_tokens == list(range(41))
                assert answer.text.startswith("7.3 7.7 ")
                assert answer.ended == "done"
                assert kinds[0] == "SessionUpdated"
                assert kinds[-1] == "ResponseDone"
                assert {"SessionPong", "InputAudioBufferCommitted"} < set(kinds)
                assert await names(conversation) == []
            await nap()
            assert app.admission.free
        opened = app._worker.voicechat.opened[0]  # type: ignore[attr-defined]
        assert (opened["seed"], opened["system_prompt"]) == (7, "Be kind.")

    run(main)


def test_a_partial_frame_can_be_dropped() -> None:
    async def main() -> None:
        async with real_app() as (place, _), connect(place) as conversation:
            await conversation.update()
            await conversation.append(silence(2700))
            await conversation.commit(pad_partial=False)
            assert (await names(conversation)).count("ResponseAudioDelta") == 2

    run(main)


def test_cancel() -> None:
    async def main() -> None:
        async with real_app(frame_seconds=0.01) as (place, app):
            async with connect(place) as conversation:
                await conversation.update()
                await conversation.append(silence(16000 * 60))
                await conversation.cancel()
                answer = Answer()
                async for event in conversation:
                    answer.add(event)
                assert answer.ended == "cancelled"
                assert answer.frames < 700
            await nap()
            assert app.admission.free

    run(main)


def test_leaving_the_block_gives_the_slot_back() -> None:
    async def main() -> None:
        async with real_app(frame_seconds=0.01) as (place, app):
            async with connect(place) as conversation:
                await conversation.update()
                await conversation.append(silence(16000 * 10))
            await nap()
            assert app.admission.free

    run(main)


def test_a_session_that_is_refused_can_be_asked_for_again() -> None:
    async def main() -> None:
        settings = Settings(model="fake", limits=Limits(prompt_chars=5))
        async with real_app(settings=settings) as (place, _), connect(place) as conversation:
            with pytest.raises(SessionRefusedError, match="has 6 characters; at most 5 are taken") as caught:
                await conversation.update(SessionOptions(system_prompt="too lo"))
            assert caught.value.exit_status == 8
            await conversation.update(SessionOptions(system_prompt="short"))
            await conversation.commit()
            kinds = await names(conversation)
            assert kinds == ["Error", "SessionUpdated", "InputAudioBufferCommitted", "ResponseDone"]

    run(main)


def test_the_end_of_a_session_limit_is_told_with_what_was_said() -> None:
    limits = Limits(session_seconds=0.2)

    async def main() -> None:
        async with real_app(settings=Settings(model="fake", limits=limits)) as (place, _), connect(place) as talk:
            await talk.update(SessionOptions())
            heard, lost = await to_the_loss(talk)
            assert heard == ["SessionUpdated", "Error"]
            assert (lost.code, lost.reason) == (1008, "session limit")
            assert "a session may last 0.2 seconds" in str(lost)
            assert lost.exit_status == 9

    run(main)


def test_a_model_that_fails_and_a_server_that_stops() -> None:
    def broken(seed: int, index: int) -> None:
        if index == 2:
            raise RuntimeError

    async def main() -> None:
        async with real_app(voicechat=FakeVoiceChat(broken)) as (place, _), connect(place) as talk:
            await talk.update()
            await talk.append(silence(16000))
            heard, lost = await to_the_loss(talk)
            assert heard.count("ResponseAudioDelta") == 2
            assert lost.code == 1011
            assert "the session is over" in str(lost)
        async with real_app() as (place, app), connect(place) as talk:
            await talk.update()
            app.stop()
            with pytest.raises(LostError, match="shutting down") as caught:
                await names(talk)
            assert caught.value.code == 1001
            for call in (talk.append(silence(1)), talk.commit(), talk.cancel(), talk.ping(), talk.__anext__()):
                with pytest.raises(LostError, match="1001"):
                    await call

    run(main)


def test_sending_all_before_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five minutes, with the server's queue of a second: it can be sent only as fast as the answer is read."""

    async def main() -> None:
        async with real_app(most_input_seconds=1.0) as (place, _), connect(place) as conversation:
            await conversation.update()
            await conversation.append(silence(16000 * 300))
            await conversation.commit()
            answer = Answer()
            async for event in conversation:
                answer.add(event)
            assert answer.frames == 3750

    run(main)


def test_a_real_process_gives_what_generate_gives_and_is_killed(tiny_path: Path, tiny: Any) -> None:
    pcm = float_to_pcm16(read_audio(SPOKEN, 16000), 32768)
    expected = tiny.generate(pcm, system_prompt="Be concise.", seed=5)

    async def main(url: str) -> None:
        async with connect(url) as conversation:
            await conversation.update(SessionOptions(system_prompt="Be concise.", seed=5))
            await conversation.append(pcm)
            await conversation.commit()
            answer = Answer(seed=5)
            async for event in conversation:
                answer.add(event, trio.current_time())
            told = answer.as_dict()
            for name in ("text", "function_text", "text_tokens", "function_tokens", "frames", "sample_rate", "seed"):
                assert told[name] == getattr(expected, name), name
            assert told["transcript"] == (expected.transcript or "")
            assert np.array_equal(answer.audio_codes, expected.audio_codes)
            assert told["seconds"] == expected.seconds

    async def killed(process: processes.Server, url: str) -> None:
        async with connect(url) as conversation:
            await conversation.update()
            await conversation.append(silence(16000))
            await anext(conversation)
            process.process.kill()
            _, lost = await to_the_loss(conversation)
            assert lost.code == 1006
            assert "gone" in str(lost)

    with processes.server("-m", str(tiny_path), "--port", "0") as process:
        url = process.ready()
        trio.run(main, url)
        trio.run(killed, process, url)


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


@pytest.mark.parametrize("samples", [np.zeros(3, np.float32), np.zeros((2, 3), np.int16), np.zeros(3, np.int32)])
def test_samples_of_another_kind_are_refused_here(samples: np.ndarray) -> None:
    async def main() -> None:
        async with real_app() as (place, _), connect(place) as conversation:
            await conversation.update()
            with pytest.raises(InputError, match="int16"):
                await conversation.append(samples)

    run(main)


def test_an_update_is_for_once() -> None:
    async def main() -> None:
        async with real_app() as (place, _), connect(place) as conversation:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(conversation.update)
                while conversation._updating is None:
                    await trio.lowlevel.checkpoint()
                with pytest.raises(InputError, match="once"):
                    await conversation.update()
            with pytest.raises(InputError, match="once"):
                await conversation.update()

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
        for index in range(messages):
            await raw.stream.send_all(frame(TEXT, json.dumps(text_event(index, text="y" * size)), masked=False))
            told[0] += 1
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        limits = ClientLimits(unread_bytes=10 * size)
        async with scripted(script) as place, connect(place, limits=limits) as conversation:
            await conversation.update()
            await trio.sleep(0.5)
            assert 10 <= told[0] < 300  # ours and what the sockets hold; 400 would be 20 MB
            assert conversation._unread <= 11 * (size + 2000)
            heard = [event async for event in conversation]
            texts = [event for event in heard if isinstance(event, wire.ResponseTextDelta)]
            assert [event.frame_index for event in texts] == list(range(messages))
            assert conversation._unread == 0

    run(main)


def test_what_no_server_of_ours_sends_is_bounded() -> None:
    async def endless_fragments(raw: Raw) -> None:
        await raw.begin()
        await raw.write(frame(TEXT, first=0x01, masked=False))
        while True:
            await raw.stream.send_all(frame(0, first=0, masked=False) * 10000)

    async def too_big(raw: Raw) -> None:
        await raw.begin(text_event(0, text="y" * 5000))
        await trio.sleep_forever()

    async def main() -> None:
        limits = ClientLimits(message_chars=2000, close_seconds=0.3)
        for script, code in ((endless_fragments, 1006), (too_big, 1009)):
            async with scripted(script) as place, connect(place, limits=limits) as conversation:
                await conversation.update()
                with pytest.raises(LostError) as caught:
                    await names(conversation)
                assert caught.value.code == code

    run(main)


def test_many_messages_are_no_flood() -> None:
    """Far more bytes than may come without a message."""
    limits = ClientLimits(message_chars=2000)
    assert limits.unheard_bytes < 150_000

    async def main() -> None:
        script = ends(closes(1000), *(text_event(index, text="y" * 1500) for index in range(400)), DONE)
        async with scripted(script) as place, connect(place, limits=limits) as conversation:
            await conversation.update()
            assert len(await names(conversation)) == 402

    run(main)
