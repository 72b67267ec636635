"""Every stage against a folder of goldens: ``checkpoint/``, ``goldens/`` and ``manifest.json``, nothing else.

Integers must be equal. Floats may differ by a tolerance that tolerances.toml states, with its reason, relative to the
golden's largest value. Every tensor of the folder must also be what its manifest says it is.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.numpy import load_file

from voicechat_core.checkpoint import load_model
from voicechat_core.errors import GoldensError, VoiceChatError
from voicechat_core.model import VoiceChatModel
from voicechat_core.verify_stages import STAGES, Stage

__all__ = ["Check", "Report", "compare", "print_report", "tolerance", "verify"]

Arrays = dict[str, np.ndarray[Any, Any]]

# Choices, and how far NVIDIA's were from being others: the gap between the best two candidates.
MARGINS = {
    "gen_text_timeline": "text_margin",
    "gen_function_timeline": "function_margin",
    "codes": "code_margin",
    "codes_from_t1": "code_margin_from_t1",
    "step_codes": "step_code_margin",
}


@dataclass(frozen=True)
class Check:
    """One tensor's verdict. ``error`` is a count of differing integers, or the largest difference of floats."""

    stage: str
    tensor: str
    passed: bool
    error: float | None = None
    relative: float | None = None
    limit: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Every check of one folder, and the tensors that are not compared, with the reason."""

    folder: Path
    checks: list[Check]
    skipped: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether there was something to check, and no check missed."""
        return bool(self.checks) and all(check.passed for check in self.checks)


def verify(folder: Path) -> Report:
    """Compute every stage of a goldens folder here and compare.

    Raises:
        GoldensError: when a part of the folder is missing or cannot be read.
        CheckpointError: when its checkpoint cannot be loaded.
    """
    manifest, checkpoint_files = _read_manifest(folder)
    goldens = _read_goldens(folder)
    model = load_model(folder / "checkpoint")
    checks = [*_check_files(folder / "checkpoint", checkpoint_files), *_check_manifest(manifest, goldens)]
    skipped: dict[str, str] = {}
    expected = {name.split("/")[0] for name in manifest} | set(goldens)
    for name in sorted(expected):
        stage = next((s for s in STAGES if re.fullmatch(s.files, name)), None)
        if stage is None:
            skipped[name] = "a stage that this version does not know"
        elif name in goldens:
            checks += _check_stage(model, stage, name, goldens, skipped)
    return Report(folder, checks, skipped)


# -------------------------------------------------------------------------------------------- reading


