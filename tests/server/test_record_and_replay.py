"""The command itself: a real server records, and the recording is replayed by a process of its own."""

import base64
import json
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import trio
from trio_websocket import ConnectionClosed

from tests.server.processes import RUN, connected, server
from voicechat_core import VoiceChat

NET = 60.0


def sound(frames: int) -> np.ndarray:
    return (np.random.default_rng(3).standard_normal(frames * 1280) * 3000).astype("<i2")


async def talk(url: str, frames: int, *, commit: bool) -> list[dict[str, Any]]:
    """All messages, or with no commit those until the last frame, after which the peer is gone."""
    heard: list[dict[str, Any]] = []
    with trio.fail_after(NET):
        async with connected(url) as socket:
            audio = base64.b64encode(sound(frames).tobytes()).decode()
            update = {"type": "session.update", "session": {"seed": 4, "system_prompt": "Be brief."}}
            for message in (update, {"type": "input_audio_buffer.append", "audio": audio}):
                await socket.send_message(json.dumps(message))
            if commit:
                await socket.send_message(json.dumps({"type": "input_audio_buffer.commit"}))
            with suppress(ConnectionClosed):
                while commit or [m["type"] for m in heard].count("response.audio.delta") < frames:
                    heard.append(json.loads(await socket.get_message()))
    return heard


def replayed(*words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", RUN, "replay", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NET)
    return result.returncode, result.stdout, result.stderr


def test_what_a_server_recorded_runs_again(tiny: VoiceChat, tiny_path: Path, tmp_path: Path) -> None:
    there = tmp_path / "recordings"
    with server("-m", str(tiny_path), "--port", "0", "--record", str(there)) as process:
        url = process.ready()
        heard = trio.run(lambda: talk(url, 8, commit=True))
        assert heard[0]["session"]["recording"] is True
        assert heard[1]["session"]["model"] == tiny_path.name  # and not where it lies
        trio.run(lambda: talk(url, 6, commit=False))
        assert process.stop() == 0
    whole, cut = sorted(there.iterdir(), key=lambda folder: (folder / "session.json").stat().st_mtime)
    assert stat.S_IMODE(whole.stat().st_mode) == 0o700
    assert np.array_equal(np.fromfile(whole / "input.pcm", "<i2"), sound(8))
    facts = json.loads((whole / "session.json").read_text())
    assert (facts["complete"], facts["ended"]["ended_by"], facts["ended"]["frames"]) == (True, "done", 8)
    assert facts["fingerprint"] == tiny.model.fingerprint
    assert (facts["opening"]["seed"], facts["opening"]["system_prompt"]) == (4, "Be brief.")

    status, out, _ = replayed(str(whole))
    assert (status, "8 frames" in out) == (0, True)
    status, out, _ = replayed(str(cut), "-m", str(tiny_path), "--json")
    report = json.loads(out)
    assert (status, report["same"], report["frames"]) == (0, True, 6)

    pcm = np.fromfile(whole / "output.pcm", "<i2")
    pcm[3 * 1764 + 5] ^= 1
    pcm.tofile(whole / "output.pcm")
    status, out, _ = replayed(str(whole))
    assert (status, "first difference: frame 3, response.audio.delta" in out) == (1, True)
    status, out, err = replayed(str(tmp_path / "elsewhere"))
    assert (status, out) == (2, "")
    assert err.startswith("voicechat-server: ")
    assert err.count("\n") == 1


def test_a_place_that_cannot_hold_recordings_is_one_line(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with server("-m", str(tiny_path), "--port", "0", "--record", str(tmp_path / "file")) as process:
        assert process.end() == 2
        assert "".join(process.log).startswith(f"voicechat-server: {tmp_path / 'file'}: recordings cannot be written")
