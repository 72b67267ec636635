"""The whole model, built from NVIDIA's classes and filled: with random weights, or a stored checkpoint's."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nemo.collections.asr.modules.rnnt import RNNTDecoder, RNNTJoint
from nemo.collections.speechlm2.models.nemotron_voicechat import NemotronVoiceChat
from nemo.utils import logging as nemo_logging
from tokenizers import Tokenizer
from transformers import NemotronHConfig

from . import function_channel, nemo_config, signals, stored, tokenizer, weights
from .settings import BOS, EOS, PAD, SPEAKER, TARGET_RATE_HZ, Settings
from .transcript import centre_joint


@dataclass
class Oracle:
    """The model with everything a stage needs to run it."""

    settings: Settings
    model: Any
    tokenizer: Tokenizer
    rnnt_vocabulary: list[str]

    @property
    def stt(self) -> Any:
        """The listening half: perception, transcript branch, language model."""
        return self.model.stt_model

    @property
    def tts(self) -> Any:
        """The speaking half: EAR-TTS and codec."""
        return self.model.tts_model

    @property
    def vocab_size(self) -> int:
        """Text tokens, special ones included."""
        return self.tokenizer.get_vocab_size()

    def encode(self, wav: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoder output ``[1, frames, d_model]`` of ``[1, samples]`` and the length NVIDIA states for it."""
        _, length, encoded = self.stt.perception(
            input_signal=wav, input_signal_length=torch.tensor([wav.shape[1]]), return_encoder_emb=True
        )
        return encoded, length

    def weights(self) -> dict[str, torch.Tensor]:
        """Every parameter and persistent buffer, under the checkpoint's names."""
        return {name: tensor.detach().clone().contiguous() for name, tensor in self.model.state_dict().items()}


def build(settings: Settings, scratch: Path) -> Oracle:
    """Construct and fill; ``scratch`` receives the language model's folder."""
    quieten()
    torch.manual_seed(settings.seed)
    llm_folder = scratch / "NemotronSmall"
    pieces = tokenizer.prepare(settings, llm_folder)
    llm_config(settings, pieces.get_vocab_size()).save_pretrained(llm_folder)
    roles = tokenizer.roles(pieces)
    model = NemotronVoiceChat(nemo_config.whole(settings, roles, str(llm_folder), str(scratch / "logs")))
    oracle = Oracle(settings, model, pieces, transcript_vocabulary(settings))
    add_merged_branches(oracle)
    model.eval()
    set_step_size_floor(oracle.stt.llm, 0.0)
    fill = stored.fill if settings.checkpoint else draw
    fill(oracle)
    function_channel.install(oracle.stt)
    return oracle


def draw(oracle: Oracle) -> None:
    """Random weights, and what follows from them."""
    weights.fill(oracle.model, oracle.settings)
    finish_speech(oracle)
    centre_joint(oracle)


def quieten() -> None:
    """Construction is chatty; only errors are of interest."""
    logging.disable(logging.WARNING)
    nemo_logging.set_verbosity(nemo_logging.ERROR)


def llm_config(settings: Settings, vocab_size: int) -> NemotronHConfig:
    """transformers' configuration of the language model."""
    sizes = {key: value for key, value in settings.llm.items() if key != "pattern"}
    pattern = settings.llm["pattern"]
    return NemotronHConfig(
        vocab_size=vocab_size, hybrid_override_pattern=pattern, num_hidden_layers=len(pattern),
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, mamba_ssm_cache_dtype="float32", **sizes,
    )  # fmt: skip


def transcript_vocabulary(settings: Settings) -> list[str]:
    """The stored checkpoint's pieces; else SentencePiece-like ones, every third of which opens a word."""
    if settings.checkpoint:
        return stored.vocabulary(settings.checkpoint_folder)
    size = settings.rnnt["vocab_size"]
    return ["<unk>", *(f"▁w{i}" if i % 3 == 0 else f"p{i}" for i in range(1, size))]


def add_merged_branches(oracle: Oracle) -> None:
    """The modules the released checkpoint has beyond nemo_toolkit 3.0.0: the function head and the RNNT branch."""
    settings, rnnt = oracle.settings, oracle.settings.rnnt
    hidden = rnnt["pred_hidden"]
    oracle.stt.function_head = torch.nn.Linear(settings.llm["hidden_size"], oracle.vocab_size, bias=False)
    oracle.stt.rnnt_decoder = RNNTDecoder(
        prednet={"pred_hidden": hidden, "pred_rnn_layers": rnnt["pred_rnn_layers"], "dropout": 0.2},
        vocab_size=rnnt["vocab_size"],
        blank_as_pad=True,
    )
    widths = {"encoder_hidden": settings.encoder["d_model"], "joint_hidden": rnnt["joint_hidden"]}
    oracle.stt.rnnt_joint = RNNTJoint(
        jointnet={**widths, "pred_hidden": hidden, "activation": "relu", "dropout": 0.2},
        num_classes=rnnt["vocab_size"],
        vocabulary=oracle.rnnt_vocabulary,
        log_softmax=None,
    )


def set_step_size_floor(llm: torch.nn.Module, floor: float) -> None:
    """The lower limit of the Mamba step sizes.

    NVIDIA's kernels have none; transformers' fallback takes the constant 1e-3, which concerns initialisation only.
    """
    for module in llm.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (floor, float("inf"))


@torch.no_grad()
def finish_speech(oracle: Oracle) -> None:
    """What the speech half computes from its weights: shared codebooks, the silence frame, the cached speaker."""
    tts, settings = oracle.tts, oracle.settings
    tts.tts_model.set_rvq_embs(torch.stack([table.detach() for table in tts.audio_codec.prvq.mus_list]))
    tts.codec_silence_tokens = tts.get_codec_silence_frame()
    speaker = signals.speech_like(30000, TARGET_RATE_HZ, settings.inputs_for("speaker"))
    tts.set_audio_prompt_lantent(speaker, torch.tensor([speaker.shape[1]]), name=SPEAKER)
