"""What is no message, a wrong one, or one at the wrong time: one ``error`` with its code and its words, and no more.

Each list goes through one connection, which must be as good afterwards as if nothing of it had been sent.
"""

import json
from typing import Any

import numpy as np
import pytest

from tests.server.clients import Client, append, calling, noise, said
from tests.server.frames import BINARY, TEXT, frame
from tests.server.server_process import ServerProcess
from voicechat_core import VoiceChat

pytestmark = [pytest.mark.trio, pytest.mark.usefixtures("unharmed")]

Wrong = tuple[bytes, str, str]  # a frame, the code of its error, the message

DEEP = 100_000
TOO_EARLY = "send session.update before audio"
AGAIN = "the active session cannot be reconfigured"
TOO_LATE = "the input was committed; no more of it is taken"
BINARY_WORDS = "binary frames are not understood; messages are JSON in text frames"
APPEND, COMMIT, UPDATE = "input_audio_buffer.append", "input_audio_buffer.commit", "session.update"
CREATE = "conversation.item.create"


def invalid(text: str, message: str) -> Wrong:
    return frame(TEXT, text), "invalid_request", message


# ---- what is no message, in any state

NO_MESSAGES = [
    invalid("", "the message is not JSON: character 0 cannot stand there"),
    invalid("hello", "the message is not JSON: character 0 cannot stand there"),
    invalid("{", "the message is not JSON: character 1 cannot stand there"),
    invalid('{"type": "session.ping"} {}', "the message is not JSON: character 25 cannot stand there"),
    invalid("\ufeff{}", "the message is not JSON: character 0 cannot stand there"),
    invalid("{'type': 'session.ping'}", "the message is not JSON: character 1 cannot stand there"),
    invalid("null", "the message is null; a JSON object is needed"),
    invalid("true", "the message is true; a JSON object is needed"),
    invalid("1", "the message is 1; a JSON object is needed"),
    invalid('"session.ping"', "the message is 'session.ping'; a JSON object is needed"),
    invalid("[]", "the message is an array; a JSON object is needed"),
    invalid('[{"type": "session.ping"}]', "the message is an array; a JSON object is needed"),
    invalid("[" * DEEP, "the message is nested too deeply"),
    invalid("[" * DEEP + "]" * DEEP, "the message is nested too deeply"),
    invalid('{"type": ' * DEEP, "the message is nested too deeply"),
    invalid('{"type": "session.ping", "x": ' + "[" * DEEP + "]" * DEEP + "}", "the message is nested too deeply"),
    invalid("NaN", "the message holds NaN, which is not JSON"),
    invalid('{"type": "session.ping", "x": -Infinity}', "the message holds -Infinity, which is not JSON"),
    invalid('{"type": "session.ping", "x": 1e999}', "the message holds a number out of range: 1e999"),
    invalid(
        '{"type": "session.ping", "x": %s}' % ("9" * 5000),
        "the message holds a number of 5000 characters; 40 at most are read",
    ),
    invalid('{"type": "x", "type": "session.ping"}', "the message has the key 'type' twice in one object"),
    invalid('{"type": "\\ud800"}', "the message holds the lone surrogate '\\ud800'"),
    invalid("{}", "type is missing; text is needed"),
    invalid('{"Type": "session.ping"}', "type is missing; text is needed"),
    invalid('{"type": null}', "type is null; text is needed"),
    invalid('{"type": 1}', "type is 1; text is needed"),
    invalid('{"type": ["session.ping"]}', "type is an array; text is needed"),
    (frame(BINARY, b"\x00\x01"), "invalid_request", BINARY_WORDS),
    (frame(BINARY, b'{"type": "session.ping"}'), "invalid_request", BINARY_WORDS),
    (frame(BINARY), "invalid_request", BINARY_WORDS),
]

# ---- wrong types in every field

WRONG_OPTIONS: list[tuple[str, list[Any], str]] = [
    ("model", [1, True, [], {}], "text"),
    ("system_prompt", [1, False, [], {}], "text"),
    ("seed", [-1, 1.5, 2**64, "", "x", "-1", "1e3", " 1", True, [], {}], "a whole number from 0 to 2^64 - 1"),
    ("max_streaming_seconds", [0, -1, "60", True, [], {}], "a number above 0"),
    ("lag", [1, "wait", True, []], "an object"),
    ("lag.policy", ["drop", "", "WAIT", 1, None, []], "'wait' or 'skip'"),
    ("lag.max_seconds", [0, 0.07, -1, "1", None, True, []], "a number of at least 0.08, one frame,"),
]
WORDS = {"None": "null", "True": "true", "False": "false", "[]": "an array", "{}": "an object"}


def words(value: Any) -> str:
    return WORDS.get(repr(value), repr(value))


