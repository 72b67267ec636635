"""Every way in which a conversation can fail, each with the status that a command ends with.

    VoiceChatError
    └── ClientError
        ├── UrlError            2   what was asked for cannot be: the address, the file of certificates (an InputError)
        ├── EndedError          2   more is asked of a conversation that has ended, or of its input (an InputError)
        ├── ConnectError        3   nobody was reached
        │   ├── ResolveError        there is no such host
        │   ├── RefusedError        the host is there, and nobody listens
        │   └── ConnectTimeoutError nothing came in time
        ├── TlsError            4   no trust, or one of the two sides says that it does not speak it
        ├── NotAllowedError     5
        │   ├── UnauthorisedError   401: no key, or the wrong one
        │   └── ForbiddenError      403
        ├── NotVoiceChatError   6   somebody answers, but not /v1/realtime, or hangs up without a word
        ├── UnavailableError    7   try again later
        │   ├── BusyError           another session is active, or 1013 and no word
        │   └── LoadingError        the model is still loading
        ├── SessionRefusedError 8   the server does not open the session that was asked for
        ├── LostError           9   the connection was lost in the middle, or the server fell silent
        ├── ServerFaultError    10  the server does not keep to the protocol: what it says cannot be trusted
        └── DeviceError         11  a microphone or a speaker is not there, or has gone

Each message says what happened, and what can be done where something can. What a peer wrote is shown in one printable
line. No key is ever shown.
"""

from typing import ClassVar

from voicechat_core.errors import InputError, VoiceChatError

__all__ = [
    "BusyError",
    "ClientError",
    "ConnectError",
    "ConnectTimeoutError",
    "DeviceError",
    "EndedError",
    "ForbiddenError",
    "LoadingError",
    "LostError",
    "NotAllowedError",
    "NotVoiceChatError",
    "RefusedError",
    "ResolveError",
    "ServerFaultError",
    "SessionRefusedError",
    "TlsError",
    "UnauthorisedError",
    "UnavailableError",
    "UrlError",
]


class ClientError(VoiceChatError):
    """Base of whatever a conversation fails by. ``exit_status`` is what a command ends with."""

    exit_status: ClassVar[int] = 1


class UrlError(ClientError, InputError):
    """The address, or the file of certificates, cannot be used."""

    exit_status = 2


class EndedError(ClientError, InputError):
    """The conversation has ended as it should, or its input was committed; nothing more can be sent."""

    exit_status = 2


class ConnectError(ClientError):
    """No connection."""

    exit_status = 3


class ResolveError(ConnectError):
    """The host's name leads nowhere."""


class RefusedError(ConnectError):
    """Nobody listens there."""


class ConnectTimeoutError(ConnectError):
    """Nobody answered in time."""


class TlsError(ClientError):
    """TLS could not be agreed on."""

    exit_status = 4


class NotAllowedError(ClientError):
    """The server does not let this client in."""

    exit_status = 5


class UnauthorisedError(NotAllowedError):
    """The server wants a key, or another one."""


class ForbiddenError(NotAllowedError):
    """The server lets nobody in from here."""


class NotVoiceChatError(ClientError):
    """What answers is no voicechat server.

    Attributes:
        status: of its HTTP answer; None if there was none, or if it was a WebSocket of another kind.
    """

    exit_status = 6

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UnavailableError(ClientError):
    """The server is there and cannot open a session now."""

    exit_status = 7


class BusyError(UnavailableError):
    """Another session is active."""


class LoadingError(UnavailableError):
    """The model is still loading."""


class SessionRefusedError(ClientError):
    """The session could not be opened; the message is the server's. Another update may be tried."""

    exit_status = 8


class LostError(ClientError):
    """The connection was lost in the middle. What had arrived was given before.

    Attributes:
        code: of the WebSocket's close; 1006 where there was none.
        reason: the server's, in one printable line; often empty.
    """

    exit_status = 9

    def __init__(self, message: str, code: int = 1006, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class ServerFaultError(ClientError):
    """The server said something that the protocol does not allow. What had arrived before is right."""

    exit_status = 10


class DeviceError(ClientError):
    """A microphone or a speaker cannot be used; the message says what there is."""

    exit_status = 11
