"""A checkpoint folder in the published layout: PyTorch names and axes, and the runtime schema of config.json."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from . import nemo_config, published
from .settings import (
    AUDIO_PROMPT_SECONDS,
    BOS,
    EOS,
    FRAME_SECONDS,
    PAD,
    SILENCE,
    SOURCE_RATE_HZ,
    SPEAKER,
    TARGET_RATE_HZ,
    Settings,
)

TTS_KEYS = (*nemo_config.BACKBONE_KEYS, "latent_size", "num_quantizers", "codebook_size")
LLM_OWN = ("pattern", "chunk_size")  # settings that config.json has under another name, or not at all


def text_config(settings: Settings, vocab_size: int) -> dict[str, Any]:
    """The Nemotron-H trunk."""
    sizes = {key: value for key, value in settings.llm.items() if key not in LLM_OWN}
    return {
        "model_type": "nemotron_h", "vocab_size": vocab_size, "num_hidden_layers": len(settings.llm["pattern"]),
        "max_position_embeddings": 131072, "attention_bias": False, "mamba_proj_bias": False, "mlp_bias": False,
        "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
        "hybrid_override_pattern": settings.llm["pattern"], "time_step_limit": [0.0, float("inf")], **sizes,
    }  # fmt: skip


def audio_config(settings: Settings) -> dict[str, Any]:
    """Perception and the transcript branch."""
    rnnt, encoder = settings.rnnt, nemo_config.encoder(settings)
    hidden = {"pred_hidden": rnnt["pred_hidden"]}
    return {
        "preprocessor": nemo_config.preprocessor(settings),
        "encoder": encoder | {"att_context_size": [encoder["att_context_size"]]},
        "decoder": {
            **hidden, "pred_rnn_layers": rnnt["pred_rnn_layers"], "t_max": None, "dropout": 0.2,
            "vocab_size": rnnt["vocab_size"], "blank_as_pad": True,
        },
        "joint": {
            **hidden, "joint_hidden": rnnt["joint_hidden"], "activation": "relu", "dropout": 0.2,
            "encoder_hidden": settings.encoder["d_model"], "num_classes": rnnt["vocab_size"],
        },
        "output_dim": settings.llm["hidden_size"], "max_symbols": rnnt["max_symbols"],
    }  # fmt: skip


def tts_config(settings: Settings, n_characters: int) -> dict[str, Any]:
    """The speech decoder. One row of the character table is padding."""
    nemo = nemo_config.ear_tts(settings)
    switches = (
        "num_delay_speech_tokens", "exponent", "disable_eos_prediction", "use_gated_fusion_for_text_audio",
        "use_subword_flag_emb", "use_bos_eos_emb", "use_audio_prompt_frozen_projection",
    )  # fmt: skip
    characters = {"hidden_size": settings.tts["hidden_size"], "char_vocab_size": n_characters + 1}
    return {
        **{key: settings.tts[key] for key in TTS_KEYS},
        **{key: nemo[key] for key in switches},
        **{key: settings.tts[key] for key in nemo_config.BACKBONE_SHAPE if key in settings.tts},
        "character_encoder": characters | settings.character_encoder,
        "mog_head": nemo["mog_head_config"],
        **settings.sampling,
        "audio_prompt_duration": AUDIO_PROMPT_SECONDS,
    }


def codec_config(settings: Settings) -> dict[str, Any]:
    """The codec, under the runtime's names."""
    codec = nemo_config.codec(settings)
    return {"sample_rate": TARGET_RATE_HZ, **{ours: codec[theirs] for ours, theirs in published.CODEC_NAMES.items()}}


def runtime_config(settings: Settings, vocab_size: int, n_characters: int, vocabulary: list[str]) -> dict[str, Any]:
    """The whole of config.json."""
    return {
        "model_type": "nemotron_voicechat", "architectures": ["NemotronVoiceChatForConditionalGeneration"],
        "mlx_runtime_config_version": 2,
        "text_config": text_config(settings, vocab_size), "audio_config": audio_config(settings),
        "tts_config": tts_config(settings, n_characters), "codec_config": codec_config(settings),
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "silence_token_id": SILENCE,
        "rnnt_blank_id": settings.rnnt["vocab_size"], "rnnt_vocabulary": vocabulary,
        "input_sample_rate": SOURCE_RATE_HZ, "output_sample_rate": TARGET_RATE_HZ, "frame_duration": FRAME_SECONDS,
        "function_channel_weight": settings.function_channel_weight, "speaker": SPEAKER,
    }  # fmt: skip


def save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """config.json, one shard, and the index that names it."""
    write_json(folder / "config.json", config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(weights), "model.safetensors")}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: object) -> None:
    """Indented JSON; an infinite number is written as the bare token ``Infinity``, as published configs do."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
