"""Every message of /v1/realtime, word for word; and everything that is not one."""

import base64
import json
import math
import re
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from voicechat_core import InputError, WireError, wire
from voicechat_core.wire import (
    ConversationItemCreate,
    ConversationItemInputAudioTranscriptionDelta,
    CreatedSession,
    Error,
    ErrorBody,
    FunctionCallOutput,
    InputAudioBufferAppend,
    InputAudioBufferCommit,
    InputAudioBufferCommitted,
    LagPolicy,
    ResponseAudioDelta,
    ResponseCancel,
    ResponseCancelled,
    ResponseDone,
    ResponseFunctionCallArgumentsDone,
    ResponseFunctionCallFailed,
    ResponseFunctionDelta,
    ResponseTextDelta,
    SessionCancel,
    SessionCreated,
    SessionLag,
    SessionOptions,
    SessionPing,
    SessionPong,
    SessionUpdate,
    SessionUpdated,
    UpdatedSession,
    decode_client,
    decode_server,
    encode,
)

ID = "event_0123456789abcdef"
FORMATS = (
    '"input_audio_format":{"type":"pcm16","sample_rate":16000},'
    '"output_audio_format":{"type":"pcm16","sample_rate":22050}'
)

# What is written, with exactly these fields in this order.
CLIENT = [
    (SessionUpdate(), '{"type":"session.update","session":{}}'),
    (
        SessionUpdate(
            session=SessionOptions(
                model="m",
                system_prompt="",
                seed=2**64 - 1,
                max_streaming_seconds=1.5,
                lag=LagPolicy(policy="skip", max_seconds=0.5),
            )
        ),
        (
            '{"type":"session.update","session":{"model":"m","system_prompt":"","seed":18446744073709551615,'
            '"max_streaming_seconds":1.5,"lag":{"policy":"skip","max_seconds":0.5}}}'
        ),
    ),
    (InputAudioBufferAppend(), '{"type":"input_audio_buffer.append","audio":"","sample_rate":16000}'),
    (
        InputAudioBufferAppend(audio=b"\x01\x00\xff\xff"),
        '{"type":"input_audio_buffer.append","audio":"AQD//w==","sample_rate":16000}',
    ),
    (InputAudioBufferCommit(), '{"type":"input_audio_buffer.commit","pad_partial":true}'),
    (InputAudioBufferCommit(pad_partial=False), '{"type":"input_audio_buffer.commit","pad_partial":false}'),
    (
        SessionUpdate(session=SessionOptions(function_calls=True)),
        '{"type":"session.update","session":{"function_calls":true}}',
    ),
    (
        ConversationItemCreate(item=FunctionCallOutput(call_id="call_7_0", output="five")),
        (
            '{"type":"conversation.item.create","item":{"type":"function_call_output","call_id":"call_7_0",'
            '"output":"five"}}'
        ),
    ),
    (SessionCancel(), '{"type":"session.cancel"}'),
    (ResponseCancel(), '{"type":"response.cancel"}'),
    (SessionPing(), '{"type":"session.ping"}'),
]
SERVER = [
    (
        SessionCreated(event_id=ID, session=CreatedSession(id="sess_1")),
        f'{{"type":"session.created","event_id":"{ID}","session":{{"id":"sess_1","state":"configuring",{FORMATS}}}}}',
    ),
    (
        SessionCreated(event_id=ID, session=CreatedSession(id="sess_1", recording=True)),
        (
            f'{{"type":"session.created","event_id":"{ID}","session":{{"id":"sess_1","state":"configuring",{FORMATS},'
            '"recording":true}}'
        ),
    ),
    (
        SessionUpdated(event_id=ID, session=UpdatedSession(id="sess_1", model="tiny")),
        (
            f'{{"type":"session.updated","event_id":"{ID}","session":{{"id":"sess_1","state":"ready","model":"tiny",'
            f'"frame_samples":1280,{FORMATS}}}}}'
        ),
    ),
    (
        ConversationItemInputAudioTranscriptionDelta(event_id=ID, frame_index=3, delta=" b", transcript="a b"),
        (
            f'{{"type":"conversation.item.input_audio_transcription.delta","event_id":"{ID}","frame_index":3,'
            '"delta":" b","transcript":"a b"}'
        ),
    ),
    (
        ResponseTextDelta(event_id=ID, frame_index=3, token_id=9, delta="é", text="aé"),
        f'{{"type":"response.text.delta","event_id":"{ID}","frame_index":3,"token_id":9,"delta":"é","text":"aé"}}',
    ),
    (
        ResponseFunctionDelta(event_id=ID, frame_index=3, token_id=9, delta="{", text='"{'),
        (
            f'{{"type":"response.function.delta","event_id":"{ID}","frame_index":3,"token_id":9,"delta":"{{",'
            '"text":"\\"{"}'
        ),
    ),
    (
        ResponseFunctionCallArgumentsDone(
            event_id=ID, frame_index=7, call_id="call_7_0", name="roll_dice", arguments='{"sides": 6}'
        ),
        (
            f'{{"type":"response.function_call_arguments.done","event_id":"{ID}","frame_index":7,'
            '"call_id":"call_7_0","name":"roll_dice","arguments":"{\\"sides\\": 6}"}'
        ),
    ),
    (
        ResponseFunctionCallFailed(event_id=ID, frame_index=7, reason="the call is not JSON", written="{"),
        (
            f'{{"type":"response.function_call.failed","event_id":"{ID}","frame_index":7,'
            '"reason":"the call is not JSON","written":"{"}'
        ),
    ),
    (
        ResponseAudioDelta(
            event_id=ID, frame_index=3, delta=b"\0\x80", audio_codes=tuple(range(31)), text_token=12, function_token=0
        ),
        (
            f'{{"type":"response.audio.delta","event_id":"{ID}","frame_index":3,"delta":"AIA=","format":"pcm16",'
            f'"sample_rate":22050,"channels":1,"audio_codes":[{",".join(map(str, range(31)))}],'
            '"text_token":12,"function_token":0}'
        ),
    ),
    (InputAudioBufferCommitted(event_id=ID), f'{{"type":"input_audio_buffer.committed","event_id":"{ID}"}}'),
    (ResponseDone(event_id=ID, frame_index=61), f'{{"type":"response.done","event_id":"{ID}","frame_index":61}}'),
    (
        ResponseCancelled(event_id=ID, frame_index=0),
        f'{{"type":"response.cancelled","event_id":"{ID}","frame_index":0}}',
    ),
    (SessionPong(event_id=ID), f'{{"type":"session.pong","event_id":"{ID}"}}'),
    (
        SessionLag(event_id=ID, behind_ms=2080, frames_waiting=26, frames_skipped=3, policy="skip"),
        (
            f'{{"type":"session.lag","event_id":"{ID}","behind_ms":2080,"frames_waiting":26,"frames_skipped":3,'
            '"policy":"skip"}'
        ),
    ),
    (
        Error(event_id=ID, error=ErrorBody(code="server_busy", message="m")),
        f'{{"type":"error","event_id":"{ID}","error":{{"code":"server_busy","message":"m"}}}}',
    ),
]