def wrong_option(name: str, value: Any, needed: str) -> Wrong:
    outer, _, inner = name.partition(".")
    data = said(UPDATE, session={outer: {inner: value} if inner else value})
    text = f"session.update: session.{name} is {words(value)}; {needed} is needed"
    return data, "session_initialization_failed", text


WRONG_UPDATES = [wrong_option(name, value, needed) for name, values, needed in WRONG_OPTIONS for value in values]
WRONG_UPDATES += [
    (said(UPDATE, session=value), "session_initialization_failed",
     f"session.update: session is {words(value)}; an object is needed")
    for value in (None, 1, "x", True, [])
]  # fmt: skip


def wrong_append(message: str, **fields: Any) -> Wrong:
    return said(APPEND, **fields), "inference_error", f"{APPEND}: {message}"


BAD_AUDIO = [None, 1, True, [], {}, "A", "AAA", "AAAAA", "AAAA=", "====", "A A=", "_-8=", "AAAA\n", "ü", "data:,AAAA"]
WRONG_APPENDS = [
    *(wrong_append(f"audio is {words(value)}; padded base64 of 16-bit samples is needed", audio=value)
      for value in BAD_AUDIO),
    wrong_append(f"audio is {'-' * 40!r}... (1000 characters); padded base64 of 16-bit samples is needed",
                 audio="-" * 1000),
    wrong_append("audio has 1 bytes; a whole number of 16-bit samples is needed", audio="AA=="),
    wrong_append("audio has 3 bytes; a whole number of 16-bit samples is needed", audio="AAAA"),
    *(wrong_append(f"sample_rate is {words(value)}; 16000 is needed", audio="AAA=", sample_rate=value)
      for value in (8000, 24000, 0, -16000, 16000.5, "16000", None, True, [])),
]  # fmt: skip
WRONG_COMMITS = [
    (said(COMMIT, pad_partial=value), "invalid_request",
     f"{COMMIT}: pad_partial is {words(value)}; true or false is needed")
    for value in (None, 0, 1, "yes", [])
]  # fmt: skip


def wrong_output(message: str, **fields: Any) -> Wrong:
    return said(CREATE, **fields), "invalid_request", f"{CREATE}: {message}"


OUTPUT = {"type": "function_call_output", "call_id": "call_0_0", "output": "five"}
NESTED = json.loads("[" * 65 + "]" * 65)
WRONG_OUTPUTS = [
    wrong_output("no call 'call_0_0' waits for an output", item=OUTPUT),
    wrong_output(f"no call {'c' * 40!r}... (5000 characters) waits for an output",
                 item={**OUTPUT, "call_id": "c" * 5000}),
    wrong_output("item is missing; an object is needed"),
    *(wrong_output(f"item is {words(value)}; an object is needed", item=value) for value in (None, 1, "x", [])),
    *(wrong_output(f"item.call_id is {words(value)}; text is needed", item={**OUTPUT, "call_id": value})
      for value in (None, 1, [])),
    wrong_output("item.type is 'message'; 'function_call_output' is needed", item={**OUTPUT, "type": "message"}),
    wrong_output("item.output is missing; a JSON value is needed", item={"call_id": "c"}),
    wrong_output("the output has 65 levels; 64 are the most", item={**OUTPUT, "output": NESTED}),
    wrong_output("item.output has 8193 characters as JSON; at most 8192 are taken",
                 item={**OUTPUT, "output": "x" * 8191}),
]  # fmt: skip
UNKNOWN = [
    invalid(json.dumps({"type": name}), f"unsupported event type {name!r}") for name in ("x", "", "session.created")
]
UNKNOWN.append(invalid(json.dumps({"type": "y" * 1000}), f"unsupported event type {'y' * 40!r}... (1000 characters)"))


def at_the_wrong_time(wrong: list[Wrong], message: str) -> list[Wrong]:
    """Refused for that, whatever else is wrong."""
    return [(data, "invalid_request", message) for data, _, _ in wrong]


async def all_refused(client: Client, wrong: list[Wrong]) -> None:
    for data, code, message in wrong:
        await client.write(data)
        heard = await client.hear()
        assert heard["type"] == "error", (data[:100], heard)
        assert heard["error"] == {"code": code, "message": message}
        assert heard["event_id"].startswith("event_")
    await client.say("session.ping")
    assert (await client.hear())["type"] == "session.pong"


async def test_before_a_session(server: ServerProcess) -> None:
    early = [
        (said(kind), "invalid_request", TOO_EARLY) for kind in (APPEND, COMMIT, "session.cancel", "response.cancel")
    ]
    early.append((append(noise(1)), "invalid_request", TOO_EARLY))
    early += at_the_wrong_time(WRONG_APPENDS + WRONG_COMMITS + WRONG_OUTPUTS + UNKNOWN, TOO_EARLY)
    async with calling(server) as client:
        await client.upgrade()
        assert (await client.hear())["type"] == "session.created"
        await all_refused(client, NO_MESSAGES + early + WRONG_UPDATES)
        await client.say(UPDATE, session={"seed": 1, "no_such_field": [1]}, neither="this")
        assert (await client.hear())["type"] == "session.updated"
        await client.say("session.cancel")
        assert (await client.hear_all())[1].code == 1000


