"""What is kept of a conversation: which files, what is in them, and what cannot be."""

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import trio
from trio.testing import MockClock

from tests.client.events import FRAME, assistant, done, frame, function, lag, user
from voicechat_client.outputs import Outputs
from voicechat_core.errors import AudioError, InputError


def run(test: Callable[[], Any]) -> None:
    trio.run(test, clock=MockClock(autojump_threshold=0))


def test_everything_that_is_kept(tmp_path: Path) -> None:
    names = {"wav": "a.wav", "stereo": "s.wav", "spoken": "u.wav", "events": "e.jsonl", "transcript": "t.json"}
    paths = {name: tmp_path / file for name, file in names.items()}
    said = np.arange(1280, dtype=np.int16)

    async def main() -> None:
        with Outputs(**paths) as outputs:
            outputs.sent(said)
            await trio.sleep(0.25)
            outputs.heard(user(0, "Good", "Good"))
            outputs.heard(frame(0, sample=-7))
            await trio.sleep(0.08)
            outputs.heard(user(1, " day", "Good day"))
            outputs.heard(assistant(1, "Hi", "Hi"))
            outputs.heard(function(1, "{", "{"))
            outputs.heard(frame(1, sample=9))
            outputs.heard(done(2))

    run(main)
    answer, rate = soundfile.read(paths["wav"], dtype="int16")
    assert rate == 22050
    assert answer.tolist() == [-7] * FRAME + [9] * FRAME
    spoken, rate = soundfile.read(paths["spoken"], dtype="int16")
    assert rate == 16000
    assert np.array_equal(spoken, said)
    both, rate = soundfile.read(paths["stereo"], dtype="int16")
    assert rate == 22050
    assert both[:, 1].tolist() == answer.tolist()
    assert np.abs(both[100:1600, 0] - np.arange(100, 1600) * 16000 / 22050).max() < 2
    assert not both[FRAME:, 0].any()
    log = [json.loads(line) for line in paths["events"].read_text().splitlines()]
    assert [(event["seconds"], event["type"].split(".")[-2]) for event in log] == [
        (0.25, "input_audio_transcription"), (0.25, "audio"), (0.33, "input_audio_transcription"),
        (0.33, "text"), (0.33, "function"), (0.33, "audio"), (0.33, "response"),
    ]  # fmt: skip
    assert log[1]["delta"] == FRAME
    assert log[1]["audio_codes"] == list(range(31))
    assert log[4] == {
        "seconds": 0.33, "type": "response.function.delta", "event_id": "e",
        "frame_index": 1, "token_id": 1, "delta": "{", "text": 1,
    }  # fmt: skip
    assert (log[2]["delta"], log[2]["transcript"]) == (" day", len("Good day"))
    assert json.loads(paths["transcript"].read_text()) == [
        {"seconds": 0.0, "who": "user", "text": "Good"},
        {"seconds": 0.08, "who": "user", "text": " day"},
        {"seconds": 0.08, "who": "assistant", "text": "Hi"},
        {"seconds": 0.08, "who": "function", "text": "{"},
    ]


