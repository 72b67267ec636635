"""The native messages of ``/v1/realtime``, of both roles, as typed structs <-> JSON text.

A server reads with ``decode_client``, a client with ``decode_server``, both write with ``encode``.

Choices:

* What decodes is right in every field, audio included: a reader has nothing left to check. What does not is one
  ``WireError`` that names the field, its value and what is needed, and carries the code to answer it with.
* Fields that are not known are ignored, in both directions: peers grow. Types that are not known are errors.
* Audio fields hold bytes, 16-bit samples in little-endian order; base64 (standard alphabet, padded) is only on the
  wire. ``samples_of`` and ``bytes_of`` are the way to arrays.
* Identifiers are given by the caller. No I/O, no clock, no MLX.
"""

import math
import re
import types
import typing
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, UnsetType

from voicechat_core.errors import InputError, WireError
from voicechat_core.strict_json import json_of, parse_object, refusal, scalar, shown, struct_of

__all__ = [
    "CLIENT_EVENTS",
    "INPUT_RATE",
    "OUTPUT_RATE",
    "SERVER_EVENTS",
    "AudioFormat",
    "ClientEvent",
    "ConversationItemCreate",
    "ConversationItemInputAudioTranscriptionDelta",
    "CreatedSession",
    "Error",
    "ErrorBody",
    "FunctionCallOutput",
    "InputAudioBufferAppend",
    "InputAudioBufferCommit",
    "InputAudioBufferCommitted",
    "LagPolicy",
    "ResponseAudioDelta",
    "ResponseCancel",
    "ResponseCancelled",
    "ResponseDone",
    "ResponseFunctionCallArgumentsDone",
    "ResponseFunctionCallFailed",
    "ResponseFunctionDelta",
    "ResponseTextDelta",
    "ServerEvent",
    "SessionCancel",
    "SessionCreated",
    "SessionLag",
    "SessionOptions",
    "SessionPing",
    "SessionPong",
    "SessionUpdate",
    "SessionUpdated",
    "UpdatedSession",
    "bytes_of",
    "decode_client",
    "decode_server",
    "encode",
    "samples_of",
]

INPUT_RATE: Final = 16000  # hertz
OUTPUT_RATE: Final = 22050
FRAME_SECONDS: Final = 0.08
SEEDS: Final = 2**64

