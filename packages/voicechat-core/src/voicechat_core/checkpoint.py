"""Directory -> model: what a published checkpoint holds, and what it must not.

Every tensor has its parameter and every parameter its tensor. A matrix with scales is a quantized one, by the rule of
``quantization``; ``precision`` says what everything else is kept in.
"""

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from voicechat_core.builtin import SMALL
from voicechat_core.config import VoiceChatConfig
from voicechat_core.errors import CheckpointError
from voicechat_core.model import Networks, VoiceChatModel
from voicechat_core.nn.layout import checkpoint_axes, to_checkpoint
from voicechat_core.nn.linear import matrices
from voicechat_core.nn.mel import filterbank, hann_window
from voicechat_core.precision import Precision, check_precision, dtype_of, dtypes, resolved
from voicechat_core.quantization import Plan, plan
from voicechat_core.tokenizer import RnntVocabulary, Tokenizer
from voicechat_core.weights import assign, listed, mismatches, mismatches_text, named_parameters, readable_tensors

__all__ = [
    "Contents",
    "check_directory",
    "checkpoint_tensors",
    "examine",
    "filled",
    "load_model",
    "load_networks",
    "matched",
    "refuse_faulty",
]

log = logging.getLogger(__name__)

CONTROL_CODES = "tts_model._control_codes"
TABLES, CODEBOOKS = "tts_model.tts_model.rvq_embs", "tts_model.audio_codec.prvq.mus_list."
# Tensors that are stored but not used: recomputed in float64 (featurizer), training statistics (variances), or
# constants that are checked instead (control codes).
UNUSED = re.compile(
    r"stt_model\.perception\.preprocessor\.featurizer\.(fb|window)"
    r"|tts_model\.audio_codec\.prvq\._variance_list\.[0-9]+\.variance"
    r"|tts_model\._control_codes"
)
TRANSCRIPT_PREFIXES = ("stt_model.rnnt_decoder.", "stt_model.rnnt_joint.")


@dataclass(frozen=True)
class Contents:
    """What a directory's tensors are to the model, found without reading any.

    ``networks`` have room for exactly these tensors and hold none yet. ``file_faults`` and ``problems`` forbid loading,
    ``warnings`` not; what lies in a file that cannot be read counts as missing.
    """

    config: VoiceChatConfig
    tensors: dict[str, mx.array]
    networks: Networks
    plan: Plan
    optional: tuple[str, ...]
    file_faults: list[str]
    problems: list[str]

    @property
    def warnings(self) -> list[str]:
        """What is odd and loads all the same."""
        one, other = self.config.quantization, self.config.quantization_config
        differ = bool(one) and bool(other) and one != other
        said = ["config.json: quantization and quantization_config differ; the first is taken"] if differ else []
        return said + self.plan.warnings


def check_directory(directory: Path) -> None:
    """Refuse what is no directory.

    Raises:
        CheckpointError: saying what was looked for.
    """
    try:
        is_directory, exists = directory.is_dir(), directory.exists()
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be looked at: {error.strerror}") from error
    if not is_directory:
        what = "not a directory" if exists else "no such directory"
        wanted = f"a checkpoint is {SMALL}, one that holds config.json and safetensors files, or owner/name on the hub"
        raise CheckpointError(f"{directory}: {what}; {wanted}")


def load_model(directory: Path, precision: Precision = "float32", *, compiled: bool = False) -> VoiceChatModel:
    """Load everything a checkpoint directory holds; ``compiled`` is as in ``VoiceChatModel``.

    Raises:
        CheckpointError: naming the file or the tensor, and both values where two disagree.
        InputError: for a precision that does not exist.
    """
    check_precision(precision)
    check_directory(directory)
    config = VoiceChatConfig.from_file(directory / "config.json")
    tokenizer = Tokenizer.from_directory(directory, config.text_config.vocab_size)
    vocabulary = RnntVocabulary.from_checkpoint(directory, config)
    try:
        networks = load_networks(directory, config, precision, transcript=vocabulary.enabled)
        return VoiceChatModel.from_networks(config, networks, tokenizer, vocabulary, compiled=compiled)
    except CheckpointError as error:
        where = "" if str(error).startswith(str(directory)) else f"{directory}: "
        raise CheckpointError(f"{where}{error}") from error


def load_networks(
    directory: Path, config: VoiceChatConfig, precision: Precision = "float32", *, transcript: bool = True
) -> Networks:
    """The four networks with the directory's weights; without ``transcript`` the RNNT's may be absent.

    Raises:
        CheckpointError: naming the file or the tensor, and both values where two disagree.
    """
    contents = examine(directory, config, transcript=transcript)
    refuse_faulty(directory, contents)
    if contents.warnings:
        log.warning("%s: %s", directory, _first_of(contents.warnings))
    return filled(contents, precision)


def filled(contents: Contents, precision: Precision = "float32") -> Networks:
    """The networks with the tensors, which are taken out of ``contents``, each in its dtype.

    Raises:
        CheckpointError: naming the tensor, for a value that is not finite or not what the config makes it.
    """
    _check_control_codes(contents.config, contents.tensors)
    _fill(contents, precision)
    mx.clear_cache()  # what the reading took is not needed again
    _check_silence(contents.networks, contents.config)
    return contents.networks


