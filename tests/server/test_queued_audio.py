"""While a minute of audio waits: who asks is answered, who cancels is obeyed, who vanishes is forgotten.

What a client counts depends on when it was let run: audio that was on its way before it asked comes before the answer.
So the server records, and its own order is judged: that in which it took the client's messages and the socket took its.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.clients import Client, append, calling, converse, noise
from tests.server.server_process import ServerProcess, serving

MINUTE = noise(60)
AUDIO = "response.audio.delta"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(tiny_path: Path, recordings: Path) -> Iterator[ServerProcess]:
    """As that of the other modules, but it records."""
    with serving(tiny_path, recordings.with_name("log"), "--record", str(recordings)) as process:
        yield process


@pytest.fixture(autouse=True)
def free(server: ServerProcess) -> Iterator[None]:
    """Each test begins with a free slot: who is reset gives it back once its recording is written."""
    yield
    server.wait_until_ready(seconds=60)


async def begun(client: Client) -> str:
    """Its session has a minute of audio queued, and says something already; the session's name."""
    await client.upgrade()
    created = await client.hear()
    await client.say("session.update", session={"seed": 1})
    assert [m["type"] for m in await client.hear_until("session.updated")] == ["session.updated"]
    await client.write(append(MINUTE))
    await client.hear_until(AUDIO)
    name: str = created["session"]["id"]
    return name


def order(server: ServerProcess, recordings: Path, session: str) -> list[str]:
    """The types of all messages of a session that is over, in the server's order."""
    server.wait_until_ready(seconds=60)  # its slot is given back after the recording is written
    (folder,) = recordings.glob(f"*-{session}")
    assert json.loads((folder / "session.json").read_text())["complete"] is True
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "wire.jsonl").read_text().splitlines()]
    return [line["message"]["type"] for line in lines if line["what"] in ("client", "server")]


def audio_between(types: list[str], asked: str, answered: str) -> list[int]:
    """How many audio events lie between each question and its answer."""
    counts: list[int] = []
    rest = iter(types)
    for kind in rest:
        if kind == asked:
            counts.append(0)
            while (between := next(rest)) != answered:
                counts[-1] += between == AUDIO
    return counts


@pytest.mark.trio
async def test_a_ping_is_answered_before_two_more_audio_events(server: ServerProcess, recordings: Path) -> None:
    async with calling(server) as client:
        session = await begun(client)
        for _ in range(30):
            await client.hear_until(AUDIO)
            await client.say("session.ping")
            await client.hear_until("session.pong")
        client.reset()
    counts = audio_between(order(server, recordings, session), "session.ping", "session.pong")
    assert len(counts) == 30
    assert max(counts) < 2


@pytest.mark.trio
@pytest.mark.parametrize("kind", ["session.cancel", "response.cancel"])
async def test_a_cancel_is_obeyed_before_two_more_audio_events(
    server: ServerProcess, recordings: Path, kind: str
) -> None:
    for _ in range(5):
        async with calling(server) as client:
            session = await begun(client)
            await client.say(kind)
            heard, closed = await client.hear_all()
            assert heard[-1]["type"] == "response.cancelled"
            assert (closed.code, closed.reason) == (1000, "cancelled")
        types = order(server, recordings, session)
        assert audio_between(types, kind, "response.cancelled") in ([0], [1])
        assert types[-1] == "response.cancelled"


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
        await client.hear_until(AUDIO)
        client.reset()
    server.wait_until_ready(seconds=60)
    # Not after what was queued: of ten minutes, 7500 frames, less than one was run meanwhile.
    assert server.sessions()[-1]["ended_by"] == "the peer left"
    assert server.sessions()[-1]["frames"] < 750
    assert len(await converse(server, MINUTE[:1280])) == 1
