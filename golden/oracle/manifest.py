"""manifest.json: what a goldens folder holds, hashed, and what it was made with."""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import environment
from .recording import Tensors, stored
from .settings import BOS, EOS, PAD, Settings


def write_stages(folder: Path, stages: dict[str, Tensors], omit: list[str]) -> None:
    """One safetensors file a stage, without the tensors that match a pattern of ``omit``."""
    folder.mkdir(parents=True)
    left_out = re.compile("|".join(omit) or r"\b\B")  # which matches nothing
    for name, tensors in stages.items():
        kept = {key: stored(tensor) for key, tensor in tensors.items() if not left_out.fullmatch(f"{name}/{key}")}
        save_file(kept, folder / f"{name}.safetensors")


def write(folder: Path, settings: Settings, stages: dict[str, Tensors]) -> None:
    """Describe the finished ``folder``; ``stages`` are the tensors as computed."""
    chosen = {key: value for key, value in asdict(settings).items() if value not in ({}, [])}
    content = {
        "env": environment.describe(),
        "meta": {"settings": chosen, **{name: facts(stages[name]) for name in stages if "e2e" in name}},
        **named_checkpoint(settings),
        "files": checkpoint_files(settings.checkpoint_folder if settings.checkpoint else folder / "checkpoint"),
        "tensors": {
            f"{path.stem}/{name}": describe(tensor)
            for path in sorted((folder / "goldens").glob("*.safetensors"))
            for name, tensor in sorted(load_file(path).items())
        },
    }
    lines = [f" {json.dumps(key)}: {table(value)}" for key, value in content.items()]
    (folder / "manifest.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def named_checkpoint(settings: Settings) -> dict[str, Any]:
    """Which stored checkpoint this is of, and what makes the folder again when that has changed."""
    stored = settings.checkpoint
    return {"checkpoint": {key: stored[key] for key in ("name", "remake")}} if stored else {}


def checkpoint_files(folder: Path) -> dict[str, str]:
    """The hashes of what a checkpoint is loaded from: its notices are not."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    return {path.name: digest(path.read_bytes()) for path in paths}


def table(entries: dict[str, Any]) -> str:
    """A JSON object with one entry a line."""
    rows = [f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in entries.items()]
    return "{\n" + ",\n".join(rows) + "\n }"


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a folder."""
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Shape, type and hash of the little-endian bytes."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": kind, "sha256": digest(tensor.contiguous().numpy().tobytes())}


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def facts(clip: Tensors) -> dict[str, Any]:
    """What an end-to-end clip exercises, in positions of the timeline."""
    text, function = clip["gen_text_timeline"][0], clip["gen_function_timeline"][0]
    special = {"bos": BOS, "eos": EOS, "pad": PAD}
    at = {key: (text == token).nonzero().flatten().tolist() for key, token in special.items()}
    first = len(text) - clip["tokens_text"].shape[1]
    margins = {key: round(float(clip[f"{key}_margin"][0, first:].min()), 5) for key in ("text", "function")}
    margins["codes"] = round(float(clip["code_margin_from_t1"].min()), 6)
    return {
        "positions": len(text), "prompt_positions": first, "text": text.tolist(), "function": function.tolist(),
        "text_positions": at, "smallest_margins": margins, "transcript": clip["rnnt_tokens"].tolist(),
        "transcript_frames": clip["rnnt_frames"].tolist(), "audio_samples": clip["audio"].shape[-1],
    }  # fmt: skip
