"""While a minute of audio waits: who asks is answered, who cancels is obeyed, who vanishes is forgotten."""

import time

import pytest

from tests.server.clients import Client, append, calling, converse, noise
from tests.server.server_process import ServerProcess

MINUTE = noise(60)


async def begun(client: Client) -> None:
    """Its session has a minute of audio queued, and says something already."""
    await client.upgrade()
    await client.open_session(seed=1)
    await client.write(append(MINUTE))
    await client.hear_until("response.audio.delta")


def audio_events(heard: list[dict[str, object]]) -> int:
    return sum(message["type"] == "response.audio.delta" for message in heard)


@pytest.mark.trio
async def test_a_ping_is_answered_before_two_more_audio_events(server: ServerProcess) -> None:
    async with calling(server) as client:
        await begun(client)
        for _ in range(30):
            await client.hear_until("response.audio.delta")
            await client.say("session.ping")
            assert audio_events(await client.hear_until("session.pong")) < 2
        client.reset()


@pytest.mark.trio
@pytest.mark.parametrize("kind", ["session.cancel", "response.cancel"])
async def test_a_cancel_is_obeyed_before_two_more_audio_events(server: ServerProcess, kind: str) -> None:
    for _ in range(5):
        async with calling(server) as client:
            await begun(client)
            await client.say(kind)
            heard, closed = await client.hear_all()
            assert heard[-1]["type"] == "response.cancelled"
            assert audio_events(heard) < 2
            assert (closed.code, closed.reason) == (1000, "cancelled")


@pytest.mark.trio
async def test_plain_requests_are_answered(server: ServerProcess) -> None:
    async with calling(server) as client:
        await begun(client)
        assert server.get("/ready") == (503, '{"ready": false, "why": "busy"}')
        assert server.get("/health")[0] == 200
        assert server.metrics()["voicechat_slots_taken"] == 1
        client.reset()


@pytest.mark.trio
async def test_who_has_filled_the_queue_and_vanishes_gives_the_slot_back(server: ServerProcess) -> None:
    """The reader waits for room then, behind minutes of audio, and cannot see the peer leave."""
    async with calling(server) as client:
        await begun(client)
        for _ in range(9):
            await client.write(append(MINUTE))
        await client.hear_until("response.audio.delta")
        client.reset()
    began = time.monotonic()
    server.wait_until_ready(seconds=60)
    assert time.monotonic() - began < 1
    assert len(await converse(server, MINUTE[:1280])) == 1
