"""What the protocol is told, besides a peer's messages, and what it has done: small values, equal by content.

Time is seconds of any one clock. Knows no socket, thread or model.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from voicechat_core import events, wire

__all__ = [
    "Cancel",
    "Close",
    "Command",
    "Failed",
    "Flush",
    "Input",
    "Lagging",
    "Open",
    "OpenFailed",
    "Opened",
    "OutputAccepted",
    "OutputRefused",
    "PeerLeft",
    "Push",
    "Respond",
    "Said",
    "Send",
    "Stop",
]


# ---- what the protocol is told


@dataclass(frozen=True)
class Opened:
    """The session that ``Open`` asked for is there."""


@dataclass(frozen=True)
class OpenFailed:
    """It could not be opened; what was pushed for it, or still will be before this is told, is void."""

    error: BaseException


@dataclass(frozen=True)
class Said:
    """The session says something. What belongs to another session has been sorted out before."""

    event: events.Event


@dataclass(frozen=True)
class Failed:
    """A frame could not be run. Unless the session ``ended`` by it, it hears no more, but can be flushed.

    Also, as ``ended``: the model's thread is gone, whatever it was doing.
    """

    error: BaseException
    ended: bool


@dataclass(frozen=True)
class OutputAccepted:
    """What ``Respond`` gave is the call's output: it waits for no other one."""

    call_id: str


@dataclass(frozen=True)
class OutputRefused:
    """What ``Respond`` gave was not taken, and nothing has changed by it."""

    call_id: str
    error: BaseException


@dataclass(frozen=True)
class Lagging:
    """Where the session stands: audio that no frame has taken yet, and how many frames were skipped so far in all.

    Told as often as is convenient, with each frame or by a timer: the protocol decides what the peer hears of it.
    """

    waiting_seconds: float
    frames_waiting: int
    frames_skipped: int


@dataclass(frozen=True)
class PeerLeft:
    """The socket is closed, or broken: nobody is there to be answered."""


@dataclass(frozen=True)
class Stop:
    """The server ends this connection: it shuts down (1001), or the peer does not read (1008)."""

    code: int
    reason: str


Input = Opened | OpenFailed | Said | Failed | OutputAccepted | OutputRefused | Lagging | PeerLeft | Stop


# ---- what is to be done


@dataclass(frozen=True)
class Send:
    """Write this message."""

    message: wire.ServerEvent


@dataclass(frozen=True)
class Open:
    """Open a session, then tell ``Opened`` or ``OpenFailed``. What is pushed meanwhile waits behind it.

    ``system_prompt`` None is the checkpoint's own, "" none. ``max_frames`` is None where only the model sets a limit.
    With ``function_calls`` the peer answers what the model calls.
    """

    system_prompt: str | None
    seed: int
    max_frames: int | None
    lag: wire.LagPolicy
    function_calls: bool = False


@dataclass(frozen=True, eq=False)
class Push:
    """Give the session these samples ``[S]``, int16 at 16 kHz, never none. What they lead to is ``Said``."""

    samples: npt.NDArray[np.int16] = field(repr=False)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same samples."""
        return isinstance(other, Push) and self.samples.tobytes() == other.samples.tobytes()

    def __hash__(self) -> int:
        return hash(self.samples.tobytes())


@dataclass(frozen=True)
class Flush:
    """The input is complete: run the frames that are due, then end. ``Done`` is the last that is ``Said``."""

    pad_partial: bool


@dataclass(frozen=True)
class Respond:
    """Give the session the output of a call that it told. Then tell ``OutputAccepted`` or ``OutputRefused``."""

    call_id: str
    output: Any


@dataclass(frozen=True)
class Cancel:
    """End the session, or its opening, at once: nothing more is wanted of it."""


@dataclass(frozen=True)
class Close:
    """The last command. Close the socket with this, after the session is closed and its slot is free again."""

    code: int
    reason: str


Command = Send | Open | Push | Flush | Respond | Cancel | Close
