"""From frames to the speaker: the reserve, gaps, pauses that get shorter, and what is audible when."""

import numpy as np
import numpy.typing as npt
import pytest

from voicechat_client.playout import CLOSING_SECONDS, LATE_SECONDS, Playout
from voicechat_client.ring import Samples

RATE = 48000
FRAME = 1764  # 80 ms
HELD = 0.012  # the resampler keeps 10.9 ms


def frame(level: float = 0.5, samples: int = FRAME) -> npt.NDArray[np.int16]:
    return np.full(samples, round(level * 32768), np.int16)


def taken(playout: Playout, seconds: float, channels: int = 1, ran_out: bool = False) -> Samples:
    out = np.full((round(seconds * RATE), channels), np.nan, np.float32)
    playout.fill(out, ran_out)
    return out


def test_nothing_is_played_and_nothing_missed_before_the_first_frame() -> None:
    playout = Playout(RATE)
    assert not taken(playout, 5, 2).any()
    assert (playout.gaps, playout.gap_seconds, playout.waiting_seconds, playout.asked) == (0, 0, 0, 1)
    assert not playout.idle


def test_the_reserve_goes_first() -> None:
    playout = Playout(RATE, reserve_seconds=0.1)
    playout.put(frame())
    assert playout.waiting_seconds == pytest.approx(0.18, abs=HELD)
    heard = taken(playout, 0.16, 2)
    assert not heard[: int(0.109 * RATE)].any()
    np.testing.assert_allclose(heard[int(0.115 * RATE) :], 0.5, atol=1e-3)
    assert playout.gaps == 0


def test_all_that_was_put_is_played_and_then_it_is_idle() -> None:
    """To the last sample, with the speech where it was: a sine against itself."""
    playout = Playout(RATE, reserve_seconds=0.1)
    whole = (16384 * np.sin(2 * np.pi * 440 * np.arange(10 * FRAME) / 22050)).astype(np.int16)
    heard = []
    for at in range(0, len(whole), FRAME):
        playout.put(whole[at : at + FRAME])
        heard.append(taken(playout, 0.08)[:, 0])
    playout.finish()
    assert not playout.idle
    heard.append(taken(playout, 0.2)[:, 0])
    assert playout.idle
    assert (playout.gaps, playout.dropped_seconds, playout.skipped_seconds) == (0, 0, 0)
    assert playout.played_seconds == pytest.approx(0.8)
    sound = np.concatenate(heard)
    sound = sound[int(np.flatnonzero(sound)[0]) :]
    last = int(np.flatnonzero(np.abs(sound) > 0.01)[-1])
    assert last == pytest.approx(0.8 * RATE, abs=60)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(0.7 * RATE)) / RATE)
    np.testing.assert_allclose(sound[500 : len(expected)], expected[500:], atol=0.02)


def test_a_late_frame_within_the_reserve_is_not_heard() -> None:
    playout = Playout(RATE, reserve_seconds=0.1)
    playout.put(frame())
    taken(playout, 0.16)
    playout.put(frame())
    assert taken(playout, 0.08).all()
    assert playout.gaps == 0


def test_a_gap_is_counted_once_with_all_of_its_silence() -> None:
    playout = Playout(RATE, reserve_seconds=0.1)
    taken(playout, 3)
    playout.put(frame())
    for _ in range(5):
        taken(playout, 0.1)
    assert playout.gaps == 0  # it may still have been the end
    playout.put(frame())
    assert playout.gaps == 1
    # 500 ms were asked for, 180 less what is held back were there; and the reserve is built again.
    assert playout.gap_seconds == pytest.approx(0.5 - 0.18 + 0.1, abs=HELD)
    assert playout.waiting_seconds == pytest.approx(0.18, abs=HELD)
    taken(playout, 0.05)
    playout.put(frame())
    assert playout.gaps == 1


def test_silence_after_the_end_is_no_gap() -> None:
    playout = Playout(RATE)
    playout.put(frame())
    playout.finish()
    taken(playout, 3)
    assert (playout.gaps, playout.gap_seconds, playout.idle) == (0, 0, True)


def test_too_much_is_worked_off_in_pauses_and_no_word_is_lost() -> None:
    """A second that comes at once: silent frames are left out until little waits, the others stay."""
    playout = Playout(RATE, reserve_seconds=0.1)
    for _ in range(12):
        playout.put(frame(0.5))
    assert playout.skipped_seconds == 0
    waiting = playout.waiting_seconds
    for _ in range(20):
        playout.put(frame(0.005))
        taken(playout, 0.08)
    assert playout.skipped_seconds == pytest.approx(0.08 * round((waiting - 0.1 - LATE_SECONDS) / 0.08), abs=0.081)
    assert 0.1 - 0.08 < playout.waiting_seconds <= 0.1 + LATE_SECONDS
    assert (playout.gaps, playout.dropped_seconds) == (0, 0)


