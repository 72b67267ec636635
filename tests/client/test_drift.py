"""Ten minutes with two clocks that disagree, and with a network that is late: the delay does not grow."""

import math

import numpy as np
import pytest

from tests.client.simulation import hum, simulate

# Reserve 60 ms, what the resampler keeps 11 ms, a block of the speaker 20 ms.
USUAL = 0.06 + 0.011 + 0.02


@pytest.mark.parametrize(
    ("microphone", "speaker", "rate"),
    [(0, 0, 48000), (200, 0, 48000), (0, 200, 48000), (200, -200, 48000), (-200, 200, 44100)],
)
def test_clocks_that_disagree_by_parts_in_a_million(microphone: int, speaker: int, rate: int) -> None:
    """400 ppm are 240 ms in ten minutes. They are followed by a pitch that nobody hears; nothing is lost."""
    run = simulate(10, microphone_ppm=microphone, speaker_ppm=speaker, rate=rate, sound=hum)
    delays = run.between(30, 600)
    assert len(delays) >= 56
    assert max(delays) < USUAL + 0.02
    assert max(delays) - min(delays) < 0.03
    playout = run.playout
    assert (playout.gaps, playout.gap_seconds, playout.dropped_seconds, playout.skipped_seconds) == (0, 0, 0, 0)
    # After ten minutes what is left of the beginning is less than 60 ppm.
    assert playout.drift_ppm == pytest.approx(microphone - speaker, abs=60)


@pytest.mark.parametrize("speaker", [10_000, -10_000])
def test_clocks_that_disagree_by_a_hundredth(speaker: int) -> None:
    """6 s in ten minutes. It is learnt: the delay deviates at first, by less than 50 ms, and not for ever."""
    run = simulate(10, speaker_ppm=speaker, sound=hum)
    assert max(run.between(30, 600)) < USUAL + 0.05
    later = run.between(180, 600)
    assert max(abs(delay - USUAL) for delay in later) < 0.025
    assert max(later) - min(later) < 0.03
    assert run.playout.gaps <= 1
    assert run.playout.gap_seconds < 0.15
    assert run.playout.dropped_seconds == 0
    assert run.playout.drift_ppm == pytest.approx(-speaker, rel=0.03)


def test_jitter_within_the_reserve_is_not_heard() -> None:
    rng = np.random.default_rng(0)
    late = rng.uniform(0, 0.05, 10_000)
    run = simulate(10, microphone_ppm=200, jitter=lambda number: float(late[number]), sound=hum)
    assert (run.playout.gaps, run.playout.dropped_seconds) == (0, 0)
    assert max(run.between(30, 600)) < USUAL + 0.05 + 0.02
    assert abs(run.playout.drift_ppm - 200) < 100


def test_jitter_beyond_the_reserve_is_gaps_that_are_counted() -> None:
    rng = np.random.default_rng(0)
    late = rng.uniform(0, 0.2, 10_000)
    run = simulate(2, jitter=lambda number: float(late[number]))
    assert run.playout.gaps > 3
    assert run.playout.gap_seconds / run.playout.gaps < 0.25
    assert max(run.between(30, 120)) < USUAL + 0.3


@pytest.mark.parametrize("microphone", [-200, 200])
def test_after_the_network_stood_still_the_delay_comes_back_in_the_next_pauses(microphone: int) -> None:
    """Five stalls of a second: five gaps, and ten seconds later the delay is what it was. No word is dropped."""
    stalls = [(at, at + 1) for at in (55.5, 155.5, 255.5, 355.5, 455.5)]
    run = simulate(10, microphone_ppm=microphone, stalls=stalls)
    playout = run.playout
    assert playout.gaps == 5
    assert playout.gap_seconds == pytest.approx(5 * 1.0, rel=0.15)
    assert playout.dropped_seconds == 0
    assert 0.8 * playout.gap_seconds < playout.skipped_seconds <= playout.gap_seconds
    quiet = [delay for at, delay in run.delays if at > 30 and all(not at_ - 2 < at < at_ + 9 for at_, _ in stalls)]
    assert len(quiet) > 45
    assert max(quiet) < USUAL + 0.12


def test_without_a_pause_it_comes_back_by_two_hundredths() -> None:
    run = simulate(2, stalls=[(20.5, 21.5)], sound=hum)
    assert run.playout.gaps == 1
    assert (run.playout.skipped_seconds, run.playout.dropped_seconds) == (0, 0)
    assert run.between(29, 31)[0] == pytest.approx(USUAL + 1 - 0.02 * 9, abs=0.1)
    assert max(run.between(89, 120)) < USUAL + 0.1


def test_after_five_seconds_the_newest_is_dropped_and_the_delay_stays_bounded() -> None:
    run = simulate(2, stalls=[(20.5, 25.5)])
    assert run.playout.gaps == 1
    assert 0 < run.playout.dropped_seconds < 2.5
    assert max(run.between(0, 120)) < 5 + USUAL
    assert max(run.between(60, 120)) < USUAL + 0.12
    assert math.isfinite(run.playout.drift_ppm)