def kind(event: object) -> str:
    return type(event).__name__ if isinstance(event, msgspec.Struct) else ""


@pytest.mark.parametrize(("event", "text"), CLIENT, ids=kind)
def test_a_client_says(event: wire.ClientEvent, text: str) -> None:
    assert encode(event) == text
    assert decode_client(text) == decode_client(text.encode()) == event


@pytest.mark.parametrize(("event", "text"), SERVER, ids=kind)
def test_a_server_says(event: wire.ServerEvent, text: str) -> None:
    assert encode(event) == text
    assert decode_server(text) == decode_server(text.encode()) == event


def test_every_message_is_in_the_tables_above() -> None:
    assert {type(event) for event, _ in CLIENT} == set(wire.CLIENT_EVENTS.values())
    assert {type(event) for event, _ in SERVER} == set(wire.SERVER_EVENTS.values())
    assert len(wire.CLIENT_EVENTS) == 7
    assert len(wire.SERVER_EVENTS) == 14


@pytest.mark.parametrize(("event", "text"), [*CLIENT, *SERVER], ids=kind)
def test_what_is_not_known_is_ignored(event: Any, text: str) -> None:
    more = json.loads(text) | {"event_id_": 5, "x": {"y": [None]}}
    for name, value in more.items():
        if isinstance(value, dict):
            more[name] = value | {"unheard_of": None}
    decode = decode_client if type(event) in wire.CLIENT_EVENTS.values() else decode_server
    assert decode(json.dumps(more)) == event


@pytest.mark.parametrize("event", [event for event, _ in [*CLIENT, *SERVER]], ids=kind)
def test_messages_do_not_change(event: Any) -> None:
    with pytest.raises(AttributeError):
        event.type = ""
    assert hash(event) == hash(msgspec.structs.replace(event))


