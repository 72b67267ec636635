"""Every stage against a folder of goldens: ``checkpoint/``, ``goldens/`` and ``manifest.json``, nothing else.

Instead of holding a checkpoint the manifest may name one, with the hashes of its files.

Integers must be equal. Floats may differ by a tolerance that tolerances.toml states, with its reason, relative to the
golden's largest value. Every tensor of the folder must also be what its manifest says it is.

That is how float32 is judged. Another precision, or another build of the same weights, is measured instead: how far
each tensor is off, and which choices turn out differently, with NVIDIA's margin at each.
"""

import io
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec.structs import fields
from rich.console import Console
from rich.table import Table

from voicechat_core.checkpoint import check_directory, load_model
from voicechat_core.choices import every_flip, first_flip
from voicechat_core.compilation import Compile, wanted
from voicechat_core.config import VoiceChatConfig
from voicechat_core.errors import CheckpointError, VoiceChatError
from voicechat_core.goldens import Arrays, Goldens
from voicechat_core.model import VoiceChatModel
from voicechat_core.precision import Precision
from voicechat_core.verify_stages import HIGHEST, STAGES, Stage

__all__ = ["Check", "Report", "compare", "report_text", "tolerance", "verify"]


@dataclass(frozen=True)
class Check:
    """One tensor's verdict.

    ``error`` is a count of differing integers, or the largest difference of floats; ``relative`` to the largest golden
    value; ``rms`` the root mean square of the differences relative to that of the golden. ``limit`` is None where
    nothing is judged.
    """

    stage: str
    tensor: str
    passed: bool
    error: float | None = None
    relative: float | None = None
    rms: float | None = None
    limit: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Every check of one folder, what is not compared, with the reason, and the stages and tensors that it lacks.

    ``measured`` says what was measured and not judged; it is empty where tolerances held.
    """

    folder: Path
    checks: list[Check]
    skipped: dict[str, str]
    absent: list[str]
    measured: str = ""

    @property
    def passed(self) -> bool:
        """Whether there was something to check, and no check missed."""
        return bool(self.checks) and all(check.passed for check in self.checks)


def verify(
    folder: Path, *, checkpoint: Path | None = None, precision: Precision = "float32", compile: Compile = "auto"
) -> Report:
    """Compute every stage of a goldens folder here and compare.

    Args:
        folder: holds ``checkpoint/`` (or names one), ``goldens/`` and ``manifest.json``.
        checkpoint: another build of the folder's checkpoint to take instead.
        precision: of the networks. Anything but the folder's own checkpoint in float32 is measured, not judged.
        compile: whether the live session's steps are compiled; judged all the same.

    Raises:
        GoldensError: when a part of the folder is missing or cannot be read, or it is of another checkpoint than the
            one that now has the name.
        CheckpointError: when its checkpoint cannot be loaded.
        InputError: for a precision or a compile that does not exist, and "on" where nothing can be compiled.
    """
    compiled = wanted(compile)
    goldens = Goldens.read(folder)
    own = goldens.checkpoint()
    if checkpoint is not None:
        _check_same(own, checkpoint)
    model = load_model(checkpoint or own, precision, compiled=compiled)
    judged = checkpoint is None and precision == "float32"
    checks = [Check(fault.stage, fault.tensor, False, note=fault.note) for fault in goldens.faults()]
    skipped: dict[str, str] = {}
    absent: list[str] = []
    for name in goldens.stages:
        stage = next((stage for stage in STAGES if re.fullmatch(stage.files, name)), None)
        if stage is None:
            skipped[name] = "a stage that this version does not know"
        else:
            checks += _check_stage(model, stage, name, goldens, skipped, absent, judged=judged)
    absent += [stage.files for stage in STAGES if not any(re.fullmatch(stage.files, name) for name in goldens.stages)]
    return Report(folder, checks, skipped, absent, "" if judged else f"{checkpoint or own}, {precision}")


def _check_same(golden: Path, build: Path) -> None:
    """Two builds of the same weights have the same config but for how they are packed."""
    check_directory(build)
    ours, theirs = (VoiceChatConfig.from_file(path / "config.json") for path in (build, golden))
    for field in fields(ours):
        found, expected = (getattr(config, field.name) for config in (ours, theirs))
        if found != expected and not field.name.startswith("quantization"):
            raise CheckpointError(f"{build}: no build of {golden}: its {field.name} differs")


# ------------------------------------------------------------------------------------------ comparing


def _check_stage(
    model: VoiceChatModel,
    stage: Stage,
    name: str,
    goldens: Goldens,
    skipped: dict[str, str],
    absent: list[str],
    *,
    judged: bool,
) -> list[Check]:
    golden = goldens.stages[name]
    borrowed = {key: goldens.stages.get(file, {}).get(key) for key, file in stage.borrowed.items()}
    inputs = {key: golden.get(key) for key in stage.inputs} | borrowed
    faults = [Check(name, key, False, note=note) for key, note in _input_faults(model, stage, inputs)]
    if faults:
        return faults
    given = {key: mx.array(value) for key, value in (golden | inputs).items() if value is not None}
    try:
        ours = {key: _on_host(value) for key, value in stage.run(model, given).items()}
    except (VoiceChatError, ValueError, IndexError, KeyError, TypeError) as error:
        return [Check(name, "*", False, note=f"cannot be computed: {type(error).__name__}: {error}")]
    absent += [f"{name}/{tensor}" for tensor in ours if tensor not in golden]
    checks = []
    for tensor, value in golden.items():
        reason = stage.reason_to_skip(tensor) or ("" if tensor in ours else "unknown to this version")
        if tensor in ours and not reason:
            limit = tolerance(stage.key, tensor) if judged else None
            checks.append(compare(name, tensor, ours[tensor], value, limit))
        elif tensor not in stage.inputs:
            skipped[f"{name}/{tensor}"] = reason
    every = not judged and stage.key != "e2e"
    return [_with_choices(check, ours, golden, every=every) for check in checks]


def _on_host(value: mx.array) -> np.ndarray:
    """NumPy has no bfloat16."""
    return np.array(value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value)


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


def compare(stage: str, tensor: str, ours: np.ndarray, golden: np.ndarray, limit: float | None) -> Check:
    """Ours against NVIDIA's: integers exactly, floats within ``limit`` times the golden's largest value.

    Without a limit only shapes and kinds must agree, and floats must be finite.
    """
    if ours.shape != golden.shape:
        note = f"shape {list(ours.shape)} here, {list(golden.shape)} in the golden"
        is_transcript = tensor.startswith("rnnt_")  # of another build: it may say more or less
        return Check(stage, tensor, limit is None and is_transcript, note=note)
    exact = not np.issubdtype(golden.dtype, np.floating)
    if exact == np.issubdtype(ours.dtype, np.floating):
        return Check(stage, tensor, False, note=f"{ours.dtype} numbers here, {golden.dtype} in the golden")
    if exact:
        wrong = int(np.count_nonzero(ours.astype(np.int64) != golden.astype(np.int64)))
        return Check(stage, tensor, limit is None or wrong == 0, error=wrong, limit=None if limit is None else 0)
    difference = ours.astype(np.float64) - golden.astype(np.float64)
    error = float(np.max(np.abs(difference), initial=0.0))
    relative = _ratio(error, float(np.max(np.abs(golden), initial=0.0)))
    rms = _ratio(float(np.linalg.norm(difference)), float(np.linalg.norm(golden.astype(np.float64))))
    # Written so that a NaN on either side is a miss.
    passed = bool(relative <= limit) if limit is not None else bool(np.isfinite(error))
    return Check(stage, tensor, passed, error=error, relative=relative, rms=rms, limit=limit)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else float("inf"))


def _with_choices(check: Check, ours: Arrays, golden: Arrays, *, every: bool) -> Check:
    """For choices that differ: all of them, or where a run that feeds on its own choices begins to."""
    if check.note or check.error is None:
        return check
    return replace(check, note=(every_flip if every else first_flip)(check.tensor, ours, golden))


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
    for column in ("stage", "tensor", "max error", "relative", "rms", "limit", "", "note"):
        table.add_column(column, overflow="fold")
    for check in report.checks:
        verdict = "MISS" if not check.passed else "" if check.limit is None else "ok"
        table.add_row(check.stage, check.tensor, *_numbers(check), verdict, check.note)
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
    if missed:
        verdict = f"MISSED {len(missed)}: {', '.join(missed)}"
    elif report.measured:
        verdict = f"measured, not judged: {report.measured}"
    else:
        verdict = "all within their limits" if report.checks else "nothing to check"
    yield f"{len(report.checks)} checks: {verdict}"


def _numbers(check: Check) -> tuple[str, str, str, str]:
    """Error, relative error, root mean square and limit as text."""
    if check.error is None:
        return "", "", "", ""
    limit = "" if check.limit is None else f"{check.limit:.0e}" if check.limit else "0"
    if check.relative is None or check.rms is None:
        return f"{check.error:.0f} differ", "", "", limit
    return f"{check.error:.2g}", f"{check.relative:.2g}", f"{check.rms:.2g}", limit
