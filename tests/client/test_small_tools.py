"""The tools of voicechat-small: in the words that it was trained to read, and no others."""

from datetime import datetime
from typing import Any

import pytest
import trio

from training import domain
from voicechat_client.small_tools import NUMBERS, small_tools, spoken_time
from voicechat_client.tools import Tool, ToolError


def said(tool: Tool, **arguments: Any) -> object:
    async def main() -> object:
        return await tool(arguments)

    return trio.run(main)


@pytest.mark.parametrize(
    ("hour", "minute", "words"),
    [
        (15, 45, "three forty five"), (15, 59, "three forty five"), (3, 44, "three thirty"), (0, 0, "twelve o'clock"),
        (12, 14, "twelve o'clock"), (13, 15, "one fifteen"), (23, 30, "eleven thirty"), (11, 29, "eleven fifteen"),
    ],
)  # fmt: skip
def test_the_time_is_rounded_down_to_the_quarter(hour: int, minute: int, words: str) -> None:
    now = datetime(2026, 11, 30, hour, minute, 59)
    assert spoken_time(now) == words
    assert said(small_tools(now=lambda: now)["get_time"]) == words


def test_every_time_is_one_that_the_domain_has() -> None:
    answers = {turn.answer for turn in domain.finite_turns("time", held=None)}
    day = [spoken_time(datetime(2026, 1, 1, hour, minute)) for hour in range(24) for minute in range(60)]
    assert {f"It is {words}." for words in day} == answers


def test_numbers_are_the_domains() -> None:
    assert NUMBERS == domain.NUMBERS


def test_dice_fall_on_numbers_that_the_domain_has() -> None:
    asked = []

    def roll(least: int, most: int) -> int:
        asked.append((least, most))
        return most

    dice = small_tools(roll=roll)["roll_dice"]
    assert [said(dice, sides=sides) for sides in (1, 6, 12, 20)] == ["one", "six", "twelve", "twenty"]
    assert said(dice) == "six"
    assert asked == [(1, 1), (1, 6), (1, 12), (1, 20), (1, 6)]
    answers = {turn.answer for turn in domain.finite_turns("dice", held=None)}
    real = small_tools()["roll_dice"]
    rolled = {said(real, sides=6) for _ in range(40)}
    assert rolled <= {"one", "two", "three", "four", "five", "six"}
    assert len(rolled) > 1
    assert all(f"You rolled {'an' if word == 'eight' else 'a'} {word}." in answers for word in rolled)


@pytest.mark.parametrize("sides", [0, 21, 2.5, "six", True, None])
def test_dice_that_there_are_not(sides: Any) -> None:
    with pytest.raises(ToolError, match="a whole number from 1 to 20 is needed"):
        said(small_tools()["roll_dice"], sides=sides)
