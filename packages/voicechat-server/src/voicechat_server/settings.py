"""What a server is told once, at its start. Every limit is here or in the limits that it holds, with its reason."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Final

from voicechat_core.errors import InputError
from voicechat_server.http import HttpLimits
from voicechat_server.protocol import Limits
from voicechat_server.transport import SocketLimits
from voicechat_server.worker import MOST_INPUT_SECONDS, MOST_RESULTS

__all__ = ["Settings", "require_positive"]

FRAME_SECONDS: Final = 0.08
LONGEST_SECONDS: Final = 1e9  # thirty years: of infinity there are no frames


@dataclass(frozen=True)
class Settings:
    """What is served, and how long and how much peers may take.

    Attributes:
        model: the name that peers are told.
        system_prompt: for sessions that ask for none in particular; None for the checkpoint's own.
        tts_context_frames: see ``VoiceChat.session``; None is exact.
        limits: of a conversation.
        http_limits: of a connection before it is one.
        socket_limits: of a WebSocket.
        tool_seconds: of audio, in which a peer is to answer a call; then the model reads an error. Longer, and whoever
            asked has hung up.
        write_seconds: in which the socket must take one message of some 5 kB: a peer that has not read for so long
            gives its slot back.
        connections: open at once. One talks, some ask for its turn or for /health; each is a file and some KiB, and a
            process has a thousand files as a rule.
        queued_seconds: of audio that waits for the model; past it the server reads no further.
        queued_events: that wait for a client; past it the model pauses.
        shutdown_seconds: for the peers to take their last messages once the server stops.
    """

    model: str
    system_prompt: str | None = None
    tts_context_frames: int | None = None
    limits: Limits = field(default_factory=Limits)
    http_limits: HttpLimits = field(default_factory=HttpLimits)
    socket_limits: SocketLimits = field(default_factory=SocketLimits)
    tool_seconds: float = 10.0
    write_seconds: float = 10.0
    connections: int = 100
    queued_seconds: float = MOST_INPUT_SECONDS
    queued_events: int = MOST_RESULTS
    shutdown_seconds: float = 5.0

    def __post_init__(self) -> None:
        require_positive(self)
        if math.isinf(self.queued_seconds):
            raise InputError("queued_seconds is inf; memory is not, so a finite number is needed")
        if self.queued_seconds < FRAME_SECONDS:
            raise InputError(f"queued_seconds is {self.queued_seconds}; {FRAME_SECONDS}, a frame, is the least")
        for limits in (self.limits, self.http_limits, self.socket_limits):
            require_positive(limits)

    @property
    def tool_wait_frames(self) -> int:
        """``tool_seconds`` in frames, at least one."""
        return math.ceil(min(self.tool_seconds, LONGEST_SECONDS) / FRAME_SECONDS)


def require_positive(limits: Any) -> None:
    """Check that every number of a dataclass is above 0; infinity is, NaN is not.

    Raises:
        InputError: naming the field and its value.
    """
    for each in fields(limits):
        value = getattr(limits, each.name)
        if isinstance(value, int | float) and not value > 0:
            raise InputError(f"{each.name} is {value}; more than 0 is needed")
        if isinstance(value, float) and math.isinf(value) and not each.name.endswith("seconds"):
            raise InputError(f"{each.name} is {value}; a finite number is needed")