def test_speech_is_stretched_towards_the_reserve() -> None:
    """Half a second too much with never a pause: 2 % faster, so 100 ms are gone after 5 s and none was dropped."""
    playout = Playout(RATE, reserve_seconds=0.1)
    for _ in range(8):
        playout.put(frame())
    before = playout.waiting_seconds
    for _ in range(62):
        playout.put(frame())
        taken(playout, 0.08)
    assert before - playout.waiting_seconds == pytest.approx(0.02 * 5, rel=0.25)
    assert (playout.skipped_seconds, playout.dropped_seconds) == (0, 0)
    assert 12_000 < playout.drift_ppm < 20_000


def test_too_little_is_stretched_the_other_way() -> None:
    playout = Playout(RATE, reserve_seconds=0.2)
    playout.put(frame())
    taken(playout, 0.25)
    before = []
    for _ in range(250):
        before.append(playout.waiting_seconds)
        playout.put(frame())
        taken(playout, 0.08)
    assert before[0] < 0.05
    assert before[-1] == pytest.approx(0.2, abs=0.015)
    assert max(before) < 0.215
    assert playout.drift_ppm < -5_000
    assert playout.gaps == 0


def test_what_the_clocks_differ_by_is_known_after_a_gap_too() -> None:
    """A speaker that is 1 % too fast: what waits dips at first, and not again when everything begins anew."""
    playout = Playout(RATE, reserve_seconds=0.1)

    def waiting(frames: int) -> list[float]:
        found = []
        for _ in range(frames):
            playout.put(frame())
            taken(playout, 0.08 * 1.01)
            found.append(playout.waiting_seconds)
        return found

    assert min(waiting(2000)) < 0.1 - 0.03
    taken(playout, 0.5)
    assert min(waiting(400)) > 0.1 - 0.015
    assert playout.gaps == 1


def test_more_than_the_most_is_dropped_and_counted() -> None:
    playout = Playout(RATE, reserve_seconds=0.1, most_seconds=1)
    for _ in range(25):
        playout.put(frame())
    assert playout.waiting_seconds == pytest.approx(1.1)
    assert playout.played_seconds == pytest.approx(2)
    assert playout.dropped_seconds == pytest.approx(2.1 / (1 + 0.1 / CLOSING_SECONDS) - 1.1, abs=0.03)


def test_any_size_of_delta_is_played() -> None:
    playout = Playout(RATE)
    playout.put(frame(samples=0))
    playout.put(frame(samples=1))
    playout.put(frame(samples=30_000))
    playout.finish()
    heard = taken(playout, 2)
    assert np.count_nonzero(np.abs(heard) > 0.25) / RATE == pytest.approx(30_001 / 22050, rel=0.01)


def test_it_says_when_it_sounds() -> None:
    """Two loud frames, two silent ones, a loud one: by what the speaker takes, not by what is put."""
    playout = Playout(RATE, reserve_seconds=0.1)
    sounding = []
    levels = [0.5, 0.5, 0.001, 0.001, 0.5, 0.001, 0.001]
    for number in range(56):
        if number % 8 == 0:
            playout.put(frame(levels[number // 8]))
        sounding.append(playout.sounding)
        taken(playout, 0.01)
    starts = [number for number in range(1, 56) if sounding[number] and not sounding[number - 1]]
    ends = [number for number in range(1, 56) if sounding[number - 1] and not sounding[number]]
    assert not sounding[0]
    assert starts == pytest.approx([11, 42], abs=1)  # in hundredths of a second
    assert ends == pytest.approx([26, 50], abs=1)


def test_the_devices_own_gaps_are_counted() -> None:
    playout = Playout(RATE)
    for ran_out in (True, False, True):
        taken(playout, 0.01, ran_out=ran_out)
    assert (playout.underflows, playout.asked) == (2, 3)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000, 96000])
def test_any_rate_plays_as_long(rate: int) -> None:
    playout = Playout(rate, reserve_seconds=0)
    out = []
    for _ in range(25):
        playout.put(frame())
        out.append(np.zeros((round(0.07 * rate), 1), np.float32))
        playout.fill(out[-1], False)
    playout.finish()
    out.append(np.zeros((rate, 1), np.float32))
    playout.fill(out[-1], False)
    sound = np.abs(np.concatenate(out)) > 0.25
    assert sound.sum() / rate == pytest.approx(2 / (1 + playout.drift_ppm * 1e-6), rel=0.01)
