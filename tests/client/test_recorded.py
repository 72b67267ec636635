"""A server that keeps what it hears says so, and a person is told: once while it goes on, and at the end."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.client.peers import CREATED, DONE, PONG, UPDATED, Raw, run, scripted
from tests.server.frames import TEXT

SPOKEN = Path(__file__).parents[1] / "data" / "spoken.wav"
NOTE = "the server keeps a recording of what it hears and says"


def created(recording: bool) -> dict[str, Any]:
    return {**CREATED, "session": {**CREATED["session"], **({"recording": True} if recording else {})}}


async def serves(raw: Raw, *, recording: bool) -> None:
    """A session without an answer, and pongs."""
    await raw.accept()
    await raw.say(created(recording))
    answers = {"session.update": UPDATED, "session.ping": PONG, "input_audio_buffer.commit": DONE}
    while (found := await raw.next()) is not None and found[0] == TEXT:
        kind = json.loads(found[1])["type"]
        await raw.say(*[answers[kind]] if kind in answers else [])
    await raw.close()


async def commanded(recording: bool, *words: object) -> "subprocess.CompletedProcess[bytes]":
    async with scripted(partial(serves, recording=recording)) as place:
        line = [sys.executable, "-m", "voicechat_client", *map(str, words), "--url", place]
        return await trio.run_process(line, capture_stdout=True, capture_stderr=True, check=False)


@pytest.mark.parametrize("recording", [True, False])
def test_send(recording: bool, tmp_path: Path) -> None:
    """And the first message is in the log, which has every one."""
    log = tmp_path / "log.jsonl"

    async def main() -> None:
        words = ["send", SPOKEN, "--pace", "fast", "--out", tmp_path / "a.wav", "--events", log]
        found = await commanded(recording, *words, "--json")
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout)["recording"] is recording
        assert found.stderr.decode().count(NOTE) == recording
        events = [json.loads(line) for line in log.read_text().splitlines()]
        assert [event["type"] for event in events] == ["session.created", "session.updated", "response.done"]
        assert events[0] == {"seconds": events[0]["seconds"], **created(recording)}
        assert 0 <= events[0]["seconds"] < 1
        found = await commanded(recording, *words)
        assert (b"recorded by the server" in found.stdout) is recording

    run(main)


@pytest.mark.parametrize("recording", [True, False])
def test_ping(recording: bool) -> None:
    async def main() -> None:
        found = await commanded(recording, "ping", "--count", "2")
        assert found.returncode == 0
        assert found.stdout.count(b"pong after") == 2
        assert found.stderr.decode() == f"{NOTE}\n" * recording

    run(main)
