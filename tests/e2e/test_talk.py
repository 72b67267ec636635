"""``voicechat-client talk`` as a process, with a package sounddevice whose devices are threads, and a real server."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.commands import begun, client, ended
from tests.server.server_process import ServerProcess, serving

# What ``mic`` uses of sounddevice: a microphone and a speaker of 48 kHz, on the clock of this machine. The speaker
# keeps what it played in the file that the environment names, as float32.
SOUNDDEVICE = """
import os, threading, time, types
import numpy as np

class PortAudioError(Exception): pass
default = types.SimpleNamespace(device=(0, 1))
def query_hostapis(): return ({"name": "Threads"},)
def query_devices():
    return [dict(index=i, name=name, hostapi=0, max_input_channels=1 - i, max_output_channels=i,
                 default_samplerate=48000.0) for i, name in enumerate(("Ear", "Mouth"))]

class Stream:
    def __init__(self, *, device, channels, samplerate, dtype, latency, callback):
        self.channels, self.samplerate, self.latency, self.callback = channels, samplerate, 0.01, callback
        self.going = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
    def start(self): self.going.set(); self.thread.start()
    def abort(self): self.going.clear()
    def close(self): self.going.clear()
    def run(self):
        status = types.SimpleNamespace(input_overflow=False, output_underflow=False)
        began, blocks = time.monotonic(), 0
        while self.going.is_set():
            self.block(status, blocks)
            blocks += 1
            time.sleep(max(0, began + blocks * 0.01 - time.monotonic()))
class InputStream(Stream):
    def block(self, status, number):
        at = (np.arange(480) + 480 * number)[:, None] / 48000
        self.callback((0.3 * np.sin(2 * np.pi * 440 * at)).astype(np.float32), 480, None, status)
class OutputStream(Stream):
    def block(self, status, number):
        block = np.zeros((480, self.channels), np.float32)
        self.callback(block, 480, None, status)
        with open(os.environ["PLAYED"], "ab") as file:
            file.write(block[:, 0].tobytes())
"""


@pytest.fixture
def devices(tmp_path: Path) -> dict[str, str]:
    """The environment in which they are there."""
    (tmp_path / "sounddevice.py").write_text(SOUNDDEVICE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "PLAYED": str(tmp_path / "played")}


def test_a_talk_that_is_ended_by_ctrl_c(server: ServerProcess, devices: dict[str, str]) -> None:
    """The first Ctrl-C commits: the rest of the answer is heard, and the status is 0."""
    with begun("talk", "--url", f"127.0.0.1:{server.port}", "--seed", "3", **devices) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "use headphones" in line:  # the last for now: what came in one piece with a line is lost to ``ended``
                break
        assert "listening to Ear, speaking on Mouth" in said[-2]
        assert "Ctrl-C ends" in said[-2]
        while server.metrics()["voicechat_frames_total"] < 30:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        result = ended(process)
    assert (result.status, "Traceback" in result.err) == (0, False), result.err
    assert "not finished" not in result.out
    assert "assistant: " in result.out
    assert " gaps of " in result.out
    [session] = server.sessions()[-1:]
    assert (session["ended_by"], session["frames"] >= 30) == ("done", True)
    played = np.fromfile(devices["PLAYED"], np.float32)
    assert np.isfinite(played).all()
    assert np.abs(played).max() > 0


def test_a_talk_that_the_server_records(tiny_path: Path, devices: dict[str, str], tmp_path: Path) -> None:
    """A person is told before the first word, and at the end."""
    with (
        serving(tiny_path, tmp_path / "log", "--record", str(tmp_path / "kept")) as server,
        begun("talk", "--url", f"127.0.0.1:{server.port}", **devices) as process,
    ):
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "use headphones" in line:
                break
        assert said[0] == "the server keeps a recording of what it hears and says\n"
        assert "listening to Ear" in said[1]
        process.send_signal(signal.SIGINT)
        result = ended(process)
    assert result.status == 0, result.err
    assert "recorded by the server" in result.out


def test_devices_are_listed(devices: dict[str, str]) -> None:
    result = client("talk", "--list-devices", **devices)
    assert result.status == 0
    assert [line.split()[-1] for line in result.out.splitlines() if "Ear" in line or "Mouth" in line]


def test_a_device_that_is_not_there(server: ServerProcess, devices: dict[str, str]) -> None:
    result = client("talk", "--url", f"127.0.0.1:{server.port}", "--input-device", "Nose", **devices)
    assert (result.status, result.out) == (11, "")
    assert result.complaint() == "no microphone matches 'Nose'; there are: 0 Ear"


def test_no_server(devices: dict[str, str]) -> None:
    result = client("talk", "--url", "127.0.0.1:1", **devices)
    assert (result.status, result.out) == (3, "")
    assert "127.0.0.1:1" in result.complaint()
