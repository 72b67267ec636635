"""What a checkpoint holds and everything that is wrong with it, from the headers of its files. Knows no values.

It says what a load would say of files, names, shapes and vocabularies, but all of it and not only the first. No weight
is read, so that it takes no longer for a large checkpoint than for a small one.
"""

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from voicechat_core.checkpoint import UNUSED, Contents, examine
from voicechat_core.config import VoiceChatConfig
from voicechat_core.errors import CheckpointError, ConfigError
from voicechat_core.model import char_table
from voicechat_core.nn.linear import matrices
from voicechat_core.precision import Precision, chosen, dtypes
from voicechat_core.quantization import Quantization
from voicechat_core.tokenizer import RnntVocabulary, Tokenizer
from voicechat_core.weights import named_parameters

__all__ = ["Inspection", "ModelFacts", "Part", "Weights", "inspect", "inspection_json", "inspection_text"]

# A tensor belongs to the first part whose prefix its name has, if the model knows it at all.
PARTS = {
    "perception": "stt_model.perception.",
    "rnnt": "stt_model.rnnt_",
    "embed_tokens": "stt_model.embed_tokens.",
    "llm": "stt_model.llm.",
    "lm_head": "stt_model.lm_head.",
    "function_head": "stt_model.function_head.",
    "ear_tts": "tts_model.tts_model.",
    "codec": "tts_model.audio_codec.",
    "voice": "tts_model.",
}
UNKNOWN = "unknown"
SCALES = ("scales", "biases")  # what is stored beside a packed weight, and is no parameter
LOADED: tuple[Precision, ...] = ("auto", "float32")
LOADED_INTEGER = 4  # bytes: int32, and the words of packed weights
LISTED_AT_MOST = 20  # modules in the text; all are in the JSON
WIDTH = 160
NOTE = "Values have not been looked at: loading does that, and refuses what is not finite."

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Tensors that belong together.

    ``parameters`` are numbers of the model: a packed matrix counts outputs times inputs, its scales and biases nothing.
    ``bytes`` are all that is stored, ``stored`` the dtypes of weights, packed ones last ("4-bit").
    """

    name: str
    tensors: int
    parameters: int
    bytes: int
    stored: tuple[str, ...]
    quantized: int


@dataclass(frozen=True)
class ModelFacts:
    """What config.json and the vocabularies say. ``pieces`` are the transcript's: 0 without it, None if unreadable."""

    model_type: str
    speaker: str
    layers: int
    text_tokens: int
    pieces: int | None
    source_revision: str | None

    @property
    def transcript(self) -> bool | None:
        """Whether there is a transcript branch; None if that cannot be told."""
        return None if self.pieces is None else self.pieces > 0


@dataclass(frozen=True)
class Weights:
    """What is stored, and what loading makes of it.

    ``auto`` is the precision of that name here, ``memory`` the bytes of the weights once loaded, by precision: at most,
    because a load keeps one copy of codebooks that are stored twice, if their values are equal.
    ``quantized`` has each packed module's setting by its path, ``scales`` the dtypes of their scales and biases.
    """

    parts: list[Part]
    total: Part
    auto: str
    memory: dict[str, int]
    quantized: dict[str, Quantization]
    scales: tuple[str, ...]
    missing: list[str]
    left_over: list[str]


@dataclass(frozen=True)
class Inspection:
    """One directory. ``model`` is None without a config, ``weights`` where the files themselves are at fault."""

    directory: Path
    model: ModelFacts | None
    weights: Weights | None
    problems: list[str]
    warnings: list[str]

    @property
    def passed(self) -> bool:
        """Whether nothing forbids loading, as far as can be told without values."""
        return not self.problems


# ------------------------------------------------------------------------------------------ looking


