"""Small random checkpoints with true structure, from a seed: what tests and demos run on.

The weights are noise of sensible size, so the networks compute something in every range; nobody should expect sense
from what they say. Everything that is structure is real: names, shapes, integer buffers, tokenizer, files.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from voicechat_core.checkpoint import checkpoint_tensors
from voicechat_core.config import PUBLISHED_PATTERN, VoiceChatConfig
from voicechat_core.convert import check_stored, stored_as
from voicechat_core.errors import InputError
from voicechat_core.files import written_whole
from voicechat_core.model import char_table
from voicechat_core.synthetic_text import RNNT_PIECES, vocabulary_size, write_tokenizer
from voicechat_core.synthetic_weights import random_networks
from voicechat_core.tokenizer import Tokenizer
from voicechat_core.weights import SHARD_BYTES, write_tensors

__all__ = ["PRESETS", "preset_config", "published", "synthesize"]


def _sizes(
    llm: dict[str, Any],
    encoder: dict[str, Any],
    rnnt: int,
    tts: dict[str, Any],
    mog: dict[str, Any],
    codec: dict[str, Any],
) -> dict[str, Any]:
    """A config.json from the sizes that presets differ in; whatever must agree is written once here."""
    latent, codebook = tts["latent_size"], tts["codebook_size"]
    return {
        "model_type": "nemotron_voicechat",
        "architectures": ["NemotronVoiceChatForConditionalGeneration"],
        "text_config": {"model_type": "nemotron_h", "max_position_embeddings": 131072, **llm},
        "audio_config": {
            "output_dim": llm["hidden_size"],
            "encoder": encoder,
            "decoder": {"pred_hidden": rnnt, "pred_rnn_layers": 2, "vocab_size": len(RNNT_PIECES)},
            "joint": {
                "joint_hidden": rnnt,
                "encoder_hidden": encoder["d_model"],
                "pred_hidden": rnnt,
                "num_classes": len(RNNT_PIECES),
            },
        },
        "tts_config": {
            "guidance_scale": 0.2,
            "top_p": 0.95,
            "noise_scale": 0.001,
            "num_quantizers": 31,
            "audio_prompt_duration": 3.0,
            "character_encoder": {
                key: tts[key]
                for key in (
                    "hidden_size",
                    "intermediate_size",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "head_dim",
                )
            },
            "mog_head": mog,
            **tts,
        },
        "codec_config": {"latent_dim": latent, "codebook_size": codebook, "num_quantizers": 31, **codec},
        "rnnt_blank_id": len(RNNT_PIECES),
        "rnnt_vocabulary": list(RNNT_PIECES),
        "speaker": "Aria",
    }


def _tiny() -> dict[str, Any]:
    return _sizes(
        llm={
            "hidden_size": 96, "intermediate_size": 224, "hybrid_override_pattern": "M-M*-", "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16,
            "n_groups": 2,
        },
        encoder={"n_layers": 2, "d_model": 80, "n_heads": 4, "subsampling_conv_channels": 16},
        rnnt=48,
        tts={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 7, "num_attention_heads": 4,
            "num_key_value_heads": 4, "head_dim": 16, "sliding_window": 7500, "latent_size": 32, "codebook_size": 64,
        },
        mog={"intermediate_size": 128, "num_layers": 3, "low_rank": 8, "num_predictions": 32},
        codec={"base_channels": 16, "blocks_per_stage": 1},
    )  # fmt: skip


def _mid() -> dict[str, Any]:
    return _sizes(
        llm={
            "hidden_size": 1024, "intermediate_size": 6144, "hybrid_override_pattern": "M-M-M-M*-M-M-",
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 32,
            "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 8,
        },
        encoder={"n_layers": 8, "d_model": 512, "n_heads": 8, "subsampling_conv_channels": 256},
        rnnt=320,
        tts={
            "hidden_size": 576, "intermediate_size": 2304, "num_hidden_layers": 7, "num_attention_heads": 8,
            "num_key_value_heads": 8, "head_dim": 72, "sliding_window": 7500, "latent_size": 256, "codebook_size": 1024,
        },
        mog={"intermediate_size": 2304, "num_layers": 3, "low_rank": 32, "num_predictions": 1024},
        codec={"base_channels": 192, "blocks_per_stage": 3},
    )  # fmt: skip


def _deep() -> dict[str, Any]:
    return _sizes(
        llm={
            "hidden_size": 128, "intermediate_size": 256, "hybrid_override_pattern": PUBLISHED_PATTERN,
            "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32, "mamba_num_heads": 16,
            "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 8,
        },
        encoder={"n_layers": 24, "d_model": 64, "n_heads": 8, "subsampling_conv_channels": 16},
        rnnt=48,
        tts={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 28, "num_attention_heads": 4,
            "num_key_value_heads": 4, "head_dim": 16, "sliding_window": 7500, "latent_size": 32, "codebook_size": 64,
        },
        mog={"intermediate_size": 128, "num_layers": 3, "low_rank": 8, "num_predictions": 32},
        codec={"base_channels": 16, "blocks_per_stage": 3},
    )  # fmt: skip


PRESETS: dict[str, Callable[[], dict[str, Any]]] = {"tiny": _tiny, "mid": _mid, "deep": _deep}


def preset_config(preset: str) -> VoiceChatConfig:
    """The configuration of a preset.

    Raises:
        InputError: for a name that is none.
    """
    if preset not in PRESETS:
        raise InputError(f"preset is {preset!r}; there are {', '.join(PRESETS)}")
    data = PRESETS[preset]()
    data["text_config"]["vocab_size"] = vocabulary_size()
    return VoiceChatConfig.from_dict(data)


def synthesize(
    directory: Path, *, seed: int = 0, preset: str = "tiny", dtype: str = "float32", shard_bytes: int = SHARD_BYTES
) -> int:
    """Write a random checkpoint in the published layout; the same seed writes the same weights.

    ``dtype`` is what floats are stored in, as published builds are: float32 or bfloat16.

    Returns the number of numbers that are stored, unused buffers included.

    Raises:
        InputError: for an unknown preset or dtype, or a negative seed.
        CheckpointError: when the directory exists and is not empty, or cannot be written.
    """
    config = preset_config(preset)
    if seed < 0:
        raise InputError(f"seed is {seed}; at least 0 is needed")
    check_stored(dtype)
    with written_whole(directory) as scratch:
        return _write(scratch, config, seed, dtype, shard_bytes)


def _write(directory: Path, config: VoiceChatConfig, seed: int, dtype: str, shard_bytes: int) -> int:
    write_tokenizer(directory)
    tokenizer = Tokenizer.from_directory(directory, config.text_config.vocab_size)
    networks = random_networks(config, char_table(config, tokenizer), seed)
    text = json.dumps(published(config), indent=1, ensure_ascii=False)
    (directory / "config.json").write_text(text, encoding="utf-8")
    write_tensors(directory, stored_as(checkpoint_tensors(networks, config), dtype), shard_bytes)
    return sum(value.size for _, value in checkpoint_tensors(networks, config))


def published(config: VoiceChatConfig) -> dict[str, Any]:
    """The config in the published spelling: contexts are a list of choices."""
    data: dict[str, Any] = msgspec.to_builtins(config)
    encoder = data["audio_config"]["encoder"]
    encoder["att_context_size"] = [list(encoder["att_context_size"])]
    data["architectures"] = ["NemotronVoiceChatForConditionalGeneration"]
    data["text_config"]["num_hidden_layers"] = config.text_config.num_hidden_layers
    return data
