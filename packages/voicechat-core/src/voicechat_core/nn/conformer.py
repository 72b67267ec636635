"""FastConformer encoder: mel rows -> one frame every 80 ms, each from the past only.

Layers after Gulati et al. 2020 (two half feed-forwards around attention and convolution), subsampling by eight
after Rekesh et al. 2023, relative positions after Dai et al. 2019. A frame sees itself and the 70 before it, and
its convolutions reach back only, so that one code path serves a whole clip, a block of frames and a single one:
the whole clip is the step that starts from nothing.

A state has the same shape from the first frame on: the keys and values of 70 frames, zeros before the first, and one
row for all layers that hides those zeros. So a step of one frame is compiled once, and knows no counter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import EncoderConfig
from voicechat_core.nn.derived import Derived
from voicechat_core.nn.layout import Axes, CheckpointLayout
from voicechat_core.nn.linear import Joined, Linear, for_products
from voicechat_core.nn.subsampling import ConvSubsampling, SubsamplingState, encoded_length

__all__ = ["ConformerEncoder", "ConformerLayer", "EncoderState", "LayerState", "RelPositionAttention"]

# Queries scored together: with the 70 frames before them a score matrix of at most 128 x 198 a head, however
# long the clip.
QUERY_BLOCK = 128


class FeedForward(nn.Module):
    """``linear2(SiLU(linear1(x)))``."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        inner = config.d_model * config.ff_expansion_factor
        self.linear1 = Linear(config.d_model, inner, bias=False)
        self.linear2 = Linear(inner, config.d_model, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear2(nn.silu(self.linear1(x)))

    def add_half(self, x: mx.array, residual: mx.array) -> mx.array:
        """``residual`` and half of what this gives for ``x``."""
        return self.linear2.add(nn.silu(self.linear1(x)), residual, alpha=0.5)


class PointwiseConv1d(CheckpointLayout, nn.Module):
    """Convolution of width 1 over ``[B, T, C]``: a matrix product on the channels."""

    CHECKPOINT_AXES: ClassVar[dict[str, Axes]] = {"weight": (0, 2, 1)}

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.weight = mx.zeros((channels_out, 1, channels_in))
        self._columns = Derived(lambda weight: weight.squeeze(1).T)

    def lay_out(self) -> None:
        """Bring the weight into the order that products read it in; its shape stays."""
        self.weight = for_products(self.weight.squeeze(1))[:, None]

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = x.astype(self.weight.dtype) @ self._columns(self.weight)
        return y

    def add(self, x: mx.array, residual: mx.array) -> mx.array:
        """``residual + self(x)``, in one operation where they have one dtype."""
        if residual.dtype != self.weight.dtype:
            return residual + self(x)
        return mx.addmm(residual, x.astype(self.weight.dtype), self._columns(self.weight))


class DepthwiseConv1d(CheckpointLayout, nn.Module):
    """One filter a channel, no padding: ``[B, T + width - 1, C] -> [B, T, C]``."""

    CHECKPOINT_AXES: ClassVar[dict[str, Axes]] = {"weight": (0, 2, 1)}

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, width, 1))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.conv1d(x, self.weight, groups=self.weight.shape[0])


class ConformerConvolution(nn.Module):
    """Gate, causal depthwise convolution, norm: what a frame hears of the ``width - 1`` before it."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        channels = config.d_model
        self.pointwise_conv1 = PointwiseConv1d(channels, 2 * channels)
        self.depthwise_conv = DepthwiseConv1d(channels, config.conv_kernel_size)
        self.batch_norm = nn.LayerNorm(channels)  # the checkpoint's name; with conv_norm_type "layer_norm" it is one
        self.pointwise_conv2 = PointwiseConv1d(channels, channels)

    def add(
        self, x: mx.array, residual: mx.array, before: mx.array, valid: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Frames ``[B, n, D]`` after the gated frames ``before`` -> ``residual`` and the output; the frames to keep."""
        gated = nn.glu(self.pointwise_conv1(x))
        if valid is not None:
            gated = mx.where(valid, gated, 0)
        rows = mx.concatenate([before, gated], axis=1)
        y = nn.silu(self.batch_norm(self.depthwise_conv(rows)))
        # A slice: the ``n`` rows before it stay alive with it, in a live step one.
        return self.pointwise_conv2.add(y, residual), rows[:, x.shape[1] :]


