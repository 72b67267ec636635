"""One window of conversation, frame by frame, as it is served: what is heard, what is to be written, and how it counts.

A question takes whole frames of the microphone. ``REPLY_AFTER`` frames behind it begins the reply: for a tool the call
and its response on the function channel, the response as a server that has tools forces it (read more than learned);
then BOS, all tokens of the answer, PAD while it is spoken, EOS. Speech comes ``DELAY`` frames after BOS and EOS is
behind its end. A question asked while the assistant speaks ends the answer a few frames later.

Every time drawn here is late now and then: had the model missed the one right frame, it would never have seen what to
do in the next. Knows no samples and no networks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from training import domain
from training.listening.recordings import Durations, Question
from training.vocabulary import rnnt_ids, text_tokenizer

__all__ = ["Answered", "Hearing", "Script", "Shape", "Speech", "Window", "prompt_ids", "token_ids"]

PAD, BOS, EOS, CALL, CALL_END, RESPONSE_END = 12, 1, 2, 20, 21, 22
SAMPLES = 1280  # of a frame
REPLY_AFTER = (5, 5, 5, 5, 5, 5, 6, 6, 6, 7)  # frames of silence before a reply: 5, seldom late
STOP_AFTER = (3, 3, 4, 4, 4, 4, 4, 5, 5, 6)  # frames of a new question before EOS: 4 from what it knew at 4
DELAY = 2  # frames from BOS to speech
BEHIND = 3  # from its last frame to EOS: what is drawn may take longer than the recording did
TOOL_TAKES = (0, 0, 0, 1, 2, 3, 5, 8, 13)  # frames from a call to its response
HESITATION = (2, 3, 4)  # frames of a pause inside of a question: less than any reply waits
ROOM = 14  # frames that a question needs behind its end: no label of it may fall out of the window
SPEEDS = (0.88, 1.13)

BOS_WEIGHT, TOKEN_WEIGHT, EOS_WEIGHT, PAD_WEIGHT = 3.0, 1.5, 0.8, 0.4
STOP_WEIGHT = 2.0
CALL_WEIGHT, CALLING_WEIGHT, IDLE_WEIGHT = 1.5, 1.0, 0.15
# Where nobody answers a call the model goes on by itself: a little learned, so that what it then reads makes sense.
RESPONSE_WEIGHT = 0.2

HESITATES, INTERRUPTS, QUIET, ASKS_NAME = 0.15, 0.15, 0.05, 0.4


class Speech(NamedTuple):
    """Samples ``start`` to ``end`` of a bank, played ``speed`` times as fast, ``shift`` samples into their frame."""

    start: int
    end: int
    speed: float
    shift: int

    @property
    def frames(self) -> int:
        """Whole frames that it takes."""
        return -(-(self.shift + int((self.end - self.start) / self.speed)) // SAMPLES)


class Hearing(NamedTuple):
    """What one frame of the microphone is: the ``place``-th frame of a speech."""

    speech: Speech
    place: int


SILENCE = Hearing(Speech(0, 0, 1.0, 0), 0)


@dataclass(frozen=True)
class Shape:
    """Sizes of a window: frames, transcript labels, positions of a system prompt."""

    frames: int
    labels: int
    prompt: int = 24


@dataclass(frozen=True)
class Answered:
    """A turn and a recording of its question."""

    turn: domain.Turn
    question: Question


@dataclass
class Window:
    """The frames of a window, all lists of its length, and its transcript."""

    size: int
    prompt: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    hearing: list[Hearing] = field(init=False)
    text: list[int] = field(init=False)
    function: list[int] = field(init=False)
    text_weight: list[float] = field(init=False)
    function_weight: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.hearing = [SILENCE] * self.size
        self.text, self.function = [PAD] * self.size, [PAD] * self.size
        self.text_weight, self.function_weight = [PAD_WEIGHT] * self.size, [IDLE_WEIGHT] * self.size

    def hear(self, at: int, speech: Speech) -> int:
        """A speech from frame ``at`` on; the frame after it."""
        end = at + speech.frames
        self.hearing[at:end] = [Hearing(speech, place) for place in range(speech.frames)]
        return end

    def say(self, at: int, ids: Sequence[int], frames: int) -> int:
        """An answer whose BOS is at frame ``at``; its EOS's frame. What lies behind the window is cut off."""
        end = at + max(DELAY + frames + BEHIND, len(ids) + 1)
        said = [BOS, *ids, *[PAD] * (end - at - 1 - len(ids)), EOS]
        tail = end - at - 1 - len(ids)
        weights = [BOS_WEIGHT, *[TOKEN_WEIGHT] * len(ids), *[PAD_WEIGHT] * tail, EOS_WEIGHT]
        self._write(self.text, at, said)
        self._write(self.text_weight, at, weights)
        return end

    def call(self, at: int, call: Sequence[int], response: Sequence[int], wait: int = 0) -> int:
        """A call and, ``wait`` frames behind it, its response on the function channel; the frame after them.

        What stands there until the response has come is not the model's choice, and nothing to learn.
        """
        calls, answer = [CALL, *call, CALL_END], [*[PAD] * wait, *response]
        self._write(self.function, at, [*calls, *answer, RESPONSE_END])
        answered = [0.0] * len(answer) if wait else [RESPONSE_WEIGHT] * len(answer)
        weights = [CALL_WEIGHT, *[CALLING_WEIGHT] * (len(calls) - 1), *answered, CALLING_WEIGHT]
        self._write(self.function_weight, at, weights)
        return at + len(weights)

    def stop(self, at: int, end: int) -> None:
        """The answer that would have ended at ``end`` ends at ``at``."""
        self._write(self.text, at, [EOS, *[PAD] * (end - at)])
        self._write(self.text_weight, at, [STOP_WEIGHT, *[PAD_WEIGHT] * (end - at)])

    def _write(self, channel: list[int] | list[float], at: int, values: Sequence[int] | Sequence[float]) -> None:
        kept = values[: max(0, self.size - at)]
        channel[at : at + len(kept)] = kept  # type: ignore[assignment]


