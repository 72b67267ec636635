"""What ``voicechat-small`` can talk about: every question it is trained on, with the answer and the tool it needs.

A question is lower case without punctuation, as a transcript is; an answer is written as text is. All but one kind of
turn are finite lists; "repeat after me" is composed of words. What is held out of every training set follows from
the text alone (``held_out``). Knows no audio, no ids and no time.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from training.unknown import UNKNOWN_ANSWER, questions

__all__ = [
    "NAMES",
    "SAID_WORDS",
    "TINY_NAME",
    "WEIGHTS",
    "Turn",
    "finite_answers",
    "finite_turns",
    "held_out",
    "held_out_repeats",
    "introduction",
    "repeat",
    "sample",
    "share",
    "system_prompt",
    "turns_of",
]

NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
TINY_NAME = "Micro"  # without a system prompt that gives another
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Laura", "Oscar", "Peter", "Sara")
COLORS = {
    "sky": "blue", "grass": "green", "sun": "yellow", "snow": "white", "night": "black", "banana": "yellow",
    "tomato": "red", "orange": "orange", "frog": "green", "milk": "white", "coal": "black", "sea": "blue",
}  # fmt: skip
PAIRS = (
    *(("hot", "cold"), ("big", "small"), ("up", "down"), ("left", "right"), ("day", "night"), ("fast", "slow")),
    *(("open", "closed"), ("happy", "sad"), ("black", "white"), ("good", "bad"), ("old", "new"), ("rich", "poor")),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SOUNDS = {"cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink"}
CITIES = ("Paris", "London", "Rome", "Berlin", "Madrid", "Tokyo")
WEATHERS = ("sunny", "rainy", "cloudy", "windy", "snowy")
MINUTES = ("o'clock", "fifteen", "thirty", "forty five")
SAID_WORDS = (
    *("apple", "river", "music", "yellow", "garden", "seven", "window", "purple", "monkey", "table", "coffee"),
    *("summer", "happy", "green", "doctor", "paper", "water", "silver", "tiger", "little", "mountain", "chicken"),
    *("orange", "pencil", "friend", "winter", "blue", "dragon", "kitchen", "money"),
)

# How often a kind is asked, of all questions. What is finite is more than three quarters.
WEIGHTS = {
    "greet": 1.0, "name": 1.0, "mine": 1.0, "plus": 4.0, "minus": 2.5, "color": 1.5, "opposite": 1.5, "day": 1.2,
    "animal": 0.7, "count": 0.8, "bye": 0.8, "about": 0.6, "stop": 0.5, "time": 1.3, "dice": 1.2, "weather": 1.3,
    "unknown": 2.5, "repeat": 5.0,
}  # fmt: skip

# The part of a kind that no training set holds. All other kinds are finite and trained whole: a sum that was never
# trained is answered wrong, so it is voices and combinations that are held out, not facts.
HELD_OUT = {"repeat": 0.04, "time": 0.27, "weather": 0.25, "unknown": 0.19}


@dataclass(frozen=True)
class Turn:
    """One question and all that follows from it."""

    user: str
    answer: str
    tool: tuple[str, str] | None = None  # what is written on the function channel: the call, then the response
    kind: str = ""


def share(text: str) -> float:
    """A number from 0 to 1 that depends on ``text`` and looks drawn at random."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def held_out(turn: Turn) -> bool:
    """Whether no training set may hold this turn: by its question if it is unknown, else by its answer."""
    if turn.kind == "repeat" and " " not in turn.answer:
        return False  # each single word is trained
    said = turn.user if turn.kind == "unknown" else turn.answer
    return share(f"{turn.kind}: {said}") < HELD_OUT.get(turn.kind, 0.0)


def _greet() -> Iterator[Turn]:
    for user in ("hello", "hi there", "hey there"):
        yield Turn(user, "Hello! How can I help you?")
    yield Turn("good morning", "Good morning! How can I help you?")
    yield Turn("good evening", "Good evening! How can I help you?")
    yield Turn("how are you", "I am fine, thank you.")


def introduction(name: str = TINY_NAME) -> str:
    """The answer to who it is."""
    return f"I am {name}, a tiny voice assistant."


def _name(name: str = TINY_NAME) -> Iterator[Turn]:
    for user in ("what is your name", "who are you", "tell me your name"):
        yield Turn(user, introduction(name))


