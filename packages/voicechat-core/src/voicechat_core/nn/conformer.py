"""FastConformer encoder: mel rows -> one frame every 80 ms, each from the past only.

Layers after Gulati et al. 2020 (two half feed-forwards around attention and convolution), subsampling by eight
after Rekesh et al. 2023, relative positions after Dai et al. 2019. A frame sees itself and the 70 before it, and
its convolutions reach back only, so that one code path serves a whole clip, a block of frames and a single one:
the whole clip is the step that starts from nothing.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import EncoderConfig
from voicechat_core.nn.kv_cache import KVCache, append, attention_mask, new_kv_cache
from voicechat_core.nn.layout import Axes, CheckpointLayout
from voicechat_core.nn.linear import Linear
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


class PointwiseConv1d(CheckpointLayout, nn.Module):
    """Convolution of width 1 over ``[B, T, C]``: a matrix product on the channels."""

    CHECKPOINT_AXES: ClassVar[dict[str, Axes]] = {"weight": (0, 2, 1)}

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.weight = mx.zeros((channels_out, 1, channels_in))

    def __call__(self, x: mx.array) -> mx.array:
        return x.astype(self.weight.dtype) @ self.weight[:, 0].T


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

    def __call__(self, x: mx.array, before: mx.array, valid: mx.array | None = None) -> tuple[mx.array, mx.array]:
        """Frames ``[B, n, D]`` after the gated frames ``before`` -> output and the gated frames to keep."""
        gated = nn.glu(self.pointwise_conv1(x))
        if valid is not None:
            gated = mx.where(valid, gated, 0)
        rows = mx.concatenate([before, gated], axis=1)
        y = nn.silu(self.batch_norm(self.depthwise_conv(rows)))
        return self.pointwise_conv2(y), rows[:, x.shape[1] :]


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


class RelPositionAttention(nn.Module):
    """Attention to this frame and the ``context`` before it, with Transformer-XL's relative positions.

    Score of a key r frames back: ``((q + u) . k + (q + v) . p_r) / sqrt(head_dim)``.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        dim, self._heads = config.d_model, config.n_heads
        self._head_dim = dim // self._heads
        self._window = config.att_context_size[0] + 1
        self.linear_q = Linear(dim, dim, bias=False)
        self.linear_k = Linear(dim, dim, bias=False)
        self.linear_v = Linear(dim, dim, bias=False)
        self.linear_out = Linear(dim, dim, bias=False)
        self.linear_pos = Linear(dim, dim, bias=False)
        self.pos_bias_u = mx.zeros((self._heads, self._head_dim))
        self.pos_bias_v = mx.zeros((self._heads, self._head_dim))
        self._table: tuple[mx.array, mx.array] | None = None

    def new_state(self, batch: int = 1) -> KVCache:
        """No frame seen yet."""
        return new_kv_cache(batch, self._heads, self._head_dim, self.linear_k.dtype)

    def __call__(self, x: mx.array, state: KVCache) -> tuple[mx.array, KVCache]:
        """The next n frames ``[B, n, D]``, by blocks of queries, each with the keys that it can see."""
        q, k, v = (self._split(linear(x)) for linear in (self.linear_q, self.linear_k, self.linear_v))
        state, k, v = append(state, k, v, self._window)
        n, seen = q.shape[2], k.shape[2] - q.shape[2]
        parts = []
        for start in range(0, n, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, n)
            first = max(0, seen + start - (self._window - 1))
            keys, values = (y[:, :, first : seen + end] for y in (k, v))
            parts.append(self._attend(q[:, :, start:end], keys, values))
        y = mx.concatenate(parts, axis=2)
        return self.linear_out(y.swapaxes(1, 2).flatten(2)), state

    def _attend(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """The last n of m positions look at all m: ``[B, H, n, d]``."""
        n, m = q.shape[2], k.shape[2]
        scale = self._head_dim**-0.5
        # Column s of the product is distance window - 1 - s; skewed, it is the key at that distance from its row.
        # With fewer keys than the window holds, the missing ones are the oldest: the leftmost columns.
        by_distance = (q + self.pos_bias_v[:, None]) @ self._positions().astype(q.dtype).swapaxes(1, 2)
        scores = skew(by_distance)[..., -m:] * scale
        visible = attention_mask(n, m, self._window)
        if visible is not None:
            scores = mx.where(visible, scores, -mx.inf)
        return mx.fast.scaled_dot_product_attention(q + self.pos_bias_u[:, None], k, v, scale=scale, mask=scores)

    def _positions(self) -> mx.array:
        """``p_r`` for the distances window - 1 ... 0: ``[H, window, d]``.

        It depends on a weight alone, so it is computed once for each weight the module is given.
        """
        weight = self.linear_pos.weight
        if self._table is None or self._table[0] is not weight:
            distances = mx.arange(self._window - 1, -1, -1)
            table = self.linear_pos(sinusoids(distances, self._heads * self._head_dim))
            self._table = (weight, self._split(table[None])[0])
        return self._table[1]

    def _split(self, x: mx.array) -> mx.array:
        """``[B, T, D] -> [B, H, T, d]``."""
        return mx.unflatten(x, -1, (self._heads, self._head_dim)).swapaxes(1, 2)


@dataclass
class LayerState:
    """Keys and values of the frames still visible; the gated frames ``[B, width - 1, D]`` still under the filter."""

    attention: KVCache
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

    def __call__(self, x: mx.array, state: LayerState, valid: mx.array | None = None) -> tuple[mx.array, LayerState]:
        """The next n frames ``[B, n, D]``.

        ``valid`` ``[n, 1]`` marks frames that are not padding. Padding comes last, so no other frame can see it;
        NVIDIA lets it attend to nothing and hides it from its own convolution.
        """
        x = x + 0.5 * self.feed_forward1(self.norm_feed_forward1(x))
        attended, attention = self.self_attn(self.norm_self_att(x), state.attention)
        x = x + (attended if valid is None else mx.where(valid, attended, 0))
        convolved, conv = self.conv(self.norm_conv(x), state.conv, valid)
        x = x + convolved
        x = x + 0.5 * self.feed_forward2(self.norm_feed_forward2(x))
        return self.norm_out(x), LayerState(attention, conv)


@dataclass
class EncoderState:
    """What the encoder remembers between frames."""

    pre_encode: SubsamplingState
    layers: list[LayerState]


class ConformerEncoder(nn.Module):
    """Mel rows ``[B, T, features]`` -> frames ``[B, T', D]``; eight rows a frame, but the first frame has one."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.pre_encode = ConvSubsampling(config)
        self.layers = [ConformerLayer(config) for _ in range(config.n_layers)]

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
        outputs = []
        for layer in self.layers:
            x, _ = layer(x, layer.new_state(x.shape[0]), valid)
            outputs.append(x)
        return outputs

    def new_state(self, batch: int = 1) -> EncoderState:
        """No row seen yet."""
        return EncoderState(self.pre_encode.new_state(batch), [layer.new_state(batch) for layer in self.layers])

    def step(self, mel: mx.array, state: EncoderState) -> tuple[mx.array, EncoderState]:
        """The next n frames, of ``1 + 8 (n - 1)`` rows in the first step and of ``8 n`` in every later one.

        Raises ``InputError`` for any other number of rows.
        """
        x, pre_encode = self.pre_encode.step(mel, state.pre_encode)
        layers = []
        for layer, before in zip(self.layers, state.layers, strict=True):
            x, after = layer(x, before)
            layers.append(after)
        return x, EncoderState(pre_encode, layers)
