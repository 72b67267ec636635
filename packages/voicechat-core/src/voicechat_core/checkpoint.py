"""Directory -> model: what a published checkpoint holds, and what it must not.

Every tensor has its parameter and every parameter its tensor. Dense floating weights become float32, the precision
in which everything is proved.
"""

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from voicechat_core.config import VoiceChatConfig
from voicechat_core.errors import CheckpointError
from voicechat_core.model import Networks, VoiceChatModel
from voicechat_core.nn.layout import checkpoint_axes, to_checkpoint
from voicechat_core.nn.mel import filterbank, hann_window
from voicechat_core.tokenizer import RnntVocabulary, Tokenizer
from voicechat_core.weights import assign, listed, named_parameters, read_tensors

__all__ = ["checkpoint_tensors", "load_model", "load_networks"]

# Tensors that are stored but not used: recomputed in float64 (featurizer), training statistics (variances), or
# constants that are checked instead (control codes).
UNUSED_PREFIXES = ("stt_model.perception.preprocessor.", "tts_model.audio_codec.prvq._variance_list.")
CONTROL_CODES = "tts_model._control_codes"
TRANSCRIPT_PREFIXES = ("stt_model.rnnt_decoder.", "stt_model.rnnt_joint.")


def load_model(directory: Path) -> VoiceChatModel:
    """Load everything a checkpoint directory holds.

    Raises:
        CheckpointError: naming the file or the tensor, and both values where two disagree.
    """
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "no such directory"
        raise CheckpointError(f"{directory}: {what}; a checkpoint is one that holds config.json and safetensors files")
    config = VoiceChatConfig.from_file(directory / "config.json")
    tokenizer = Tokenizer.from_directory(directory, config.text_config.vocab_size)
    vocabulary = RnntVocabulary.from_checkpoint(directory, config)
    try:
        networks = load_networks(directory, config, transcript=vocabulary.enabled)
        return VoiceChatModel.from_networks(config, networks, tokenizer, vocabulary)
    except CheckpointError as error:
        where = "" if str(error).startswith(str(directory)) else f"{directory}: "
        raise CheckpointError(f"{where}{error}") from error


def load_networks(directory: Path, config: VoiceChatConfig, *, transcript: bool = True) -> Networks:
    """The four networks with the directory's weights, in float32; without ``transcript`` the RNNT's may be absent."""
    tensors = read_tensors(directory)
    _refuse_quantized(directory, tensors)
    _check_control_codes(config, tensors)
    for name in [name for name in tensors if name.startswith(UNUSED_PREFIXES)]:
        del tensors[name]
    networks = Networks(config)
    optional = () if transcript else TRANSCRIPT_PREFIXES
    assign(networks, tensors, optional=optional)
    if tensors:
        raise CheckpointError(f"{directory}: {listed('tensors that this model does not have', sorted(tensors))}")
    _check_silence(networks, config)
    return networks


def checkpoint_tensors(networks: Networks, config: VoiceChatConfig) -> Iterator[tuple[str, mx.array]]:
    """Names and arrays as a checkpoint stores them: PyTorch axis order, integer buffers int64, constants included."""
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


def _refuse_quantized(directory: Path, tensors: dict[str, mx.array]) -> None:
    quantized = sorted(name.removesuffix(".scales") for name in tensors if name.endswith(".scales"))
    if quantized:
        raise CheckpointError(
            f"{directory}: {listed('quantized modules', quantized)}; this version loads dense checkpoints only"
        )


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