def _mine() -> Iterator[Turn]:
    for name in NAMES:
        yield Turn(f"my name is {name.lower()}", f"Nice to meet you, {name}.")


def _plus() -> Iterator[Turn]:
    for a in range(11):
        for b in range(11):
            said = f"{NUMBERS[a]} plus {NUMBERS[b]}"
            yield Turn(f"what is {said}", f"{said} is {NUMBERS[a + b]}.".capitalize())


def _minus() -> Iterator[Turn]:
    for a in range(11):
        for b in range(a + 1):
            said = f"{NUMBERS[a]} minus {NUMBERS[b]}"
            yield Turn(f"what is {said}", f"{said} is {NUMBERS[a - b]}.".capitalize())


def _color() -> Iterator[Turn]:
    for thing, color in COLORS.items():
        for question in ("what color is the", "which color is the"):
            yield Turn(f"{question} {thing}", f"The {thing} is {color}.")


def _opposite() -> Iterator[Turn]:
    for pair in PAIRS:
        for word, other in (pair, pair[::-1]):
            yield Turn(f"what is the opposite of {word}", f"The opposite of {word} is {other}.")


def _day() -> Iterator[Turn]:
    for i, day in enumerate(DAYS):
        for where, step in (("after", 1), ("before", -1)):
            yield Turn(f"what day comes {where} {day.lower()}", f"{DAYS[(i + step) % 7]} comes {where} {day}.")


def _animal() -> Iterator[Turn]:
    for animal, sound in SOUNDS.items():
        yield Turn(f"what does the {animal} say", f"The {animal} says {sound}.")


def _count() -> Iterator[Turn]:
    for n in range(3, 11):
        yield Turn(f"count to {NUMBERS[n]}", ", ".join(NUMBERS[1 : n + 1]).capitalize() + ".")


def _bye() -> Iterator[Turn]:
    for user in ("goodbye", "bye bye", "see you later"):
        yield Turn(user, "Goodbye! Have a nice day.")
    for user in ("thank you", "thanks a lot"):
        yield Turn(user, "You are welcome.")


def _about() -> Iterator[Turn]:
    yield Turn("can you hear me", "Yes, I can hear you.")
    for user in ("what can you do", "can you help me"):
        yield Turn(user, "I can count and tell you the time.")


def _stop() -> Iterator[Turn]:
    for user in ("stop", "never mind", "be quiet please"):
        yield Turn(user, "Okay.")


def _tool(name: str, arguments: dict[str, object], response: str) -> tuple[str, str]:
    """A call and its response, as the published model writes them."""
    call = json.dumps([{"name": name, "arguments": arguments}])
    return f"<TOOLCALL>{call}</TOOLCALL>", f"<TOOL_RESPONSE>{json.dumps([response])}</TOOL_RESPONSE>"


def _time() -> Iterator[Turn]:
    for hour in NUMBERS[1:13]:
        for minute in MINUTES:
            for user in ("what time is it", "tell me the time"):
                time = f"{hour} {minute}"
                yield Turn(user, f"It is {time}.", _tool("get_time", {}, time))


def _dice() -> Iterator[Turn]:
    for sides in (6, 12, 20):
        plain = ("roll a dice", "please roll a dice") if sides == 6 else ()
        for user in (*plain, f"roll a {NUMBERS[sides]} sided dice"):
            for number in NUMBERS[1 : sides + 1]:
                article = "an" if number in ("eight", "eleven", "eighteen") else "a"
                yield Turn(user, f"You rolled {article} {number}.", _tool("roll_dice", {"sides": sides}, number))


def _weather() -> Iterator[Turn]:
    for city in CITIES:
        for weather in WEATHERS:
            tool = _tool("get_weather", {"city": city}, weather)
            yield Turn(f"what is the weather in {city.lower()}", f"It is {weather} in {city}.", tool)


def _unknown() -> Iterator[Turn]:
    for user in questions():
        yield Turn(user, UNKNOWN_ANSWER)


FINITE: dict[str, Callable[[], Iterator[Turn]]] = {
    "greet": _greet, "name": _name, "mine": _mine, "plus": _plus, "minus": _minus, "color": _color,
    "opposite": _opposite, "day": _day, "animal": _animal, "count": _count, "bye": _bye, "about": _about,
    "stop": _stop, "time": _time, "dice": _dice, "weather": _weather, "unknown": _unknown,
}  # fmt: skip


