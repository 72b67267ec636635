"""What a server says, made by hand."""

import json
from typing import Any

from voicechat_core import wire

FRAME = 1764


def frame(index: int, sample: int = 0, **other: Any) -> wire.ResponseAudioDelta:
    """A frame whose samples are all one."""
    values: dict[str, Any] = {
        "delta": sample.to_bytes(2, "little", signed=True) * FRAME,
        "audio_codes": tuple(range(index, index + 31)),
        "text_token": 10 + index,
        "function_token": 20 + index,
    }
    return wire.ResponseAudioDelta(event_id="e", frame_index=index, **{**values, **other})


def user(index: int, delta: str, whole: str) -> wire.ServerEvent:
    return wire.ConversationItemInputAudioTranscriptionDelta(
        event_id="e", frame_index=index, delta=delta, transcript=whole
    )


def assistant(index: int, delta: str, whole: str) -> wire.ServerEvent:
    return wire.ResponseTextDelta(event_id="e", frame_index=index, token_id=1, delta=delta, text=whole)


def function(index: int, delta: str, whole: str) -> wire.ServerEvent:
    return wire.ResponseFunctionDelta(event_id="e", frame_index=index, token_id=1, delta=delta, text=whole)


def lag(behind_ms: int, skipped: int = 0) -> wire.ServerEvent:
    policy: Any = "skip" if skipped else "wait"
    return wire.SessionLag(
        event_id="e", behind_ms=behind_ms, frames_waiting=behind_ms // 80, frames_skipped=skipped, policy=policy
    )


def error(code: str, message: str) -> wire.ServerEvent:
    return wire.Error(event_id="e", error=wire.ErrorBody(code=code, message=message))


def done(frames: int) -> wire.ServerEvent:
    return wire.ResponseDone(event_id="e", frame_index=frames)


def call(
    index: int, name: str, arguments: dict[str, Any] | None = None, text: str | None = None
) -> wire.ResponseFunctionCallArgumentsDone:
    """A call of one function, whose arguments may be any ``text``."""
    return wire.ResponseFunctionCallArgumentsDone(
        event_id="e",
        frame_index=index,
        call_id=f"call_{index}_0",
        name=name,
        arguments=json.dumps(arguments or {}) if text is None else text,
    )


def no_call(index: int, written: str) -> wire.ResponseFunctionCallFailed:
    return wire.ResponseFunctionCallFailed(event_id="e", frame_index=index, reason="it is none", written=written)
