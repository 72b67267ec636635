"""What a server serves without ``-m``, and the client's command hears: the words of question and answer."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import Ended, client
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
    return sent_dice(small, tmp_path, *tools).json()


def sent_dice(small: ServerProcess, tmp_path: Path, *tools: str) -> Ended:
    small.wait_until_ready()
    words = ["--url", f"ws://127.0.0.1:{small.port}", "--pace", "fast", "--tail", 6, "--json", *tools]
    found = client("send", QUESTIONS / "dice_awb.wav", *words, "--out", tmp_path / "answer.wav")
    assert found.status == 0, found.err
    return found


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


def test_more_tokens_than_it_can_read_are_followed_by_an_error(small: ServerProcess, tmp_path: Path) -> None:
    """Fewer characters than the client sends by itself, so that only the server can know."""
    words = tmp_path / "words"
    words.write_text("why " * 1500)
    found = sent_dice(small, tmp_path, "--tool", f"roll_dice=cat {words}")
    assert "tool roll_dice: the server refused its result: conversation.item.create: the output of call_" in found.err
    told = found.json()
    assert [error["code"] for error in told["errors"]] == ["invalid_request"]
    assert '<TOOL_RESPONSE>[{"error": "the result was refused"}]</TOOL_RESPONSE>' in told["function_text"]


def test_a_tool_that_hangs_is_told(small: ServerProcess, tmp_path: Path) -> None:
    """However soon the conversation is over."""
    found = sent_dice(small, tmp_path, "--tool", "roll_dice=sleep 60")
    assert [line for line in found.err.splitlines() if line.startswith("tool ")] in (
        ["tool roll_dice: the conversation was over before it answered"],
        ["tool roll_dice: it did not answer within 8 seconds"],
    )


def test_a_result_that_is_nested_too_deeply_ends_nothing(small: ServerProcess, tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.write_text("[" * 500 + "]" * 500)
    found = sent_dice(small, tmp_path, "--tool", f"roll_dice=cat {deep}")
    assert "tool roll_dice: the result has 500 levels; 64 are the most" in found.err.splitlines()
    assert '{"error": "the result has 500 levels; 64 are the most"}' in found.json()["function_text"]
