"""What was heard: put together, checked, and told under the names of ``voicechat generate --json``."""

import json
from typing import Any

import numpy as np
import pytest

from voicechat_client import Answer, ServerFaultError
from voicechat_core import wire

CODES = tuple(range(31))


def audio(index: int, **other: Any) -> wire.ResponseAudioDelta:
    values: dict[str, Any] = {
        "delta": bytes(3528),
        "audio_codes": tuple(index + code for code in CODES),
        "text_token": 10 + index,
        "function_token": 20 + index,
    }
    return wire.ResponseAudioDelta(event_id="e", frame_index=index, **{**values, **other})


def heard(index: int, delta: str, transcript: str) -> wire.ServerEvent:
    return wire.ConversationItemInputAudioTranscriptionDelta(
        event_id="e", frame_index=index, delta=delta, transcript=transcript
    )


def text(index: int, delta: str, whole: str) -> wire.ServerEvent:
    return wire.ResponseTextDelta(event_id="e", frame_index=index, token_id=1, delta=delta, text=whole)


def function(index: int, delta: str, whole: str) -> wire.ServerEvent:
    return wire.ResponseFunctionDelta(event_id="e", frame_index=index, token_id=1, delta=delta, text=whole)


def done(frames: int) -> wire.ServerEvent:
    return wire.ResponseDone(event_id="e", frame_index=frames)


def lag(behind: int, skipped: int) -> wire.ServerEvent:
    return wire.SessionLag(event_id="e", behind_ms=behind, frames_waiting=1, frames_skipped=skipped, policy="skip")


def answer(*events: wire.ServerEvent) -> Answer:
    result = Answer()
    for event in events:
        result.add(event)
    return result


def test_a_whole_answer() -> None:
    result = Answer(seed=7)
    result.started(3.0)
    result.started(99.0)
    events = [
        wire.SessionPong(event_id="e"),
        heard(0, "Hel", "Hel"), text(0, "W", "W"), function(0, "{", "{"), audio(0),
        lag(700, 2),
        heard(1, "lo", "Hello"), text(1, "ell", "Well"), function(1, "}", "{}"), audio(1),
        wire.Error(event_id="e", error=wire.ErrorBody(code="inference_error", message="odd bytes")),
        lag(300, 3),
        text(1, "…", "Well…"),  # what the last token left unfinished
        done(2),
    ]  # fmt: skip
    for seconds, event in enumerate(events):
        result.add(event, 10.0 + seconds)
    told = json.loads(json.dumps(result.as_dict()))
    assert told == {
        "transcript": "Hello",
        "text": "Well…",
        "function_text": "{}",
        "text_tokens": [10, 11],
        "function_tokens": [20, 21],
        "audio_codes": [list(range(31)), list(range(1, 32))],
        "frames": 2,
        "sample_rate": 22050,
        "seed": 7,
        "seconds": 0.16,
        "ended": "done",
        "first_audio_seconds": 11.0,
        "most_behind_ms": 700,
        "frames_skipped": 3,
        "errors": [{"code": "inference_error", "message": "odd bytes"}],
    }
    assert result.audio_codes.dtype == np.int32
    assert result.audio_codes.shape == (2, 31)


def test_an_answer_that_has_not_begun() -> None:
    told = Answer().as_dict()
    assert (told["frames"], told["audio_codes"], told["text_tokens"]) == (0, [], [])
    assert (told["ended"], told["first_audio_seconds"]) == (None, None)


def test_cancelled() -> None:
    result = answer(audio(0), wire.ResponseCancelled(event_id="e", frame_index=1))
    assert result.ended == "cancelled"


def test_delays_need_both_times() -> None:
    result = answer(audio(0))
    result.started(1.0)
    assert result.first_audio_seconds is None


def test_servers_that_do_not_tell_ids() -> None:
    result = answer(audio(0, text_token=None, function_token=None), audio(1, text_token=None))
    assert result.text_tokens is None
    assert result.function_tokens is None
    assert result.as_dict()["text_tokens"] is None


def test_a_transcript_that_is_thought_over() -> None:
    assert answer(heard(0, "Hello", "Hello"), audio(0), heard(1, "Yellow", "Yellow")).transcript == "Yellow"


@pytest.mark.parametrize(
    ("before", "event", "words"),
    [
        ([], audio(1), "frame 1 came where frame 0 was due"),
        ([audio(0)], audio(0), "frame 0 came where frame 1 was due"),
        ([audio(0)], audio(2), "frame 2 came where frame 1 was due"),
        ([], audio(0, delta=bytes(3526)), "frame 0 has 1763 samples; 1764 are needed"),
        ([], audio(0, delta=b""), "frame 0 has 0 samples"),
        ([], audio(0, delta=bytes(7056)), "frame 0 has 3528 samples"),
        ([], audio(0, sample_rate=24000), "24000"),
        ([], audio(0, channels=2), "one channel"),
        ([], audio(0, format="pcm8"), "pcm8"),
        ([audio(0)], audio(1, audio_codes=CODES[:-1]), "30 audio codes; those before it have 31"),
        ([], audio(0, audio_codes=(-1,)), "-1 to -1"),
        ([], audio(0, audio_codes=(2**31,)), "2147483648"),
        ([], text(1, "x", "x"), "text of frame 1 came where frame 0 was due"),
        ([text(0, "ab", "ab")], text(0, "c", "abd"), "'ab' and 'c' are not 'abd'"),
        ([text(0, "ab", "ab")], text(0, "c", "xbc"), "do"),
        ([text(0, "ab", "ab")], text(0, "b", "ab"), "not follow"),
        ([heard(0, "ab", "ab")], heard(0, "", "abc"), "not follow"),
        ([function(0, "ab", "ab")], function(0, "c", "c c"), "not follow"),
        ([audio(0)], done(2), "counts 2 frames at the end; 1 came"),
        ([audio(0)], done(0), "counts 0 frames at the end; 1 came"),
        ([done(0)], done(0), "response.done came after the end"),
        ([done(0)], audio(0), "response.audio.delta came after the end"),
        ([done(0)], text(0, "x", "x"), "response.text.delta came after the end"),
    ],
)
def test_what_does_not_follow_is_refused_and_changes_nothing(
    before: list[wire.ServerEvent], event: wire.ServerEvent, words: str
) -> None:
    result = answer(*before)
    told = result.as_dict()
    with pytest.raises(ServerFaultError) as caught:
        result.add(event)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert result.as_dict() == told
    assert caught.value.exit_status == 10


def test_an_hour_is_small() -> None:
    import tracemalloc

    result = Answer()
    frames = [audio(index) for index in range(2000)]
    tracemalloc.start()
    for frame in frames:
        result.add(frame)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown / 2000 < 200  # bytes: an hour has 45,000 frames, so 9 MB