def _fill(contents: Contents, precision: Precision) -> None:
    """Move the tensors into the networks, each in its dtype."""
    networks, tensors, parameters = contents.networks, contents.tensors, dict(named_parameters(contents.networks))
    dtype, packed = resolved(precision, tensors), matrices(networks)
    # Scales in float32 make float32 results. Rounded, they would be widened again for the next packed matrix, and cost
    # digits and time: only who asks for a precision gets it.
    for path in contents.plan.modules if precision != "auto" else ():
        packed[path].round_to(dtype_of(f"{path}.weight", parameters, dtype))
    wanted = dtypes(parameters, tensors, dtype)
    for name in [name for name in tensors if UNUSED.fullmatch(name)]:
        del tensors[name]
    once = _codebooks_once(tensors, contents.config)
    assign(networks, tensors, optional=(*contents.optional, *once), dtypes=wanted)
    if once:
        networks.tts_model.audio_codec.prvq.share(networks.tts_model.tts_model.rvq_embs)


def examine(directory: Path, config: VoiceChatConfig, *, transcript: bool = True) -> Contents:
    """Match a directory's tensors with the model, by names, shapes and kinds of numbers alone.

    Raises:
        CheckpointError: when the config's sizes make no model.
    """
    tensors, file_faults = readable_tensors(directory)
    return matched(tensors, config, transcript=transcript, file_faults=file_faults)


def matched(
    tensors: dict[str, mx.array],
    config: VoiceChatConfig,
    *,
    transcript: bool = True,
    file_faults: Iterable[str] = (),
) -> Contents:
    """What ``tensors`` in a checkpoint's names, axes and kinds of numbers are to the model, wherever they come from.

    Raises:
        CheckpointError: when the config's sizes make no model.
    """
    networks = _networks(config)
    every = matrices(networks)
    found = plan(config.quantization_map, tensors, {path: matrix.shape for path, matrix in every.items()})
    for path, quantization in found.modules.items():
        every[path].make_packed(quantization)
    optional = () if transcript else TRANSCRIPT_PREFIXES
    faults = [fault for fault in mismatches(networks, tensors, optional=optional) if not _spoken_for(fault[0], found)]
    known = {name for name, _ in named_parameters(networks)}
    unknown = sorted(name for name in tensors.keys() - known if not UNUSED.fullmatch(name))
    extra = [name for name in unknown if not _spoken_for(name, found)]
    left_over = [listed("tensors that this model does not have", extra)] if extra else []
    problems = [*found.problems.values(), *mismatches_text(faults), *left_over]
    return Contents(config, tensors, networks, found, optional, list(file_faults), problems)


def refuse_faulty(directory: Path, contents: Contents) -> None:
    """Refuse what ``examine`` found to be faulty.

    Raises:
        CheckpointError: with the first fault, those of files before all others.
    """
    if contents.file_faults:  # they name their file
        raise CheckpointError(contents.file_faults[0])
    if contents.problems:
        raise CheckpointError(f"{directory}: {_first_of(contents.problems)}")


def _networks(config: VoiceChatConfig) -> Networks:
    try:
        return Networks(config)
    except (OverflowError, MemoryError, ValueError) as error:
        raise CheckpointError(f"config.json: its sizes make no model that could be built: {error}") from error


def _spoken_for(name: str, found: Plan) -> bool:
    """Whether a tensor's module has a problem of its own already."""
    return name.rpartition(".")[0] in found.problems


def _first_of(lines: list[str]) -> str:
    return lines[0] + (f"; and {len(lines) - 1} more, see voicechat inspect" if len(lines) > 1 else "")


def _codebooks_once(tensors: dict[str, mx.array], config: VoiceChatConfig) -> list[str]:
    """Drop the codec's codebooks where the speech decoder's tables equal them to the bit: one copy serves both."""
    tables, names = tensors[TABLES], [f"{CODEBOOKS}{level}" for level in range(config.codec_config.num_quantizers)]
    equal = all(mx.array_equal(table, tensors[name]).item() for table, name in zip(tables, names, strict=True))
    return [name for name in names if tensors.pop(name, None) is not None] if equal else []


def checkpoint_tensors(networks: Networks, config: VoiceChatConfig) -> Iterator[tuple[str, mx.array]]:
    """Names and arrays as a dense checkpoint stores them: PyTorch axis order, integer buffers int64, constants."""
    axes = dict(checkpoint_axes(networks))
    for name, value in named_parameters(networks):
        stored = to_checkpoint(value, axes.get(name))
        yield name, stored if mx.issubdtype(stored.dtype, mx.floating) else stored.astype(mx.int64)
    yield from _unused_tensors(config)


def _unused_tensors(config: VoiceChatConfig) -> Iterator[tuple[str, mx.array]]:
    mel = config.audio_config.preprocessor
    yield "stt_model.perception.preprocessor.featurizer.fb", mx.array(filterbank(mel))[None]
    yield "stt_model.perception.preprocessor.featurizer.window", mx.array(hann_window(mel.window_samples))
    for level in range(config.codec_config.num_quantizers):
        yield f"tts_model.audio_codec.prvq._variance_list.{level}.variance", mx.array(1.0)
    yield CONTROL_CODES, mx.array(_control_codes(config), dtype=mx.int64)


def _control_codes(config: VoiceChatConfig) -> list[int]:
    """Ids beyond the codebook: begin, end, nothing."""
    size = config.codec_config.codebook_size
    return [size + 2, size + 1, size]


def _check_control_codes(config: VoiceChatConfig, tensors: dict[str, mx.array]) -> None:
    stored = tensors.pop(CONTROL_CODES, None)
    if stored is not None and stored.tolist() != _control_codes(config):
        raise CheckpointError(f"{CONTROL_CODES} is {stored.tolist()}; codebook_size makes it {_control_codes(config)}")


def _check_silence(networks: Networks, config: VoiceChatConfig) -> None:
    silence, size = np.array(networks.tts_model.codec_silence_tokens), config.codec_config.codebook_size
    if silence.min() < 0 or silence.max() >= size:
        found = f"{silence.min()} to {silence.max()}"
        raise CheckpointError(f"tts_model.codec_silence_tokens has codes {found}; codebook_size is {size}")
