"""The random numbers of a session: the only draws in the model are those of the speech decoder's sampler.

A source gives the draws of one step from its place on the timeline alone, so chunk sizes, other sessions and
whatever else the process draws change nothing, and there is no position to restore.
"""

import math
import operator
from functools import partial
from numbers import Integral
from typing import Protocol, SupportsIndex

import mlx.core as mx
import numpy as np

from voicechat_core.config import TtsConfig
from voicechat_core.errors import InputError
from voicechat_core.nn.sampler import Draws, passes

__all__ = ["GreedyNoise", "KeyedNoise", "Noise", "RecordedNoise", "check_seed"]

PROMPT, FRAME = 0, 1  # which of the two kinds of step a key is for
PROMPT_SEED = 0
# What numbers are drawn between: the lowest of uniforms, that of what becomes normals, and the end of both. As arrays
# they are made once and not in every frame.
BOUNDS = 0.0, np.nextafter(np.float32(-1), np.float32(0)), 1.0


class Noise(Protocol):
    """Where a session's draws come from. ``ordinal`` counts the speech decoder's steps since the voice prompt."""

    def prompt_step(self, ordinal: int) -> Draws:
        """Draws of a step taken over the system prompt."""
        ...

    def frame(self, index: int, ordinal: int) -> Draws:
        """Draws of audio frame ``index``."""
        ...


def _shape(config: TtsConfig) -> tuple[int, int, int]:
    """Passes a step, mixture components, latent channels."""
    count = len(passes(config.num_quantizers, config.num_iterations, config.exponent))
    return count, config.mog_head.num_predictions, config.latent_size


def check_seed(seed: SupportsIndex) -> int:
    """The seed as an integer.

    Raises:
        InputError: it is not one from 0 to 2**64 - 1.
    """
    value = operator.index(seed) if isinstance(seed, Integral) and not isinstance(seed, bool) else -1
    if not 0 <= value < 2**64:
        raise InputError(f"seed is {seed!r}; it must be an integer from 0 to 2**64 - 1")
    return value


class KeyedNoise:
    """The product's source. A frame draws from (seed, index); a prompt step from its ordinal alone.

    The state after the system prompt is therefore the same for every seed and can be stored once. ``compiled`` draws by
    a compiled function, whose numbers are the same.

    Raises:
        InputError: the seed is not an integer from 0 to 2**64 - 1.
    """

    def __init__(self, seed: int, config: TtsConfig, *, compiled: bool = False) -> None:
        self.seed = check_seed(seed)
        draw = partial(_draw, _shape(config), tuple(mx.array(bound) for bound in BOUNDS))
        self._numbers = mx.compile(draw) if compiled else draw

    def prompt_step(self, ordinal: int) -> Draws:
        """Draws of a step taken over the system prompt."""
        return self._draw(PROMPT_SEED, PROMPT, ordinal)

    def frame(self, index: int, ordinal: int) -> Draws:
        """Draws of audio frame ``index``, lazily."""
        return self._draw(self.seed, FRAME, index)

    def _draw(self, seed: int, kind: int, number: int) -> Draws:
        # SeedSequence mixes all three well, and NumPy promises that its words never change.
        words = np.random.SeedSequence(seed, spawn_key=(kind, number)).generate_state(2, np.uint32)
        return self._numbers(mx.array(words))


def _draw(shape: tuple[int, int, int], bounds: tuple[mx.array, ...], key: mx.array) -> Draws:
    """A step's draws from its key ``[2]``: each pass has one of its own, of which each kind of draw has a half.

    All passes are drawn at once, and normals as MLX makes them itself, so that a frame takes few operations. The
    numbers are those of ``mx.random.uniform`` and ``mx.random.normal`` with each pass's two keys.
    """
    count, components, latent = shape
    zero, above_minus_one, one = bounds
    keys = mx.vmap(mx.random.split)(mx.random.split(key, count))
    u = mx.vmap(lambda key: mx.random.uniform(zero, one, (components,), key=key))(keys[:, 0])
    z = mx.vmap(lambda key: mx.random.uniform(above_minus_one, one, (latent,), key=key))(keys[:, 1])
    return u, mx.erfinv(z) * math.sqrt(2)


class RecordedNoise:
    """A tape of draws, by the step's ordinal: uniforms ``[steps * passes, ..., N]`` and normals ``[..., L]``.

    Raises:
        InputError: the tape does not hold whole steps, or it has no step of the ordinal asked for.
    """

    def __init__(self, uniforms: mx.array, normals: mx.array, config: TtsConfig) -> None:
        count, components, latent = _shape(config)
        self.uniforms = self._steps("uniforms", uniforms, count, components)
        self.normals = self._steps("normals", normals, count, latent)
        if len(self.uniforms) != len(self.normals):
            raise InputError(f"uniforms of {len(self.uniforms)} steps but normals of {len(self.normals)}")

    @staticmethod
    def _steps(name: str, tape: mx.array, count: int, width: int) -> mx.array:
        if tape.shape[-1] != width or tape.size % (count * width):
            raise InputError(f"{name} have shape {tape.shape}; whole steps of {count} x {width} are needed")
        return tape.reshape(-1, count, width)

    def prompt_step(self, ordinal: int) -> Draws:
        """Draws of step ``ordinal``."""
        if not 0 <= ordinal < len(self.uniforms):
            raise InputError(f"step {ordinal} is not on a tape of {len(self.uniforms)} steps")
        return self.uniforms[ordinal], self.normals[ordinal]

    def frame(self, index: int, ordinal: int) -> Draws:
        """Draws of step ``ordinal``, whatever the frame's index."""
        return self.prompt_step(ordinal)


class GreedyNoise:
    """For debugging: always the likeliest component, always its mean."""

    def __init__(self, config: TtsConfig) -> None:
        count, components, latent = _shape(config)
        # Equal uniforms move all components alike; only differences count.
        self.draws = mx.full((count, components), 0.5), mx.zeros((count, latent))

    def prompt_step(self, ordinal: int) -> Draws:
        """The same for every step."""
        return self.draws

    def frame(self, index: int, ordinal: int) -> Draws:
        """The same for every step."""
        return self.draws
