"""NVIDIA NemotronLabs VoiceChat 11B on MLX: networks and session.

    >>> import voicechat_core
    >>> voicechat = voicechat_core.load("checkpoint")
    >>> result = voicechat.generate("question.wav", system_prompt="Be concise.", seed=0)

    >>> session = voicechat.session(system_prompt="Be concise.", seed=0)
    >>> for event in session.push(samples):
    ...     print(event)

Importing this package needs no MLX: names that do are loaded on first use.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from voicechat_core.errors import (
    AudioError,
    CheckpointError,
    ConfigError,
    ContextLimitError,
    GoldensError,
    HubError,
    InputError,
    ModelError,
    SessionClosedError,
    VoiceChatError,
    WireError,
)
from voicechat_core.events import (
    AudioFrame,
    AudioTail,
    Cancelled,
    Done,
    Event,
    FunctionDelta,
    TextDelta,
    ToolCall,
    ToolCallFailed,
    TranscriptDelta,
)
from voicechat_core.profile import Profiler

if TYPE_CHECKING:
    from voicechat_core.offline import GenerationResult
    from voicechat_core.session import Session
    from voicechat_core.snapshot import Snapshot
    from voicechat_core.voicechat import VoiceChat, load

__all__ = [
    "AudioError",
    "AudioFrame",
    "AudioTail",
    "Cancelled",
    "CheckpointError",
    "ConfigError",
    "ContextLimitError",
    "Done",
    "Event",
    "FunctionDelta",
    "GenerationResult",
    "GoldensError",
    "HubError",
    "InputError",
    "ModelError",
    "Profiler",
    "Session",
    "SessionClosedError",
    "Snapshot",
    "TextDelta",
    "ToolCall",
    "ToolCallFailed",
    "TranscriptDelta",
    "VoiceChat",
    "VoiceChatError",
    "WireError",
    "load",
]

__version__ = version("voicechat-core")

_NEEDS_MLX = {
    "GenerationResult": "voicechat_core.offline",
    "Session": "voicechat_core.session",
    "Snapshot": "voicechat_core.snapshot",
    "VoiceChat": "voicechat_core.voicechat",
    "load": "voicechat_core.voicechat",
}


def __dir__() -> list[str]:
    return [*globals(), *_NEEDS_MLX]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_MLX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_NEEDS_MLX[name]), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "mlx":
            message = (
                f"voicechat_core.{name} needs MLX: install voicechat-core[mlx], or voicechat-core[cuda] for CUDA 13"
            )
            raise ModuleNotFoundError(message, name="mlx") from error
        raise