def _read_manifest(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The manifest's entries by ``stage/tensor``, and the hashes of the checkpoint's files if it holds them."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        return {str(k): dict(v) for k, v in manifest["tensors"].items()}, dict(manifest.get("files", {}))
    except FileNotFoundError as error:
        raise GoldensError(f"{folder}: no manifest.json; a goldens folder has checkpoint/, goldens/ and it") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GoldensError(f"{path}: not a manifest with tensors: {error!r}") from error


def _read_goldens(folder: Path) -> dict[str, Arrays]:
    paths = sorted((folder / "goldens").glob("*.safetensors"))
    if not paths:
        raise GoldensError(f"{folder / 'goldens'}: no safetensors files")
    try:
        return {path.stem: load_file(path) for path in paths}
    except (OSError, ValueError, SafetensorError) as error:
        raise GoldensError(f"{folder / 'goldens'}: a file cannot be read: {error}") from error


def _check_files(checkpoint: Path, hashes: dict[str, str]) -> Iterator[Check]:
    """A miss for each file of the checkpoint that is not the one that the goldens were made with."""
    for name, expected in sorted(hashes.items()):
        path = checkpoint / name
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        if found != expected:
            note = "missing: the manifest lists it" if found is None else "changed: its bytes are not the manifest's"
            yield Check("checkpoint", name, False, note=note)


def _check_manifest(manifest: dict[str, Any], goldens: dict[str, Arrays]) -> Iterator[Check]:
    """A miss for each tensor that is absent, or is not the one that the manifest was written for."""
    for name, entry in sorted(manifest.items()):
        stage, tensor = name.split("/", 1)
        found = goldens.get(stage, {}).get(tensor)
        if found is None:
            yield Check(stage, tensor, False, note="missing: the manifest lists it")
        elif entry.get("sha256") not in (None, hashlib.sha256(found.tobytes()).hexdigest()):
            yield Check(stage, tensor, False, note="changed: its bytes are not the manifest's")
    for stage, tensors in sorted(goldens.items()):
        for tensor in sorted(tensors):
            if f"{stage}/{tensor}" not in manifest:
                yield Check(stage, tensor, False, note="left over: the manifest does not list it")


# ------------------------------------------------------------------------------------------ comparing


def _check_stage(
    model: VoiceChatModel, stage: Stage, name: str, goldens: dict[str, Arrays], skipped: dict[str, str]
) -> list[Check]:
    golden = dict(goldens[name])
    inputs = {key: golden.get(key) for key in stage.inputs}
    inputs |= {key: goldens.get(file, {}).get(key) for key, file in stage.borrowed.items()}
    lost = [key for key, value in inputs.items() if value is None]
    if lost:
        return [Check(name, key, False, note="missing: the stage cannot be computed without it") for key in lost]
    given = {key: mx.array(value) for key, value in (golden | inputs).items() if value is not None}
    try:
        ours = {key: np.array(value) for key, value in stage.run(model, given).items()}
    except (VoiceChatError, ValueError, IndexError, KeyError) as error:
        return [Check(name, "*", False, note=f"cannot be computed: {type(error).__name__}: {error}")]
    checks = []
    for tensor, value in golden.items():
        if tensor in stage.inputs:
            continue
        reason = stage.reason_to_skip(tensor) or ("" if tensor in ours else "unknown to this version")
        if reason:
            skipped[f"{name}/{tensor}"] = reason
        else:
            checks.append(compare(name, tensor, ours[tensor], value, tolerance(stage.key, tensor)))
    return [_with_margin(check, golden, ours) for check in checks]


def compare(stage: str, tensor: str, ours: np.ndarray, golden: np.ndarray, limit: float) -> Check:
    """Ours against NVIDIA's: integers exactly, floats within ``limit`` times the golden's largest value."""
    if ours.shape != golden.shape:
        note = f"shape {list(ours.shape)} here, {list(golden.shape)} in the golden"
        return Check(stage, tensor, False, note=note)
    if not np.issubdtype(golden.dtype, np.floating):
        wrong = int(np.count_nonzero(ours.astype(np.int64) != golden.astype(np.int64)))
        return Check(stage, tensor, wrong == 0, error=wrong, limit=0)
    error = float(np.max(np.abs(ours.astype(np.float64) - golden.astype(np.float64)), initial=0.0))
    scale = float(np.max(np.abs(golden), initial=0.0))
    relative = error / scale if scale else (0.0 if error == 0 else float("inf"))
    # Written so that a NaN on either side is a miss.
    return Check(stage, tensor, bool(relative <= limit), error=error, relative=relative, limit=limit)


def _with_margin(check: Check, golden: Arrays, ours: dict[str, np.ndarray]) -> Check:
    """For ids or codes that differ: where that begins, and how near a tie the choice was there."""
    name = MARGINS.get(check.tensor)
    if check.passed or check.note or name is None:
        return check
    first = tuple(int(i) for i in np.argwhere(ours[check.tensor] != golden[check.tensor])[0])
    note = f"from {list(first)} on"
    for whose, margins in (("NVIDIA's", golden.get(name)), ("our", ours.get(name))):
        if margins is not None:
            note += f", where {whose} choice is ahead by {margins[first]:.2g}"
            break
    return Check(check.stage, check.tensor, False, check.error, limit=0, note=note)


@cache
def _tolerances() -> dict[str, Any]:
    return tomllib.loads(files("voicechat_core").joinpath("tolerances.toml").read_text(encoding="utf-8"))


def tolerance(key: str, tensor: str) -> float:
    """The relative limit of a tensor: its own entry, or its stage's."""
    stage = _tolerances()[key]
    for pattern, entry in stage.items():
        if isinstance(entry, dict) and re.fullmatch(pattern, tensor):
            return float(entry["relative"])
    return float(stage["relative"])


# ------------------------------------------------------------------------------------------ reporting


def print_report(report: Report) -> None:
    """A table of every check, then what was not compared and why, then the verdict."""
    # Wide enough that no name or number is cut where the output goes to a file.
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    table = Table(title=str(report.folder))
    for column in ("stage", "tensor", "max error", "relative", "limit", "", "note"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        table.add_row(check.stage, check.tensor, *_numbers(check), "ok" if check.passed else "MISS", check.note)
    console.print(table)
    for reason in sorted(set(report.skipped.values())):
        names = [name for name, why in report.skipped.items() if why == reason]
        console.print(f"not compared: {', '.join(sorted(names))} ({reason})", markup=False)
    missed = [f"{check.stage}/{check.tensor}" for check in report.checks if not check.passed]
    verdict = f"MISSED {len(missed)}: {', '.join(missed)}" if missed else "all within their limits"
    console.print(f"{len(report.checks)} checks: {verdict}", markup=False)


def _numbers(check: Check) -> tuple[str, str, str]:
    if check.error is None:
        return "", "", ""
    if check.relative is None:
        return f"{check.error:.0f} differ", "", "0"
    return f"{check.error:.2g}", f"{check.relative:.2g}", f"{check.limit:.0e}"
