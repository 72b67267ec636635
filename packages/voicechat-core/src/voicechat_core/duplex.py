"""One frame of the timeline: the only place that knows the order of things inside a frame.

Position t, prompt and frames counted together, takes

    x[t] = A[t] + E(text[t-1]) + w * E(function[t-1])          w = function_channel_weight

where A is the projected audio of a frame or the embedding of a prompt token, and both histories start as PAD.
Then: the language trunk on x, both ids, or those that somebody forces in their place, the speech decoder on the text
id, its codes. What stands there is what feeds back, whoever chose it. Over the prompt the ids
are forced to PAD. The speech decoder does not run at position 0, whatever stands there.

Nothing said over a prompt reaches the speech decoder, so a prompt is two things that do not know each other:
one scan of the trunk (``listen``), and PAD steps of the speech decoder (``prompt_step``), or none where a session
leaves them out.

A frame is one graph: the text id stays on the device on its way into the speech decoder, and nothing here
waits for a value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from voicechat_core import frame as frames
from voicechat_core.model import VoiceChatModel
from voicechat_core.nn import state as states
from voicechat_core.nn.ear_tts import EarTtsState
from voicechat_core.nn.nemotron_h import NemotronHState
from voicechat_core.nn.sampler import Draws
from voicechat_core.noise import Noise
from voicechat_core.tools import Forced

__all__ = ["DuplexState", "Frame", "Mark", "SpeechState", "first_speech", "listen", "prompt_step", "start", "step"]


class Mark(Protocol):
    """Told of each stage that a frame has passed and of the values that the stage ends with; for measuring only."""

    def __call__(self, stage: str, *values: mx.array) -> None:
        """``stage`` is over."""


@dataclass
class SpeechState:
    """What the speech decoder leaves from one position to the next: ``steps`` were taken since the voice prompt."""

    ear_tts: EarTtsState
    codes: mx.array  # [1, 1, Q] int32, the previous codes
    steps: int = 0


@dataclass
class DuplexState:
    """What one position leaves to the next. ``position`` counts prompt tokens and frames together."""

    llm: NemotronHState
    speech: SpeechState
    text: mx.array  # [1, 1] int32, the previous text id
    function: mx.array  # [1, 1] int32, the previous function id
    position: int
    prompt_length: int


@dataclass
class Frame:
    """What positions give: ids ``[1, n]``, codes ``[1, n, Q]``, and the values behind the ids."""

    text: mx.array
    function: mx.array
    codes: mx.array
    inputs: mx.array  # [1, n, H], the fused input
    hidden: mx.array  # [1, n, H]
    text_logits: mx.array  # [1, n, V]
    function_logits: mx.array  # [1, n, V]
    finite: mx.array  # [], whether everything behind the ids and the codes is a number


def start(
    model: VoiceChatModel,
    ear_tts: EarTtsState,
    prompt_ids: list[int],
    noise: Noise,
    codes_at_zero: mx.array | None = None,
    after_each: Callable[[int], None] | None = None,
) -> tuple[Frame | None, DuplexState]:
    """Begin a timeline and run its prompt: one scan of the trunk, one PAD step of the speech decoder a token.

    ``ear_tts`` is the state after the voice prompt; it is consumed. ``codes_at_zero`` ``[1, 1, Q]`` stands where
    the speech decoder does not run; by default the codec's silence. ``after_each`` is told the positions done. Without
    a prompt there is no frame.
    """
    speech, spoken = first_speech(model, ear_tts), [_at_zero(model, codes_at_zero)]
    finite = mx.array(True)
    for position in range(len(prompt_ids)):
        if position:
            speech, step_finite = prompt_step(model, speech, noise)
            spoken.append(speech.codes)
            finite = finite & step_finite
        if after_each is not None:
            after_each(position + 1)
    frame, state = listen(model, prompt_ids, speech)
    if frame is not None:
        frame.codes, frame.finite = mx.concatenate(spoken, axis=1), frame.finite & finite
    return frame, state


def first_speech(model: VoiceChatModel, ear_tts: EarTtsState) -> SpeechState:
    """The speech decoder right after the voice prompt: it has said nothing yet."""
    tts = model.config.tts_config
    return SpeechState(ear_tts, mx.full((1, 1, tts.num_quantizers), tts.codebook_size, dtype=mx.int32))


def prompt_step(model: VoiceChatModel, speech: SpeechState, noise: Noise) -> tuple[SpeechState, mx.array]:
    """One step over a system prompt, whose every text id is PAD, and whether it was finite. The state is consumed.

    It waits: one graph over a long prompt would hold all of its activations at once.
    """
    speech, finite = _speak(model, _pad(model), speech, noise.prompt_step(speech.steps))
    mx.eval(speech.codes, finite)
    return speech, finite


def listen(model: VoiceChatModel, prompt_ids: list[int], speech: SpeechState) -> tuple[Frame | None, DuplexState]:
    """Begin a timeline by one scan of the trunk over the prompt; ``speech`` has taken what steps it is to take.

    The frame has no codes: they are the speech decoder's. Without a prompt there is none.
    """
    pad, llm = _pad(model), model.networks.stt_model.llm.new_state(1)
    state = DuplexState(llm, speech, pad, pad, 0, len(prompt_ids))
    if not prompt_ids:
        return None, state
    frame = _read(model, prompt_ids, state)
    state.position = len(prompt_ids)
    return frame, state


def step(
    model: VoiceChatModel,
    audio: mx.array,
    state: DuplexState,
    noise: Noise,
    codes_at_zero: mx.array | None = None,
    mark: Mark | None = None,
    forced: Forced | None = None,
) -> tuple[Frame, DuplexState]:
    """One frame: ``audio`` ``[1, 1, H]`` is its projected encoder output. The state is consumed.

    ``forced`` is what stands on the channels whatever the model chooses; by default that is always its own.
    """
    frame = _think(model, audio, state)
    if forced is not None:
        frame.text, frame.function = _standing(model, frame, forced)
    if mark is not None:
        mark("language", frame.text, frame.function, frame.finite, *states.leaves(state.llm))
    position, state.position = state.position, state.position + 1
    if position == 0:
        frame.codes = _at_zero(model, codes_at_zero)
    else:
        draws = noise.frame(position - state.prompt_length, state.speech.steps)
        state.speech, spoken_finite = _speak(model, frame.text, state.speech, draws)
        frame.codes, frame.finite = state.speech.codes, frame.finite & spoken_finite
    if mark is not None:
        mark("tts", frame.codes, frame.finite, *states.leaves(state.speech))
    state.text, state.function = frame.text, frame.function
    return frame, state


def _think(model: VoiceChatModel, audio: mx.array, state: DuplexState) -> Frame:
    """The trunk and its two heads on one position."""
    at = model.networks.stt_model.llm.reserve(state.llm)
    ids, inputs, hidden, logits, finite = model.steps.language(state.llm, audio, state.text, state.function, at)
    return Frame(
        text=ids[:, :1],
        function=ids[:, 1:],
        codes=_no_codes(model),  # until it has spoken
        inputs=inputs,
        hidden=hidden,
        text_logits=logits[:, :1],
        function_logits=logits[:, 1:],
        finite=finite,
    )


def _read(model: VoiceChatModel, prompt_ids: list[int], state: DuplexState) -> Frame:
    """The trunk on the ``n`` positions of a prompt, whose histories are PAD. Nothing is chosen there."""
    stt = model.networks.stt_model
    pads = mx.repeat(_pad(model), len(prompt_ids), axis=1)
    audio = stt.embed_tokens(mx.array([prompt_ids], dtype=mx.int32))
    inputs = frames.fused(stt.embed_tokens, model.config.function_channel_weight, audio, pads, pads)
    hidden, state.llm = stt.llm.step(inputs, state.llm)
    logits = stt.lm_head(hidden), stt.function_head(hidden)  # computed only where somebody looks at them
    return Frame(pads, pads, _no_codes(model), inputs, hidden, *logits, mx.isfinite(hidden).all())


def _no_codes(model: VoiceChatModel) -> mx.array:
    return mx.zeros((1, 0, model.config.tts_config.num_quantizers), mx.int32)


def _standing(model: VoiceChatModel, frame: Frame, forced: Forced) -> tuple[mx.array, mx.array]:
    """The ids that stand at a position ``[1, 1]``: forced ones, else the model's own. Waits for none of them."""
    text = frame.text if forced.text is None else mx.full((1, 1), forced.text, dtype=mx.int32)
    function = frame.function if forced.function is None else mx.full((1, 1), forced.function, dtype=mx.int32)
    if forced.silenced_by is not None:
        text = mx.where(function == forced.silenced_by, _pad(model), text)
    return text, function


def _speak(model: VoiceChatModel, text: mx.array, speech: SpeechState, draws: Draws) -> tuple[SpeechState, mx.array]:
    """The speech decoder's next step, on one text id, and whether all was finite."""
    at = model.networks.tts_model.tts_model.reserve(speech.ear_tts)
    codes, finite = model.steps.speech(speech.ear_tts, text, speech.codes, draws, at)
    return SpeechState(speech.ear_tts, codes, speech.steps + 1), finite


def _at_zero(model: VoiceChatModel, codes: mx.array | None) -> mx.array:
    return model.silence_codes if codes is None else codes


def _pad(model: VoiceChatModel) -> mx.array:
    return mx.full((1, 1), model.config.pad_token_id, dtype=mx.int32)
