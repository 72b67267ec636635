"""What people have: each form, made here from known samples, reaches the server as those samples.

The server keeps what it hears (``--record``), and that is compared. Where the samples are the plain file's, so are the
answer's ids; where a coding or a resampler stood between, the difference has a bound.
"""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tests.e2e.commands import require_same_ids, wait_for
from tests.e2e.conftest import Offline
from tests.server.server_process import ServerProcess, serving
from voicechat_client.cli import app
from voicechat_core.audio import WIRE_SCALE, float_to_pcm16, read_audio

RATE = 16000
IDS = ("text_tokens", "function_tokens", "audio_codes", "transcript", "text", "function_text")


class House:
    """A server that records, and the command, in this process."""

    def __init__(self, server: ServerProcess, recordings: Path) -> None:
        self._server = server
        self._recordings = recordings
        self.folder = recordings  # of the last conversation

    def send(self, path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[dict[str, Any], np.ndarray]:
        """What the client tells, and the samples that the server heard."""
        self._server.wait_until_ready()
        before = set(self._recordings.iterdir())
        words = ["send", str(path), "--url", f"127.0.0.1:{self._server.port}", "--pace", "fast", "--tail", "0"]
        status = app([*words, *more, "--out", str(path.parent / "answer.wav"), "--json"], standalone_mode=False)
        assert not status
        (self.folder,) = set(self._recordings.iterdir()) - before
        wait_for(lambda: json.loads((self.folder / "session.json").read_text())["complete"])  # by a thread of its own
        return json.loads(capsys.readouterr().out), np.fromfile(self.folder / "input.pcm", "<i2")

    def messages(self) -> list[int]:
        """The samples of each message of audio that the server got last."""
        lines = [json.loads(line) for line in (self.folder / "wire.jsonl").read_text().splitlines()]
        said = [line["message"] for line in lines if line["what"] == "client"]
        return [message["audio"] for message in said if message["type"] == "input_audio_buffer.append"]


@pytest.fixture(scope="module")
def house(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    with serving(tiny_path, folder / "log", "--record", str(folder / "recordings")) as server:
        yield House(server, folder / "recordings")


@pytest.fixture(scope="module")
def clip(spoken: np.ndarray) -> np.ndarray:
    return spoken[8000:14001]


# ---- the same samples


def wav(data: bytes, *, form: bytes = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16), **odd: Any) -> bytes:
    """A WAV file, byte by byte."""
    chunks = b"WAVE" + odd.get("before", b"") + b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", odd.get("size", len(data))) + data
    return b"RIFF" + struct.pack("<I", odd.get("riff", len(chunks))) + chunks


def stored(container: str, subtype: str, channels: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> Any:
    def write(path: Path, clip: np.ndarray) -> None:
        samples = channels(clip)
        exact = samples / 32768 if subtype in ("FLOAT", "DOUBLE") else samples
        soundfile.write(path, exact, RATE, format=container, subtype=subtype)

    return write


def around(clip: np.ndarray, pairs: int) -> np.ndarray:
    """Channels that differ from the clip by noise that is gone from their mean."""
    noise = np.random.default_rng(0).integers(-2000, 2000, (pairs, len(clip)), np.int16)
    return np.stack([side for each in noise for side in (clip + each, clip - each)], axis=1)


def written(*pieces: Any, **odd: Any) -> Any:
    return lambda path, clip: path.write_bytes(wav(clip.astype("<i2").tobytes(), **odd))


EXTENSIBLE = struct.pack("<HHIIHHHHI", 0xFFFE, 1, RATE, 2 * RATE, 2, 16, 22, 16, 4)
EXTENSIBLE += struct.pack("<H", 1) + bytes.fromhex("000000001000800000aa00389b71")
LIST = b"LIST" + struct.pack("<I", 17) + b"INFOISFT" + struct.pack("<I", 5) + b"hello\0"

SAME = {
    "pcm24": stored("WAV", "PCM_24"),
    "pcm32": stored("WAV", "PCM_32"),
    "float32": stored("WAV", "FLOAT"),
    "float64": stored("WAV", "DOUBLE"),
    "extensible 16": written(form=EXTENSIBLE),
    "extensible 24": stored("WAVEX", "PCM_24"),
    "extensible float": stored("WAVEX", "FLOAT"),
    "stereo": stored("WAV", "PCM_16", lambda clip: around(clip, 1)),
    "six channels": stored("WAV", "PCM_16", lambda clip: around(clip, 3)),
    "six channels, extensible float": stored("WAVEX", "FLOAT", lambda clip: around(clip, 3)),
    "piped, sizes 0": written(riff=0, size=0),
    "piped, sizes 0xFFFFFFFF": written(riff=0xFFFFFFFF, size=0xFFFFFFFF),
    "odd LIST chunk": written(before=LIST),
    "RF64": stored("RF64", "PCM_16"),
    "AIFF": stored("AIFF", "PCM_16"),
    "FLAC": stored("FLAC", "PCM_16"),
    "FLAC 24": stored("FLAC", "PCM_24"),
    "FLAC stereo": stored("FLAC", "PCM_16", lambda clip: around(clip, 1)),
}


@pytest.fixture(scope="module")
def plain_answers(house: House, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The answer to the plain 16 kHz mono PCM16 file of samples, which the server heard as they are."""
    known: dict[bytes, dict[str, Any]] = {}
    path = tmp_path_factory.mktemp("plain") / "plain.wav"

    def answer(samples: np.ndarray, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        if (key := samples.tobytes()) not in known:
            path.write_bytes(wav(samples.astype("<i2").tobytes()))
            known[key], heard = house.send(path, capsys)
            assert np.array_equal(heard, samples)
        return known[key]

    return answer


@pytest.mark.parametrize("name", SAME)
def test_the_same_samples_in_another_form(
    name: str, house: House, plain_answers: Any, clip: np.ndarray, tmp_path: Path, capsys: Any
) -> None:
    SAME[name](tmp_path / "question", clip)
    told, heard = house.send(tmp_path / "question", capsys)
    assert np.array_equal(heard, clip)
    plain = plain_answers(clip, capsys)
    assert plain["frames"] == 5
    assert {key: told[key] for key in IDS} == {key: plain[key] for key in IDS}


# ---- codings that lose something

# Steps of 16 bits between what was coded and what was heard, at most. Of 8 bits: one of its steps. Of the logarithmic
# codings: half the widest step that these samples (up to 9800) reach. Of Vorbis: what was found, doubled.
CODED = {
    ("WAV", "PCM_U8"): 256,
    ("WAV", "ALAW"): 256,
    ("WAV", "ULAW"): 256,
    ("AU", "ULAW"): 256,
    ("OGG", "VORBIS"): 2000,
}


@pytest.mark.parametrize(("container", "subtype"), CODED)
def test_codings_that_lose_something(
    container: str, subtype: str, house: House, plain_answers: Any, clip: np.ndarray, tmp_path: Path, capsys: Any
) -> None:
    """Within a bound of the original, and the ids of what is left, written plainly."""
    path = tmp_path / "question"
    soundfile.write(path, clip, RATE, format=container, subtype=subtype)
    told, heard = house.send(path, capsys)
    assert len(heard) == len(clip)
    off = np.abs(heard.astype(int) - clip).max()
    assert 0 < off <= CODED[container, subtype]
    plain = plain_answers(heard, capsys)
    assert {key: told[key] for key in IDS} == {key: plain[key] for key in IDS}


# ---- other rates

SECONDS = 0.5
RESAMPLED = 3  # steps of 16 bits: soxr's high quality, and the rounding of the file and of what is sent


def tones(rate: int, held: int) -> np.ndarray:
    """Known at any time, as far as a rate of ``held`` can hold them, and quiet at both ends; int16 at ``rate``."""
    time = np.arange(round(SECONDS * rate)) / rate
    hertz = [tone for tone in (110, 440, 1000, 2900) if tone < 0.4 * held]
    sound = sum(np.sin(2 * np.pi * tone * time + tone) for tone in hertz)
    samples: np.ndarray = np.rint(5000 * sound * np.sin(np.pi * time / SECONDS) ** 2).astype(np.int16)
    return samples


RATES = [(4000, 1), (6000, 2), (8000, 1), (11025, 1), (11025, 2), (22050, 2), (24000, 1), (44100, 2), (48000, 1)]


@pytest.mark.parametrize(("rate", "channels"), [*RATES, (96000, 2)])
def test_other_rates(rate: int, channels: int, house: House, offline: Offline, tmp_path: Path, capsys: Any) -> None:
    """Within a bound of what an original at 16 kHz would be; the ids are those of the very samples that were sent."""
    path = tmp_path / "question.wav"
    soundfile.write(path, np.stack([tones(rate, rate)] * channels, axis=1), rate, subtype="PCM_16")
    told, heard = house.send(path, capsys)
    expected = tones(RATE, rate)
    assert len(heard) == told["sent_samples"] == pytest.approx(len(expected), abs=1)
    shared = min(len(heard), len(expected))
    assert np.abs(heard[:shared].astype(int) - expected[:shared]).max() <= RESAMPLED
    assert told["frames"] == 7
    require_same_ids(told, offline(heard))


@pytest.mark.parametrize(("container", "rate"), [("FLAC", 11025), ("OGG", 48000), ("WAV", 1000)])
def test_other_rates_in_other_codings(
    container: str, rate: int, house: House, offline: Offline, tmp_path: Path, capsys: Any
) -> None:
    """What was heard is what the core reads from the file at once; 1000 Hz is the lowest that can be."""
    path = tmp_path / "question"
    soundfile.write(path, tones(rate, rate), rate, format=container)
    told, heard = house.send(path, capsys)
    assert np.array_equal(heard, float_to_pcm16(read_audio(path, RATE), WIRE_SCALE))
    require_same_ids(told, offline(heard))


# ---- messages


@pytest.mark.parametrize("samples", [1, 160, 320, 1279, 1280, 1281, 16000, 40000])
def test_messages_are_as_long_as_asked(
    samples: int, house: House, clip: np.ndarray, tmp_path: Path, capsys: Any
) -> None:
    """The last one is what is left; the library sends none of more than a second."""
    length = 300 if samples == 1 else len(clip)
    (tmp_path / "question.wav").write_bytes(wav(clip[:length].astype("<i2").tobytes()))
    house.send(tmp_path / "question.wav", capsys, "--chunk-ms", str(samples / 16), "--tail", "0.01")
    total, most = length + 160, min(samples, 16000)
    assert house.messages() == [most] * (total // most) + ([total % most] if total % most else [])
