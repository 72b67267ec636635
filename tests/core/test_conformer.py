"""Encoder parts against naive renderings, and against themselves in blocks of every size."""

from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map_with_path

from voicechat_core.config import EncoderConfig
from voicechat_core.errors import InputError
from voicechat_core.nn import conformer
from voicechat_core.nn.conformer import ConformerEncoder, RelPositionAttention
from voicechat_core.nn.state import nbytes
from voicechat_core.nn.subsampling import ConvSubsampling, encoded_length

CONFIG = EncoderConfig(n_layers=2, d_model=32, n_heads=4, subsampling_conv_channels=4)

# Float32 noise of two layers with activations of order one, summed in another order.
TOLERANCE = 1e-5


def randomized(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights of order 1 / sqrt(fan-in); norms near one; every bias non-zero."""
    rng = np.random.default_rng(seed)

    def draw(path: str, value: mx.array) -> mx.array:
        z = rng.normal(0, 1, value.shape).astype(np.float32)
        if value.ndim > 1:
            return mx.array(z / np.float32(np.sqrt(np.prod(value.shape[1:]))))
        return mx.array(0.2 * z + np.float32(path.endswith("weight")))

    module.update(tree_map_with_path(draw, module.parameters()))
    return module


def normal(*shape: int, seed: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32))


@pytest.fixture(scope="module")
def encoder() -> ConformerEncoder:
    return randomized(ConformerEncoder(CONFIG))


# ------------------------------------------------------------------------------------------ subsampling


def naive_conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Stride 2, two zeros before, one after: ``x`` [T, F, C_in], ``weight`` [C_out, 3, 3, C_in / groups]."""
    padded = np.pad(x, [(2, 1), (2, 1), (0, 0)])
    out = np.empty((x.shape[0] // 2 + 1, x.shape[1] // 2 + 1, weight.shape[0]))
    for t in range(out.shape[0]):
        for f in range(out.shape[1]):
            patch = padded[2 * t : 2 * t + 3, 2 * f : 2 * f + 3]
            product = (
                patch[None] * weight if weight.shape[3] == x.shape[2] else patch.transpose(2, 0, 1)[..., None] * weight
            )
            out[t, f] = product.sum(axis=(1, 2, 3)) + bias
    return out


def naive_subsampling(module: ConvSubsampling, mel: np.ndarray, length: int) -> np.ndarray:
    w = {i: {k: np.array(v, np.float64) for k, v in module.conv[i].parameters().items()} for i in (0, 2, 3, 5, 6)}
    x = mel[..., None].astype(np.float64)
    for strided, pointwise in ((0, None), (2, 3), (5, 6)):
        x[length:] = 0
        x = naive_conv(x, w[strided]["weight"], w[strided]["bias"])
        if pointwise is not None:
            x = np.einsum("tfi,oi->tfo", x, w[pointwise]["weight"][:, 0, 0]) + w[pointwise]["bias"]
        x = np.maximum(x, 0)
        length = length // 2 + 1
    x[length:] = 0
    flat = x.transpose(0, 2, 1).reshape(len(x), -1)
    return flat @ np.array(module.out.weight, np.float64).T + np.array(module.out.bias)


@pytest.mark.parametrize(("rows", "length"), [(41, None), (40, None), (41, 40), (42, 41), (44, 30), (9, 0)])
def test_subsampling_is_three_padded_strides(rows: int, length: int | None) -> None:
    module = randomized(ConvSubsampling(CONFIG))
    mel = normal(1, rows, 128)
    expected = naive_subsampling(module, np.array(mel[0]), rows if length is None else length)
    np.testing.assert_allclose(np.array(module(mel, length))[0], expected, atol=TOLERANCE)


@pytest.mark.parametrize("rows", range(34))
def test_encoded_length_counts_the_frames(rows: int) -> None:
    if rows:
        assert randomized(ConvSubsampling(CONFIG))(mx.zeros((1, rows, 128))).shape[1] == encoded_length(rows)
    assert encoded_length(rows) == (rows + 6) // 8 + 1


@pytest.mark.parametrize(("first", "rows"), [(True, 0), (True, 8), (True, 2), (False, 0), (False, 9), (False, 7)])
def test_a_step_refuses_rows_that_do_not_end_with_a_frame(encoder: ConformerEncoder, first: bool, rows: int) -> None:
    state = encoder.new_state()
    if not first:
        _, state = encoder.step(mx.zeros((1, 1, 128)), state)
    with pytest.raises(InputError, match=f"^{rows} mel rows"):
        encoder.step(mx.zeros((1, rows, 128)), state)


# -------------------------------------------------------------------------------------------- attention


def naive_attention(module: RelPositionAttention, x: np.ndarray, heads: int, context: int) -> np.ndarray:
    """Every score by its definition, in float64."""
    w = {k: np.array(v["weight"], np.float64) for k, v in module.parameters().items() if k.startswith("linear")}
    u, v_bias = np.array(module.pos_bias_u, np.float64), np.array(module.pos_bias_v, np.float64)
    frames, dim = x.shape
    q, k, v = ((x @ w[f"linear_{n}"].T).reshape(frames, heads, -1) for n in "qkv")
    encoding = np.empty((context + 1, dim))
    for r in range(context + 1):
        for m in range(dim // 2):
            angle = r / 10000 ** (2 * m / dim)
            encoding[r, 2 * m : 2 * m + 2] = np.sin(angle), np.cos(angle)
    p = (encoding @ w["linear_pos"].T).reshape(context + 1, heads, -1)
    out = np.empty_like(q)
    for i in range(frames):
        keys = np.arange(max(0, i - context), i + 1)
        content = np.einsum("hd,jhd->hj", q[i] + u, k[keys])
        position = np.einsum("hd,jhd->hj", q[i] + v_bias, p[i - keys])
        scores = (content + position) / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[i] = np.einsum("hj,jhd->hd", weights / weights.sum(axis=1, keepdims=True), v[keys])
    return out.reshape(frames, dim) @ w["linear_out"].T


def attended(module: RelPositionAttention, x: mx.array) -> mx.array:
    """A whole sequence, nothing before it."""
    state = module.new_state(x.shape[0])
    heard = mx.concatenate([mx.full((state.shape[3],), -mx.inf), mx.zeros((x.shape[1],))])
    return module(x, state, heard)[0]


@pytest.mark.parametrize(("frames", "context"), [(1, 70), (40, 70), (300, 70), (150, 5), (129, 0), (140, 200)])
def test_attention_is_the_closed_form(frames: int, context: int) -> None:
    assert conformer.QUERY_BLOCK == 128  # the lengths above end before, at and after a block's edge
    config = msgspec.structs.replace(CONFIG, att_context_size=(context, 0))
    module = randomized(RelPositionAttention(config))
    x = normal(2, frames, 32)
    y = attended(module, x)
    for item in range(2):
        expected = naive_attention(module, np.array(x[item], np.float64), 4, context)
        np.testing.assert_allclose(np.array(y[item]), expected, atol=TOLERANCE)


def test_a_frame_is_seen_by_the_seventy_after_it_and_by_no_other() -> None:
    module = randomized(RelPositionAttention(CONFIG))
    x = normal(1, 100, 32)
    changed = mx.concatenate([x[:, :1] + 1, x[:, 1:]], axis=1)
    before, after = (np.array(attended(module, y))[0] for y in (x, changed))
    differs = (before != after).any(axis=1)
    assert differs[:71].all()
    assert not differs[71:].any()


def test_the_position_table_follows_the_weight_it_is_made_of() -> None:
    module, other = randomized(RelPositionAttention(CONFIG)), randomized(RelPositionAttention(CONFIG), seed=9)
    x = normal(1, 20, 32)
    first = attended(module, x)
    module.update(other.parameters())
    second, expected = attended(module, x), attended(other, x)
    np.testing.assert_array_equal(np.array(second), np.array(expected))
    assert np.abs(np.array(first - second)).max() > 0.1


# ---------------------------------------------------------------------------------------------- encoder


def by_blocks(encoder: ConformerEncoder, mel: mx.array, sizes: list[int]) -> mx.array:
    state, start, outputs = encoder.new_state(mel.shape[0]), 0, []
    for frames in sizes:
        end = start + 8 * frames - (7 if start == 0 else 0)
        output, state = encoder.step(mel[:, start:end], state)
        outputs.append(output)
        start = end
    return mx.concatenate(outputs, axis=1)


@settings(max_examples=8, deadline=None)
@given(cuts=st.sets(st.integers(1, 99), max_size=12))
def test_block_sizes_do_not_matter(encoder: ConformerEncoder, cuts: set[int]) -> None:
    mel = normal(2, 8 * 99 + 1, 128)
    edges = [0, *sorted(cuts), 100]
    blocks = by_blocks(encoder, mel, [b - a for a, b in pairwise(edges)])
    np.testing.assert_allclose(np.array(blocks), np.array(encoder(mel)), atol=TOLERANCE)


def test_one_frame_at_a_time_is_the_whole_sequence_far_beyond_the_context(encoder: ConformerEncoder) -> None:
    mel = normal(1, 8 * 299 + 1, 128)
    np.testing.assert_allclose(np.array(by_blocks(encoder, mel, [1] * 300)), np.array(encoder(mel)), atol=TOLERANCE)


def test_padding_is_invisible_to_real_frames(encoder: ConformerEncoder) -> None:
    mel, length = normal(1, 130, 128), 81
    padded, alone = encoder(mel, length), encoder(mel[:, :length])
    assert padded.shape[1] == encoded_length(130)
    assert alone.shape[1] == encoded_length(length) == 11
    np.testing.assert_allclose(np.array(padded[:, :11]), np.array(alone), atol=TOLERANCE)


def test_a_state_does_not_grow_with_the_frames(encoder: ConformerEncoder) -> None:
    state, sizes = encoder.new_state(), []
    for frames in (1, *[200] * 6):
        _, state = encoder.step(mx.zeros((1, 8 * frames - (7 if frames == 1 else 0), 128)), state)
        sizes.append(nbytes(state))
    assert max(sizes[3:]) <= max(sizes[1:3])
