"""Nemotron-H: the hybrid trunk of Mamba-2, attention and MLP layers, one mixer a layer.

    x <- x + mixer_i(RMSNorm_i(x)) for every layer, then RMSNorm_f(x)

The pattern of the config names each layer's mixer: ``M`` Mamba-2, ``*`` attention, ``-`` MLP. Attention has no
positional encoding of any kind: the Mamba layers around it tell order. What comes in are embeddings, what goes
out is hidden; the token table and the two vocabulary heads stand beside this module, not in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import TextConfig
from voicechat_core.nn.heads import split_heads
from voicechat_core.nn.kv_cache import KVCache, append, grown, new_kv_cache, reserve, store
from voicechat_core.nn.linear import Joined, Linear
from voicechat_core.nn.mamba2 import Mamba2Mixer, MambaState
from voicechat_core.nn.norms import rms_norm

__all__ = ["MLP", "Attention", "Layer", "NemotronH", "NemotronHState", "RMSNorm", "Slot", "attend", "relu2"]

# Queries of one attention product. Where MLX has no fused kernel it holds the scores of a whole product,
# so this bounds them to heads * QUERY_BLOCK * keys floats instead of heads * queries * keys.
QUERY_BLOCK = 128

Slot = tuple[mx.array, mx.array]
"""Where a single position goes in the keys and values, and which of them it sees: ``kv_cache.Place.arrays``."""


@dataclass
class NemotronHState:
    """One state a layer: ``MambaState``, ``KVCache``, or None for an MLP."""

    layers: list[MambaState | KVCache | None]


class Mixer(Protocol):
    """What a layer asks of its mixer. The state is whatever ``new_state`` made."""

    def new_state(self, batch: int) -> Any:
        """The state before the first position."""

    def step(self, x: mx.array, state: Any, residual: mx.array | None = None) -> tuple[mx.array, Any]:
        """x ``[B, n, hidden]`` -> y like x, with ``residual`` added where there is one, and the next state."""


class RMSNorm(nn.Module):
    """RMS norm with float32 statistics and the result in the input's dtype, whatever the weight's."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dim,))
        self._eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """x ``[..., dim]`` -> the same shape and dtype."""
        return rms_norm(x, self.weight, self._eps, x.dtype)


def relu2(x: mx.array) -> mx.array:
    """max(0, x) squared."""
    return mx.square(mx.maximum(x, 0))


class MLP(nn.Module):
    """down(relu2(up(x))): no gate."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def new_state(self, batch: int = 1) -> None:
        """An MLP remembers nothing."""
        return

    def step(self, x: mx.array, state: None, residual: mx.array | None = None) -> tuple[mx.array, None]:
        """x ``[B, n, hidden]`` -> y like x, with ``residual`` added where there is one."""
        return _projected(self.down_proj, relu2(self.up_proj(x)), residual), state

    def __call__(self, x: mx.array) -> mx.array:
        """x ``[B, n, hidden]`` -> the same shape."""
        return self.step(x, None)[0]


def _projected(matrix: Linear, x: mx.array, residual: mx.array | None) -> mx.array:
    return matrix(x) if residual is None else matrix.add(x, residual)


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal grouped-query attention; query head h reads key head h // (Hq / Hk).

    Args:
        queries: the last n of m positions, ``[B, Hq, n, D]``.
        keys: all positions, ``[B, Hk, m, D]``.
        values: likewise.
        scale: factor of the scores.

    Returns:
        ``[B, Hq, n, D]``. Temporaries grow with m, not with n * m.
    """
    n, m = queries.shape[2], keys.shape[2]
    blocks = []
    for start in range(0, n, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, n)
        seen = m - n + end
        # "causal" aligns the last query with the last key, and stores no mask where a fused kernel exists.
        mask = "causal" if end - start > 1 else None
        blocks.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, start:end], keys[:, :, :seen], values[:, :, :seen], scale=scale, mask=mask
            )
        )
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


