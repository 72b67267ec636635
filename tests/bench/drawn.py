"""A checkpoint's tensors drawn on the device instead of read from files: true sizes without 22 GB to write.

Names, axes and formats are those of files, and nothing is computed before it is asked for, as with files. Each caller
draws its own, with the same numbers.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from voicechat_core.checkpoint import checkpoint_tensors
from voicechat_core.config import VoiceChatConfig
from voicechat_core.convert import QUANTIZED, QUANTIZED_PREFIX, stored_as
from voicechat_core.model import Networks, char_table
from voicechat_core.nn.linear import matrices
from voicechat_core.quantization import Quantization
from voicechat_core.synthetic import preset_config, published
from voicechat_core.synthetic_text import write_tokenizer
from voicechat_core.synthetic_weights import initial
from voicechat_core.tokenizer import Tokenizer
from voicechat_core.weights import named_parameters

__all__ = ["FULL", "drawn_tensors", "write_description"]

# The sizes of the published 11B; what is not here is as in the preset "deep", which has its structure.
FULL: dict[str, Any] = {
    "text_config": {
        "vocab_size": 131072, "hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128,
        "n_groups": 8,
    },
    "audio_config": {
        "output_dim": 4480,
        "encoder": {"d_model": 1024, "n_heads": 8, "subsampling_conv_channels": 256},
        "decoder": {"pred_hidden": 640, "vocab_size": 1024},
        "joint": {"joint_hidden": 640, "encoder_hidden": 1024, "pred_hidden": 640, "num_classes": 1024},
    },
    "rnnt_blank_id": 1024,
    "rnnt_vocabulary": [f"▁{number}" for number in range(1024)],
    "tts_config": {
        "hidden_size": 1152, "intermediate_size": 4608, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 72, "latent_size": 512, "codebook_size": 1024,
        "character_encoder": {
            "hidden_size": 1152, "intermediate_size": 4608, "num_attention_heads": 16, "num_key_value_heads": 16,
            "head_dim": 72,
        },
        "mog_head": {"intermediate_size": 4608, "low_rank": 64, "num_predictions": 1024},
    },
    "codec_config": {"base_channels": 384, "latent_dim": 512, "codebook_size": 1024},
}  # fmt: skip
ON_THE_HOST = 1 << 16  # numbers of a parameter that NumPy draws, whatever they are to be
NO_LABEL = 50.0  # added to the blank's bias: what is heard in noise by random weights is nothing to compare


def write_description(directory: Path, preset: str) -> VoiceChatConfig:
    """Write a checkpoint but for its weights: config.json and a tokenizer with as many tokens as the config says."""
    data = published(preset_config("deep" if preset == "full" else preset))
    if preset == "full":
        _merge(data, FULL)
    (directory / "config.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    write_tokenizer(directory)
    _fill_vocabulary(directory / "tokenizer.json", data["text_config"]["vocab_size"])
    return VoiceChatConfig.from_file(directory / "config.json")


def _merge(data: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict):
            _merge(data[key], value)
        else:
            data[key] = value


def _fill_vocabulary(file: Path, size: int) -> None:
    """Give every id beyond the tokenizer's own a made-up word, which no text is cut into."""
    data = json.loads(file.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    vocab |= {f"word{number}": number for number in range(len(vocab), size)}
    file.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def drawn_tensors(
    config: VoiceChatConfig, tokenizer: Tokenizer, *, dtype: str, quantization: Quantization | None
) -> dict[str, mx.array]:
    """Every tensor of a checkpoint, not computed yet; ``dtype`` is of what is stored dense."""
    networks = _networks(config, tokenizer)
    packed = set() if quantization is None else set(_packed(networks, quantization.group_size))
    tensors: dict[str, mx.array] = {}
    for name, value in checkpoint_tensors(networks, config):
        if quantization is not None and name in packed:
            tensors.update(_pack(name.removesuffix(".weight"), value, quantization))
        else:
            tensors.update(stored_as([(name, value)], dtype))
    return tensors


def _packed(networks: Networks, group_size: int) -> Iterator[str]:
    """The weights that published builds pack, where groups fit."""
    for path, matrix in matrices(networks).items():
        if (path.startswith(QUANTIZED_PREFIX) or path in QUANTIZED) and matrix.shape[1] % group_size == 0:
            yield f"{path}.weight"


def _pack(path: str, weight: mx.array, how: Quantization) -> Iterator[tuple[str, mx.array]]:
    parts = mx.quantize(weight.astype(mx.float32), group_size=how.group_size, bits=how.bits)
    return zip((f"{path}.weight", f"{path}.scales", f"{path}.biases"), parts, strict=True)


def _networks(config: VoiceChatConfig, tokenizer: Tokenizer) -> Networks:
    """Parameters that are drawn when they are computed, and buffers that fit the vocabulary."""
    networks, levels = Networks(config), config.codec_config.num_quantizers
    floats = [(n, x.shape) for n, x in named_parameters(networks) if mx.issubdtype(x.dtype, mx.floating)]
    networks.load_weights([(name, _draw(name, shape, levels)) for name, shape in floats], strict=False)
    chars, tts = char_table(config, tokenizer), networks.tts_model
    flags = tts.tts_model.embed_subword
    flags.subword_flag_emb.is_continuation = mx.array(chars.is_continuation)
    flags.bos_eos_emb.special_flags = mx.array(chars.special_flags)
    tts.tts_model.rvq_embs = mx.stack(tts.audio_codec.prvq.mus_list)
    tts.codec_silence_tokens = mx.arange(levels, dtype=mx.int32)
    output = networks.stt_model.rnnt_joint.joint_net[-1]
    output.bias[-1] = output.bias[-1] + NO_LABEL
    return networks


def _draw(name: str, shape: tuple[int, ...], levels: int) -> mx.array:
    """A parameter by its own name: on the device where it is large and only scaled, else by NumPy."""
    how, seed = initial(name, shape, levels), zlib.crc32(name.encode())
    gain, twice = how(np.ones(2, np.float32)), how(np.full(2, 2, np.float32))
    is_scaled = gain[0] == gain[1] and np.array_equal(twice, 2 * gain)
    if is_scaled and np.prod(shape) > ON_THE_HOST:
        return float(gain[0]) * mx.random.normal(shape, key=mx.random.key(seed))
    draws = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, dtype=np.float32)
    return mx.array(how(draws).astype(np.float32))
