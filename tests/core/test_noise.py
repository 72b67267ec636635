"""The session's draws depend on seed and place alone."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from voicechat_core.config import MogHeadConfig, TtsConfig
from voicechat_core.errors import InputError
from voicechat_core.nn.sampler import Draws
from voicechat_core.noise import GreedyNoise, KeyedNoise, RecordedNoise

CONFIG = TtsConfig(
    guidance_scale=0.2, top_p=0.95, noise_scale=0.001, latent_size=6, mog_head=MogHeadConfig(num_predictions=10)
)
SEEDS = st.integers(0, 2**64 - 1)


def equal(a: Draws, b: Draws) -> bool:
    return all(bool(mx.array_equal(x, y)) for x, y in zip(a, b, strict=True))


@given(SEEDS, st.lists(st.integers(0, 10_000), min_size=1, max_size=6))
def test_a_frame_depends_on_seed_and_index_alone(seed: int, indices: list[int]) -> None:
    """Whatever was drawn before, by whom, from the global generator, and whatever the ordinal."""
    noise = KeyedNoise(seed, CONFIG)
    first = [noise.frame(i, i + 3) for i in indices]
    mx.eval(mx.random.normal((5,)))
    again = [KeyedNoise(seed, CONFIG).frame(i, i + 70) for i in reversed(indices)]
    assert all(equal(a, b) for a, b in zip(first, reversed(again), strict=True))


@given(SEEDS, SEEDS, st.integers(0, 1000))
def test_prompt_steps_are_the_same_for_every_seed(a: int, b: int, ordinal: int) -> None:
    assert equal(KeyedNoise(a, CONFIG).prompt_step(ordinal), KeyedNoise(b, CONFIG).prompt_step(ordinal))


def test_every_step_draws_something_else() -> None:
    """No two of: frames of neighbouring seeds and of the prompt's own seed, prompt steps, and their passes."""
    draws = [KeyedNoise(seed, CONFIG).frame(i, i) for seed in (0, 1, 2**64 - 1) for i in range(4)]
    draws += [KeyedNoise(0, CONFIG).prompt_step(i) for i in range(4)]
    for which in (0, 1):
        rows = np.concatenate([np.array(d[which]) for d in draws])
        assert len(np.unique(rows, axis=0)) == len(rows) == 16 * 5


def test_global_generator_is_left_alone() -> None:
    mx.random.seed(1)
    expected = mx.random.normal((3,))
    mx.random.seed(1)
    mx.eval(KeyedNoise(5, CONFIG).frame(0, 0))
    assert mx.array_equal(mx.random.normal((3,)), expected)


def test_shapes_and_distributions() -> None:
    noise = KeyedNoise(7, CONFIG)
    draws = [noise.frame(i, i) for i in range(200)]
    assert (draws[0][0].shape, draws[0][1].shape) == ((5, 10), (5, 6))
    u, z = (np.concatenate([np.array(d[k]).ravel() for d in draws]) for k in (0, 1))
    assert u.dtype == z.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    # 10,000 and 6,000 numbers: five standard errors of mean and deviation.
    assert abs(u.mean() - 0.5) < 0.015
    assert abs(u.std() - 12**-0.5) < 0.01
    assert abs(z.mean()) < 0.065
    assert abs(z.std() - 1) < 0.05


def test_draws_never_change() -> None:
    """Recorded conversations replay only while these numbers stay what they were."""
    u, z = KeyedNoise(1234, CONFIG).frame(56, 0)
    # The generator's bits are exact; the normals' inverse error function may differ between devices.
    assert np.allclose(np.array(u)[[0, 4], [0, 9]], [0.29473945, 0.36775759], rtol=0, atol=1e-7)
    assert np.allclose(np.array(z)[[0, 4], [0, 5]], [0.29980358, 0.85022092], rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, "1", None, True])
def test_seed_that_cannot_be(seed: Any) -> None:
    with pytest.raises(InputError, match=f"seed is {seed!r}"):
        KeyedNoise(seed, CONFIG)


def tape(steps: int) -> Draws:
    rng = np.random.default_rng(0)
    shapes = (steps * 5, 1, 1, 10), (steps, 5, 1, 1, 6)  # the two ways tapes have been written
    return mx.array(rng.random(shapes[0], np.float32)), mx.array(rng.random(shapes[1], np.float32))


def test_recorded_draws_go_by_ordinal() -> None:
    u, z = tape(3)
    noise = RecordedNoise(u, z, CONFIG)
    expected = u.reshape(3, 5, 10)[2], z[2, :, 0, 0]
    assert equal(noise.frame(0, 2), expected)
    assert equal(noise.prompt_step(2), expected)


@pytest.mark.parametrize("ordinal", [-1, 3])
def test_step_that_is_not_on_the_tape(ordinal: int) -> None:
    with pytest.raises(InputError, match=f"step {ordinal} is not on a tape of 3 steps"):
        RecordedNoise(*tape(3), CONFIG).frame(0, ordinal)


def test_tape_of_another_shape() -> None:
    u, z = tape(3)
    for wrong in ((u[:-1], z), (u[..., :-1], z), (u, z[..., :-1]), (u[:10], z)):
        with pytest.raises(InputError):
            RecordedNoise(*wrong, CONFIG)


def test_greedy_draws_add_nothing() -> None:
    u, z = GreedyNoise(CONFIG).frame(3, 3)
    assert mx.array_equal(u, mx.full((5, 10), u[0, 0].item()))
    assert not mx.any(z)


def test_no_two_frames_draw_alike() -> None:
    """Over a minute, and over as many prompt steps: equal draws would be heard as a pattern."""
    noise = KeyedNoise(3, CONFIG)
    first = [np.array(draws[0]).flat[0] for n in range(750) for draws in (noise.frame(n, 0), noise.prompt_step(n))]
    assert len(set(first)) > 1490  # 1500 floats of 24 bits: a few may meet by chance
