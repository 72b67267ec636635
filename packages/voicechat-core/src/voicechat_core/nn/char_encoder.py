"""A text token's conditioning vector from its spelling: T5Gemma encoder, mean over the characters, two flags.

A token's vector depends on its id alone, so ``table`` computes all of them once and a generation step looks its
vector up on the device, where the id is.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from voicechat_core.config import CharacterEncoderConfig
from voicechat_core.errors import CheckpointError, InputError
from voicechat_core.nn.char_table import CharTable, Ids
from voicechat_core.nn.gemma import GatedMLP, RMSNorm, rope_periods
from voicechat_core.nn.heads import merge_heads, split_heads
from voicechat_core.nn.linear import Embedding, Linear

__all__ = ["CharAwareSubwordEncoder"]

# Characters encoded at once for the table: the widest array, 4096 x 4608 floats, is then 75 MB.
BLOCK_CHARACTERS = 4096


def soft_cap(scores: mx.array, cap: float) -> mx.array:
    """Scores pressed smoothly into (-cap, cap)."""
    return cap * mx.tanh(scores / cap)


class CharAttention(nn.Module):
    """Bidirectional attention over the characters of one token, with soft-capped scores."""

    def __init__(self, config: CharacterEncoderConfig) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, dim
        self.q_proj = Linear(width, self.heads * dim, bias=False)
        self.k_proj = Linear(width, self.kv_heads * dim, bias=False)
        self.v_proj = Linear(width, self.kv_heads * dim, bias=False)
        self.o_proj = Linear(self.heads * dim, width, bias=False)
        self.scale = float(config.query_pre_attn_scalar) ** -0.5
        self.cap = config.attn_logit_softcapping
        self._periods = rope_periods(dim, config.rope_base)

    def __call__(self, x: mx.array, inside: mx.array) -> mx.array:
        """``[N, L, width]`` with ``inside`` ``[N, L]`` True at characters -> ``[N, L, width]``."""
        queries = self._rotate(split_heads(self.q_proj(x), self.heads))
        keys = self._rotate(split_heads(self.k_proj(x), self.kv_heads))
        values = split_heads(self.v_proj(x), self.kv_heads)
        groups = queries.reshape(x.shape[0], self.kv_heads, -1, x.shape[1], self.head_dim)
        scores = (groups @ keys[:, :, None].swapaxes(-1, -2)).astype(mx.float32) * self.scale
        # The cap comes before the mask. A finite floor, so that a token without characters gives no NaN.
        scores = mx.where(inside[:, None, None, None], soft_cap(scores, self.cap), mx.finfo(mx.float32).min)
        y = mx.softmax(scores, axis=-1).astype(x.dtype) @ values[:, :, None]
        return self.o_proj(merge_heads(y.reshape(queries.shape)))

    def _rotate(self, x: mx.array) -> mx.array:
        # Position 0 turns nothing; and MLX 0.32's CUDA kernel for one position refuses many rows of narrow heads.
        if x.shape[2] == 1:
            return x
        return mx.fast.rope(x, self.head_dim, traditional=False, base=None, scale=1.0, offset=0, freqs=self._periods)


class CharLayer(nn.Module):
    """One encoder layer, normed before and after both of its parts."""

    def __init__(self, config: CharacterEncoderConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_self_attn_layernorm = RMSNorm(width, eps)
        self.self_attn = CharAttention(config)
        self.post_self_attn_layernorm = RMSNorm(width, eps)
        self.pre_feedforward_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, config.intermediate_size)
        self.post_feedforward_layernorm = RMSNorm(width, eps)

    def __call__(self, x: mx.array, inside: mx.array) -> mx.array:
        """``[N, L, width]`` -> ``[N, L, width]``."""
        x = x + self.post_self_attn_layernorm(self.self_attn(self.pre_self_attn_layernorm(x), inside))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class CharEncoder(nn.Module):
    """Scaled character embeddings -> encoded characters."""

    def __init__(self, config: CharacterEncoderConfig) -> None:
        super().__init__()
        self.layers = [CharLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: mx.array, inside: mx.array) -> mx.array:
        """``[N, L, width]`` -> ``[N, L, width]``. Unlike the decoder's, these inputs are scaled by sqrt(width)."""
        x = x.astype(mx.float32) * x.shape[-1] ** 0.5
        for layer in self.layers:
            x = layer(x, inside)
        return self.norm(x)


class CharBackbone(nn.Module):
    """The level between that the checkpoint's names have."""

    def __init__(self, config: CharacterEncoderConfig) -> None:
        super().__init__()
        self.encoder = CharEncoder(config)