_ids: dict[str, list[int]] = {}


def token_ids(text: str) -> list[int]:
    """The language model's ids of a text, with nothing added."""
    if text not in _ids:
        _ids[text] = text_tokenizer().encode(text, add_special_tokens=False).ids
    return _ids[text]


def prompt_ids(prompt: str) -> list[int]:
    """The positions that a system prompt takes when it is served."""
    return [BOS, *token_ids(prompt), EOS] if prompt.strip() else []


class Script:
    """Draws windows from recorded questions and the domain's turns."""

    def __init__(self, recorded: dict[str, list[Question]], durations: Durations, rng: random.Random) -> None:
        self._recorded, self._durations, self._rng = recorded, durations, rng
        kinds = {text: {turn.kind for turn in domain.turns_of(text)} for text in recorded}
        self._repeats = sorted(text for text in recorded if "repeat" in kinds[text])
        self._can_ask_name = any("name" in kind for kind in kinds.values())
        if not any(kinds.values()):
            raise ValueError("none of the recorded questions is one of the domain's")
        self._labels: dict[str, list[int]] = {}

    def window(self, shape: Shape) -> Window:
        """A new one: most of them several turns, some quiet."""
        prompt, name = domain.system_prompt(self._rng)
        window = Window(shape.frames, prompt=prompt_ids(prompt))
        if len(window.prompt) > shape.prompt:
            raise ValueError(f"{prompt!r} takes {len(window.prompt)} positions; windows have {shape.prompt}")
        if self._rng.random() >= QUIET:
            self._fill(
                window, shape, name, asks_name=bool(prompt) and self._can_ask_name and self._rng.random() < ASKS_NAME
            )
        return window

    def _fill(self, window: Window, shape: Shape, name: str, *, asks_name: bool) -> None:
        at = self._pause(shape.frames, first=True)
        begun, ends = at, at  # of the answer before: its BOS and EOS
        while True:
            interrupts = ends > begun and self._rng.random() < INTERRUPTS
            if interrupts:
                at = self._rng.randint(begun + 1, ends)
            asked = self.asked(name, "name" if asks_name else None)
            asks_name = False
            parts = self._parts(asked.question)
            length = sum(part.frames for part in parts) + (len(parts) - 1) * HESITATION[-1]
            labels = self._transcript(asked.turn.user)
            if at + length + ROOM > shape.frames or len(window.labels) + len(labels) > shape.labels:
                return
            stop = at + self._rng.choice(STOP_AFTER)
            if interrupts and stop < ends:  # else it had ended anyway
                window.stop(stop, min(ends, shape.frames))
            window.labels += labels
            begun, ends = self._turn(window, at, asked.turn, parts)
            at = ends + 1 + self._pause(shape.frames)

    def _turn(self, window: Window, at: int, turn: domain.Turn, parts: list[Speech]) -> tuple[int, int]:
        """A question from ``at`` on and its reply; the frames of BOS and EOS."""
        for part in parts[:-1]:
            at = window.hear(at, part) + self._rng.choice(HESITATION)
        at = window.hear(at, parts[-1]) + self._rng.choice(REPLY_AFTER)
        if turn.tool:
            call, response = map(token_ids, turn.tool)
            at = window.call(at, call, response, self._rng.choice(TOOL_TAKES))
        return at, window.say(at, token_ids(turn.answer), self._durations(turn.answer))

    def asked(self, name: str, kind: str | None = None) -> Answered:
        """A turn to train on and one of its question's recordings."""
        while True:
            turn = domain.sample(self._rng, kind, name)
            if turn.kind == "repeat" and self._repeats:
                turn = domain.turns_of(self._rng.choice(self._repeats))[0]
            if recordings := self._recorded.get(turn.user):
                return Answered(turn, self._rng.choice(recordings))

    def _parts(self, question: Question) -> list[Speech]:
        """A question at some speed, in two parts where somebody hesitates."""
        speed, shift = self._rng.uniform(*SPEEDS), self._rng.randrange(SAMPLES)
        if question.cuts and self._rng.random() < HESITATES:
            cut = self._rng.choice(question.cuts)
            return [Speech(question.start, cut, speed, shift), Speech(cut, question.end, speed, 0)]
        return [Speech(question.start, question.end, speed, shift)]

    def _pause(self, frames: int, *, first: bool = False) -> int:
        """Frames of silence: short, sometimes long, seldom most of the window."""
        drawn = self._rng.random()
        if drawn < 0.8:
            return self._rng.randint(int(first), 11)
        return self._rng.randint(10, 60 if drawn < 0.95 else max(60, frames - 60))

    def _transcript(self, text: str) -> list[int]:
        if text not in self._labels:
            self._labels[text] = rnnt_ids(text)
        return self._labels[text]
