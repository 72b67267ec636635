"""Tools: who answers when the model calls, so that it reads what is so, and makes nothing up.

    async with answering(conversation, {"roll_dice": roll_dice}, told=print) as heard:
        async for event in conversation:
            heard(event)

A tool is an asynchronous function of a call's arguments; what it returns is anything that is JSON. Each call is a task
of its own, which ends with the block. What a tool fails by, whatever that is, is told, and the model reads it as the
output: it waits for one, and says nothing meanwhile. Knows no process: commands are ``tool_commands``.
"""

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import trio

from voicechat_client.conversation import Conversation, shown
from voicechat_client.errors import ClientError
from voicechat_core import wire
from voicechat_core.errors import InputError, WireError
from voicechat_core.strict_json import json_of, parse_object, parse_value
from voicechat_core.terminal import printable

__all__ = ["LONGEST_RESULT", "TOOL_SECONDS", "Tool", "ToolError", "answering"]

log = logging.getLogger(__name__)

Tool = Callable[[dict[str, Any]], Awaitable[object]]
Call = wire.ResponseFunctionCallArgumentsDone

TOOL_SECONDS: Final = 8.0  # for a call, waiting for others included: less than the ten that a server waits by itself
# At a time. A model calls one or two; whatever a server says, it must not fill this machine with processes.
MOST_RUNNING: Final = 4
MOST_CALLS: Final = 16  # that run or wait: what a server makes of one list of calls
# Characters of a result as JSON: what a server takes, if it is not told otherwise (--output-chars). It refuses shorter
# ones that are more than some 1,000 tokens of its model, and nobody here can count those. See _answer_again.
LONGEST_RESULT: Final = 8192
LONGEST_ERROR: Final = 100  # characters: while the model reads, a token a frame, it says nothing; of ASCII for 8 s at most
REFUSED: Final = "the result was refused"


class ToolError(Exception):
    """A tool has no result. The message is for people, and for the model; a long one is cut."""


