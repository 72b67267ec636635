"""What the speech decoder takes from Gemma: zero-centred norms, gated MLPs, and a causal decoder.

The decoder is Gemma 3's text model without its token embedding: its inputs enter layer 0 as they are, with no
factor of the square root of the width. Every sixth layer attends to all positions, the others to a sliding
window with a rope base of their own.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from voicechat_core.config import TtsConfig
from voicechat_core.nn.derived import Derived
from voicechat_core.nn.heads import merge_heads, split_heads
from voicechat_core.nn.kv_cache import (
    KVCache,
    Place,
    append,
    attention_mask,
    bounded,
    grown,
    new_kv_cache,
    reserve,
    rewound,
    store,
)
from voicechat_core.nn.linear import Joined, Linear

__all__ = ["At", "Decoder", "Derived", "GatedMLP", "RMSNorm", "rope_periods"]


@partial(mx.compile, shapeless=True)
def gelu(x: mx.array) -> mx.array:
    """The tanh form; the exact one differs by 5e-4. A cube by products: MLX's ``**`` takes most of its form's time."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def one_plus(weight: mx.array) -> mx.array:
    """The factor a zero-centred norm weight stands for, in float32."""
    return 1.0 + weight.astype(mx.float32)


class RMSNorm(nn.Module):
    """``x / rms(x) * (1 + weight)`` over the last axis, in float32, rounded once to the input's dtype."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = mx.zeros((width,))
        self.eps = eps
        self._factor = Derived(one_plus)

    def __call__(self, x: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
        """``[..., width]`` -> same shape, in x's dtype or in that of the sum it goes to, which then rounds alone."""
        return mx.fast.rms_norm(x.astype(mx.float32), self._factor(self.weight), self.eps).astype(dtype or x.dtype)


class GatedMLP(nn.Module):
    """``down(gelu(gate(x)) * up(x))``."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner, bias=False)
        self.up_proj = Linear(width, inner, bias=False)
        self.down_proj = Linear(inner, width, bias=False)
        self._joint = Joined(self.gate_proj, self.up_proj)

    def __call__(self, x: mx.array) -> mx.array:
        """``[..., width]`` -> ``[..., width]``."""
        gate, up = mx.split(self._joint(x), 2, axis=-1)
        return self.down_proj(gelu(gate) * up)


class At(NamedTuple):
    """One position of a kind of layer, as arrays: the slot of its keys ``[1]``, what its query sees
    ``[1, 1, 1, capacity]``, and the cosines and signed sines ``[2, head_dim / 2]`` of its rotation, for both halves.
    """

    slot: mx.array
    seen: mx.array
    cosines: mx.array
    sines: mx.array


def rope_periods(head_dim: int, base: float) -> mx.array:
    """Positions a radian of each rotated pair, ``[head_dim / 2]``: the reciprocals of Gemma's inverse frequencies.

    Rounded where PyTorch rounds. Frequencies that are off by one unit in the last place turn the angles by
    2e-4 after 7,000 positions, and a session is longer than that.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = np.float32(1) / np.power(np.float32(base), exponents)
    return mx.array(np.float32(1) / inverse)


def norm_factors(heads: int, kv_heads: int, queries: mx.array, keys: mx.array) -> mx.array:
    """Both norms' factors for the heads that are rotated, ``[2, query and key heads, 2, head_dim / 2]``: as they are,
    and with the halves swapped.
    """
    factors = mx.concatenate([mx.repeat(one_plus(w)[None], n, 0) for w, n in ((queries, heads), (keys, kv_heads))])
    halves = mx.unflatten(factors, -1, (2, -1))
    return mx.stack([halves, halves[:, ::-1]])


