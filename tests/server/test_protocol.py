"""One connection's conversation: every state and every input, and any order of them."""

import json
import math
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from voicechat_core import events, wire
from voicechat_core.errors import ContextLimitError, InputError, ModelError
from voicechat_core.wire import LagPolicy
from voicechat_server.exchange import (
    Cancel,
    Close,
    Command,
    Failed,
    Flush,
    Lagging,
    Open,
    Opened,
    OpenFailed,
    OutputAccepted,
    OutputRefused,
    PeerLeft,
    Push,
    Respond,
    Said,
    Send,
    Stop,
)
from voicechat_server.protocol import INPUTS, NEXT, REFUSALS, TABLE, Limits, Protocol, State

START = 1000.0


def new(**changes: Any) -> Protocol:
    tokens = count(1)
    return Protocol(**{"model": "tiny", "token": lambda: f"{next(tokens):016x}", "now": START, **changes})


def say(kind: str, **fields: object) -> str:
    return json.dumps({"type": kind, **fields})


UPDATE = say("session.update", session={})
APPEND = say("input_audio_buffer.append", audio="AQACAAMA")  # 1, 2, 3
OUTPUT = say("conversation.item.create", item={"type": "function_call_output", "call_id": "call_7_0", "output": "five"})
COMMIT = say("input_audio_buffer.commit", pad_partial=False)


def frame(index: int, text: int = 12, function: int = 13) -> events.AudioFrame:
    samples = np.linspace(-1, 1, 1764, dtype=np.float32)
    return events.AudioFrame(index, samples, np.arange(31, dtype=np.int32) + index, text, function)


def brief(commands: Iterable[Command]) -> list[str]:
    """Commands in a few words each."""
    return [_brief(command) for command in commands]


def _brief(command: Command) -> str:
    match command:
        case Send(wire.Error(error=error)):
            return f"{error.code}: {error.message}"
        case Send(message):
            return str(type(message).__struct_config__.tag)
        case Open():
            return "Open"
        case Push(samples):
            return f"Push {samples.tolist()}"
        case Flush(pad_partial):
            return f"Flush {pad_partial}"
        case Close(code, reason):
            return f"Close {code} {reason}"
        case Respond(call_id, output):
            return f"Respond {call_id} {output}"
    return type(command).__name__


def sent(commands: Iterable[Command]) -> list[wire.ServerEvent]:
    return [command.message for command in commands if isinstance(command, Send)]


# ---- every state, every input

TO_STATE: dict[State, list[Any]] = {
    State.CONFIGURING: [],
    State.OPENING: [UPDATE],
    State.CLOSED_EARLY: [UPDATE, COMMIT],
    State.READY: [UPDATE, Opened()],
    State.FULL: [UPDATE, Opened(), Failed(ContextLimitError("frame 2"), ended=False)],
    State.FLUSHING: [UPDATE, Opened(), COMMIT],
    State.ENDED: [UPDATE, say("session.cancel")],
}
LIVE = [state for state in State if state is not State.ENDED]


def give(protocol: Protocol, what: Any, now: float = START) -> list[Command]:
    if isinstance(what, str | bytes):
        return protocol.received(what, now)
    return protocol.tick(now) if what is None else protocol.happened(what, now)


def in_state(state: State, **changes: Any) -> Protocol:
    protocol = new(**changes)
    protocol.begin()
    for what in TO_STATE[state]:
        give(protocol, what)
    assert protocol.state is state
    return protocol


EARLY = "invalid_request: send session.update before audio"
AGAIN = "invalid_request: the active session cannot be reconfigured"
LATE = "invalid_request: the input was committed; no more of it is taken"
FULL = "inference_error: the session has no frames left; commit or cancel it"
SEED = "session.update: session.seed is -1; a whole number from 0 to 2^64 - 1 is needed"
RATE = "inference_error: input_audio_buffer.append: sample_rate is 8000; 16000 is needed"
PAD = "invalid_request: input_audio_buffer.commit: pad_partial is 1; true or false is needed"
NOBODY = "invalid_request: conversation.item.create: no call 'call_7_0' waits for an output"
MANY = (
    "invalid_request: conversation.item.create: 4 outputs of {} are being looked at; "
    "another one may be sent when one of them is refused"
)
ITEM = "item.type is 'message'; 'function_call_output' is needed"
CANCELLED = (["Cancel", "response.cancelled", "Close 1000 cancelled"], State.ENDED)
LOST = (["inference_error: the model failed; the session is over", "Close 1011 model failure"], State.ENDED)
SESSION_LIMIT = ["Cancel", "invalid_request: a session may last 600 seconds", "Close 1008 session limit"]
NOTHING: tuple[list[str], None] = ([], None)
Expected = tuple[list[str], State | None]  # None: the same state


def same(answer: str) -> Expected:
    return [answer], None


