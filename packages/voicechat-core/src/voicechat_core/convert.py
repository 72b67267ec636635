"""A checkpoint in another storage format: its matrices packed, or its floats in fewer bits.

It goes tensor by tensor: in memory are one matrix and the shard that is being filled, at most 1 GiB. The source's own
names, axes and files are kept, so that the result loads wherever the source does.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from voicechat_core.checkpoint import Contents, check_directory, examine, refuse_faulty
from voicechat_core.config import VoiceChatConfig
from voicechat_core.errors import CheckpointError, InputError
from voicechat_core.files import written_whole
from voicechat_core.nn.linear import matrices
from voicechat_core.quantization import BITS, GROUP_SIZES, Quantization
from voicechat_core.tokenizer import RnntVocabulary
from voicechat_core.weights import SHARD_BYTES, is_finite, write_tensors

__all__ = ["Converted", "check_quantization", "check_stored", "check_target", "convert", "stored_as"]

STORED = {"float32": mx.float32, "bfloat16": mx.bfloat16}
# What published builds quantize: 123 modules of the 11B. Perception, transcript, speech decoder and codec stay dense.
QUANTIZED_PREFIX = "stt_model.llm."
QUANTIZED = ("stt_model.embed_tokens", "stt_model.lm_head", "stt_model.function_head")
KEPT_WIDE = ".A_log"  # decay rates are exponentials of exponentials: published builds leave them in float32
# Beside the weights; the same that ``hub_cache.NOTICE`` fetches.
CARRIED = ("*.json", "rnnt_tokenizer/*", "*.md", "*.txt", "LICEN[CS]E*", "NOTICE*")
AT_ONCE = 1 << 24  # numbers packed at once: 64 MB in float32

Progress = Callable[[int, int], None]  # tensors done, tensors in all


@dataclass(frozen=True)
class Converted:
    """What was written: the packed modules, those that should have been and could not, and bytes of weights."""

    modules: list[str]
    left_dense: list[str]
    bytes_before: int
    bytes_after: int


def check_stored(dtype: str) -> None:
    """Refuse a storage format that does not exist.

    Raises:
        InputError: naming it and those that do.
    """
    if dtype not in STORED:
        raise InputError(f"dtype is {dtype!r}; one of {', '.join(STORED)} is needed")


def check_quantization(quantization: Quantization) -> None:
    """Refuse a setting that does not exist.

    Raises:
        InputError: naming what is wrong and the values that there are.
    """
    for name, known in (("bits", BITS), ("group_size", GROUP_SIZES)):
        value = getattr(quantization, name)
        if value not in known:
            raise InputError(f"{name} is {value}; one of {', '.join(map(str, known))} is needed")


def check_target(target: Path, source: Path | None = None) -> None:
    """Refuse to write over anything, and into the source.

    Raises:
        CheckpointError: when there is something of that name, or it lies in ``source``.
    """
    try:
        exists = target.exists() or target.is_symlink()
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be looked at: {error.strerror}") from error
    if exists:
        raise CheckpointError(f"{target}: exists already; nothing is written over it")
    if source is not None and target.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{target}: lies in the source {source}")


def stored_as(tensors: Iterable[tuple[str, mx.array]], dtype: str) -> Iterator[tuple[str, mx.array]]:
    """Each tensor with its floats in ``dtype``; decay rates keep theirs."""
    for name, value in tensors:
        is_free = mx.issubdtype(value.dtype, mx.floating) and not name.endswith(KEPT_WIDE)
        yield name, value.astype(STORED[dtype]) if is_free else value


def convert(
    source: Path,
    target: Path,
    quantization: Quantization | None = None,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Converted:
    """Write the dense checkpoint ``source`` to ``target`` in another format.

    Args:
        source: a checkpoint's directory.
        target: a directory that does not exist.
        quantization: how to pack the language model and its embedding and heads; None to pack nothing. Scales and
            biases are float32, as published.
        dtype: of what stays dense: float32 or bfloat16; None to keep every tensor's own.
        shard_bytes: bound of a file.
        progress: called with the tensors done and the tensors in all.

    Raises:
        CheckpointError: when the source is faulty or quantized, or the target exists or cannot be written.
        InputError: for bits, a group size or a dtype that do not exist, and for a group size that divides nothing.
    """
    if quantization is not None:
        check_quantization(quantization)
    if dtype is not None:
        check_stored(dtype)
    check_target(target, source)
    contents = _dense_contents(source)
    modules, left_dense = _to_pack(contents, quantization)
    stored, before = contents.tensors, sum(value.nbytes for value in contents.tensors.values())
    with written_whole(target) as scratch:
        converted = _converted(source, stored, modules, quantization, progress)
        after = write_tensors(scratch, converted if dtype is None else _with_dtype(converted, dtype), shard_bytes)
        _write_config(source, scratch, modules, quantization)
        _carry_over(source, scratch)
    return Converted(modules, left_dense, before, after)


def _dense_contents(source: Path) -> Contents:
    check_directory(source)
    config = VoiceChatConfig.from_file(source / "config.json")
    contents = examine(source, config, transcript=RnntVocabulary.from_checkpoint(source, config).enabled)
    if contents.plan.modules:
        how, count = next(iter(contents.plan.modules.values())), len(contents.plan.modules)
        raise CheckpointError(f"{source}: quantized already ({count} modules, {how}); a dense checkpoint is needed")
    refuse_faulty(source, contents)
    return contents


def _to_pack(contents: Contents, quantization: Quantization | None) -> tuple[list[str], list[str]]:
    """Paths of the modules to pack, and of those whose inputs the group size does not divide."""
    if quantization is None:
        return [], []
    found = {p: m for p, m in matrices(contents.networks).items() if p.startswith(QUANTIZED_PREFIX) or p in QUANTIZED}
    fits = {path: matrix.shape[1] % quantization.group_size == 0 for path, matrix in found.items()}
    if not any(fits.values()):
        inputs = sorted({matrix.shape[1] for matrix in found.values()})
        raise InputError(f"group_size {quantization.group_size} divides none of the modules' inputs {inputs}")
    return [path for path, fit in fits.items() if fit], [path for path, fit in fits.items() if not fit]


def _converted(
    source: Path,
    tensors: dict[str, mx.array],
    modules: list[str],
    quantization: Quantization | None,
    progress: Progress | None,
) -> Iterator[tuple[str, mx.array]]:
    """Every tensor in its turn, taken out of ``tensors``, so that nothing keeps what is written already."""
    packed, names = {f"{path}.weight" for path in modules}, list(tensors)
    for done, name in enumerate(names, 1):
        value = tensors.pop(name)
        if not is_finite(value):
            raise CheckpointError(f"{source}: {name} has values that are not finite")
        if quantization is not None and name in packed:
            yield from _packed(name.removesuffix(".weight"), value, quantization)
        else:
            yield name, value
        del value
        if progress is not None:
            progress(done, len(names))


def _packed(path: str, weight: mx.array, quantization: Quantization) -> Iterator[tuple[str, mx.array]]:
    """One matrix by blocks of rows, which know nothing of each other."""
    step = max(1, AT_ONCE // weight.shape[1])
    blocks = []
    for start in range(0, weight.shape[0], step):
        rows = weight[start : start + step].astype(mx.float32)
        blocks.append(mx.quantize(rows, group_size=quantization.group_size, bits=quantization.bits))
        mx.eval(blocks[-1])
    for part, pieces in zip(("weight", "scales", "biases"), zip(*blocks, strict=True), strict=True):
        value = mx.concatenate(list(pieces))
        if not is_finite(value):
            raise CheckpointError(f"{path}: its numbers are too far apart for float32 {part}")
        yield f"{path}.{part}", value


def _with_dtype(tensors: Iterable[tuple[str, mx.array]], dtype: str) -> Iterator[tuple[str, mx.array]]:
    for name, value in tensors:
        if name.endswith((".scales", ".biases")):
            yield name, value
        else:
            yield from stored_as([(name, value)], dtype)


def _write_config(source: Path, target: Path, modules: list[str], quantization: Quantization | None) -> None:
    """The source's config as it is, with the map under both names that software looks for."""
    data: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if quantization is not None:
        setting = {"group_size": quantization.group_size, "bits": quantization.bits}
        entries = {"mode": "affine", **{path: dict(setting) for path in modules}}
        data["quantization"] = data["quantization_config"] = setting | entries
    (target / "config.json").write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")


def _carry_over(source: Path, target: Path) -> None:
    """Tokenizers, licence and notices; what was written anew stays. Contents are copied: hub caches hold links."""
    for pattern in CARRIED:
        for file in source.glob(pattern):
            copy = target / file.relative_to(source)
            if file.is_file() and not copy.exists():
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
