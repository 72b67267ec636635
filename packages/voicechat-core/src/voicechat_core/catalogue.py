"""What can be used: the family of models that runs here, its published checkpoints, and which are on this disk."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voicechat_core.builtin import SMALL, builtin
from voicechat_core.config_spellings import MODEL_TYPE
from voicechat_core.hub import HUB_NAME
from voicechat_core.hub_cache import (
    cache_directory,
    missing_files,
    quiet,
    read_config,
    size_text,
    snapshots_of,
    weight_files,
)

__all__ = ["Cached", "Published", "cached", "listing", "listing_text", "published"]

FAMILY = "NemotronLabs VoiceChat"
COLUMNS = 100


@dataclass(frozen=True)
class Published:
    """A checkpoint that can be had from the hub. ``bytes`` is about what a download takes."""

    name: str
    precision: str
    bytes: int


@dataclass(frozen=True)
class Cached:
    """A checkpoint in the hub's cache: its snapshot (None before there is one), and what it takes on disk in bytes."""

    name: str
    path: Path | None
    bytes: int
    complete: bool


def published() -> tuple[Published, ...]:
    """The checkpoints this software was made for, the largest first."""
    prefix = "mlx-community/NemotronLabs-VoiceChat-11B"
    return (
        Published(f"{prefix}-bf16", "bf16", 22_190_000_000),
        Published(f"{prefix}-8bit", "8-bit", 13_900_000_000),
        Published(f"{prefix}-4bit", "4-bit", 9_170_000_000),
    )


def cached() -> tuple[Cached, ...]:
    """The checkpoints of this model in the hub's cache, by name, without a network; whole or not.

    What the cache holds of a published one counts even before its ``config.json`` is there. What cannot be read is
    passed over.
    """
    with quiet():
        try:
            storages = sorted(cache_directory().glob("models--*--*"))
        except OSError:
            return ()
        found = [_cached(storage) for storage in storages]
    return tuple(entry for entry in found if entry is not None)


def _cached(storage: Path) -> Cached | None:
    name = storage.name.removeprefix("models--").replace("--", "/")
    if not HUB_NAME.fullmatch(name):
        return None
    snapshots = snapshots_of(storage)
    ours = [folder for folder in snapshots if read_config(folder).get("model_type") == MODEL_TYPE]
    if not ours and name not in {checkpoint.name for checkpoint in published()}:
        return None
    whole = [folder for folder in ours if not missing_files(name, folder) and weight_files(folder, None)]
    path = next(iter(whole or ours or snapshots), None)
    held = _bytes_on_disk(storage)
    return Cached(name, path, held, bool(whole)) if held or path else None


def _bytes_on_disk(storage: Path) -> int:
    """Every file once: snapshots link to blobs, and blobs may link to a store that repositories share."""
    sizes: dict[tuple[int, int], int] = {}
    for part in ("blobs", "snapshots"):
        for folder, _, files in os.walk(storage / part):
            for file in files:
                with suppress(OSError):  # a link to a blob that is gone
                    status = os.stat(Path(folder) / file)  # noqa: PTH116 - as os.walk, it is about the disk
                    sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def listing() -> dict[str, Any]:
    """What can be used, as one JSON object: each family with its checkpoints, first the one that comes with this
    package, then the published ones.

    ``bytes`` is about what a published checkpoint takes, and what another one takes on this disk; ``here`` is
    ``complete``, ``incomplete`` or ``no``; ``path`` is the cached snapshot or this package's folder, or null.
    """
    here = {entry.name: entry for entry in cached()}
    rows = [_own_row()]
    rows += [_row(known.name, known.precision, known.bytes, here.pop(known.name, None)) for known in published()]
    rows += [_row(entry.name, _precision(entry.path), entry.bytes, entry) for entry in here.values()]
    family = {"kind": "speech", "name": FAMILY, "model_type": MODEL_TYPE, "checkpoints": rows}
    return {"families": [family]}


def _own_row() -> dict[str, Any]:
    path = builtin(SMALL)
    weights = [] if path is None else [file.stat().st_size for file in path.glob("*.safetensors")]
    entry = Cached(SMALL, path, sum(weights), bool(weights))
    return _row(SMALL, _precision(path), entry.bytes, entry)


def _row(name: str, precision: str | None, size: int, entry: Cached | None) -> dict[str, Any]:
    here = "no" if entry is None else "complete" if entry.complete else "incomplete"
    path = None if entry is None or entry.path is None else str(entry.path)
    return {"name": name, "precision": precision, "bytes": size, "here": here, "path": path}


def _precision(folder: Path | None) -> str | None:
    """What a config says of its weights: the bits they are quantized to, else their type; None if it does not."""
    config = {} if folder is None else read_config(folder)
    quantization = config.get("quantization") or config.get("quantization_config")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    dtype = config.get("dtype") or config.get("torch_dtype")
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    return f"{bits}-bit" if isinstance(bits, int) else names.get(str(dtype))


def listing_text(listing: dict[str, Any]) -> str:
    """A ``listing`` as a table of at most 100 columns; a name that leaves no room for the rest has its own line."""
    return "\n".join(line for family in listing["families"] for line in _family_lines(family))


def _family_lines(family: dict[str, Any]) -> list[str]:
    rows = [("checkpoint", "precision", "size", "here")] + [
        (row["name"], row["precision"] or "unknown", size_text(row["bytes"]), row["here"])
        for row in family["checkpoints"]
    ]
    room = COLUMNS - len(_columns("", *("x" * 10,) * 3))
    width = max(len(row[0]) for row in rows if len(row[0]) <= room)
    lines = [f"{family['name']} ({family['kind']}, {family['model_type']})"]
    for name, *others in rows:
        lines += [f"  {name}"] if len(name) > room else []
        lines.append(_columns(("" if len(name) > room else name).ljust(width), *others))
    return lines


def _columns(name: str, precision: str, size: str, here: str) -> str:
    return f"  {name}  {precision:<9}  {size:>10}  {here}"
