"""Tools whose results somebody supplies: what stands on the function channel from a call to its response.

Without this the model writes a call and then makes its response up. With it, per frame:

    idle         the model goes on by itself; CALL_START opens a call, in a frame that says nothing
    calling      what it writes is the call, until CALL_END; no text
    waiting      for ``respond``, with PAD on both channels; the clock runs on
    responding   <TOOL_RESPONSE>[...]</TOOL_RESPONSE> is written, an id a frame, then RESPONSE_END; no text

Then it is idle again, and the model says what it has read. RESPONSE_END is what a model chooses itself there, and what
stands there whatever it chooses. A call that cannot be read is a ``ToolCallFailed``, and the model is left to itself.

Plain values, no arrays: ``forced`` says what is to stand in the frame that comes, ``took`` is told what stood in it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from voicechat_core.config import VoiceChatConfig
from voicechat_core.errors import InputError, WireError
from voicechat_core.events import ToolCall, ToolCallFailed
from voicechat_core.strict_json import json_of, parse_value, shown
from voicechat_core.tokenizer import SpecialIds, Tokenizer

__all__ = [
    "WAIT_FRAMES",
    "AnsweredTools",
    "Forced",
    "ToolChannel",
    "ToolFunctions",
    "error_payload",
    "parse_calls",
]

log = logging.getLogger(__name__)

WAIT_FRAMES: Final = 125  # ten seconds: longer, and whoever asked has hung up
MOST_CALL_FRAMES: Final = 512  # from a call's start to its end, 41 s; each token takes one
MOST_CALL_PADS: Final = 125  # without a token in between: the model has forgotten that it was calling
MOST_RESPONSE_TOKENS: Final = 1024  # of what is supplied, 82 s: each takes a frame in which nothing is said
MOST_CALLS: Final = 16  # in one list: nobody asks for as many, and each is an event and an output
OUTPUT: Final = "a tool's output"
MOST_ERROR_CHARACTERS: Final = 200  # of what a tool failed by: a model reads a token of it a frame
NO_ANSWER: Final = "the tool did not answer in time"
NO_OUTPUT: Final = "the tool failed"

ToolFunctions = Mapping[str, Callable[..., object]]  # a function of a tool's arguments, by the tool's name


class Stage(Enum):
    """Where a session's calls stand; see above."""

    IDLE = "idle"
    CALLING = "calling"
    WAITING = "waiting"
    RESPONDING = "responding"


@dataclass(frozen=True)
class Forced:
    """What stands at a position whatever the model chooses: an id, or None for its own choice.

    ``silenced_by``: where this id is the model's choice on the function channel, the text of that position is PAD.
    """

    text: int | None = None
    function: int | None = None
    silenced_by: int | None = None


