"""Tools: each call is answered, whatever they fail by, and what reaches the server."""

import json
import logging
import time
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from tests.client.events import call, error
from tests.client.peers import CREATED, DONE, QUICK, UPDATED, Raw, names, run, scripted
from voicechat_client import EndedError, SessionOptions, connect
from voicechat_client.tools import ToolError, answering
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


# ---- answering


async def five(arguments: dict[str, Any]) -> object:
    return {"of": arguments}


async def fails(arguments: dict[str, Any]) -> object:
    raise ToolError("no\x1bdice")


async def fails_at_length(arguments: dict[str, Any]) -> object:
    raise ToolError("x" * 20_000)


def test_each_call_is_answered() -> None:
    server, told = answered({"five": five}, call(3, "five", {"n": 1}), call(9, "five"))
    assert sorted(server.given) == [("call_3_0", {"of": {"n": 1}}), ("call_9_0", {"of": {}})]
    assert told == []


@pytest.mark.parametrize(
    ("event", "line", "output"),
    [
        (call(3, "fails"), "tool fails: no�dice", "no�dice"),
        (call(3, "\x1bx"), "tool �x: there is no such tool", "there is no such tool"),
        (
            call(3, "five", text="[1]"),
            "tool five: the arguments cannot be read: the message is an array; a JSON object is needed",
            "the arguments cannot be read: the message is an array; a JSON object is needed",
        ),
        (
            call(3, "five", text='{"a": ' + "[" * 500 + "]" * 500 + "}"),
            "tool five: the arguments cannot be read: the object has 501 levels; 64 are the most",
            "the arguments cannot be read: the object has 501 levels; 64 are the most",
        ),
        (call(3, "long"), f"tool long: {'x' * 97}...", f"{'x' * 97}..."),
    ],
)
def test_a_failure_is_told_and_answered(event: wire.ServerEvent, line: str, output: str) -> None:
    server, told = answered({"five": five, "fails": fails, "long": fails_at_length}, event)
    assert told == [line]
    assert server.given == [("call_3_0", {"error": output})]


def nested(levels: int) -> object:
    value: object = 5
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({1}, "the result is no JSON value: Object of type set is not JSON serializable"),
        (float("nan"), "the result is no JSON value: Out of range float values are not JSON compliant"),
        (nested(65), "the result has 65 levels; 64 are the most"),
        (nested(5000), "the result is nested too deeply; 64 levels are the most"),
        ("\ud800", "the result holds the lone surrogate '\\ud800'"),
        (10**40, "the result holds a number of 41 characters; 40 at most are read"),
        ({1: 2, "1": 3}, "the result has the key '1' twice in one object"),
        ("x" * 8191, "the result has 8193 characters as JSON; 8192 are the most"),
    ],
)
def test_a_result_that_a_server_cannot_read(returned: object, words: str) -> None:
    async def returns(arguments: dict[str, Any]) -> object:
        return returned

    server, told = answered({"odd": returns}, call(3, "odd"))
    assert told == [f"tool odd: {words}"]
    assert server.given == [("call_3_0", {"error": words})]


@pytest.mark.parametrize("returned", [nested(64), "x" * 8190, None, {"a": (1, 2.5, True)}])
def test_a_result_that_it_can(returned: object) -> None:
    async def returns(arguments: dict[str, Any]) -> object:
        return returned

    server, told = answered({"good": returns}, call(3, "good"))
    assert server.given == [("call_3_0", json.loads(json.dumps(returned)))]
    assert told == []


async def _raises(failure: Exception) -> None:
    raise failure


