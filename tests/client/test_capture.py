"""From what a microphone gives to what a session hears."""

import numpy as np
import pytest

from voicechat_client.capture import RING_SECONDS, Capture
from voicechat_client.ring import Samples


def given(capture: Capture, samples: Samples, block: int = 960, lost: bool = False) -> None:
    for at in range(0, len(samples), block):
        capture.take(samples[at : at + block], lost)


def channels(*columns: Samples) -> Samples:
    return np.stack(columns, axis=1).astype(np.float32)


def sine(hertz: float, rate: int, seconds: float, amplitude: float = 0.5) -> Samples:
    return (amplitude * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def test_16_khz_mono_passes_to_the_bit() -> None:
    pcm = np.random.default_rng(0).integers(-32768, 32768, 16000).astype(np.int16)
    capture = Capture(16000, 1)
    heard = []
    for at in range(0, 16000, 333):
        capture.take(pcm[at : at + 333, np.newaxis].astype(np.float32) / 32768, False)
        heard.append(capture.read())
    heard.append(capture.finish())
    np.testing.assert_array_equal(np.concatenate(heard), pcm)
    assert heard[0].dtype == np.int16
    assert (capture.heard_seconds, capture.taken) == (1.0, 49)


@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000, 96000])
def test_any_rate_comes_at_16_khz_with_nothing_lost(rate: int) -> None:
    capture = Capture(rate, 2)
    tone = sine(500, rate, 3)
    heard = []
    for at in range(0, len(tone), 441):
        capture.take(channels(tone, tone)[at : at + 441], False)
        heard.append(capture.read())
    samples = np.concatenate([*heard, capture.finish()]) / 32768
    expected = sine(500, 16000, 3)
    assert len(samples) == pytest.approx(48000, abs=2)
    # In step, too: 0.1 ms, soxr's own, are 0.16 of a sine of 500 Hz.
    np.testing.assert_allclose(samples[2000:46000], expected[2000:46000], atol=0.17)


def test_two_channels_are_averaged_and_more_are_left_alone() -> None:
    left, right, noise = np.full(320, 0.5), np.full(320, 0.25), np.full(320, 0.9)
    stereo, four = Capture(16000, 2), Capture(16000, 4)
    stereo.take(channels(left, right), False)
    four.take(channels(left, right, noise, noise), False)
    assert set(stereo.read()) == set(four.read()) == {12288}
    assert stereo.level == pytest.approx(0.375)


def test_what_is_not_read_in_time_is_counted() -> None:
    capture = Capture(48000, 1)
    given(capture, channels(sine(500, 48000, RING_SECONDS + 0.5)))
    assert capture.dropped_seconds == pytest.approx(0.5)
    assert len(capture.read()) / 16000 == pytest.approx(RING_SECONDS, abs=0.02)
    assert capture.heard_seconds == RING_SECONDS


def test_the_devices_own_losses_are_counted() -> None:
    capture = Capture(48000, 1)
    given(capture, channels(sine(500, 48000, 0.1)), lost=True)
    given(capture, channels(sine(500, 48000, 0.1)))
    assert (capture.overflows, capture.taken, capture.dropped_seconds) == (5, 10, 0)


def test_zeros_are_timed_from_the_last_sound() -> None:
    capture = Capture(48000, 2)
    zeros, sound = np.zeros(48000), np.zeros(48000)
    sound[12000] = 1e-4
    times = []
    for mono in (zeros, zeros, sound, zeros, np.zeros(0)):
        given(capture, channels(mono, mono))
        capture.read()
        times.append(capture.zero_seconds)
    assert times == pytest.approx([1, 2, 35999 / 48000, 1 + 35999 / 48000, 1 + 35999 / 48000])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_drivers_accident_stays_one_sample(value: float) -> None:
    good, bad = Capture(48000, 1), Capture(48000, 1)
    samples = channels(sine(500, 48000, 1))
    given(good, samples)
    samples[100] = value
    given(bad, samples)
    np.testing.assert_array_equal(good.read()[1000:], bad.read()[1000:])
    assert bad.level <= 1.0