# ---- what a field may be


@pytest.mark.parametrize("output", ["five", 5, None, True, [1, "a"], {"value": 37.5, "unit": {"x": []}}])
def test_an_output_is_any_json(output: Any) -> None:
    message = ConversationItemCreate(item=FunctionCallOutput(call_id="c", output=output))
    assert decode_client(encode(message)) == message


@pytest.mark.parametrize("output", [math.nan, {"a": [math.inf]}, {1, 2}, b"x"])
def test_and_nothing_else(output: Any) -> None:
    with pytest.raises(InputError, match="the output is no JSON value: "):
        FunctionCallOutput(call_id="c", output=output)


def test_an_output_may_hold_the_scalars_of_a_library() -> None:
    given = FunctionCallOutput(call_id="c", output={"n": np.int64(5), "x": [np.float32(0.5), np.bool_(True)]})
    message = decode_client(encode(ConversationItemCreate(item=given)))
    assert isinstance(message, ConversationItemCreate)
    assert message.item.output == {"n": 5, "x": [0.5, True]}


def test_an_output_may_be_nested_so_deeply() -> None:
    """Somewhere it could be read and not be written again; that is far beyond."""

    def nested(depth: int) -> str:
        item = f'{{"call_id":"c","output":{"[" * depth}{"]" * depth}}}'
        return f'{{"type":"conversation.item.create","item":{item}}}'

    assert decode_client(nested(64))
    for depth in range(65, 1100):
        with pytest.raises(WireError, match=r"levels|nested too deeply"):
            decode_client(nested(depth))
    with pytest.raises(InputError, match="the output has 65 levels; 64 are the most"):
        FunctionCallOutput(call_id="c", output=json.loads("[" * 64 + '{"a": 5}' + "]" * 64))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (None, "item is null; an object is needed"),
        ({"type": "message"}, "item.type is 'message'; 'function_call_output' is needed"),
        ({"call_id": "c"}, "item.output is missing; a JSON value is needed"),
        ({"output": 5}, "item.call_id is missing; text is needed"),
        ({"call_id": 5, "output": 5}, "item.call_id is 5; text is needed"),
    ],
)
def test_an_item_that_is_no_output(item: Any, message: str) -> None:
    with pytest.raises(WireError) as raised:
        decode_client(json.dumps({"type": "conversation.item.create", "item": item}))
    assert str(raised.value) == f"conversation.item.create: {message}"
    assert (raised.value.code, raised.value.event_type) == ("invalid_request", "conversation.item.create")


APPEND, COMMIT, UPDATE = "input_audio_buffer.append", "input_audio_buffer.commit", "session.update"


def update(**options: object) -> str:
    return json.dumps({"type": UPDATE, "session": options})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"seed": None}, SessionOptions(seed=0)),
        ({"seed": 5.0}, SessionOptions(seed=5)),
        ({"seed": -0.0}, SessionOptions(seed=0)),
        ({"seed": "5"}, SessionOptions(seed=5)),
        ({"seed": "007"}, SessionOptions(seed=7)),
        ({"seed": str(2**64 - 1)}, SessionOptions(seed=2**64 - 1)),
        ({"seed": 1e18}, SessionOptions(seed=10**18)),
        ({"system_prompt": None}, SessionOptions(system_prompt=None)),
        ({"system_prompt": "é\0😀"}, SessionOptions(system_prompt="é\0😀")),
        ({"model": None}, SessionOptions()),
        ({"model": "any at all"}, SessionOptions(model="any at all")),
        ({"max_streaming_seconds": None}, SessionOptions()),
        ({"max_streaming_seconds": 10**39}, SessionOptions(max_streaming_seconds=1e39)),
        ({"lag": None}, SessionOptions()),
        ({"lag": {}}, SessionOptions()),
        ({"lag": {"policy": "skip"}}, SessionOptions(lag=LagPolicy(policy="skip", max_seconds=2.0))),
        ({"lag": {"max_seconds": 0.08}}, SessionOptions(lag=LagPolicy(policy="wait", max_seconds=0.08))),
    ],
)
def test_spellings_of_options(options: dict[str, object], expected: SessionOptions) -> None:
    assert decode_client(update(**options)) == SessionUpdate(session=expected)


