"""Tools that are commands: what of their words is the result, what they fail by, and how they end."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.client.peers import run
from voicechat_client.tool_commands import command_tool, tools_of
from voicechat_client.tools import Tool, ToolError
from voicechat_core.errors import InputError


def python(code: str) -> str:
    return f'"{sys.executable}" -c "{code}"'


def tool(code: str) -> Tool:
    return command_tool("t", python(code))


def result(tool: Tool, arguments: dict[str, Any], seconds: float = 10.0) -> object:
    found: list[object] = []

    async def main() -> None:
        with trio.fail_after(seconds):
            found.append(await tool(arguments))

    run(main)
    return found[0]


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print('five')", "five"),
        ("print(5)", 5),
        ("print('null')", None),
        ("print('{\\'a\\': 1}')", "{'a': 1}"),
        ("import json; print(json.dumps({'a': [1]})); print('more')", {"a": [1]}),
        ("import json; print(json.dumps('five'), end='')", "five"),
        ("print('three o\\'clock')", "three o'clock"),
        ("print('\\n  \\nfive')", "five"),
        ("print('five', end='\\r\\n')", "five"),
        ("print(' five ')", "five"),
        ("import json; print(json.dumps({'a': [1, {}]}, indent=4))", {"a": [1, {}]}),
        ("print('[\\r\\n1\\r\\n]\\r\\nmore', end='')", [1]),
        ("print('[', end='\\n]')", []),
        ("print('[five] or\\nsix')", "[five] or"),
        ("print('{\\n')", "{"),
        ("print('{five\\r\\nsix')", "{five"),
        ("print('NaN')", "NaN"),
        ("import sys; sys.stdout.buffer.write('é'.encode())", "é"),
        ("import sys; print(sys.stdin.readline().strip())", {"sides": 6, "who": "é"}),
        ("import sys; print('rolled'); sys.exit(3)", "rolled"),
        ("import time; print('quick', flush=True); time.sleep(60)", "quick"),
        ("import time; print('[\\n1,\\n2]', flush=True); time.sleep(60)", [1, 2]),
        ("import os; [os.write(1, bytes([each])) for each in b'\\n[\\n5]']", [5]),
    ],
)
def test_what_a_command_writes_is_the_result(code: str, output: object) -> None:
    assert result(tool(code), {"sides": 6, "who": "é"}) == output


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit(3)", "it wrote no result, and ended with 3"),
        ("pass", "it wrote no result, and ended with 0"),
        ("print('\\n \\n'); import sys; sys.exit(4)", "it wrote no result, and ended with 4"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\n')", "what it wrote is not UTF-8"),
        ("print('x' * 8193)", "its result is longer than 8192 bytes"),
        ("print('[' + '\\n1,' * 4096)", "its result is longer than 8192 bytes"),
        ("import os\nwhile True: os.write(1, b'x' * 4096)", "its result is longer than 8192 bytes"),
    ],
)
def test_a_command_without_a_result(code: str, words: str) -> None:
    with pytest.raises(ToolError) as raised:
        result(tool(code), {})
    assert str(raised.value) == words


def test_the_longest_result() -> None:
    assert result(tool("print('x' * 8192)"), {}) == "x" * 8192


def test_more_arguments_than_it_reads() -> None:
    assert result(tool("import os; os.close(0); print(1)"), {"a": "x" * 10**6}) == 1


def test_a_command_that_has_gone(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 1\n")
    program.chmod(0o700)
    gone = command_tool("t", str(program))
    program.unlink()
    with pytest.raises(ToolError, match=f"^{program} cannot be run: No such file or directory$"):
        result(gone, {})


@pytest.mark.skipif(sys.platform == "win32", reason="there are no sessions of processes")
@pytest.mark.parametrize(
    ("rest", "outcome"),
    [("echo done", "done"), ("wait", "given up"), ("exit 3", "it wrote no result, and ended with 3")],
)
def test_a_command_leaves_nothing_running(tmp_path: Path, rest: str, outcome: str) -> None:
    """Not what it started, which holds neither its output nor its number."""
    program, left = tmp_path / "program", tmp_path / "left"
    program.write_text(f"#!/bin/sh\nsleep 60 > {left} &\necho $! $$ > {left}.new; mv {left}.new {left}\n{rest}\n")
    program.chmod(0o700)
    assert outcome_of(command_tool("t", str(program)), until=left.exists) == outcome
    for number in left.read_text().split():
        gone(int(number))


def outcome_of(tool: Tool, until: Callable[[], bool]) -> object:
    """What a tool says; one that waits is given up when it has come so far."""
    found: list[object] = ["given up"]

    async def main() -> None:
        async def call() -> None:
            try:
                found[0] = await tool({})
            except ToolError as error:
                found[0] = str(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            while not until():
                await trio.sleep(0.01)
            await trio.sleep(0.3)
            nursery.cancel_scope.cancel()

    run(main)
    return found[0]


def gone(number: int) -> None:
    """Or dead, where nobody waits for what it left."""
    stat, deadline = Path(f"/proc/{number}/stat"), time.monotonic() + 5
    while True:
        try:
            os.kill(number, 0)
            if stat.exists() and stat.read_text().rpartition(") ")[2].startswith("Z"):
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        assert time.monotonic() < deadline, f"{number} still runs"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["dice"], "--tool is 'dice'; NAME=COMMAND is needed"),
        (["=true"], "--tool is '=true'; NAME=COMMAND is needed"),
        (["dice="], "--tool is 'dice='; NAME=COMMAND is needed"),
        (["dice=true", "dice=false"], "--tool dice is given twice; a tool has one command"),
        (["dice=/no/where a"], "--tool dice: there is no command '/no/where'"),
        (["dice= "], "--tool dice: there is no command ''"),
        (["dice=echo 'a"], '--tool dice: "echo \'a" cannot be split into words: No closing quotation'),
    ],
)
def test_what_is_no_tool(words: list[str], complaint: str) -> None:
    with pytest.raises(InputError) as raised:
        tools_of(words)
    assert str(raised.value) == complaint


def test_a_tool_is_a_name_and_words() -> None:
    tools = tools_of(["a=echo 'one  two' three=four", "b=echo {}"])
    assert result(tools["a"], {}) == "one  two three=four"
    assert result(tools["b"], {}) == {}


def test_the_home_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the program; its words are its own."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$1"\n')
    program.chmod(0o700)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert result(command_tool("t", "~/program ~/words"), {}) == "~/words"
    with pytest.raises(InputError, match=f"^--tool t: there is no command '{tmp_path}/nothing'$"):
        command_tool("t", "~/nothing")
    monkeypatch.chdir(tmp_path)
    assert result(command_tool("t", "./program here"), {}) == "here"
