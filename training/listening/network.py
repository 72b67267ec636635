"""The listening half over whole windows, for training: the project's own modules, in a form of few kernels.

It reads the modules' weights and gives what they give (tests compare), with dropout on the residual branches, with
gradients that every backend has, and with a system prompt in front of each window. Nothing here is served.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from training.listening.convolutions import along_time, first_image, strided_image
from training.listening.scan import scan
from voicechat_core.model import SttModel
from voicechat_core.nn.conformer import ConformerEncoder, ConformerLayer, RelPositionAttention, sinusoids, skew
from voicechat_core.nn.heads import split_heads
from voicechat_core.nn.mamba2 import Mamba2Mixer, step_sizes
from voicechat_core.nn.mel import LogMel
from voicechat_core.nn.nemotron_h import MLP, Attention, NemotronH
from voicechat_core.nn.subsampling import ConvSubsampling

__all__ = ["Dropout", "encode", "fuse", "log_mel", "one_hot", "samples_of", "think"]

FRAME, HOP_AHEAD = 1280, 200  # samples of a frame, and of frame 0 alone
SCAN = 200  # positions of one product in the scan of Mamba-2, at most
BRANCHES = 4  # of a conformer layer
HIDDEN_SCORE = -1e30


Drop = Callable[[mx.array], mx.array]


class Dropout:
    """Zeroes a share of a branch and scales the rest; at rate 0 nothing.

    All branches of a network are one draw from ``mx.random``: a kernel each would cost more than the numbers do.
    """

    def __init__(self, rate: float = 0.0) -> None:
        self._rate = rate

    def branches(self, count: int, shape: Sequence[int]) -> Iterator[Drop]:
        """For each of ``count`` branches of a shape what drops numbers of it."""
        if not self._rate:
            return repeat(lambda x: x, count)
        drawn = mx.split(mx.random.uniform(shape=(count, *shape)), count)
        return (self._of(part.squeeze(0)) for part in drawn)

    def _of(self, drawn: mx.array) -> Drop:
        return lambda x: x * (drawn >= self._rate) * (1 / (1 - self._rate))


def samples_of(frames: int) -> int:
    """Samples that a window of so many frames reads."""
    return FRAME * (frames - 1) + HOP_AHEAD


def log_mel(mel: LogMel, samples: mx.array) -> mx.array:
    """Samples ``[B, samples_of(T)]`` from the start of a session -> mel rows ``[B, 8 T - 7, features]``."""
    return mel.step(samples, mel.new_state(samples.shape[0]))[0]


def encode(encoder: ConformerEncoder, mel: mx.array, drop: Dropout) -> mx.array:
    """Mel rows ``[B, 8 T - 7, features]`` -> encoder frames ``[B, T, D]``, as ``encoder.step`` from its new state."""
    x = _subsample(encoder.pre_encode, mel)
    drops = drop.branches(1 + BRANCHES * len(encoder.layers), x.shape)
    x = next(drops)(x)
    for layer in encoder.layers:
        x = _conformer(layer, x, drops)
    return x


def _subsample(net: ConvSubsampling, mel: mx.array) -> mx.array:
    first, _, wide, narrow, _, wide2, narrow2, _ = net.conv
    x = mx.maximum(first_image(mx.pad(mel, [(0, 0), (2, 0), (2, 1)]), first.weight) + first.bias, 0)
    for image, mix in ((wide, narrow), (wide2, narrow2)):
        x = strided_image(mx.pad(x, [(0, 0), (2, 0), (2, 1), (0, 0)]), image.weight) + image.bias
        x = mx.maximum(mix(x), 0)
    return net.project(x)


def _filtered(x: mx.array, weight: mx.array) -> mx.array:
    return cast(mx.array, along_time(x, weight))


def _conformer(layer: ConformerLayer, x: mx.array, drops: Iterator[Drop]) -> mx.array:
    x = x + 0.5 * next(drops)(layer.feed_forward1(layer.norm_feed_forward1(x)))
    x = x + next(drops)(_attend_near(layer.self_attn, layer.norm_self_att(x)))
    conv = layer.conv
    gated = nn.glu(conv.pointwise_conv1(layer.norm_conv(x)))
    weight = conv.depthwise_conv.weight
    gated = mx.pad(gated, [(0, 0), (weight.shape[1] - 1, 0), (0, 0)])
    x = x + next(drops)(conv.pointwise_conv2(nn.silu(conv.batch_norm(_filtered(gated, weight)))))
    x = x + 0.5 * next(drops)(layer.feed_forward2(layer.norm_feed_forward2(x)))
    y: mx.array = layer.norm_out(x)
    return y


def _attend_near(attention: RelPositionAttention, x: mx.array) -> mx.array:
    """All frames at once: fewer and larger products than the served form's blocks."""
    frames, window, head_dim = x.shape[1], attention.window, attention.head_dim
    q, k, v = (
        split_heads(linear(x), attention.heads)
        for linear in (attention.linear_q, attention.linear_k, attention.linear_v)
    )
    table = sinusoids(mx.arange(window - 1, -1, -1), x.shape[2])
    positions = split_heads(attention.linear_pos(table)[None], attention.heads)[0]
    by_distance = (q + attention.pos_bias_v[:, None]) @ positions.swapaxes(1, 2)
    by_content = (q + attention.pos_bias_u[:, None]) @ k.swapaxes(2, 3)
    # Fewer frames than the window: the distances beyond them are the leftmost columns.
    by_distance = skew(by_distance)[..., -frames:]
    distance = mx.arange(frames)[:, None] - mx.arange(frames)
    scores = (by_content + by_distance) * head_dim**-0.5
    scores = mx.where((distance >= 0) & (distance < window), scores, HIDDEN_SCORE)
    y = mx.softmax(scores, axis=-1) @ v
    return attention.linear_out(y.swapaxes(1, 2).flatten(2))


