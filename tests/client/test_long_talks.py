"""The whole path, from the microphone to the line and from the line to the speaker, while two clocks drift apart.

What ``test_drift`` finds of the playout alone, with all that stands around it in a talk.
"""

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from tests.client.long_talk import RATE, Talked, between, long_talk

pytestmark = pytest.mark.trio

BLOCK = 0.02  # of either device, and of whoever looks for what the microphone gave
HELD = 0.013  # by either resampler
SAID = BLOCK + BLOCK + HELD
ANSWERED = 0.06 + HELD + BLOCK  # with the reserve


def require_as_ever(talked: Talked) -> None:
    """In the tenth minute nothing is later than it need be, both ways."""
    for delays, usual in ((talked.said, SAID), (talked.answered, ANSWERED)):
        tenth = between(delays, 540, 600)
        assert len(tenth) >= 55
        assert max(tenth) < usual + BLOCK / 2


def require_steady(talked: Talked) -> None:
    """Nor later than in the first minute; what is said, never."""
    for delays in (talked.said, talked.answered):
        assert np.mean(between(delays, 540, 600)) < np.mean(between(delays, 30, 90)) + BLOCK
    assert max(between(talked.said, 0, 600)) < SAID + 0.001


def require_nothing_lost(talked: Talked) -> None:
    report = talked.report
    assert report.drained
    assert (report.unheard_seconds, report.dropped_seconds, report.skipped_seconds) == (0, 0, 0)
    assert talked.speaker.frames == talked.line.frames == np.ceil(talked.line.sent / 1280)


async def test_two_minutes_a_hundredth_apart(autojump_clock: MockClock) -> None:
    """As below, for the fast suite; the speaker is the faster one, for which the reserve is there."""
    talked = await long_talk(2.5, microphone_ppm=-10_000)
    assert max(between(talked.answered, 90, 150)) < ANSWERED + BLOCK / 2
    assert max(between(talked.said, 0, 150)) < SAID + 0.001
    assert talked.report.gaps == 0
    require_nothing_lost(talked)


@pytest.mark.slow  # 6 s each: 30,000 wake-ups of each of three tasks
@pytest.mark.parametrize(("microphone", "speaker"), [(-200, 0), (200, -200), (10_000, 0), (0, 10_000)])
async def test_ten_minutes(autojump_clock: MockClock, microphone: int, speaker: int) -> None:
    talked = await long_talk(10, microphone_ppm=microphone, speaker_ppm=speaker)
    require_as_ever(talked)
    require_steady(talked)
    require_nothing_lost(talked)
    apart = microphone - speaker
    assert talked.report.drift_ppm == pytest.approx(apart, abs=100 + abs(apart) * 0.03)
    assert talked.report.sent_seconds == pytest.approx(600 * (1 + microphone * 1e-6), abs=BLOCK + 0.001)
    # Before the clocks are known, 1 % takes most of the reserve.
    assert talked.report.gaps <= (1 if abs(apart) > 1000 else 0)
    assert talked.report.gaps == len(talked.gaps)


@pytest.mark.slow
async def test_what_ten_minutes_lose_is_counted_where_it_is_lost(autojump_clock: MockClock) -> None:
    """Two times nothing comes, once nobody reads, once the process stands still: four gaps, and all is accounted for.

    What was answered meanwhile, as far as it fits, is worked off at 2 % as there is never a pause, within 150 s.
    """
    silent, deaf, frozen = [(40.5, 41.5), (300.5, 302.5)], [(110.5, 125.5)], [(405.5, 408.5)]
    ppm = 200
    talked = await long_talk(10, microphone_ppm=ppm, speaker_ppm=-ppm, silent=silent, deaf=deaf, frozen=frozen)
    report, gaps = talked.report, talked.gaps
    # Gaps: where, how many, and to the sample how long.
    stalls = sorted([*silent, *deaf, *frozen])
    assert report.gaps == len(gaps) == len(stalls)
    for (began, samples), (begin, end) in zip(gaps, stalls, strict=True):
        assert begin < began < begin + 0.08 + ANSWERED
        assert end + 0.06 - BLOCK < began + samples / RATE < end + 0.08 + ANSWERED
    assert report.gap_seconds * RATE == pytest.approx(sum(samples for _, samples in gaps), abs=0.5)
    # The microphone: what the server did not read beyond 10 s, and what the ring of 2 s could not hold.
    assert report.unheard_seconds == pytest.approx((15 - 10) + (3 - 2), abs=0.05)  # blocks on their way
    assert report.sent_seconds + report.unheard_seconds == pytest.approx(600 * (1 + ppm * 1e-6), abs=BLOCK + 0.001)
    # The answer: frames that were not heard are those that were dropped.
    lost = (talked.line.frames - talked.speaker.frames) * 0.08
    assert report.dropped_seconds == pytest.approx(10 - 3, abs=0.25)
    assert lost == pytest.approx(report.dropped_seconds, abs=0.08)
    assert report.skipped_seconds == 0
    require_as_ever(talked)
    assert trio.current_time() < 600.5
