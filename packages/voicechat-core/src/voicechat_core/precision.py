"""Which number format each parameter is kept and computed in.

``float32`` is the precision in which everything is proved. ``bfloat16`` halves what a frame reads: dense matrices are
bfloat16, and so are what matrices give, the language model's residual stream and the caches of attention. All else
stays float32: the other residual streams, norms, softmax, the sampler and its tables, the state space recurrence, the
transcript branch and the codec. Packed matrices are multiplied by their scales as these are stored (float16 ones
widened): rounded to bfloat16, they make an 8-bit build eight times as wrong. ``auto`` is whichever of the two
precisions a checkpoint's dense matrices are stored in; what packed matrices give it leaves in the dtype of their
scales, float32 in the published builds, and with it the residual stream between them. ``bfloat16`` rounds that too.
"""

import re
from collections.abc import Mapping
from typing import Literal, get_args

import mlx.core as mx

from voicechat_core.errors import InputError

__all__ = ["PRECISIONS", "Precision", "check_precision", "dtype_of", "dtypes", "resolved"]

Precision = Literal["auto", "float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

# Matrices that stay float32, whatever the precision.
FLOAT32 = re.compile(
    r"stt_model\.rnnt_.*"  # its state runs on for a whole session, and drifts in less
    r"|stt_model\.perception\.encoder\.pre_encode\.conv\..*"  # log-mel values of -17 lie 0.06 apart in bfloat16
    r"|.*\.mixer\.conv1d\..*"  # a part of the recurrence; 4 numbers a channel
    r"|tts_model\.audio_codec\.decoder\..*"  # NVIDIA runs it in float32 even where all else is bfloat16
    r"|tts_model\.tts_model\.rvq_embs"  # the nearest of two codes must not be a matter of rounding
    r"|tts_model\.tts_model\.mog_head\.proj_(logits|logs|else)\..*"  # nor the component drawn, nor its size
    r"|tts_model\.audio_prompt_latents\..*"  # summed into the stream, once a session
)
# Matrices that are kept as they are stored: the codec's, widened where they are read, outside the frames or a row at a
# time; and scales, in whose dtype the packed matrices are multiplied.
AS_STORED = re.compile(r"tts_model\.audio_codec\.(encoder|prvq)\..*|.*\.(scales|biases)")


def check_precision(precision: str) -> Precision:
    """A precision, if it exists; others are refused before anything is loaded.

    Raises:
        InputError: naming it and those that do.
    """
    if precision not in PRECISIONS:
        raise InputError(f"precision is {precision!r}; one of {', '.join(PRECISIONS)} is needed")
    return precision


def resolved(precision: str, tensors: Mapping[str, mx.array]) -> mx.Dtype:
    """The dtype that a precision stands for with these stored tensors.

    Raises:
        InputError: for a precision that does not exist.
    """
    check_precision(precision)
    if precision == "auto":
        return stored_dtype(tensors)
    return mx.bfloat16 if precision == "bfloat16" else mx.float32


def stored_dtype(tensors: Mapping[str, mx.array]) -> mx.Dtype:
    """bfloat16 if most numbers of the dense matrices that are not float32 anyway are stored so, else float32.

    float16 counts as float32, which holds it exactly: bfloat16 would lose digits, and float16 overflows. Where every
    matrix is packed, their scales decide.
    """
    floats = {n: x for n, x in tensors.items() if x.ndim > 1 and mx.issubdtype(x.dtype, mx.floating)}
    dense = [x for n, x in floats.items() if not (FLOAT32.fullmatch(n) or AS_STORED.fullmatch(n))]
    voters = dense or [x for n, x in floats.items() if n.endswith(".scales")]
    in_favour = sum(x.size for x in voters if x.dtype == mx.bfloat16)
    return mx.bfloat16 if 2 * in_favour > sum(x.size for x in voters) else mx.float32


def dtypes(parameters: Mapping[str, mx.array], stored: Mapping[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.Dtype]:
    """The dtype of each floating parameter: the float32 ones, those as stored, and all others in ``dtype``."""
    result = {}
    for name, value in parameters.items():
        if mx.issubdtype(value.dtype, mx.floating):
            own = dtype_of(name, parameters, dtype)
            keeps = own != mx.float32 and AS_STORED.fullmatch(name) and name in stored
            result[name] = _kept(name, stored) if keeps else own
    return result


def _kept(name: str, stored: Mapping[str, mx.array]) -> mx.Dtype:
    """As stored; but scales are bfloat16 only in pairs, for a product takes one dtype, and float16 would overflow."""
    path, _, part = name.rpartition(".")
    if part not in ("scales", "biases"):
        return stored[name].dtype
    pair = {stored[f"{path}.{other}"].dtype for other in ("scales", "biases") if f"{path}.{other}" in stored}
    return mx.bfloat16 if pair == {mx.bfloat16} else mx.float32


def dtype_of(name: str, parameters: Mapping[str, mx.array], dtype: mx.Dtype) -> mx.Dtype:
    """What a parameter is kept in and its module gives; vectors are float32, but the bias of a matrix goes with it."""
    matrix = f"{name.removesuffix('.bias')}.weight" if name.endswith(".bias") else name
    is_wide = parameters.get(matrix, parameters[name]).ndim < 2 or FLOAT32.fullmatch(name)
    return mx.float32 if is_wide else dtype