def test_the_log_grows_with_the_time_and_not_with_its_square(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    sizes = []

    async def main() -> None:
        with Outputs(events=path) as outputs:
            for index in range(2000):
                for say in (user, assistant, function):
                    outputs.heard(say(index, "word ", "word " * (index + 1)))
                if index in (999, 1999):
                    sizes.append(path.stat().st_size)

    run(main)
    assert 2 * sizes[0] < sizes[1] < 2.1 * sizes[0]


def test_no_more_words_are_kept_than_frames(tmp_path: Path) -> None:
    """However often a server adds to one frame's, and what is nothing not at all."""
    path = tmp_path / "t.json"

    async def main() -> None:
        with Outputs(transcript=path) as outputs:
            for _ in range(3):
                outputs.heard(assistant(0, "", ""))
            assert len(outputs._words) == 0
            for length in range(1, 9):
                outputs.heard(user(0, "u", "u" * length))
                outputs.heard(assistant(1, "a", "a" * length))
            assert len(outputs._words) == 2

    run(main)
    assert json.loads(path.read_text()) == [
        {"seconds": 0.0, "who": "user", "text": "u" * 8},
        {"seconds": 0.08, "who": "assistant", "text": "a" * 8},
    ]


def test_a_transcript_that_is_revised(tmp_path: Path) -> None:
    """The server has thought again: what it said before of this speaker is void."""
    path = tmp_path / "t.json"

    async def main() -> None:
        with Outputs(transcript=path) as outputs:
            outputs.heard(user(0, "Goat", "Goat"))
            outputs.heard(assistant(0, "Hi", "Hi"))
            outputs.heard(user(5, "Good day", "Good day"))
            outputs.heard(user(6, ".", "Good day."))

    run(main)
    assert json.loads(path.read_text()) == [
        {"seconds": 0.0, "who": "assistant", "text": "Hi"},
        {"seconds": 0.4, "who": "user", "text": "Good day"},
        {"seconds": 0.48, "who": "user", "text": "."},
    ]


def test_what_the_server_skipped_is_silence(tmp_path: Path) -> None:
    """Both voices stay on one clock; the answer by itself has no gap."""
    stereo, wav = tmp_path / "s.wav", tmp_path / "a.wav"

    async def main() -> None:
        with Outputs(stereo=stereo, wav=wav) as outputs:
            outputs.sent(np.full(5 * 1280, 1000, np.int16))
            outputs.heard(frame(0, sample=7))
            outputs.heard(lag(80, skipped=2))
            outputs.heard(lag(80, skipped=2))
            outputs.heard(frame(1, sample=8))
            outputs.heard(lag(0, skipped=3))
            size = wav.stat().st_size
            outputs.heard(lag(0, skipped=10**12))  # of five frames that it was sent
            outputs.heard(lag(0, skipped=3))
            outputs.heard(frame(2, sample=9))
            outputs.heard(lag(0, skipped=10**12))
            assert wav.stat().st_size == size + 2 * FRAME

    run(main)
    right = soundfile.read(stereo, dtype="int16")[0][:, 1]
    assert right.tolist() == [7] * FRAME + [0] * 2 * FRAME + [8] * FRAME + [0] * 3 * FRAME + [9] * FRAME
    assert soundfile.read(wav, dtype="int16")[0].tolist() == [7] * FRAME + [8] * FRAME + [9] * FRAME


@pytest.mark.parametrize(("samples", "most"), [(0, 0), (1279, 0), (1280, 1), (2 * 1280, 2)])
def test_no_more_is_skipped_than_was_sent(samples: int, most: int, tmp_path: Path) -> None:
    stereo = tmp_path / "s.wav"

    async def main() -> None:
        with Outputs(stereo=stereo) as outputs:
            outputs.heard(lag(80, skipped=10**12))
            outputs.sent(np.zeros(samples, np.int16))
            outputs.heard(lag(80, skipped=10**12))
            outputs.heard(frame(0, sample=5))

    run(main)
    right = soundfile.read(stereo, dtype="int16")[0][:, 1]
    assert np.flatnonzero(right)[0] == most * FRAME


def test_nothing_is_touched_before_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(b"from before")
    Outputs(wav=path, events=tmp_path / "new").check()
    assert path.read_bytes() == b"from before"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_in_the_block_finishes_the_files_and_is_told(tmp_path: Path) -> None:
    """Also where a file cannot be finished."""

    def breaks() -> None:
        with Outputs(wav=tmp_path / "a.wav", transcript=Path("/dev/full")) as outputs:
            outputs.heard(frame(0, sample=5))
            raise KeyError

    async def main() -> None:
        with pytest.raises(KeyError):
            breaks()
        assert soundfile.read(tmp_path / "a.wav", dtype="int16")[0].tolist() == [5] * FRAME
        with pytest.raises(AudioError, match=r"^/dev/full: .*No space left"), Outputs(transcript=Path("/dev/full")):
            pass

    run(main)


@pytest.mark.parametrize("name", ["wav", "stereo", "spoken", "events"])
def test_a_full_disk_is_one_error(name: str) -> None:
    async def main() -> None:
        with Outputs(**{name: Path("/dev/full")}) as outputs:
            for index in range(2):
                outputs.sent(np.zeros(1280, np.int16))
                outputs.heard(frame(index))

    with pytest.raises(AudioError, match=r"^/dev/full: .*No space left"):
        run(main)


def test_a_log_that_is_full_takes_nothing_from_the_others(tmp_path: Path) -> None:
    """Each has what was told, also in the very call that failed."""
    paths = {name: tmp_path / name for name in ("wav", "stereo", "transcript")}

    async def main() -> None:
        with Outputs(**paths, events=Path("/dev/full")) as outputs:
            outputs.sent(np.zeros(1280, np.int16))
            for event in (assistant(0, "Hi", "Hi"), frame(0, sample=7)):
                with pytest.raises(AudioError, match="/dev/full"):
                    outputs.heard(event)

    run(main)
    assert soundfile.read(paths["wav"], dtype="int16")[0].tolist() == [7] * FRAME
    assert soundfile.read(paths["stereo"], dtype="int16")[0][:, 1].tolist() == [7] * FRAME
    assert [word["text"] for word in json.loads(paths["transcript"].read_text())] == ["Hi"]


def test_a_log_on_a_full_disk_has_whole_lines(tmp_path: Path) -> None:
    """The kernel takes a part of a line, and that is taken back; a shorter line still finds room."""
    events = tmp_path / "e.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def main() -> None:
        with Outputs(events=events) as outputs:
            outputs.heard(done(1))
            size = events.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size + 10, before[1]))
            with pytest.raises(AudioError, match=rf"^{events}: cannot be written: File too large$"):
                outputs.heard(frame(0))
            outputs.heard(done(2))

    try:
        run(main)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert [line["frame_index"] for line in lines] == [1, 2]


