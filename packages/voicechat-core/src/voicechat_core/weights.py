"""Tensors in safetensors files <-> parameters of modules: strict names, shapes and kinds.

Shards are read lazily: an array's bytes are fetched when it is computed, and its source is dropped as it goes, so
that a load never holds the model twice.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from voicechat_core.errors import CheckpointError
from voicechat_core.nn.layout import checkpoint_axes, to_checkpoint, to_memory
from voicechat_core.shards import INDEX, SINGLE, numbered

__all__ = [
    "NUMBERS_AT_ONCE",
    "assign",
    "is_finite",
    "listed",
    "mismatches",
    "mismatches_text",
    "named_parameters",
    "read_tensors",
    "readable_tensors",
    "write_tensors",
]

LISTED_AT_MOST = 20  # names in one message
NUMBERS_AT_ONCE = 1 << 22  # in flight between file and memory, unless one tensor has more: 16 MB in float32
SHARD_BYTES = 1 << 30  # written a file, and held until it is written
UNNAMED = "unnamed-{:05d}.safetensors"  # a shard, until it is known how many there are
MISSING = "missing"


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
    tensors, faults = readable_tensors(directory)
    if faults:
        raise CheckpointError(faults[0])
    return tensors


def readable_tensors(directory: Path) -> tuple[dict[str, mx.array], list[str]]:
    """Like ``read_tensors``, but what can be read, and all that is wrong with the files, as it is found."""
    tensors: dict[str, mx.array] = {}
    faults = list(_fill(tensors, directory))
    return tensors, faults


def _fill(tensors: dict[str, mx.array], directory: Path) -> Iterator[str]:
    """Put every readable shard's tensors into ``tensors``; yields what is wrong with the files, as it is found."""
    index, weight_map, held = directory / INDEX, None, dict[str, set[str]]()
    try:
        weight_map = _read_index(index) if index.exists() or index.is_symlink() else None
    except CheckpointError as error:
        yield str(error)
    names = (
        set(weight_map.values()) if weight_map is not None else {p.name for p in directory.glob("model*.safetensors")}
    )
    if not names:
        yield f"{directory}: no {INDEX} and no model*.safetensors"
    for name in sorted(names | numbered(names)):
        try:
            shard = _read_shard(directory / name)
        except CheckpointError as error:
            yield str(error)
            continue
        held[name] = set(shard)
        twice = sorted(tensors.keys() & shard.keys())
        if twice:
            yield f"{directory / name}: {listed('tensors that another shard holds too', twice)}"
        tensors.update(shard)
    elsewhere = sorted(name for name, file in (weight_map or {}).items() if name not in held.get(file, {name}))
    lost = [name for name in elsewhere if name not in tensors]
    if lost:
        yield f"{index}: {listed('tensors listed that no shard holds', lost)}"
    elif elsewhere:
        yield f"{index}: {listed('tensors that are in another shard than it says', elsewhere)}"


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = {str(key): str(value) for key, value in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index with a weight_map: {error!r}") from error
    for tensor, name in entries.items():
        # By name, not by resolving: hub caches link their files to a blob store next door.
        if PurePosixPath(name).name != name or name in ("", ".."):
            raise CheckpointError(f"{index}: {tensor} is said to be in {name!r}, outside the directory")
    return entries


def _read_shard(path: Path) -> dict[str, mx.array]:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: this shard is missing")
        with safe_open(path, framework="numpy"):  # checks that the header fits the file's length
            pass
        tensors = mx.load(str(path))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
    return cast("dict[str, mx.array]", tensors)


def write_tensors(directory: Path, tensors: Iterable[tuple[str, mx.array]], shard_bytes: int = SHARD_BYTES) -> int:
    """Write tensors as ``model-0000x-of-0000y.safetensors`` and their index, or as one file if they fit.

    A shard is written as soon as it is full and then dropped, so that no more than one is held. Returns the bytes of
    all tensors.
    """
    shards: list[list[str]] = []
    total, pending = 0, dict[str, mx.array]()
    for name, value in tensors:
        if pending and sum(x.nbytes for x in pending.values()) + value.nbytes > shard_bytes:
            shards.append(_write_shard(directory, len(shards), pending))
        pending[name] = value
        total += value.nbytes
    shards.append(_write_shard(directory, len(shards), pending))
    weight_map = {}
    for number, names in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / UNNAMED.format(number)).rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return total


def _write_shard(directory: Path, number: int, tensors: dict[str, mx.array]) -> list[str]:
    """Write and empty ``tensors``; the name follows when the number of shards is known."""
    mx.save_safetensors(str(directory / UNNAMED.format(number)), tensors, {"format": "pt"})
    names = list(tensors)
    tensors.clear()
    return names


def named_parameters(module: nn.Module) -> list[tuple[str, mx.array]]:
    """Each parameter below ``module`` with its dotted name, in the tree's order."""
    return cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))