def test_spellings_of_other_fields() -> None:
    assert decode_client('{"type":"session.update"}') == SessionUpdate()
    assert decode_client('{"type":"input_audio_buffer.append"}') == InputAudioBufferAppend()
    found = decode_client('{"type":"input_audio_buffer.append","sample_rate":16000.0}')
    assert repr(found) == "InputAudioBufferAppend(audio=b'', sample_rate=16000)"
    assert decode_client('{"type":"input_audio_buffer.commit"}') == InputAudioBufferCommit(pad_partial=True)


SEED = "a whole number from 0 to 2^64 - 1 is needed"
AUDIO = "padded base64 of 16-bit samples is needed"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "invalid_request", "type is missing; text is needed"),
    ({"type": None}, "invalid_request", "type is null; text is needed"),
    ({"type": ["session.ping"]}, "invalid_request", "type is an array; text is needed"),
    ({"type": "x"}, "invalid_request", "unsupported event type 'x'"),
    ({"type": "session.created"}, "invalid_request", "unsupported event type 'session.created'"),
    ({"type": "y" * 900}, "invalid_request", f"unsupported event type {'y' * 40!r}... (900 characters)"),
    ({"type": COMMIT, "pad_partial": 1}, "invalid_request", "pad_partial is 1; true or false is needed"),
    ({"type": COMMIT, "pad_partial": "true"}, "invalid_request", "pad_partial is 'true'; true or false is needed"),
    ({"type": COMMIT, "pad_partial": None}, "invalid_request", "pad_partial is null; true or false is needed"),
    ({"type": APPEND, "audio": None}, "inference_error", f"audio is null; {AUDIO}"),
    ({"type": APPEND, "audio": [0, 0]}, "inference_error", f"audio is an array; {AUDIO}"),
    ({"type": APPEND, "audio": "data:,AAA="}, "inference_error", f"audio is 'data:,AAA='; {AUDIO}"),
    (
        {"type": APPEND, "audio": "A" * 60 + "!"},
        "inference_error",
        f"audio is {'A' * 40!r}... (61 characters); {AUDIO}",
    ),
    (
        {"type": APPEND, "audio": "AA=="},
        "inference_error",
        "audio has 1 bytes; a whole number of 16-bit samples is needed",
    ),
    ({"type": APPEND, "sample_rate": 8000}, "inference_error", "sample_rate is 8000; 16000 is needed"),
    ({"type": APPEND, "sample_rate": 16000.5}, "inference_error", "sample_rate is 16000.5; 16000 is needed"),
    ({"type": APPEND, "sample_rate": "16000"}, "inference_error", "sample_rate is '16000'; 16000 is needed"),
    ({"type": APPEND, "sample_rate": None}, "inference_error", "sample_rate is null; 16000 is needed"),
    ({"type": APPEND, "sample_rate": True}, "inference_error", "sample_rate is true; 16000 is needed"),
    *(
        ({"type": UPDATE, "session": session}, "session_initialization_failed", message)
        for session, message in [
            (None, "session is null; an object is needed"),
            ([], "session is an array; an object is needed"),
            ({"model": 5}, "session.model is 5; text is needed"),
            ({"system_prompt": False}, "session.system_prompt is false; text is needed"),
            ({"seed": -1}, f"session.seed is -1; {SEED}"),
            ({"seed": 0.5}, f"session.seed is 0.5; {SEED}"),
            ({"seed": True}, f"session.seed is true; {SEED}"),
            ({"seed": "0x5"}, f"session.seed is '0x5'; {SEED}"),
            ({"seed": " 5"}, f"session.seed is ' 5'; {SEED}"),
            ({"seed": "5\n"}, f"session.seed is '5\\n'; {SEED}"),
            ({"seed": "-5"}, f"session.seed is '-5'; {SEED}"),
            ({"seed": "٥"}, f"session.seed is '٥'; {SEED}"),
            ({"seed": ""}, f"session.seed is ''; {SEED}"),
            ({"seed": 2**64}, f"session.seed is 18446744073709551616; {SEED}"),
            ({"seed": str(2**64)}, f"session.seed is '18446744073709551616'; {SEED}"),
            ({"seed": float(2**64)}, f"session.seed is 1.8446744073709552e+19; {SEED}"),
            ({"seed": -1e300}, f"session.seed is -1e+300; {SEED}"),
            ({"seed": {}}, f"session.seed is an object; {SEED}"),
            ({"max_streaming_seconds": 0}, "session.max_streaming_seconds is 0; a number above 0 is needed"),
            ({"max_streaming_seconds": -0.5}, "session.max_streaming_seconds is -0.5; a number above 0 is needed"),
            ({"max_streaming_seconds": "5"}, "session.max_streaming_seconds is '5'; a number above 0 is needed"),
            ({"max_streaming_seconds": True}, "session.max_streaming_seconds is true; a number above 0 is needed"),
            ({"lag": "skip"}, "session.lag is 'skip'; an object is needed"),
            ({"lag": {"policy": "drop"}}, "session.lag.policy is 'drop'; 'wait' or 'skip' is needed"),
            ({"lag": {"policy": None}}, "session.lag.policy is null; 'wait' or 'skip' is needed"),
            ({"lag": {"policy": 1}}, "session.lag.policy is 1; 'wait' or 'skip' is needed"),
            (
                {"lag": {"max_seconds": 0.07}},
                "session.lag.max_seconds is 0.07; a number of at least 0.08, one frame, is needed",
            ),
            (
                {"lag": {"max_seconds": None}},
                "session.lag.max_seconds is null; a number of at least 0.08, one frame, is needed",
            ),
        ]
    ),
]


