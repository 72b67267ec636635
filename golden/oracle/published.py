"""A published checkpoint's config.json as settings: what ``checkpoint`` writes, read back. No torch here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLING = ("guidance_scale", "top_p", "noise_scale")
TEXT_DERIVED = ("model_type", "vocab_size", "num_hidden_layers", "hybrid_override_pattern", "time_step_limit")
# The codec's keys in config.json, and NVIDIA's.
CODEC_NAMES = {
    "base_channels": "base_hidden_size", "channel_multipliers": "channel_mult", "downsample_rates": "rates",
    "blocks_per_stage": "num_blocks", "block_kernel_size": "kernel_size", "latent_dim": "latent_size",
    "n_fft": "n_fft", "hop_length": "hop_length", "num_quantizers": "num_quantizers",
    "codebook_size": "codebook_size",
}  # fmt: skip
# Keys that say nothing of the networks, and one constant of NVIDIA's sampler.
SILENT = {
    "architectures", "mlx_runtime_config_version", "default_system_prompt", "quantization", "quantization_config",
    "source_revision", "base_tokenizer_revision",
}  # fmt: skip


def read(folder: Path) -> dict[str, Any]:
    """config.json without its nulls, and the attention context as a list of one."""
    config = _without_nulls(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    encoder = config["audio_config"]["encoder"]
    if not isinstance(encoder["att_context_size"][0], list):
        encoder["att_context_size"] = [encoder["att_context_size"]]
    return config


def settings(folder: Path) -> dict[str, Any]:
    """The tables of a configuration that a checkpoint decides."""
    config = read(folder)
    text, audio, tts, codec = (config[f"{part}_config"] for part in ("text", "audio", "tts", "codec"))
    (context,) = audio["encoder"]["att_context_size"]
    return {
        "seed": 0,
        "function_channel_weight": config["function_channel_weight"],
        "tokenizer": {},
        "preprocessor": audio["preprocessor"],
        "encoder": audio["encoder"] | {"att_context_size": context},
        "rnnt": {
            **{key: audio["decoder"][key] for key in ("vocab_size", "pred_hidden", "pred_rnn_layers")},
            "joint_hidden": audio["joint"]["joint_hidden"], "max_symbols": audio["max_symbols"],
        },
        "llm": {"pattern": "".join(text["hybrid_override_pattern"])} | _but(text, *TEXT_DERIVED),
        "tts": {key: value for key, value in tts.items() if key not in SAMPLING and not isinstance(value, dict)},
        "character_encoder": _but(tts["character_encoder"], "char_vocab_size"),
        "mog_head": tts["mog_head"],
        "codec": {theirs: codec[ours] for ours, theirs in CODEC_NAMES.items()},
        "sampling": {key: tts[key] for key in SAMPLING},
    }  # fmt: skip


def differences(stored: dict[str, Any], built: dict[str, Any], where: str = "") -> Iterator[str]:
    """What a stored config says and NVIDIA's model, as it was built from it, is not: nothing may be lost on the way."""
    for key in sorted(stored.keys() - (set() if where else SILENT)):
        path, value = f"{where}{key}", stored[key]
        if key not in built:
            yield f"{path} is {value!r}; the generator knows no such key"
        elif isinstance(value, dict):
            yield from differences(value, built[key], f"{path}.")
        elif value != built[key]:
            yield f"{path} is {value!r}; NVIDIA's model was built with {built[key]!r}"


def _but(table: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
