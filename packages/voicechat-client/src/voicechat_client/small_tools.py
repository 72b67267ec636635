"""The tools that ``voicechat-small`` calls, in the words that it can read: the time and dice.

The weather is not among them: nobody here knows it.
"""

import random
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from voicechat_client.tools import Tool, ToolError

__all__ = ["small_tools", "spoken_time"]

NUMBERS: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
QUARTERS: Final = ("o'clock", "fifteen", "thirty", "forty five")
DICE_SIDES: Final = 6
MOST_SIDES: Final = len(NUMBERS) - 1


def small_tools(
    now: Callable[[], datetime] = datetime.now, roll: Callable[[int, int], int] = random.randint
) -> dict[str, Tool]:
    """``get_time`` and ``roll_dice``; ``roll`` gives a number from its first argument to its second."""

    async def get_time(arguments: dict[str, Any]) -> object:
        return spoken_time(now())

    async def roll_dice(arguments: dict[str, Any]) -> object:
        sides = arguments.get("sides", DICE_SIDES)
        if not isinstance(sides, int) or isinstance(sides, bool) or not 1 <= sides <= MOST_SIDES:
            raise ToolError(f"sides is {sides!r}; a whole number from 1 to {MOST_SIDES} is needed")
        return NUMBERS[roll(1, sides)]

    return {"get_time": get_time, "roll_dice": roll_dice}


def spoken_time(now: datetime) -> str:
    """The hour of twelve and the quarter that has begun: "three forty five"."""
    return f"{NUMBERS[(now.hour - 1) % 12 + 1]} {QUARTERS[now.minute // 15]}"
