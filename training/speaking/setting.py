"""What a run of the speech decoder's training stands on: networks, vocabulary, sentences and constants."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import mlx.core as mx
import numpy as np

from training.initial import initialise
from training.speaking.balance import presented, shares_of
from training.speaking.forward import Constants, prompt_latents
from training.speaking.pacing import VARIANTS
from training.speaking.tables import DELAY, Sentences, Tables, prompt_frames
from training.vocabulary import write_tokenizer
from voicechat_core.checkpoint import checkpoint_tensors
from voicechat_core.config import VoiceChatConfig
from voicechat_core.model import Networks, char_table
from voicechat_core.nn.char_table import CharTable
from voicechat_core.nn.ear_tts import EarTTS
from voicechat_core.precision import dtype_of
from voicechat_core.tokenizer import Tokenizer
from voicechat_core.weights import assign, named_parameters

__all__ = ["SHORT_STEPS", "Setting", "is_frozen", "is_half", "read_tokenizer"]

SHORT_STEPS = 91  # with the 37 of the voice prompt 128 positions, which attention kernels like
NAME = "tts_model.tts_model."
EXPORTED = (NAME, "tts_model.codec_silence_tokens", "tts_model.audio_prompt_latents.")


def read_tokenizer() -> Tokenizer:
    """The text vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return Tokenizer.from_directory(Path(folder))


def is_frozen(name: str, _: mx.array) -> bool:
    """The codebooks are the codec's, and the prompt's projection is never trained."""
    return name in ("rvq_embs", "audio_prompt_projection_W")


def is_half(name: str, value: mx.array) -> bool:
    """Whether a weight is rounded to bfloat16: where it is in a bfloat16 session, but for the mixture's own numbers."""
    if name.startswith("mog_head.") and not name.startswith("mog_head.mlp_stack."):
        return False
    matrix = name.replace("_proj.bias", "_proj.weight")  # a matrix's bias goes with it
    wide = mx.zeros((1, 1)) if matrix != name else value
    return dtype_of(f"{NAME}{matrix}", {f"{NAME}{matrix}": wide}, mx.bfloat16) == mx.bfloat16


@dataclass(frozen=True)
class Setting:
    """Everything that stays the same while weights change. ``tables`` hold all sentences, also those held out."""

    config: VoiceChatConfig
    networks: Networks
    tokenizer: Tokenizer
    chars: CharTable
    sentences: Sentences
    tables: Tables
    constants: Constants

    @classmethod
    def build(cls, config: VoiceChatConfig, sentences: Sentences, seed: int = 0) -> Self:
        """Untrained networks with the codec's codebooks, and the tables that rows are drawn from."""
        tokenizer = read_tokenizer()
        chars, networks = char_table(config, tokenizer), Networks(config)
        initialise(networks, seed)
        _fill(networks, chars, sentences)
        shares = shares_of(sentences.kinds, sentences.texts)
        weights = presented(sentences.texts, sentences.kinds, shares) * ~sentences.held
        tables = Tables.build(
            sentences, tokenizer.encode, weights, SHORT_STEPS - DELAY - 10,
            tokenizer.decode, config.pad_token_id, VARIANTS,
        )  # fmt: skip
        prompt = prompt_frames(sentences, config.prompt_frames)
        constants = Constants.build(config, chars, set(np.array(tables.tokens).tolist()), prompt, tables.sums[0, -1])
        return cls(config, networks, tokenizer, chars, sentences, tables, constants)

    @property
    def tts(self) -> EarTTS:
        """The network that is trained."""
        tts: EarTTS = self.networks.tts_model.tts_model
        return tts

    @property
    def silence(self) -> mx.array:
        """The codec's silence ``[Q]``."""
        return mx.array(self.sentences.silence)

    def export(self, path: Path) -> None:
        """Write the speech decoder as it stands, by the checkpoint's names and axes, with the voice's latents."""
        tts = self.networks.tts_model
        tts.codec_silence_tokens = self.silence
        tts.audio_prompt_latents = {self.config.speaker: prompt_latents(self.tts, self.constants)}
        chosen = {n: x for n, x in checkpoint_tensors(self.networks, self.config) if n.startswith(EXPORTED)}
        partial = path.with_name(f"partial.{path.name}")
        mx.save_safetensors(str(partial), chosen, {"format": "pt"})
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Read what ``export`` wrote into the networks."""
        tensors = mx.load(str(path))
        assert isinstance(tensors, dict)
        here = {name for name, _ in named_parameters(self.networks) if name.startswith(EXPORTED)}
        absent = tuple(name for name, _ in named_parameters(self.networks) if name not in here)
        assign(self.networks, tensors, optional=absent)


def _fill(networks: Networks, chars: CharTable, sentences: Sentences) -> None:
    """Buffers that follow from the vocabulary and the codec."""
    tts = networks.tts_model.tts_model
    shape = tts.rvq_embs.shape
    if sentences.mus.shape != shape:
        raise ValueError(f"the codebooks are {sentences.mus.shape}; the config makes them {shape}")
    flags = tts.embed_subword
    flags.subword_flag_emb.is_continuation = mx.array(chars.is_continuation.astype(np.int32))
    flags.bos_eos_emb.special_flags = mx.array(chars.special_flags.astype(np.int32))
    flags.subword_flag_emb.pad_tensor = flags.subword_flag_emb.pad_tensor.astype(mx.int32)
    flags.bos_eos_emb.pad_tensor = flags.bos_eos_emb.pad_tensor.astype(mx.int32)
    tts.rvq_embs = mx.array(sentences.mus)
    mx.eval([value for _, value in named_parameters(networks)])
