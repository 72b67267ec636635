"""Connections, admission and the app, on a model without a thread and sockets without a network; Trio's mock clock."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, wait_all_tasks_blocked

from tests.server.clients import Client, said
from tests.server.fake_worker import FakeVoiceChat, FakeWorker
from voicechat_core import InputError
from voicechat_server.admission import Admission
from voicechat_server.app import App, Settings
from voicechat_server.auth import Gate
from voicechat_server.http import Request
from voicechat_server.transport import Gone, MemoryPeer, memory_transport
from voicechat_server.worker import FrameTime

REQUEST = Request("GET", "/v1/realtime", "", ())


def run(test: Any) -> None:
    trio.run(test, clock=MockClock(autojump_threshold=0))


def append(frames: float) -> str:
    pcm = np.zeros(int(frames * 1280), "<i2").tobytes()
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})


UPDATE = json.dumps({"type": "session.update", "session": {"seed": 7}})
COMMIT, CANCEL, PING = (json.dumps({"type": name}) for name in (
    "input_audio_buffer.commit", "session.cancel", "session.ping",
))  # fmt: skip


async def hear_all(peer: MemoryPeer) -> list[dict[str, Any]]:
    messages = []
    try:
        while True:
            messages.append(json.loads(await peer.hear()))
    except Gone:
        return messages


async def hear_until(peer: MemoryPeer, kind: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    while not messages or messages[-1]["type"] != kind:
        messages.append(json.loads(await peer.hear()))
    return messages


def kinds(messages: list[dict[str, Any]]) -> list[str]:
    return [message["type"] for message in messages]


class Door(trio.abc.Listener[trio.abc.Stream]):
    """A listener without a network: who knocks comes in."""

    def __init__(self) -> None:
        self._in, self._out = trio.open_memory_channel[trio.abc.Stream](0)

    async def knock(self) -> trio.abc.Stream:
        """The peer's end; what one end sends waits until the other takes it."""
        ours, theirs = lockstep_stream_pair()
        await self._in.send(theirs)
        return ours

    async def accept(self) -> trio.abc.Stream:
        return await self._out.receive()

    async def aclose(self) -> None:
        self._out.close()


class House:
    """An app, and peers that come in."""

    def __init__(self, app: App, worker: FakeWorker, nursery: trio.Nursery) -> None:
        self.app, self.worker, self._nursery = app, worker, nursery

    def enter(self) -> MemoryPeer:
        transport, peer = memory_transport()
        self._nursery.start_soon(self.app._talk, transport, REQUEST)
        return peer

    async def begin(self) -> MemoryPeer:
        """A peer whose session is open."""
        peer = self.enter()
        await hear_until(peer, "session.created")
        await peer.say(UPDATE)
        await hear_until(peer, "session.updated")
        return peer


@asynccontextmanager
async def house(**options: Any) -> AsyncIterator[House]:
    async with FakeWorker(**options) as worker, trio.open_nursery() as nursery:
        await worker.loaded()
        yield House(App(worker, Settings(model="fake"), Gate(None)), worker, nursery)
        nursery.cancel_scope.cancel()


def test_a_conversation_from_created_to_done() -> None:
    async def main() -> None:
        async with house(frame_seconds=0.01) as home:
            peer = await home.begin()
            for _ in range(5):
                await peer.say(append(0.7))
            await peer.say(COMMIT)
            messages = await hear_all(peer)
            audio = [m for m in messages if m["type"] == "response.audio.delta"]
            assert [m["frame_index"] for m in audio] == [0, 1, 2, 3]  # ceil(5 * 0.7)
            assert kinds(messages)[-1] == "response.done"
            assert "input_audio_buffer.committed" in kinds(messages)
            assert peer.closed == (1000, "done")
            assert home.app.admission.taken == 0
            assert home.worker.voicechat.opened[0]["seed"] == 7

    run(main)