# Each description completes "...; D is needed" in an error message.
Text = Annotated[str, Meta(description="text")]
Flag = Annotated[bool, Meta(description="true or false")]
Whole = Annotated[int, Meta(description="a whole number")]
Count = Annotated[int, Meta(ge=0, description="a whole number of at least 0")]
Wholes = Annotated[tuple[Whole, ...], Meta(description="an array of whole numbers")]
Seed = Annotated[int, Meta(ge=0, description="a whole number from 0 to 2^64 - 1")]
Seconds = Annotated[float, Meta(gt=0, description="a number above 0")]
Hertz = Annotated[int, Meta(gt=0, description="a whole number above 0")]
SkipSeconds = Annotated[float, Meta(ge=FRAME_SECONDS, description="a number of at least 0.08, one frame,")]
InputHertz = Annotated[int, Meta(ge=INPUT_RATE, le=INPUT_RATE, description=str(INPUT_RATE))]
Audio = Annotated[bytes, Meta(description="padded base64 of 16-bit samples")]
Json = Annotated[Any, Meta(description="a JSON value")]
OutputType = Annotated[Literal["function_call_output"], Meta(description="'function_call_output'")]
Policy = Annotated[Literal["wait", "skip"], Meta(description="'wait' or 'skip'")]


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A message, or an object inside one."""


class _ClientEvent(_Part, frozen=True, kw_only=True, tag_field="type"):
    """What a client says."""


class _ServerEvent(_Part, frozen=True, kw_only=True, tag_field="type"):
    """What a server says; each has an identifier of its own."""

    event_id: Text


# ---- what a client says


class LagPolicy(_Part, frozen=True, kw_only=True, omit_defaults=True):
    """What becomes of audio that waits for the model: all of it is kept (``wait``), or the oldest whole frames beyond
    ``max_seconds`` are dropped and counted (``skip``).
    """

    policy: Policy = "wait"
    max_seconds: SkipSeconds = 2.0


class SessionOptions(_Part, frozen=True, kw_only=True, omit_defaults=True):
    """How a session is to be opened. Constructing it with a number that a server would refuse is an ``InputError``.

    Attributes:
        model: any; what the server serves is used.
        system_prompt: None for the server's own, "" for none.
        seed: 0 to 2^64 - 1. In JSON also a whole float or decimal digits as text; null is 0.
        max_streaming_seconds: of audio; the server caps it. None for the server's limit.
        lag: null in JSON is the default.
        function_calls: whether the client answers what the model calls; else the model makes the outputs up.
    """

    model: Text | None = None
    system_prompt: Text | None = None
    seed: Seed = 0
    max_streaming_seconds: Seconds | None = None
    lag: Annotated[LagPolicy, Meta(description="an object")] = LagPolicy()
    function_calls: Flag = False

    def __post_init__(self) -> None:
        # For our own side: on the wire, NaN would turn into null. What is decoded has been looked at before.
        if not 0 <= self.seed < SEEDS:
            raise InputError(f"seed is {self.seed}; a whole number from 0 to 2^64 - 1 is needed")
        if self.max_streaming_seconds is not None and not 0 < self.max_streaming_seconds < math.inf:
            raise InputError(f"max_streaming_seconds is {self.max_streaming_seconds}; more than 0 is needed")
        if not FRAME_SECONDS <= self.lag.max_seconds < math.inf:
            raise InputError(f"lag.max_seconds is {self.lag.max_seconds}; at least {FRAME_SECONDS}, a frame, is needed")


class SessionUpdate(_ClientEvent, frozen=True, kw_only=True, tag="session.update"):
    """Open a session; once."""

    session: Annotated[SessionOptions, Meta(description="an object")] = SessionOptions()


class InputAudioBufferAppend(_ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.append"):
    """Hear more: 16-bit mono, any number of samples."""

    audio: Audio = b""
    sample_rate: InputHertz = INPUT_RATE


class InputAudioBufferCommit(_ClientEvent, frozen=True, kw_only=True, tag="input_audio_buffer.commit"):
    """End the input; ``pad_partial`` fills a frame that has begun with zeros instead of dropping it."""

    pad_partial: Flag = True


class FunctionCallOutput(_Part, frozen=True, kw_only=True):
    """What a called function says. Constructing it with an output that is no JSON is an ``InputError``."""

    type: OutputType = "function_call_output"
    call_id: Text
    output: Json

    def __post_init__(self) -> None:
        json_of(self.output, "the output")  # msgspec would make null of NaN


class ConversationItemCreate(_ClientEvent, frozen=True, kw_only=True, tag="conversation.item.create"):
    """Answer a ``response.function_call_arguments.done``."""

    item: Annotated[FunctionCallOutput, Meta(description="an object")]


class SessionCancel(_ClientEvent, frozen=True, kw_only=True, tag="session.cancel"):
    """End the session at once."""


class ResponseCancel(_ClientEvent, frozen=True, kw_only=True, tag="response.cancel"):
    """The same."""


class SessionPing(_ClientEvent, frozen=True, kw_only=True, tag="session.ping"):
    """Are you there?"""


# ---- what a server says


class AudioFormat(_Part, frozen=True, kw_only=True):
    """Mono audio of one direction; ``sample_rate`` in hertz."""

    type: Text = "pcm16"
    sample_rate: Hertz


HEARD: Final = AudioFormat(sample_rate=INPUT_RATE)
SPOKEN: Final = AudioFormat(sample_rate=OUTPUT_RATE)


class CreatedSession(_Part, frozen=True, kw_only=True):
    """A connection that has no session yet. ``recording`` is there, and true, where the server keeps what it hears."""

    id: Text
    state: Text = "configuring"
    input_audio_format: Annotated[AudioFormat, Meta(description="an object")] = HEARD
    output_audio_format: Annotated[AudioFormat, Meta(description="an object")] = SPOKEN
    recording: Flag | UnsetType = UNSET


class UpdatedSession(_Part, frozen=True, kw_only=True):
    """A session that hears. ``frame_samples`` is one frame of input."""

    id: Text
    state: Text = "ready"
    model: Text
    frame_samples: Count = 1280
    input_audio_format: Annotated[AudioFormat, Meta(description="an object")] = HEARD
    output_audio_format: Annotated[AudioFormat, Meta(description="an object")] = SPOKEN


class SessionCreated(_ServerEvent, frozen=True, kw_only=True, tag="session.created"):
    """The first message."""

    session: Annotated[CreatedSession, Meta(description="an object")]


class SessionUpdated(_ServerEvent, frozen=True, kw_only=True, tag="session.updated"):
    """The session is open."""

    session: Annotated[UpdatedSession, Meta(description="an object")]


class ConversationItemInputAudioTranscriptionDelta(
    _ServerEvent, frozen=True, kw_only=True, tag="conversation.item.input_audio_transcription.delta"
):
    """What a frame adds to the user's transcript, and all of it."""

    frame_index: Count
    delta: Text
    transcript: Text