def one_hot(ids: mx.array, size: int) -> mx.array:
    """``[...] -> [..., size]`` float32: as a product it is an embedding whose gradient is a product, too."""
    return (ids[..., None] == mx.arange(size)).astype(mx.float32)


def fuse(stt: SttModel, audio: mx.array, text: mx.array, function: mx.array, weight: float) -> mx.array:
    """The trunk's input: audio ``[B, n, H]`` and the ids of the position before on both channels ``[B, n]``."""
    table = stt.embed_tokens.weight
    size = table.shape[0]
    return audio + (one_hot(text, size) + weight * one_hot(function, size)) @ table


def think(trunk: NemotronH, x: mx.array, real: mx.array | None, drop: Dropout) -> mx.array:
    """The trunk over inputs ``[B, n, H]``: hidden of the same shape.

    ``real`` ``[B, n]`` marks positions that exist; the others, in front of shorter prompts, leave no trace.
    """
    mask = None if real is None else real[..., None].astype(mx.float32)
    for layer, dropped in zip(trunk.layers, drop.branches(len(trunk.layers), x.shape), strict=True):
        x = x + dropped(_mix(layer.mixer, layer.norm(x), mask))
        if mask is not None:
            x = x * mask
    return trunk.norm_f(x)


def _mix(mixer: object, x: mx.array, mask: mx.array | None) -> mx.array:
    if isinstance(mixer, Mamba2Mixer):
        return _scan(mixer, x, mask)
    if isinstance(mixer, Attention):
        return _attend(mixer, x, mask)
    assert isinstance(mixer, MLP)
    return mixer(x)


def _scan(mixer: Mamba2Mixer, x: mx.array, mask: mx.array | None) -> mx.array:
    c = mixer.config
    positions = x.shape[1]
    gate, mixed, dt = mx.split(mixer.in_proj(x), [c.mamba_dim, c.mamba_dim + c.conv_dim], axis=-1)
    mixed = mx.pad(mixed, [(0, 0), (c.conv_kernel - 1, 0), (0, 0)])
    inputs, b, c_out = mixer.split(nn.silu(_filtered(mixed, mixer.conv1d.weight) + mixer.conv1d.bias))
    delta = step_sizes(dt, mixer.dt_bias)
    if mask is not None:
        delta = delta * mask  # a step of size zero neither decays nor adds
    chunk = math.ceil(positions / math.ceil(positions / SCAN))
    y = scan(inputs, delta, -mx.exp(mixer.A_log), b, c_out, chunk)
    y = y + mixer.D[:, None] * inputs
    return mixer.out_proj(mixer.norm(y.flatten(-2), gate))


def _attend(attention: Attention, x: mx.array, mask: mx.array | None) -> mx.array:
    positions = x.shape[1]
    heads, kv_heads = attention.heads, attention.kv_heads
    q = split_heads(attention.q_proj(x), heads)
    k, v = (split_heads(proj(x), kv_heads) for proj in (attention.k_proj, attention.v_proj))
    # The queries of a key's heads one after the other: a product that broadcasts would be many small ones.
    q = mx.unflatten(q, 1, (kv_heads, -1)).flatten(2, 3)
    scores = mx.unflatten(q @ k.swapaxes(2, 3), 2, (-1, positions)) * attention.scale
    visible = mx.arange(positions)[:, None] >= mx.arange(positions)
    if mask is not None:
        visible = visible & (mask[:, None, None, None, :, 0] > 0)
    scores = mx.where(visible, scores, HIDDEN_SCORE)
    y = mx.unflatten(mx.softmax(scores, axis=-1).flatten(2, 3) @ v, 2, (-1, positions)).flatten(1, 2)
    return attention.o_proj(y.swapaxes(1, 2).flatten(-2))
