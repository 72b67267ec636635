"""voicechat-client: full-duplex speech with a voicechat server, as a Trio library.

    import trio
    from voicechat_client import Answer, SessionOptions, connect

    async def speak(conversation, samples):  # int16 [S] at 16 kHz
        await conversation.append(samples)
        await conversation.commit()

    async def main(samples):
        answer = Answer()
        async with connect("ws://127.0.0.1:8080") as conversation, trio.open_nursery() as nursery:
            await conversation.update(SessionOptions(system_prompt="Be concise."))
            nursery.start_soon(speak, conversation, samples)
            async for event in conversation:
                answer.add(event)
        print(answer.text)

Needs no MLX. Names are loaded on first use, so that the command is there for a Ctrl-C before all the rest is.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from voicechat_client.answer import Answer
    from voicechat_client.client import connect
    from voicechat_client.conversation import ClientLimits, Conversation
    from voicechat_client.errors import (
        BusyError,
        ClientError,
        ConnectError,
        ConnectTimeoutError,
        DeviceError,
        EndedError,
        ForbiddenError,
        LoadingError,
        LostError,
        NotAllowedError,
        NotVoiceChatError,
        RefusedError,
        ResolveError,
        ServerFaultError,
        SessionRefusedError,
        TlsError,
        UnauthorisedError,
        UnavailableError,
        UrlError,
    )
    from voicechat_core.keys import Key, read_key
    from voicechat_core.wire import LagPolicy, SessionOptions

__all__ = [
    "Answer",
    "BusyError",
    "ClientError",
    "ClientLimits",
    "ConnectError",
    "ConnectTimeoutError",
    "Conversation",
    "DeviceError",
    "EndedError",
    "ForbiddenError",
    "Key",
    "LagPolicy",
    "LoadingError",
    "LostError",
    "NotAllowedError",
    "NotVoiceChatError",
    "RefusedError",
    "ResolveError",
    "ServerFaultError",
    "SessionOptions",
    "SessionRefusedError",
    "TlsError",
    "UnauthorisedError",
    "UnavailableError",
    "UrlError",
    "connect",
    "read_key",
]

_HOMES = {
    "voicechat_client.answer": {"Answer"},
    "voicechat_client.client": {"connect"},
    "voicechat_client.conversation": {"ClientLimits", "Conversation"},
    "voicechat_core.keys": {"Key", "read_key"},
    "voicechat_core.wire": {"LagPolicy", "SessionOptions"},
    "voicechat_client.errors": {name for name in __all__ if name.endswith("Error")},
}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