def test_a_second_peer_is_busy_and_the_next_is_served() -> None:
    async def main() -> None:
        async with house() as home:
            first = await home.begin()
            second = home.enter()
            refusal = await hear_all(second)
            assert [m["error"]["code"] for m in refusal] == ["server_busy"]
            assert second.closed == (1013, "busy")
            await first.say(CANCEL)
            assert kinds(await hear_all(first)) == ["response.cancelled"]
            assert first.closed == (1000, "cancelled")
            third = await home.begin()
            await third.say(PING)
            assert kinds(await hear_until(third, "session.pong"))[-1] == "session.pong"

    run(main)


def test_the_slot_is_free_before_the_close_frame() -> None:
    """Whoever sees the close may come again at once."""

    async def main() -> None:
        async with house() as home:
            peer = await home.begin()
            transport, other = memory_transport()
            seen: list[bool] = []
            close = transport.close

            async def closing(code: int, reason: str) -> None:
                seen.append(home.app.admission.free)
                await close(code, reason)

            transport.close = closing  # type: ignore[method-assign]
            await peer.say(CANCEL)
            await hear_all(peer)
            home._nursery.start_soon(home.app._talk, transport, REQUEST)
            await hear_until(other, "session.created")
            other.leave()
            await wait_all_tasks_blocked()
            assert seen == [True]

    run(main)


@pytest.mark.parametrize("moment", ["before created", "before update", "during open", "mid frame", "mid close"])
def test_a_peer_that_vanishes_leaves_the_slot(moment: str) -> None:
    async def main() -> None:
        async with house(open_seconds=1.0, frame_seconds=0.5) as home:
            for _ in range(40):
                peer = home.enter()
                if moment != "before created":
                    await hear_until(peer, "session.created")
                if moment not in ("before created", "before update"):
                    await peer.say(UPDATE)
                if moment in ("mid frame", "mid close"):
                    await hear_until(peer, "session.updated")
                    await peer.say(append(3))
                    await hear_until(peer, "response.audio.delta")
                if moment == "mid close":
                    await peer.say(COMMIT)
                await wait_all_tasks_blocked()
                peer.leave()
                await wait_all_tasks_blocked()
                assert home.app.admission.taken == 0
                clean = await home.begin()
                await clean.say(CANCEL)
                await hear_all(clean)
                assert clean.closed == (1000, "cancelled")

    run(main)


def test_pings_and_cancels_do_not_wait_for_queued_audio() -> None:
    """Sixty seconds are queued; a ping is answered, and a cancel obeyed, before two more audio events arrive."""

    async def main() -> None:
        async with house(frame_seconds=0.08) as home:
            peer = await home.begin()
            for _ in range(6):
                await peer.say(append(125))
            await hear_until(peer, "response.audio.delta")
            await peer.say(PING)
            answered = await hear_until(peer, "session.pong")
            assert kinds(answered).count("response.audio.delta") <= 2
            await peer.say(CANCEL)
            rest = await hear_all(peer)
            assert kinds(rest).count("response.audio.delta") <= 2
            assert kinds(rest)[-1] == "response.cancelled"

    run(main)


def test_past_the_input_bound_the_reader_pauses_and_nothing_is_lost() -> None:
    async def main() -> None:
        async with house(frame_seconds=0.001, most_input_seconds=1.0) as home:
            peer = await home.begin()
            async with trio.open_nursery() as nursery:
                said = trio.Event()

                async def talk() -> None:
                    for _ in range(30):
                        await peer.say(append(5))
                    await peer.say(COMMIT)
                    said.set()

                nursery.start_soon(talk)
                messages = await hear_all(peer)
            assert said.is_set()
            assert kinds(messages).count("response.audio.delta") == 150
            assert kinds(messages)[-1] == "response.done"

    run(main)


def test_a_peer_that_does_not_read_is_closed_and_its_slot_freed() -> None:
    async def main() -> None:
        async with house(frame_seconds=0.01) as home:
            peer = await home.begin()
            began = trio.current_time()
            await peer.say(append(50))
            while home.app.admission.taken:
                await trio.sleep(0.5)
            assert trio.current_time() - began < 12  # the write time-out is 10 s, of the mock clock
            assert peer.closed == (1008, "slow consumer")
            await home.begin()

    run(main)


