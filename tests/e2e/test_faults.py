"""What goes wrong in the middle: the status and one line say so, and what had arrived is in a whole WAV."""

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import soundfile

from tests.e2e.commands import FRAME, RUN, Ended, begun, client, ended, events_of, samples_in, sound_of, wait_for
from tests.e2e.conftest import SPOKEN
from tests.server import processes
from tests.server.server_process import ServerProcess, serving


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answer.wav"


def require_kept(found: Any, out: Path, told: dict[str, Any]) -> None:
    """What had arrived: as many frames in the file as are told, and none of them in part."""
    assert len(sound_of(out)) == FRAME * told["frames"] > 0
    assert len(told["audio_codes"]) == len(told["text_tokens"]) == told["frames"]
    assert told["ended"] is None
    assert told["error"] == found.complaint()


def sending(url: str, out: Path, *words: object, **options: Any) -> Any:
    """A long conversation, at the pace of speech, whose answer is told as JSON."""
    return begun("send", SPOKEN, "--url", url, "--tail", 60, "--out", out, "--json", *words, **options)


def heard_some(out: Path, frames: int = 3) -> None:
    wait_for(lambda: samples_in(out) >= frames * FRAME)


# ---- the server goes


def test_a_server_that_is_killed(tiny_path: Path, out: Path) -> None:
    with processes.server("-m", str(tiny_path), "--port", "0") as server, sending(server.ready(), out) as process:
        heard_some(out)
        server.process.kill()
        found = ended(process)
    assert found.status == 9
    require_kept(found, out, found.json())
    assert "(1006)" in found.complaint()


def test_a_server_that_is_shut_down(tiny_path: Path, out: Path) -> None:
    with processes.server("-m", str(tiny_path), "--port", "0") as server, sending(server.ready(), out) as process:
        heard_some(out)
        assert server.stop() == 0
        found = ended(process)
    assert found.status == 9
    require_kept(found, out, found.json())
    assert "1001" in found.complaint()


