"""The lines at the end, and the comparison with what the model gives by itself."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import trio
from msgspec import UNSET

from tests.client.events import assistant, done, error, frame, function, lag, user
from voicechat_client.answer import Answer
from voicechat_client.check import CheckError, compare, examine, generate
from voicechat_client.report import report
from voicechat_core import wire


def test_a_report() -> None:
    answer = Answer()
    answer.started(10.0)
    answer.add(user(0, "Good\x1b day\n", "Good\x1b day\n"))
    answer.add(frame(0), 10.25)
    answer.add(assistant(1, " Hi", " Hi"))
    answer.add(frame(1), 10.5)
    answer.add(lag(160))
    answer.add(lag(80))
    answer.add(done(2))
    assert report(answer, 24000).splitlines() == [
        "user:      Good� day",
        "assistant: Hi",
        "sent 1.50 s, heard 0.16 s (2 frames), first audio after 0.25 s, at most 160 ms behind",
    ]


def test_a_report_of_little() -> None:
    answer = Answer()
    answer.add(function(0, "{}", "{}"))
    answer.add(lag(240, skipped=3))
    assert report(answer, 0).splitlines() == [
        "user:      (nothing)",
        "assistant: (nothing)",
        "function:  {}",
        "sent 0.00 s, heard 0.00 s (0 frames), at most 240 ms behind, 3 frames skipped, not finished",
    ]


@pytest.mark.parametrize(("recording", "told"), [(True, True), (False, False), (UNSET, False)])
def test_a_report_of_what_was_recorded(recording: Any, told: bool) -> None:
    answer = Answer()
    answer.add(wire.SessionCreated(event_id="e", session=wire.CreatedSession(id="s", recording=recording)))
    answer.add(done(0))
    assert answer.as_dict()["recording"] is told
    assert ("recorded by the server" in report(answer, 0)) is told


def test_a_report_of_errors_that_did_not_end_it() -> None:
    answer = Answer()
    for event in [error("inference_error", "odd\x07\nbytes")] * 3 + [error("a", "b")]:
        answer.add(event)
    answer.add(done(0))
    assert report(answer, 0).splitlines() == [
        "user:      (nothing)",
        "assistant: (nothing)",
        "error:     inference_error: odd\ufffd bytes (3 times)",
        "error:     a: b",
        "sent 0.00 s, heard 0.00 s (0 frames), at most 0 ms behind",
    ]
    for number in range(10):
        answer.add(error("more", str(number)))
    lines = report(answer, 0).splitlines()
    assert lines[-3:-1] == ["error:     more: 2", "error:     and 7 others"]
    assert len(lines) == 9


# ---- comparing

LIVE: dict[str, Any] = {
    "frames": 2,
    "frames_skipped": 0,
    "text_tokens": [1, 2],
    "function_tokens": [3, 4],
    "audio_codes": [[5, 6], [7, 8]],
    "transcript": "Good day",
    "text": "Hi",
    "function_text": "",
}
SOUND = np.random.default_rng(0).integers(-9000, 9000, 3528).astype(np.int16)
OFFLINE_SOUND = np.concatenate([SOUND[8:], np.zeros(8, np.int16)])  # heard eight samples earlier


def differences(offline: dict[str, Any] | None = None, sound: np.ndarray = OFFLINE_SOUND, **live: Any) -> list[str]:
    expected = {name: value for name, value in LIVE.items() if name != "frames_skipped"} | (offline or {})
    return [str(found) for found in compare(LIVE | live, SOUND, expected, sound)]


def test_the_same() -> None:
    assert differences() == []
    assert differences({"transcript": None}, transcript="") == []  # a checkpoint without a transcript branch
    assert differences(sound=OFFLINE_SOUND + np.tile([1, 0, -1], 1176).astype(np.int16)) == []


def test_what_differs_is_named_with_both_values() -> None:
    assert differences({"text_tokens": [1, 9]}) == ["text_tokens of frame 1: the server gave 2, generate 9"]
    assert differences({"function_tokens": [9, 9]}) == ["function_tokens of frame 0: the server gave 3, generate 9"]
    assert differences({"audio_codes": [[5, 6], [7, 9]]}) == [
        "audio_codes of frame 1: the server gave [7, 8], generate [7, 9]"
    ]
    assert differences({"audio_codes": [[5, 6]]}) == ["number of audio_codes: the server gave 2, generate 1"]
    assert differences({"text": "Ho"}) == ["text: the server gave 'Hi', generate 'Ho'"]
    assert differences({"transcript": None}) == ["transcript: the server gave 'Good day', generate ''"]
    assert differences({"frames": 3}) == ["frames: the server gave 2, generate 3"]
    assert differences(text_tokens=None) == ["text_tokens: the server gave None, generate [1, 2]"]
    assert differences({"function_text": "x" * 100})[0].endswith(f"generate '{'x' * 59}...")
    assert differences(frames_skipped=4)[0] == "frames that the server skipped: the server gave 4, generate 0"


@pytest.mark.parametrize("place", [6, 7, 1000, 3519])
def test_sound_that_differs(place: int) -> None:
    """From sample 14 of the live answer on, which is the offline one's 6th."""
    sound = OFFLINE_SOUND.copy()
    sound[place] += 2
    what = f"sound, 1 samples, the furthest at sample {place + 8}"
    assert differences(sound=sound) == [f"{what}: the server gave {SOUND[place + 8]}, generate {SOUND[place + 8] + 2}"]


