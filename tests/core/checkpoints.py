"""What tests do to checkpoints: change their tensors and their config, pack them, or write one that is all header."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from voicechat_core.config import VoiceChatConfig
from voicechat_core.model import Networks
from voicechat_core.nn.layout import checkpoint_axes, to_checkpoint
from voicechat_core.nn.linear import matrices
from voicechat_core.quantization import Quantization
from voicechat_core.weights import named_parameters, read_tensors, write_tensors

Tensors = dict[str, mx.array]
HEADS = ("stt_model.embed_tokens", "stt_model.lm_head", "stt_model.function_head")


def rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    """Apply ``change`` to the tensors of a directory."""
    tensors = read_tensors(path)
    mx.eval(tensors)  # before their files go
    change(tensors)
    for file in path.glob("model*.safetensors"):
        file.unlink()
    write_tensors(path, tensors.items())


def drop(*names: str) -> Callable[[Tensors], None]:
    """A change that takes tensors away."""

    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def quantized(path: str, weight: mx.array, bits: int) -> Tensors:
    """A matrix packed in groups of 32, by the names under which it is stored."""
    parts = mx.quantize(weight, group_size=32, bits=bits)
    return {f"{path}.{part}": value for part, value in zip(("weight", "scales", "biases"), parts, strict=True)}


def pack_mixed(path: Path) -> None:
    """Pack a checkpoint's language model to 4 bits and its embedding and heads to 8; all else becomes bfloat16."""

    def pack(tensors: Tensors) -> None:
        for name in list(tensors):
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and tensors[name].ndim == 2 and (module in HEADS or ".llm." in module):
                tensors.update(quantized(module, tensors[name], 8 if module in HEADS else 4))
            elif tensors[name].dtype == mx.float32:
                tensors[name] = tensors[name].astype(mx.bfloat16)

    rewrite(path, pack)
    edit_config(path, quantization={"group_size": 32, "bits": 4, **{head: {"bits": 8} for head in HEADS}})


def config_of(path: Path) -> dict[str, Any]:
    """The config.json of a directory."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def edit_config(path: Path, **changes: object) -> None:
    """Set keys of a directory's config.json."""
    (path / "config.json").write_text(json.dumps(config_of(path) | changes))


# ---- all header

PUBLISHED = {
    "model_type": "nemotron_voicechat",
    "text_config": {"model_type": "nemotron_h"},
    "tts_config": {"guidance_scale": 0.2, "top_p": 0.95, "noise_scale": 0.001},
    "source_revision": "c5d3b70183b6bb9d7553590e111b05685049751c",
}
# What a checkpoint stores and the networks have no parameter for, at the published size.
UNUSED = {
    "stt_model.perception.preprocessor.featurizer.fb": ("BF16", (1, 128, 257)),
    "stt_model.perception.preprocessor.featurizer.window": ("BF16", (400,)),
    **{f"tts_model.audio_codec.prvq._variance_list.{i}.variance": ("BF16", ()) for i in range(31)},
    "tts_model._control_codes": ("I64", (3,)),
}
BYTES = {"BF16": 2, "F32": 4, "I64": 8, "U32": 4}


def write_hollow(path: Path, config: dict[str, Any], bits: int) -> int:
    """A checkpoint of the published layout that is all header: its data is a hole in the file. Returns their bytes."""
    networks = Networks(VoiceChatConfig.from_dict(json.loads(json.dumps(config))))
    if bits:
        for name, matrix in matrices(networks).items():
            if name.startswith("stt_model.llm.") or name in HEADS:
                matrix.make_packed(Quantization(bits, 64))
        config = {**config, "quantization": {"group_size": 64, "bits": bits}}
    axes, entries = dict(checkpoint_axes(networks)), dict(UNUSED)
    for name, value in named_parameters(networks):
        entries[name] = (_stored_dtype(name, value), to_checkpoint(value, axes.get(name)).shape)
    header, end = {}, 0
    for name, (dtype, shape) in entries.items():
        start, end = end, end + BYTES[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (path / "config.json").write_text(json.dumps(config))
    return end


def _stored_dtype(name: str, value: mx.array) -> str:
    """What the published builds store a parameter in."""
    if mx.issubdtype(value.dtype, mx.floating):
        return "F32" if name.endswith((".scales", ".biases")) else "BF16"
    return "U32" if value.dtype == mx.uint32 else "I64"
