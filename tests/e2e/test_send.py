"""A WAV through a real server by ``voicechat-client send``: the answer is what ``voicechat generate`` gives."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from tests.e2e.commands import FRAME, begun, client, ended, events_of, samples_in, sound_of, wait_for
from tests.e2e.conftest import SPOKEN, Offline
from tests.server.server_process import serving
from voicechat_core.audio import float_to_pcm16
from voicechat_core.offline import GenerationResult
from voicechat_core.synthetic import synthesize

LEAD_IN = 8  # samples: a live answer is heard so much later
SETTLED = 14
NAMES = ("transcript", "text", "function_text", "text_tokens", "function_tokens", "frames", "sample_rate", "seed")
CHUNKS = (10, 20, 79.9375, 80, 80.0625, 1000)


def require_same(told: dict[str, Any], sound: np.ndarray, expected: GenerationResult) -> None:
    """Ids, codes and texts equal; sound within one step of 16 bits under the lead-in."""
    assert {name: told[name] for name in NAMES} == {name: getattr(expected, name) for name in NAMES}
    assert told["audio_codes"] == expected.audio_codes.tolist()
    assert told["seconds"] == expected.seconds
    assert (told["ended"], told["errors"], told["frames_skipped"]) == ("done", [], 0)
    assert len(sound) == FRAME * expected.frames
    live, offline = sound.astype(int), float_to_pcm16(expected.audio).astype(int)
    assert np.abs(live[SETTLED:] - offline[SETTLED - LEAD_IN : -LEAD_IN]).max() <= 1
    assert live.any()


def sent(samples: np.ndarray, tail: float) -> np.ndarray:
    return np.concatenate([samples, np.zeros(round(tail * 16000), np.int16)])


def test_spoken_words_at_once(url: str, offline: Offline, spoken: np.ndarray, tmp_path: Path) -> None:
    out = tmp_path / "answer.wav"
    words = ["--url", url, "--pace", "fast", "--out", out, "--prompt", "Be concise.", "--seed", 5, "--json"]
    found = client("send", SPOKEN, *words)
    assert found.status == 0, found.err
    require_same(found.json(), sound_of(out), offline(sent(spoken, 3.0), "Be concise.", 5))
    assert found.json()["sent_samples"] == len(spoken) + 48000


CASES = [
    # pace, chunk, samples of the clip, tail, prompt, seed
    *[("fast", chunk, 12345, 0.3, None, 0) for chunk in (20, 79.9375, 1000)],
    ("fast", 0.0625, 900, 0.05, None, 2),  # one sample a message
    ("fast", 20, 12345, 0.0, "", 1),  # neither tail nor prompt
    ("fast", 20, 1, 0.0, "Be kind.", 2**64 - 1),  # the shortest recording there is
    ("realtime", 20, 12345, 0.3, "Be kind.", 3),
]
SLOW = [
    *[("fast", chunk, 12345, 0.3, None, 0) for chunk in (10, 80, 80.0625)],
    ("realtime", 79.9375, 12345, 0.0, None, 0),
    *[("realtime", chunk, 12345, 0.3, None, 0) for chunk in CHUNKS],
    ("realtime", 0.0625, 900, 0.05, None, 2),
    *[("fast", chunk, None, 3.0, "Be concise.", 5) for chunk in CHUNKS],
    *[("realtime", chunk, None, 3.0, "Be concise.", 5) for chunk in (20, 79.9375)],
    ("fast", 0.0625, None, 0.0, None, 0),
]


@pytest.mark.parametrize(
    ("pace", "chunk", "length", "tail", "prompt", "seed"),
    [*CASES, *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]],
)
def test_every_pace_and_chunk_gives_the_same(
    pace: str, chunk: float, length: int | None, tail: float, prompt: str | None, seed: int,
    url: str, offline: Offline, spoken: np.ndarray, tmp_path: Path,
) -> None:  # fmt: skip
    question, out, events = (tmp_path / name for name in ("question.wav", "answer.wav", "events.jsonl"))
    soundfile.write(question, clip := spoken[:length], 16000, subtype="PCM_16")
    words: list[object] = ["--url", url, "--pace", pace, "--chunk-ms", chunk, "--tail", tail, "--seed", seed]
    words += [] if prompt is None else ["--prompt", prompt]
    found = client("send", question, *words, "--out", out, "--events", events, "--json")
    assert found.status == 0, found.err
    everything = sent(clip, tail)
    require_same(found.json(), sound_of(out), offline(everything, prompt, seed))
    assert found.json()["sent_samples"] == len(everything)
    took = events_of(events)[-1]["seconds"]
    if pace == "realtime":
        assert took >= len(everything) / 16000 - 0.1


def test_all_files_tell_the_same_conversation(url: str, spoken: np.ndarray, tmp_path: Path) -> None:
    names = ("answer.wav", "both.wav", "events.jsonl", "words.json")
    out, stereo, events, words = (tmp_path / name for name in names)
    options = ["--out", out, "--stereo", stereo, "--events", events, "--transcript", words]
    found = client("send", SPOKEN, "--url", url, "--pace", "fast", "--tail", 0.5, *options, "--json")
    assert found.status == 0, found.err
    told, sound, both = found.json(), sound_of(out), sound_of(stereo, channels=2)
    everything = sent(spoken, 0.5).astype(np.float32) / 32768
    left = float_to_pcm16(soxr.resample(everything, 16000, 22050, quality="HQ"), 32768)
    assert np.array_equal(both[: len(left), 0], left)
    assert np.array_equal(both[: len(sound), 1], sound)
    assert len(both) == max(len(left), len(sound))
    log = events_of(events)
    audio = [event for event in log if event["type"] == "response.audio.delta"]
    assert [event["audio_codes"] for event in audio] == told["audio_codes"]
    assert [event["delta"] for event in audio] == [FRAME] * told["frames"]
    assert [event["frame_index"] for event in audio] == list(range(told["frames"]))
    assert [event["type"] for event in log[:2]] == ["session.created", "session.updated"]
    assert log[-1]["type"] == "response.done"
    assert [event["seconds"] for event in log] == sorted(event["seconds"] for event in log)
    said = json.loads(words.read_text())
    for who, name in (("user", "transcript"), ("assistant", "text"), ("function", "function_text")):
        parts = [part for part in said if part["who"] == who]
        assert "".join(part["text"] for part in parts) == told[name]
        assert [part["seconds"] for part in parts] == sorted(part["seconds"] for part in parts)
        assert all(0 <= part["seconds"] <= told["seconds"] for part in parts)


def test_what_a_person_reads(url: str, tmp_path: Path) -> None:
    out = tmp_path / "answer.wav"
    found = client("send", SPOKEN, "--url", url, "--pace", "fast", "--tail", 0, "--out", out)
    assert found.status == 0, found.err
    lines = found.out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["user", "assistant", "function"]
    assert lines[0].startswith("user:      voice")
    assert lines[3].startswith("sent 2.99 s, heard 3.04 s (38 frames), first audio after ")
    assert lines[4:] == [str(out)]
    assert found.out.replace("\n", "").isprintable()
    assert found.err.replace("\n", "").isprintable()
    spoken = [line.split()[2] for line in found.err.splitlines()]
    assert set(spoken) == {"user", "assistant", "function"}


def test_the_answer_is_compared_with_a_checkpoint(url: str, tiny_path: Path, tmp_path: Path) -> None:
    """And it matters which; the sound is compared even where it is not kept."""
    words = ["--pace", "fast", "--tail", 0.3, "--prompt", "Be concise.", "--seed", 5, "--check", tiny_path]
    same = client("send", SPOKEN, "--url", url, *words, "--out", "/dev/null")
    assert same.status == 0, same.err
    assert same.out.splitlines()[-1] == f"check: ids, codes, texts and sound are those of {tiny_path}"
    synthesize(tmp_path / "other", seed=1)
    with serving(tmp_path / "other", tmp_path / "log") as other:
        place = f"ws://127.0.0.1:{other.port}"
        found = client("send", SPOKEN, "--url", place, *words, "--out", tmp_path / "a.wav", "--json")
    assert found.status == 1
    differences = found.json()["check"]
    assert differences[0].startswith("text_tokens of frame 0: the server gave ")
    named = [difference.split(" of ")[0].split(":")[0] for difference in differences]
    for what in ("text_tokens", "function_tokens", "audio_codes", "text", "function_text"):
        assert what in named
    assert differences[-1].startswith("sound, ")
    assert "error" not in found.json()


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such names")
def test_a_name_that_is_no_text(url: str, tmp_path: Path) -> None:
    out = os.fsdecode(bytes(tmp_path) + b"/caf\xff.wav")
    found = client("send", SPOKEN, "--url", url, "--pace", "fast", "--tail", 0, "--out", out)
    assert (found.status, found.out.splitlines()[-1]) == (0, f"{tmp_path}/caf\ufffd.wav")
    assert samples_in(Path(out)) == FRAME * 38


@pytest.mark.slow
def test_a_check_that_cannot_be_made_keeps_the_answer(url: str, tiny_path: Path, tmp_path: Path) -> None:
    """A number that is none is found by those who load it only."""
    out, broken = tmp_path / "a.wav", tmp_path / "broken"
    shutil.copytree(tiny_path, broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", np.nan))
    words = ["--pace", "fast", "--tail", 0, "--out", out, "--check", broken, "--json"]
    found = client("send", SPOKEN, "--url", url, *words)
    assert found.status == 1
    assert "voicechat generate failed with 1" in found.complaint()
    assert "broken" in found.complaint()
    told = found.json()
    assert told["frames"] == len(sound_of(out)) / FRAME == 38
    assert told["error"] == found.complaint()
    assert "check" not in told


def test_a_pipe_that_pauses_is_answered_meanwhile(
    url: str, offline: Offline, spoken: np.ndarray, tmp_path: Path
) -> None:
    """As ``arecord | voicechat-client send -``: what has come is sent, and the answer to it heard."""
    out, plain = tmp_path / "a.wav", tmp_path / "plain.wav"
    soundfile.write(plain, spoken[:32000], 16000, subtype="PCM_16")
    data = plain.read_bytes()
    data = data[:4] + b"\xff\xff\xff\xff" + data[8:40] + b"\xff\xff\xff\xff" + data[44:]
    words = ["--url", url, "--pace", "fast", "--tail", 0, "--out", out, "--json"]
    with begun("send", "-", *words, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        raw = process.stdin.buffer  # type: ignore[attr-defined]
        raw.write(data[: 44 + 32000])
        raw.flush()
        wait_for(lambda: samples_in(out) >= FRAME * 12)
        raw.write(data[44 + 32000 :])
        found = ended(process)
    assert found.status == 0, found.err
    require_same(found.json(), sound_of(out), offline(spoken[:32000]))


def test_a_terminal_shows_it_live(url: str, tmp_path: Path) -> None:
    """On stderr; stdout is JSON alone."""
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 70, 0, 0))
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux says so when the last one that writes has closed
            while data := os.read(near, 65536):
                shown.extend(data)

    reader = Thread(target=read)
    reader.start()
    words = ["--url", url, "--tail", 0, "--out", tmp_path / "a.wav", "--json"]
    with begun("send", SPOKEN, *words, stderr=far, TERM="xterm-256color") as process:
        os.close(far)
        found = ended(process)
    reader.join()
    os.close(near)
    assert found.status == 0
    told = found.json()
    screen = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", bytes(shown)).decode()
    lines = [line.rstrip() for line in screen.replace("\r", "\n").split("\n")]
    assert [line for line in lines if len(line) > 70] == []
    assert f"user      {told['transcript'].strip()}" in lines
    assert len({line for line in lines if line.startswith("sent ")}) > 5  # it moves
    (last,) = [line for line in lines if line.startswith("sent ")][-1:]
    assert last.startswith("sent 3.0 s of 3.0, heard 3.0 s, ")
    assert b"\x1b[?25h" in shown  # the cursor is there again
