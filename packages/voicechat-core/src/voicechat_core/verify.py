"""Every stage against a folder of goldens: ``checkpoint/``, ``goldens/`` and ``manifest.json``, nothing else.

Integers must be equal. Floats may differ by a tolerance that tolerances.toml states, with its reason, relative to the
golden's largest value. Every tensor of the folder must also be what its manifest says it is.
"""

import io
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

from voicechat_core.checkpoint import load_model
from voicechat_core.errors import VoiceChatError
from voicechat_core.goldens import Arrays, Goldens
from voicechat_core.model import VoiceChatModel
from voicechat_core.verify_stages import HIGHEST, STAGES, Stage

__all__ = ["Check", "Report", "compare", "report_text", "tolerance", "verify"]

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
    """Every check of one folder, what is not compared, with the reason, and the stages and tensors that it lacks."""

    folder: Path
    checks: list[Check]
    skipped: dict[str, str]
    absent: list[str]

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
    goldens = Goldens.read(folder)
    model = load_model(goldens.checkpoint)
    checks = [Check(fault.stage, fault.tensor, False, note=fault.note) for fault in goldens.faults()]
    skipped: dict[str, str] = {}
    absent: list[str] = []
    for name in goldens.stages:
        stage = next((stage for stage in STAGES if re.fullmatch(stage.files, name)), None)
        if stage is None:
            skipped[name] = "a stage that this version does not know"
        else:
            checks += _check_stage(model, stage, name, goldens, skipped, absent)
    absent += [stage.files for stage in STAGES if not any(re.fullmatch(stage.files, name) for name in goldens.stages)]
    return Report(folder, checks, skipped, absent)


# ------------------------------------------------------------------------------------------ comparing


def _check_stage(
    model: VoiceChatModel, stage: Stage, name: str, goldens: Goldens, skipped: dict[str, str], absent: list[str]
) -> list[Check]:
    golden = goldens.stages[name]
    borrowed = {key: goldens.stages.get(file, {}).get(key) for key, file in stage.borrowed.items()}
    inputs = {key: golden.get(key) for key in stage.inputs} | borrowed
    faults = [Check(name, key, False, note=note) for key, note in _input_faults(model, stage, inputs)]
    if faults:
        return faults
    given = {key: mx.array(value) for key, value in (golden | inputs).items() if value is not None}
    try:
        ours = {key: np.array(value) for key, value in stage.run(model, given).items()}
    except (VoiceChatError, ValueError, IndexError, KeyError, TypeError) as error:
        return [Check(name, "*", False, note=f"cannot be computed: {type(error).__name__}: {error}")]
    absent += [f"{name}/{tensor}" for tensor in ours if tensor not in golden]
    checks = []
    for tensor, value in golden.items():
        reason = stage.reason_to_skip(tensor) or ("" if tensor in ours else "unknown to this version")
        if tensor in ours and not reason:
            checks.append(compare(name, tensor, ours[tensor], value, tolerance(stage.key, tensor)))
        elif tensor not in stage.inputs:
            skipped[f"{name}/{tensor}"] = reason
    return [_with_margin(check, golden, ours) for check in checks]


def _input_faults(
    model: VoiceChatModel, stage: Stage, inputs: dict[str, np.ndarray | None]
) -> Iterator[tuple[str, str]]:
    """Inputs that a stage cannot be computed from; an id out of range would read outside the tables."""
    for key, value in inputs.items():
        if value is None:
            yield key, "missing: the stage cannot be computed without it"
        elif np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
            yield key, "not finite: nothing can be computed from it"
        elif key in stage.ids:
            highest = HIGHEST[stage.ids[key]](model.config)
            if value.size and not 0 <= value.min() <= value.max() <= highest:
                yield key, f"ids {value.min()} to {value.max()}; they must lie in 0 to {highest}"


def compare(stage: str, tensor: str, ours: np.ndarray, golden: np.ndarray, limit: float) -> Check:
    """Ours against NVIDIA's: integers exactly, floats within ``limit`` times the golden's largest value."""
    if ours.shape != golden.shape:
        note = f"shape {list(ours.shape)} here, {list(golden.shape)} in the golden"
        return Check(stage, tensor, False, note=note)
    exact = not np.issubdtype(golden.dtype, np.floating)
    if exact == np.issubdtype(ours.dtype, np.floating):
        return Check(stage, tensor, False, note=f"{ours.dtype} numbers here, {golden.dtype} in the golden")
    if exact:
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


def report_text(report: Report, width: int = 160) -> str:
    """A table of every check, then what was not compared and why, then the verdict; the table is ``width`` wide."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    table = Table(title=str(report.folder))
    for column in ("stage", "tensor", "max error", "relative", "limit", "", "note"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        table.add_row(check.stage, check.tensor, *_numbers(check), "ok" if check.passed else "MISS", check.note)
    with console.capture() as captured:
        console.print(table)
    return captured.get() + "\n".join(_closing_lines(report))


def _closing_lines(report: Report) -> Iterator[str]:
    for reason in sorted(set(report.skipped.values())):
        names = sorted(name for name, why in report.skipped.items() if why == reason)
        yield f"not compared: {', '.join(names)} ({reason})"
    if report.absent:
        yield f"not in this folder: {', '.join(report.absent)}"
    missed = list(dict.fromkeys(f"{check.stage}/{check.tensor}" for check in report.checks if not check.passed))
    verdict = "all within their limits" if report.checks else "nothing to check"
    if missed:
        verdict = f"MISSED {len(missed)}: {', '.join(missed)}"
    yield f"{len(report.checks)} checks: {verdict}"


def _numbers(check: Check) -> tuple[str, str, str]:
    if check.error is None:
        return "", "", ""
    if check.relative is None:
        return f"{check.error:.0f} differ", "", "0"
    return f"{check.error:.2g}", f"{check.relative:.2g}", f"{check.limit:.0e}"
