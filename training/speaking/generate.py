"""The served sampler over many sentences at once: ``EarTTS.step`` for B sessions instead of one.

Rows are [all conditional; all unconditional], as ``MogHead`` takes them. The order inside a step is ``duplex``'s: the
first step hears nothing, an EOS hears silence, every other step the codes before it. One row gives the codes that the
project's own step gives (tested).
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.speaking.forward import Constants
from voicechat_core.nn import state as states
from voicechat_core.nn.char_table import CharTable
from voicechat_core.nn.ear_tts import EarTTS, EarTtsState
from voicechat_core.nn.gemma import Attention
from voicechat_core.nn.heads import merge_heads, split_heads
from voicechat_core.nn.kv_cache import KVCache, append
from voicechat_core.nn.sampler import Draws, quantize, square_norms

__all__ = ["generate", "sample", "start", "step"]

Codes = NDArray[np.int32]


@dataclass(frozen=True)
class Guided:
    """Whether the backbone has a second, unconditional row for each sentence."""

    tts: EarTTS

    def rows(self, x: mx.array) -> mx.array:
        """The same for both rows of each sentence: ``[B, ...]`` -> ``[rows * B, ...]``."""
        return mx.concatenate([x, x]) if self.tts.rows == 2 else x

    def conditions(self, x: mx.array) -> mx.array:
        """The text for the first, nothing for the second."""
        return mx.concatenate([x, mx.broadcast_to(self.tts.null_emb, x.shape)]) if self.tts.rows == 2 else x


def start(
    tts: EarTTS, latents: mx.array, silence: mx.array, constants: Constants, chars: CharTable, count: int
) -> EarTtsState:
    """The state of ``count`` sessions after the voice prompt; ``latents`` ``[1, P, H]``, ``silence`` ``[Q]``."""
    inputs = tts.prompt_inputs(latents, silence, constants.pad, constants.eos, chars)
    state = EarTtsState(tts.backbone.new_caches(tts.rows * count))
    audio, condition = (mx.repeat(x, count, axis=0) for x in (inputs.audio, inputs.condition))
    return _advance(tts, audio, condition, state)[1]


def _advance(tts: EarTTS, audio: mx.array, condition: mx.array, state: EarTtsState) -> tuple[mx.array, EarTtsState]:
    guided = Guided(tts)
    fused = tts.gated_fusion_audio_text(guided.rows(audio), guided.conditions(condition))
    if fused.shape[1] > 1:
        hidden, caches = tts.backbone.step(fused, state.caches)
        return hidden, EarTtsState(caches)
    caches = []
    for layer, cache in zip(tts.backbone.layers, state.caches, strict=True):
        y, cache = _attend(layer.self_attn, layer.input_layernorm(fused), cache)
        fused = fused + layer.post_attention_layernorm(y)
        fused = fused + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(fused)))
        caches.append(cache)
    return tts.backbone.norm(fused), EarTtsState(caches)


def _attend(attention: Attention, x: mx.array, cache: KVCache) -> tuple[mx.array, KVCache]:
    """``Attention`` at one position of many sessions."""
    queries, keys = (
        _rotated(attention, norm(split_heads(project(x), heads)), cache.position)
        for project, norm, heads in (
            (attention.q_proj, attention.q_norm, attention.heads),
            (attention.k_proj, attention.k_norm, attention.kv_heads),
        )
    )
    cache, keys, values = append(cache, keys, split_heads(attention.v_proj(x), attention.kv_heads), attention.window)
    y = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=attention.scale)
    return attention.o_proj(merge_heads(y)), cache


def _rotated(attention: Attention, x: mx.array, position: int) -> mx.array:
    """At one position, as the first of two: MLX 0.32's CUDA kernel for one refuses many rows of narrow heads."""
    return attention.rotate(mx.concatenate([x, x], axis=2), position)[:, :, :1]


def step(
    tts: EarTTS, condition: mx.array, codes: mx.array, draws: Draws, state: EarTtsState
) -> tuple[mx.array, EarTtsState]:
    """One frame of B sessions: conditions ``[B, 1, H]``, previous codes ``[B, 1, Q]`` -> codes of the same shape.

    ``draws`` are uniforms ``[passes, B, 1, N]`` and normals ``[passes, B, 1, L]``. The state is consumed.
    """
    hidden, state = _advance(tts, tts.embed_codes(codes), condition, state)
    return sample(tts, hidden, draws), state


def sample(tts: EarTTS, hidden: mx.array, draws: Draws) -> mx.array:
    """The codes ``[B, 1, Q]`` int32 of B frames from their hidden states ``[rows * B, 1, H]``."""
    guided, norms = Guided(tts), square_norms(tts.rvq_embs)
    depth = mx.zeros((hidden.shape[0] // tts.rows, 1, tts.config.latent_size))
    codes: list[mx.array] = []
    for (first, count), u, normals in zip(tts.passes, *draws, strict=True):
        mean, log_std = tts.mog_head(hidden + guided.rows(tts.embed_code(depth)), u)
        latent = mean + mx.exp(log_std) * normals * tts.config.noise_scale
        levels, depth = quantize(latent, depth, tts.rvq_embs, norms, first, count)
        codes += levels
    return mx.stack(codes, axis=-1).astype(mx.int32)


def random_draws(tts: EarTTS, count: int, key: mx.array) -> Draws:
    """The draws of one step of ``count`` sessions, each its own."""
    first, second = mx.random.split(key)
    passes, config = len(tts.passes), tts.config
    uniforms = mx.random.uniform(shape=(passes, count, 1, config.mog_head.num_predictions), key=first)
    return uniforms, mx.random.normal(shape=(passes, count, 1, config.latent_size), key=second)


def generate(
    tts: EarTTS,
    ids: NDArray[np.int32],
    latents: mx.array,
    silence: mx.array,
    constants: Constants,
    chars: CharTable,
    *,
    seed: int = 0,
) -> Codes:
    """Codes ``[B, T, Q]`` of B sessions that are given the text ids ``[B, T]`` step by step, free running."""
    count, steps = ids.shape
    table = tts.subword_table(chars)
    state = start(tts, latents, silence, constants, chars, count)
    codes = mx.full((count, 1, silence.size), tts.config.codebook_size, dtype=mx.int32)
    quiet, result = silence.reshape(1, 1, -1).astype(mx.int32), []
    for position, key in enumerate(mx.random.split(mx.random.key(seed), steps)):
        text = mx.array(ids[:, position : position + 1])
        previous = mx.where((text == constants.eos)[..., None], quiet, codes)
        codes, state = step(tts, table[text], previous, random_draws(tts, count, key), state)
        mx.eval(codes, [x for _, x in states.arrays(state)])
        result.append(codes)
    return np.array(mx.concatenate(result, axis=1))