def sinusoids(positions: mx.array, dim: int) -> mx.array:
    """Sine and cosine of each position, interleaved: ``[n] -> [n, dim]`` (Vaswani et al. 2017)."""
    frequencies = mx.exp(mx.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angles = positions[:, None] * frequencies
    return mx.stack([mx.sin(angles), mx.cos(angles)], axis=-1).flatten(1)


def skew(x: mx.array) -> mx.array:
    """Row a moved right by a: ``[..., n, R] -> [..., n, R + n - 1]``, zeros elsewhere (Dai et al. 2019, B)."""
    *axes, n, _ = x.shape
    x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n)])
    width = x.shape[-1] - 1
    return x.flatten(-2)[..., : n * width].reshape(*axes, n, width)


def near(n: int, window: int) -> mx.array:
    """Which of ``window - 1 + n`` keys each of the last n positions may see: ``[n, window - 1 + n]``."""
    ahead = mx.arange(window - 1 + n) - mx.arange(n)[:, None]
    return (ahead >= 0) & (ahead < window)


def _tables(
    projection: Linear, keys: Linear, sizes: tuple[int, int, int], _: mx.array, u: mx.array, v: mx.array
) -> tuple[mx.array, mx.array]:
    """``p_r / sqrt(head_dim)`` for the distances window - 1 ... 0 ``[H, d, window]``, and ``(v - u) . p_r`` of it
    ``[H, 1, window]``, in the keys' dtype. ``_`` is the projection's weight: when it is another, so are these.
    """
    window, heads, head_dim = sizes
    p = projection(sinusoids(mx.arange(window - 1, -1, -1), heads * head_dim))
    p = mx.unflatten(p, -1, (heads, head_dim)).swapaxes(0, 1).astype(mx.float32) * head_dim**-0.5
    constant = (v - u).astype(mx.float32)[:, None] @ p.swapaxes(1, 2)
    return p.swapaxes(1, 2).astype(keys.dtype), constant.astype(keys.dtype)


