"""A live conversation: samples in, in chunks of any size; aligned events out, frame by frame, on one 80 ms clock.

    >>> session = voicechat_core.load("checkpoint").session(system_prompt="Be concise.", seed=0)
    >>> for event in session.push(samples):
    ...     print(event)
    >>> for event in session.flush():
    ...     print(event)

A session steps one frame at a time, so its events are the same to the bit however the samples were cut. ``push`` and
``flush`` take what they are given at once; the frames run while their events are being taken. Whoever stops taking
early loses nothing: the next call goes on from there.

A session belongs to one thread, the one that loaded its model.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from voicechat_core import live
from voicechat_core.arguments import check_arguments, check_flags, check_positions, whole
from voicechat_core.audio import check_samples
from voicechat_core.detokenizer import IncrementalDetokenizer, IncrementalTranscript
from voicechat_core.errors import ContextLimitError, InputError, ModelError, SessionClosedError
from voicechat_core.events import (
    AudioFrame,
    AudioTail,
    Cancelled,
    Done,
    Event,
    FunctionDelta,
    TextDelta,
    TranscriptDelta,
)
from voicechat_core.framing import Framing
from voicechat_core.live import LiveFrame, LiveState
from voicechat_core.model import VoiceChatModel
from voicechat_core.nn import state as states
from voicechat_core.noise import KeyedNoise, Noise, check_seed
from voicechat_core.profile import Profiler
from voicechat_core.prompt import PromptStates
from voicechat_core.snapshot import Snapshot
from voicechat_core.tokenizer import SpecialIds
from voicechat_core.tools import WAIT_FRAMES, ToolChannel

__all__ = ["Session", "SessionOptions", "open_session"]

OPEN, ENDING, ENDED = "open", "ending", "ended"


@dataclass(frozen=True)
class SessionOptions:
    """What a session was opened with; ``max_frames`` is the caller's limit, or what the model has positions for."""

    prompt_ids: tuple[int, ...]
    seed: int
    wait_for_full_frame: bool
    tts_prompt_steps: bool
    tts_context_frames: int | None
    max_frames: int
    tools: bool = False
    tool_wait_frames: int = WAIT_FRAMES


def open_session(
    prompts: PromptStates,
    *,
    system_prompt: str | None = None,
    seed: int = 0,
    max_frames: int | None = None,
    wait_for_full_frame: bool = False,
    tts_prompt_steps: bool = True,
    tts_context_frames: int | None = None,
    tools: bool = False,
    tool_wait_frames: int = WAIT_FRAMES,
    profiler: Profiler | None = None,
    progress: Callable[[int], None] | None = None,
) -> "Session":
    """A new session; see ``VoiceChat.session``."""
    check_arguments(system_prompt, seed, max_frames=max_frames, tts_context_frames=tts_context_frames)
    check_arguments(tool_wait_frames=tool_wait_frames)
    check_flags(wait_for_full_frame=wait_for_full_frame, tts_prompt_steps=tts_prompt_steps, tools=tools)
    if not isinstance(profiler, Profiler | None):
        raise InputError(f"profiler is {profiler!r}; a Profiler or None is needed")
    prompt_ids = prompts.model.prompt_ids(system_prompt)
    check_positions(prompts.model, len(prompt_ids), 1)
    possible = prompts.model.config.text_config.max_position_embeddings - len(prompt_ids)
    wanted = possible if max_frames is None else min(operator.index(max_frames), possible)
    options = SessionOptions(
        prompt_ids=tuple(prompt_ids),
        seed=check_seed(seed),
        wait_for_full_frame=bool(wait_for_full_frame),
        tts_prompt_steps=bool(tts_prompt_steps),
        tts_context_frames=whole(tts_context_frames),
        max_frames=wanted,
        tools=bool(tools),
        tool_wait_frames=operator.index(tool_wait_frames),
    )
    return Session(prompts, options, profiler=profiler, progress=progress)


