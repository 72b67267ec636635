"""Tools that are commands, each call a process of its own: what it reads, what of its words is the result, its end."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import trio

from voicechat_client.tools import LONGEST_RESULT, Tool, ToolError
from voicechat_core.errors import InputError, WireError
from voicechat_core.strict_json import json_of, parse_value

__all__ = ["command_tool", "tools_of"]

BYTES_A_READ: Final = 4096


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
    """The tool that runs ``command``, which is split as a shell would, and run without one; its ``~`` is a home.

    It reads the arguments as a JSON object from its input. What it writes is the result: one JSON value, over as many
    lines as that takes, or else its first line that is not empty. It is killed, with what it started, when it has
    written that, or the call is over.

    Raises:
        InputError: when there is no such command.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--tool {name}: {command!r} cannot be split into words: {error}") from None
    program = os.path.expanduser(words[0]) if words else ""  # noqa: PTH111 - a Path would forget the dot of ./program
    if shutil.which(program) is None:
        raise InputError(f"--tool {name}: there is no command {program!r}")
    return partial(_run, [program, *words[1:]])


# ---- the process


async def _run(words: list[str], arguments: dict[str, Any]) -> object:
    given = json_of(arguments, "the object of arguments").encode() + b"\n"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    try:  # in a session of its own, where there are any: then it can be killed with all that it starts
        process = await trio.lowlevel.open_process(words, **pipes, start_new_session=sys.platform != "win32")
    except OSError as error:
        raise ToolError(f"{words[0]} cannot be run: {error.strerror}") from None
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_feed, process.stdin, given)
            written = await _read(process.stdout)
            nursery.cancel_scope.cancel()
        if not written.strip():
            raise ToolError(f"it wrote no result, and ended with {await process.wait()}")
        return _result(written)
    finally:
        _kill(process)
        with trio.CancelScope(shield=True):  # one that was killed is soon gone
            await process.wait()
            await trio.aclose_forcefully(process.stdin)
            await trio.aclose_forcefully(process.stdout)


def _kill(process: trio.Process) -> None:
    """And what it started, which may outlive it. Nobody else has its number yet, if it has ended just now."""
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):  # none is left; macOS says that they may not be killed
            os.killpg(process.pid, signal.SIGKILL)


async def _feed(into: trio.abc.SendStream, given: bytes) -> None:
    with suppress(trio.BrokenResourceError):  # a tool need not read what it is given
        await into.send_all(given)
        await into.aclose()


# ---- what it writes


async def _read(output: trio.abc.ReceiveStream) -> bytes:
    """Lines that are a result, or all that there is, or as much as shows that it is too long."""
    lines = begun = b""
    while len(lines) + len(begun) <= LONGEST_RESULT:
        chunk = await output.receive_some(BYTES_A_READ)
        if not chunk:
            break
        *ended, begun = (begun + chunk).split(b"\n")
        for line in ended:
            lines = (lines + line + b"\n").lstrip()
            if _is_a_result(lines):
                return lines
    return lines + begun


def _is_a_result(lines: bytes) -> bool:
    """Whatever is written after them: only arrays and objects go over several lines."""
    return bool(lines) and (not lines.startswith((b"[", b"{")) or _is_json(lines))


def _is_json(text: bytes) -> bool:
    try:
        parse_value(text)
    except WireError:
        return False
    return True


def _result(written: bytes) -> object:
    """The JSON value that it is, or else the text of its first line."""
    written = written.strip()
    if len(written) > LONGEST_RESULT:
        raise ToolError(f"its result is longer than {LONGEST_RESULT} bytes")
    if _is_json(written):
        return parse_value(written)
    try:
        return written.partition(b"\n")[0].rstrip().decode()
    except UnicodeDecodeError:
        raise ToolError("what it wrote is not UTF-8") from None