class ToolChannel:
    """One session's calls, from frame to frame."""

    def __init__(self, tokenizer: Tokenizer, config: VoiceChatConfig, wait_frames: int = WAIT_FRAMES) -> None:
        """A channel on which nothing was called yet; a call waits ``wait_frames`` at most.

        Raises:
            InputError: for a vocabulary without the markers of calls and responses.
        """
        self._tokenizer = tokenizer
        self._ids = SpecialIds.of(tokenizer, config)
        self._start, self._end, self._response_end = _markers(self._ids)
        self._wait_frames = wait_frames
        self._become_idle()

    def _become_idle(self) -> None:
        self._stage = Stage.IDLE
        self._call: list[int] = []  # ids of text since the call began
        self._frames = 0  # since the call began, or since it waits
        self._pads = 0  # the last of these frames, as long as no text came
        self._outputs: dict[str, str | None] = {}  # JSON by call_id, in the order of the calls; None is awaited
        self._response: list[int] = []  # ids that are still to be written

    # ---- frame by frame

    def forced(self) -> Forced:
        """What stands in the next frame."""
        pad = self._ids.pad
        match self._stage:
            case Stage.CALLING:
                return Forced(text=pad)
            case Stage.WAITING:
                return Forced(text=pad, function=pad)
            case Stage.RESPONDING:
                return Forced(text=pad, function=self._response[0])
        return Forced(silenced_by=self._start)

    def took(self, frame_index: int, function: int) -> list[ToolCall | ToolCallFailed]:
        """Frame ``frame_index`` has run, and ``function`` stood on the channel: the calls that end with it."""
        self._frames += 1
        match self._stage:
            case Stage.IDLE if function == self._start:
                self._become_idle()
                self._stage = Stage.CALLING
            case Stage.CALLING:
                return self._called(frame_index, function)
            case Stage.WAITING if self._frames >= self._wait_frames:
                self._answer_for_them()
            case Stage.RESPONDING:
                del self._response[0]
                if not self._response:
                    self._become_idle()
        return []

    def respond(self, call_id: str, output: object) -> None:
        """The output of a call, to be written from the next frame on when all of its calls have theirs.

        Raises:
            InputError: when no such call waits (any more), for an output that is no JSON value, or one that is too
                long. Nothing has changed then.
        """
        outputs = self._outputs_with(call_id, output)
        response = self._written(outputs)
        if len(response) > MOST_RESPONSE_TOKENS:
            raise InputError(
                f"the output of {call_id} makes a response of {len(response)} tokens; {MOST_RESPONSE_TOKENS} are the "
                "most, since each takes a frame"
            )
        self._take(outputs, response)

    def fail(self, call_id: str, message: str) -> None:
        """A call has no output: the model reads an error of ``message`` in its place, or of fewer words.

        Always taken where the call waits, also when the outputs of the others leave no room: ``NO_OUTPUT`` is short.

        Raises:
            InputError: when no such call waits (any more).
        """
        try:
            self.respond(call_id, error_payload(message))
        except InputError:
            outputs = self._outputs_with(call_id, error_payload(NO_OUTPUT))
            self._take(outputs, self._written(outputs))

    # ---- calls

    def _called(self, frame_index: int, function: int) -> list[ToolCall | ToolCallFailed]:
        """What an id of a call means. A start inside of a call is nothing."""
        if function == self._end:
            return self._parsed(frame_index)
        is_text = function not in self._ids.hidden and function != self._start
        self._pads = 0 if is_text else self._pads + 1
        if is_text:
            self._call.append(function)
        if self._pads >= MOST_CALL_PADS:
            return self._given_up(frame_index, f"no token of it came in {self._pads} frames")
        if self._frames >= MOST_CALL_FRAMES:
            return self._given_up(frame_index, f"it did not end in {self._frames} frames")
        return []

    def _parsed(self, frame_index: int) -> list[ToolCall | ToolCallFailed]:
        try:
            calls = parse_calls(self._tokenizer.decode(self._call))
        except InputError as error:
            return self._given_up(frame_index, str(error))
        events: list[ToolCall | ToolCallFailed] = [
            ToolCall(frame_index, f"call_{frame_index}_{place}", name, arguments)
            for place, (name, arguments) in enumerate(calls)
        ]
        self._become_idle()
        self._stage = Stage.WAITING
        self._outputs = {event.call_id: None for event in events if isinstance(event, ToolCall)}
        return events

    def _given_up(self, frame_index: int, reason: str) -> list[ToolCall | ToolCallFailed]:
        text = self._tokenizer.decode(self._call).strip()
        self._become_idle()
        return [ToolCallFailed(frame_index, reason, text)]

    # ---- responses

    def _answer_for_them(self) -> None:
        """Whoever waits longer hangs up: what has not come is an error, which the model reads like any output."""
        late = json_of(error_payload(NO_ANSWER), OUTPUT)
        outputs = {call_id: late if output is None else output for call_id, output in self._outputs.items()}
        self._begin_response(self._written(outputs))

    def _outputs_with(self, call_id: str, output: object) -> dict[str, str | None]:
        if not isinstance(call_id, str) or self._outputs.get(call_id, "") is not None:
            raise InputError(f"call_id is {shown(call_id)}; {self._awaited()}")
        return {**self._outputs, call_id: json_of(output, OUTPUT)}

    def _take(self, outputs: dict[str, str | None], response: list[int]) -> None:
        self._outputs = outputs
        if None not in outputs.values():
            self._begin_response(response)

    def _begin_response(self, response: list[int]) -> None:
        self._become_idle()
        self._stage, self._response = Stage.RESPONDING, [*response, self._response_end]

    def _written(self, outputs: Mapping[str, str | None]) -> list[int]:
        """A response's ids, as far as there are outputs."""
        given = ", ".join(output for output in outputs.values() if output is not None)
        ids = self._tokenizer.encode(f"<TOOL_RESPONSE>[{given}]</TOOL_RESPONSE>")
        if self._ids.roles.isdisjoint(ids):
            return ids
        # Text that spells a marker would become one. The same JSON, spelled so that it does not:
        return self._tokenizer.encode(f"<TOOL_RESPONSE>[{_unspelled(given)}]</TOOL_RESPONSE>")

    def _awaited(self) -> str:
        names = [call_id for call_id, output in self._outputs.items() if output is None]
        return f"what waits for an output is {', '.join(names)}" if names else "no call waits for an output"

    # ---- a session's snapshot

    def saved(self) -> dict[str, Any]:
        """The state, for ``restore``; it can be written as JSON."""
        return {
            "stage": self._stage.value,
            "call": list(self._call),
            "frames": self._frames,
            "pads": self._pads,
            "outputs": dict(self._outputs),
            "response": list(self._response),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on where another one was saved."""
        self._stage, self._frames, self._pads = Stage(saved["stage"]), saved["frames"], saved["pads"]
        self._call, self._response = list(saved["call"]), list(saved["response"])
        self._outputs = dict(saved["outputs"])


def _markers(ids: SpecialIds) -> tuple[int, int, int]:
    found = {"<SPECIAL_20>": ids.call_start, "<SPECIAL_21>": ids.call_end, "<SPECIAL_22>": ids.response_end}
    start, end, response_end = found.values()
    if start is None or end is None or response_end is None:
        missing = ", ".join(name for name, token in found.items() if token is None)
        raise InputError(f"tools are asked for, and the vocabulary has no {missing}: this model cannot call any")
    return start, end, response_end


def _unspelled(text: str) -> str:
    return text.replace("<", "\\u003c")


# ---- what a call says


def parse_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and arguments of what was written between a call's markers.

    That is one call or a list of them, between ``<TOOLCALL>`` tags where there are any. A call's arguments are an
    object, or the JSON of one as text; other text, and none at all, is no arguments.

    Raises:
        InputError: saying what is wrong.
    """
    inside = text.partition("<TOOLCALL>")[2].partition("</TOOLCALL>")[0] if "<TOOLCALL>" in text else text
    found = _json(inside.strip(), "the call")
    calls = found if isinstance(found, list) else [found]
    if not calls:
        raise InputError("the call is an empty list")
    if len(calls) > MOST_CALLS:
        raise InputError(f"the call is a list of {len(calls)}; {MOST_CALLS} are the most")
    return [_parsed_call(call) for call in calls]


def _parsed_call(call: object) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, dict):
        raise InputError(f"a call is {shown(call)}; an object is needed")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"a call's name is {shown(name)}; text is needed")
    arguments = call.get("arguments")
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        arguments = _json(arguments, f"the text of {name}'s arguments")
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, dict):
        raise InputError(f"{name}'s arguments are {shown(arguments)}; an object is needed")
    json_of(arguments, f"the object of {name}'s arguments")  # whoever is told of them may have to write them
    return name, arguments