class Relay:
    """Between the client and the server, and able to reset the client's connection."""

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._server))
        self._ends = [near, far]
        for source, target in ((near, far), (far, near)):
            Thread(target=self._copy, args=(source, target), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            pass

    def reset(self) -> None:
        for end in self._ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
            end.close()

    def close(self) -> None:
        self._listener.close()


def test_a_connection_that_is_reset(server: ServerProcess, url: str, out: Path) -> None:
    relay = Relay(server.port)
    with sending(f"127.0.0.1:{relay.port}", out) as process:
        heard_some(out)
        relay.reset()
        found = ended(process)
    relay.close()
    assert found.status == 9
    require_kept(found, out, found.json())
    assert "(1006)" in found.complaint()


# ---- the client is stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_client_that_is_asked_to_stop(number: signal.Signals, url: str, out: Path, tmp_path: Path) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and so by every process that is started")
    events, words, both = (tmp_path / name for name in ("events.jsonl", "words.json", "both.wav"))
    options = ["--events", events, "--transcript", words, "--stereo", both]
    with sending(url, out, *options) as process:
        heard_some(out)
        process.send_signal(number)
        began = time.monotonic()
        found = ended(process)
    assert found.status == 128 + number
    assert time.monotonic() - began < 10
    require_kept(found, out, found.json())
    assert found.complaint() == f"stopped by {number.name}"
    told = found.json()
    audio = [event for event in events_of(events) if event["type"] == "response.audio.delta"]
    assert [event["audio_codes"] for event in audio] == told["audio_codes"]
    said = json.loads(words.read_text())
    assert "".join(part["text"] for part in said if part["who"] == "assistant") == told["text"]
    assert len(sound_of(both, channels=2)) >= FRAME * told["frames"]


def test_a_client_that_waits_in_a_silent_pipe_can_be_stopped(url: str, out: Path, tmp_path: Path) -> None:
    """In the middle, and before anything came of it."""
    head, there = SPOKEN.read_bytes()[: 44 + 32000], tmp_path / "there"
    run = "import pathlib, voicechat_client.sending as sending\nopened = sending.opened\n"
    run += f"sending.opened = lambda path: pathlib.Path({str(there)!r}).touch() or opened(path)\n{RUN}"
    for data in (head, b""):
        there.unlink(missing_ok=True)
        with begun("send", "-", "--url", url, "--out", out, "--json", stdin=subprocess.PIPE, run=run) as process:
            assert process.stdin is not None
            process.stdin.buffer.write(data)  # type: ignore[attr-defined]
            process.stdin.flush()
            if data:
                heard_some(out)
            else:
                wait_for(there.exists)
            process.send_signal(signal.SIGINT)
            process.wait(10)
            found = ended(process)
        assert found.status == 130
        assert found.complaint() == "stopped by SIGINT"
        assert found.json()["frames"] == (len(sound_of(out)) / FRAME if data else 0)


@pytest.mark.slow
def test_a_check_that_is_stopped_ends_its_process(url: str, out: Path, tmp_path: Path) -> None:
    """``voicechat generate`` is here a program that sleeps and says that it is there."""
    program, there = tmp_path / "voicechat", tmp_path / "there"
    examines = '[ "$1" = inspect ] && exit 0'
    program.write_text(f"#!/bin/sh\n{examines}\necho $$ > {there}.new; mv {there}.new {there}; exec sleep 100\n")
    program.chmod(0o755)
    run = f"import voicechat_client.check as check\ncheck.command = lambda: [{str(program)!r}]\n{RUN}"
    words = ["--pace", "fast", "--tail", 0, "--out", out, "--check", "any", "--json"]
    with begun("send", SPOKEN, "--url", url, *words, run=run) as process:
        wait_for(there.exists)
        process.send_signal(signal.SIGTERM)
        found = ended(process)
    assert found.status == 128 + signal.SIGTERM
    assert found.json()["frames"] == 38
    assert "check" not in found.json()
    with pytest.raises(ProcessLookupError):
        os.kill(int(there.read_text()), 0)


# ---- files


def test_a_disk_that_becomes_full(server: ServerProcess, url: str, out: Path, tmp_path: Path) -> None:
    """A file may not grow beyond 20 kB: five frames and a half. Python does not heed SIGXFSZ."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, {resource.RLIM_INFINITY}))\n"
    with sending(url, out, run=limit + RUN) as process:
        found = ended(process)
    assert found.status == 1
    assert found.complaint() == f"{out}: File too large"
    assert len(sound_of(out)) == (20000 - 44) // 2
    assert found.json()["frames"] >= 6
    server.wait_until_ready()  # the client has left in good order


@pytest.mark.parametrize("option", ["--events", "--transcript", "--stereo", "--out"])
def test_a_device_that_is_full(option: str, url: str, out: Path, tmp_path: Path) -> None:
    words = ["--url", url, "--pace", "fast", "--tail", 0.5, "--json"]
    words += ["--out", str(out)] if option != "--out" else []
    found = client("send", SPOKEN, *words, option, "/dev/full")
    assert found.status == 1
    assert found.complaint().startswith("/dev/full: ")
    assert "No space left on device" in found.complaint()
    if option != "--out":
        assert len(sound_of(out)) == FRAME * found.json()["frames"]


def test_a_recording_that_is_cut_short(url: str, out: Path, tmp_path: Path) -> None:
    """A WAV says so before anything is sent; a FLAC and a pipe, when the damage is reached."""
    whole, flac = SPOKEN.read_bytes(), tmp_path / "cut.flac"
    (tmp_path / "cut.wav").write_bytes(whole[:50000])
    soundfile.write(flac, soundfile.read(SPOKEN, dtype="int16")[0], 16000, format="FLAC")
    flac.write_bytes(flac.read_bytes()[:-10000])
    words = ["--url", url, "--pace", "fast", "--out", out, "--json"]
    found = client("send", tmp_path / "cut.wav", *words)
    assert found.status == 1
    assert "cut.wav: truncated: its header says " in found.complaint()
    assert found.json()["sent_samples"] == 0
    assert not out.exists()
    found = client("send", flac, *words)
    assert found.status == 1
    assert found.complaint().startswith(f"{flac}: ")
    assert 16000 < found.json()["sent_samples"] < 48000
    assert len(sound_of(out)) == FRAME * found.json()["frames"]


# ---- nobody to talk to


@pytest.mark.slow
def test_a_server_that_is_busy(server: ServerProcess, url: str, out: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.wav"
    with sending(url, first) as talking:
        heard_some(first)
        words = ["--url", url, "--pace", "fast", "--tail", 0, "--out", out, "--json"]
        found = client("send", SPOKEN, *words)
        assert found.status == 7
        assert "another session is active" in found.complaint()
        found = client("send", SPOKEN, *words, "--retry-busy", 1)
        assert found.status == 7
        assert [line for line in found.err.splitlines() if "again in" in line]
        refused = server.metrics()["voicechat_server_busy_total"]
        with begun("send", SPOKEN, *words, "--retry-busy", 60) as waiting:
            wait_for(lambda: server.metrics()["voicechat_server_busy_total"] > refused)
            talking.send_signal(signal.SIGINT)
            found = ended(waiting)
        assert ended(talking).status == 130
    assert found.status == 0, found.err
    assert found.json()["frames"] == 38


@pytest.mark.slow
def test_a_server_that_wants_a_key(tiny_path: Path, tmp_path: Path, out: Path) -> None:
    (tmp_path / "key").write_text("s3cret-key\n")
    (tmp_path / "wrong").write_text("another-key\n")
    with serving(tiny_path, tmp_path / "log", "--api-key-file", str(tmp_path / "key")) as server:
        words = ["--url", f"127.0.0.1:{server.port}", "--pace", "fast", "--tail", 0, "--out", out, "--json"]
        for extra in ([], ["--api-key-file", tmp_path / "wrong"]):
            found = client("send", SPOKEN, *words, *extra)
            assert found.status == 5
            assert "wants a valid API key" in found.complaint()
            assert "another-key" not in found.out + found.err
        assert client("send", SPOKEN, *words, "--api-key-file", tmp_path / "key").status == 0
        server.wait_until_ready()
        found = client("ping", "--url", f"127.0.0.1:{server.port}", "--count", 2, VOICECHAT_API_KEY="s3cret-key")
        assert found.status == 0, found.err
        assert [line.split(" after ")[0] for line in found.out.splitlines()[1:]] == ["pong", "pong"]


class NotOurs(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), NotOurs)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_that_is_none_of_ours(out: Path) -> None:
    with http_server() as port:
        found = client("send", SPOKEN, "--url", f"http://127.0.0.1:{port}", "--out", out, "--json")
        assert found.status == 6
        assert "is no voicechat server" in found.complaint()
        found = client("ping", "--url", f"wss://127.0.0.1:{port}")
        assert found.status == 4
        assert "does not speak TLS" in found.complaint()


@pytest.mark.slow
def test_a_session_that_is_refused(tiny_path: Path, tmp_path: Path, out: Path) -> None:
    with serving(tiny_path, tmp_path / "log", "--prompt-chars", "5") as server:
        words = ["--url", f"127.0.0.1:{server.port}", "--out", out, "--json"]
        found = client("send", SPOKEN, *words, "--prompt", "too long")
    assert found.status == 8
    assert "at most 5 are taken" in found.complaint()
    assert not out.exists()


@pytest.mark.slow
def test_a_reader_that_has_enough(url: str, out: Path) -> None:
    """``voicechat-client send ... | true``: no traceback, and the status is the conversation's."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", RUN, "send", str(SPOKEN), "--url", url, "--pace", "fast", "--out", str(out)]
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True) as process:
        os.close(write)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (0, False), err
    assert len(sound_of(out)) == FRAME * 75