def inspect(directory: Path) -> Inspection:
    """Look at everything in a checkpoint's directory but the values of its weights.

    What is wrong with it is in the result.

    Raises:
        CheckpointError: only when there is no such directory.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: {'not a directory' if directory.exists() else 'no such directory'}")
    try:
        config = VoiceChatConfig.from_file(directory / "config.json")
    except ConfigError as error:
        return Inspection(directory, None, None, [str(error)], [])
    problems: list[str] = []
    size = config.text_config.vocab_size
    _tried(lambda: char_table(config, Tokenizer.from_directory(directory, size)), problems)
    vocabulary = _tried(lambda: RnntVocabulary.from_checkpoint(directory, config), problems)
    transcript = vocabulary is None or vocabulary.enabled
    contents = _tried(lambda: examine(directory, config, transcript=transcript), problems)
    facts, weights = _facts(directory, config, vocabulary), None
    warnings = [] if transcript else ["no RNNT vocabulary: there will be no user transcript"]
    if contents is not None:
        weights = _weights(contents)
        problems += contents.problems
        warnings += contents.warnings
    return Inspection(directory, facts, weights, problems, warnings)


def _tried(make: Callable[[], T], problems: list[str]) -> T | None:
    """What ``make`` makes, or None and a problem more."""
    try:
        return make()
    except CheckpointError as error:
        problems.append(str(error))
        return None


def _facts(directory: Path, config: VoiceChatConfig, vocabulary: RnntVocabulary | None) -> ModelFacts:
    text = config.text_config
    pieces = None if vocabulary is None else len(vocabulary.pieces)
    revision = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("source_revision")
    known = revision if isinstance(revision, str) else None
    return ModelFacts(config.model_type, config.speaker, text.num_hidden_layers, text.vocab_size, pieces, known)


def _weights(contents: Contents) -> Weights:
    tensors, modules = contents.tensors, contents.plan.modules
    parameters = dict(named_parameters(contents.networks))
    shapes = {path: matrix.shape for path, matrix in matrices(contents.networks).items()}
    by_part: dict[str, list[str]] = {part: [] for part in PARTS}
    for name in sorted(tensors):
        part = _part_of(name) if _is_ours(name, parameters, shapes) else UNKNOWN
        by_part.setdefault(part, []).append(name)
    return Weights(
        parts=[_part(part, names, contents, shapes) for part, names in by_part.items()],
        total=_part("total", tensors, contents, shapes),
        auto=str(chosen("auto", tensors)).rpartition(".")[-1],
        memory={precision: _loaded_bytes(contents, parameters, precision) for precision in LOADED},
        quantized=modules,
        scales=tuple(sorted({_short(tensors[f"{path}.{part}"].dtype) for path in modules for part in SCALES})),
        missing=sorted(n for n in parameters.keys() - tensors.keys() if not n.startswith(contents.optional)),
        left_over=by_part.get(UNKNOWN, []),
    )


def _is_ours(name: str, parameters: Mapping[str, mx.array], shapes: Mapping[str, tuple[int, int]]) -> bool:
    """Whether the model has a tensor of this name, or would have if its module were (rightly) quantized."""
    path, _, last = name.rpartition(".")
    return name in parameters or name.startswith(UNUSED) or (path in shapes and last in SCALES)


def _part_of(name: str) -> str:
    return next((part for part, prefix in PARTS.items() if name.startswith(prefix)), UNKNOWN)


def _part(part: str, names: Iterable[str], contents: Contents, shapes: Mapping[str, tuple[int, int]]) -> Part:
    modules, tensors = contents.plan.modules, {name: contents.tensors[name] for name in names}
    stored = Counter[str]()
    for name, value in tensors.items():
        path, _, last = name.rpartition(".")
        if path not in modules:
            stored[_short(value.dtype)] += value.nbytes
        elif last == "weight":
            stored[f"{modules[path].bits}-bit"] += value.nbytes
        elif last not in SCALES:
            stored[_short(value.dtype)] += value.nbytes
    return Part(
        name=part,
        tensors=len(tensors),
        parameters=sum(_numbers(name, value, shapes) for name, value in tensors.items()),
        bytes=sum(value.nbytes for value in tensors.values()),
        stored=tuple(sorted(stored, key=lambda kind: (kind.endswith("-bit"), -stored[kind], kind))),
        quantized=sum(f"{path}.weight" in tensors for path in modules),
    )


def _numbers(name: str, value: mx.array, shapes: Mapping[str, tuple[int, int]]) -> int:
    """How many numbers of the model a tensor holds."""
    path, _, last = name.rpartition(".")
    if last in SCALES:
        return 0
    if value.dtype == mx.uint32 and path in shapes:
        outputs, inputs = shapes[path]
        return outputs * inputs
    return value.size


def _short(dtype: mx.Dtype) -> str:
    """``bf16`` for ``mlx.core.bfloat16``, ``u32`` for ``mlx.core.uint32``."""
    return str(dtype).rpartition(".")[-1].replace("float", "f").replace("uint", "u").replace("int", "i")


def _loaded_bytes(contents: Contents, parameters: Mapping[str, mx.array], precision: Precision) -> int:
    """Memory of the stored weights once loaded, each on its own; what is absent takes none."""
    wanted = dtypes(parameters, contents.tensors, chosen(precision, contents.tensors))
    present = {name: value.size for name, value in parameters.items() if name in contents.tensors}
    return sum(size * (wanted[name].size if name in wanted else LOADED_INTEGER) for name, size in present.items())


def _settings(weights: Weights) -> list[tuple[Quantization, list[str]]]:
    """Every setting and its modules' paths, the most frequent setting first."""
    paths: dict[Quantization, list[str]] = {}
    for path, setting in sorted(weights.quantized.items()):
        paths.setdefault(setting, []).append(path)
    return sorted(paths.items(), key=lambda item: (-len(item[1]), item[0].bits, item[0].group_size))


def _counts(paths: Iterable[str]) -> dict[str, int]:
    """Modules by part, the part with most of them first."""
    found = Counter(_part_of(f"{path}.") for path in paths)
    return dict(sorted(found.items(), key=lambda item: (-item[1], list(PARTS).index(item[0]))))


# ------------------------------------------------------------------------------------------ reporting


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
    return "\n".join(_printable(line) for line in lines)


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
            yield from (f"  {line}" for line in found)
    if inspection.passed:
        yield "nothing is missing, left over or inconsistent"
    if inspection.weights is None:
        yield "The tensors were not compared with the model: what is said above comes first."
    yield NOTE


def _printable(line: str) -> str:
    """A line that stays one and cannot move the cursor, whatever a file calls its tensors."""
    return "".join(c if c.isprintable() else "�" for c in line.replace("\n", "\\n"))


def inspection_json(inspection: Inspection) -> dict[str, Any]:
    """The whole inspection in JSON's types: every name, where the text has the first 20.

    ``model`` and ``weights`` are null where they cannot be told.
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
