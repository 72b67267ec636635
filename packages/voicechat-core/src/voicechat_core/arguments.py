"""What a caller asks of a run, checked before any work: the same for a recording and for a live session."""

import operator
import re
from collections.abc import Mapping
from numbers import Integral, Real

import numpy as np

from voicechat_core.errors import ContextLimitError, InputError
from voicechat_core.model import VoiceChatModel
from voicechat_core.noise import check_seed
from voicechat_core.strict_json import shown
from voicechat_core.tools import WAIT_FRAMES, ToolFunctions

__all__ = ["check_arguments", "check_flags", "check_positions", "check_tools", "heard_samples", "whole"]


def check_arguments(
    system_prompt: str | None = None,
    seed: int = 0,
    extra_decoding_seconds: float = 0.0,
    max_frames: int | None = None,
    tts_context_frames: int | None = None,
    tool_wait_frames: int = WAIT_FRAMES,
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
    if max_frames is not None:
        _check_count("max_frames", max_frames, 0)
    if tts_context_frames is not None:
        _check_count("tts_context_frames", tts_context_frames, 1)
    _check_count("tool_wait_frames", tool_wait_frames, 1)


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {value!r}; a whole number of at least {least} is needed")


def check_flags(**flags: bool) -> None:
    """Refuse what is neither true nor false.

    Raises:
        InputError: naming the flag and its value.
    """
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise InputError(f"{name} is {value!r}; True or False is needed")


def check_tools(tools: ToolFunctions | None) -> None:
    """Refuse what are no functions by their names.

    Raises:
        InputError: naming the tool and what stands for it.
    """
    if tools is None:
        return
    if not isinstance(tools, Mapping):
        raise InputError(f"tools is {shown(tools)}; functions by their names are needed")
    for name, function in tools.items():
        if not isinstance(name, str):
            raise InputError(f"a tool's name is {shown(name)}; text is needed")
        if not callable(function):
            raise InputError(f"the tool {name!r} is {shown(function)}; a function is needed")


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
