"""What a caller asks of a run, checked before any work: the same for a recording and for a live session."""

import operator
import re
from numbers import Integral, Real

import numpy as np

from voicechat_core.errors import ContextLimitError, InputError
from voicechat_core.model import VoiceChatModel
from voicechat_core.noise import check_seed

__all__ = ["check_arguments", "check_flags", "check_positions", "heard_samples", "whole"]


def check_arguments(
    system_prompt: str | None = None,
    seed: int = 0,
    extra_decoding_seconds: float = 0.0,
    max_frames: int | None = None,
    tts_context_frames: int | None = None,
    tool_wait_frames: int | None = None,
) -> None:
    """Refuse what ``generate`` would refuse, without a model: a caller may look before loading one.

    Raises:
        InputError: naming the argument and its value.
    """
    check_seed(seed)
    if not isinstance(system_prompt, str | None):
        raise InputError(f"system_prompt is {system_prompt!r}; text or None is needed")
    if system_prompt is not None and (lone := re.search("[\ud800-\udfff]", system_prompt)):
        raise InputError(f"system_prompt holds the lone surrogate {lone[0]!r} at {lone.start()}")
    number = isinstance(extra_decoding_seconds, Real)
    # A century: more is no recording, and would overflow on the way to samples.
    if not number or not 0 <= extra_decoding_seconds < 3.2e9:
        raise InputError(
            f"extra_decoding_seconds is {extra_decoding_seconds!r}; a finite number of at least 0 is needed"
        )
    counts = (
        ("max_frames", max_frames, 0), ("tts_context_frames", tts_context_frames, 1),
        ("tool_wait_frames", tool_wait_frames, 1),
    )  # fmt: skip
    for name, value, least in counts:
        if value is not None and not (isinstance(value, Integral) and not isinstance(value, bool) and value >= least):
            raise InputError(f"{name} is {value!r}; a whole number of at least {least} is needed")


def check_flags(**flags: bool) -> None:
    """Refuse what is neither true nor false.

    Raises:
        InputError: naming the flag and its value.
    """
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise InputError(f"{name} is {value!r}; True or False is needed")


def whole(number: int | None) -> int | None:
    """A whole number of any library as Python's own."""
    return None if number is None else operator.index(number)


def check_positions(model: VoiceChatModel, prompt_length: int, frames: int) -> None:
    """Refuse a timeline longer than the model's positions.

    Raises:
        ContextLimitError: with the positions needed and the limit.
    """
    limit = model.config.text_config.max_position_embeddings
    if prompt_length + frames > limit:
        raise ContextLimitError(
            f"{prompt_length} prompt tokens and {frames} frames are {prompt_length + frames} positions; "
            f"max_position_embeddings is {limit}"
        )


def heard_samples(model: VoiceChatModel, samples: int, extra_seconds: float, max_frames: int | None) -> int:
    """How many samples a run hears: the recording's, silence after it, or what ``max_frames`` leaves of both."""
    length = samples + int(extra_seconds * model.config.input_sample_rate)
    return length if max_frames is None else min(length, max_frames * model.config.input_frame_samples)