class Attention(nn.Module):
    """Causal grouped-query attention with normed queries and keys; ``window`` None means all positions."""

    def __init__(self, config: TtsConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        width, is_global = config.hidden_size, config.is_global(layer)
        self.q_proj = Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = Linear(self.heads * self.head_dim, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.scale = float(config.query_pre_attn_scalar) ** -0.5
        self.window = None if is_global else config.sliding_window
        base = config.rope_global_base_freq if is_global else config.rope_local_base_freq
        self._periods = rope_periods(self.head_dim, base)
        self._frequencies = 1 / np.array(self._periods)
        self._joint = Joined(self.q_proj, self.k_proj, self.v_proj)
        self._factors = Derived(partial(norm_factors, self.heads, self.kv_heads))

    def at(self, place: Place) -> At:
        """A reserved place, for this layer and all others of its kind."""
        angles = np.float32(place.position) * self._frequencies
        slot, seen = place.arrays()
        sines = np.sin(angles)
        return At(slot, seen, mx.array(np.stack([np.cos(angles)] * 2)), mx.array(np.stack([-sines, sines])))

    def decode(self, x: mx.array, cache: KVCache, at: At) -> tuple[mx.array, KVCache]:
        """One position ``[B, 1, width]`` at its reserved place: ``__call__``, of arrays only."""
        heads = mx.unflatten(self._joint(x), -1, (-1, self.head_dim))
        rotated, values = mx.split(heads, [self.heads + self.kv_heads], axis=2)
        rotated = self._normed_and_rotated(rotated, at)
        queries, keys = mx.split(rotated.swapaxes(1, 2), [self.heads], axis=1)
        cache = store(cache, keys, values.swapaxes(1, 2), at.slot)
        y = mx.fast.scaled_dot_product_attention(queries, cache.keys, cache.values, scale=self.scale, mask=at.seen)
        return self.o_proj(merge_heads(y)), cache

    def _normed_and_rotated(self, x: mx.array, at: At) -> mx.array:
        """Queries and keys ``[B, 1, heads, head_dim]`` normed, each by its own factor, and rotated: one expression.

        The pair of a value is as far away as half of a head: in two halves, swapped.
        """
        normal = mx.unflatten(mx.fast.rms_norm(x.astype(mx.float32), None, self.q_norm.eps), -1, (2, -1))
        factors = self._factors(self.q_norm.weight, self.k_norm.weight)
        rotated = (normal * factors[:1]) * at.cosines + (normal[..., ::-1, :] * factors[1:]) * at.sines
        result: mx.array = rotated.astype(x.dtype).flatten(-2)
        return result

    def __call__(self, x: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
        """New positions ``[B, n, width]`` after those of ``cache`` -> ``[B, n, width]`` and the cache with them."""
        heads = split_heads(self._joint(x), self.heads + 2 * self.kv_heads)
        queries, keys, values = mx.split(heads, [self.heads, self.heads + self.kv_heads], axis=1)
        queries = self.rotate(self.q_norm(queries), cache.position)
        keys = self.rotate(self.k_norm(keys), cache.position)
        cache, keys, values = append(cache, keys, values, self.window)
        mask = attention_mask(queries.shape[2], keys.shape[2], self.window)
        y = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return self.o_proj(merge_heads(y)), cache

    def rotate(self, x: mx.array, position: int) -> mx.array:
        """Heads ``[B, H, n, D]`` at ``position`` and after it, rotated: the same shape."""
        return mx.fast.rope(
            x, self.head_dim, traditional=False, base=None, scale=1.0, offset=position, freqs=self._periods
        )


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it and one before its sum into the stream."""

    def __init__(self, config: TtsConfig, layer: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.pre_feedforward_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, config.intermediate_size)
        self.post_feedforward_layernorm = RMSNorm(width, eps)

    def __call__(self, x: mx.array, cache: KVCache, at: At | None = None) -> tuple[mx.array, KVCache]:
        """``[B, n, width]`` -> ``[B, n, width]`` and the cache with n more positions; ``at`` as in ``decode``."""
        y = self.input_layernorm(x)
        y, cache = self.self_attn(y, cache) if at is None else self.self_attn.decode(y, cache, at)
        x = x + self.post_attention_layernorm(y, x.dtype)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)), x.dtype), cache


class Decoder(nn.Module):
    """The stack of layers and its closing norm. One code path: a whole sequence is a step of many positions."""

    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        self.layers = [DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Layers of one kind have the same window and rotation, so their caches have the same slots.
        found = list(dict.fromkeys(config.is_global(layer) for layer in range(config.num_hidden_layers)))
        self.kinds = tuple(found.index(config.is_global(layer)) for layer in range(config.num_hidden_layers))

    def new_caches(self, batch: int) -> list[KVCache]:
        """An empty cache for each layer."""
        attentions = [layer.self_attn for layer in self.layers]
        return [new_kv_cache(batch, a.kv_heads, a.head_dim, a.k_proj.dtype) for a in attentions]

    def bounded(self, caches: list[KVCache], pinned: int, newest: int) -> list[KVCache]:
        """The caches with a bounded memory (see ``kv_cache.bounded``), each under its layer's own window."""
        windows = [layer.self_attn.window for layer in self.layers]
        return [bounded(cache, pinned, newest, window) for cache, window in zip(caches, windows, strict=True)]

    def rewound(self, caches: list[KVCache], positions: int) -> list[KVCache] | None:
        """Copies of the caches as they were before the latest ``positions``; None where a window dropped something."""
        found = [rewound(cache, positions) for cache in caches]
        kept = [cache for cache in found if cache is not None]
        return kept if len(kept) == len(found) else None

    def step(self, x: mx.array, caches: list[KVCache]) -> tuple[mx.array, list[KVCache]]:
        """The next n positions ``[B, n, width]`` -> hidden states of the same shape, and the new caches."""
        return self._run(x, caches, [None] * len(caches))

    def reserve(self, caches: list[KVCache]) -> tuple[At, ...]:
        """Make room for one position in every cache and count it. What ``decode`` needs to know of it: one for each of
        the ``kinds`` of layers. The caches change, and are to be given to ``decode`` next.
        """
        attentions = [layer.self_attn for layer in self.layers]
        places = [reserve(cache, a.window) for cache, a in zip(caches, attentions, strict=True)]
        firsts = [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]
        return tuple(attentions[first].at(places[first]) for first in firsts)

    def grown(self, caches: list[KVCache]) -> list[KVCache] | None:
        """Caches to compile ``decode`` for: those of the smallest capacity as they will be when they are full. None if
        all will keep their own.
        """
        windows = [layer.self_attn.window for layer in self.layers]
        larger = [grown(cache, window) for cache, window in zip(caches, windows, strict=True)]
        capacities = [old.keys.shape[2] for old, new in zip(caches, larger, strict=True) if new is not None]
        if not capacities:
            return None
        return [
            new if new is not None and old.keys.shape[2] == min(capacities) else old
            for old, new in zip(caches, larger, strict=True)
        ]

    def decode(self, x: mx.array, caches: list[KVCache], at: tuple[At, ...]) -> tuple[mx.array, list[KVCache]]:
        """``step`` for the one position ``[B, 1, width]`` that was reserved: arrays only, of shapes that stay."""
        return self._run(x, caches, [At(*at[kind]) for kind in self.kinds])

    def _run(self, x: mx.array, caches: list[KVCache], at: Sequence[At | None]) -> tuple[mx.array, list[KVCache]]:
        result = []
        for layer, cache, place in zip(self.layers, caches, at, strict=True):
            x, cache = layer(x, cache, place)
            result.append(cache)
        return self.norm(x), result

    def __call__(self, x: mx.array) -> mx.array:
        """Positions 0 to T - 1, ``[B, T, width]`` -> ``[B, T, width]``. Memory grows with T squared."""
        return self.step(x, self.new_caches(x.shape[0]))[0]
