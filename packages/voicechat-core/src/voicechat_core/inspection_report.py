"""An inspection as text for a person and as JSON for a program."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from voicechat_core.inspection import PARTS, Inspection, ModelFacts, Part, Weights, part_of
from voicechat_core.quantization import Quantization
from voicechat_core.terminal import printable

__all__ = ["inspection_json", "inspection_text"]

LISTED_AT_MOST = 20  # modules, problems or warnings in the text; all are in the JSON
WIDTH = 160
NOTE = "Values have not been looked at: loading does that, and refuses what is not finite."


def inspection_text(inspection: Inspection, width: int = WIDTH) -> str:
    """A table of parts, then one fact, problem or warning a line.

    Nothing is cut: the table is ``width`` wide at most, or as wide as its names and numbers.
    """
    lines = [str(inspection.directory)]
    if inspection.weights is not None:
        lines += _table(inspection.weights, width).splitlines()
    if inspection.model is not None:
        lines += _model_lines(inspection.model)
    if inspection.weights is not None:
        lines += [*_memory_lines(inspection.weights), *_quantization_lines(inspection.weights)]
    lines += _closing_lines(inspection)
    return "\n".join(printable(line) for line in lines)


def _table(weights: Weights, width: int) -> str:
    table = Table()
    for column in ("part", "tensors", "parameters", "bytes", "stored as", "quantized"):
        is_text = column in ("part", "stored as")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column != "stored as")
    for part in (*weights.parts, weights.total):
        if part is weights.total:
            table.add_section()
        numbers = (f"{number:,}" for number in (part.tensors, part.parameters, part.bytes))
        table.add_row(part.name, *numbers, " + ".join(part.stored), str(part.quantized or ""))
    console = Console(file=io.StringIO(), width=1 << 16, force_terminal=False)  # plain text, whatever the environment
    console.width = max(width, console.measure(table).minimum)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _model_lines(model: ModelFacts) -> Iterator[str]:
    yield f"{model.model_type}, speaker {model.speaker}, {model.layers} language layers"
    transcript = f"{model.pieces:,} transcript pieces" if model.transcript else "no transcript branch"
    if model.transcript is None:
        transcript = "a transcript vocabulary that cannot be read"
    yield f"vocabularies: {model.text_tokens:,} text tokens, {transcript}"
    if model.source_revision is not None:
        yield f"source revision {model.source_revision}"


def _memory_lines(weights: Weights) -> Iterator[str]:
    yield f"precision auto is {weights.auto} here"
    loaded = (f"{size:,} bytes ({size / 1e9:.3g} GB) in {name}" for name, size in weights.memory.items())
    yield f"weights in memory, at most: {', '.join(loaded)}"


def _quantization_lines(weights: Weights) -> Iterator[str]:
    if not weights.quantized:
        yield "quantization: none"
        return
    yield f"quantization: scales and biases are {' + '.join(weights.scales)}"
    settings = _settings(weights)
    for setting, paths in settings:
        counts = ", ".join(f"{part} {count}" for part, count in _counts(paths).items())
        yield f"  {setting}: {len(paths)} module{'s' * (len(paths) != 1)} ({counts})"
    others = [f"{path}: {setting}" for setting, paths in settings[1:] for path in paths]
    yield from (f"    {line}" for line in others[:LISTED_AT_MOST])
    if len(others) > LISTED_AT_MOST:
        yield f"    and {len(others) - LISTED_AT_MOST} more"


def _closing_lines(inspection: Inspection) -> Iterator[str]:
    for what, found in (("problems", inspection.problems), ("warnings", inspection.warnings)):
        if found:
            yield f"{what}:"
            yield from (f"  {line}" for line in found[:LISTED_AT_MOST])
            if len(found) > LISTED_AT_MOST:
                yield f"  and {len(found) - LISTED_AT_MOST} more"
    if inspection.passed:
        yield "nothing forbids loading" if inspection.warnings else "nothing is missing, left over or inconsistent"
    yield NOTE


def inspection_json(inspection: Inspection) -> dict[str, Any]:
    """The whole inspection in JSON's types: every name, where the text has the first 20.

    ``model`` and ``weights`` are null where there is no config to tell them by, ``weights`` also if it makes no model.
    """
    model, weights = inspection.model, inspection.weights
    return {
        "directory": str(inspection.directory),
        "passed": inspection.passed,
        "model": None if model is None else {**asdict(model), "transcript": model.transcript},
        "weights": None if weights is None else _weights_json(weights),
        "problems": inspection.problems,
        "warnings": inspection.warnings,
    }


def _weights_json(weights: Weights) -> dict[str, Any]:
    settings = [
        {**asdict(setting), "modules": len(paths), "parts": _counts(paths)} for setting, paths in _settings(weights)
    ]
    modules = {path: asdict(setting) for path, setting in weights.quantized.items()}
    return {
        "parts": [_part_json(part) for part in weights.parts],
        "total": _part_json(weights.total),
        "auto": weights.auto,
        "memory": weights.memory,
        "quantization": {"settings": settings, "modules": modules, "scales": list(weights.scales)},
        "missing": weights.missing,
        "left_over": weights.left_over,
    }


def _part_json(part: Part) -> dict[str, Any]:
    return {**asdict(part), "stored": list(part.stored)}


def _settings(weights: Weights) -> list[tuple[Quantization, list[str]]]:
    """Every setting and its modules' paths, the most frequent setting first."""
    paths: dict[Quantization, list[str]] = {}
    for path, setting in sorted(weights.quantized.items()):
        paths.setdefault(setting, []).append(path)
    return sorted(paths.items(), key=lambda item: (-len(item[1]), item[0].bits, item[0].group_size))


def _counts(paths: Iterable[str]) -> dict[str, int]:
    """Modules by part, the part with most of them first."""
    found = Counter(part_of(f"{path}.") for path in paths)
    return dict(sorted(found.items(), key=lambda item: (-item[1], list(PARTS).index(item[0]))))
