"""Tensors in safetensors files <-> parameters of modules: strict names, shapes and kinds.

Shards are read lazily: an array's bytes are fetched when it is computed, and its source is dropped as it goes, so
that a load never holds the model twice.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from voicechat_core.errors import CheckpointError
from voicechat_core.nn.layout import checkpoint_axes, to_checkpoint, to_memory

__all__ = ["assign", "listed", "named_parameters", "read_tensors", "write_tensors"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LISTED_AT_MOST = 20  # names in one message
EVALUATED_AT_ONCE = 64  # parameters; bounds what is in flight between file and memory
SHARD_BYTES = 4 << 30  # written a file, below what common file systems and hubs refuse


def listed(what: str, names: list[str]) -> str:
    """A count, what is counted, and the names (at most 20)."""
    more = f" and {len(names) - LISTED_AT_MOST} more" if len(names) > LISTED_AT_MOST else ""
    return f"{len(names)} {what}: {', '.join(names[:LISTED_AT_MOST])}{more}"


def read_tensors(directory: Path) -> dict[str, mx.array]:
    """Every tensor of a directory by name, lazily: from the index's shards, or from ``model*.safetensors``.

    Raises:
        CheckpointError: for a missing shard, an index that names a file outside the directory or a tensor that its
            shard does not hold, or a file that is not whole.
    """
    index = directory / INDEX
    weight_map = _read_index(index) if index.is_file() else None
    names = (
        set(weight_map.values()) if weight_map is not None else {p.name for p in directory.glob("model*.safetensors")}
    )
    if not names:
        raise CheckpointError(f"{directory}: no {INDEX} and no model*.safetensors")
    names |= _numbered(names)
    tensors: dict[str, mx.array] = {}
    for name in sorted(names):
        shard = _read_shard(directory / name)
        twice = sorted(tensors.keys() & shard.keys())
        if twice:
            raise CheckpointError(f"{directory / name}: {listed('tensors that another shard holds too', twice)}")
        tensors.update(shard)
    lost = sorted(set(weight_map or {}) - tensors.keys())
    if lost:
        raise CheckpointError(f"{index}: {listed('tensors listed that no shard holds', lost)}")
    return tensors


def _numbered(names: set[str]) -> set[str]:
    """Every shard that ``model-00001-of-00003.safetensors`` promises."""
    found = (re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", name) for name in names)
    return {f"{m[1]}-{i:05d}-of-{m[3]}.safetensors" for m in found if m for i in range(1, int(m[3]) + 1)}


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(key): str(value) for key, value in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index with a weight_map: {error!r}") from error
    for tensor, name in entries.items():
        # By name, not by resolving: hub caches link their files to a blob store next door.
        if PurePosixPath(name).name != name or name in ("", ".."):
            raise CheckpointError(f"{index}: {tensor} is said to be in {name!r}, outside the directory")
    return entries


def _read_shard(path: Path) -> dict[str, mx.array]:
    if not path.is_file():
        raise CheckpointError(f"{path}: this shard is missing")
    try:
        with safe_open(path, framework="numpy"):  # checks that the header fits the file's length
            pass
        tensors = mx.load(str(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
    return cast("dict[str, mx.array]", tensors)


def write_tensors(directory: Path, tensors: Iterable[tuple[str, mx.array]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors as ``model-0000x-of-0000y.safetensors`` and their index, or as one file if they fit."""
    shards: list[dict[str, mx.array]] = [{}]
    for name, value in tensors:
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + value.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = value
    count = len(shards)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        mx.save_safetensors(str(directory / file), shard, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(x.nbytes for shard in shards for x in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def named_parameters(module: nn.Module) -> list[tuple[str, mx.array]]:
    """Each parameter below ``module`` with its dotted name, in the tree's order."""
    return cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))


def assign(module: nn.Module, tensors: dict[str, mx.array], prefix: str = "", optional: tuple[str, ...] = ()) -> None:
    """Give each parameter of ``module`` its tensor under ``prefix``, taking it out of ``tensors``.

    Names that begin with one of ``optional`` may be absent; they keep what they have.

    Raises:
        CheckpointError: for a missing tensor, a wrong shape or a wrong kind of number, with both values; for a value
            that is not finite.
    """
    parameters, axes = named_parameters(module), dict(checkpoint_axes(module))
    absent = sorted(prefix + name for name, _ in parameters if prefix + name not in tensors)
    missing = [name for name in absent if not name.startswith(tuple(prefix + name for name in optional))]
    if missing:
        raise CheckpointError(listed("missing tensors", missing))
    present = [(name, value) for name, value in parameters if prefix + name in tensors]
    weights: list[tuple[str, mx.array]] = []
    for start in range(0, len(present), EVALUATED_AT_ONCE):
        chunk = [
            (name, _converted(prefix + name, tensors.pop(prefix + name), value, axes.get(name)))
            for name, value in present[start : start + EVALUATED_AT_ONCE]
        ]
        _compute(chunk, prefix)
        weights += chunk
    # All at once: MLX would fill the gaps of a list of arrays that is only partly given.
    module.load_weights(weights, strict=False)


def _compute(weights: list[tuple[str, mx.array]], prefix: str) -> None:
    """Read and convert, and look at every number once: what is not finite would spread without a word."""
    finite = [mx.isfinite(value).all() for _, value in weights]
    mx.eval([value for _, value in weights], finite)
    bad = [prefix + name for (name, _), good in zip(weights, finite, strict=True) if not good.item()]
    if bad:
        raise CheckpointError(listed("tensors with values that are not finite", bad))


def _converted(name: str, stored: mx.array, parameter: mx.array, axes: tuple[int, ...] | None) -> mx.array:
    value = to_memory(stored, parameter.shape, axes)
    if value is None:
        expected = to_checkpoint(mx.zeros(parameter.shape), axes).shape
        raise CheckpointError(f"{name} has shape {list(stored.shape)}; the config makes it {list(expected)}")
    is_float, wants_float = (mx.issubdtype(x.dtype, mx.floating) for x in (stored, parameter))
    if is_float != wants_float:
        kind = "floating" if wants_float else "integer"
        raise CheckpointError(f"{name} is {stored.dtype}; {kind} numbers are needed")
    return mx.contiguous(value.astype(mx.float32 if wants_float else mx.int32))