def test_time_limits_close_with_a_word() -> None:
    async def main() -> None:
        async with house() as home:
            idle = home.enter()
            messages = await hear_all(idle)
            assert kinds(messages) == ["session.created", "error"]
            assert idle.closed is not None
            assert idle.closed[0] == 1008
            assert 30 <= trio.current_time() < 33
            silent = await home.begin()
            messages = await hear_all(silent)
            assert kinds(messages) == ["error"]
            assert silent.closed is not None
            assert silent.closed[0] == 1008
            assert home.app.admission.free

    run(main)


def test_a_server_that_stops_says_so() -> None:
    async def main() -> None:
        async with house() as home:
            peer = await home.begin()
            home.app.stop()
            await hear_all(peer)
            assert peer.closed == (1001, "the server is shutting down")
            assert (await home.app._ready()).status == 503

    run(main)


def test_a_peer_that_neither_reads_nor_leaves_does_not_hold_a_server_that_stops() -> None:
    """Its message may take for ever to be written; the server has a deadline of its own."""

    async def main() -> None:
        settings, door = Settings(model="fake", write_seconds=1e6, shutdown_seconds=7), Door()
        async with FakeWorker() as worker, trio.open_nursery() as nursery:
            await worker.loaded()
            app = App(worker, settings, Gate(None))
            over = trio.Event()

            async def serve() -> None:
                await app.run([door])
                over.set()

            nursery.start_soon(serve)
            peer = Client(await door.knock())
            await peer.upgrade()
            assert (await peer.hear())["type"] == "session.created"
            await peer.write(said("session.update"))
            await trio.sleep(100)  # session.updated waits to be read
            assert app.admission.taken == 1
            app.stop()
            stopped = trio.current_time()
            await over.wait()
            assert 7 <= trio.current_time() - stopped < 7 + 2 * settings.socket_limits.close_seconds + 1
            assert app.admission.taken == 0

    run(main)


def test_who_is_refused_and_does_not_read_is_let_go() -> None:
    async def main() -> None:
        async with house() as home:
            await home.begin()
            deaf = home.enter()
            seconds = home.app._settings.http_limits.write_seconds
            await trio.sleep(seconds - 0.1)
            assert deaf.closed is None
            await trio.sleep(0.2)
            assert deaf.closed == (1013, "busy")

    run(main)


def test_health_and_readiness() -> None:
    async def main() -> None:
        async with house() as home:
            assert (await home.app._health()).status == 200
            assert (await home.app._ready()).status == 200
            peer = await home.begin()
            busy = await home.app._ready()
            assert (busy.status, json.loads(busy.body)) == (503, {"ready": False, "why": "busy"})
            peer.leave()
            await wait_all_tasks_blocked()
            assert (await home.app._ready()).status == 200
            await home.worker.stop()
            assert (await home.app._health()).status == 503

    run(main)


def test_a_model_that_still_loads_refuses_with_a_word() -> None:
    async def main() -> None:
        async with FakeWorker(load_seconds=100) as worker, trio.open_nursery() as nursery:
            app = App(worker, Settings(model="fake"), Gate(None))
            transport, peer = memory_transport()
            nursery.start_soon(app._talk, transport, REQUEST)
            messages = await hear_all(peer)
            assert [m["error"]["code"] for m in messages] == ["model_loading"]
            assert peer.closed == (1013, "loading")
            assert (await app._ready()).status == 503
            assert (await app._health()).status == 200

    run(main)


def test_a_frame_that_fails_ends_its_session_only() -> None:
    def broken(seed: int, index: int) -> None:
        if seed == 7 and index == 1:
            raise RuntimeError("/a/path and a library's own words")

    async def main() -> None:
        async with house(voicechat=FakeVoiceChat(broken)) as home:
            peer = await home.begin()
            await peer.say(append(3))
            messages = await hear_all(peer)
            text = json.dumps(messages)
            assert "inference_error" in text
            assert "/a/path" not in text
            assert peer.closed is not None
            assert peer.closed[0] == 1011
            assert home.app.admission.free

    run(main)