# For each input the answers in CONFIGURING, OPENING, CLOSED_EARLY, READY, FULL, FLUSHING.
ANSWERS: list[tuple[str, Any, list[Expected]]] = [
    ("update", UPDATE, [(["Open"], State.OPENING), *[same(AGAIN)] * 5]),
    (
        "bad update",
        say("session.update", session={"seed": -1}),
        [same(f"session_initialization_failed: {SEED}"), *[same(AGAIN)] * 5],
    ),
    (
        "append",
        APPEND,
        [same(EARLY), same("Push [1, 2, 3]"), same(LATE), same("Push [1, 2, 3]"), same(FULL), same(LATE)],
    ),
    (
        "empty append",
        say("input_audio_buffer.append"),
        [same(EARLY), NOTHING, same(LATE), NOTHING, same(FULL), same(LATE)],
    ),
    (
        "bad append",
        say("input_audio_buffer.append", sample_rate=8000),
        [same(EARLY), same(RATE), same(LATE), same(RATE), same(FULL), same(LATE)],
    ),
    (
        "commit",
        COMMIT,
        [
            same(EARLY),
            ([], State.CLOSED_EARLY),
            same(LATE),
            (["input_audio_buffer.committed", "Flush False"], State.FLUSHING),
            (["input_audio_buffer.committed", "Flush False"], State.FLUSHING),
            same(LATE),
        ],
    ),
    (
        "bad commit",
        say("input_audio_buffer.commit", pad_partial=1),
        [same(EARLY), same(PAD), same(LATE), same(PAD), same(PAD), same(LATE)],
    ),
    ("output", OUTPUT, [same(EARLY), *[same(NOBODY)] * 5]),
    (
        "bad output",
        say("conversation.item.create", item={"type": "message"}),
        [same(EARLY), *[same(f"invalid_request: conversation.item.create: {ITEM}")] * 5],
    ),
    ("session.cancel", say("session.cancel"), [same(EARLY), *[CANCELLED] * 5]),
    ("response.cancel", say("response.cancel"), [same(EARLY), *[CANCELLED] * 5]),
    ("ping", say("session.ping"), [same("session.pong")] * 6),
    ("unknown", say("x"), [same(EARLY), *[same("invalid_request: unsupported event type 'x'")] * 5]),
    ("no type", "{}", [same("invalid_request: type is missing; text is needed")] * 6),
    ("array", "[]", [same("invalid_request: the message is an array; a JSON object is needed")] * 6),
    (
        "binary",
        b"{}",
        [same("invalid_request: binary frames are not understood; messages are JSON in text frames")] * 6,
    ),
    (
        "opened",
        Opened(),
        [
            NOTHING,
            (["session.updated"], State.READY),
            (["session.updated", "input_audio_buffer.committed", "Flush False"], State.FLUSHING),
            *[NOTHING] * 3,
        ],
    ),
    (
        "open failed",
        OpenFailed(InputError("no room")),
        [
            NOTHING,
            (["session_initialization_failed: no room"], State.CONFIGURING),
            (
                [("session_initialization_failed: no room; dropped with it: 1 messages of input that were sent ahead")],
                State.CONFIGURING,
            ),
            *[NOTHING] * 3,
        ],
    ),
    ("frame", Said(frame(0)), [*[NOTHING] * 3, *[same("response.audio.delta")] * 3]),
    ("done", Said(events.Done(0)), [*[NOTHING] * 3, *[(["response.done", "Close 1000 done"], State.ENDED)] * 3]),
    (
        "cancelled",
        Said(events.Cancelled(0)),
        [*[NOTHING] * 3, *[(["response.cancelled", "Close 1000 cancelled"], State.ENDED)] * 3],
    ),
    ("tail", Said(events.AudioTail(np.zeros(8, np.float32))), [NOTHING] * 6),
    ("lost", Failed(ModelError("/secret: NaN"), ended=True), [NOTHING, *[LOST] * 5]),
    (
        "at its limit",
        Failed(ContextLimitError("frame 2 too many"), ended=False),
        [
            NOTHING,
            *[same("inference_error: frame 2 too many")] * 2,
            (["inference_error: frame 2 too many"], State.FULL),
            same("inference_error: frame 2 too many"),
            same("inference_error: frame 2 too many"),
        ],
    ),
    (
        "some other failure",
        Failed(RuntimeError("/secret"), ended=False),
        [
            NOTHING,
            *[same("inference_error: a frame failed; the session can be committed")] * 2,
            (["inference_error: a frame failed; the session can be committed"], State.FULL),
            *[same("inference_error: a frame failed; the session can be committed")] * 2,
        ],
    ),
    (
        "output refused",
        OutputRefused("call_7_0", InputError("call_id is 'call_7_0'; no call waits for an output")),
        [
            *[NOTHING] * 3,
            *[
                same(
                    "invalid_request: conversation.item.create: call_id is 'call_7_0'; no call waits for an output",
                )
            ]
            * 3,
        ],
    ),
    ("output accepted", OutputAccepted("call_7_0"), [NOTHING] * 6),
    ("lag", Lagging(2.0, 25, 0), [*[NOTHING] * 3, *[same("session.lag")] * 3]),
    ("no lag", Lagging(0.1, 1, 0), [NOTHING] * 6),
    ("tick", None, [NOTHING] * 6),
    ("peer left", PeerLeft(), [([], State.ENDED), *[(["Cancel"], State.ENDED)] * 5]),
    (
        "stop",
        Stop(1001, "server shutting down"),
        [
            (["Close 1001 server shutting down"], State.ENDED),
            *[(["Cancel", "Close 1001 server shutting down"], State.ENDED)] * 5,
        ],
    ),
]


