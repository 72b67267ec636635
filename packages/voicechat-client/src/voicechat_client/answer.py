"""What was heard, put together message by message; and a check that nothing is missing. No audio is kept.

    answer = Answer(seed=5)
    async for event in conversation:
        answer.add(event)
    json.dumps(answer.as_dict())

Memory grows by some 150 bytes a frame. Knows no clock: who wants delays says when.
"""

from array import array
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from voicechat_client.errors import ServerFaultError
from voicechat_core import wire

__all__ = ["FRAME_SAMPLES", "Answer"]

FRAME_SAMPLES: Final = 1764  # of one frame at 22.05 kHz, 80 ms
LARGEST_CODE: Final = 2**31 - 1

Delta = wire.ConversationItemInputAudioTranscriptionDelta | wire.ResponseTextDelta | wire.ResponseFunctionDelta
Call = wire.ResponseFunctionCallArgumentsDone | wire.ResponseFunctionCallFailed


class Answer:
    """One session's answer so far.

    Attributes:
        transcript: what the user said; "" too where the server's checkpoint has no transcript branch.
        text: what the assistant says.
        function_text: its function channel.
        function_calls: what was called, as far as the client was to answer it, and what could not be read.
        frames: how many came.
        errors: the server's, in their order.
        lag: the last that the server said of it, or None.
        most_behind_ms: the worst of those.
        recording: whether the server said that it keeps what it hears.
        ended: how: "done", "cancelled", or None as long as it has not.
        started_at: seconds, see ``started``.
        first_audio_at: when the first frame came, if that was said; seconds.
    """

    def __init__(self, *, seed: int = 0) -> None:
        """``seed`` is what was asked for; it is only told again."""
        self.transcript = self.text = self.function_text = ""
        self.function_calls: list[Call] = []
        self.frames = 0
        self.errors: list[wire.ErrorBody] = []
        self.lag: wire.SessionLag | None = None
        self.most_behind_ms = 0
        self.recording = False
        self.ended: str | None = None
        self.started_at: float | None = None
        self.first_audio_at: float | None = None
        self._seed = seed
        self._text_tokens: list[int | None] = []
        self._function_tokens: list[int | None] = []
        self._codes = array("i")  # flat: a tuple of objects for each frame would be ten times as much
        self._codes_a_frame = 0

    def started(self, at: float) -> None:
        """The first samples are being sent; seconds of the clock that ``add`` is told by. Again does nothing."""
        if self.started_at is None:
            self.started_at = at

    def add(self, event: wire.ServerEvent, at: float | None = None) -> None:
        """Take the next message, which came ``at`` so many seconds.

        Raises:
            ServerFaultError: when it does not follow from those before it. Then it has changed nothing.
        """
        match event:
            case wire.ResponseAudioDelta():
                self._add_frame(event, at)
            case wire.ConversationItemInputAudioTranscriptionDelta(delta=delta, transcript=whole):
                self.transcript = self._grown(event, self.transcript, delta, whole)
            case wire.ResponseTextDelta(delta=delta, text=whole):
                self.text = self._grown(event, self.text, delta, whole)
            case wire.ResponseFunctionDelta(delta=delta, text=whole):
                self.function_text = self._grown(event, self.function_text, delta, whole)
            case wire.ResponseFunctionCallArgumentsDone() | wire.ResponseFunctionCallFailed():
                self._add_call(event)
            case wire.SessionLag():
                self.lag = event
                self.most_behind_ms = max(self.most_behind_ms, event.behind_ms)
            case wire.SessionCreated():
                self.recording = event.session.recording is True
            case wire.Error(error=error):
                self.errors.append(error)
            case wire.ResponseDone() | wire.ResponseCancelled():
                self._end(event)

    # ---- what it is

    @property
    def text_tokens(self) -> list[int] | None:
        """One a frame, PAD included; None if the server does not tell them."""
        return _all_told(self._text_tokens)

    @property
    def function_tokens(self) -> list[int] | None:
        """One a frame, PAD included; None if the server does not tell them."""
        return _all_told(self._function_tokens)

    @property
    def audio_codes(self) -> npt.NDArray[np.int32]:
        """``[frames, Q]``."""
        return np.array(self._codes, np.int32).reshape(self.frames, self._codes_a_frame)

    @property
    def seconds(self) -> float:
        """Of speech, silence too."""
        return self.frames * FRAME_SAMPLES / wire.OUTPUT_RATE

    @property
    def frames_skipped(self) -> int:
        """Frames of input that the server dropped, by the policy that it was asked for."""
        return self.lag.frames_skipped if self.lag is not None else 0

    @property
    def first_audio_seconds(self) -> float | None:
        """From the first samples that were sent to the first frame that came; None if one of them is not known."""
        if self.started_at is None or self.first_audio_at is None:
            return None
        return self.first_audio_at - self.started_at

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON. What ``voicechat generate --json`` has, too, is called as there."""
        return {
            "transcript": self.transcript,
            "text": self.text,
            "function_text": self.function_text,
            "function_calls": [_call(event) for event in self.function_calls],
            "text_tokens": self.text_tokens,
            "function_tokens": self.function_tokens,
            "audio_codes": self.audio_codes.tolist(),
            "frames": self.frames,
            "sample_rate": wire.OUTPUT_RATE,
            "seed": self._seed,
            "seconds": self.seconds,
            "ended": self.ended,
            "first_audio_seconds": self.first_audio_seconds,
            "most_behind_ms": self.most_behind_ms,
            "frames_skipped": self.frames_skipped,
            "recording": self.recording,
            "errors": [{"code": error.code, "message": error.message} for error in self.errors],
        }

    # ---- inside

    def _add_frame(self, frame: wire.ResponseAudioDelta, at: float | None) -> None:
        self._require_open(frame)
        if frame.frame_index != self.frames:
            raise ServerFaultError(f"frame {frame.frame_index} came where frame {self.frames} was due")
        self._check_audio(frame)
        if self.frames == 0:
            self.first_audio_at = at
            self._codes_a_frame = len(frame.audio_codes)
        self._codes.extend(frame.audio_codes)
        self._text_tokens.append(frame.text_token)
        self._function_tokens.append(frame.function_token)
        self.frames += 1

    def _check_audio(self, frame: wire.ResponseAudioDelta) -> None:
        name, samples = f"frame {frame.frame_index}", len(frame.delta) // 2
        if samples != FRAME_SAMPLES:
            raise ServerFaultError(f"{name} has {samples} samples; {FRAME_SAMPLES} are needed")
        found = (frame.format, frame.sample_rate, frame.channels)
        if found != ("pcm16", wire.OUTPUT_RATE, 1):
            raise ServerFaultError(f"{name} is {found}; pcm16 at {wire.OUTPUT_RATE} Hz with one channel is needed")
        codes = frame.audio_codes
        if self.frames and len(codes) != self._codes_a_frame:
            raise ServerFaultError(f"{name} has {len(codes)} audio codes; those before it have {self._codes_a_frame}")
        if not all(0 <= code <= LARGEST_CODE for code in codes):
            raise ServerFaultError(f"{name} has an audio code that is none: {min(codes)} to {max(codes)}")

    def _add_call(self, call: Call) -> None:
        self._require_open(call)
        if call.frame_index != self.frames:
            raise ServerFaultError(f"a call of frame {call.frame_index} came where frame {self.frames} was due")
        self.function_calls.append(call)

    def _grown(self, event: Delta, before: str, delta: str, whole: str) -> str:
        """The text with what is new; or another one, where the server has thought again and tells all of it."""
        self._require_open(event)
        if event.frame_index > self.frames:
            raise ServerFaultError(f"text of frame {event.frame_index} came where frame {self.frames} was due")
        grown = len(whole) == len(before) + len(delta) and whole.startswith(before) and whole.endswith(delta)
        if not grown and whole != delta:
            raise ServerFaultError(
                f"the text of frame {event.frame_index} does not follow from those before it: {before[-20:]!r} and "
                f"{delta[:20]!r} are not {whole[-40:]!r}"
            )
        return whole

    def _end(self, event: wire.ResponseDone | wire.ResponseCancelled) -> None:
        self._require_open(event)
        done = isinstance(event, wire.ResponseDone)
        if event.frame_index != self.frames:
            raise ServerFaultError(f"the server counts {event.frame_index} frames at the end; {self.frames} came")
        self.ended = "done" if done else "cancelled"

    def _require_open(self, event: wire.ServerEvent) -> None:
        if self.ended is not None:
            raise ServerFaultError(f"{type(event).__struct_config__.tag} came after the end")


def _call(event: Call) -> dict[str, Any]:
    """Its fields, but for those of every message."""
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return {name: value for name, value in fields.items() if name not in ("type", "event_id")}


def _all_told(tokens: list[int | None]) -> list[int] | None:
    told = [token for token in tokens if token is not None]
    return told if len(told) == len(tokens) else None