def test_what_a_session_asks_for_reaches_the_model() -> None:
    """Without padding three and a tenth frames are three; the server's prompt stands where none is asked for."""

    async def main() -> None:
        async with house() as home:
            home.app._settings = Settings(model="fake", system_prompt="Be kind.")
            peer = await home.begin()
            await peer.say(append(3.1))
            await peer.say(json.dumps({"type": "input_audio_buffer.commit", "pad_partial": False}))
            messages = await hear_all(peer)
            assert kinds(messages).count("response.audio.delta") == 3
            assert home.worker.voicechat.opened[0]["system_prompt"] == "Be kind."

    run(main)


CALLS = json.dumps({"type": "session.update", "session": {"function_calls": True}})


def output(call_id: str, value: object) -> str:
    item = {"type": "function_call_output", "call_id": call_id, "output": value}
    return json.dumps({"type": "conversation.item.create", "item": item})


def test_a_peer_answers_what_the_model_calls() -> None:
    """The next frame that runs is the first that can show it, and a wrong answer costs an error and nothing else."""

    async def main() -> None:
        async with house(voicechat=FakeVoiceChat(calling={2, 5})) as home:
            home.app._settings = Settings(model="fake", tool_seconds=0.1)
            peer = home.enter()
            await hear_until(peer, "session.created")
            await peer.say(CALLS)
            await peer.say(append(4))
            *_, call = await hear_until(peer, "response.function_call_arguments.done")
            assert {**call, "event_id": 0} == {
                "type": "response.function_call_arguments.done", "event_id": 0, "frame_index": 2,
                "call_id": "call_2_0", "name": "roll_dice", "arguments": '{"sides": 6}',
            }  # fmt: skip
            await peer.say(output("call_9_0", "five"))
            await peer.say(output("call_2_0", {"value": 5}))
            *_, refused = await hear_until(peer, "error")
            assert refused["error"] == {
                "code": "invalid_request",
                "message": "conversation.item.create: no call 'call_9_0' waits for an output",
            }
            await peer.say(append(4))
            await hear_until(peer, "response.function_call_arguments.done")
            await peer.say(output("call_5_0", "five"))
            await peer.say(COMMIT)
            assert "error" not in kinds(await hear_all(peer))
            assert home.worker.voicechat.outputs == [(4, "call_2_0", {"value": 5}), (8, "call_5_0", "five")]
            assert home.worker.voicechat.opened[0]["tools"] is True
            assert home.worker.voicechat.opened[0]["tool_wait_frames"] == 2  # 0.1 s
            counted = gauges((await home.app._metrics()).body)
            assert counted["voicechat_function_calls_total"] == 2
            assert counted["voicechat_function_calls_failed_total"] == 0

    run(main)


def test_outputs_may_follow_each_other_before_the_first_is_decided() -> None:
    """The model's thread takes the first that is good, and what it says of the others is true."""

    async def main() -> None:
        async with house(voicechat=FakeVoiceChat(calling={2})) as home:
            peer = home.enter()
            await hear_until(peer, "session.created")
            await peer.say(CALLS)
            await peer.say(append(4))
            await hear_until(peer, "response.function_call_arguments.done")
            for value in ("much too long", "and this too", "five", "six"):
                await peer.say(output("call_2_0", value))
            await peer.say(COMMIT)
            errors = [message["error"]["message"] for message in await hear_all(peer) if message["type"] == "error"]
            assert errors[:2] == [
                f"conversation.item.create: the output of call_2_0 has {length} characters; the fake takes 10"
                for length in (13, 12)
            ]
            assert errors[2:] in (  # by the model, or before it where its word was there first
                ["conversation.item.create: call_id is 'call_2_0'; the fake waits for ''"],
                ["conversation.item.create: no call 'call_2_0' waits for an output"],
            )
            assert [value for _, _, value in home.worker.voicechat.outputs] == ["five"]

    run(main)


