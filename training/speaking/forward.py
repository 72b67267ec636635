"""The speech decoder over whole rows, teacher-forced: the project's own modules in an order with few kernels.

It gives the hidden states that stepping gives (tested): the voice prompt is a part of every row, the conditioning
vectors of all ids are computed once a step, and lookups that need a gradient are products with one-hot rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.speaking.rows import Rows
from training.speaking.tables import Tables
from voicechat_core.config import VoiceChatConfig
from voicechat_core.nn.char_table import CharTable
from voicechat_core.nn.ear_tts import EarTTS
from voicechat_core.nn.gemma import Attention
from voicechat_core.nn.heads import merge_heads

__all__ = ["Constants", "heard_sums", "hidden_states", "prompt_latents", "subword_table", "sums_at"]

UNSPELT, HIDDEN = -1, -2  # stand in place of ids: a PAD of which only the flags count, and no text at all


@dataclass(frozen=True)
class Constants:
    """What no gradient reaches: the ids that occur, their spelling, and the voice prompt's sums of code vectors.

    ``used`` ``[U]`` are the ids, PAD, BOS and EOS among them. ``spelling`` ``[U, C, characters]`` is one-hot, zero
    beyond a token's end; ``inside`` ``[U, C]`` says where it is. ``continues`` ``[U, 2]`` and ``special`` ``[U, 3]``
    are the one-hot flags. ``prompt`` ``[P, L]`` are the speaker's frames, ``silence`` ``[1, L]`` the codec's.
    """

    used: mx.array
    spelling: mx.array
    inside: mx.array
    lengths: mx.array  # [U, 1] float32, at least 1
    continues: mx.array
    special: mx.array
    prompt: mx.array
    silence: mx.array
    pad: int
    bos: int
    eos: int

    @classmethod
    def build(
        cls,
        config: VoiceChatConfig,
        chars: CharTable,
        used: Iterable[int],
        prompt: NDArray[np.float32],
        silence: mx.array,
    ) -> Self:
        """From the characters of the ids ``used``, the speaker's frames ``[P, L]`` and the silent frame ``[L]``."""
        ids = np.array(sorted({config.pad_token_id, config.bos_token_id, config.eos_token_id, *used}))
        characters, lengths = chars.rows(ids)
        inside = np.arange(characters.shape[1]) < lengths[:, None]
        spelling = np.eye(config.tts_config.character_encoder.char_vocab_size, dtype=np.float32)[characters]
        return cls(
            used=mx.array(ids.astype(np.int32)),
            spelling=mx.array(spelling * inside[..., None]),
            inside=mx.array(inside),
            lengths=mx.array(np.maximum(lengths, 1).astype(np.float32)[:, None]),
            continues=mx.array(np.eye(2, dtype=np.float32)[chars.is_continuation[ids]]),
            special=mx.array(np.eye(3, dtype=np.float32)[chars.special_flags[ids]]),
            prompt=mx.array(prompt),
            silence=silence.reshape(1, -1),
            pad=config.pad_token_id,
            bos=config.bos_token_id,
            eos=config.eos_token_id,
        )

    @property
    def ids(self) -> tuple[int, int, int]:
        """PAD, BOS and EOS."""
        return self.pad, self.bos, self.eos


def subword_table(tts: EarTTS, constants: Constants) -> tuple[mx.array, mx.array]:
    """The conditioning vector of every used id ``[U, H]``, and the flags alone: that of one that is not spelt."""
    encoder = tts.embed_subword
    embedded = constants.spelling @ encoder.embed_tokens.weight
    encoded = encoder.backbone.encoder(embedded, constants.inside)
    total = mx.where(constants.inside[..., None], encoded, 0).sum(axis=1)
    flags = constants.continues @ encoder.subword_flag_emb.cont_emb.weight
    flags = flags + constants.special @ encoder.bos_eos_emb.special_emb.weight
    spelt = encoder.proj_embedding(total / constants.lengths)
    return spelt.astype(mx.float32) + flags, flags


def prompt_latents(tts: EarTTS, constants: Constants) -> mx.array:
    """The speaker's latents ``[1, P, H]``, which the checkpoint stores."""
    latents: mx.array = tts.embed_code(constants.prompt[None]) @ tts.audio_prompt_projection_W
    return latents


