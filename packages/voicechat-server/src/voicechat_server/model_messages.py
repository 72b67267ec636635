"""What Trio and the model thread say to each other: plain values. Needs no MLX, knows no Trio.

Commands go to the thread, news come from it, and results are what a session gives: the core's events, ``Skipped``,
``Responded``, ``OutputRefused`` and ``Failed``. ``generation`` is the number of a session: each has another one.
"""

from dataclasses import dataclass
from typing import Any

from voicechat_core.events import Event
from voicechat_core.tools import WAIT_FRAMES
from voicechat_server.mailbox import Mailbox

__all__ = [
    "Answered",
    "Cancel",
    "Close",
    "Command",
    "Delivery",
    "Ended",
    "Failed",
    "Flush",
    "Loaded",
    "News",
    "Open",
    "Opened",
    "Opening",
    "OutputRefused",
    "Ping",
    "Refused",
    "Released",
    "Respond",
    "Responded",
    "Result",
    "Skipped",
    "Stop",
    "Wake",
]


# ---- what a session is opened with, and what it gives besides the core's events


@dataclass(frozen=True)
class Opening:
    """What a session is opened with: as ``VoiceChat.session``, and what happens when it falls behind.

    ``skip_beyond_seconds`` drops the oldest whole frames beyond so many seconds of queued audio, and says so; None
    keeps everything. It is at least one frame.
    """

    system_prompt: str | None = None
    seed: int = 0
    max_frames: int | None = None
    tts_context_frames: int | None = None
    skip_beyond_seconds: float | None = None
    tools: bool = False
    tool_wait_frames: int = WAIT_FRAMES


@dataclass(frozen=True)
class Skipped:
    """``frames`` whole frames of input were dropped here, ``samples`` in all. Frames are counted on without a gap."""

    frames: int
    samples: int


@dataclass(frozen=True)
class Responded:
    """A call has this output; the next frame is the first that can show it."""

    call_id: str
    output: Any


@dataclass(frozen=True)
class OutputRefused:
    """It has not; the session is as before. The error is bare of its traceback."""

    call_id: str
    error: BaseException


@dataclass(frozen=True)
class Failed:
    """The session failed, bare of its traceback. Unless it ``ended``, it can still be flushed or cancelled."""

    error: BaseException
    ended: bool


Result = Event | Skipped | Responded | OutputRefused | Failed


# ---- commands, to the thread


@dataclass(frozen=True)
class Open:
    """Open a session. Nothing is opened for a mailbox that is shut already."""

    generation: int
    opening: Opening
    mailbox: Mailbox


@dataclass(frozen=True)
class Wake:
    """Look at a session again: it has samples, or its consumer has caught up."""

    generation: int


@dataclass(frozen=True)
class Flush:
    """Run what was pushed so far, then end the session."""

    generation: int
    pad_partial: bool


@dataclass(frozen=True)
class Respond:
    """Give a call its output."""

    generation: int
    call_id: str
    output: Any


@dataclass(frozen=True)
class Cancel:
    """End the session at once."""

    generation: int


@dataclass(frozen=True)
class Close:
    """Nobody listens to the session any more: forget it, and say so."""

    generation: int


@dataclass(frozen=True)
class Ping:
    """Answer."""


@dataclass(frozen=True)
class Stop:
    """Look whether to stop: the thread is told by ``halt``, and this only wakes it."""


Command = Open | Wake | Flush | Respond | Cancel | Close | Ping | Stop


# ---- news, from the thread


@dataclass(frozen=True)
class Loaded:
    """The model is loaded and warm."""


@dataclass(frozen=True)
class Opened:
    """A session is open."""

    generation: int


@dataclass(frozen=True)
class Refused:
    """A session could not be opened."""

    generation: int
    error: BaseException


@dataclass(frozen=True)
class Delivery:
    """Results of a session, in order. ``room``: it has room for input again. ``seconds``: what a frame took."""

    generation: int
    results: tuple[Result, ...]
    room: bool = False
    seconds: float | None = None


@dataclass(frozen=True)
class Released:
    """A session is closed and its memory free."""

    generation: int


@dataclass(frozen=True)
class Answered:
    """To a ping."""


@dataclass(frozen=True)
class Ended:
    """The last word. ``error`` is None if it was asked to stop."""

    error: BaseException | None


News = Loaded | Opened | Refused | Delivery | Released | Answered | Ended