async def test_in_a_session(server: ServerProcess, tiny: VoiceChat) -> None:
    """Between two halves of a recording, whose answer it does not change."""
    samples = noise(0.5)
    expected = tiny.generate(samples, system_prompt="Be kind.", seed=3)
    again = [(said(UPDATE), "invalid_request", AGAIN), *at_the_wrong_time(WRONG_UPDATES, AGAIN)]
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session(system_prompt="Be kind.", seed=3)
        await client.write(append(samples[:100]))  # less than a frame: nothing is said of it
        await all_refused(client, NO_MESSAGES + again + WRONG_APPENDS + WRONG_COMMITS + WRONG_OUTPUTS + UNKNOWN)
        await client.write(append(samples[100:]) + said(COMMIT))
        heard, closed = await client.hear_all()
    assert (closed.code, heard[-1]["type"]) == (1000, "response.done")
    audio = [message for message in heard if message["type"] == "response.audio.delta"]
    assert np.array_equal([message["audio_codes"] for message in audio], expected.audio_codes)
    assert [message["text_token"] for message in audio] == expected.text_tokens


async def test_while_audio_runs(server: ServerProcess) -> None:
    """An error for each, between the frames, and the session goes on."""
    wrong = NO_MESSAGES + WRONG_APPENDS + WRONG_OUTPUTS + UNKNOWN
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session()
        await client.write(append(noise(2)))
        await client.hear_until("response.audio.delta")
        for data, _, _ in wrong:
            await client.write(data)
        await client.say(COMMIT)
        heard, closed = await client.hear_all()
    errors = [(m["error"]["code"], m["error"]["message"]) for m in heard if m["type"] == "error"]
    assert errors == [(code, message) for _, code, message in wrong]
    assert (closed.code, heard[-1]["type"], heard[-1]["frame_index"]) == (1000, "response.done", 25)


async def test_after_the_commit(server: ServerProcess) -> None:
    late = [(append(noise(1)), "invalid_request", TOO_LATE), (said(COMMIT), "invalid_request", TOO_LATE)]
    late += at_the_wrong_time(WRONG_APPENDS + WRONG_COMMITS, TOO_LATE)
    late += [(said(UPDATE), "invalid_request", AGAIN), *NO_MESSAGES, *WRONG_OUTPUTS, *UNKNOWN]
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session()
        await client.write(append(noise(5)) + said(COMMIT) + b"".join(data for data, _, _ in late))
        heard = await client.hear_until("input_audio_buffer.committed")
        errors: list[dict[str, str]] = []
        while len(errors) < len(late):
            message = await client.hear()
            if message["type"] == "error":
                errors.append(message["error"])
        assert [(error["code"], error["message"]) for error in errors] == [wrong[1:] for wrong in late]
        heard, closed = await client.hear_all()
        assert (closed.code, heard[-1]["type"], heard[-1]["frame_index"]) == (1000, "response.done", 63)


@pytest.mark.parametrize(
    "session",
    [
        {"seed": 2**64 - 1, "max_streaming_seconds": 1e308, "lag": {"policy": "skip", "max_seconds": 1e308}},
        {"seed": "0" * 20, "max_streaming_seconds": 5e-324, "lag": {"policy": "skip", "max_seconds": 0.08}},
        {"seed": 1e15, "model": "x" * 10**6, "system_prompt": "", "lag": None},
        {"seed": None, "model": None, "system_prompt": "\x00\x1f\ufffd\U0010ffff" * 20, "max_streaming_seconds": None},
    ],
)
async def test_options_at_the_edge_of_what_is_right(server: ServerProcess, session: dict[str, Any]) -> None:
    async with calling(server) as client:
        await client.upgrade()
        assert len(await client.answered(noise(0.08), **session)) == 1


async def test_past_the_limit_of_a_session(server: ServerProcess) -> None:
    """It may have two frames: what is more is refused, once for what is queued; then commit ends it as it should."""
    async with calling(server) as client:
        await client.upgrade()
        await client.open_session(max_streaming_seconds=0.16)
        await client.write(append(noise(1)))
        heard = await client.hear_until("error")
        assert [m["frame_index"] for m in heard if m["type"] == "response.audio.delta"] == [0, 1]
        assert heard[-1]["error"]["code"] == "inference_error"
        full = "the session has no frames left; commit or cancel it"
        await all_refused(client, [(append(noise(1)), "inference_error", full)])
        await client.say(COMMIT)
        heard, closed = await client.hear_all()
        assert [message["type"] for message in heard] == ["input_audio_buffer.committed", "response.done"]
        assert (closed.code, heard[-1]["frame_index"]) == (1000, 2)
