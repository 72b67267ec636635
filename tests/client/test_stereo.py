"""Both sides on one clock: left is the user resampled, right the assistant, frame on frame."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from voicechat_client.stereo import StereoMixer, StereoWriter
from voicechat_core.audio import WIRE_SCALE, float_to_pcm16, pcm16_to_float
from voicechat_core.audio_stream import WavWriter
from voicechat_core.errors import AudioError

RANDOM = np.random.default_rng(0)
FRAMES = 20
USER = RANDOM.integers(-9999, 9999, FRAMES * 1280).astype(np.int16)
ASSISTANT = RANDOM.integers(-9999, 9999, FRAMES * 1764).astype(np.int16)


def user_at_once(samples: np.ndarray) -> np.ndarray:
    return float_to_pcm16(soxr.resample(pcm16_to_float(samples), 16000, 22050, quality="HQ"), WIRE_SCALE)


def mixed(user: np.ndarray, assistant: np.ndarray, user_step: int, assistant_step: int, lag: int) -> np.ndarray:
    """The answer comes ``lag`` pieces after the user's."""
    mixer = StereoMixer()
    users = [user[at : at + user_step] for at in range(0, len(user), user_step)]
    answers = [assistant[at : at + assistant_step] for at in range(0, len(assistant), assistant_step)]
    both = []
    for turn in range(max(len(users), len(answers) + lag)):
        if turn < len(users):
            both.append(mixer.user(users[turn]))
        if 0 <= turn - lag < len(answers):
            both.append(mixer.assistant(answers[turn - lag]))
    return np.concatenate([*both, mixer.finish()])


@pytest.mark.parametrize(
    ("user_step", "assistant_step", "lag"), [(1280, 1764, 0), (1280, 1764, 7), (320, 1764, 0), (77, 501, 3)]
)
def test_both_sides_side_by_side(user_step: int, assistant_step: int, lag: int) -> None:
    both = mixed(USER, ASSISTANT, user_step, assistant_step, lag)
    assert both.dtype == np.int16
    assert both.shape == (FRAMES * 1764, 2)
    assert np.array_equal(both[:, 0], user_at_once(USER))
    assert np.array_equal(both[:, 1], ASSISTANT)


def test_frame_n_lies_on_frame_n() -> None:
    """A click in the middle of input frame 7 is in the middle of the file's frame 7."""
    user = np.zeros(FRAMES * 1280, np.int16)
    user[7 * 1280 + 640] = 20_000
    both = mixed(user, ASSISTANT, 320, 1764, 1)
    assert int(np.abs(both[:, 0]).argmax()) == 7 * 1764 + 882
    assert np.array_equal(both[7 * 1764 : 8 * 1764, 1], ASSISTANT[7 * 1764 : 8 * 1764])


@pytest.mark.parametrize(("user_frames", "assistant_frames"), [(20, 12), (12, 20), (20, 0), (0, 20), (0, 0)])
def test_the_shorter_side_is_silent_at_the_end(user_frames: int, assistant_frames: int) -> None:
    user, assistant = USER[: user_frames * 1280], ASSISTANT[: assistant_frames * 1764]
    both = mixed(user, assistant, 1280, 1764, 1)
    assert len(both) == max(user_frames, assistant_frames) * 1764
    left, right = np.zeros((2, len(both)), np.int16)
    if user_frames:
        left[: user_frames * 1764] = user_at_once(user)
    right[: len(assistant)] = assistant
    assert np.array_equal(both, np.stack([left, right], axis=1))


def test_what_waits_is_what_they_are_apart() -> None:
    mixer = StereoMixer()
    for _ in range(50):
        assert mixer.user(USER[:1280]).shape == (0, 2)
    left, right = mixer.waiting
    assert right == 0
    assert 0 <= 50 * 1764 - left < 22050 * 0.06  # the resampler holds some back
    assert len(mixer.assistant(ASSISTANT[: 3 * 1764])) == 3 * 1764
    assert mixer.waiting == (left - 3 * 1764, 0)


def test_a_conversation_takes_no_memory() -> None:
    mixer = StereoMixer()
    mixer.user(USER[:1280])
    tracemalloc.start()
    total = 0
    for _ in range(3000):  # four minutes: 21 MB, if they were kept
        total += len(mixer.user(USER[:1280])) + len(mixer.assistant(ASSISTANT[:1764]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 3000 * 1764
    assert peak < 100_000


def test_loud_samples_are_clipped_not_wrapped() -> None:
    square = np.where(np.arange(12_800) // 40 % 2, 32767, -32768).astype(np.int16)
    both = mixed(square, ASSISTANT, 1280, 1764, 0)
    assert np.array_equal(both[: 10 * 1764, 0], user_at_once(square))
    assert (int(both[:, 0].max()), int(both[:, 0].min())) == (32767, -32768)


# ---- the file


def test_the_file_grows_with_both(tmp_path: Path) -> None:
    path = tmp_path / "both.wav"
    with StereoWriter(path) as writer:
        writer.user(USER)
        assert soundfile.info(path).frames == 0
        writer.assistant(ASSISTANT[:1764])
        assert soundfile.info(path).frames == 1764
    samples, rate = soundfile.read(path, dtype="int16")
    assert (rate, samples.shape) == (22050, (FRAMES * 1764, 2))
    assert np.array_equal(samples[:, 0], user_at_once(USER))
    assert np.array_equal(samples[:1764, 1], ASSISTANT[:1764])
    assert not samples[1764:, 1].any()
    writer.close()


def failing(writer: StereoWriter) -> None:
    with writer:
        writer.user(USER)
        writer.assistant(ASSISTANT[:1764])
        raise KeyError


def test_an_exception_keeps_what_was_said(tmp_path: Path) -> None:
    path = tmp_path / "both.wav"
    with pytest.raises(KeyError):
        failing(StereoWriter(path))
    samples, _ = soundfile.read(path, dtype="int16")
    assert np.array_equal(samples[:, 0], user_at_once(USER))


def test_a_write_that_fails_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "both.wav"
    with StereoWriter(path) as writer:
        writer.user(USER)
        writer.assistant(ASSISTANT[:1764])
        with monkeypatch.context() as patch:

            def full(*_: object) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(WavWriter, "_append", full)
            with pytest.raises(AudioError, match=r"both\.wav: No space left on device"):
                writer.assistant(ASSISTANT[:1764])
    assert soundfile.info(path).frames == 1764


def test_a_disk_that_is_full_at_the_end_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = StereoWriter(tmp_path / "both.wav")
    real = WavWriter.write

    def full(self: WavWriter, samples: np.ndarray) -> None:
        if len(samples) > 1764:
            raise AudioError("full")
        real(self, samples)

    monkeypatch.setattr(WavWriter, "write", full)
    with pytest.raises(KeyError):
        failing(writer)
    with pytest.raises(AudioError, match="there is no directory"):
        StereoWriter(tmp_path / "none" / "both.wav")
