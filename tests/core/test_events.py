"""Events are values: equal where they are the same to the bit."""

import dataclasses

import numpy as np
import pytest

from voicechat_core import AudioFrame, AudioTail, Done, TextDelta


def frame(**changes: object) -> AudioFrame:
    fields = {
        "frame_index": 3,
        "samples": np.linspace(-1, 1, 1764, dtype=np.float32),
        "codes": np.arange(31, dtype=np.int32),
        "text_token": 12,
        "function_token": 12,
    }
    return AudioFrame(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"frame_index": 4},
        {"samples": np.linspace(-1, 1, 1764, dtype=np.float32) + np.float32(1e-7)},
        {"samples": np.linspace(-1, 1, 1764)},
        {"codes": np.arange(1, 32, dtype=np.int32)},
        {"text_token": 13},
        {"function_token": 13},
    ],
)
def test_audio_frames_differ_in_any_bit(changes: dict[str, object]) -> None:
    assert frame() == frame()
    assert hash(frame()) == hash(frame())
    assert frame() != frame(**changes)


def test_tails_and_words_are_compared_by_value() -> None:
    zeros = np.zeros(8, np.float32)
    assert AudioTail(zeros) == AudioTail(zeros.copy())
    assert hash(AudioTail(zeros)) == hash(AudioTail(zeros.copy()))
    assert AudioTail(zeros) != AudioTail(-zeros)  # a sign is a bit
    assert TextDelta(0, "a") == TextDelta(0, "a") != TextDelta(1, "a")


def test_events_cannot_be_changed_and_read_short() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Done(3).frames = 4  # type: ignore[misc]
    assert repr(frame()) == "AudioFrame(frame_index=3, text_token=12, function_token=12)"