def _text_branch(tts: EarTTS, rows: Rows, constants: Constants) -> mx.array:
    """``[B, P + T, H]``: the voice prompt's PADs, spelt at the last of them only, its EOS, then the rows' ids."""
    table, flags = subword_table(tts, constants)
    is_pad = (constants.used == constants.pad).astype(mx.float32)
    table = mx.concatenate([table, is_pad[None] @ flags, tts.null_emb[None]])
    keys = mx.concatenate([constants.used, mx.array([UNSPELT, HIDDEN])])
    opening = mx.array([UNSPELT] * (constants.prompt.shape[0] - 2) + [constants.pad, constants.eos])
    ids = mx.concatenate([mx.broadcast_to(opening, (rows.ids.shape[0], len(opening))), rows.ids], axis=1)
    ids = mx.where(rows.unconditional[:, None], HIDDEN, ids)
    return (ids[..., None] == keys).astype(mx.float32) @ table


def _audio_branch(tts: EarTTS, heard: mx.array, constants: Constants) -> mx.array:
    """``[B, P + T, H]`` from the sums ``[B, T, L]`` that the history gives."""
    latents = prompt_latents(tts, constants)[:, :-1]
    last = tts.embed_code(constants.silence[None]) + tts.bos_emb
    opening = mx.concatenate([latents, last], axis=1)
    opening = mx.broadcast_to(opening, (heard.shape[0], *opening.shape[1:]))
    return mx.concatenate([opening, tts.embed_code(heard).astype(opening.dtype)], axis=1)


def hidden_states(tts: EarTTS, rows: Rows, heard: mx.array, constants: Constants, *, fused: bool = False) -> mx.array:
    """The backbone's output at every step of the rows, ``[B, T, H]``; ``heard`` ``[B, T, L]`` is the history's sums."""
    audio = _audio_branch(tts, heard, constants)
    x = tts.gated_fusion_audio_text(audio, _text_branch(tts, rows, constants))
    for layer in tts.backbone.layers:
        x = x + layer.post_attention_layernorm(attend(layer.self_attn, layer.input_layernorm(x), fused))
        x = x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
    return tts.backbone.norm(x)[:, constants.prompt.shape[0] :]


def attend(attention: Attention, x: mx.array, fused: bool) -> mx.array:
    """A layer's attention over whole rows ``[B, T, H]``.

    ``fused`` is for CUDA: one kernel each way, where it is bfloat16, T is a multiple of 128 and no window is shorter.
    """
    queries = attention.rotate(attention.q_norm(_heads(attention.q_proj(x), attention.heads)).swapaxes(1, 2), 0)
    keys = attention.rotate(attention.k_norm(_heads(attention.k_proj(x), attention.kv_heads)).swapaxes(1, 2), 0)
    values = _heads(attention.v_proj(x), attention.kv_heads).swapaxes(1, 2)
    count, window = x.shape[1], attention.window
    if fused and (window is None or window >= count):
        y = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=attention.scale, mask="causal")
        return attention.o_proj(merge_heads(y))
    groups = queries.reshape(x.shape[0], attention.kv_heads, -1, count, attention.head_dim)
    scores = groups @ keys[:, :, None].swapaxes(-1, -2)
    scores = mx.where(_visible(count, window), scores.astype(mx.float32) * attention.scale, -mx.inf)
    y = mx.softmax(scores, axis=-1).astype(values.dtype) @ values[:, :, None]
    return attention.o_proj(merge_heads(y.reshape(queries.shape)))


def _heads(x: mx.array, heads: int) -> mx.array:
    """``[B, T, heads * D]`` -> ``[B, T, heads, D]``: as it lies, for the norm."""
    return x.reshape(*x.shape[:2], heads, -1)


def _visible(count: int, window: int | None) -> mx.array:
    distance = np.arange(count)[:, None] - np.arange(count)
    return mx.array((distance >= 0) & (distance < (window or count)))


def heard_sums(tables: Tables, rows: Rows) -> mx.array:
    """What the history sounds like, ``[B, T, L]``."""
    return sums_at(tables, rows.history, rows.heard)


def sums_at(tables: Tables, frames: mx.array, levels: mx.array) -> mx.array:
    """The sum of each frame's first ``levels`` code vectors: ``[...]`` and ``[...]`` -> ``[..., L]``."""
    flat = tables.sums.reshape(-1, tables.sums.shape[-1])
    return flat[frames * (tables.levels + 1) + levels]
