"""What a server was sent and what it said: how much it may say by that, and whether it owes something.

The answer runs on the clock of the input: a frame for each 1280 samples, dropped ones included, and one more for the
samples of a frame that has begun. Everything else that a server says is bounded by its frames, by the message that it
answers, or by the clock. A server that says more makes it up, and would do so until a disk is full. Knows no
connection; is told the time.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from voicechat_client.errors import ServerFaultError
from voicechat_core import wire

__all__ = ["INPUT_FRAME", "Ledger"]

INPUT_FRAME: Final = 1280  # samples at 16 kHz, 80 ms
DELTA_CHARACTERS: Final = 1000  # of a text that a frame may add: far beyond any token, hundreds of times speech
OTHER_CHARACTERS: Final = 16384  # of a message beside its texts; a frame of speech has some 5,300
ESCAPED: Final = 12  # characters that JSON may make of one
LEFT_UNFINISHED: Final = 1  # delta at the end, of what the last token left

UserWords = wire.ConversationItemInputAudioTranscriptionDelta
Delta = UserWords | wire.ResponseTextDelta | wire.ResponseFunctionDelta
Call = wire.ResponseFunctionCallArgumentsDone | wire.ResponseFunctionCallFailed


class Ledger:
    """Of one conversation.

    Attributes:
        words: messages of the server so far; pongs do not count, as they say nothing of the session.
    """

    def __init__(self) -> None:
        self.words = 0
        self._samples = 0
        self._samples_before = 0  # that were sent before the last word
        self._skipped = 0
        self._asked: Counter[type] = Counter()  # messages to the server, by their kinds
        self._said: Counter[type] = Counter()  # its own
        self._characters: Counter[type] = Counter()  # of its deltas and calls
        self._wants_calls = False  # it was asked for a session that calls
        self._waiting = 0  # messages that the server has not taken yet
        self._ending = False

    @property
    def owed(self) -> bool:
        """Whether a server that lives would say something soon of the session.

        It has not taken a message yet, was asked for the end, or has been sent a frame since it last said anything.
        """
        return self._waiting > 0 or self._ending or self._samples - self._samples_before >= INPUT_FRAME

    @property
    def owes_a_pong(self) -> bool:
        """Whether it was pinged, and has not answered yet."""
        return self._asked[wire.SessionPing] > self._said[wire.SessionPong]

    @contextmanager
    def sending(self, event: wire.ClientEvent) -> Iterator[None]:
        """While a message is being sent. It counts from the beginning: an answer may be faster than the return."""
        samples = len(event.audio) // 2 if isinstance(event, wire.InputAudioBufferAppend) else 0
        self._samples += samples
        if isinstance(event, wire.SessionUpdate):
            self._wants_calls = self._wants_calls or event.session.function_calls
        self._asked[type(event)] += 1
        self._waiting += 1
        try:
            yield
            ends = isinstance(event, wire.InputAudioBufferCommit | wire.SessionCancel | wire.ResponseCancel)
            self._ending = self._ending or ends
        except BaseException:
            self._samples -= samples
            self._asked[type(event)] -= 1
            raise
        finally:
            self._waiting -= 1

    def heard(self, event: wire.ServerEvent, *, characters: int = 0, seconds: float = 0.0) -> None:
        """The server says this.

        Args:
            event: what it says.
            characters: of the message.
            seconds: since the conversation began.

        Raises:
            ServerFaultError: when it is more than it can have to say. Then nothing has changed.
        """
        self._require_input_for(event)
        self._require_few(event, seconds)
        self._require_short(event, characters)
        self._said[type(event)] += 1
        if isinstance(event, Delta | Call):
            self._characters[type(event)] += len(_said(event))
        if isinstance(event, wire.SessionLag):
            self._skipped = event.frames_skipped
        if not isinstance(event, wire.SessionPong):
            self._samples_before = self._samples
            self.words += 1

    # ---- how much it may say

    @property
    def _most_frames(self) -> int:
        return self._samples // INPUT_FRAME + 1

    def _require_input_for(self, event: wire.ServerEvent) -> None:
        frames, skipped = self._said[wire.ResponseAudioDelta], self._skipped
        if isinstance(event, wire.ResponseAudioDelta):
            frames += 1
        elif isinstance(event, wire.SessionLag):
            skipped = event.frames_skipped
        if frames + skipped > self._most_frames:
            raise ServerFaultError(
                f"the server gave {frames} frames and skipped {skipped}; the {self._samples} samples that it was sent "
                f"are {self._most_frames} at most"
            )

    def _require_few(self, event: wire.ServerEvent, seconds: float) -> None:
        said, most = self._said[type(event)] + 1, self._most(event, seconds)
        if said > most:
            raise ServerFaultError(
                f"the server sent {said} of {_name(event)}; the {self._asked.total()} messages and {self._samples} "
                f"samples that it was sent, in {seconds:.0f} s, can have {most} at most"
            )

    def _most(self, event: wire.ServerEvent, seconds: float) -> int:
        """Of its kind, in all; there is one answer to a message that has any."""
        match event:
            case wire.SessionCreated():
                return 0  # another than the first
            case wire.SessionUpdated():
                return self._asked[wire.SessionUpdate]
            case wire.InputAudioBufferCommitted():
                return self._asked[wire.InputAudioBufferCommit]
            case wire.SessionPong():
                return self._asked[wire.SessionPing]
            case wire.Error():
                return self._asked.total() + 1  # it may say why the session ends
            case wire.SessionLag():
                return self._most_frames + int(seconds) + 1  # once a second; a burst is late, not more
            case wire.ResponseDone() | wire.ResponseCancelled():
                return 1
            case wire.ResponseFunctionCallArgumentsDone() | wire.ResponseFunctionCallFailed():
                return self._most_frames * self._wants_calls  # a call is written in several frames
        return self._most_frames + LEFT_UNFINISHED * isinstance(event, Delta)

    def _require_short(self, event: wire.ServerEvent, characters: int) -> None:
        texts = 0
        if isinstance(event, Delta | Call):
            new, whole = _said(event), _whole(event)
            texts = len(new) + len(whole)
            said = max(len(whole), self._characters[type(event)] + len(new))
            most = DELTA_CHARACTERS * self._most_frames
            if said > most:
                raise ServerFaultError(
                    f"the server said {said} characters by {_name(event)}; the {self._samples} samples that it was "
                    f"sent can have {most} at most"
                )
        if characters > OTHER_CHARACTERS + ESCAPED * texts:
            raise ServerFaultError(
                f"{_name(event)} has {characters} characters; {OTHER_CHARACTERS + ESCAPED * texts} at most are needed"
            )


def _said(event: Delta | Call) -> str:
    """The texts that a message adds to what was said by others of its kind."""
    match event:
        case wire.ResponseFunctionCallArgumentsDone():
            return f"{event.call_id}{event.name}{event.arguments}"
        case wire.ResponseFunctionCallFailed():
            return f"{event.reason}{event.written}"
    return event.delta


def _whole(event: Delta | Call) -> str:
    """All that was said so far, where a message repeats it."""
    if isinstance(event, Call):
        return ""
    return event.transcript if isinstance(event, UserWords) else event.text


def _name(event: wire.ServerEvent) -> str:
    return str(type(event).__struct_config__.tag)
