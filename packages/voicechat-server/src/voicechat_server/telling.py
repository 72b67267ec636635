"""What a session says -> the messages that tell it: cumulative texts, token ids, calls, 16-bit audio.

A frame is told whole: its deltas and calls wait for its audio, which brings the token ids. So a peer never hears half
of a frame, whatever ends the session in between.
"""

from collections.abc import Callable

from voicechat_core import events, wire
from voicechat_core.audio import float_to_pcm16
from voicechat_core.strict_json import json_of

__all__ = ["Telling"]

Delta = events.TranscriptDelta | events.TextDelta | events.FunctionDelta
Call = events.ToolCall | events.ToolCallFailed


class Telling:
    """The messages of one session. ``frames`` is how many frames have been told."""

    def __init__(self, event_id: Callable[[], str]) -> None:
        """``event_id`` names each message."""
        self.frames = 0
        self._event_id = event_id
        self._waiting: list[Delta | Call] = []  # of the frame whose audio has not come: three deltas, and its calls
        self._text_token = self._function_token = 0  # of the last frame
        # All of each so far: grown by what is new, never decoded again.
        self._transcript = self._text = self._function = ""

    def tell(self, event: events.Event) -> list[wire.ServerEvent]:
        """The messages that are due with ``event``."""
        match event:
            case events.AudioFrame():
                return self._frame(event)
            case events.Done(frames):
                return [wire.ResponseDone(event_id=self._event_id(), frame_index=frames)]
            case events.Cancelled(frames):
                return [wire.ResponseCancelled(event_id=self._event_id(), frame_index=frames)]
            case events.AudioTail():
                return []  # an audio delta is always a whole frame
        if event.frame_index < self.frames:
            return [self._part(event)]  # at the end: what the last token left unfinished
        self._waiting.append(event)
        return []

    def _frame(self, frame: events.AudioFrame) -> list[wire.ServerEvent]:
        self._text_token, self._function_token = frame.text_token, frame.function_token
        parts = [self._part(part) for part in self._waiting]
        self._waiting.clear()
        self.frames = frame.frame_index + 1
        audio = wire.ResponseAudioDelta(
            event_id=self._event_id(),
            frame_index=frame.frame_index,
            delta=wire.bytes_of(float_to_pcm16(frame.samples)),
            audio_codes=tuple(frame.codes.tolist()),
            text_token=frame.text_token,
            function_token=frame.function_token,
        )
        return [*parts, audio]

    def _part(self, event: Delta | Call) -> wire.ServerEvent:
        return self._call(event) if isinstance(event, Call) else self._delta(event)

    def _call(self, event: Call) -> wire.ServerEvent:
        name, index = self._event_id(), event.frame_index
        if isinstance(event, events.ToolCallFailed):
            return wire.ResponseFunctionCallFailed(
                event_id=name, frame_index=index, reason=event.reason, written=event.text
            )
        arguments = json_of(event.arguments, "the arguments")
        return wire.ResponseFunctionCallArgumentsDone(
            event_id=name, frame_index=index, call_id=event.call_id, name=event.name, arguments=arguments
        )

    def _delta(self, event: Delta) -> wire.ServerEvent:
        name, index, delta = self._event_id(), event.frame_index, event.text
        match event:
            case events.TranscriptDelta():
                self._transcript += delta
                return wire.ConversationItemInputAudioTranscriptionDelta(
                    event_id=name, frame_index=index, delta=delta, transcript=self._transcript
                )
            case events.TextDelta():
                self._text += delta
                return wire.ResponseTextDelta(
                    event_id=name, frame_index=index, token_id=self._text_token, delta=delta, text=self._text
                )
        self._function += delta
        return wire.ResponseFunctionDelta(
            event_id=name, frame_index=index, token_id=self._function_token, delta=delta, text=self._function
        )
