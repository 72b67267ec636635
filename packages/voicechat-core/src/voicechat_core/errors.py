"""Every error the core raises on purpose. Whoever catches ``VoiceChatError`` catches them all.

    VoiceChatError
    ├── CheckpointError     the checkpoint's fault: a file, a tensor or a key is missing, left over or inconsistent
    │   └── ConfigError     config.json (also a ValueError)
    ├── AudioError          the audio's fault: not a WAV, truncated, not finite, a rate that cannot be
    ├── InputError          the caller's fault: an argument out of range (also a ValueError)
    │   ├── ContextLimitError   more positions than the model has, or more frames than a session may have
    │   └── SessionClosedError  something is asked of a session that has ended
    ├── GoldensError        a goldens folder that cannot be verified: a file or a tensor is missing
    ├── HubError            the hub's or the network's fault: no such repository, gated, no network, an incomplete cache
    ├── WireError           the peer's fault: a message of /v1/realtime that is not one
    └── ModelError          ours or the weights': the model computed something that is not a number

Each message names the thing, and where two values disagree, both.
"""

__all__ = [
    "AudioError",
    "CheckpointError",
    "ConfigError",
    "ContextLimitError",
    "GoldensError",
    "HubError",
    "InputError",
    "ModelError",
    "SessionClosedError",
    "VoiceChatError",
    "WireError",
]


class VoiceChatError(Exception):
    """Base of every deliberate error."""


class CheckpointError(VoiceChatError):
    """The checkpoint cannot be used as it is."""


class ConfigError(CheckpointError, ValueError):
    """config.json is missing a key, or two of its values disagree."""


class AudioError(VoiceChatError):
    """An audio file or an array of samples cannot be used."""


class InputError(VoiceChatError, ValueError):
    """An argument is out of range."""


class ContextLimitError(InputError):
    """Prompt and frames together exceed ``max_position_embeddings``, or a session the frames it was given."""


class SessionClosedError(InputError):
    """A session that has ended is asked for more."""


class GoldensError(VoiceChatError):
    """A goldens folder lacks what verifying needs."""


class HubError(VoiceChatError):
    """A checkpoint cannot be had from the hub, nor whole from its cache."""


class WireError(VoiceChatError):
    """A message of the realtime protocol cannot be read. The text is short and safe to send back.

    Attributes:
        code: the ``error.code`` that the protocol answers it with.
        event_type: the message's ``type`` where it had one, known or not, else None.
    """

    def __init__(self, message: str, *, code: str = "invalid_request", event_type: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.event_type = event_type


class ModelError(VoiceChatError):
    """The model produced a value that is not a number."""
