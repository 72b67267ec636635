"""A real process, socket and spoken WAV, the tiny checkpoint: what a client gets is what ``generate`` gives."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio_websocket import ConnectionClosed, WebSocketConnection

from tests.server import processes
from voicechat_core import VoiceChat
from voicechat_core.audio import float_to_pcm16, read_audio

SPOKEN = Path(__file__).parents[1] / "data" / "spoken.wav"
NET = 120.0


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[str]:
    """Its address; the process must end with 0 when it is asked to."""
    with processes.server("-m", str(tiny_path), "--port", "0") as process:
        yield process.ready()
        assert process.stop() == 0, process.log
        assert "Traceback" not in "".join(process.log)


async def converse(url: str, pcm: np.ndarray, chunk: int, **session: Any) -> tuple[list[dict[str, Any]], int]:
    """All messages after session.updated, and the close code."""
    heard: list[dict[str, Any]] = []

    async def talk(socket: WebSocketConnection) -> None:
        for start in range(0, len(pcm), chunk):
            audio = base64.b64encode(pcm[start : start + chunk].tobytes()).decode()
            await socket.send_message(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        await socket.send_message(json.dumps({"type": "input_audio_buffer.commit"}))

    with trio.fail_after(NET):
        async with processes.connected(url) as socket, trio.open_nursery() as nursery:
            await socket.send_message(json.dumps({"type": "session.update", "session": session}))
            while json.loads(await socket.get_message())["type"] != "session.updated":
                pass
            nursery.start_soon(talk, socket)
            try:
                while True:
                    heard.append(json.loads(await socket.get_message()))
            except ConnectionClosed as closed:
                nursery.cancel_scope.cancel()
                code = closed.reason.code
    return heard, code


@pytest.fixture(scope="module")
def pcm() -> np.ndarray:
    return float_to_pcm16(read_audio(SPOKEN, 16000), 32768)


# In the order in which a frame is told: its words first, then its sound, which is the only one that always comes.
IN_A_FRAME = (
    "conversation.item.input_audio_transcription.delta",
    "response.text.delta",
    "response.function.delta",
    "response.audio.delta",
)


def require_order(heard: list[dict[str, Any]], frames: int) -> None:
    """Each frame whole, in order and without a gap; behind the last one only what its last tokens left unfinished."""
    told = [(m["frame_index"], IN_A_FRAME.index(m["type"])) for m in heard if m["type"] in IN_A_FRAME]
    ends = [place for place, (_, kind) in enumerate(told) if kind == 3]
    assert [told[place][0] for place in ends] == list(range(frames))
    begin = 0
    for index, end in enumerate(ends):
        kinds = [kind for _, kind in told[begin : end + 1]]
        assert {frame for frame, _ in told[begin : end + 1]} == {index}
        assert kinds == sorted(set(kinds)), (index, kinds)
        begin = end + 1
    rest = told[begin:]
    assert rest == sorted(set(rest))
    assert {frame for frame, _ in rest} <= {frames - 1}
    assert (heard[-1]["type"], heard[-1]["frame_index"]) == ("response.done", frames)
    others = [m["type"] for m in heard if m["type"] not in (*IN_A_FRAME, "session.lag")]
    assert others == ["input_audio_buffer.committed", "response.done"]


# The whole file each time, up to 47,840 messages of one sample; the server's answers are read while they are sent.
@pytest.mark.parametrize("chunk", [1, 159, 160, 1279, 1280, 1281, 5000, 10**6])
def test_what_a_client_gets_is_what_generate_gives(server: str, tiny: VoiceChat, pcm: np.ndarray, chunk: int) -> None:
    expected = tiny.generate(pcm, system_prompt="Be concise.", seed=5)
    heard, code = trio.run(lambda: converse(server, pcm, chunk, system_prompt="Be concise.", seed=5))
    assert code == 1000
    require_order(heard, expected.frames)
    audio = [m for m in heard if m["type"] == "response.audio.delta"]
    assert [m["text_token"] for m in audio] == expected.text_tokens
    assert [m["function_token"] for m in audio] == expected.function_tokens
    assert np.array_equal([m["audio_codes"] for m in audio], expected.audio_codes)
    stream = np.concatenate([np.frombuffer(base64.b64decode(m["delta"]), "<i2") for m in audio]).astype(int)
    offline = float_to_pcm16(expected.audio).astype(int)
    assert np.abs(stream[14:] - offline[6:-8]).max() <= 1
    spoken = ["".join(m["delta"] for m in heard if m["type"] == kind) for kind in IN_A_FRAME[:3]]
    assert all(spoken)
    assert spoken == [expected.transcript, expected.text, expected.function_text]


def test_plain_http(server: str) -> None:
    from urllib.request import urlopen

    base = server.replace("ws://", "http://").removesuffix("/v1/realtime")
    with urlopen(f"{base}/health", timeout=NET) as answer:
        assert json.load(answer)["status"] == "ok"
    with urlopen(f"{base}/ready", timeout=NET) as answer:
        assert json.load(answer) == {"ready": True}
    with urlopen(f"{base}/metrics", timeout=NET) as answer:
        assert b"voicechat_frames_total" in answer.read()
    with urlopen(base, timeout=NET) as answer:
        assert b"/v1/realtime" in answer.read()


def test_other_addresses_need_a_key(tiny_path: Path) -> None:
    command = [sys.executable, "-c", processes.RUN, "-m", str(tiny_path), "--host", "0.0.0.0"]
    environment = {name: value for name, value in os.environ.items() if name != "VOICECHAT_API_KEY"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=NET)
    assert result.returncode == 2
    assert result.stderr.startswith("voicechat-server: ")
    assert "Traceback" not in result.stderr
