"""A whole recording through a live session: what ``generate`` gives, frame by frame.

Ids, codes and texts are those of ``generate``; the audio is, within rounding, from its seventh sample on.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from voicechat_core.events import AudioFrame, AudioTail, Event
from voicechat_core.model import VoiceChatModel
from voicechat_core.offline import GenerationResult, Progress
from voicechat_core.session import Session

__all__ = ["answer", "events_of"]


def events_of(session: Session, samples: npt.NDArray[np.float32], chunk_samples: int) -> Iterator[Event]:
    """Push ``samples`` ``[S]`` in chunks, as a microphone would, and flush with the tail; every event."""
    for start in range(0, len(samples), chunk_samples):
        yield from session.push(samples[start : start + chunk_samples])
    yield from session.flush(tail=True)


def answer(
    model: VoiceChatModel, session: Session, events: Iterable[Event], progress: Progress | None = None, total: int = 0
) -> GenerationResult:
    """Take a session's events, all of them up to ``Done``, and put them together.

    ``progress`` is called with the positions done and those of ``total`` frames.
    """
    frames: list[AudioFrame] = []
    tail = np.zeros(0, np.float32)
    prompt = len(session.options.prompt_ids)
    for event in events:
        if isinstance(event, AudioFrame):
            frames.append(event)
            if progress is not None:
                progress(prompt + len(frames), prompt + total)
        elif isinstance(event, AudioTail):
            tail = event.samples
    return _result(model, session, frames, tail)


def _result(
    model: VoiceChatModel, session: Session, frames: list[AudioFrame], tail: npt.NDArray[np.float32]
) -> GenerationResult:
    options, quantizers = session.options, model.config.tts_config.num_quantizers
    stream = np.concatenate([np.zeros(0, np.float32), *(frame.samples for frame in frames), tail])
    audio = stream[len(tail) :]  # as many samples of lead-in came first
    return GenerationResult(
        transcript=session.transcript,
        text=session.text,
        function_text=session.function_text,
        text_tokens=[frame.text_token for frame in frames],
        function_tokens=[frame.function_token for frame in frames],
        audio_codes=np.array([frame.codes for frame in frames], np.int32).reshape(-1, quantizers),
        audio=audio,
        frames=len(frames),
        sample_rate=model.config.output_sample_rate,
        seed=options.seed,
        tts_prompt_steps=options.tts_prompt_steps,
        tts_context_frames=options.tts_context_frames,
        seconds=len(audio) / model.config.output_sample_rate,
    )