class Session:
    """One conversation with a loaded checkpoint. ``VoiceChat.session`` opens one and describes the options."""

    def __init__(
        self,
        prompts: PromptStates,
        options: SessionOptions,
        *,
        state: LiveState | None = None,
        noise: Noise | None = None,
        profiler: Profiler | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """``state`` is where to begin, to be consumed, and ``noise`` the draws; by default those of the options.
        ``progress`` is told the prompt's positions while it is read.
        """
        self.options = options
        self._prompts = prompts
        self._model: VoiceChatModel = prompts.model
        self._profiler = profiler
        self._noise = noise or KeyedNoise(options.seed, self._model.config.tts_config, compiled=self._model.compiled)
        self._hidden = SpecialIds.of(self._model.tokenizer, self._model.config).hidden
        self._begin()
        self._live = state or self._opening(progress)

    def _begin(self) -> None:
        """Everything that a session remembers but the networks' state."""
        config, tokenizer = self._model.config, self._model.tokenizer
        lookahead = self._model.networks.stt_model.perception.samples_until(1)
        wait = self.options.wait_for_full_frame
        self._framing = Framing(config.input_frame_samples, lookahead, wait_for_full_frame=wait)
        self._transcript = IncrementalTranscript(self._model.rnnt_vocabulary.token_bytes)
        self._text = IncrementalDetokenizer(tokenizer.token_bytes, self._hidden, config.bos_token_id)
        self._function = IncrementalDetokenizer(tokenizer.token_bytes, self._hidden)
        tools = self.options.tools
        self._tools = ToolChannel(tokenizer, config, self.options.tool_wait_frames) if tools else None
        # At most one frame's events: the next frame runs when they have been taken.
        self._events: deque[Event] = deque()
        self._stage = OPEN
        self._ended_by = ""
        self._wants_tail = False
        self._past_limit = False

    def _opening(self, progress: Callable[[int], None] | None = None) -> LiveState:
        options = self.options
        opening = self._prompts.opening(
            list(options.prompt_ids),
            tts_prompt_steps=options.tts_prompt_steps,
            tts_context_frames=options.tts_context_frames,
            after_each=progress,
        )
        return live.start(self._model, opening)

    # ---- what it says of itself

    @property
    def frame_index(self) -> int:
        """Index of the next frame: how many have run."""
        return self._framing.taken

    @property
    def closed(self) -> bool:
        """Whether nothing more can be pushed."""
        return self._stage != OPEN

    @property
    def text(self) -> str:
        """All of the assistant's text so far, a space between its turns."""
        return self._text.text

    @property
    def function_text(self) -> str:
        """All of the function channel so far."""
        return self._function.text

    @property
    def transcript(self) -> str | None:
        """All that the user said so far; None where the checkpoint has no transcript branch."""
        return self._transcript.text if self._model.rnnt_vocabulary.enabled else None

    @property
    def nbytes(self) -> int:
        """Bytes of the networks' state; 0 once the session has ended."""
        return 0 if self._stage == ENDED else states.nbytes(self._live)

    # ---- what can be done with it

    def push(self, samples: npt.ArrayLike, sample_rate: int = 16000) -> Iterator[Event]:
        """Hear more samples; the events of the frames that are due with them.

        Args:
            samples: one channel ``[S]`` of any length, float32 with full scale at 1.0, or int16. They are copied.
            sample_rate: in hertz; only what the model hears (16,000).

        Raises:
            AudioError: for samples of another shape or type, or that are not finite. Nothing of them is heard.
            InputError: for another rate.
            SessionClosedError: after ``flush``, ``cancel`` or a failed frame.
            ContextLimitError: where a frame would pass the limit, mostly while events are taken. The events of all
                frames before have been given, samples beyond are dropped, and the session can still be flushed.
            ModelError: while events are taken, where a frame's values are not numbers. This ends the session.
        """
        self._require_open()
        rate, limit = self._model.config.input_sample_rate, self.options.max_frames
        if not isinstance(sample_rate, Real) or sample_rate != rate:
            raise InputError(f"sample_rate is {sample_rate!r}; the model hears {rate} Hz: convert first")
        checked = check_samples(samples)
        if checked.size and (self._past_limit or not self._framing.room(limit)):
            raise self._limit_error()  # frames that are due already lose nothing by it
        # One frame more than allowed is enough to know that the limit is passed: what is pending stays bounded.
        heard = np.array(checked[: self._framing.room(limit + 1)], copy=True)
        try:
            self._framing.push(heard)
        except BaseException:
            self._end("an interrupt while samples were taken")
            raise
        return self._taken()

    def flush(self, *, pad_partial: bool = True, tail: bool = False) -> Iterator[Event]:
        """End the session: its last events, and ``Done``. After the end there are none.

        Args:
            pad_partial: run a frame that has begun, with zeros after its samples; else they are dropped.
            tail: also give the 8 samples by which the codec is late, as an ``AudioTail``.

        Raises:
            ContextLimitError: where the padded frame would pass the limit; flush again to end without it.
        """
        if self._stage == OPEN:
            if pad_partial:
                self._framing.pad()
            self._stage = ENDING
        self._wants_tail = self._wants_tail or tail
        return self._taken()

    def respond(self, call_id: str, output: object) -> None:
        """Give the model what a tool says to a ``ToolCall``: its response stands on the function channel from the next
        frame on, or when the other calls of the same frame have theirs. Also after ``flush``, while frames still run.

        Args:
            call_id: the event's.
            output: anything that is JSON: text, a number, a dictionary.

        Raises:
            InputError: for a session without tools, a call that does not wait (any more), or an output that is no JSON
                or too long. The session goes on as if nothing had been said.
            SessionClosedError: after the end.
        """
        if self._stage == ENDED:
            self._require_open()
        if self._tools is None:
            raise InputError(f"call_id is {call_id!r}; the session was opened without tools")
        self._tools.respond(call_id, output)

    def cancel(self) -> list[Event]:
        """End the session at once: what is pending and what was not taken yet is dropped. One ``Cancelled``."""
        if self._stage == ENDED:
            return []
        self._events.clear()
        self._end("cancel")
        return [Cancelled(self.frame_index)]

    def reset(self) -> None:
        """Begin again, as a new session with the same options would; also after the end."""
        opening = self._opening()
        self._begin()
        self._live = opening

    def snapshot(self) -> Snapshot:
        """The whole state after the last frame, as a value of its own; see ``VoiceChat.resume``.

        Samples that no frame has taken are part of it. Events that this session has not handed out yet are not: they
        stay here.

        Raises:
            SessionClosedError: after ``flush``, ``cancel`` or a failed frame.
        """
        self._require_open()
        numbers, pending = self._framing.saved()
        facts: dict[str, Any] = {
            "options": asdict(self.options),
            "framing": numbers,
            "transcript": self._transcript.saved(),
            "text": self._text.saved(),
            "function": self._function.saved(),
            "tools": None if self._tools is None else self._tools.saved(),
        }
        return Snapshot.of(self._model, self._live, pending, facts)

    def fork(self, *, profiler: Profiler | None = None) -> "Session":
        """Another session that goes on from here on its own: the same as to resume a snapshot of this one.

        It has the ``profiler`` that it is given, not this one's.
        """
        return type(self).resumed(self._prompts, self.snapshot(), profiler=profiler)

    @classmethod
    def resumed(cls, prompts: PromptStates, snapshot: Snapshot, *, profiler: Profiler | None = None) -> "Session":
        """A session that goes on where ``snapshot`` was taken. The snapshot stays as it is.

        Raises:
            InputError: for a snapshot of another model or another kind of state.
        """
        facts = snapshot.facts_for(prompts.model)
        try:
            state, pending = snapshot.state_for(prompts.model)
            options = {**facts["options"], "prompt_ids": tuple(facts["options"]["prompt_ids"])}
            session = cls(prompts, SessionOptions(**options), state=state, profiler=profiler)
            session._framing.restore(facts["framing"], pending)
            session._transcript.restore(facts["transcript"])
            session._text.restore(facts["text"])
            session._function.restore(facts["function"])
            if session._tools is not None:
                session._tools.restore(facts["tools"])
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"the snapshot lacks something or is of another kind: {error!r}") from error
        return session

    # ---- frames

    def _taken(self) -> Iterator[Event]:
        """Events one after another; a frame runs when all those before it have been taken.

        An iterator from before a reset ends: what follows is another conversation's.
        """
        events = self._events
        while events is self._events:
            if events:
                yield events.popleft()
                continue
            if self._stage == ENDED:
                return
            if self._framing.due:
                self._run_frame()
            elif self._stage == ENDING:
                self._events.extend(self._closing_events())
                self._end("flush")
            else:
                return

    def _run_frame(self) -> None:
        index = self.frame_index
        if index >= self.options.max_frames:
            self._framing.drop()
            self._stage, self._past_limit = OPEN, True
            raise self._limit_error()
        try:
            frame = self._step(index, self._framing.take())
            self._events.extend(self._frame_events(index, frame))
        except BaseException as error:  # an interrupt, too, leaves a state half consumed
            self._events.clear()
            self._end(f"the failure of frame {index}")
            if isinstance(error, ModelError):
                raise ModelError(f"frame {index}: {error}") from error
            raise

    def _limit_error(self) -> ContextLimitError:
        limit = self.options.max_frames
        return ContextLimitError(
            f"frame {limit} would pass the session's limit of {limit} frames; samples for it and after it are dropped"
        )

    def _step(self, index: int, samples: npt.NDArray[np.float32]) -> LiveFrame:
        profiler = self._profiler
        mark = profiler.mark if profiler is not None and profiler.stages else None
        forced = None if self._tools is None else self._tools.forced()
        with nullcontext() if profiler is None else profiler.frame(index):
            frame, self._live = live.step(self._model, samples, self._live, self._noise, mark, forced)
        return frame

    def _frame_events(self, index: int, frame: LiveFrame) -> Iterator[Event]:
        if heard := self._transcript.push(frame.labels):
            yield TranscriptDelta(index, heard)
        if said := self._text.push(frame.text):
            yield TextDelta(index, said)
        if called := self._function.push(frame.function):
            yield FunctionDelta(index, called)
        if self._tools is not None:
            yield from self._tools.took(index, frame.function)
        yield AudioFrame(index, frame.samples, frame.codes, frame.text, frame.function)

    def _closing_events(self) -> Iterator[Event]:
        """U+FFFD for characters left unfinished, the codec's tail if it is wanted, and ``Done``."""
        last = self.frame_index - 1
        if heard := self._transcript.finish():
            yield TranscriptDelta(last, heard)
        if said := self._text.finish():
            yield TextDelta(last, said)
        if called := self._function.finish():
            yield FunctionDelta(last, called)
        if self._wants_tail and self.frame_index:
            yield AudioTail(live.tail(self._model, self._live))
        yield Done(self.frame_index)

    def _end(self, by: str) -> None:
        self._stage, self._ended_by = ENDED, by
        self._framing.drop()
        del self._live  # its memory is free for the next session

    def _require_open(self) -> None:
        if self._stage != OPEN:
            by = self._ended_by or "flush"
            raise SessionClosedError(f"the session ended after {self.frame_index} frames, by {by}; reset it first")
