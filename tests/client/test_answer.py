"""What was heard: put together, checked, and told under the names of ``voicechat generate --json``."""

import json

import numpy as np
import pytest

from tests.client.events import assistant, call, done, frame, function, lag, no_call, user
from voicechat_client import Answer, ServerFaultError
from voicechat_core import wire


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
        user(0, "Hel", "Hel"), assistant(0, "W", "W"), function(0, "{", "{"), no_call(0, "{"), frame(0),
        lag(700, 2),
        user(1, "lo", "Hello"), assistant(1, "ell", "Well"), function(1, "}", "{}"),
        call(1, "dice", {"sides": 6}), frame(1),
        wire.Error(event_id="e", error=wire.ErrorBody(code="inference_error", message="odd bytes")),
        lag(300, 3),
        assistant(1, "…", "Well…"),  # what the last token left unfinished
        done(2),
    ]  # fmt: skip
    for seconds, event in enumerate(events):
        result.add(event, 10.0 + seconds)
    told = json.loads(json.dumps(result.as_dict()))
    assert told == {
        "transcript": "Hello",
        "text": "Well…",
        "function_text": "{}",
        "function_calls": [
            {"frame_index": 0, "reason": "it is none", "written": "{"},
            {"frame_index": 1, "call_id": "call_1_0", "name": "dice", "arguments": '{"sides": 6}'},
        ],
        "text_tokens": [10, 11],
        "function_tokens": [20, 21],
        "audio_codes": [list(range(31)), list(range(1, 32))],
        "frames": 2,
        "sample_rate": 22050,
        "seed": 7,
        "seconds": 0.16,
        "ended": "done",
        "first_audio_seconds": 12.0,
        "most_behind_ms": 700,
        "frames_skipped": 3,
        "recording": False,
        "errors": [{"code": "inference_error", "message": "odd bytes"}],
    }
    assert result.audio_codes.dtype == np.int32
    assert result.audio_codes.shape == (2, 31)


def test_an_answer_that_has_not_begun() -> None:
    told = Answer().as_dict()
    assert (told["frames"], told["audio_codes"], told["text_tokens"]) == (0, [], [])
    assert (told["ended"], told["first_audio_seconds"]) == (None, None)


def test_cancelled() -> None:
    result = answer(frame(0), wire.ResponseCancelled(event_id="e", frame_index=1))
    assert result.ended == "cancelled"


def test_delays_need_both_times() -> None:
    result = answer(frame(0))
    result.started(1.0)
    assert result.first_audio_seconds is None


def test_servers_that_do_not_tell_ids() -> None:
    result = answer(frame(0, text_token=None, function_token=None), frame(1, text_token=None))
    assert result.text_tokens is None
    assert result.function_tokens is None
    assert result.as_dict()["text_tokens"] is None


def test_a_transcript_that_is_thought_over() -> None:
    assert answer(user(0, "Hello", "Hello"), frame(0), user(1, "Yellow", "Yellow")).transcript == "Yellow"


@pytest.mark.parametrize(
    ("before", "event", "words"),
    [
        ([], frame(1), "frame 1 came where frame 0 was due"),
        ([frame(0)], frame(0), "frame 0 came where frame 1 was due"),
        ([frame(0)], frame(2), "frame 2 came where frame 1 was due"),
        ([], frame(0, delta=bytes(3526)), "frame 0 has 1763 samples; 1764 are needed"),
        ([], frame(0, delta=b""), "frame 0 has 0 samples"),
        ([], frame(0, delta=bytes(7056)), "frame 0 has 3528 samples"),
        ([], frame(0, sample_rate=24000), "24000"),
        ([], frame(0, channels=2), "one channel"),
        ([], frame(0, format="pcm8"), "pcm8"),
        ([frame(0)], frame(1, audio_codes=tuple(range(30))), "30 audio codes; those before it have 31"),
        ([], frame(0, audio_codes=(-1,)), "-1 to -1"),
        ([], frame(0, audio_codes=(2**31,)), "2147483648"),
        ([], assistant(1, "x", "x"), "text of frame 1 came where frame 0 was due"),
        ([assistant(0, "ab", "ab")], assistant(0, "c", "abd"), "'ab' and 'c' are not 'abd'"),
        ([assistant(0, "ab", "ab")], assistant(0, "c", "xbc"), "do"),
        ([assistant(0, "ab", "ab")], assistant(0, "b", "ab"), "not follow"),
        ([user(0, "ab", "ab")], user(0, "", "abc"), "not follow"),
        ([function(0, "ab", "ab")], function(0, "c", "c c"), "not follow"),
        ([frame(0)], done(2), "counts 2 frames at the end; 1 came"),
        ([frame(0)], done(0), "counts 0 frames at the end; 1 came"),
        ([done(0)], done(0), "response.done came after the end"),
        ([done(0)], frame(0), "response.audio.delta came after the end"),
        ([done(0)], assistant(0, "x", "x"), "response.text.delta came after the end"),
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
    frames = [frame(index) for index in range(2000)]
    tracemalloc.start()
    for each in frames:
        result.add(each)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown / 2000 < 200  # bytes: an hour has 45,000 frames, so 9 MB


@pytest.mark.parametrize("index", [0, 2])
def test_a_call_of_another_frame(index: int) -> None:
    result = answer(frame(0))
    with pytest.raises(ServerFaultError, match=f"a call of frame {index} came where frame 1 was due"):
        result.add(call(index, "dice"))
    assert result.function_calls == []


def test_a_call_after_the_end() -> None:
    with pytest.raises(ServerFaultError, match=r"arguments\.done came after the end"):
        answer(done(0)).add(call(0, "dice"))
