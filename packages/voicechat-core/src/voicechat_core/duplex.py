"""One frame of the timeline: the only place that knows the order of things inside a frame.

Position t, prompt and frames counted together, takes

    x[t] = A[t] + E(text[t-1]) + w * E(function[t-1])          w = function_channel_weight

where A is the projected audio of a frame or the embedding of a prompt token, and both histories start as PAD.
Then: the language trunk on x, both ids, the speech decoder on the text id, its codes. Over the prompt the ids
are forced to PAD. The speech decoder does not run at position 0, whatever stands there.

A frame is one graph: the text id stays on the device on its way into the speech decoder, and nothing here
waits for a value.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from voicechat_core.model import VoiceChatModel
from voicechat_core.nn.ear_tts import EarTtsState
from voicechat_core.nn.nemotron_h import NemotronHState
from voicechat_core.noise import Noise

__all__ = ["DuplexState", "Frame", "start", "step"]


@dataclass
class DuplexState:
    """What one position leaves to the next. ``position`` counts prompt tokens and frames together."""

    llm: NemotronHState
    ear_tts: EarTtsState
    text: mx.array  # [1, 1] int32, the previous text id
    function: mx.array  # [1, 1] int32, the previous function id
    codes: mx.array  # [1, 1, Q] int32, the previous codes
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
    tts = model.config.tts_config
    pad = mx.full((1, 1), model.config.pad_token_id, dtype=mx.int32)
    nothing = mx.full((1, 1, tts.num_quantizers), tts.codebook_size, dtype=mx.int32)
    llm = model.networks.stt_model.llm.new_state(1)
    state = DuplexState(llm, ear_tts, pad, pad, nothing, 0, len(prompt_ids))
    if not prompt_ids:
        return None, state
    audio = model.networks.stt_model.embed_tokens(mx.array([prompt_ids], dtype=mx.int32))
    pads = mx.repeat(pad, len(prompt_ids), axis=1)
    frame = _think(model, audio, pads, pads, state)
    codes = []
    for _ in prompt_ids:
        spoken, finite = _speak(model, pad, state, noise, codes_at_zero)
        mx.eval(spoken)  # one graph over a long prompt would hold all of its activations at once
        codes.append(spoken)
        frame.finite = frame.finite & finite
        if after_each is not None:
            after_each(state.position)
    frame.text, frame.function = pads, pads
    frame.codes = mx.concatenate(codes, axis=1)
    return frame, state


def step(
    model: VoiceChatModel, audio: mx.array, state: DuplexState, noise: Noise, codes_at_zero: mx.array | None = None
) -> tuple[Frame, DuplexState]:
    """One frame: ``audio`` ``[1, 1, H]`` is its projected encoder output. The state is consumed."""
    frame = _think(model, audio, state.text, state.function, state)
    frame.codes, finite = _speak(model, frame.text, state, noise, codes_at_zero)
    # Over a prompt nothing is chosen, and its logits are never computed; here they are.
    frame.finite = frame.finite & finite & _finite(frame.text_logits) & _finite(frame.function_logits)
    state.text, state.function = frame.text, frame.function
    return frame, state


def _think(model: VoiceChatModel, audio: mx.array, text: mx.array, function: mx.array, state: DuplexState) -> Frame:
    """The trunk and its two heads on ``n`` positions whose histories are ``text`` and ``function`` ``[1, n]``."""
    stt = model.networks.stt_model
    weight = model.config.function_channel_weight
    inputs = audio + stt.embed_tokens(text) + weight * stt.embed_tokens(function)
    hidden, state.llm = stt.llm.step(inputs, state.llm)
    text_logits, function_logits = stt.lm_head(hidden), stt.function_head(hidden)
    return Frame(
        text=mx.argmax(text_logits, axis=-1).astype(mx.int32),
        function=mx.argmax(function_logits, axis=-1).astype(mx.int32),
        codes=state.codes,  # until it has spoken
        inputs=inputs,
        hidden=hidden,
        text_logits=text_logits,
        function_logits=function_logits,
        finite=_finite(hidden),
    )


def _speak(
    model: VoiceChatModel, text: mx.array, state: DuplexState, noise: Noise, codes_at_zero: mx.array | None
) -> tuple[mx.array, mx.array]:
    """The speech decoder on one text id: codes ``[1, 1, Q]``, and whether all was finite. Advances the position."""
    position, state.position = state.position, state.position + 1
    if position == 0:
        return model.silence_codes if codes_at_zero is None else codes_at_zero, mx.array(True)
    previous = _previous_codes(model, text, state)
    draws = _draws(noise, position, state.prompt_length)
    condition = model.subword_table[text]
    tts = model.networks.tts_model.tts_model
    state.codes, hidden, state.ear_tts = tts.step(condition, previous, draws, state.ear_tts)
    return state.codes, _finite(hidden)


def _finite(x: mx.array) -> mx.array:
    return mx.isfinite(x).all()


def _previous_codes(model: VoiceChatModel, text: mx.array, state: DuplexState) -> mx.array:
    """What the speech decoder hears of itself: its last frame, but silence when a turn ends, for that step only."""
    ended = (text == model.config.eos_token_id)[..., None]
    return mx.where(ended, model.silence_codes, state.codes)


def _draws(noise: Noise, position: int, prompt_length: int) -> tuple[mx.array, mx.array]:
    """The draws of one position: a prompt's are constants of the model, a frame's follow the seed and its index."""
    if position < prompt_length:
        return noise.prompt_step(position - 1)
    return noise.frame(position - prompt_length, position - 1)