class ResponseTextDelta(_ServerEvent, frozen=True, kw_only=True, tag="response.text.delta"):
    """What a frame's token adds to the assistant's text, and all of it."""

    frame_index: Count
    token_id: Whole
    delta: Text
    text: Text


class ResponseFunctionDelta(_ServerEvent, frozen=True, kw_only=True, tag="response.function.delta"):
    """What a frame's token adds to the function channel, and all of it; nothing is parsed."""

    frame_index: Count
    token_id: Whole
    delta: Text
    text: Text


class ResponseFunctionCallArgumentsDone(
    _ServerEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """The model calls a function, and waits for its output: ``conversation.item.create`` with this ``call_id``.

    ``arguments`` is the JSON text of an object. Frame ``frame_index`` ends the call; one with several functions is
    several of these.
    """

    frame_index: Count
    call_id: Text
    name: Text
    arguments: Text


class ResponseFunctionCallFailed(_ServerEvent, frozen=True, kw_only=True, tag="response.function_call.failed"):
    """The model has ``written`` what is no call, for this ``reason``; there is nothing to answer."""

    frame_index: Count
    reason: Text
    written: Text


class ResponseAudioDelta(_ServerEvent, frozen=True, kw_only=True, tag="response.audio.delta"):
    """One frame of speech, silence too: 1,764 samples, 31 codes, and the frame's ids, PAD included.

    Servers of other makes do not send the ids: None.
    """

    frame_index: Count
    delta: Audio
    format: Text = "pcm16"
    sample_rate: Hertz = OUTPUT_RATE
    channels: Count = 1
    audio_codes: Wholes
    text_token: Whole | None = None
    function_token: Whole | None = None


class InputAudioBufferCommitted(_ServerEvent, frozen=True, kw_only=True, tag="input_audio_buffer.committed"):
    """The input is complete."""


class ResponseDone(_ServerEvent, frozen=True, kw_only=True, tag="response.done"):
    """The session has ended as it should; ``frame_index`` is how many frames it gave."""

    frame_index: Count


class ResponseCancelled(_ServerEvent, frozen=True, kw_only=True, tag="response.cancelled"):
    """The session was cut off after ``frame_index`` frames."""

    frame_index: Count


class SessionPong(_ServerEvent, frozen=True, kw_only=True, tag="session.pong"):
    """Yes."""


class SessionLag(_ServerEvent, frozen=True, kw_only=True, tag="session.lag"):
    """The server is behind: this much audio waits for the model, and so many frames were dropped so far in all."""

    behind_ms: Count
    frames_waiting: Count
    frames_skipped: Count
    policy: Policy


class ErrorBody(_Part, frozen=True, kw_only=True):
    """What is wrong. The server's codes: ``invalid_request``, ``server_busy``, ``model_loading``,
    ``session_initialization_failed``, ``inference_error``.
    """

    code: Text
    message: Text


class Error(_ServerEvent, frozen=True, kw_only=True, tag="error"):
    """One answer to one message that cannot be followed, or the reason why the connection is closed."""

    error: Annotated[ErrorBody, Meta(description="an object")]


ClientEvent = (
    SessionUpdate
    | InputAudioBufferAppend
    | InputAudioBufferCommit
    | ConversationItemCreate
    | SessionCancel
    | ResponseCancel
    | SessionPing
)  # fmt: skip
ServerEvent = (
    SessionCreated
    | SessionUpdated
    | ConversationItemInputAudioTranscriptionDelta
    | ResponseTextDelta
    | ResponseFunctionDelta
    | ResponseFunctionCallArgumentsDone
    | ResponseFunctionCallFailed
    | ResponseAudioDelta
    | InputAudioBufferCommitted
    | ResponseDone
    | ResponseCancelled
    | SessionPong
    | SessionLag
    | Error
)


def _by_type(union: types.UnionType) -> dict[str, Any]:
    return {kind.__struct_config__.tag: kind for kind in typing.get_args(union)}


CLIENT_EVENTS: Final[dict[str, type[ClientEvent]]] = _by_type(ClientEvent)
SERVER_EVENTS: Final[dict[str, type[ServerEvent]]] = _by_type(ServerEvent)

# A wrong field of these is answered as the failure of what was asked for.
CODES: Final = {"session.update": "session_initialization_failed", "input_audio_buffer.append": "inference_error"}

Kind = TypeVar("Kind")


# ---- reading and writing


def decode_client(text: str | bytes) -> ClientEvent:
    """A client's message, for the server.

    Raises:
        WireError: for whatever is not exactly one. Never anything else.
    """
    return _decode(text, CLIENT_EVENTS)


def decode_server(text: str | bytes) -> ServerEvent:
    """A server's message, for the client.

    Raises:
        WireError: as ``decode_client``. A ``type`` that is not in ``SERVER_EVENTS`` may be news of a later version.
    """
    return _decode(text, SERVER_EVENTS)


def encode(event: ClientEvent | ServerEvent) -> str:
    """The JSON text of a message.

    Raises:
        InputError: for text with a lone surrogate, which no UTF-8 can hold.
    """
    try:
        return msgspec.json.encode(event, enc_hook=scalar).decode()
    except UnicodeEncodeError as error:
        raise InputError(f"{type(event).__name__} holds the lone surrogate {error.object[error.start]!r}") from None


def samples_of(pcm16: bytes) -> npt.NDArray[np.int16]:
    """The samples ``[S]`` of an audio field, as a view of it."""
    samples: npt.NDArray[np.int16] = np.frombuffer(pcm16, "<i2").astype(np.int16, copy=False)
    return samples


def bytes_of(samples: npt.NDArray[np.int16]) -> bytes:
    """An audio field of samples ``[S]``.

    Raises:
        InputError: for an array of another type or number of axes.
    """
    if samples.dtype != np.int16 or samples.ndim != 1:
        raise InputError(f"samples are {samples.dtype} of shape {samples.shape}; int16 [S] is needed")
    return samples.astype("<i2", copy=False).tobytes()


def _decode(text: str | bytes, kinds: dict[str, type[Kind]]) -> Kind:
    data = parse_object(text)
    name = data.get("type")
    if not isinstance(name, str):
        found = f"is {shown(name)}" if "type" in data else "is missing"
        raise WireError(f"type {found}; text is needed")
    kind = kinds.get(name)
    if kind is None:
        raise WireError(f"unsupported event type {shown(name)}", event_type=name)
    try:
        return _event(kind, data)
    except WireError as error:
        raise WireError(f"{name}: {error}", code=CODES.get(name, "invalid_request"), event_type=name) from None


def _event(kind: type[Kind], data: dict[str, Any]) -> Kind:
    if kind is InputAudioBufferAppend and data.get("sample_rate") == float(INPUT_RATE):
        data["sample_rate"] = INPUT_RATE
    if kind is SessionUpdate and isinstance(data.get("session"), dict):
        _accept_spellings(data, data["session"])
    event = struct_of(kind, data)
    for field in ("audio", "delta"):
        if isinstance(pcm16 := getattr(event, field, None), bytes) and len(pcm16) % 2:
            raise WireError(f"{field} has {len(pcm16)} bytes; a whole number of 16-bit samples is needed")
    return event


def _accept_spellings(data: dict[str, Any], options: dict[str, Any]) -> None:
    """Bring to their one form the values that may be written in more than one."""
    for field in ("seed", "lag"):
        if field in options and options[field] is None:
            del options[field]
    if "seed" in options:
        seed = _whole(options["seed"])
        if isinstance(seed, int) and not 0 <= seed < SEEDS:
            raise refusal(SessionUpdate, data, ["session", "seed"])
        options["seed"] = seed


def _whole(value: object) -> object:
    """A whole float, or decimal digits, as the integer that they mean; anything else as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch("[0-9]{1,20}", value):
        return int(value)
    return value