class SubwordFlagEmbedding(nn.Module):
    """A vector for tokens that begin a word and one for those that continue it."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.cont_emb = Embedding(2, width)
        self.is_continuation = mx.zeros((vocab_size + 1,), mx.int64)
        self.pad_tensor = mx.array(vocab_size, mx.int64)

    def __call__(self, ids: mx.array) -> mx.array:
        """``[...]`` -> ``[..., width]``."""
        vectors: mx.array = self.cont_emb(self.is_continuation[mx.minimum(ids, self.pad_tensor)])
        return vectors


class BosEosEmbedding(nn.Module):
    """A vector for bos, one for eos, and a trained one for all others. Ids from V - 1 on share the last flag."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.special_emb = Embedding(3, width)
        self.special_flags = mx.zeros((vocab_size,), mx.int64)
        self.pad_tensor = mx.array(vocab_size - 1, mx.int64)

    def __call__(self, ids: mx.array) -> mx.array:
        """``[...]`` -> ``[..., width]``."""
        vectors: mx.array = self.special_emb(self.special_flags[mx.minimum(ids, self.pad_tensor)])
        return vectors


class CharAwareSubwordEncoder(nn.Module):
    """Token ids -> conditioning vectors (NeMo's class of this name, with both kinds of flags)."""

    def __init__(self, config: CharacterEncoderConfig, width: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.embed_tokens = Embedding(config.char_vocab_size, config.hidden_size)
        self.backbone = CharBackbone(config)
        self.proj_embedding = Linear(config.hidden_size, width, bias=False)
        self.subword_flag_emb = SubwordFlagEmbedding(config.hidden_size, vocab_size)
        self.bos_eos_emb = BosEosEmbedding(config.hidden_size, vocab_size)

    def __call__(self, ids: Ids, mask: npt.NDArray[np.bool_], chars: CharTable) -> mx.array:
        """Ids ``[B, T]`` on the host -> ``[B, T, width]``.

        Where ``mask`` is False the spelling counts as zero and the flags are still added; if it is False
        everywhere, NVIDIA's code skips the whole block, and the result is exactly zero.

        Raises:
            InputError: an id is negative or above the vocabulary size.
        """
        if ids.size and not 0 <= ids.min() <= ids.max() <= self.vocab_size:
            raise InputError(f"token ids {ids.min()} to {ids.max()} do not lie in 0 to {self.vocab_size}")
        vectors = mx.zeros((*ids.shape, self.proj_embedding.shape[0]), self.proj_embedding.dtype)
        if not mask.any():
            return vectors
        vectors[tuple(mx.array(i) for i in np.nonzero(mask))] = self.encode(ids[mask], chars)
        return self.with_flags(vectors, mx.array(ids))

    def encode(self, ids: Ids, chars: CharTable) -> mx.array:
        """The spelling of N tokens ``[N]`` -> ``[N, width]``; a token without characters gives zero."""
        characters, lengths = chars.rows(ids)
        inside = mx.array(np.arange(characters.shape[1]) < lengths[:, None])
        encoded = self.backbone.encoder(self.embed_tokens(mx.array(characters)), inside)
        total = mx.where(inside[..., None], encoded, 0).sum(axis=1)
        count = mx.array(np.maximum(lengths, 1)[:, None]).astype(total.dtype)
        return self.proj_embedding(total / count)

    def with_flags(self, vectors: mx.array, ids: mx.array) -> mx.array:
        """``[..., width]`` plus the flag rows of ``ids`` ``[...]``, summed in float32."""
        return vectors.astype(mx.float32) + self.subword_flag_emb(ids) + self.bos_eos_emb(ids)

    def table(self, chars: CharTable) -> mx.array:
        """The vector of every id, ``[vocab_size + 1, width]``, computed block by block."""
        result = mx.zeros((len(chars), self.proj_embedding.shape[0]), self.proj_embedding.dtype)
        for ids in chars.blocks(BLOCK_CHARACTERS):
            where = mx.array(ids)
            result[where] = self.with_flags(self.encode(ids, chars), where)
            mx.eval(result)
        return result

    def check(self, chars: CharTable) -> None:
        """Compare the stored flags with those of the tokenizer.

        Raises:
            CheckpointError: naming the buffer, the first id that differs and both values.
        """
        # A larger one would let an id read beyond the flags.
        for name, module, last in (
            ("subword_flag_emb", self.subword_flag_emb, 0),
            ("bos_eos_emb", self.bos_eos_emb, 1),
        ):
            found, end = int(np.array(module.pad_tensor)), self.vocab_size - last
            if found != end:
                raise CheckpointError(f"embed_subword.{name}.pad_tensor is {found}; vocab_size makes it {end}")
        stored = {
            "subword_flag_emb.is_continuation": (self.subword_flag_emb.is_continuation, chars.is_continuation),
            "bos_eos_emb.special_flags": (self.bos_eos_emb.special_flags, chars.special_flags),
        }
        for name, (buffer, expected) in stored.items():
            different = np.flatnonzero(np.array(buffer) != expected)
            if different.size:
                i = int(different[0])
                raise CheckpointError(
                    f"embed_subword.{name}[{i}] is {buffer[i].item()} but the tokenizer gives {expected[i]}"
                )
