"""Rates: lengths, levels, and what is held back."""

import numpy as np
import pytest

from voicechat_client.resampling import MOST_STRETCH, Resampler
from voicechat_client.ring import Samples

RATES = [8000, 16000, 22050, 24000, 32000, 44100, 48000, 96000, 192000]


def tone(hertz: float, rate: float, seconds: float) -> Samples:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)).astype(np.float32)


def converted(resampler: Resampler, samples: Samples, block: int) -> list[Samples]:
    return [resampler.convert(samples[at : at + block]) for at in range(0, len(samples), block)]


def level(samples: Samples, hertz: float, rate: float) -> tuple[float, float]:
    """Amplitude of a tone in the middle second, and decibels of it above all else there."""
    middle = samples[len(samples) // 2 - int(rate / 2) : len(samples) // 2 + int(rate / 2)].astype(np.float64)
    angles = 2 * np.pi * hertz * np.arange(len(middle)) / rate
    waves = np.stack([np.sin(angles), np.cos(angles)], axis=1)
    parts = np.linalg.lstsq(waves, middle, rcond=None)[0]
    rest = middle - waves @ parts
    return float(np.hypot(*parts)), float(10 * np.log10((middle**2).mean() / max((rest**2).mean(), 1e-20)))


@pytest.mark.parametrize("adjustable", [False, True])
@pytest.mark.parametrize("rate", RATES)
def test_a_tone_keeps_its_pitch_level_and_length(rate: int, adjustable: bool) -> None:
    resampler = Resampler(rate, 16000, adjustable=adjustable)
    blocks = [*converted(resampler, tone(1000, rate, 3), rate // 50), resampler.finish()]
    samples = np.concatenate(blocks)
    assert len(samples) == pytest.approx(48000, abs=2)
    amplitude, clean = level(samples, 1000, 16000)
    assert amplitude == pytest.approx(0.5, abs=1e-3)
    assert clean > 90


@pytest.mark.parametrize("rate", [44100, 48000, 96000])
def test_speech_keeps_its_s_and_nothing_folds_back(rate: int) -> None:
    """7 kHz as it was, 9 kHz gone: it would lie at 7 kHz."""
    kept = np.concatenate(converted(Resampler(rate, 16000), tone(7000, rate, 3), rate // 50))
    assert level(kept, 7000, 16000)[0] == pytest.approx(0.5, abs=2e-3)
    folded = np.concatenate(converted(Resampler(rate, 16000), tone(9000, rate, 3), rate // 50))
    assert np.abs(folded[8000:40000]).max() < 1e-4


@pytest.mark.parametrize(("rate", "wanted"), [(48000, 16000), (44100, 16000), (22050, 48000), (22050, 44100)])
def test_little_is_held_back(rate: int, wanted: int) -> None:
    resampler, seconds = Resampler(rate, wanted, adjustable=rate == 22050), 0.0
    for number, block in enumerate(converted(resampler, tone(1000, rate, 1), rate // 50), start=1):
        seconds += len(block) / wanted
        assert number * (rate // 50) / rate - seconds < 0.016


def test_the_same_rate_passes_through() -> None:
    samples = tone(440, 16000, 1)
    resampler = Resampler(16000, 16000)
    assert resampler.convert(samples) is samples
    assert len(resampler.finish()) == 0


@pytest.mark.parametrize("part", [-MOST_STRETCH, -2e-4, 2e-4, 0.01, MOST_STRETCH])
def test_stretching_changes_length_and_pitch_by_the_same_part(part: float) -> None:
    resampler = Resampler(22050, 48000, adjustable=True)
    blocks = []
    for at in range(0, 22050 * 10, 1764):
        resampler.stretch(part)
        blocks.append(resampler.convert(tone(1000, 22050, 10)[at : at + 1764]))
    samples = np.concatenate([*blocks, resampler.finish()])
    assert len(samples) == pytest.approx(480000 / (1 + part), rel=2e-5)
    assert level(samples, 1000 * (1 + part), 48000)[1] > 60


def test_a_moving_rate_makes_no_step_in_the_sound() -> None:
    """A sine of angular frequency w obeys y[n+1] + y[n-1] = 2 cos(w) y[n]: a splice does not."""
    resampler, blocks = Resampler(22050, 48000, adjustable=True), []
    rng = np.random.default_rng(0)
    whole = tone(1000, 22050, 8)
    for at in range(0, len(whole), 1764):
        resampler.stretch(float(rng.uniform(-1e-3, 1e-3)))
        blocks.append(resampler.convert(whole[at : at + 1764]))
    y = np.concatenate(blocks)[4000:].astype(np.float64)
    broken = y[2:] + y[:-2] - 2 * np.cos(2 * np.pi * 1000 / 48000) * y[1:-1]
    assert np.abs(broken).max() < 3e-5  # 9e-5 with immediate changes, 1e-2 with a sample left out
