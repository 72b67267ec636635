"""Starting weights: PyTorch's defaults, but where the networks' own papers and NVIDIA's code begin elsewhere.

Random checkpoints for tests (``voicechat_core.synthetic_weights``) keep every branch busy; these are to be trained.
A parameter's numbers follow from the seed and its own name.
"""

import zlib
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from voicechat_core.model import Networks
from voicechat_core.nn.layout import checkpoint_axes, to_checkpoint, to_memory
from voicechat_core.weights import named_parameters

__all__ = ["initialise"]

Values = NDArray[np.float32]
Shape = tuple[int, ...]
Draw = Callable[[np.random.Generator, Shape], Values]

SPEECH_DECODER = "tts_model.tts_model."
STEP_SIZES = (0.003, 0.3)  # of Mamba's heads, at the start: with decays of 1 to 8 from 0.4 positions of memory to 330


def _constant(value: float) -> Draw:
    return lambda _, shape: np.full(shape, value, np.float32)


def _normal(std: float) -> Draw:
    return lambda rng, shape: std * rng.standard_normal(shape, np.float32)


def _uniform(bound: float) -> Draw:
    return lambda rng, shape: rng.uniform(-bound, bound, shape).astype(np.float32)


def _by_width(rng: np.random.Generator, shape: Shape) -> Values:
    """Embeddings of a Gemma encoder: rows of length one."""
    return _normal(shape[-1] ** -0.5)(rng, shape)


def _flags(rng: np.random.Generator, shape: Shape) -> Values:
    """Row 0 says nothing."""
    rows = _by_width(rng, shape)
    rows[0] = 0
    return rows


def _last_row_zero(rng: np.random.Generator, shape: Shape) -> Values:
    rows = _normal(1.0)(rng, shape)
    rows[-1] = 0
    return rows


def _characters(rng: np.random.Generator, shape: Shape) -> Values:
    rows = _by_width(rng, shape)
    rows[-1] = 0
    return rows


def _decays(_: np.random.Generator, shape: Shape) -> Values:
    return np.log(np.linspace(1, 8, shape[0])).astype(np.float32)


def _step_sizes(rng: np.random.Generator, shape: Shape) -> Values:
    """Inverse softplus of step sizes spread evenly in their logarithm."""
    low, high = np.log(STEP_SIZES)
    sizes = np.exp(rng.uniform(low, high, shape))
    return np.asarray(sizes + np.log(-np.expm1(-sizes)), np.float32)


def _well_conditioned(rng: np.random.Generator, shape: Shape) -> Values:
    """A rotation, a stretch between 0.4 and 2.5, a rotation: the prompt's frozen projection."""
    left, right = (np.linalg.qr(rng.standard_normal(shape))[0] for _ in range(2))
    return np.asarray((left * rng.uniform(0.4, 2.5, shape[0])) @ right.T, np.float32)


# The first entry whose suffix ends a parameter's name decides; what none fits follows from its shape.
SUFFIXES: tuple[tuple[str, Draw], ...] = (
    ("A_log", _decays),
    ("dt_bias", _step_sizes),
    ("mixer.D", _constant(1.0)),
    ("pos_bias_u", _constant(0.0)),
    ("pos_bias_v", _constant(0.0)),
    ("stt_model.embed_tokens.weight", _normal(0.3)),
    ("prediction.embed.weight", _last_row_zero),
    ("bos_emb", _normal(1.0)),
    ("null_emb", _normal(1.0)),
    ("audio_prompt_projection_W", _well_conditioned),
    ("embed_subword.embed_tokens.weight", _characters),
    ("cont_emb.weight", _flags),
    ("special_emb.weight", _flags),
    ("audio_proj.weight", _normal(0.3)),
    ("audio_proj.bias", _constant(0.0)),
    ("text_proj.weight", _normal(0.05)),
    ("text_proj.bias", _constant(0.0)),
    ("gate", _constant(0.0)),
    ("residual_scale", _constant(0.5)),
    ("q_norm.weight", _constant(0.8)),  # one and this: the scores are divided by 16, whatever the heads' width
    ("k_norm.weight", _constant(0.8)),
    ("pwconv2.weight", _normal(0.02)),
    ("pwconv2.bias", _constant(0.0)),
)


def _draw(name: str, shape: Shape, sibling: Shape) -> Draw:
    """What begins a parameter of this shape, in the checkpoint's axes; ``sibling`` is its module's weight."""
    for suffix, draw in SUFFIXES:
        if name.endswith(suffix):
            return draw
    if name.endswith("low_mat"):
        return _normal(shape[-1] ** -0.5)
    if "mus_list" in name or "rvq_embs" in name or "latents" in name:
        return _normal(0.01)  # found from the data, not by gradients
    if "lstm" in name:
        return _uniform((sibling[0] // 4) ** -0.5)
    if len(sibling) == 1:  # a norm: its bias, its weight, and its weight where one is added to it
        return _constant(0.0 if name.endswith("bias") or name.startswith(SPEECH_DECODER) else 1.0)
    return _uniform(float(np.prod(sibling[1:])) ** -0.5)


def initialise(networks: Networks, seed: int = 0) -> None:
    """Fill every floating parameter in place; integer buffers stay as they are."""
    axes, parameters = dict(checkpoint_axes(networks)), dict(named_parameters(networks))
    weights = []
    for name, value in parameters.items():
        if mx.issubdtype(value.dtype, mx.floating):
            weights.append((name, _initial(name, parameters, axes.get(name), seed)))
    networks.load_weights(weights, strict=False)
    mx.eval([value for _, value in weights])


def _initial(name: str, parameters: dict[str, mx.array], axes: tuple[int, ...] | None, seed: int) -> mx.array:
    value = parameters[name]
    shape = to_checkpoint(value, axes).shape
    weight = name.rpartition(".")[0] + ".weight"
    sibling = shape
    if name.endswith("bias") and weight in parameters:
        # The weight's axes are its own; all that counts is what one output sums, which a bias cannot tell.
        sibling = _stored_shape(parameters[weight], weight)
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    drawn = mx.array(_draw(name, shape, sibling)(rng, shape))
    result = to_memory(drawn, value.shape, axes)
    assert result is not None
    return result


def _stored_shape(weight: mx.array, name: str) -> Shape:
    """A weight's shape with the outputs first."""
    codec = ".audio_codec." in name and weight.ndim == 3 and "dwconv" not in name
    return weight.shape[::-1] if codec else weight.shape