@pytest.mark.parametrize("column", range(len(LIVE)), ids=[state.name for state in LIVE])
@pytest.mark.parametrize(("what", "expected"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_every_input_in_every_state(what: Any, expected: list[Expected], column: int) -> None:
    protocol = in_state(LIVE[column])
    answer, following = expected[column]
    assert brief(give(protocol, what)) == answer
    assert protocol.state is (following or LIVE[column])
    assert (protocol.ended_by != "") == (protocol.state is State.ENDED)


@pytest.mark.parametrize("what", [row[1] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_after_the_end_nothing_is_answered(what: Any) -> None:
    protocol = in_state(State.ENDED)
    assert give(protocol, what, START + 1e9) == []
    assert (protocol.state, protocol.ended_by, protocol.deadline) == (State.ENDED, "cancelled", math.inf)


def test_the_table_is_whole() -> None:
    """Every answer that it names exists, and none exists that it does not name."""
    assert set(TABLE) == set(INPUTS)
    assert all(set(row) == set(LIVE) for row in TABLE.values())
    named = {name for row in TABLE.values() for name in row.values()} - {"-"}
    methods = {name for name in named if callable(getattr(Protocol, f"_{name}", None))}
    assert named == methods | set(REFUSALS)
    assert not methods & set(REFUSALS)
    assert set(NEXT) < methods


# ---- the beginning


def test_the_first_message_names_the_session() -> None:
    protocol = new()
    [command] = protocol.begin()
    assert command == Send(
        wire.SessionCreated(event_id="event_0000000000000002", session=wire.CreatedSession(id="sess_0000000000000001"))
    )
    assert protocol.session_id == "sess_0000000000000001"


def test_recording_is_announced() -> None:
    [command] = new(recording=True).begin()
    assert isinstance(command, Send)
    assert '"recording":true' in wire.encode(command.message)
    assert "recording" not in wire.encode(sent(new().begin())[0])


def test_a_model_that_is_not_there_yet() -> None:
    protocol = new()
    assert brief(protocol.begin(loading=True)) == [
        "model_loading: the model is still loading; try again",
        "Close 1013 loading",
    ]
    assert protocol.received(UPDATE, START) == []


# ---- opening


def opened_with(session: dict[str, Any], **changes: Any) -> Open:
    protocol = new(**changes)
    protocol.begin()
    [command] = protocol.received(say("session.update", session=session), START)
    assert isinstance(command, Open)
    return command


def test_what_a_session_is_opened_with() -> None:
    assert opened_with({}) == Open(None, 0, 7500, LagPolicy())
    asked = {"model": "x", "system_prompt": "hi", "seed": "7", "max_streaming_seconds": 9, "lag": {"policy": "skip"}}
    assert opened_with(asked) == Open("hi", 7, 113, LagPolicy(policy="skip", max_seconds=2.0))


@pytest.mark.parametrize(
    ("asked", "limit", "frames"),
    [(None, 600.0, 7500), (1e30, 600.0, 7500), (0.001, 600.0, 1), (0.08, 600.0, 1), (0.081, 600.0, 2), (5, 1.0, 13)],
)
def test_seconds_are_capped_and_become_frames(asked: float | None, limit: float, frames: int) -> None:
    assert opened_with({"max_streaming_seconds": asked}, limits=Limits(session_seconds=limit)).max_frames == frames


def test_no_limit_at_all() -> None:
    limits = Limits(session_seconds=math.inf)
    assert opened_with({}, limits=limits).max_frames is None
    assert opened_with({"max_streaming_seconds": 8}, limits=limits).max_frames == 100
    assert opened_with({"max_streaming_seconds": 1.7e308}, limits=limits).max_frames is None


@pytest.mark.parametrize(
    ("asked", "used"), [({}, "ours"), ({"system_prompt": None}, "ours"), ({"system_prompt": ""}, "")]
)
def test_the_servers_prompt_is_the_default(asked: dict[str, Any], used: str) -> None:
    assert opened_with(asked, system_prompt="ours").system_prompt == used


def test_calls_are_the_peers_to_answer_where_it_asks_for_them() -> None:
    assert opened_with({"function_calls": True}).function_calls is True
    assert opened_with({"function_calls": False}).function_calls is False
    protocol = in_state(State.CONFIGURING)
    expected = "session_initialization_failed: session.update: session.function_calls is 1; true or false is needed"
    assert brief(protocol.received(say("session.update", session={"function_calls": 1}), START)) == [expected]


def test_a_prompt_has_a_limit() -> None:
    assert opened_with({"system_prompt": "é" * 7}, limits=Limits(prompt_chars=7)).system_prompt == "é" * 7
    protocol = new(limits=Limits(prompt_chars=7))
    long = say("session.update", session={"system_prompt": "é" * 8})
    assert brief(protocol.received(long, START)) == [
        (
            "session_initialization_failed: "
            "session.update: session.system_prompt has 8 characters; at most 7 are taken"
        )
    ]  # fmt: skip
    assert brief(protocol.received(UPDATE, START)) == ["Open"]
    assert brief(protocol.received(long, START)) == ["invalid_request: the active session cannot be reconfigured"]
    assert opened_with({}, limits=Limits(prompt_chars=1), system_prompt="ours").system_prompt == "ours"


def test_a_failed_update_may_be_tried_again() -> None:
    protocol = in_state(State.OPENING)
    protocol.received(APPEND, START)
    protocol.received(APPEND, START)
    failed = protocol.happened(OpenFailed(ValueError("/home/x/model.safetensors")), START)
    assert brief(failed) == [
        (
            "session_initialization_failed: the session could not be opened; "
            "dropped with it: 2 messages of input that were sent ahead"
        )
    ]
    assert brief(protocol.received(UPDATE, START)) == ["Open"]
    assert brief(protocol.happened(OpenFailed(InputError("no")), START)) == ["session_initialization_failed: no"]
    assert brief(protocol.received(UPDATE, START)) == ["Open"]
    [updated] = sent(protocol.happened(Opened(), START))
    assert isinstance(updated, wire.SessionUpdated)
    assert updated.session == wire.UpdatedSession(id=protocol.session_id, model="tiny")


def test_a_long_reason_is_cut() -> None:
    protocol = in_state(State.OPENING)
    [error] = sent(protocol.happened(OpenFailed(InputError("x" * 10_000)), START))
    assert isinstance(error, wire.Error)
    assert error.error.message == "x" * 300


# ---- what a session says


def ready() -> Protocol:
    return in_state(State.READY)


def told(protocol: Protocol, event: events.Event) -> list[wire.ServerEvent]:
    return sent(protocol.happened(Said(event), START))


def test_a_frame_is_told_whole_and_in_order() -> None:
    protocol = ready()
    assert told(protocol, events.TranscriptDelta(0, "he")) == []
    assert told(protocol, events.TextDelta(0, "yo")) == []
    assert told(protocol, events.FunctionDelta(0, "{")) == []
    heard, said, called, audio = told(protocol, frame(0, text=5, function=6))
    assert heard == wire.ConversationItemInputAudioTranscriptionDelta(
        event_id=heard.event_id, frame_index=0, delta="he", transcript="he"
    )
    assert said == wire.ResponseTextDelta(event_id=said.event_id, frame_index=0, token_id=5, delta="yo", text="yo")
    assert called == wire.ResponseFunctionDelta(
        event_id=called.event_id, frame_index=0, token_id=6, delta="{", text="{"
    )
    assert isinstance(audio, wire.ResponseAudioDelta)
    assert (audio.frame_index, audio.text_token, audio.function_token) == (0, 5, 6)
    assert audio.audio_codes == tuple(range(31))
    assert wire.samples_of(audio.delta).shape == (1764,)
    assert wire.samples_of(audio.delta)[[0, -1]].tolist() == [-32767, 32767]
    assert len({message.event_id for message in (heard, said, called, audio)}) == 4


def test_texts_are_cumulative() -> None:
    protocol = ready()
    found: dict[str, list[str]] = {"transcript": [], "text": [], "function": []}
    for index, part in enumerate(["a", " b", "é"]):
        for kind in (events.TranscriptDelta, events.TextDelta, events.FunctionDelta):
            told(protocol, kind(index, part + kind.__name__[0]))
        for message in told(protocol, frame(index)):
            match message:
                case wire.ConversationItemInputAudioTranscriptionDelta():
                    found["transcript"].append(message.transcript)
                case wire.ResponseTextDelta():
                    found["text"].append(message.text)
                case wire.ResponseFunctionDelta():
                    found["function"].append(message.text)
    assert found["transcript"] == ["aT", "aT bT", "aT bTéT"]
    assert found["text"] == ["aT", "aT bT", "aT bTéT"]
    assert found["function"] == ["aF", "aF bF", "aF bFéF"]


def test_what_the_last_token_left_unfinished_comes_before_the_end() -> None:
    protocol = ready()
    told(protocol, frame(0, text=5, function=6))
    protocol.received(COMMIT, START)
    [said] = told(protocol, events.TextDelta(0, "\ufffd"))
    [called] = told(protocol, events.FunctionDelta(0, "\ufffd"))
    [heard] = told(protocol, events.TranscriptDelta(0, "\ufffd"))
    assert isinstance(said, wire.ResponseTextDelta)
    assert isinstance(called, wire.ResponseFunctionDelta)
    assert isinstance(heard, wire.ConversationItemInputAudioTranscriptionDelta)
    assert (said.token_id, called.token_id, heard.frame_index) == (5, 6, 0)
    [done] = told(protocol, events.Done(1))
    assert done == wire.ResponseDone(event_id=done.event_id, frame_index=1)


CALL = events.ToolCall(0, "call_0_0", "say", {"what": "h\u00e9", "n": [1, None]})


def output(call_id: str, value: object) -> str:
    item = {"type": "function_call_output", "call_id": call_id, "output": value}
    return say("conversation.item.create", item=item)


def calling(protocol: Protocol, index: int, *names: str) -> list[wire.ServerEvent]:
    """A frame that ends a call of these functions."""
    calls = [events.ToolCall(index, f"call_{index}_{place}", name, {}) for place, name in enumerate(names)]
    return [message for event in (*calls, frame(index)) for message in told(protocol, event)]


def test_calls_are_told_with_their_frame() -> None:
    protocol = ready()
    failed = events.ToolCallFailed(0, "the call is not JSON", "{")
    for event in (events.FunctionDelta(0, "}"), CALL, failed):
        assert told(protocol, event) == []
    delta, call, failure, audio = told(protocol, frame(0))
    assert isinstance(delta, wire.ResponseFunctionDelta)
    assert isinstance(audio, wire.ResponseAudioDelta)
    assert isinstance(call, wire.ResponseFunctionCallArgumentsDone)
    assert isinstance(failure, wire.ResponseFunctionCallFailed)
    assert (call.frame_index, call.call_id, call.name) == (0, "call_0_0", "say")
    assert call.arguments == '{"what": "h\\u00e9", "n": [1, null]}'
    assert (failure.frame_index, failure.reason, failure.written) == (0, "the call is not JSON", "{")
    assert (protocol.function_calls, protocol.function_calls_failed) == (1, 1)


def test_a_call_that_was_answered_waits_no_more() -> None:
    protocol = ready()
    calling(protocol, 3, "time", "dice")
    nobody = "invalid_request: conversation.item.create: no call {} waits for an output"
    assert brief(protocol.received(output("call_2_0", 1), START)) == [nobody.format("'call_2_0'")]
    assert protocol.received(output("call_3_1", {"a": [1]}), START) == [Respond("call_3_1", {"a": [1]})]
    assert protocol.received(output("call_3_0", "noon"), START) == [Respond("call_3_0", "noon")]
    for call_id in ("call_3_0", "call_3_1"):
        assert protocol.happened(OutputAccepted(call_id), START) == []
        assert brief(protocol.received(output(call_id, "again"), START)) == [nobody.format(repr(call_id))]
    assert protocol.state is State.READY


def test_a_better_output_may_follow_before_the_first_is_decided() -> None:
    """The session decides in their order, and the peer hears what it says."""
    protocol = ready()
    calling(protocol, 3, "time")
    for each in ("too long", "noon", "one"):
        assert protocol.received(output("call_3_0", each), START) == [Respond("call_3_0", each)]
    refused = [brief(protocol.happened(OutputRefused("call_3_0", InputError("too long")), START))]
    protocol.happened(OutputAccepted("call_3_0"), START)
    refused.append(brief(protocol.happened(OutputRefused("call_3_0", InputError("nothing waits")), START)))
    assert refused == [
        [f"invalid_request: conversation.item.create: {words}"] for words in ("too long", "nothing waits")
    ]
    assert brief(protocol.received(output("call_3_0", "two"), START)) == [NOBODY.replace("7", "3")]


def test_few_outputs_of_a_call_are_on_their_way_at_once() -> None:
    protocol = ready()
    calling(protocol, 3, "time", "dice")
    busy = MANY.format("'call_3_0'")
    for each in range(4):
        assert protocol.received(output("call_3_0", each), START) == [Respond("call_3_0", each)]
    assert brief(protocol.received(output("call_3_0", 4), START)) == [busy]
    assert protocol.received(output("call_3_1", 5), START) == [Respond("call_3_1", 5)]  # each call has its own
    protocol.happened(OutputRefused("call_3_0", InputError("no")), START)
    assert protocol.received(output("call_3_0", 6), START) == [Respond("call_3_0", 6)]
    assert brief(protocol.received(output("call_3_0", 7), START)) == [busy]


def test_what_is_said_of_an_older_call_changes_nothing() -> None:
    protocol = ready()
    calling(protocol, 3, "time")
    protocol.received(output("call_3_0", "long"), START)
    calling(protocol, 9, "time")
    for said in (OutputRefused("call_3_0", InputError("late")), OutputAccepted("call_3_0")):
        protocol.happened(said, START)
        assert brief(protocol.received(output("call_3_0", "noon"), START)) == [NOBODY.replace("7", "3")]
    assert protocol.received(output("call_9_0", "noon"), START) == [Respond("call_9_0", "noon")]


def test_an_output_that_the_session_does_not_take_may_be_another() -> None:
    protocol = ready()
    calling(protocol, 3, "time")
    protocol.received(output("call_3_0", "long"), START)
    for error, words in (
        (InputError("too long"), "too long"),
        (RuntimeError("/secret"), "the output could not be given"),
    ):
        [message] = brief(protocol.happened(OutputRefused("call_3_0", error), START))
        assert message.startswith(f"invalid_request: conversation.item.create: {words}")
        assert "/secret" not in message
        assert protocol.received(output("call_3_0", "short"), START) == [Respond("call_3_0", "short")]


def test_the_calls_of_another_frame_are_over() -> None:
    """So however many a client leaves unanswered, and whatever it sends, little waits for the model's thread."""
    protocol = ready()
    calling(protocol, 3, "time", "dice")
    calling(protocol, 9, "time")
    assert brief(protocol.received(output("call_3_0", "noon"), START)) == [NOBODY.replace("7", "3")]
    assert protocol.received(output("call_9_0", "noon"), START) == [Respond("call_9_0", "noon")]


def test_an_output_has_a_limit() -> None:
    protocol = ready()
    protocol._limits = Limits(output_chars=8)
    calling(protocol, 3, "time")
    [refused] = brief(protocol.received(output("call_3_0", "1234567"), START))
    assert refused == (
        "invalid_request: conversation.item.create: item.output has 9 characters as JSON; at most 8 are taken"
    )
    [refused] = brief(protocol.received(output("call_3_0", "\u00e9\u00e9"), START))
    assert "has 14 characters" in refused
    assert protocol.received(output("call_3_0", "123456"), START) == [Respond("call_3_0", "123456")]


def test_half_a_frame_is_never_told() -> None:
    protocol = ready()
    told(protocol, frame(0))
    told(protocol, events.TextDelta(1, "half"))
    commands = protocol.received(say("session.cancel"), START)
    assert brief(commands) == ["Cancel", "response.cancelled", "Close 1000 cancelled"]
    assert sent(commands)[0] == wire.ResponseCancelled(event_id=sent(commands)[0].event_id, frame_index=1)
    assert protocol.frames == 1


def test_input_passes_unchanged() -> None:
    [push] = ready().received(APPEND, START)
    assert push == Push(np.array([1, 2, 3], np.int16))
    assert hash(push) == hash(Push(np.array([1, 2, 3], np.int16)))
    assert push != Push(np.array([1, 2, 4], np.int16))
    assert push != Cancel()


# ---- time

LIMITS = Limits(configure_seconds=30, idle_seconds=120, session_seconds=600)


def test_time_to_configure() -> None:
    protocol = new(limits=LIMITS)
    protocol.begin()
    assert protocol.deadline == START + 30
    protocol.received(say("session.ping"), START + 29)
    assert protocol.deadline == START + 30
    assert protocol.tick(START + 29.9) == []
    assert brief(protocol.tick(START + 30)) == [
        "invalid_request: no session within 30 seconds",
        "Close 1008 configure timeout",
    ]
    assert protocol.ended_by == "configure timeout"


def test_a_session_that_is_being_opened_takes_its_time() -> None:
    protocol = new(limits=LIMITS)
    protocol.received(UPDATE, START + 10)
    assert protocol.deadline == math.inf
    assert protocol.tick(START + 500) == []
    protocol.happened(OpenFailed(InputError("no")), START + 500)
    assert protocol.deadline == START + 520  # what was left
    protocol.received(UPDATE, START + 530)  # just late, but before the tick
    protocol.happened(OpenFailed(InputError("no")), START + 540)
    assert protocol.deadline == START + 540


@pytest.mark.parametrize("state", [State.READY, State.FULL])
def test_idle(state: State) -> None:
    protocol = in_state(state, limits=LIMITS)
    assert protocol.deadline == START + 120
    protocol.received("garbage", START + 50)
    assert protocol.deadline == START + 170
    protocol.happened(Lagging(0, 0, 0), START + 60)  # the server's own business
    protocol.happened(Said(frame(0)), START + 100)
    assert protocol.deadline == START + 220
    assert protocol.tick(START + 219) == []
    assert brief(protocol.tick(START + 220)) == [
        "Cancel",
        "invalid_request: nothing was said for 120 seconds",
        "Close 1008 idle timeout",
    ]


def test_the_idle_time_begins_when_the_session_is_open() -> None:
    protocol = new(limits=LIMITS)
    protocol.received(UPDATE, START)
    protocol.happened(Opened(), START + 300)
    assert protocol.deadline == START + 420


@pytest.mark.parametrize("state", [State.READY, State.FULL])
def test_a_session_is_limited(state: State) -> None:
    protocol = in_state(state, limits=LIMITS)
    for second in range(0, 600, 50):
        protocol.received(say("session.ping"), START + second)
    assert protocol.deadline == START + 600
    assert protocol.tick(START + 599.9) == []
    assert brief(protocol.tick(START + 600)) == SESSION_LIMIT


def test_what_was_committed_has_as_long_again_to_be_answered() -> None:
    """And no longer: who takes a message now and then would keep the only slot for hours."""
    protocol = in_state(State.READY, limits=LIMITS)
    protocol.received(COMMIT, START + 599)
    assert protocol.deadline == START + 1199
    assert protocol.tick(START + 1198) == []
    assert brief(protocol.tick(START + 1199)) == [
        "Cancel", "invalid_request: an answer may take 600 seconds after the commit", "Close 1008 session limit",
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["cancel", "stop", "time", "failure"])
def test_skipped_frames_are_told_at_every_end(end: str) -> None:
    """Lag is told once a second; what was skipped since then is told before the connection closes."""
    protocol = in_state(State.READY, limits=LIMITS)
    protocol.happened(Lagging(1.0, 13, 3), START)
    assert protocol.happened(Lagging(1.0, 13, 7), START + 0.5) == []
    ends: dict[str, Callable[[], list[Command]]] = {
        "cancel": lambda: protocol.received(say("session.cancel"), START + 0.6),
        "stop": lambda: protocol.happened(Stop(1001, "bye"), START + 0.6),
        "time": lambda: protocol.tick(START + 120),
        "failure": lambda: protocol.happened(Failed(ValueError(), True), START + 0.6),
    }
    [lag] = [message for message in sent(ends[end]()) if isinstance(message, wire.SessionLag)]
    assert lag.frames_skipped == 7


def test_no_limits() -> None:
    protocol = in_state(State.READY, limits=Limits(math.inf, math.inf, math.inf))
    assert protocol.deadline == math.inf
    assert protocol.tick(START + 1e12) == []


# ---- lag


def test_lag_is_told_once_a_second() -> None:
    protocol = in_state(State.READY)
    assert protocol.happened(Lagging(0.49, 6, 0), START) == []
    [lag] = sent(protocol.happened(Lagging(0.5, 6, 0), START))
    assert lag == wire.SessionLag(
        event_id=lag.event_id, behind_ms=500, frames_waiting=6, frames_skipped=0, policy="wait"
    )
    assert protocol.happened(Lagging(9.0, 112, 0), START + 0.99) == []
    [lag] = sent(protocol.happened(Lagging(1.2345, 15, 0), START + 1))
    assert isinstance(lag, wire.SessionLag)
    assert lag.behind_ms == 1234


def test_skipped_frames_are_told_however_short_the_lag() -> None:
    protocol = new()
    protocol.received(say("session.update", session={"lag": {"policy": "skip"}}), START)
    protocol.happened(Opened(), START)
    [lag] = sent(protocol.happened(Lagging(0.1, 1, 3), START))
    assert isinstance(lag, wire.SessionLag)
    assert (lag.frames_skipped, lag.policy) == (3, "skip")
    assert protocol.happened(Lagging(0.1, 1, 3), START + 5) == []  # nothing new
    assert brief(protocol.happened(Lagging(0.1, 1, 4), START + 5)) == ["session.lag"]
    assert protocol.happened(Lagging(0.1, 1, 6), START + 5.5) == []
    assert protocol.frames_skipped == 6
    commands = protocol.happened(Said(events.Done(9)), START + 5.6)  # the rest is told before the end
    assert brief(commands) == ["session.lag", "response.done", "Close 1000 done"]
    assert sent(commands)[0].frames_skipped == 6  # type: ignore[union-attr]


# ---- any order

PROMPT = st.sampled_from([None, "", "Be concise."])
NEUTRAL = [say("session.ping")]
BAD = [
    "[]",
    "null",
    "{",
    "",
    '{"type":5}',
    say("x"),
    say("session.update", session={"seed": -1}),
    say("session.update", session=5),
    say("input_audio_buffer.append", audio="AA=="),
    say("input_audio_buffer.append", audio=None),
    say("input_audio_buffer.append", sample_rate=44100),
    say("input_audio_buffer.commit", pad_partial="yes"),
    "[" * 5000,
    '{"type":"session.ping","type":"session.cancel"}',
    '{"type":"session.ping","x":NaN}',
    b"",
    b"\xff\0",
]


class Conversation(RuleBasedStateMachine):
    """A peer and a session that do whatever they may, in any order, and what must hold of the answers."""

    def __init__(self) -> None:
        super().__init__()
        tokens = count()
        self.now = 0.0
        self.protocol = Protocol(model="m", token=lambda: f"{next(tokens):016x}", now=0.0, limits=Limits(30, 120, 600))
        self.closed = False
        self.finals = 0
        self.session = "none"  # or opening, open, flushing: what the model's thread would know
        self.pushed = self.spoken = self.audio_deltas = 0
        self.said = {"transcript": "", "text": "", "function": ""}
        self.names: set[str] = set()
        self.lag_at = -math.inf
        self.skips_told = 0
        self.awaited: dict[str, int] = {}  # calls that may be answered, and by how many outputs they might be already
        self.given: list[str] = []  # outputs that the session has not said anything about
        self.calm = 0  # steps in which nobody ends the conversation

    def carry_out(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            assert not self.closed, "a command after the last one"
            match command:
                case Send(message):
                    self.hear(message)
                case Open(_, seed, frames, _):
                    assert self.session == "none"
                    assert 0 <= seed < 2**64
                    assert frames is not None
                    assert 1 <= frames <= 7500
                    self.session = "opening"
                    self.pushed = 0
                case Push(samples):
                    assert self.session in ("opening", "open")
                    assert samples.size > 0
                    self.pushed += samples.size
                case Flush():
                    assert self.session in ("open", "full")
                    self.session = "flushing"
                case Respond(call_id, _):
                    assert self.session in ("open", "full", "flushing")
                    self.given.append(call_id)
                    self.awaited[call_id] += 1
                    assert self.awaited[call_id] <= 4
                case Cancel():
                    assert self.session != "none"
                    self.session = "none"
                case Close(code, _):
                    assert code in (1000, 1001, 1008, 1011)
                    assert self.session == "none", "the session must be over or cancelled"
                    assert self.skips_told == self.protocol.frames_skipped, "nothing is dropped silently"
                    self.closed = True
        return commands

    def hear(self, message: wire.ServerEvent) -> None:
        assert wire.decode_server(wire.encode(message)) == message
        assert self.finals == 0, "nothing follows response.done and response.cancelled"
        assert message.event_id not in self.names
        self.names.add(message.event_id)
        match message:
            case wire.SessionLag():
                self.skips_told = message.frames_skipped
            case wire.ResponseDone() | wire.ResponseCancelled():
                assert message.frame_index == self.audio_deltas
                self.finals += 1
            case wire.ResponseAudioDelta():
                assert message.frame_index == self.audio_deltas
                self.audio_deltas += 1
            case wire.ConversationItemInputAudioTranscriptionDelta(delta=delta, transcript=text):
                self.grow("transcript", message.frame_index, delta, text)
            case wire.ResponseTextDelta(delta=delta, text=text):
                self.grow("text", message.frame_index, delta, text)
                assert message.token_id == 100 + message.frame_index
            case wire.ResponseFunctionDelta(delta=delta, text=text):
                self.grow("function", message.frame_index, delta, text)
                assert message.token_id == 200 + message.frame_index
            case wire.SessionUpdated():
                assert self.session == "open"
            case wire.InputAudioBufferCommitted():
                assert self.session in ("open", "full")

    def grow(self, kind: str, index: int, delta: str, text: str) -> None:
        assert index == self.audio_deltas or (index == self.audio_deltas - 1 and self.session == "flushing")
        self.said[kind] += delta
        assert text == self.said[kind]

    # ---- the peer

    @initialize(calm=st.integers(0, 30), far=st.integers(0, 2))
    def begin(self, calm: int, far: int) -> None:
        self.calm = calm
        assert brief(self.carry_out(self.protocol.begin())) == ["session.created"]
        if far >= 1:
            self.carry_out(self.protocol.received(UPDATE, self.now))
        if far == 2:
            self.opened()

    @rule(seed=st.integers(0, 2**64 - 1), prompt=PROMPT, seconds=st.none() | st.floats(0.001, 1e30))
    def update(self, seed: int, prompt: str | None, seconds: float | None) -> None:
        options = {"seed": seed, "system_prompt": prompt, "max_streaming_seconds": seconds}
        expected = "Open" if self.session == "none" else AGAIN
        self.expect(expected, self.protocol.received(say("session.update", session=options), self.now))

    @rule(samples=st.integers(0, 3))
    def append(self, samples: int) -> None:
        session, early = self.session, self.protocol.state is State.CLOSED_EARLY
        audio = {0: "", 1: "AQA=", 2: "AQACAA==", 3: "AQACAAMA"}[samples]
        found = brief(self.carry_out(self.protocol.received(say("input_audio_buffer.append", audio=audio), self.now)))
        taken = [f"Push {[1, 2, 3][:samples]}"] if samples else []
        answers = {"none": [EARLY], "open": taken, "opening": taken, "full": [FULL], "flushing": [LATE]}
        assert found == ([] if self.closed else [LATE] if early else answers[session])

    @rule(which=st.integers(0, 4))
    def answer(self, which: int) -> None:
        call_id = [*self.awaited, *self.given, "call_x_0"][which % (len(self.awaited) + len(self.given) + 1)]
        waits, early = self.awaited.get(call_id), self.protocol.state is State.CONFIGURING
        found = brief(self.carry_out(self.protocol.received(output(call_id, "five"), self.now)))
        nobody = f"invalid_request: conversation.item.create: no call {call_id!r} waits for an output"
        many = MANY.format(repr(call_id))
        answer = EARLY if early else nobody if waits is None else many if waits == 4 else f"Respond {call_id} five"
        assert found == ([] if self.closed else [answer])

    @precondition(lambda self: self.given and self.session in ("open", "full", "flushing"))
    @rule()
    def refuse_output(self) -> None:
        call_id = self.given.pop()
        commands = self.carry_out(self.protocol.happened(OutputRefused(call_id, InputError("no")), self.now))
        assert brief(commands) == ["invalid_request: conversation.item.create: no"]
        if call_id in self.awaited:
            self.awaited[call_id] -= 1

    @precondition(lambda self: self.given and self.session in ("open", "full", "flushing"))
    @rule()
    def accept_output(self) -> None:
        call_id = self.given.pop()
        assert self.carry_out(self.protocol.happened(OutputAccepted(call_id), self.now)) == []
        self.awaited.pop(call_id, None)

    @rule(pad=st.booleans())
    def commit(self, pad: bool) -> None:
        self.carry_out(self.protocol.received(say("input_audio_buffer.commit", pad_partial=pad), self.now))
        if self.session in ("open", "full") and not self.closed:
            raise AssertionError("not flushed")

    @precondition(lambda self: self.session != "none" and self.calm <= 0)
    @rule(name=st.sampled_from(["session.cancel", "response.cancel"]))
    def cancel(self, name: str) -> None:
        self.carry_out(self.protocol.received(say(name), self.now))
        assert self.closed
        assert self.finals == 1

    @rule()
    def ping(self) -> None:
        self.expect("session.pong", self.protocol.received(say("session.ping"), self.now))

    @rule(message=st.sampled_from(BAD))
    def bad(self, message: str | bytes) -> None:
        before = self.protocol.state, self.session, self.audio_deltas
        commands = self.carry_out(self.protocol.received(message, self.now))
        assert [type(m) for m in sent(commands)] == ([] if self.closed else [wire.Error])
        assert len(commands) == len(sent(commands))
        assert (self.protocol.state, self.session, self.audio_deltas) == before

    @precondition(lambda self: self.calm <= 0)
    @rule()
    def leave(self) -> None:
        commands = self.carry_out(self.protocol.happened(PeerLeft(), self.now))
        assert not sent(commands)
        self.closed = True

    # ---- the session

    @precondition(lambda self: self.session == "opening")
    @rule()
    def opened(self) -> None:
        self.session, self.spoken = "open", 0
        assert brief(self.carry_out(self.protocol.happened(Opened(), self.now)))[0] == "session.updated"

    @precondition(lambda self: self.session == "opening")
    @rule()
    def not_opened(self) -> None:
        self.session = "none"
        [message] = brief(self.carry_out(self.protocol.happened(OpenFailed(InputError("no")), self.now)))
        assert message.startswith("session_initialization_failed: no")

    @precondition(lambda self: self.session in ("open", "flushing"))
    @rule(frames=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=4))
    def speak(self, frames: list[tuple[bool, bool, bool]]) -> None:
        for new in frames:
            index, before = self.spoken, self.audio_deltas
            kinds = (events.TranscriptDelta, events.TextDelta, events.FunctionDelta)
            deltas = [
                kind(index, f"{kind.__name__[0]}{index}") for kind, wanted in zip(kinds, new, strict=True) if wanted
            ]
            found: list[str] = []
            for event in (*deltas, frame(index, 100 + index, 200 + index)):
                found += brief(self.carry_out(self.protocol.happened(Said(event), self.now)))
            self.spoken += 1
            assert self.audio_deltas == before + 1
            assert len(found) == len(deltas) + 1
            assert found[-1] == "response.audio.delta"

    @precondition(lambda self: self.session in ("open", "flushing"))
    @rule(count=st.integers(1, 3))
    def call(self, count: int) -> None:
        self.awaited = {f"call_{self.spoken}_{place}": 0 for place in range(count)}
        calls = [events.ToolCall(self.spoken, call_id, "time", {}) for call_id in self.awaited]
        found: list[str] = []
        for event in (*calls, frame(self.spoken, 100 + self.spoken, 200 + self.spoken)):
            found += brief(self.carry_out(self.protocol.happened(Said(event), self.now)))
        self.spoken += 1
        assert found == [*["response.function_call_arguments.done"] * count, "response.audio.delta"]

    @precondition(lambda self: self.session == "flushing")
    @rule(unfinished=st.booleans())
    def done(self, unfinished: bool) -> None:
        if unfinished and self.spoken:
            event = events.TextDelta(self.spoken - 1, "\ufffd")
            [_] = self.carry_out(self.protocol.happened(Said(event), self.now))
        commands = self.protocol.happened(Said(events.Done(self.spoken)), self.now)
        self.session = "none"
        self.carry_out(commands)
        assert self.closed
        assert self.finals == 1

    @precondition(lambda self: self.session != "none")
    @rule(ended=st.booleans())
    def fail(self, ended: bool) -> None:
        ended = ended and self.calm <= 0
        if ended:
            self.session = "none"
        elif self.session == "open":
            self.session = "full"
        commands = self.carry_out(self.protocol.happened(Failed(ContextLimitError("full"), ended), self.now))
        assert brief(commands)[0].startswith("inference_error: ")
        assert self.closed is ended

    @rule(seconds=st.floats(0, 200), skipped=st.integers(0, 5))
    def lag(self, seconds: float, skipped: int) -> None:
        skipped += self.protocol.frames_skipped
        commands = self.carry_out(self.protocol.happened(Lagging(seconds, int(seconds / 0.08), skipped), self.now))
        if commands:
            assert brief(commands) == ["session.lag"]
            assert self.now >= self.lag_at + 1
            self.lag_at = self.now

    # ---- the server

    @rule(seconds=st.floats(0, 0.5) | st.sampled_from([1.0, 15.0, 120.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += min(seconds, 0.5) if self.calm > 0 else seconds
        due = self.now >= self.protocol.deadline
        self.carry_out(self.protocol.tick(self.now))
        assert self.closed or not due

    @precondition(lambda self: self.calm <= 0)
    @rule(code=st.sampled_from([1001, 1008]))
    def stop(self, code: int) -> None:
        commands = self.carry_out(self.protocol.happened(Stop(code, "stopped"), self.now))
        assert all(isinstance(message, wire.SessionLag) for message in sent(commands))
        assert self.closed

    # ---- always

    def expect(self, answer: str, commands: list[Command]) -> None:
        was_closed = self.closed
        assert brief(self.carry_out(commands)) == ([] if was_closed else [answer])

    @invariant()
    def time_goes_by(self) -> None:
        self.calm -= 1

    @invariant()
    def ended_is_closed(self) -> None:
        assert (self.protocol.state is State.ENDED) == self.closed
        assert (self.protocol.ended_by != "") == self.closed
        assert self.protocol.frames == self.audio_deltas
        assert self.closed or self.protocol.deadline > self.now


TestConversation: Callable[[], None] = Conversation.TestCase  # type: ignore[assignment]
TestConversation.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)  # type: ignore[attr-defined]
