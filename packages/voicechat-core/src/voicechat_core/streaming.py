"""A whole recording through a live session: what ``generate`` gives, frame by frame.

Ids, codes and texts are those of ``generate``; the audio is, within rounding, from its seventh sample on.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from voicechat_core.arguments import check_arguments, check_positions, heard_samples, whole
from voicechat_core.events import AudioFrame, AudioTail, Event
from voicechat_core.offline import GenerationResult, Progress
from voicechat_core.profile import FrameTiming, Profiler
from voicechat_core.session import Session
from voicechat_core.voicechat import VoiceChat

__all__ = ["Streamed", "collect", "events_of", "generate_live"]


@dataclass(frozen=True)
class Streamed:
    """The answer, each frame's time, and with a profile the times of the same frames with a wait after each stage."""

    result: GenerationResult
    timings: list[FrameTiming]
    staged: list[FrameTiming]


def generate_live(
    voicechat: VoiceChat,
    samples: npt.NDArray[np.float32],
    *,
    system_prompt: str | None = None,
    extra_decoding_seconds: float = 0.0,
    max_frames: int | None = None,
    profile: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Streamed:
    """Answer 16 kHz samples ``[S]`` as ``VoiceChat.generate`` does, through a session that is pushed a frame at a time.

    With ``profile`` a second session hears the same frames in turns with the first and waits after each stage: more
    than twice the time. The other ``options`` are those of ``VoiceChat.session``.

    Raises:
        InputError: for an argument out of range, ``ContextLimitError`` for a recording that is too long.
    """
    check_arguments(system_prompt, extra_decoding_seconds=extra_decoding_seconds, max_frames=max_frames)
    model = voicechat.model
    length = heard_samples(model, len(samples), float(extra_decoding_seconds), whole(max_frames))
    prompt, count = len(model.prompt_ids(system_prompt)), -(-length // model.config.input_frame_samples)
    check_positions(model, prompt, count)
    heard = np.pad(samples[:length], (0, max(0, length - len(samples))))
    real, staged = Profiler(), Profiler(wait=mx.eval)
    session = voicechat.session(system_prompt=system_prompt, profiler=real, **options)
    shadow = voicechat.session(system_prompt=system_prompt, profiler=staged, **options) if profile else None
    events: list[Event] = []
    for event in events_of(session, heard, model.config.input_frame_samples, shadow):
        events.append(event)
        if isinstance(event, AudioFrame) and progress is not None:
            progress(prompt + event.frame_index + 1, prompt + count)
    return Streamed(collect(voicechat, session, events), real.timings, staged.timings)


def events_of(
    session: Session, samples: npt.NDArray[np.float32], chunk_samples: int, shadow: Session | None = None
) -> Iterator[Event]:
    """Push ``samples`` ``[S]`` in chunks, as a microphone would, and flush with the tail; every event.

    ``shadow`` hears the same, chunk by chunk, and its events are dropped.
    """
    for start in range(0, len(samples), chunk_samples):
        chunk = samples[start : start + chunk_samples]
        yield from session.push(chunk)
        if shadow is not None:
            deque(shadow.push(chunk), maxlen=0)
    yield from session.flush(tail=True)
    if shadow is not None:
        deque(shadow.flush(), maxlen=0)


def collect(voicechat: VoiceChat, session: Session, events: list[Event]) -> GenerationResult:
    """All events of a session that was flushed with its tail, put together."""
    options, config = session.options, voicechat.model.config
    frames = [event for event in events if isinstance(event, AudioFrame)]
    tail = [event.samples for event in events if isinstance(event, AudioTail)]
    stream = np.concatenate([np.zeros(0, np.float32), *(frame.samples for frame in frames), *tail])
    audio = stream[sum(map(len, tail)) :]  # as many samples of lead-in came first
    return GenerationResult(
        transcript=session.transcript,
        text=session.text,
        function_text=session.function_text,
        text_tokens=[frame.text_token for frame in frames],
        function_tokens=[frame.function_token for frame in frames],
        audio_codes=np.array([frame.codes for frame in frames], np.int32).reshape(-1, config.tts_config.num_quantizers),
        audio=audio,
        frames=len(frames),
        sample_rate=config.output_sample_rate,
        seed=options.seed,
        tts_prompt_steps=options.tts_prompt_steps,
        tts_context_frames=options.tts_context_frames,
        seconds=len(audio) / config.output_sample_rate,
    )