def mismatches(
    module: nn.Module, tensors: Mapping[str, mx.array], prefix: str = "", optional: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Parameters of ``module`` whose tensor is missing, of another shape or of another kind of number, and why.

    Only shapes and dtypes are looked at. Names that begin with one of ``optional`` may be absent.
    """
    axes = dict(checkpoint_axes(module))
    for name, parameter in named_parameters(module):
        stored = tensors.get(prefix + name)
        if stored is None:
            if not name.startswith(optional):
                yield name, MISSING
        elif to_memory(stored, parameter.shape, axes.get(name)) is None:
            expected = to_checkpoint(mx.zeros(parameter.shape), axes.get(name)).shape
            yield name, f"{prefix}{name} has shape {list(stored.shape)}; the config makes it {list(expected)}"
        elif _kind(stored.dtype) != _kind(parameter.dtype):
            yield name, f"{prefix}{name} is {stored.dtype}; {_kind(parameter.dtype)} numbers are needed"


def mismatches_text(found: Iterable[tuple[str, str]], prefix: str = "") -> list[str]:
    """One line for all missing tensors, then one for each other fault."""
    faults = list(found)
    missing = sorted(prefix + name for name, why in faults if why == MISSING)
    return [listed("missing tensors", missing)] * bool(missing) + [why for _, why in faults if why != MISSING]


def _kind(dtype: mx.Dtype) -> str:
    if mx.issubdtype(dtype, mx.floating):
        return "floating"
    return "packed (uint32)" if dtype == mx.uint32 else "integer"


def assign(
    module: nn.Module,
    tensors: dict[str, mx.array],
    prefix: str = "",
    optional: tuple[str, ...] = (),
    dtypes: Mapping[str, mx.Dtype] | None = None,
) -> None:
    """Give each parameter of ``module`` its tensor under ``prefix``, taking it out of ``tensors``.

    Names that begin with one of ``optional`` may be absent; they keep what they have. ``dtypes`` are those of floating
    parameters, float32 where it says nothing; packed weights stay as they are, other integers become int32.

    Raises:
        CheckpointError: for a missing tensor, a wrong shape or a wrong kind of number, with both values; for a value
            that is not finite.
    """
    faults = mismatches_text(mismatches(module, tensors, prefix, optional), prefix)
    if faults:
        raise CheckpointError(faults[0])
    axes, wanted = dict(checkpoint_axes(module)), dtypes or {}
    present = [(name, value) for name, value in named_parameters(module) if prefix + name in tensors]
    # The largest first: what is in flight between file and memory is then least when memory is fullest.
    present.sort(key=lambda item: item[1].size, reverse=True)
    weights: list[tuple[str, mx.array]] = []
    for chunk in _chunks(present):
        loaded = []
        for name, parameter in chunk:
            stored = cast(mx.array, to_memory(tensors.pop(prefix + name), parameter.shape, axes.get(name)))
            _check_range(prefix + name, stored)
            # Contiguous, since what only looks transposed would be copied at every product.
            loaded.append((name, mx.contiguous(stored.astype(_dtype(parameter, wanted.get(name))))))
            del stored  # the next one's bytes are not to meet this one's
        _compute(loaded, prefix)
        weights += loaded
    # All at once: MLX would fill the gaps of a list of arrays that is only partly given.
    module.load_weights(weights, strict=False)
    arrived = dict(named_parameters(module))
    lost = [prefix + name for name, value in weights if arrived.get(name) is not value]
    if lost:
        raise CheckpointError(listed("tensors that did not reach their parameter", lost))


def _check_range(name: str, stored: mx.array) -> None:
    """Integers become int32: one that does not fit would come out as another."""
    if stored.dtype in (mx.int64, mx.uint64) and not mx.array_equal(stored.astype(mx.int32), stored).item():
        raise CheckpointError(f"{name} has integers beyond 32 bits")


def _dtype(parameter: mx.array, wanted: mx.Dtype | None) -> mx.Dtype:
    if mx.issubdtype(parameter.dtype, mx.floating):
        return wanted or mx.float32
    return mx.uint32 if parameter.dtype == mx.uint32 else mx.int32


def _chunks(parameters: list[tuple[str, mx.array]]) -> Iterator[list[tuple[str, mx.array]]]:
    """Runs of parameters of at most ``NUMBERS_AT_ONCE`` numbers, or a single one."""
    chunk: list[tuple[str, mx.array]] = []
    for item in parameters:
        if chunk and sum(value.size for _, value in chunk) + item[1].size > NUMBERS_AT_ONCE:
            yield chunk
            chunk = []
        chunk.append(item)
    if chunk:
        yield chunk


def _compute(weights: list[tuple[str, mx.array]], prefix: str) -> None:
    """Read and convert, and look at every number once: what is not finite would spread without a word."""
    mx.eval([value for _, value in weights])
    bad = [prefix + name for name, value in weights if not is_finite(value)]
    if bad:
        raise CheckpointError(listed("tensors with values that are not finite", bad))


def is_finite(value: mx.array) -> bool:
    """Whether every number is one; looked at in blocks, so that a large array is not held twice."""
    if not mx.issubdtype(value.dtype, mx.floating):
        return True
    flat = value.reshape(-1)
    blocks = (flat[start : start + NUMBERS_AT_ONCE] for start in range(0, flat.size, NUMBERS_AT_ONCE))
    return all(mx.isfinite(block).all().item() for block in blocks)
