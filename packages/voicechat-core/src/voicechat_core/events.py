"""What a live session says, in the order in which it says it.

Inside a frame: ``TranscriptDelta``, ``TextDelta``, ``FunctionDelta``, each only where there is something new; where the
session has tools and a call ends, a ``ToolCall`` for each of its tools or one ``ToolCallFailed``; then always one
``AudioFrame``. The last event of a session is ``Done`` or ``Cancelled``. Needs no MLX.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "AudioFrame",
    "AudioTail",
    "Cancelled",
    "Done",
    "Event",
    "FunctionDelta",
    "TextDelta",
    "ToolCall",
    "ToolCallFailed",
    "TranscriptDelta",
]


@dataclass(frozen=True)
class TranscriptDelta:
    """What a frame adds to the user's transcript."""

    frame_index: int
    text: str


@dataclass(frozen=True)
class TextDelta:
    """What a frame adds to the assistant's text."""

    frame_index: int
    text: str


@dataclass(frozen=True)
class FunctionDelta:
    """What a frame adds to the function channel, as it stands there: nothing is parsed."""

    frame_index: int
    text: str


@dataclass(frozen=True)
class ToolCall:
    """The model calls a tool and waits: ``Session.respond`` with this ``call_id`` gives it the output.

    A call may have several of these, in the order in which it names the tools. ``arguments`` is what JSON makes of
    them. ``frame_index`` is the frame in which the call ended.
    """

    frame_index: int
    call_id: str
    name: str
    arguments: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class ToolCallFailed:
    """The model wrote a call that is none, or did not come to its end; nobody is to answer it.

    ``text`` is what it wrote, without the markers around it, and ``reason`` what is wrong with that.
    """

    frame_index: int
    reason: str
    text: str


@dataclass(frozen=True)
class AudioFrame:
    """One frame of speech, silence too: every frame has one.

    ``samples`` is float32 ``[1764]`` mono at 22,050 Hz, ``codes`` int32 ``[31]`` as the speech decoder drew them
    (control codes included; they sound as silence). ``text_token`` and ``function_token`` are the frame's ids, PAD
    included.
    """

    frame_index: int
    samples: npt.NDArray[np.float32] = field(repr=False)
    codes: npt.NDArray[np.int32] = field(repr=False)
    text_token: int
    function_token: int

    def __eq__(self, other: object) -> bool:
        """Whether both are the same to the bit."""
        return isinstance(other, AudioFrame) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[object, ...]:
        arrays = (self.samples, self.codes)
        return (self.frame_index, self.text_token, self.function_token, *((x.dtype, x.tobytes()) for x in arrays))


@dataclass(frozen=True, eq=False)
class AudioTail:
    """The samples ``[8]`` float32 by which the codec is late: they end the last frame's speech."""

    samples: npt.NDArray[np.float32] = field(repr=False)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same to the bit."""
        return isinstance(other, AudioTail) and self.samples.tobytes() == other.samples.tobytes()

    def __hash__(self) -> int:
        return hash(self.samples.tobytes())


@dataclass(frozen=True)
class Done:
    """The session is over: it gave ``frames`` frames."""

    frames: int


@dataclass(frozen=True)
class Cancelled:
    """The session was cut off after ``frames`` frames."""

    frames: int


Event = (
    TranscriptDelta | TextDelta | FunctionDelta | ToolCall | ToolCallFailed | AudioFrame | AudioTail | Done | Cancelled
)
