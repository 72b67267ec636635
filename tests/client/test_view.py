"""What a person sees: on a terminal of known width, and as plain lines; and that it can only be read."""

import io
import sys
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.client.events import assistant, done, error, frame, function, lag, user
from voicechat_client import view as module
from voicechat_client.view import PlainView, View, watching

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202eevil\u2066\r\nnext\x00\x9b31m[red]not markup[/red]"
HARMLESS = "�]0;owned��[2J�evil�� next��31m[red]not markup[/red]"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one value is the time."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def screen(view: View, width: int = 60) -> list[str]:
    """Its lines, on a terminal without colours."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_screen(clock: list[float]) -> None:
    view = View(4.0)
    assert screen(view)[:2] == ["user", "assistant"]
    assert screen(view)[-1] == "sent 0.0 s of 4.0, heard 0.0 s, 0.0 frames/s"
    view.sent(np.zeros(32000, np.int16))
    view.heard(user(0, "Good", "Good"))
    view.heard(user(1, " day", "Good day"))
    view.heard(assistant(1, "Hi", "Hi there, how are you today? I am quite fine, and so is the weather."))
    view.heard(frame(0))
    clock[0] += 2.0
    view.heard(frame(24))
    assert screen(view) == [
        "user      Good day",
        "assistant Hi there, how are you today? I am quite fine, and",
        "          so is the weather.",
        "sent      " + "━" * 25,
        "sent 2.0 s of 4.0, heard 2.0 s, 12.5 frames/s",
    ]
    view.heard(function(24, "{}", "{}"))
    view.heard(error("inference_error", "two\nlines"))
    assert screen(view)[3:5] == ["function  {}", "error     inference_error: two lines"]


def test_numbers(clock: list[float]) -> None:
    view = View(None)
    view.sent(np.zeros(1600, np.int16))
    view.heard(frame(0))
    clock[0] += 0.5
    view.heard(frame(4))
    view.heard(lag(160, skipped=3))
    assert view.status() == "sent 0.1 s, heard 0.4 s, 10.0 frames/s, 160 ms behind, 3 frames skipped"
    view.heard(lag(0))
    assert "behind" not in view.status()


def test_a_text_that_is_revised(clock: list[float]) -> None:
    view = View(None)
    view.heard(user(0, "Goat", "Goat"))
    view.heard(user(1, "Good day", "Good day"))
    assert screen(view)[0] == "user      Good day"


def test_the_end_of_a_long_text_is_seen(clock: list[float]) -> None:
    view = View(None)
    view.heard(assistant(0, "", "x" * 5000 + " the end"))
    lines = screen(view)
    assert len(lines) < 20
    assert any(line.endswith("the end") for line in lines)
    assert sum(line.count("x") for line in lines) == 600 - len(" the end")


@pytest.mark.parametrize("width", [20, 80])
def test_hostile_text_on_the_screen(width: int, clock: list[float]) -> None:
    view = View(1.0)
    view.heard(user(0, HOSTILE, HOSTILE))
    view.heard(assistant(0, HOSTILE, HOSTILE))
    view.heard(function(0, HOSTILE, HOSTILE))
    view.heard(error(HOSTILE, HOSTILE))
    lines = screen(view, width)
    assert all(line.isprintable() for line in lines)
    assert all(len(line) <= width for line in lines)
    if width == 80:
        assert lines[0] == f"user      {HARMLESS}"


# ---- plain lines


def test_a_line_for_each_utterance(capsys: pytest.CaptureFixture[str]) -> None:
    """Once nothing was added to it for two seconds; the rest at the end."""
    with watching(None) as view:
        assert isinstance(view, PlainView)
        view.heard(user(0, "Good", "Good"))
        view.heard(frame(0))
        view.heard(user(1, " day", "Good day"))
        for index in range(1, 25):
            view.heard(frame(index))
        assert capsys.readouterr().err == ""
        view.heard(frame(25))
        assert capsys.readouterr().err == "   2.1 s  user      Good day\n"
        for index in range(26, 60):
            view.heard(frame(index))
        assert capsys.readouterr().err == ""
        view.heard(user(60, " to you", "Good day to you"))
        view.heard(assistant(60, "Hi", "Hi"))
        view.heard(function(60, " ", " "))
        view.heard(frame(60))
        view.heard(done(61))
        assert capsys.readouterr().err == ""
    found = capsys.readouterr()
    assert found.err == "   4.9 s  user      to you\n   4.9 s  assistant Hi\n"
    assert found.out == ""


def test_the_rest_is_written_however_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks() -> None:
        with watching(1.0) as view:
            view.heard(assistant(0, "Hi", "Hi"))
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert capsys.readouterr().err == "   0.0 s  assistant Hi\n"


def test_a_revision_is_written_whole(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(None)
    view.heard(user(0, "Goat", "Goat"))
    view.flush("user")
    view.heard(user(1, "Good day", "Good day"))
    view.flush("user")
    assert [line.split(maxsplit=3)[3] for line in capsys.readouterr().err.splitlines()] == ["Goat", "Good day"]


def test_hostile_text_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with watching(None) as view:
        view.heard(error(HOSTILE, HOSTILE))
        view.heard(user(0, HOSTILE, HOSTILE))
    lines = capsys.readouterr().err.split("\n")
    assert lines == [f"error {HARMLESS}: {HARMLESS}", f"   0.0 s  user      {HARMLESS}", ""]


def test_nobody_reads_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            raise OSError

    view: Any = PlainView(None)
    monkeypatch.setattr(sys, "stderr", Gone())
    view.heard(error("a", "b"))
    assert view.notes == ["a: b"]
