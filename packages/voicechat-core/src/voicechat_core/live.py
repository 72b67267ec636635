"""One frame of a live session, from microphone samples to speech: perception, transcript, duplex step, codec.

Weights and order only: chunks, text and events are the session's. The state is a value outside of the networks; a step
consumes it.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from voicechat_core import duplex
from voicechat_core.duplex import DuplexState, Mark
from voicechat_core.errors import ModelError
from voicechat_core.model import VoiceChatModel
from voicechat_core.nn import state as states
from voicechat_core.nn.codec import CodecState
from voicechat_core.nn.perception import PerceptionState
from voicechat_core.nn.rnnt import Pending, RnntState, propose, resolve
from voicechat_core.noise import KeyedNoise, Noise
from voicechat_core.tools import Forced

__all__ = ["LiveFrame", "LiveState", "start", "step", "tail", "warm_up"]


WARM_FRAMES = 3  # the first reads fewer samples and says nothing, the second is the first to speak


@dataclass
class LiveState:
    """What every network remembers between two frames."""

    perception: PerceptionState
    rnnt: RnntState
    duplex: DuplexState
    codec: CodecState


@dataclass(frozen=True)
class LiveFrame:
    """What a frame gave, on the host: transcript labels, both ids, codes ``[Q]`` int32, samples ``[1764]`` float32."""

    labels: list[int]
    text: int
    function: int
    codes: npt.NDArray[np.int32]
    samples: npt.NDArray[np.float32]


def start(model: VoiceChatModel, opening: DuplexState) -> LiveState:
    """Before the first frame; ``opening`` is the timeline after its prompt, and is consumed."""
    stt = model.networks.stt_model
    codec = model.networks.tts_model.audio_codec
    return LiveState(stt.perception.new_state(), stt.rnnt_decoder.new_state(), opening, codec.new_state())


def step(
    model: VoiceChatModel,
    samples: npt.NDArray[np.float32],
    state: LiveState,
    noise: Noise,
    mark: Mark | None = None,
    forced: Forced | None = None,
) -> tuple[LiveFrame, LiveState]:
    """The next frame, of the samples that perception reads for it: 200 for the first one, 1,280 for each later one.

    ``forced`` is as in ``duplex.step``.

    Raises:
        ModelError: when a value behind the ids, the codes or the samples is not a number.
    """
    mark = mark or _no_mark
    encoded, projected = model.steps.perception(state.perception, mx.array(samples)[None])
    mark("perception", encoded, projected)
    pending = _proposed(model, encoded, state.rnnt)
    early = None if mark is _no_mark else _transcribed(model, pending, state.rnnt)  # a stage that is timed ends here
    mark("rnnt")
    frame, timeline = duplex.step(model, projected, state.duplex, noise, mark=mark, forced=forced)
    row = model.steps.codec(state.codec, frame.codes, frame.text, frame.function, frame.finite)
    # Everything is queued, the transcript's first choice first: while the host waits for it, the rest goes on.
    mx.async_eval(  # type: ignore[no-untyped-call]
        [] if pending is None else pending.best, row, *states.leaves([state.perception, timeline, state.codec])
    )
    labels, rnnt = early or _transcribed(model, pending, state.rnnt)
    mx.async_eval(states.leaves(rnnt))  # type: ignore[no-untyped-call]
    model.steps.prepare_next(timeline.llm, timeline.speech.ear_tts)
    found = np.array(row)[0]  # the one wait
    mark("codec")
    return _on_host(model, labels, found), LiveState(state.perception, rnnt, timeline, state.codec)


def warm_up(model: VoiceChatModel, opening: DuplexState) -> None:
    """Everything that is done for the first time: a first frame, two later ones, and the steps of longer sessions."""
    noise = KeyedNoise(0, model.config.tts_config, compiled=model.compiled)
    state = start(model, opening)
    until = model.networks.stt_model.perception.samples_until
    for frame in range(WARM_FRAMES):
        _, state = step(model, np.zeros(until(frame + 1) - until(frame), np.float32), state, noise)
    model.steps.prepare_all(state.duplex.llm, state.duplex.speech.ear_tts)


def _on_host(model: VoiceChatModel, labels: list[int], row: npt.NDArray[np.float32]) -> LiveFrame:
    """A frame from the row of numbers that the codec's step ends with."""
    quantizers = model.config.tts_config.num_quantizers
    samples, codes, (text, function, finite) = row[: -quantizers - 3], row[-quantizers - 3 : -3], row[-3:]
    if not finite:
        raise ModelError("the model computed a value that is not finite")
    return LiveFrame(labels, int(text), int(function), codes.astype(np.int32), samples.copy())


def tail(model: VoiceChatModel, state: LiveState) -> npt.NDArray[np.float32]:
    """The samples ``[8]`` by which the codec is late: the end of a stream that ends here."""
    return np.array(model.networks.tts_model.audio_codec.tail(state.codec)[0], dtype=np.float32)


def _proposed(model: VoiceChatModel, encoded: mx.array, state: RnntState) -> Pending | None:
    """What the transcript branch would say first to a frame, not waited for; None where a checkpoint has none."""
    stt = model.networks.stt_model
    return propose(stt.rnnt_decoder, stt.rnnt_joint, encoded, state) if model.rnnt_vocabulary.enabled else None


def _transcribed(model: VoiceChatModel, pending: Pending | None, state: RnntState) -> tuple[list[int], RnntState]:
    """One frame's labels. Waits for each, and for the blank after them."""
    if pending is None:
        return [], state
    stt, vocabulary = model.networks.stt_model, model.rnnt_vocabulary
    symbols = model.config.audio_config.max_symbols
    labels, state, _ = resolve(stt.rnnt_decoder, stt.rnnt_joint, pending, symbols, vocabulary.special)
    return labels, state


def _no_mark(stage: str, *values: mx.array) -> None:
    """A frame that is not measured waits for nothing on the way."""
