"""One slot, on real sockets: who holds it, and that no reset at any point keeps it.

204 times over: a first client gets as far as a point, a second one is refused or not, the first one vanishes by an RST;
then the next client is accepted, and gets the very answer that ``generate`` gives.
"""

import random

import numpy as np
import pytest
import trio

from tests.server.clients import UPGRADE, Client, Closed, calling, converse, frames_of, noise
from tests.server.frames import close_frame
from tests.server.points import POINTS, Point, cancelled, created, done
from tests.server.server_process import NET, ServerProcess
from voicechat_core import VoiceChat

ROUNDS = 17  # of each of the 12 points
HELLO = noise(0.08)


# ---- what the second one meets


async def refused(second: Client) -> None:
    heard, closed = await second.hear_all()
    assert [message["error"] for message in heard] == [
        {"code": "server_busy", "message": "another session is active; try again when it has ended"}
    ]
    assert (closed.code, closed.reason) == (1013, "busy")


async def admitted(second: Client) -> None:
    assert (await second.hear())["type"] == "session.created"


async def meets(second: Client, holds: bool | None, chance: random.Random) -> None:
    """It is told whether the slot is taken; but some do not listen, and vanish first."""
    await second.write(UPGRADE)
    if chance.random() < 0.25:
        return second.reset()
    assert (await second.head()).startswith(b"HTTP/1.1 101 ")
    if holds is None:
        first_word = (await second.hear())["type"]
        assert first_word in ("error", "session.created")
    else:
        await (refused(second) if holds else admitted(second))
    return second.reset()


@pytest.mark.trio
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.reach.__name__)
async def test_no_reset_at_any_point_keeps_the_slot(server: ServerProcess, tiny: VoiceChat, point: Point) -> None:
    expected = tiny.generate(HELLO, system_prompt="", seed=11)
    before = server.metrics()["voicechat_sessions_total"]
    for turn in range(ROUNDS):
        chance = random.Random(turn)
        async with calling(server) as first, calling(server) as second:
            await point.reach(first, chance)
            await meets(second, point.holds, chance)
            first.reset()
        server.wait_until_ready()
        answer = frames_of(await converse(server, HELLO, system_prompt="", seed=11))
        assert [frame[1] for frame in answer] == expected.text_tokens
        assert np.array_equal([frame[3] for frame in answer], expected.audio_codes)
    assert server.metrics()["voicechat_sessions_total"] >= before + ROUNDS
    assert server.metrics()["voicechat_slots_taken"] == 0


@pytest.mark.trio
async def test_who_has_seen_the_close_frame_can_come_again_at_once(server: ServerProcess) -> None:
    """The slot is free before the frame is sent; nobody has to ask ``/ready``, or to try twice."""
    for turn in range(ROUNDS):
        async with calling(server) as first, calling(server) as second:
            await (cancelled if turn % 2 else done)(first, random.Random(turn))
            await second.upgrade()
            await admitted(second)
            await second.say("session.ping")
            assert (await second.hear())["type"] == "session.pong"
            await second.write(close_frame(1000))
            with pytest.raises(Closed):
                await second.hear()
            first.reset()


@pytest.mark.trio
async def test_of_many_at_once_one_is_admitted(server: ServerProcess) -> None:
    told: list[str] = []

    async def come(leave: trio.Event, all_told: trio.Event) -> None:
        async with calling(server) as client:
            await client.upgrade()
            message = await client.hear()
            told.append(message.get("error", message).get("code", message["type"]))
            if len(told) == 30:
                all_told.set()
            await leave.wait()
            client.reset()

    server.wait_until_ready()
    async with trio.open_nursery() as nursery:
        leave, all_told = trio.Event(), trio.Event()
        for _ in range(30):
            nursery.start_soon(come, leave, all_told)
        await all_told.wait()
        assert sorted(told) == ["server_busy"] * 29 + ["session.created"]
        leave.set()
    server.wait_until_ready()
    assert len(await converse(server, HELLO)) == 1


@pytest.mark.trio
async def test_who_vanishes_while_a_long_prompt_is_read_leaves_the_model_to_others(server: ServerProcess) -> None:
    """Its eight thousand characters, the most that are taken, would keep the model for two minutes or more.

    The next client is given one (``NET``), so that a machine that is busy with other things fails no good server.
    """
    async with calling(server) as client:
        await created(client, random.Random(0))
        await client.say("session.update", session={"system_prompt": "Word " * 1600})
        await trio.sleep(0.5)
        client.reset()
    server.wait_until_ready(seconds=NET)
    assert len(await converse(server, HELLO)) == 1
