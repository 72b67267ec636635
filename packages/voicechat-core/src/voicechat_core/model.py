"""The four networks as one object: weights and what follows from them, no session state.

The tree's attribute names are the checkpoint's: ``stt_model`` listens and thinks, ``tts_model`` speaks.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from voicechat_core.config import VoiceChatConfig
from voicechat_core.frame import FrameFunctions, FrameSteps
from voicechat_core.nn.char_table import CharTable
from voicechat_core.nn.codec import Codec
from voicechat_core.nn.ear_tts import EarTTS, EarTtsState
from voicechat_core.nn.linear import Embedding, Linear, lay_out, matrices
from voicechat_core.nn.nemotron_h import NemotronH
from voicechat_core.nn.perception import Perception
from voicechat_core.nn.rnnt import RnntDecoder, RnntJoint
from voicechat_core.nn.state import evaluate
from voicechat_core.tokenizer import RnntVocabulary, Tokenizer
from voicechat_core.weights import NUMBERS_AT_ONCE, named_parameters

__all__ = ["Networks", "SttModel", "TtsModel", "VoiceChatModel", "char_table"]

WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # by bytes of a number


class SttModel(nn.Module):
    """Perception, the transcript branch, and the language trunk with its two heads."""

    def __init__(self, config: VoiceChatConfig) -> None:
        super().__init__()
        text, audio = config.text_config, config.audio_config
        self.perception = Perception(audio)
        self.rnnt_decoder = RnntDecoder(audio.decoder)
        self.rnnt_joint = RnntJoint(audio.joint)
        self.embed_tokens = Embedding(text.vocab_size, text.hidden_size)
        self.llm = NemotronH(text)
        self.lm_head = Linear(text.hidden_size, text.vocab_size, bias=False)
        self.function_head = Linear(text.hidden_size, text.vocab_size, bias=False)


class TtsModel(nn.Module):
    """The speech decoder, the codec, and the one voice."""

    def __init__(self, config: VoiceChatConfig) -> None:
        super().__init__()
        tts = config.tts_config
        self.tts_model = EarTTS(tts, config.text_config.vocab_size)
        self.audio_codec = Codec(config.codec_config)
        self.codec_silence_tokens = mx.zeros((tts.num_quantizers,), mx.int32)
        self.audio_prompt_latents = {config.speaker: mx.zeros((1, config.prompt_frames, tts.hidden_size))}


class Networks(nn.Module):
    """Everything a checkpoint's tensors fill."""

    def __init__(self, config: VoiceChatConfig) -> None:
        super().__init__()
        self.stt_model = SttModel(config)
        self.tts_model = TtsModel(config)


def char_table(config: VoiceChatConfig, tokenizer: Tokenizer) -> CharTable:
    """The characters of every text token."""
    return CharTable.from_vocab(
        tokenizer.vocab(),
        vocab_size=config.text_config.vocab_size,
        char_vocab_size=config.tts_config.character_encoder.char_vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )


def _packed_results(networks: Networks) -> list[str]:
    """What packed matrices give, which no parameter tells: a precision may round it. Nothing for dense networks."""
    packed = {path: matrix for path, matrix in matrices(networks).items() if matrix.quantization is not None}
    return [f"{path} {matrix.dtype}" for path, matrix in packed.items()]


def _row_words(parameter: mx.array) -> Iterator[mx.array]:
    """A word ``[rows]`` uint32 of each row's bits, in which each bit and its place count; a block of rows at a time."""
    bits = parameter.reshape(-1, parameter.shape[-1] if parameter.ndim else 1).view(WORDS[parameter.dtype.size])
    places = mx.arange(bits.shape[1], dtype=mx.uint32) * 2654435769 + 1 | 1  # odd, so that no low bit is lost
    rows = max(1, NUMBERS_AT_ONCE // max(1, bits.shape[1]))
    for start in range(0, bits.shape[0], rows):
        block = bits[start : start + rows].astype(mx.uint32)
        # The sign, the highest bit, must reach the others: an even number of them would add up to nothing.
        yield ((block ^ (block >> 16)) * places).sum(axis=-1)


@dataclass(frozen=True)
class VoiceChatModel:
    """Networks, vocabularies, and the tables derived from both.

    ``subword_table`` is ``[vocabulary + 1, H]``: the speech decoder's conditioning vector of every text id, so
    that a frame looks its token up on the device and the host need not wait for it. ``compiled`` says whether the steps
    of a frame are to be compiled; it changes values by rounding only.
    """

    config: VoiceChatConfig
    networks: Networks
    tokenizer: Tokenizer
    rnnt_vocabulary: RnntVocabulary
    chars: CharTable
    subword_table: mx.array
    compiled: bool = False

    @classmethod
    def from_networks(
        cls,
        config: VoiceChatConfig,
        networks: Networks,
        tokenizer: Tokenizer,
        rnnt_vocabulary: RnntVocabulary,
        *,
        compiled: bool = False,
    ) -> "VoiceChatModel":
        """Derive the tables: one pass of the character encoder over the whole vocabulary.

        Raises:
            CheckpointError: when the tokenizer does not fit the config or the stored flags.
        """
        lay_out(networks)
        chars = char_table(config, tokenizer)
        networks.tts_model.tts_model.embed_subword.check(chars)
        table = networks.tts_model.tts_model.subword_table(chars)
        return cls(config, networks, tokenizer, rnnt_vocabulary, chars, table, compiled)

    @cached_property
    def steps(self) -> FrameSteps:
        """The four steps of a frame; ``compiled`` says in which form."""
        return FrameSteps(self.functions, compiled=self.compiled)

    @cached_property
    def functions(self) -> FrameFunctions:
        """The same as plain functions."""
        return FrameFunctions(self.config, self.networks, self.subword_table)

    @property
    def silence_codes(self) -> mx.array:
        """The codec's silence, ``[1, 1, Q]`` int32."""
        return self.networks.tts_model.codec_silence_tokens.astype(mx.int32)[None, None]

    @cached_property
    def fingerprint(self) -> str:
        """Tells checkpoints, builds and precisions apart: 16 hexadecimal digits, computed once.

        Of the config, both vocabularies, and every parameter's name, shape, format and bits: each row is summed up on
        the device, so that the host hashes one word a row.
        """
        digest = hashlib.sha256(repr(self.config).encode())
        digest.update("".join(_packed_results(self.networks)).encode())
        digest.update(repr((sorted(self.tokenizer.vocab().items()), self.rnnt_vocabulary.pieces)).encode())
        for name, parameter in named_parameters(self.networks):
            digest.update(f"{name} {parameter.shape} {parameter.dtype}".encode())
            for words in _row_words(parameter):
                digest.update(np.array(words).tobytes())
        return digest.hexdigest()[:16]

    def prompt_ids(self, system_prompt: str | None) -> list[int]:
        """Ids of the system prompt's positions: none for a blank prompt, the checkpoint's own prompt for None.

        Raises:
            InputError: for text that is not valid Unicode.
        """
        prompt = self.config.default_system_prompt if system_prompt is None else system_prompt
        return self.tokenizer.prompt_ids(prompt, self.config.bos_token_id, self.config.eos_token_id)

    def warm_up(self) -> EarTtsState:
        """The speech decoder's state after the voice prompt: a constant of the weights."""
        tts = self.networks.tts_model
        latents = tts.audio_prompt_latents[self.config.speaker]
        state: EarTtsState = tts.tts_model.warm_up(
            latents, tts.codec_silence_tokens, self.config.pad_token_id, self.config.eos_token_id, self.chars
        )
        evaluate(state)
        return state
