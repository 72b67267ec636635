"""Random weights that keep every activation near one, so that each branch of the networks is exercised.

A parameter's numbers follow from the seed and its own name: adding or reordering parameters changes no other.
"""

import zlib
from collections.abc import Callable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from voicechat_core.config import VoiceChatConfig
from voicechat_core.model import Networks, SttModel
from voicechat_core.nn.char_table import CharTable
from voicechat_core.weights import named_parameters

__all__ = ["initial", "random_networks"]

SPEECH_DECODER = "tts_model.tts_model."
Values = NDArray[np.float32]
Initial = Callable[[Values], Values]  # standard normal draws in a parameter's shape -> its values


def _rows(first: float, last: float, z: Values) -> Values:
    """Evenly spaced values along the last axis, a little shaken."""
    return np.linspace(first, last, z.shape[-1], dtype=np.float32) + 0.1 * z


def _scaled(gain: float) -> Initial:
    return lambda z: gain * z


def _around_one(z: Values) -> Values:
    return 1 + 0.2 * z


def _codebook(level: int, levels: int) -> Initial:
    """Random directions, shorter at each level as residuals are."""
    radius = 2.0 * (levels - level) / levels
    return lambda z: radius * z / np.linalg.norm(z, axis=-1, keepdims=True)


def _last_row_zero(z: Values) -> Values:
    """Embeddings whose last row stands for nothing: the RNNT's blank, the character encoder's padding."""
    return np.concatenate([0.7 * z[:-1], np.zeros_like(z[-1:])])


# The first entry whose suffix fits a parameter's name decides; what none fits is a matrix or a convolution.
SUFFIXES: tuple[tuple[str, Initial], ...] = (
    ("A_log", lambda z: np.log(np.linspace(1, 16, z.size, dtype=np.float32)) + 0.1 * z),
    ("dt_bias", lambda z: _rows(-7.0, 1.0, z)),
    ("mixer.D", lambda z: 1 + 0.3 * z),
    ("gate", _scaled(0.5)),
    ("residual_scale", _scaled(0.5)),
    ("bos_emb", _scaled(1.0)),
    ("null_emb", _scaled(1.0)),
    ("pos_bias_u", _scaled(0.3)),
    ("pos_bias_v", _scaled(0.3)),
    ("audio_prompt_latents.Aria", _scaled(1.0)),
    ("prediction.embed.weight", _last_row_zero),
    ("embed_subword.embed_tokens.weight", _last_row_zero),
    ("embed_tokens.weight", _scaled(0.7)),
    ("_emb.weight", _scaled(0.7)),
)


# Matrices that are to weigh more or less than the others.
GAINS = (
    ("audio_codec.decoder.layers.12", 0.3),  # spectra that the clamp mostly lets through
    ("audio_codec.decoder.layers.16", 0.3),
    ("rnnt_joint.enc", 2.0),  # what is said depends on the frame,
    ("rnnt_joint.pred", 5.0),  # and on what was said before
    ("dec_rnn", 2.0),
)


def initial(name: str, shape: tuple[int, ...], levels: int) -> Initial:
    """How a parameter's values come from standard normal draws; ``levels`` are the codebooks."""
    if "mus_list" in name:
        return _codebook(int(name.rsplit(".", 1)[-1]), levels)
    for suffix, how in SUFFIXES:
        if name.endswith(suffix):
            return how
    if len(shape) <= 1:
        is_norm = name.endswith("weight")
        return _around_one if is_norm and not name.startswith(SPEECH_DECODER) else _scaled(0.2)
    gain = next((gain for part, gain in GAINS if part in name), 1.0)
    return _scaled(gain / np.sqrt(_fan_in(name, shape)))


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Inputs that one output sums: a transposed convolution keeps its input channels first."""
    if name.startswith("tts_model.audio_codec.decoder") and len(shape) == 3 and shape[1] in (7, 9) and shape[2] > 1:
        return shape[0]
    if name.endswith("low_mat"):
        return shape[-1]
    return int(np.prod(shape[1:]))


def random_networks(config: VoiceChatConfig, chars: CharTable, seed: int) -> Networks:
    """The four networks with random weights, and integer buffers as the vocabulary demands."""
    networks = Networks(config)
    levels = config.codec_config.num_quantizers
    weights = []
    for name, value in named_parameters(networks):
        if not mx.issubdtype(value.dtype, mx.floating):
            continue
        rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
        draws = rng.standard_normal(value.shape, dtype=np.float32)
        weights.append((name, mx.array(initial(name, value.shape, levels)(draws).astype(np.float32))))
    networks.load_weights(weights, strict=False)
    _fill_buffers(networks, chars)
    _favour_blank(networks.stt_model)
    return networks


def _fill_buffers(networks: Networks, chars: CharTable) -> None:
    tts = networks.tts_model
    flags = tts.tts_model.embed_subword
    flags.subword_flag_emb.is_continuation = mx.array(chars.is_continuation)
    flags.bos_eos_emb.special_flags = mx.array(chars.special_flags)
    tts.tts_model.rvq_embs = mx.stack(tts.audio_codec.prvq.mus_list)
    tts.codec_silence_tokens = tts.audio_codec.silence_codes().astype(mx.int32).reshape(-1)
    mx.eval([value for _, value in named_parameters(networks)])


def _favour_blank(stt: SttModel) -> None:
    """Shift the blank's bias so that one frame in ten of a noise begins with a label: a transcript of some length."""
    noise = np.random.Generator(np.random.PCG64(0)).standard_normal(3 * 16000).astype(np.float32)
    encoded = stt.perception(mx.array(0.1 * noise)[None]).encoded
    nothing_said, _ = stt.rnnt_decoder(mx.zeros((1, 0), mx.int32))
    logits = np.array(stt.rnnt_joint(encoded, nothing_said))[0, :, 0]
    ahead = logits[:, :-1].max(axis=-1) - logits[:, -1]
    output = stt.rnnt_joint.joint_net[-1]
    output.bias[-1] = output.bias[-1] + float(np.quantile(ahead, 0.9))