@pytest.mark.parametrize(("data", "code", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_of_a_client(data: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(WireError) as found:
        decode_client(json.dumps(data))
    name = data.get("type")
    prefix = f"{name}: " if name in (APPEND, COMMIT, UPDATE) else ""
    assert str(found.value) == prefix + message
    assert found.value.code == code
    assert found.value.event_type == (name if isinstance(name, str) else None)


@pytest.mark.parametrize(
    ("event", "changes", "message"),
    [
        ("response.done", {"frame_index": -1}, "frame_index is -1; a whole number of at least 0 is needed"),
        ("response.done", {"frame_index": None}, "frame_index is null; a whole number of at least 0 is needed"),
        ("response.done", {"frame_index": 1.5}, "frame_index is 1.5; a whole number of at least 0 is needed"),
        ("session.pong", {"event_id": 5}, "event_id is 5; text is needed"),
        ("response.audio.delta", {"audio_codes": [0, 1, "2"]}, "audio_codes[2] is '2'; a whole number is needed"),
        ("response.audio.delta", {"audio_codes": {}}, "audio_codes is an object; an array of whole numbers is needed"),
        ("response.audio.delta", {"delta": "AAAA"}, "delta has 3 bytes; a whole number of 16-bit samples is needed"),
        ("response.audio.delta", {"text_token": "1"}, "text_token is '1'; a whole number is needed"),
        ("session.created", {"session": {}}, "session.id is missing; text is needed"),
        ("error", {"error": {"code": "c", "message": 1}}, "error.message is 1; text is needed"),
        ("session.lag", {"policy": "drop"}, "policy is 'drop'; 'wait' or 'skip' is needed"),
        (
            "session.updated",
            {"session": {"id": "a", "model": "b", "input_audio_format": {"sample_rate": 0}}},
            "session.input_audio_format.sample_rate is 0; a whole number above 0 is needed",
        ),
    ],
)
def test_refused_of_a_server(event: str, changes: dict[str, Any], message: str) -> None:
    good = next(json.loads(text) for _, text in SERVER if json.loads(text)["type"] == event)
    with pytest.raises(WireError, match=f"^{re.escape(f'{event}: {message}')}$") as found:
        decode_server(json.dumps(good | changes))
    assert (found.value.code, found.value.event_type) == ("invalid_request", event)


def test_every_field_that_a_server_must_send_is_asked_for() -> None:
    for _, text in SERVER:
        good = json.loads(text)
        required = wire.SERVER_EVENTS[good["type"]].__struct_fields__
        optional = {"format", "sample_rate", "channels", "text_token", "function_token"}
        for name in set(required) - optional:
            with pytest.raises(WireError, match=f": {name} is missing; "):
                decode_server(json.dumps({key: value for key, value in good.items() if key != name}))


def test_news_of_a_later_version_can_be_told_from_nonsense() -> None:
    with pytest.raises(WireError) as found:
        decode_server('{"type":"session.news"}')
    assert found.value.event_type == "session.news"
    assert found.value.event_type not in wire.SERVER_EVENTS


def test_audio_of_other_servers_has_no_ids() -> None:
    delta = decode_server('{"type":"response.audio.delta","event_id":"e","frame_index":0,"delta":"","audio_codes":[]}')
    assert isinstance(delta, ResponseAudioDelta)
    assert (delta.text_token, delta.function_token, delta.sample_rate) == (None, None, 22050)


# ---- audio


def test_samples_are_little_endian() -> None:
    assert wire.samples_of(b"\x01\x00\x00\x80\xff\x7f").tolist() == [1, -32768, 32767]
    assert wire.samples_of(b"").shape == (0,)
    assert wire.bytes_of(np.array([1, -32768, 32767], np.int16)) == b"\x01\x00\x00\x80\xff\x7f"
    assert wire.bytes_of(np.arange(6, dtype=np.int16)[::2]) == b"\0\0\2\0\4\0"


@pytest.mark.parametrize("samples", [np.zeros(3, np.float32), np.zeros((1, 3), np.int16), np.zeros(3, ">i2")])
def test_only_samples_become_audio(samples: Any) -> None:
    with pytest.raises(InputError, match=r"int16 \[S\] is needed"):
        wire.bytes_of(samples)


@given(st.lists(st.integers(-32768, 32767)))
def test_pcm16_passes_unchanged(values: list[int]) -> None:
    samples = np.array(values, np.int16)
    message = {"type": APPEND, "audio": base64.b64encode(samples.astype("<i2").tobytes()).decode()}
    append = decode_client(json.dumps(message))
    assert isinstance(append, InputAudioBufferAppend)
    assert wire.samples_of(append.audio).dtype == np.int16
    assert wire.samples_of(append.audio).tolist() == values
    assert wire.bytes_of(samples) == append.audio


STRICT = re.compile("(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")


def read(decode: Callable[[str], Any], message: object) -> Any:
    """What ``message`` is, or the error that it is not."""
    try:
        return decode(json.dumps(message))
    except WireError as error:
        return error


@given(st.text(alphabet="AAAbz09+/==-_ \n\r\té,\0", max_size=13))
@example("AAA=AAA=")
@example("AAA==")
@example("AAAAA===")
def test_base64_is_strict(text: str) -> None:
    whole = STRICT.fullmatch(text) is not None
    found = read(decode_client, {"type": APPEND, "audio": text})
    if whole and len(base64.b64decode(text)) % 2 == 0:
        assert found == InputAudioBufferAppend(audio=base64.b64decode(text, validate=True))
    else:
        assert isinstance(found, WireError)
        assert found.code == "inference_error"


# ---- our own side


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_what_a_server_would_refuse_is_refused_here(seconds: float) -> None:
    with pytest.raises(InputError, match=f"max_streaming_seconds is {seconds}"):
        SessionOptions(max_streaming_seconds=seconds)
    with pytest.raises(InputError, match=r"lag\.max_seconds is"):
        SessionOptions(lag=LagPolicy(max_seconds=seconds))


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_has_64_bits(seed: int) -> None:
    with pytest.raises(InputError, match=f"seed is {seed}; {re.escape(SEED)}"):
        SessionOptions(seed=seed)


def test_a_lone_surrogate_is_not_sent() -> None:
    with pytest.raises(InputError, match=r"^SessionUpdate holds the lone surrogate '\\ud800'$"):
        encode(SessionUpdate(session=SessionOptions(system_prompt="a\ud800")))


# ---- anything

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=60)
    | st.sampled_from(["wait", "skip", "AAA=", "AAAA", "5"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({name for event, _ in [*CLIENT, *SERVER] for name in typing.get_type_hints(type(event))})
options = st.dictionaries(st.sampled_from([*SessionOptions.__struct_fields__, *LagPolicy.__struct_fields__]), values)
messages = st.builds(
    lambda name, fields, session: {**fields, **session, "type": name},
    st.sampled_from([*wire.CLIENT_EVENTS, *wire.SERVER_EVENTS]) | values,
    st.dictionaries(st.sampled_from(FIELDS), values | options, max_size=6),
    st.builds(lambda session: {"session": session}, options) | st.just({}),
)


@given(messages)
def test_any_message_is_an_event_or_one_short_error(message: dict[str, object]) -> None:
    for decode, known in ((decode_client, wire.CLIENT_EVENTS), (decode_server, wire.SERVER_EVENTS)):
        found = read(decode, message)
        if isinstance(found, WireError):
            said = str(found)
            assert len(said.encode("utf-8")) < 700
            assert not re.search("msgspec|Expected `|Object missing|Invalid ", said)
            assert found.code in ("invalid_request", "session_initialization_failed", "inference_error")
        else:
            assert type(found) in known.values()
            assert decode(encode(found)) == found
