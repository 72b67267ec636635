"""voicechat-client: full-duplex speech with a voicechat server, as a Trio library.

    import trio
    from voicechat_client import Answer, SessionOptions, connect

    async def main() -> None:
        async with connect("ws://127.0.0.1:8080") as conversation, trio.open_nursery() as nursery:
            await conversation.update(SessionOptions(system_prompt="Be concise."))
            nursery.start_soon(conversation.append, samples)  # int16 at 16 kHz
            answer = Answer()
            async for event in conversation:  # until response.done; somebody has to commit()
                answer.add(event)
            print(answer.text)

Needs no MLX.
"""

from voicechat_client.answer import Answer
from voicechat_client.client import connect
from voicechat_client.conversation import ClientLimits, Conversation
from voicechat_client.errors import (
    BusyError,
    ClientError,
    ConnectError,
    ConnectTimeoutError,
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
