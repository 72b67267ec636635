"""The client as a library, with the real server."""

import math
import os
import signal
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.client.fake_devices import FakeMicrophone, FakeSpeaker
from tests.client.peers import names, nap, run, silence, to_the_loss
from tests.e2e.real_app import real_app
from tests.server import processes
from tests.server.fake_worker import FakeVoiceChat
from voicechat_client import (
    Answer,
    BusyError,
    Key,
    LostError,
    SessionOptions,
    SessionRefusedError,
    UnauthorisedError,
    connect,
)
from voicechat_client.talk import TalkReport
from voicechat_client.talking import hold
from voicechat_client.tools import answering
from voicechat_core import wire
from voicechat_core.audio import float_to_pcm16, read_audio
from voicechat_core.errors import InputError
from voicechat_core.offline import GenerationResult
from voicechat_server.app import Settings
from voicechat_server.auth import Gate
from voicechat_server.protocol import Limits

SPOKEN = Path(__file__).parents[1] / "data" / "spoken.wav"
SECRET = "s3cret"


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


def test_keys() -> None:
    async def main() -> None:
        async with real_app(Gate(Key(SECRET))) as (place, _):
            for key in (SECRET, Key(SECRET)):
                async with connect(place, key=key) as conversation:
                    assert conversation.created.session.state == "configuring"
            for wrong in (None, "another"):
                with pytest.raises(UnauthorisedError, match="VOICECHAT_API_KEY"):
                    async with connect(place, key=wrong):
                        pass

    run(main)


def test_busy() -> None:
    async def main() -> None:
        async with real_app() as (place, app), connect(place):
            with pytest.raises(BusyError, match="another session is active"):
                async with connect(place):
                    pass
            assert app.admission.taken == 1

    run(main)


def test_names_are_those_of_generate() -> None:
    """All of them, but for the audio and what only the server knows."""
    names = {each.name for each in fields(GenerationResult)} - {"audio", "tts_prompt_steps", "tts_context_frames"}
    assert names <= set(Answer().as_dict())


# ---- calls


async def roll(arguments: dict[str, Any]) -> object:
    return f"five of {arguments['sides']}"


def test_calls_are_answered_by_the_clients_tools() -> None:
    async def main() -> None:
        model, answer = FakeVoiceChat(calling={2, 9}), Answer()

        async def until_given(count: int) -> None:
            while len(model.outputs) < count:
                await trio.sleep(0.01)

        async def speak() -> None:
            await conversation.append(silence(5 * 1280))
            await until_given(1)
            await conversation.respond("call_2_0", "again")
            await conversation.append(silence(7 * 1280))
            await until_given(2)
            await conversation.commit()

        async with real_app(voicechat=model) as (place, _), connect(place) as conversation:
            await conversation.update(SessionOptions(function_calls=True))
            async with (
                answering(conversation, {"roll_dice": roll}, told=print) as called,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(speak)
                async for event in conversation:
                    answer.add(event)
                    called(event)
        assert [(call_id, output) for _, call_id, output in model.outputs] == [
            ("call_2_0", "five of 6"), ("call_9_0", "five of 6"),
        ]  # fmt: skip
        assert [call.frame_index for call in answer.function_calls] == [2, 9]
        assert (answer.ended, [error.code for error in answer.errors]) == ("done", ["invalid_request"])
        assert "'call_2_0'" in answer.errors[0].message  # by the model or before it: it has it already

    run(main)


def test_an_output_that_the_server_refuses_is_answered_shortly() -> None:
    """It does not name the call; and is told to take less than it would by itself."""
    told: list[str] = []

    async def long(arguments: dict[str, Any]) -> object:
        return "x" * 60

    async def main() -> None:
        model, settings = FakeVoiceChat(calling={2}), Settings(model="fake", limits=Limits(output_chars=50))
        async with real_app(settings=settings, voicechat=model) as (place, _), connect(place) as conversation:
            await conversation.update(SessionOptions(function_calls=True))
            async with answering(conversation, {"roll_dice": long}, told=told.append) as called:
                await conversation.append(silence(5 * 1280))
                async for event in conversation:
                    called(event)
                    if isinstance(event, wire.Error):
                        while not model.outputs:
                            await trio.sleep(0.01)
                        await conversation.commit()
        assert [output for _, _, output in model.outputs] == [{"error": "the result was refused"}]

    run(main)
    refusal = "conversation.item.create: item.output has 62 characters as JSON; at most 50 are taken"
    assert told == [f"tool roll_dice: the server refused its result: {refusal}"]


def test_a_talk_answers_calls_too() -> None:
    async def main() -> None:
        model, answer = FakeVoiceChat(calling={2}), Answer()
        async with real_app(voicechat=model) as (place, _), trio.open_nursery() as nursery:
            microphone, speaker = FakeMicrophone(nursery), FakeSpeaker(nursery)

            async def end() -> None:
                while not model.outputs:
                    await trio.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)

            nursery.start_soon(end)
            options = SessionOptions(function_calls=True)
            talking = partial(hold, partial(connect, place), microphone, speaker, options=options, half_duplex=False)
            await talking(answer=answer, counts=TalkReport(), tools={"roll_dice": roll})
        assert [output for _, _, output in model.outputs] == ["five of 6"]
        assert [call.name for call in answer.function_calls] == ["roll_dice"]  # type: ignore[union-attr]
        assert answer.ended == "done"

    run(main)