def test_sound_that_does_not_count() -> None:
    """Before time 0 there is nothing to agree on, and the last eight samples are heard offline only."""
    sound = OFFLINE_SOUND.copy()
    sound[:6] += 100
    sound[-8:] += 100
    assert differences(sound=sound) == []


def test_sound_of_another_length() -> None:
    assert differences(sound=OFFLINE_SOUND[:-1]) == ["samples of sound: the server gave 3528, generate 3527"]


def program(tmp_path: Path, code: str) -> list[str]:
    (tmp_path / "program.py").write_text(code)
    return [sys.executable, str(tmp_path / "program.py")]


def test_the_command_is_run_with_what_was_sent(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "known.wav", SOUND, 22050, subtype="PCM_16")
    code = f"""
import json, shutil, sys
words = sys.argv[1:]
shutil.copy({str(tmp_path / "known.wav")!r}, words[words.index("--output-audio") + 1])
print(json.dumps(words))
"""
    for prompt, more in ((None, []), ("", ["-p", ""]), ("Be kind.", ["-p", "Be kind."])):
        run = partial(generate, "somewhere", tmp_path / "spoken.wav", program=program(tmp_path, code))
        told, sound = trio.run(partial(run, system_prompt=prompt, seed=2**64 - 1))
        words: Any = told
        assert words[:5] == ["generate", "-m", "somewhere", "--audio", str(tmp_path / "spoken.wav")]
        assert words[7:] == ["--seed", str(2**64 - 1), "--json", *more]
        assert np.array_equal(sound, SOUND)


def test_a_command_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str]) -> str:
        async def main() -> None:
            await generate("c", tmp_path / "spoken.wav", system_prompt=None, seed=0, program=command)

        with pytest.raises(CheckError) as caught:
            trio.run(main)
        return str(caught.value)

    assert fails(program(tmp_path, "import sys; print('first\\nlast', file=sys.stderr); sys.exit(3)")) == (
        "voicechat generate failed with 3: last"
    )
    assert fails(program(tmp_path, "import sys; sys.exit(1)")) == "voicechat generate failed with 1: no word"


def test_a_checkpoint_is_examined_before(tmp_path: Path) -> None:
    """It is there and whole, or one line says why not; the command is asked for as little as possible."""

    def examined(code: str, *words: str) -> str:
        lines = f"import json, sys; words = sys.argv[1:]; {code}"
        run = partial(examine, "some where", program=[*program(tmp_path, lines), *words])
        try:
            trio.run(run)
        except CheckError as error:
            return str(error)
        return ""

    assert examined("assert words == ['inspect', '--json', '--', 'some where'], words") == ""
    assert examined("print('a\\nb', file=sys.stderr); sys.exit(1)") == "voicechat inspect failed with 1: b"
    assert examined("sys.exit(3)") == "voicechat inspect failed with 3: no word"
    assert examined("print(json.dumps({'problems': ['no tail', 'x']})); sys.exit(1)") == "--check: no tail"


def test_a_command_that_cannot_be_run(tmp_path: Path) -> None:
    """As one whose interpreter has gone, or that is no program."""
    (tmp_path / "broken").write_text("#!/no/such/python\n")
    (tmp_path / "broken").chmod(0o755)
    (tmp_path / "plain").write_text("x")
    for name, said in (("broken", "No such file"), ("plain", "Permission denied"), ("none", "No such file")):
        place = str(tmp_path / name)
        with pytest.raises(CheckError, match=f"^--check: {place} cannot be run: {said}"):
            trio.run(partial(examine, "c", program=[place]))


def test_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    async def main() -> None:
        await generate("c", tmp_path / "spoken.wav", system_prompt=None, seed=0)

    with pytest.raises(CheckError, match=r"install \"voicechat-core\[mlx\]\""):
        trio.run(main)