@asynccontextmanager
async def answering(
    conversation: Conversation,
    tools: Mapping[str, Tool],
    *,
    told: Callable[[str], None],
    seconds: float = TOOL_SECONDS,
) -> AsyncIterator[Callable[[wire.ServerEvent], None]]:
    """For as long as the block lasts, answer the calls among the events that its function is shown.

    Four tools run at a time, at most; other calls wait for them. What a tool raises beside ``ToolError`` is also
    logged, with where it came from.

    Args:
        conversation: whose session is open, with ``function_calls``.
        tools: by their names.
        told: given a line for each call that failed, by its tool, by what the model wrote, by what the server makes of
            the result, or since the block ended first.
        seconds: that a call may take; its tool is cancelled then.

    Raises:
        Exception: what the block raises, as it is.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        calls = _Calls(conversation, tools, told, seconds, nursery)
        try:
            yield calls.heard
        except Exception as error:
            failure = error
        finally:
            calls.tell_unanswered()
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class _Calls:
    """Of one conversation: those that are not answered yet, and what was answered and may still be refused."""

    def __init__(
        self,
        conversation: Conversation,
        tools: Mapping[str, Tool],
        told: Callable[[str], None],
        seconds: float,
        nursery: trio.Nursery,
    ) -> None:
        self._conversation = conversation
        self._tools = tools
        self._told = told
        self._seconds = seconds
        self._nursery = nursery
        self._running = trio.CapacityLimiter(MOST_RUNNING)
        self._unanswered: list[Call] = []
        self._answered: dict[str, Call] = {}  # by call_id; of one frame, since a model waits for one frame's calls
        self._answered_again: set[str] = set()

    def heard(self, event: wire.ServerEvent) -> None:
        """Answer it, if it needs one."""
        if isinstance(event, Call):
            self._unanswered.append(event)
            self._forget_other_frames(event.frame_index)
            self._nursery.start_soon(self._answer, event)
        elif isinstance(event, wire.ResponseFunctionCallFailed):
            self._told(f"the model wrote a call that cannot be read: {printable(event.reason, ' ')}")
        elif isinstance(event, wire.Error):
            self._answer_again(event.error)

    def tell_unanswered(self) -> None:
        """At the end."""
        for call in self._unanswered:
            self._tell(call, "the conversation was over before it answered")

    # ---- a call

    async def _answer(self, call: Call) -> None:
        try:
            output = await self._result(call)
        except ToolError as error:
            words = _cut(printable(str(error), " "))
            self._tell(call, words)
            output = {"error": words}
        self._unanswered.remove(call)
        if len(self._answered) < MOST_CALLS:
            self._answered[call.call_id] = call
        await self._respond(call, output)

    async def _result(self, call: Call) -> object:
        """What its tool returns, as the JSON that the server reads."""
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError("there is no such tool")
        if call not in self._unanswered[:MOST_CALLS]:
            raise ToolError(f"{len(self._unanswered)} calls wait for an answer; {MOST_CALLS} at a time are the most")
        return _read_again(await self._returned(call.name, tool, _arguments(call)))

    async def _returned(self, name: str, tool: Tool, arguments: dict[str, Any]) -> object:
        failures: ExceptionGroup[Exception] | None = None
        try:
            with trio.move_on_after(self._seconds):
                async with self._running:
                    return await tool(arguments)
        except* Exception as group:  # beside what cancels us, where the tool's own nursery put it together
            failures = group
        if failures is None:
            raise ToolError(f"it did not answer within {self._seconds:g} seconds")
        first = _first(failures)
        if isinstance(first, ToolError):
            raise first
        log.warning("the tool %s failed", printable(name, " "), exc_info=first)
        raise ToolError(f"{type(first).__name__}: {first}")

    def _tell(self, call: Call, words: str) -> None:
        self._told(f"tool {printable(call.name, ' ')}: {words}")

    async def _respond(self, call: Call, output: object) -> None:
        with suppress(ClientError):  # the conversation is over, and says so itself
            await self._conversation.respond(call.call_id, output)

    # ---- an answer that was refused

    def _answer_again(self, error: wire.ErrorBody) -> None:
        """Once, and shortly: the model still waits, if the output was the fault."""
        if not _is_about_an_output(error.message):
            return
        named = [name for name in self._answered if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", error.message)]
        for name in set(named or self._answered) - self._answered_again:  # an answer to one that was taken does no harm
            self._answered_again.add(name)
            self._tell(self._answered[name], f"the server refused its result: {shown(error.message)}")
            self._nursery.start_soon(self._respond, self._answered[name], {"error": REFUSED})

    def _forget_other_frames(self, index: int) -> None:
        self._answered = {name: call for name, call in self._answered.items() if call.frame_index == index}
        self._answered_again &= self._answered.keys()


def _is_about_an_output(message: str) -> bool:
    """Of a server's error: an output is at fault, and not that it comes too late."""
    return message.startswith("conversation.item.create: ") and "waits for an output" not in message


def _arguments(call: Call) -> dict[str, Any]:
    try:
        arguments = parse_object(call.arguments)
        json_of(arguments, "the object")  # no deeper than a tool, a command say, can be given
    except (InputError, WireError) as error:
        raise ToolError(f"the arguments cannot be read: {error}") from None
    return arguments


def _read_again(returned: object) -> object:
    """A result as whoever is given its JSON reads it: a server passes over what it cannot read, and the model waits."""
    try:
        text = json_of(returned, "the result")
        value = parse_value(text, "the result")
    except (InputError, WireError) as error:
        raise ToolError(str(error)) from None
    if len(text) > LONGEST_RESULT:
        raise ToolError(f"the result has {len(text)} characters as JSON; {LONGEST_RESULT} are the most")
    return value


def _first(error: BaseException) -> BaseException:
    """Of a group, what a person can be told in a line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_ERROR else f"{text[: LONGEST_ERROR - 3]}..."