def test_an_output_that_the_model_does_not_take_is_an_error() -> None:
    """It waited for it when the peer was told, and no more when it came."""

    async def main() -> None:
        async with house(voicechat=FakeVoiceChat(calling={0})) as home:
            peer = home.enter()
            await hear_until(peer, "session.created")
            await peer.say(CALLS)
            await peer.say(append(1))
            await hear_until(peer, "response.audio.delta")
            for session in home.worker._side._seats.values():
                session.session._waits = ""  # type: ignore[attr-defined]
            await peer.say(output("call_0_0", "five"))
            *_, refused = await hear_until(peer, "error")
            assert refused["error"]["code"] == "invalid_request"
            assert refused["error"]["message"] == (
                "conversation.item.create: call_id is 'call_0_0'; the fake waits for ''"
            )
            await peer.say(COMMIT)
            assert kinds(await hear_all(peer))[-1] == "response.done"

    run(main)


def test_who_did_not_ask_for_calls_is_told_none() -> None:
    async def main() -> None:
        async with house(voicechat=FakeVoiceChat(calling={0})) as home:
            peer = await home.begin()
            await peer.say(append(2))
            await peer.say(COMMIT)
            assert "response.function_call_arguments.done" not in kinds(await hear_all(peer))
            assert home.worker.voicechat.opened[0]["tools"] is False
            assert home.worker.voicechat.opened[0]["tool_wait_frames"] == 125

    run(main)


class Choosy(FakeVoiceChat):
    """It opens no session with seed 1."""

    def session(self, **options: Any) -> Any:
        if options.get("seed") == 1:
            raise InputError("not this seed")
        return super().session(**options)


def test_a_session_that_failed_is_closed_before_the_next_is_opened() -> None:
    """Else each update that fails would be held until its connection ends."""

    async def main() -> None:
        async with house(voicechat=Choosy()) as home:
            peer = home.enter()
            await hear_until(peer, "session.created")
            for _ in range(3):
                await peer.say(json.dumps({"type": "session.update", "session": {"seed": 1}}))
                await hear_until(peer, "error")
            await peer.say(UPDATE)
            await hear_until(peer, "session.updated")
            await wait_all_tasks_blocked()
            assert home.worker.held_sessions == 1

    run(main)


def test_a_frame_that_waits_in_part_is_counted_as_one() -> None:
    """Of 12.5 frames the first has read its 200 samples: 15,800 wait, twelve frames and a part of one."""

    async def main() -> None:
        async with house(frame_seconds=10) as home:
            peer = await home.begin()
            await peer.say(append(12.5))
            (lag,) = await hear_until(peer, "session.lag")
            assert (lag["frames_waiting"], lag["behind_ms"]) == (13, 988)

    run(main)


def test_the_policy_skip_drops_whole_frames_and_says_how_many() -> None:
    async def main() -> None:
        async with house(frame_seconds=0.08) as home:
            peer = home.enter()
            await hear_until(peer, "session.created")
            lag = {"policy": "skip", "max_seconds": 0.4}
            await peer.say(json.dumps({"type": "session.update", "session": {"lag": lag}}))
            await hear_until(peer, "session.updated")
            await peer.say(append(100))
            await peer.say(COMMIT)
            messages = await hear_all(peer)
            told = [m for m in messages if m["type"] == "session.lag"][-1]
            frames = kinds(messages).count("response.audio.delta")
            assert told["policy"] == "skip"
            assert frames < 20
            assert frames + told["frames_skipped"] == 100
            lines = (await home.app._metrics()).body.decode().splitlines()
            assert f"voicechat_frames_skipped_total {told['frames_skipped']}.0" in lines

    run(main)