class RelPositionAttention(nn.Module):
    """Attention to this frame and the ``context`` before it, with Transformer-XL's relative positions.

    Score of a key r frames back: ``((q + u) . k + (q + v) . p_r) / sqrt(head_dim)``. As u is the bias of the queries,
    it is ``(q' . k + q' . p_r + (v - u) . p_r) / sqrt(head_dim)``, and the last term is a constant.

    The state is ``[2, B, H, window - 1, d]``: keys and values of the frames before, zeros before the first. ``heard``
    ``[window - 1 + n]`` is added to the scores of these and of the n new ones: 0, or -inf for what was never there.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        dim, self.heads = config.d_model, config.n_heads
        self.head_dim = dim // self.heads
        self.window = config.att_context_size[0] + 1
        self.linear_q = Linear(dim, dim, bias=False)
        self.linear_k = Linear(dim, dim, bias=False)
        self.linear_v = Linear(dim, dim, bias=False)
        self.linear_out = Linear(dim, dim, bias=False)
        self.linear_pos = Linear(dim, dim, bias=False)
        self.pos_bias_u = mx.zeros((self.heads, self.head_dim))
        self.pos_bias_v = mx.zeros((self.heads, self.head_dim))
        self._joint = Joined(self.linear_q, self.linear_k, self.linear_v)
        self._bias = Derived(lambda u: mx.pad(u.flatten(), (0, 2 * u.size)))
        # Nothing here holds this module itself: in a circle its weights would outlive it.
        sizes = (self.window, self.heads, self.head_dim)
        self._positions = Derived(partial(_tables, self.linear_pos, self.linear_k, sizes))

    @property
    def dtype(self) -> mx.Dtype:
        """What keys and scores are computed in."""
        return self.linear_k.dtype

    def new_state(self, batch: int = 1) -> mx.array:
        """No frame heard yet."""
        return mx.zeros((2, batch, self.heads, self.window - 1, self.head_dim), self.dtype)

    def constant(self) -> mx.array:
        """The constant term of the scores, for the distances window - 1 ... 0: ``[H, 1, window]``."""
        return self._of_positions()[1]

    def __call__(self, x: mx.array, state: mx.array, heard: mx.array) -> tuple[mx.array, mx.array]:
        """The next n frames ``[B, n, D]``."""
        y, state = self.attend(x, state, heard)
        return self.linear_out(y), state

    def attend(
        self, x: mx.array, state: mx.array, heard: mx.array, offset: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """What goes into ``linear_out``, by blocks of queries, each with the keys that it can see.

        ``offset`` is the sum of ``constant()`` and ``heard``, if that is known and x is one frame.
        """
        q, rows = mx.split(self._project(x), [1])
        rows = mx.concatenate([state, rows], axis=3)
        q, k, v = (y.squeeze(0) for y in (q, *mx.split(rows, 2)))
        parts = []
        for start in range(0, q.shape[2], QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, q.shape[2])
            near_by = slice(start, end + self.window - 1)
            scores = self._scores(q[:, :, start:end], heard[near_by], offset)
            parts.append(
                mx.fast.scaled_dot_product_attention(
                    q[:, :, start:end], k[:, :, near_by], v[:, :, near_by], scale=self.head_dim**-0.5, mask=scores
                )
            )
        y = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
        return y.swapaxes(1, 2).flatten(2), rows[:, :, :, q.shape[2] :]

    def _scores(self, q: mx.array, heard: mx.array, offset: mx.array | None) -> mx.array:
        """What is added to the products of queries ``[B, H, n, d]`` and all keys in sight: ``[B, H, n, m]``."""
        n = q.shape[2]
        table, constant = self._of_positions()
        if n == 1:
            return mx.addmm(constant + heard if offset is None else offset, q, table)
        # Column s is distance window - 1 - s; skewed, it is the key at that distance from its row.
        return mx.where(near(n, self.window), skew(mx.addmm(constant, q, table)) + heard, -mx.inf)

    def _project(self, x: mx.array) -> mx.array:
        """Queries with their bias u, keys and values, ``[3, B, H, n, d]``."""
        y = self._joint(x, self._bias(self.pos_bias_u).astype(self.dtype))
        return mx.unflatten(y, -1, (3, self.heads, self.head_dim)).transpose(2, 0, 3, 1, 4)

    def _of_positions(self) -> tuple[mx.array, mx.array]:
        """``p_r / sqrt(head_dim)`` for the distances window - 1 ... 0 ``[H, d, window]``, and the constant term."""
        tables: tuple[mx.array, mx.array] = self._positions(self.linear_pos.weight, self.pos_bias_u, self.pos_bias_v)
        return tables


@dataclass
class LayerState:
    """Keys and values of the frames still visible; the gated frames ``[B, width - 1, D]`` still under the filter."""

    attention: mx.array
    conv: mx.array


class ConformerLayer(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        dim = config.d_model
        self.norm_feed_forward1 = nn.LayerNorm(dim)
        self.feed_forward1 = FeedForward(config)
        self.norm_self_att = nn.LayerNorm(dim)
        self.self_attn = RelPositionAttention(config)
        self.norm_conv = nn.LayerNorm(dim)
        self.conv = ConformerConvolution(config)
        self.norm_feed_forward2 = nn.LayerNorm(dim)
        self.feed_forward2 = FeedForward(config)
        self.norm_out = nn.LayerNorm(dim)
        self._conv_state = (config.conv_kernel_size - 1, dim)

    def new_state(self, batch: int = 1) -> LayerState:
        """No frame seen yet."""
        gated = mx.zeros((batch, *self._conv_state), self.conv.pointwise_conv1.weight.dtype)
        return LayerState(self.self_attn.new_state(batch), gated)

    def __call__(
        self,
        x: mx.array,
        state: LayerState,
        heard: mx.array,
        valid: mx.array | None = None,
        offset: mx.array | None = None,
    ) -> tuple[mx.array, LayerState]:
        """The next n frames ``[B, n, D]``; ``heard`` and ``offset`` are the attention's.

        ``valid`` ``[n, 1]`` marks frames that are not padding. Padding comes last, so no other frame can see it;
        NVIDIA lets it attend to nothing and hides it from its own convolution.
        """
        x = self.feed_forward1.add_half(self.norm_feed_forward1(x), x)
        attended, attention = self.self_attn.attend(self.norm_self_att(x), state.attention, heard, offset)
        if valid is None:
            x = self.self_attn.linear_out.add(attended, x)
        else:
            x = x + mx.where(valid, self.self_attn.linear_out(attended), 0)
        x, conv = self.conv.add(self.norm_conv(x), x, state.conv, valid)
        x = self.feed_forward2.add_half(self.norm_feed_forward2(x), x)
        return self.norm_out(x), LayerState(attention, conv)


@dataclass
class EncoderState:
    """What the encoder remembers between frames; ``heard`` ``[window - 1]`` is -inf for frames that never were."""

    pre_encode: SubsamplingState
    heard: mx.array
    layers: list[LayerState]


class ConformerEncoder(nn.Module):
    """Mel rows ``[B, T, features]`` -> frames ``[B, T', D]``; eight rows a frame, but the first frame has one."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.pre_encode = ConvSubsampling(config)
        self.layers = [ConformerLayer(config) for _ in range(config.n_layers)]
        self._context = config.att_context_size[0]
        self._present = mx.array([0.0])
        self._constants = Derived(lambda *constants: mx.stack(list(constants)))

    def __call__(self, mel: mx.array, length: int | None = None) -> mx.array:
        """A whole sequence: ``encoded_length(T)`` frames.

        With ``length`` rows from there on are padding, and all frames, also the padding frames beyond
        ``encoded_length(length)``, are those of NVIDIA's encoder.
        """
        return self.layer_outputs(mel, length)[-1]

    def layer_outputs(self, mel: mx.array, length: int | None = None) -> list[mx.array]:
        """The frames ``[B, T', D]`` of a whole sequence after each layer."""
        x = self.pre_encode(mel, length)
        valid = None if length is None else mx.arange(x.shape[1])[:, None] < encoded_length(length)
        heard, outputs = self.heard(self.new_heard(), x.shape[1]), []
        for layer in self.layers:
            x, _ = layer(x, layer.new_state(x.shape[0]), heard, valid)
            outputs.append(x)
        return outputs

    def new_state(self, batch: int = 1) -> EncoderState:
        """No row seen yet."""
        layers = [layer.new_state(batch) for layer in self.layers]
        return EncoderState(self.pre_encode.new_state(batch), self.new_heard(), layers)

    def new_heard(self) -> mx.array:
        """``heard`` before the first frame."""
        return mx.full((self._context,), -mx.inf, self.layers[0].self_attn.dtype)

    def heard(self, before: mx.array, frames: int) -> mx.array:
        """The row of the frames before, and of n more, which are heard: ``[window - 1 + n]``."""
        present = self._present if frames == 1 else mx.zeros((frames,))
        return mx.concatenate([before, present.astype(before.dtype)])

    def step(self, mel: mx.array, state: EncoderState) -> tuple[mx.array, EncoderState]:
        """The next n frames, of ``1 + 8 (n - 1)`` rows in the first step and of ``8 n`` in every later one.

        Raises ``InputError`` for any other number of rows.
        """
        x, pre_encode = self.pre_encode.step(mel, state.pre_encode)
        heard = self.heard(state.heard, x.shape[1])
        layers, offsets = [], self._offsets(heard, x.shape[1])
        for layer, before, offset in zip(self.layers, state.layers, offsets, strict=True):
            x, after = layer(x, before, heard, offset=offset)
            layers.append(after)
        return x, EncoderState(pre_encode, heard[x.shape[1] :], layers)

    def _offsets(self, heard: mx.array, frames: int) -> Sequence[mx.array | None]:
        """For each layer what one frame's scores begin with, ``[1, H, 1, window]``: one sum for all layers."""
        if frames > 1:
            return [None] * len(self.layers)
        constants: mx.array = self._constants(*(layer.self_attn.constant() for layer in self.layers))
        return cast("list[mx.array]", mx.split(constants + heard, len(self.layers)))
