"""Tools: commands as processes of their own, what they fail by, and what reaches the server."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.client.events import call
from tests.client.peers import CREATED, DONE, QUICK, UPDATED, Raw, names, run, scripted
from voicechat_client import EndedError, SessionOptions, connect
from voicechat_client.tools import Tool, ToolError, answering, command_tool, tools_of
from voicechat_core import wire
from voicechat_core.errors import InputError


class Server:
    """What is given to a conversation, instead of one."""

    def __init__(self) -> None:
        self.given: list[tuple[str, object]] = []
        self.failure: Exception | None = None
        self.came = trio.Event()

    async def respond(self, call_id: str, output: object) -> None:
        self.given.append((call_id, output))
        self.came.set()
        if self.failure is not None:
            raise self.failure


def answered(tools: dict[str, Any], *calls: wire.ServerEvent, seconds: float = 5.0) -> tuple[Server, list[str]]:
    """What a server is given for these, and what a person is told."""
    server, told = Server(), []

    async def main() -> None:
        server.came = trio.Event()
        async with answering(server, tools, told=told.append, seconds=seconds) as heard:  # type: ignore[arg-type]
            for event in calls:
                heard(event)
            while len(server.given) < sum(isinstance(each, wire.ResponseFunctionCallArgumentsDone) for each in calls):
                await trio.sleep(0.01)

    run(main)
    return server, told


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


# ---- commands


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
        ("print()", ""),
        ("print('NaN')", "NaN"),
        ("import sys; sys.stdout.buffer.write('é'.encode())", "é"),
        ("import sys; print(sys.stdin.readline().strip())", {"sides": 6, "who": "é"}),
        ("import sys; print('rolled'); sys.exit(3)", "rolled"),
        ("import time; print('quick', flush=True); time.sleep(60)", "quick"),
    ],
)
def test_the_first_line_of_a_command_is_the_result(code: str, output: object) -> None:
    assert result(tool(code), {"sides": 6, "who": "é"}) == output


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit(3)", "it wrote nothing, and ended with 3"),
        ("pass", "it wrote nothing, and ended with 0"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\n')", "what it wrote is not UTF-8"),
        ("print('x' * 8193)", "its first line is longer than 8192 bytes"),
        ("import os\nwhile True: os.write(1, b'x' * 4096)", "its first line is longer than 8192 bytes"),
    ],
)
def test_a_command_without_a_result(code: str, words: str) -> None:
    with pytest.raises(ToolError) as raised:
        result(tool(code), {})
    assert str(raised.value) == words


def test_the_longest_line() -> None:
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


def test_a_command_that_is_given_up_is_killed(tmp_path: Path) -> None:
    slow = tool(
        f"import os, time, pathlib; pathlib.Path('{tmp_path}/pid').write_text(str(os.getpid())); time.sleep(60)"
    )
    server, told = answered({"slow": slow}, call(3, "slow"), seconds=0.7)
    assert told == ["tool slow: it did not answer within 0.7 seconds"]
    assert server.given == [("call_3_0", {"error": "it did not answer within 0.7 seconds"})]
    number = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


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


# ---- answering


async def five(arguments: dict[str, Any]) -> object:
    return {"of": arguments}


async def fails(arguments: dict[str, Any]) -> object:
    raise ToolError("no\x1bdice")


def test_each_call_is_answered() -> None:
    server, told = answered({"five": five}, call(3, "five", {"n": 1}), call(9, "five"))
    assert sorted(server.given) == [("call_3_0", {"of": {"n": 1}}), ("call_9_0", {"of": {}})]
    assert told == []


@pytest.mark.parametrize(
    ("event", "line", "output"),
    [
        (call(3, "fails"), "tool fails: no�dice", "no\x1bdice"),
        (call(3, "\x1bx"), "tool �x: there is no such tool", "there is no such tool"),
        (
            call(3, "five", text="[1]"),
            "tool five: the arguments cannot be read: the message is an array; a JSON object is needed",
            "the arguments cannot be read: the message is an array; a JSON object is needed",
        ),
    ],
)
def test_a_failure_is_told_and_answered(event: wire.ServerEvent, line: str, output: str) -> None:
    server, told = answered({"five": five, "fails": fails}, event)
    assert told == [line]
    assert server.given == [("call_3_0", {"error": output})]


def test_what_is_no_call_is_told_and_needs_no_answer() -> None:
    failed = wire.ResponseFunctionCallFailed(event_id="e", frame_index=0, reason="it\x1b is none", written="{")
    server, told = answered({"five": five}, failed, call(9, "five"), call(9, "five"))
    assert [call_id for call_id, _ in server.given] == ["call_9_0"] * 2
    assert told == ["the model wrote a call that cannot be read: it� is none"]


def test_the_end_of_the_block_ends_the_tools_and_its_error_is_itself() -> None:
    begun = time.monotonic()

    async def for_ever(arguments: dict[str, Any]) -> object:
        await trio.sleep_forever()

    async def main() -> None:
        server = Server()

        async def block() -> None:
            async with answering(server, {"x": for_ever}, told=print) as heard:  # type: ignore[arg-type]
                heard(call(3, "x"))
                await trio.sleep(0.01)
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await block()
        assert server.given == []

    run(main)
    assert time.monotonic() - begun < 5


def test_a_conversation_that_is_over_needs_no_output() -> None:
    """It says itself that it is over, by its events."""

    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.hear()
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update(SessionOptions(function_calls=True))
            await conversation.commit()
            assert (await names(conversation))[-1] == "ResponseDone"
            async with answering(conversation, {"five": five}, told=print) as heard:
                heard(call(3, "five"))
                await trio.sleep(0.05)

    run(main)


# ---- what goes out


def test_an_output_as_it_is_sent() -> None:
    sent: list[dict[str, Any]] = []
    event = {"type": "response.function_call_arguments.done", "event_id": "e", "frame_index": 0, "call_id": "call_0_0"}

    async def script(raw: Raw) -> None:
        await raw.accept()
        await raw.say(CREATED)
        sent.append(await raw.hear())
        await raw.say(UPDATED, {**event, "name": "roll_dice", "arguments": '{"sides": 6}'})
        for _ in range(2):
            sent.append(await raw.hear())
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(place, limits=QUICK) as conversation:
            await conversation.update(SessionOptions(function_calls=True))
            for output in (float("nan"), {1}):
                with pytest.raises(InputError, match="the output is no JSON value"):
                    await conversation.respond("call_0_0", output)
            async with answering(conversation, {"roll_dice": five}, told=print) as heard:
                async for each in conversation:
                    heard(each)
                    if isinstance(each, wire.ResponseFunctionCallArgumentsDone):
                        assert (each.call_id, each.name, each.arguments) == ("call_0_0", "roll_dice", '{"sides": 6}')
                        while conversation._ledger._asked[wire.ConversationItemCreate] < 1:
                            await trio.sleep(0.01)
                        await conversation.commit()
            with pytest.raises(EndedError):
                await conversation.respond("call_0_0", 5)

    run(main)
    assert sent[0]["session"] == {"function_calls": True}
    assert sent[1] == {
        "type": "conversation.item.create",
        "item": {"type": "function_call_output", "call_id": "call_0_0", "output": {"of": {"sides": 6}}},
    }
    assert sent[2]["type"] == "input_audio_buffer.commit"
