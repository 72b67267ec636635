"""``... | voicechat-client send -``: what people pipe reaches the model as the samples that went in.

Each by a real shell, a real pipe and a real server; what the answer must be, the model says by itself.
"""

import io
import os
import shlex
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.e2e.commands import FRAME, RUN, Ended, begun, ended, require_same_ids, samples_in, sound_of, wait_for
from tests.e2e.conftest import Offline

SEND = f"{shlex.quote(sys.executable)} -c {shlex.quote(RUN)} send"
# As ffmpeg begins a WAV that it pipes: sizes that nobody knows, and who wrote it.
FFMPEG = b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
FFMPEG += b"LIST\x1a\0\0\0INFOISFT\x0e\0\0\0Lavf60.16.100\0data\xff\xff\xff\xff"


@pytest.fixture
def clip(spoken: np.ndarray) -> np.ndarray:
    return spoken[8000:20001]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answer.wav"


def shell(line: str, url: str, out: Path, folder: Path) -> Ended:
    """Run a line of bash; ``SEND`` in it is the command, with its options behind what is named."""
    options = f"--url {url} --pace fast --tail 0 --json --out {shlex.quote(str(out))}"
    words = ["bash", "-o", "pipefail", "-c", line.replace("SEND", SEND).replace("OPTIONS", options)]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return Ended(result.returncode, result.stdout, result.stderr)


def coded(samples: np.ndarray, container: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format=container)
    return file.getvalue()


@pytest.mark.parametrize(
    ("line", "container"),
    [
        ("cat a.wav | SEND - OPTIONS", "WAV"),
        ("SEND - OPTIONS < a.wav", "WAV"),
        ("SEND <(cat a.wav) OPTIONS", "WAV"),
        ("cat a.wav | SEND - OPTIONS", "FLAC"),
        pytest.param("SEND <(cat a.wav) OPTIONS", "FLAC", marks=pytest.mark.slow),
    ],
)
def test_a_file_by_any_way(
    line: str, container: str, url: str, offline: Offline, clip: np.ndarray, out: Path, tmp_path: Path
) -> None:
    """A FLAC, too, which has to be read to its end before it can be decoded."""
    (tmp_path / "a.wav").write_bytes(coded(clip, container))
    found = shell(line, url, out, tmp_path)
    assert found.status == 0, found.err
    assert found.json()["sent_samples"] == len(clip)
    require_same_ids(found.json(), offline(clip))
    assert len(sound_of(out)) == FRAME * found.json()["frames"]


def test_an_ogg_by_a_pipe(url: str, offline: Offline, clip: np.ndarray, out: Path, tmp_path: Path) -> None:
    """It loses something; the answer is to what is left."""
    data = coded(clip, "OGG")
    (tmp_path / "a.ogg").write_bytes(data)
    found = shell("cat a.ogg | SEND - OPTIONS", url, out, tmp_path)
    assert found.status == 0, found.err
    left = np.rint(soundfile.read(io.BytesIO(data), dtype="float32")[0] * 32768).clip(-32768, 32767)
    require_same_ids(found.json(), offline(left.astype(np.int16)))


def test_a_header_as_ffmpeg_pipes_it(url: str, offline: Offline, clip: np.ndarray, out: Path, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(FFMPEG + clip.tobytes())
    found = shell("cat a.wav | SEND - OPTIONS", url, out, tmp_path)
    assert found.status == 0, found.err
    require_same_ids(found.json(), offline(clip))


def test_a_flac_that_was_piped_into_a_file(url: str, clip: np.ndarray, out: Path, tmp_path: Path) -> None:
    """Its header has no length, since nobody could go back to it: one line says what to do."""
    data = bytearray(coded(clip, "FLAC"))
    assert data[4] & 0x7F == 0  # STREAMINFO; its samples are counted in 36 bits
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])
    (tmp_path / "a.flac").write_bytes(data)
    for line, name in (("cat a.flac | SEND - OPTIONS", "stdin"), ("SEND a.flac OPTIONS", "a.flac")):
        found = shell(line, url, out, tmp_path)
        assert found.status == 1
        assert (
            found.complaint() == f"{name}: its FLAC header does not say how long it is; write it to a file, not a pipe"
        )
        assert not out.exists()


@pytest.mark.parametrize("data", [b"", b"hello\n" * 100, FFMPEG, FFMPEG + b"\0"])
def test_a_pipe_of_nothing(data: bytes, url: str, out: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(data)
    found = shell("cat a | SEND - OPTIONS", url, out, tmp_path)
    assert found.status == 1
    assert found.complaint().startswith("stdin: ")
    assert found.json()["sent_samples"] == 0


def test_a_program_that_fails(url: str, offline: Offline, clip: np.ndarray, out: Path, tmp_path: Path) -> None:
    """Nothing in a pipe says so: what came is answered; with a length in the header, it is known to be too short."""
    (tmp_path / "a.wav").write_bytes(FFMPEG + clip.tobytes())
    found = shell(f"head -c {len(FFMPEG) + 16001} a.wav | SEND - OPTIONS", url, out, tmp_path)
    assert found.status == 0, found.err
    require_same_ids(found.json(), offline(clip[:8000]))
    (tmp_path / "b.wav").write_bytes(coded(clip, "WAV"))
    found = shell("head -c 16045 b.wav | SEND - OPTIONS", url, out, tmp_path)
    assert found.status == 1
    assert found.complaint() == "stdin: truncated: its header says 24002 bytes of audio, 16001 are there"
    assert found.json()["sent_samples"] == 8000
    assert len(sound_of(out)) == FRAME * found.json()["frames"]


def test_a_pipe_that_trickles(url: str, offline: Offline, clip: np.ndarray, out: Path) -> None:
    """Seven bytes at a time, the header too; what has come is answered while the rest is still to come."""
    data = FFMPEG + clip.tobytes()
    words = ["send", "-", "--url", url, "--pace", "fast", "--tail", 0, "--json", "--out", out]
    with begun(*words, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        pipe = process.stdin.fileno()

        def trickle(begin: int, end: int) -> None:
            for at in range(begin, end, 7):
                os.write(pipe, data[at : min(at + 7, end)])
                if at % 700 == 0:
                    time.sleep(0.001)

        half = len(FFMPEG) + 16000  # 6 frames and a quarter: the seventh is due with its first 200 samples
        trickle(0, half)
        wait_for(lambda: samples_in(out) == 7 * FRAME)
        trickle(half, len(data))
        found = ended(process)
    assert found.status == 0, found.err
    require_same_ids(found.json(), offline(clip))