def test_a_reader_that_has_no_room_takes_no_more() -> None:
    """One second may be queued and the model stands still: of 40 messages most stay with the peer."""

    async def main() -> None:
        async with house(frame_seconds=1e6, most_input_seconds=1.0) as home:
            peer, said = await home.begin(), [0]

            async def talk() -> None:
                for _ in range(40):
                    await peer.say(append(5))
                    said[0] += 1

            async with trio.open_nursery() as nursery:
                nursery.start_soon(talk)
                await trio.sleep(5)
                # Three are in the queue, one waits for room, eight wait in the socket.
                assert said[0] <= 13
                nursery.cancel_scope.cancel()

    run(main)


def test_metrics_count() -> None:
    async def main() -> None:
        async with house() as home:
            peer = await home.begin()
            await hear_all(home.enter())
            await peer.say(CANCEL)
            await hear_all(peer)
            home.app.metrics.frame_took(FrameTime(1, 0, 0.025))
            answer = await home.app._metrics()
            lines = answer.body.decode().splitlines()
            assert "voicechat_sessions_total 1.0" in lines
            assert "voicechat_server_busy_total 1.0" in lines
            assert "voicechat_frames_total 1.0" in lines
            assert 'voicechat_frame_ms_bucket{le="30.0"} 1.0' in lines
            assert 'voicechat_frame_ms_bucket{le="20.0"} 0.0' in lines
            assert "voicechat_slots_taken 0.0" in lines
            assert "voicechat_model_ready 1.0" in lines

    run(main)


def gauges(text: bytes) -> dict[str, float]:
    lines = [line.split() for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_gauges_show_what_is_there_now() -> None:
    async def main() -> None:
        async with house(frame_seconds=10) as home:
            before = gauges((await home.app._metrics()).body)
            assert (before["voicechat_lag_seconds"], before["voicechat_model_sessions"]) == (0, 0)
            peer = await home.begin()
            await peer.say(append(12.5))
            await wait_all_tasks_blocked()
            during = gauges((await home.app._metrics()).body)
            assert 0.9 <= during["voicechat_lag_seconds"] <= 1  # but for the frame that runs
            assert (during["voicechat_model_sessions"], during["voicechat_slots_taken"]) == (1, 1)
            assert during["voicechat_tasks"] > before["voicechat_tasks"] > 0
            assert during["voicechat_threads"] == before["voicechat_threads"] >= 1
            peer.leave()
            await trio.sleep(20)
            after = gauges((await home.app._metrics()).body)
            names = ("lag_seconds", "model_sessions", "slots_taken", "tasks", "threads", "connections")
            assert [after[f"voicechat_{name}"] for name in names] == [before[f"voicechat_{name}"] for name in names]

    run(main)


def test_connections_are_bounded() -> None:
    async def main() -> None:
        async with house() as home:
            home.app._settings = Settings(model="fake", connections=2)
            ours: list[trio.abc.Stream] = []
            for _ in range(3):
                mine, theirs = trio.testing.memory_stream_pair()
                ours.append(mine)
                home._nursery.start_soon(home.app.serve, theirs)
                await wait_all_tasks_blocked()  # one after the other
            assert await ours[2].receive_some() == b""  # closed at once, without a word
            await ours[1].send_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
            text = b""
            while data := await ours[1].receive_some():  # until it has waited long enough for another request
                text += data
            assert b"voicechat_connections 2.0" in text
            assert b"voicechat_connections_turned_away_total 1.0" in text
            await ours[0].aclose()
            await trio.sleep(5)
            mine, theirs = trio.testing.memory_stream_pair()
            home._nursery.start_soon(home.app.serve, theirs)
            await mine.send_all(b"GET /ready HTTP/1.1\r\nHost: here\r\n\r\n")
            assert (await mine.receive_some()).startswith(b"HTTP/1.1 200")

    run(main)


def test_a_slot_is_given_back_whatever_happens() -> None:
    admission = Admission()
    for _ in range(3):
        with suppress(ZeroDivisionError), admission.slot() as admitted:
            assert admitted
            with admission.slot() as second:
                assert not second
            assert admission.taken == 1
            raise ZeroDivisionError
        assert admission.free