@pytest.mark.slow
def test_a_stdout_that_is_full(url: str, out: Path) -> None:
    command = [sys.executable, "-c", RUN, "send", str(SPOKEN), "--url", url, "--pace", "fast", "--out", str(out)]
    with Path("/dev/full").open("w") as full:
        found = subprocess.run(
            [*command, "--json"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert found.returncode == 1
    assert Ended(1, "", found.stderr).complaint() == "stdout cannot be written: No space left on device"
    assert len(sound_of(out)) == FRAME * 75


def test_a_session_that_ends_before_the_recording_does(tiny_path: Path, tmp_path: Path, out: Path) -> None:
    """The limit of a session is an end that nobody asked for."""
    with serving(tiny_path, tmp_path / "log", "--session-seconds", "1") as limited:
        words = ["send", SPOKEN, "--url", f"127.0.0.1:{limited.port}", "--out", out, "--json", "--pace", "realtime"]
        found = client(*words)
    assert found.status == 9
    assert found.json()["ended"] is None
    assert found.json()["frames"] * FRAME == len(sound_of(out))


def test_what_a_terminal_cannot_show(url: str, out: Path) -> None:
    """Random weights say what no ASCII can; the conversation was had all the same."""
    words = ["send", SPOKEN, "--url", url, "--out", out, "--pace", "fast", "--tail", "0"]
    found = client(*words, PYTHONIOENCODING="ascii")
    assert (found.status, found.err.count("Traceback")) == (0, 0)
    assert "assistant: " in found.out
    assert found.out.isascii()


def test_a_stderr_that_is_closed(url: str, out: Path) -> None:
    command = [sys.executable, "-c", RUN, "send", SPOKEN, "--url", url, "--out", out, "--pace", "fast", "--json"]
    shell = 'exec "$@" 2>&-'
    result = subprocess.run(
        ["sh", "-c", shell, "sh", *map(str, command)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert result.returncode == 0
    assert json.loads(result.stdout)["ended"] == "done"


def test_an_output_that_is_a_pipe(url: str, tmp_path: Path) -> None:
    """It would wait for somebody who reads it."""
    os.mkfifo(tmp_path / "pipe")
    found = client("send", SPOKEN, "--url", url, "--out", tmp_path / "pipe")
    assert (found.status, found.complaint()) == (1, f"{tmp_path / 'pipe'}: is a pipe; an output needs a file")


def test_the_key_is_no_output(url: str, tmp_path: Path, out: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    found = client("send", SPOKEN, "--url", url, "--out", out, "--events", key, "--api-key-file", key)
    assert found.status == 2
    assert "are one file" in found.complaint()
    assert key.read_text() == "secret"
