"""Log-mel: frame counts, an independent float64 rendering, and the rows as they arrive."""

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core.config import PreprocessorConfig
from voicechat_core.errors import InputError
from voicechat_core.nn.mel import LogMel, filterbank, hann_window

CONFIG = PreprocessorConfig()


@pytest.fixture(scope="module")
def mel() -> LogMel:
    return LogMel(CONFIG)


def noise(samples: int, seed: int = 0, batch: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, (batch, samples)).astype(np.float32)


def render(samples: np.ndarray) -> np.ndarray:
    """One row at a time, each sample addressed by its index, all in float64."""
    x = samples.astype(np.float64)
    hz = np.linspace(0, 8000, 257)
    points = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), 130)
    edges = np.where(points < 15, points * 200 / 3, 1000 * 6.4 ** ((points - 15) / 27))
    rows = []
    for i in range(len(x) // 160 + 1):
        windowed = np.zeros(512)
        for n in range(400):
            at = 160 * i - 200 + n
            if 0 <= at < len(x):
                y = x[at] - (0.97 * x[at - 1] if at else 0)
                windowed[56 + n] = y * np.sin(np.pi * n / 399) ** 2
        power = np.abs(np.fft.rfft(windowed)) ** 2
        filters = [np.interp(hz, edges[m : m + 3], [0, 2 / (edges[m + 2] - edges[m]), 0]) for m in range(128)]
        rows.append(np.array(filters) @ power)
    return np.array(rows)


def test_energies_are_those_of_an_independent_rendering(mel: LogMel) -> None:
    samples = noise(1500)
    energies = np.exp(np.array(mel(mx.array(samples)))[0].astype(np.float64)) - 2.0**-24
    expected = render(samples[0])
    assert energies.shape == expected.shape == (10, 128)
    # Float32 sums of 257 products: relative to a row's largest energy, a few units in the last place.
    assert np.abs(energies - expected).max() <= 2e-6 * expected.max()


def test_tables_have_the_shapes_and_ends_of_their_definitions() -> None:
    window, filters = hann_window(400), filterbank(CONFIG)
    assert window[0] == 0
    assert window[399] == pytest.approx(0, abs=1e-7)  # symmetric, not periodic
    np.testing.assert_allclose(window, window[::-1], rtol=0, atol=4e-7)
    assert filters.shape == (128, 257)
    # Equal area: the integral of a wide filter over frequency is 1; 31.25 Hz a bin.
    np.testing.assert_allclose(filters[100:].sum(axis=1) * 31.25, 1, rtol=2e-2)


@pytest.mark.parametrize(
    ("samples", "rows"), [(1, 1), (159, 1), (160, 2), (1279, 8), (1280, 9), (1281, 9), (12800, 81)]
)
def test_a_clip_has_a_row_for_each_hop_and_one_more(mel: LogMel, samples: int, rows: int) -> None:
    assert mel(mx.zeros((1, samples))).shape == (1, rows, 128)


def test_silence_is_the_logarithm_of_the_guard(mel: LogMel) -> None:
    np.testing.assert_allclose(np.array(mel(mx.zeros((2, 700)))), -16.635532, atol=2e-6)


def test_masking_zeroes_the_last_row_only(mel: LogMel) -> None:
    samples = mx.array(noise(1300))
    whole, masked = np.array(mel(samples)), np.array(mel(samples, mask_last=True))
    assert not masked[:, -1].any()
    np.testing.assert_array_equal(masked[:, :-1], whole[:, :-1])
    assert whole[:, -1].all()


def test_a_row_hears_the_samples_under_its_window_only(mel: LogMel) -> None:
    samples, row = noise(3200), 10
    before = np.array(mel(mx.array(samples)))[0]
    for offset, heard in ((-202, False), (-200, True), (198, True), (200, False)):
        changed = samples.copy()
        changed[0, 160 * row + offset] += 0.5
        after = np.array(mel(mx.array(changed)))[0]
        assert (after[row] != before[row]).any() == heard, offset


@pytest.mark.parametrize("sizes", [[1] * 12, [12], [5, 1, 6], [1, 11]])
def test_rows_arrive_by_groups_as_in_the_whole_clip(mel: LogMel, sizes: list[int]) -> None:
    samples = mx.array(noise(12 * 1280, batch=2))
    state, rows, start = mel.new_state(2), [], 0
    for frames in sizes:
        end = (200 if start == 0 else start + 1280) + 1280 * (frames - 1)
        part, state = mel.step(samples[:, start:end], state)
        assert part.shape[1] == 8 * frames - (7 if start == 0 else 0)
        assert state.tail.shape == (2, 353)
        rows.append(part)
        start = end
    whole = np.array(mel(samples))[:, : 8 * 11 + 1]
    # The same windows in products of another height; sums may be ordered differently.
    np.testing.assert_allclose(np.array(mx.concatenate(rows, axis=1)), whole, atol=1e-5)


@pytest.mark.parametrize("samples", [0, 199, 201, 1280])
def test_samples_that_do_not_end_with_a_row_are_refused(mel: LogMel, samples: int) -> None:
    with pytest.raises(InputError, match=f"^{samples} samples"):
        mel.step(mx.zeros((1, samples)), mel.new_state())
