"""NVIDIA's model with the weights of an existing checkpoint in the published layout.

16-bit floats are widened, packed matrices unpacked, and all arithmetic is float32 from there on.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file

from . import checkpoint, published
from .settings import SPEAKER

if TYPE_CHECKING:
    from .model import Oracle

# NVIDIA's front end computes these from the configuration; a checkpoint in 16 bits holds them rounded.
COMPUTED = re.compile(r"stt_model\.perception\.preprocessor\.featurizer\.")
PARTS = ("weight", "scales", "biases")
WORD_BITS = 32


def fill(oracle: "Oracle") -> None:
    """Load every tensor; what is missing, left over, of another shape, or not what NVIDIA's code derives is refused."""
    folder = oracle.settings.checkpoint_folder
    tensors = read(folder)
    refuse(folder, published.differences(published.read(folder), as_built(oracle)))
    speaker = tensors[f"tts_model.audio_prompt_latents.{SPEAKER}"]
    oracle.tts.audio_prompt_latents[SPEAKER] = torch.nn.Parameter(torch.zeros_like(speaker), requires_grad=False)
    own = oracle.model.state_dict()
    refuse(folder, (f"{name}: not a tensor of NVIDIA's model" for name in sorted(tensors.keys() - own.keys())))
    refuse(folder, derived_differently(own, tensors))
    kept = {name: tensor for name, tensor in own.items() if COMPUTED.match(name)}
    torch.nn.Module.load_state_dict(oracle.model, tensors | kept, strict=True)
    silence = oracle.tts.get_codec_silence_frame()
    if not torch.equal(silence, oracle.tts.codec_silence_tokens):
        refuse(folder, ["tts_model.codec_silence_tokens: NVIDIA's codec hears silence as other codes"])


def refuse(folder: Path, faults: Any) -> None:
    """End with the first fault, if there is one."""
    for fault in faults:
        raise SystemExit(f"{folder}: {fault}")


def as_built(oracle: "Oracle") -> dict[str, Any]:
    """The runtime configuration of the model that stands, the two transformers' keys as their own classes hold them."""
    tts, settings = oracle.tts.tts_model, oracle.settings
    characters = len(tts.embed_subword.char_vocab)
    config = checkpoint.runtime_config(settings, oracle.vocab_size, characters, oracle.rnnt_vocabulary)
    spoken, spelled = tts.backbone.config, tts.embed_subword.backbone.config.encoder
    bases = {kind: spoken.rope_parameters[f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")}
    config["tts_config"] |= {
        "num_iterations": oracle.tts._get_generation_config(True)["num_iter"],
        "sliding_window": spoken.sliding_window, "sliding_window_pattern": spoken._sliding_window_pattern,
        "rms_norm_eps": spoken.rms_norm_eps, "query_pre_attn_scalar": spoken.query_pre_attn_scalar,
        "rope_global_base_freq": bases["full"], "rope_local_base_freq": bases["sliding"],
    }  # fmt: skip
    config["tts_config"]["character_encoder"] |= {
        "rms_norm_eps": spelled.rms_norm_eps, "query_pre_attn_scalar": spelled.query_pre_attn_scalar,
        "attn_logit_softcapping": spelled.attn_logit_softcapping, "rope_base": spelled.rope_parameters["rope_theta"],
    }  # fmt: skip
    return config


def derived_differently(own: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> Any:
    """Integer buffers that NVIDIA's constructor makes of the tokenizer and the sizes, where the checkpoint's differ."""
    for name, tensor in own.items():
        fixed = not tensor.is_floating_point() and not name.endswith("codec_silence_tokens")
        if fixed and name in tensors and not torch.equal(tensor, tensors[name]):
            yield f"{name}: not what NVIDIA's code makes of this tokenizer and these sizes"


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor by its dense name, floats as float32."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(path)
    how = published.read(folder).get("quantization") or {}
    for name in [name for name in tensors if name.endswith(".scales")]:
        module = name.removesuffix(".scales")
        parts = [tensors.pop(f"{module}.{part}") for part in PARTS]
        tensors[f"{module}.weight"] = unpacked(*parts, bits=how.get(module, how)["bits"])
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def unpacked(packed: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, bits: int) -> torch.Tensor:
    """``[outputs, inputs]`` float32: each group of a row is ``scale * q + bias``, in float32.

    ``q`` are unsigned integers of ``bits`` bits, the first in a word's lowest; 32 is a multiple of ``bits``.
    """
    if WORD_BITS % bits:
        raise SystemExit(f"matrices of {bits} bits: only those that divide {WORD_BITS} can be unpacked")
    shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
    q = (packed.numpy()[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    groups = torch.from_numpy(q.astype(np.float32)).reshape(*scales.shape, -1)
    return (scales.float()[..., None] * groups + biases.float()[..., None]).flatten(1)


def vocabulary(folder: Path) -> list[str]:
    """The transcript's pieces."""
    return published.read(folder)["rnnt_vocabulary"]
