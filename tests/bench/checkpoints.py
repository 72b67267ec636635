"""The checkpoint that both load: a synthetic one in some storage format, with a default prompt of some length."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.bench.prompts import prompt_of
from voicechat_core.config import VoiceChatConfig
from voicechat_core.convert import convert
from voicechat_core.quantization import Quantization
from voicechat_core.synthetic import synthesize
from voicechat_core.tokenizer import Tokenizer

__all__ = ["FORMATS", "GROUP_SIZE", "positions_in", "set_default_prompt", "write_checkpoint"]

GROUP_SIZE = 64  # as published
# What is stored: floats, and bits of the language model's matrices.
FORMATS: dict[str, tuple[str, int | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "8bit": ("bfloat16", 8),
    "4bit": ("bfloat16", 4),
}


def quantization_of(stored: str) -> Quantization | None:
    """How a format packs matrices."""
    bits = FORMATS[stored][1]
    return None if bits is None else Quantization(bits, GROUP_SIZE)


def write_checkpoint(folder: Path, preset: str, stored: str) -> Path:
    """A synthetic checkpoint below ``folder``."""
    dtype, dense, packed = FORMATS[stored][0], folder / "dense", folder / "packed"
    synthesize(dense, preset=preset, dtype=dtype)
    how = quantization_of(stored)
    if how is None:
        return dense
    convert(dense, packed, how)
    shutil.rmtree(dense)
    return packed


def positions_in(checkpoint: Path) -> Callable[[str], int]:
    """Counts the positions of a system prompt, as both put it on the timeline: its tokens, and one on either side."""
    config = VoiceChatConfig.from_file(checkpoint / "config.json")
    tokenizer = Tokenizer.from_directory(checkpoint, config.text_config.vocab_size)
    return lambda text: len(tokenizer.prompt_ids(text, config.bos_token_id, config.eos_token_id))


def set_default_prompt(checkpoint: Path, positions: int) -> None:
    """Give the checkpoint a prompt of its own, of so many positions."""
    file = checkpoint / "config.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    data["default_system_prompt"] = prompt_of(positions, positions_in(checkpoint), seed=0)
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
