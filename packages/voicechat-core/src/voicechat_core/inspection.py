"""What a checkpoint holds and everything that is wrong with it, from the headers of its files. Knows no values.

It says what a load would say of files, names, shapes and vocabularies, but all of it and not only the first. No weight
is read, so that it takes no longer for a large checkpoint than for a small one.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from voicechat_core.checkpoint import UNUSED, Contents, check_directory, examine
from voicechat_core.config import VoiceChatConfig
from voicechat_core.errors import CheckpointError, ConfigError
from voicechat_core.model import char_table
from voicechat_core.nn.linear import matrices
from voicechat_core.precision import Precision, dtypes, resolved
from voicechat_core.quantization import Quantization
from voicechat_core.tokenizer import RnntVocabulary, Tokenizer
from voicechat_core.weights import named_parameters

__all__ = ["Inspection", "ModelFacts", "Part", "Weights", "inspect", "part_of"]

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
    """One directory; without a config ``model`` and ``weights`` are None, ``weights`` also if its sizes make no model.

    What a shard holds that cannot be read is missing, and said to be.
    """

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
    check_directory(directory)
    try:
        config = VoiceChatConfig.from_file(directory / "config.json")
    except ConfigError as error:
        return Inspection(directory, None, None, [str(error)], [])
    problems: list[str] = []
    size = config.text_config.vocab_size
    _tried(lambda: char_table(config, Tokenizer.from_directory(directory, size)), problems)
    vocabulary = _tried(lambda: RnntVocabulary.from_checkpoint(directory, config), problems)
    transcript = vocabulary is None or vocabulary.enabled
    warnings = [] if transcript else ["no RNNT vocabulary: there will be no user transcript"]
    contents = _tried(lambda: examine(directory, config, transcript=transcript), problems)
    if contents is not None:
        problems += [*contents.file_faults, *contents.problems]
        warnings += contents.warnings
    weights = None if contents is None else _weights(contents)
    return Inspection(directory, _facts(directory, config, vocabulary), weights, problems, warnings)


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
        part = part_of(name) if _is_ours(name, parameters, shapes) else UNKNOWN
        by_part.setdefault(part, []).append(name)
    return Weights(
        parts=[_part(part, names, contents, shapes) for part, names in by_part.items()],
        total=_part("total", tensors, contents, shapes),
        auto=str(resolved("auto", tensors)).rpartition(".")[-1],
        memory={precision: _loaded_bytes(contents, parameters, precision) for precision in LOADED},
        quantized=modules,
        scales=tuple(sorted({_short(tensors[f"{path}.{part}"].dtype) for path in modules for part in SCALES})),
        missing=sorted(n for n in parameters.keys() - tensors.keys() if not n.startswith(contents.optional)),
        left_over=by_part.get(UNKNOWN, []),
    )


def _is_ours(name: str, parameters: Mapping[str, mx.array], shapes: Mapping[str, tuple[int, int]]) -> bool:
    """Whether the model has a tensor of this name, or would have if its module were (rightly) quantized."""
    path, _, last = name.rpartition(".")
    return name in parameters or UNUSED.fullmatch(name) is not None or (path in shapes and last in SCALES)


def part_of(name: str) -> str:
    """The part that a tensor's name belongs to."""
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
    wanted = dtypes(parameters, contents.tensors, resolved(precision, contents.tensors))
    present = {name: value.size for name, value in parameters.items() if name in contents.tensors}
    return sum(size * (wanted[name].size if name in wanted else LOADED_INTEGER) for name, size in present.items())