def _json(text: str, what: str) -> Any:
    try:
        return parse_value(text, what)
    except WireError as error:
        raise InputError(str(error)) from None


# ---- what a tool says


def error_payload(message: str) -> dict[str, str]:
    """The output of a tool that has none; of a long ``message`` only the beginning."""
    cut = message if len(message) <= MOST_ERROR_CHARACTERS else f"{message[: MOST_ERROR_CHARACTERS - 3]}..."
    return {"error": cut}


class AnsweredTools:
    """A channel whose calls are answered at once, by ``functions[name](**arguments)``.

    Where a function raises something, returns what is no JSON, or too much of it, the model reads an error instead,
    and it is logged; the run goes on. The arguments are the model's, who may have made them up.
    """

    def __init__(self, channel: ToolChannel, functions: ToolFunctions) -> None:
        self._channel = channel
        self._functions = functions

    def forced(self) -> Forced:
        """As ``ToolChannel.forced``."""
        return self._channel.forced()

    def took(self, frame_index: int, function: int) -> None:
        """As ``ToolChannel.took``; the calls that end with this frame are answered."""
        for event in self._channel.took(frame_index, function):
            if isinstance(event, ToolCall):
                self._answer(event)

    def _answer(self, call: ToolCall) -> None:
        function = self._functions.get(call.name)
        if function is None:
            self._channel.fail(call.call_id, f"there is no tool {call.name}")
            return
        try:
            self._channel.respond(call.call_id, function(**call.arguments))
        except Exception as error:  # the function's own, or of its output
            log.warning("the tool %s failed", call.name, exc_info=error)
            self._channel.fail(call.call_id, _told(error))


def _told(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of an error that cannot even be told
        return type(error).__name__