@pytest.mark.parametrize("in_a_nursery", [False, True])
@pytest.mark.parametrize(
    ("failure", "words", "logged"),
    [(ValueError("no\x1bnumber"), "ValueError: no�number", True), (ToolError("no"), "no", False)],
)
def test_whatever_a_tool_raises_is_told_and_answered(
    failure: Exception, words: str, logged: bool, in_a_nursery: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing else is lost; where an unforeseen error came from is in the log."""

    async def raises(arguments: dict[str, Any]) -> object:
        if not in_a_nursery:
            raise failure
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_raises, failure)
            await trio.sleep_forever()

    with caplog.at_level(logging.WARNING):
        server, told = answered({"raises": raises, "five": five}, call(3, "raises"), call(9, "five"))
    assert told == [f"tool raises: {words}"]
    assert sorted(server.given) == [("call_3_0", {"error": words}), ("call_9_0", {"of": {}})]  # type: ignore[type-var]
    assert [record.getMessage() for record in caplog.records] == ["the tool raises failed"] * logged
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [failure] * logged


@pytest.mark.parametrize("in_a_nursery", [False, True])
def test_a_tool_that_fails_as_it_is_given_up(in_a_nursery: bool, caplog: pytest.LogCaptureFixture) -> None:
    """At its time limit it is told and answered; at the end of the block it ends nothing else."""

    async def waits() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("late")

    async def fails_late(arguments: dict[str, Any]) -> object:
        if not in_a_nursery:
            await waits()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits)
            await trio.sleep_forever()

    server, told = answered({"late": fails_late}, call(3, "late"), seconds=0.05)
    assert told == ["tool late: ValueError: late"]
    assert server.given == [("call_3_0", {"error": "ValueError: late"})]

    async def main() -> None:
        async with answering(Server(), {"late": fails_late}, told=told.append) as heard:  # type: ignore[arg-type]
            heard(call(9, "late"))
            await trio.testing.wait_all_tasks_blocked()

    run(main)
    assert told[1] == "tool late: the conversation was over before it answered"


def test_a_fault_of_our_own_is_not_taken_for_a_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(returned: object) -> object:
        raise KeyError("ours")

    monkeypatch.setattr("voicechat_client.tools._read_again", broken)
    with pytest.raises(ExceptionGroup) as raised:
        answered({"five": five}, call(3, "five"))
    assert raised.group_contains(KeyError)


# ---- how many


def test_calls_that_are_too_many_wait_or_are_refused() -> None:
    running, most, ran = 0, 0, 0

    async def counts(arguments: dict[str, Any]) -> object:
        nonlocal running, most, ran
        running, ran = running + 1, ran + 1
        most = max(most, running)
        await trio.sleep(0.01)
        running -= 1
        return "ran"

    server, told = answered({"counts": counts}, *[call(index, "counts") for index in range(100)])
    assert (most, ran) == (4, 16)
    ran_ids = {call_id for call_id, output in server.given if output == "ran"}
    assert ran_ids == {f"call_{index}_0" for index in range(16)}  # the first come
    refused = [output for _, output in server.given if output != "ran"]
    assert len(refused) == len(told) == 84
    assert all(isinstance(each, dict) and "16 at a time are the most" in each["error"] for each in refused)


def test_a_call_that_waits_for_others_has_no_more_time() -> None:
    async def for_ever(arguments: dict[str, Any]) -> object:
        await trio.sleep_forever()

    begun = time.monotonic()
    _, told = answered({"slow": for_ever}, *[call(index, "slow") for index in range(16)], seconds=0.3)
    assert told == ["tool slow: it did not answer within 0.3 seconds"] * 16
    assert time.monotonic() - begun < 0.6


# ---- what the server refuses

TOO_LONG = "conversation.item.create: the output of {} makes a response of 1400 tokens; 1024 are the most"
UNNAMED = "conversation.item.create: item.output has 700 characters as JSON; at most 600 are taken"
LATE = "conversation.item.create: no call '{}' waits for an output"
REFUSED = {"error": "the result was refused"}


def after_errors(*messages: str, calls: int = 2) -> tuple[list[tuple[str, object]], list[str]]:
    """What a server is given, and a person told, after outputs of this many calls of one frame."""
    server, told = Server(), []

    async def main() -> None:
        server.came = trio.Event()
        async with answering(server, {"five": five}, told=told.append) as heard:  # type: ignore[arg-type]
            for place in range(calls):
                heard(msgspec.structs.replace(call(3, "five"), call_id=f"call_3_{place}"))
            await trio.testing.wait_all_tasks_blocked()
            assert len(server.given) == calls
            for message in messages:
                heard(error("invalid_request", message))
                await trio.testing.wait_all_tasks_blocked()

    run(main)
    return server.given[calls:], told


def test_an_output_that_is_refused_is_followed_by_a_short_one_once() -> None:
    refusals = [TOO_LONG.format(name) for name in ("call_3_10", "call_3_10", "call_3_0")]
    given, told = after_errors(*refusals, calls=12)
    assert given == [("call_3_10", REFUSED), ("call_3_0", REFUSED)]  # call_3_1 is another one
    assert told == [f"tool five: the server refused its result: {refusals[place]}" for place in (0, 2)]


def test_an_output_whose_call_is_not_named() -> None:
    given, told = after_errors(UNNAMED, UNNAMED, calls=1)
    assert given == [("call_3_0", REFUSED)]
    assert told == [f"tool five: the server refused its result: {UNNAMED}"]


@pytest.mark.parametrize(
    "message",
    [LATE.format("call_3_0"), TOO_LONG.format("call_3_0").replace("conversation.item.create: ", ""), "busy"],
)
def test_other_errors_need_no_answer(message: str) -> None:
    assert after_errors(message) == ([], [])


def test_a_refusal_is_about_the_calls_that_the_model_waits_for() -> None:
    server = Server()

    async def main() -> None:
        server.came = trio.Event()
        async with answering(server, {"five": five}, told=print) as heard:  # type: ignore[arg-type]
            for index in (3, 9):
                heard(call(index, "five"))
                await trio.testing.wait_all_tasks_blocked()
            heard(error("invalid_request", UNNAMED))
            await trio.testing.wait_all_tasks_blocked()

    run(main)
    assert [call_id for call_id, output in server.given if output == REFUSED] == ["call_9_0"]


def test_what_is_no_call_is_told_and_needs_no_answer() -> None:
    failed = wire.ResponseFunctionCallFailed(event_id="e", frame_index=0, reason="it\x1b is none", written="{")
    server, told = answered({"five": five}, failed, call(9, "five"), call(9, "five"))
    assert [call_id for call_id, _ in server.given] == ["call_9_0"] * 2
    assert told == ["the model wrote a call that cannot be read: it� is none"]


def test_the_end_of_the_block_ends_the_tools_and_its_error_is_itself() -> None:
    begun, told = time.monotonic(), list[str]()

    async def for_ever(arguments: dict[str, Any]) -> object:
        await trio.sleep_forever()

    async def main() -> None:
        server = Server()

        async def block() -> None:
            async with answering(server, {"x": for_ever}, told=told.append) as heard:  # type: ignore[arg-type]
                heard(call(3, "x"))
                await trio.sleep(0.01)
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await block()
        assert server.given == []

    run(main)
    assert told == ["tool x: the conversation was over before it answered"]
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