@pytest.mark.parametrize("name", ["wav", "stereo", "events", "transcript", "spoken"])
def test_places_that_cannot_be(name: str, tmp_path: Path) -> None:
    for place, said in ((tmp_path / "no" / "file", "there is no directory"), (tmp_path, "is a directory")):
        with pytest.raises(AudioError, match=f"^{place}: {said}"):
            Outputs(**{name: place}).check()

    async def main() -> None:
        with pytest.raises(AudioError, match=str(tmp_path)), Outputs(**{name: tmp_path}):
            pass

    run(main)


@pytest.mark.parametrize("name", ["wav", "stereo", "events", "transcript", "spoken"])
def test_a_pipe_is_no_output(name: str, tmp_path: Path) -> None:
    """Opening it would wait for somebody who reads."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for place in ("pipe", "link"):
        with pytest.raises(AudioError, match=f"^{tmp_path / place}: is a pipe; an output needs a file$"):
            Outputs(**{name: tmp_path / place}).check()


@pytest.mark.parametrize("name", ["wav", "stereo", "events", "transcript"])
def test_standard_output_is_no_output(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the report, or the one JSON object. Whatever it is, it has more names than one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"^-: an output needs a file; standard output has the report"):
        Outputs(**{name: Path("-")})
    log = str(tmp_path / "log")
    names = ((1, "/dev/stdout"), (2, "/dev/stderr"), (1, "/dev/fd/1"), (2, "/dev/fd/2"), (1, log), (2, log))
    for number, place in names:
        with Path(log).open("wb") as file, replaced(file.fileno(), number):
            with pytest.raises(InputError, match=f"^{place}: an output needs a file of its own; standard output or"):
                Outputs(**{name: Path(place)})
            Outputs(**{name: tmp_path / "other"})
    with Path(os.devnull).open("wb") as file, replaced(file.fileno(), 1):
        Outputs(**{name: Path(os.devnull)})


@contextmanager
def replaced(by: int, number: int) -> Iterator[None]:
    """A file descriptor of this process, for as long as the block lasts."""
    kept = os.dup(number)
    os.dup2(by, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def test_two_names_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    question = tmp_path / "q.wav"
    question.write_bytes(b"x")
    (tmp_path / "link.wav").symlink_to(question)
    (tmp_path / "hard.wav").hardlink_to(question)
    for other in (str(question), "q.wav", "link.wav", "~/q.wav", "hard.wav", "./q.wav"):
        with pytest.raises(InputError, match="are one file"):
            Outputs(wav=Path(other), inputs=[question])
        with pytest.raises(InputError, match="are one file"):
            Outputs(wav=Path(other), events=question)
    with pytest.raises(InputError, match="are one file"):
        Outputs(wav=Path("new.wav"), stereo=tmp_path / "new.wav")
    Outputs(wav=Path("/dev/null"), stereo=Path("/dev/null"), inputs=[question, Path("-")])


def test_a_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    async def main() -> None:
        with Outputs(wav=Path("~/a.wav"), events=Path("~/e.jsonl"), stereo=Path("~/s.wav")):
            pass

    run(main)
    assert {path.name for path in tmp_path.iterdir()} == {"a.wav", "e.jsonl", "s.wav"}
