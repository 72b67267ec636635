"""Tools: who answers when the model calls, so that it reads what is so, and makes nothing up.

    async with answering(conversation, {"roll_dice": roll_dice}, told=print) as heard:
        async for event in conversation:
            heard(event)

A tool is an asynchronous function of a call's arguments; what it returns is anything that is JSON. Each call is a task
of its own, which ends with the block. What a tool fails by is told, and the model reads it as the output: it waits for
one, and says nothing meanwhile.
"""

import shlex
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import trio

from voicechat_client.conversation import Conversation
from voicechat_client.errors import ClientError
from voicechat_core import wire
from voicechat_core.errors import InputError, WireError
from voicechat_core.strict_json import json_of, parse_object, parse_value
from voicechat_core.terminal import printable

__all__ = ["TOOL_SECONDS", "Tool", "ToolError", "answering", "command_tool", "tools_of"]

Tool = Callable[[dict[str, Any]], Awaitable[object]]

TOOL_SECONDS: Final = 8.0  # for one call: less than the ten that a server waits by itself
LONGEST_LINE: Final = 8192  # bytes of a result: what a server takes of one
BYTES_A_READ: Final = 4096


class ToolError(Exception):
    """A tool has no result. The message is for people, and for the model."""


# ---- answering


@asynccontextmanager
async def answering(
    conversation: Conversation,
    tools: Mapping[str, Tool],
    *,
    told: Callable[[str], None],
    seconds: float = TOOL_SECONDS,
) -> AsyncIterator[Callable[[wire.ServerEvent], None]]:
    """For as long as the block lasts, answer the calls among the events that its function is shown.

    Args:
        conversation: whose session is open, with ``function_calls``.
        tools: by their names.
        told: given a line for each call that failed, by its tool or by what the model wrote.
        seconds: that a tool may take; it is cancelled then.

    Raises:
        Exception: what the block raises, as it is.
    """

    def heard(event: wire.ServerEvent) -> None:
        if isinstance(event, wire.ResponseFunctionCallArgumentsDone):
            nursery.start_soon(_answer, conversation, event, tools, told, seconds)
        elif isinstance(event, wire.ResponseFunctionCallFailed):
            told(f"the model wrote a call that cannot be read: {printable(event.reason, ' ')}")

    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield heard
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _answer(
    conversation: Conversation,
    call: wire.ResponseFunctionCallArgumentsDone,
    tools: Mapping[str, Tool],
    told: Callable[[str], None],
    seconds: float,
) -> None:
    try:
        output = await _output(call, tools, seconds)
    except ToolError as error:
        told(f"tool {printable(call.name, ' ')}: {printable(str(error), ' ')}")
        output = {"error": str(error)}
    with suppress(ClientError):  # the conversation is over, and says so itself
        await conversation.respond(call.call_id, output)


async def _output(call: wire.ResponseFunctionCallArgumentsDone, tools: Mapping[str, Tool], seconds: float) -> object:
    tool = tools.get(call.name)
    if tool is None:
        raise ToolError("there is no such tool")
    try:
        arguments = parse_object(call.arguments)
    except WireError as error:
        raise ToolError(f"the arguments cannot be read: {error}") from None
    with trio.move_on_after(seconds):
        return await tool(arguments)
    raise ToolError(f"it did not answer within {seconds:g} seconds")


# ---- commands


def tools_of(commands: Iterable[str]) -> dict[str, Tool]:
    """The tools that ``NAME=COMMAND`` means, one each.

    Raises:
        InputError: for one that means none, a name that comes twice, or a command that is not there.
    """
    found: dict[str, Tool] = {}
    for each in commands:
        name, _, command = each.partition("=")
        if not name or not command:
            raise InputError(f"--tool is {each!r}; NAME=COMMAND is needed")
        if name in found:
            raise InputError(f"--tool {name} is given twice; a tool has one command")
        found[name] = command_tool(name, command)
    return found


def command_tool(name: str, command: str) -> Tool:
    """The tool that runs ``command``, which is split as a shell would, and run without one.

    It reads the arguments as a JSON object from its input. The first line that it writes is the result: JSON, or else
    plain text. It is killed when it has written that, or the call is over.

    Raises:
        InputError: when there is no such command.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--tool {name}: {command!r} cannot be split into words: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise InputError(f"--tool {name}: there is no command {words[0] if words else ''!r}")
    return partial(_run, words)


async def _run(words: list[str], arguments: dict[str, Any]) -> object:
    line = await _first_line(words, json_of(arguments, "the arguments").encode() + b"\n")
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise ToolError("what it wrote is not UTF-8") from None
    try:
        return parse_value(text)
    except WireError:
        return text


async def _first_line(words: list[str], given: bytes) -> bytes:
    """What a command writes first, without the end of the line."""
    try:
        process = await trio.lowlevel.open_process(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise ToolError(f"{words[0]} cannot be run: {error.strerror}") from None
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_feed, process.stdin, given)
            line, ended = await _read_line(process.stdout)
            nursery.cancel_scope.cancel()
        if ended and not line:
            raise ToolError(f"it wrote nothing, and ended with {await process.wait()}")
        if len(line) > LONGEST_LINE:
            raise ToolError(f"its first line is longer than {LONGEST_LINE} bytes")
        return line
    finally:
        process.kill()
        with trio.CancelScope(shield=True):  # one that was killed is soon gone
            await process.wait()
            await trio.aclose_forcefully(process.stdin)
            await trio.aclose_forcefully(process.stdout)


async def _feed(into: trio.abc.SendStream, given: bytes) -> None:
    with suppress(trio.BrokenResourceError):  # a tool need not read what it is given
        await into.send_all(given)
        await into.aclose()


async def _read_line(output: trio.abc.ReceiveStream) -> tuple[bytes, bool]:
    """A line, or as much as shows that it is too long; and whether the output ended before the line did."""
    read = b""
    while len(read) <= LONGEST_LINE:
        chunk = await output.receive_some(BYTES_A_READ)
        line, end, _ = (read + chunk).partition(b"\n")
        if end or not chunk:
            return line, not end
        read += chunk
    return read, False