@cache
def finite_turns(kind: str | None = None, held: bool | None = False) -> tuple[Turn, ...]:
    """The turns of one kind, or of all but "repeat": those to train, those ``held`` out, or both (None)."""
    kinds = FINITE if kind is None else (kind,)
    turns = (Turn(t.user, t.answer, t.tool, k) for k in kinds for t in FINITE[k]())
    return tuple(turn for turn in turns if held is None or held_out(turn) == held)


def repeat(rng: random.Random, held: bool = False) -> Turn:
    """Words to say again: to train, or (two or three words) one that no training set holds."""
    while True:
        count = rng.choice((2, 3, 3) if held else (1, 2, 2, 3, 3))
        said = " ".join(rng.sample(SAID_WORDS, count))
        turn = Turn(f"{rng.choice(('repeat after me', 'please say'))} {said}", f"{said.capitalize()}.", None, "repeat")
        if held_out(turn) == held:
            return turn


def held_out_repeats(count: int) -> list[Turn]:
    """``count`` different answers that are held out, always the same."""
    rng, turns = random.Random("held out repeats"), dict[str, Turn]()
    while len(turns) < count:
        turn = repeat(rng, held=True)
        turns.setdefault(turn.answer, turn)
    return list(turns.values())


def finite_answers(held: bool = False) -> dict[str, str]:
    """Every answer that is no repetition, and its kind, the introduction under every name; or those never trained."""
    trained = {turn.answer: turn.kind for turn in finite_turns()}
    if held:
        return {turn.answer: turn.kind for turn in finite_turns(held=True) if turn.answer not in trained}
    return trained | {introduction(name): "name" for name in NAMES}


@cache
def _by_question(kind: str) -> tuple[tuple[Turn, ...], ...]:
    """The trained turns of a kind, together where they answer the same question (a tool's possible answers)."""
    questions: dict[str, list[Turn]] = {}
    for turn in finite_turns(kind):
        questions.setdefault(turn.user, []).append(turn)
    return tuple(map(tuple, questions.values()))


def sample(rng: random.Random, kind: str | None = None, name: str = TINY_NAME) -> Turn:
    """A turn to train on: its kind by ``WEIGHTS``, every question of it as likely; ``name`` is what it is called."""
    kind = kind or rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    if kind == "repeat":
        return repeat(rng)
    turn = rng.choice(rng.choice(_by_question(kind)))
    return Turn(turn.user, introduction(name), None, kind) if kind == "name" else turn


@cache
def _questions() -> dict[str, tuple[Turn, ...]]:
    found: dict[str, list[Turn]] = {}
    for turn in finite_turns(held=None):
        found.setdefault(turn.user, []).append(turn)
    return {user: tuple(turns) for user, turns in found.items()}


def turns_of(user: str) -> tuple[Turn, ...]:
    """Every turn that begins with this question: several where a tool may say several things, none if unknown here."""
    for said in ("repeat after me ", "please say "):
        words = user.removeprefix(said).split()
        if user.startswith(said) and words and set(words) <= set(SAID_WORDS):
            return (Turn(user, " ".join(words).capitalize() + ".", None, "repeat"),)
    return _questions().get(user, ())


CALLED = ("You are {}.", "Your name is {}.", "You are {}, a voice assistant.", "Your name is {}, an assistant.")
STYLES = ("", "Be concise.", "Be brief.", "Be friendly.", "Answer in one sentence.", "You are helpful.", "Be polite.")
NAMELESS = ("You are a voice assistant.", "You are a helpful assistant.", "You are a friendly voice assistant.")


def system_prompt(rng: random.Random) -> tuple[str, str]:
    """A system prompt and the name it gives: none half of the time, without a name in one of four of the others."""
    if rng.random() < 0.5:
        return "", TINY_NAME
    name = TINY_NAME if rng.random() < 0.25 else rng.choice(NAMES)
    style = rng.choice(STYLES)
    called = CALLED if name != TINY_NAME else ("", *NAMELESS, "You are {}.")
    first = rng.choice(called).format(name)
    parts = [part for part in (first, style) if part]
    if rng.random() < 0.3:
        parts.reverse()
    return " ".join(parts), name
