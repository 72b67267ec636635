"""What a server was sent and what it said: how much it may say by that, and whether it owes something.

The answer runs on the clock of the input: a frame for each 1280 samples, dropped ones included, and one more for the
samples of a frame that has begun. An error answers a message, and one may say why the session ends. A server that says
more makes it up, and would do so until a disk is full. Knows no connection and no clock.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from voicechat_client.errors import ServerFaultError
from voicechat_core import wire

__all__ = ["INPUT_FRAME", "Ledger"]

INPUT_FRAME: Final = 1280  # samples at 16 kHz, 80 ms


class Ledger:
    """Of one conversation.

    Attributes:
        words: messages of the server so far; pongs do not count, as they say nothing of the session.
    """

    def __init__(self) -> None:
        self.words = 0
        self._samples = 0
        self._samples_before = 0  # that were sent before the last word
        self._frames = 0
        self._skipped = 0
        self._messages = 0
        self._errors = 0
        self._waiting = 0  # messages that the server has not taken yet
        self._ending = False

    @property
    def owed(self) -> bool:
        """Whether a server that lives would say something soon.

        It has not taken a message yet, was asked for the end, or has been sent a frame since it last said anything.
        """
        return self._waiting > 0 or self._ending or self._samples - self._samples_before >= INPUT_FRAME

    @contextmanager
    def sending(self, samples: int = 0, *, ends: bool = False) -> Iterator[None]:
        """While a message is being sent. It counts from the beginning: an answer may be faster than the return.

        Args:
            samples: in it, at 16 kHz.
            ends: whether it asks for the end of the session.
        """
        self._samples += samples
        self._messages += 1
        self._waiting += 1
        try:
            yield
            self._ending = self._ending or ends
        except BaseException:
            self._samples -= samples
            raise
        finally:
            self._waiting -= 1

    def heard(self, event: wire.ServerEvent) -> None:
        """The server says this.

        Raises:
            ServerFaultError: when it is more than it can have to say.
        """
        frames, skipped = self._frames, self._skipped
        match event:
            case wire.SessionPong():
                return
            case wire.ResponseAudioDelta():
                frames += 1
            case wire.SessionLag():
                skipped = event.frames_skipped
            case wire.Error():
                self._count_error()
        self._require_input_for(frames, skipped)
        self._frames, self._skipped = frames, skipped
        self._samples_before = self._samples
        self.words += 1

    def _require_input_for(self, frames: int, skipped: int) -> None:
        most = self._samples // INPUT_FRAME + 1
        if frames + skipped > most:
            raise ServerFaultError(
                f"the server gave {frames} frames and skipped {skipped}; the {self._samples} samples that it was sent "
                f"are {most} at most"
            )

    def _count_error(self) -> None:
        self._errors += 1
        if self._errors > self._messages + 1:
            raise ServerFaultError(
                f"the server sent {self._errors} errors; the {self._messages} messages that it was sent can have "
                f"{self._messages + 1} at most"
            )
