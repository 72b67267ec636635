"""What a server serves without ``-m``, and the client's command hears: the words of question and answer."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import client
from tests.server.server_process import ServerProcess, serving

QUESTIONS = Path(__file__).parents[1] / "data" / "small"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(None, tmp_path_factory.mktemp("small") / "log") as process:
        yield process


@pytest.mark.parametrize(
    ("recording", "asked", "answer"),
    [
        ("plus_awb", "what is nine plus zero", "Nine plus zero is nine."),
        ("opposite_jm_kumo", "what is the opposite of day", "The opposite of day is night."),
    ],
)
def test_a_voice_that_it_never_heard(
    small: ServerProcess, recording: str, asked: str, answer: str, tmp_path: Path
) -> None:
    small.wait_until_ready()
    words = ["--url", f"ws://127.0.0.1:{small.port}", "--pace", "fast", "--tail", 4, "--json"]
    found = client("send", QUESTIONS / f"{recording}.wav", *words, "--out", tmp_path / "answer.wav")
    assert found.status == 0, found.err
    told = found.json()
    assert (told["transcript"], told["text"], told["function_text"]) == (asked, answer, "")


def test_dice_are_rolled_by_a_tool(small: ServerProcess, tmp_path: Path) -> None:
    small.wait_until_ready()
    words = ["--url", f"ws://127.0.0.1:{small.port}", "--pace", "fast", "--tail", 4, "--json"]
    found = client("send", QUESTIONS / "dice_awb.wav", *words, "--out", tmp_path / "answer.wav")
    assert found.status == 0, found.err
    told = found.json()
    assert told["transcript"] == "please roll a dice"
    call = '<TOOLCALL>[{"name": "roll_dice", "arguments": {"sides": 6}}]</TOOLCALL>'
    assert call in told["function_text"]
    assert told["text"].startswith("You rolled a")
    assert told["function_calls"] == []


def rolled(small: ServerProcess, tmp_path: Path, *tools: str) -> dict[str, Any]:
    small.wait_until_ready()
    words = ["--url", f"ws://127.0.0.1:{small.port}", "--pace", "fast", "--tail", 6, "--json", *tools]
    found = client("send", QUESTIONS / "dice_awb.wav", *words, "--out", tmp_path / "answer.wav")
    assert found.status == 0, found.err
    return found.json()


@pytest.mark.parametrize(("number", "answer"), [("five", "You rolled a five."), ("two", "You rolled a two.")])
def test_it_reads_what_a_tool_says(small: ServerProcess, tmp_path: Path, number: str, answer: str) -> None:
    told = rolled(
        small, tmp_path, "--tools", "--tool", f"roll_dice=echo {number}"
    )  # which stands before that of --tools
    assert f'<TOOL_RESPONSE>["{number}"]</TOOL_RESPONSE>' in told["function_text"]
    assert told["text"] == answer
    [call] = told["function_calls"]
    assert (call["name"], call["arguments"]) == ("roll_dice", '{"sides": 6}')


def test_it_reads_the_dice_that_the_client_rolls(small: ServerProcess, tmp_path: Path) -> None:
    told = rolled(small, tmp_path, "--tools")
    response = re.search(r'<TOOL_RESPONSE>\["(one|two|three|four|five|six)"\]</TOOL_RESPONSE>', told["function_text"])
    assert response is not None
    assert told["text"] == f"You rolled a {response[1]}."