class Attention(nn.Module):
    """Causal grouped-query attention without positions."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        inner, kv, bias = self.heads * self.head_dim, self.kv_heads * self.head_dim, config.attention_bias
        self.q_proj = Linear(config.hidden_size, inner, bias=bias)
        self.k_proj = Linear(config.hidden_size, kv, bias=bias)
        self.v_proj = Linear(config.hidden_size, kv, bias=bias)
        self.o_proj = Linear(inner, config.hidden_size, bias=bias)
        self._joint = Joined(self.q_proj, self.k_proj, self.v_proj)
        self.scale = self.head_dim**-0.5

    def new_state(self, batch: int = 1) -> KVCache:
        """No keys yet."""
        return new_kv_cache(batch, self.kv_heads, self.head_dim, self.k_proj.dtype)

    def step(
        self, x: mx.array, state: KVCache, residual: mx.array | None = None, at: Slot | None = None
    ) -> tuple[mx.array, KVCache]:
        """x ``[B, n, hidden]``, consuming ``state`` -> y like x, ``residual`` added, and the longer cache.

        ``at`` are the arrays of the place that was reserved for a single position (see ``kv_cache``).
        """
        heads = split_heads(self._joint(x), self.heads + 2 * self.kv_heads)
        queries, keys, values = mx.split(heads, [self.heads, self.heads + self.kv_heads], axis=1)
        if at is None:
            state, keys, values = append(state, keys, values)
            y = attend(queries, keys, values, self.scale)
        else:
            state, mask = store(state, keys, values, at[0]), at[1]
            y = mx.fast.scaled_dot_product_attention(queries, state.keys, state.values, scale=self.scale, mask=mask)
        return _projected(self.o_proj, y.swapaxes(1, 2).flatten(-2), residual), state

    def __call__(self, x: mx.array) -> mx.array:
        """A whole sequence ``[B, n, hidden]`` -> the same shape."""
        return self.step(x, self.new_state(x.shape[0]))[0]


MIXERS: dict[str, Callable[[TextConfig], Mixer]] = {"M": Mamba2Mixer, "*": Attention, "-": MLP}


class Layer(nn.Module):
    """x + mixer(norm(x))."""

    def __init__(self, config: TextConfig, kind: str) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MIXERS[kind](config)

    def step(self, x: mx.array, state: Any, at: Slot | None = None) -> tuple[mx.array, Any]:
        """x ``[B, n, hidden]``, consuming ``state`` -> y like x, and the next state."""
        if at is not None and isinstance(self.mixer, Attention):
            return self.mixer.step(self.norm(x), state, x, at)
        return self.mixer.step(self.norm(x), state, x)


class NemotronH(nn.Module):
    """The trunk: embeddings ``[B, n, hidden]`` in, normalised hidden of the same shape out."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.layers = [Layer(config, kind) for kind in config.hybrid_override_pattern]
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)

    def new_state(self, batch: int = 1) -> NemotronHState:
        """The state before the first position, in the weights' precision; recurrent states are float32."""
        return NemotronHState([layer.mixer.new_state(batch) for layer in self.layers])

    def step(self, x: mx.array, state: NemotronHState) -> tuple[mx.array, NemotronHState]:
        """The next n >= 1 positions.

        Args:
            x: input embeddings ``[B, n, hidden]``.
            state: of the positions before; consumed.

        Returns:
            Hidden ``[B, n, hidden]`` after the final norm, in x's dtype, and the next state.
        """
        return self._run(x, state, None)

    def reserve(self, state: NemotronHState) -> Slot | None:
        """Make room for one position in every attention layer and count it: what ``decode`` needs to know of it.

        None for a trunk without attention. ``state`` changes, and is to be given to ``decode`` next.
        """
        places = [reserve(layer) for layer in state.layers if isinstance(layer, KVCache)]
        return places[0].arrays() if places else None

    def grown(self, state: NemotronHState) -> NemotronHState | None:
        """A state to compile ``decode`` for: of the capacity after the present one. None if it will keep its own."""
        larger = [grown(layer) if isinstance(layer, KVCache) else layer for layer in state.layers]
        caches = [layer for layer in larger if isinstance(layer, KVCache)]
        return NemotronHState(larger) if caches else None

    def decode(self, x: mx.array, state: NemotronHState, at: Slot | None) -> tuple[mx.array, NemotronHState]:
        """``step`` for the one position ``[B, 1, hidden]`` that was reserved: arrays only, of shapes that stay."""
        return self._run(x, state, at)

    def _run(self, x: mx.array, state: NemotronHState, at: Slot | None) -> tuple[mx.array, NemotronHState]:
        after = []
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x, layer_state = layer.step(x, layer_state, at)
            after.append(layer_state)
        return self.norm_f(x), NemotronHState(after)

    def layer_outputs(self, x: mx.array) -> list[mx.array]:
        """The residual stream ``[B, n, hidden]`` after each layer of a whole sequence, before the final norm."""
        outputs = []
        for layer, layer_state in zip(self.layers, self.new_state(x.shape[0]).layers, strict=True):
            x, _ = layer.step(x, layer_state)
            outputs.append(x)
        return outputs

    def __call__(self, x: mx.array) -> mx.array:
        """A whole sequence of embeddings -> hidden after the final norm, both ``[B, n, hidden]``."""
        return self.step(x, self.new_state(x.shape[0]))[0]
