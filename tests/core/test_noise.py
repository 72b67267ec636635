"""The session's draws depend on seed and place alone."""

import zlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.graphs import operations
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


# Of each step's uniforms the checksum, and two of its normals.
RECORDED = {
    (0, "frame", 0): (4219668520, 1.0712045, 0.9608764),
    (0, "frame", 7503): (153530677, -0.4125797, -0.2011152),
    (0, "prompt", 36): (808272039, 0.2410740, 0.2210462),
    (1, "frame", 0): (2747174483, -0.5142540, 0.5042951),
    (1, "frame", 7503): (2102342553, 0.7556907, 0.2916274),
    (1, "prompt", 36): (808272039, 0.2410740, 0.2210462),
    (2**64 - 1, "frame", 0): (790295211, -0.8146591, -0.3858852),
    (2**64 - 1, "frame", 7503): (1452255282, 0.8496884, -0.3040700),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("seed", "kind", "number"), list(RECORDED))
def test_draws_of_many_steps_never_change(seed: int, kind: str, number: int, compiled: bool) -> None:
    noise = KeyedNoise(seed, CONFIG, compiled=compiled)
    u, z = noise.frame(number, 0) if kind == "frame" else noise.prompt_step(number)
    checksum, *normals = RECORDED[seed, kind, number]
    assert zlib.crc32(np.array(u).tobytes()) == checksum
    assert np.allclose(np.array(z)[[1, 4], [2, 5]], normals, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("components", "latent"), [(10, 6), (7, 9), (1024, 512)])
def test_each_pass_draws_as_mlx_does_by_its_keys(components: int, latent: int, compiled: bool) -> None:
    """One key a pass from the step's, and from that one for each kind of draw; equal to the bit."""
    head = MogHeadConfig(num_predictions=components)
    config = TtsConfig(guidance_scale=0.2, top_p=0.95, noise_scale=0.001, latent_size=latent, mog_head=head)
    noise = KeyedNoise(77, config, compiled=compiled)
    for index in range(40):
        words = np.random.SeedSequence(77, spawn_key=(1, index)).generate_state(2, np.uint32)
        pairs = [mx.random.split(key) for key in mx.random.split(mx.array(words), 5)]
        u = mx.stack([mx.random.uniform(shape=(components,), key=first) for first, _ in pairs])
        z = mx.stack([mx.random.normal(shape=(latent,), key=second) for _, second in pairs])
        assert equal(noise.frame(index, 0), (u, z))


def test_a_frame_is_drawn_in_few_operations() -> None:
    """Four of random bits, and what becomes of them; it was 98, for each pass drew on its own."""
    assert operations(*KeyedNoise(1, CONFIG, compiled=True).frame(3, 3)).total() == 8
    assert operations(*KeyedNoise(1, CONFIG).frame(3, 3)).total() == 18


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
