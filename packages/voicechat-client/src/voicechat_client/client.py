"""A conversation with a voicechat server.

    async with connect("ws://127.0.0.1:8080") as conversation:
        await conversation.update(SessionOptions(system_prompt="Be concise.", seed=5))
        await conversation.append(samples)  # int16 [S], 16 kHz mono, any number of them, any number of times
        await conversation.commit()
        async for event in conversation:  # voicechat_core.wire: what the server says, message by message
            ...

Choices:

* The user's block sees our errors (``errors.py``) and Cancelled, nothing of a library. What it raises itself comes out
  as itself, in no group.
* A task reads all the time, so that whoever sends first and listens later does not stand in the server's way. It keeps
  up to ``unread_bytes``; past that it reads no further, TCP holds the server back, and a server that cannot write for
  some seconds closes with 1008. So a user who does not listen costs memory up to a bound, and then the conversation.
* A server is held to the clock: more of anything than the input can have is its fault, nothing at all for
  ``silent_seconds`` while something is owed is a loss.
* What is sent waits while the server does not read. A call that is cancelled has sent each of its messages whole or not
  at all, and the conversation goes on.
* Every message is given to the iteration, in its order, the answers to ``update`` and ``ping`` and every ``error`` too.
  It ends after ``response.done`` or ``response.cancelled``; if the connection ends otherwise, all that had arrived is
  given first, and then the error is raised.
"""

import random
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from voicechat_client.address import Address, parse
from voicechat_client.conversation import ClientLimits, Conversation, shown
from voicechat_client.errors import BusyError, LoadingError, NotVoiceChatError, UnavailableError, UrlError
from voicechat_client.link import Gone, open_link
from voicechat_client.reaching import leaves
from voicechat_core import wire
from voicechat_core.errors import WireError
from voicechat_core.files import expanded
from voicechat_core.keys import Key
from voicechat_core.strict_json import parse_object
from voicechat_core.terminal import printable

__all__ = ["ClientLimits", "Conversation", "connect"]

UNAVAILABLE: Final = {"server_busy": BusyError, "model_loading": LoadingError}
TRY_AGAIN_LATER: Final = 1013  # also of a server, or something before it, that gives no other reason
FIRST_RETRY, LONGEST_RETRY = 0.5, 5.0  # seconds: a session lasts for minutes, and a refusal costs the server little


@asynccontextmanager
async def connect(
    url: str,
    *,
    key: Key | str | None = None,
    ca_file: str | Path | None = None,
    retry_busy_seconds: float = 0.0,
    waiting: Callable[[UnavailableError, float], None] = lambda error, seconds: None,
    limits: ClientLimits | None = None,
) -> AsyncIterator[Conversation]:
    """A conversation, from ``session.created`` until the block is left, which closes it in some seconds at most.

    Args:
        url: ws://, wss://, http:// or https://, or only a host, with or without a port (8080). Without a path it is
            completed by /v1/realtime.
        key: the server's API key. The environment is not looked at: see ``voicechat_core.keys.read_key``.
        ca_file: certificates to trust instead of the system's, for wss://.
        retry_busy_seconds: how long to try again while the server is busy or its model loads; ``math.inf`` for ever.
        waiting: is told the error and the seconds until the next try.
        limits: of time and memory.

    Raises:
        ClientError: UrlError, ConnectError, TlsError, NotAllowedError, NotVoiceChatError or UnavailableError.
        InputError: if ``key`` is none.
    """
    address, limits = parse(url), limits or ClientLimits()
    key = Key(key) if isinstance(key, str) else key
    if ca_file is not None and not address.tls:
        raise UrlError(f"{address} speaks no TLS, so the certificates in {ca_file} are of no use: wss:// is needed")
    tls = _trust(ca_file) if address.tls else None
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                door = _Door(nursery, address, key, tls, limits)
                conversation = await door.enter(trio.current_time() + retry_busy_seconds, waiting)
                try:
                    yield conversation
                finally:
                    await conversation.aclose()
            except BaseException as error:
                failure = error
                raise
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        failure = _one_of(failure, group)
    if failure is not None:
        raise failure


def _one_of(failure: BaseException | None, group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to raise for all: the block's own error; but Ctrl-C may have come to one of our tasks instead."""
    ours = [leaf for each in group.exceptions if each is not failure for leaf in leaves(each)]
    for leaf in ours:
        if not isinstance(leaf, Exception | trio.Cancelled):
            return leaf
    return failure or group


def _trust(ca_file: str | Path | None) -> ssl.SSLContext:
    if ca_file is None:
        return ssl.create_default_context()
    path = expanded(ca_file)
    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise UrlError(f"the file of certificates {path} holds none in PEM form") from None
    except OSError as error:
        raise UrlError(f"the file of certificates {path} cannot be read: {error.strerror}") from None


# ---- the first message


@dataclass(frozen=True)
class _Door:
    """What it takes to begin a conversation."""

    nursery: trio.Nursery
    address: Address
    key: Key | None
    tls: ssl.SSLContext | None
    limits: ClientLimits

    async def enter(self, until: float, waiting: Callable[[UnavailableError, float], None]) -> Conversation:
        """A conversation that has begun; tries again ``until`` then while the server cannot open one."""
        pause = FIRST_RETRY
        while True:
            try:
                return await self._try()
            except UnavailableError as error:
                left = until - trio.current_time()
                if left <= 0:
                    raise
                # Of many that wait, each at another time.
                seconds = min(left, pause * random.uniform(0.8, 1.2))
                waiting(error, seconds)
            await trio.sleep(seconds)
            pause = min(2 * pause, LONGEST_RETRY)

    async def _try(self) -> Conversation:
        link = await open_link(self.nursery, self.address, key=self.key, tls=self.tls, limits=self.limits)
        try:
            with trio.move_on_after(self.limits.created_seconds):
                created = self._first(await link.receive())
                conversation = Conversation(link, created, self.limits)
                self.nursery.start_soon(conversation.listen)
                self.nursery.start_soon(conversation.watch)
                return conversation
            raise self._no(f"no session.created came within {self.limits.created_seconds:g} seconds")
        except BaseException as error:
            await link.close()
            if isinstance(error, Gone) and error.code == TRY_AGAIN_LATER:
                raise BusyError(f"{self.address.place} has no room now: it closed with {_close(error)}") from None
            if isinstance(error, Gone):
                raise self._no(error.fault or f"it closed with {_close(error)}") from None
            raise

    def _first(self, message: str | bytes) -> wire.SessionCreated:
        """``session.created``, or the reason why there will be none."""
        try:
            event = wire.decode_server(message)
        except WireError as error:
            raise self._no(f"its first message cannot be read: {printable(str(error))}") from None
        if isinstance(event, wire.Error):
            text = f"{self.address.place}: {shown(event.error.message)} ({shown(event.error.code)})"
            kind = UNAVAILABLE.get(event.error.code)
            raise kind(text) if kind else self._no(f"its first message is an error: {text}")
        if not isinstance(event, wire.SessionCreated):
            raise self._no(f"its first message is {_type_of(event)}; session.created is needed")
        self._check_dialect(message, event.session)
        return event

    def _check_dialect(self, message: str | bytes, session: wire.CreatedSession) -> None:
        """Other protocols, too, begin with a message of this name."""
        if "input_audio_format" not in parse_object(message)["session"]:
            raise self._no("its session.created names no input_audio_format")
        found = (session.input_audio_format, session.output_audio_format)
        if found != (wire.HEARD, wire.SPOKEN):
            rates = " and ".join(f"{printable(each.type)[:20]} at {each.sample_rate} Hz" for each in found)
            raise self._no(f"it hears and speaks {rates}; pcm16 at {wire.INPUT_RATE} and {wire.OUTPUT_RATE} is needed")

    def _no(self, why: str) -> NotVoiceChatError:
        return NotVoiceChatError(f"{self.address} is a WebSocket, but no voicechat server's: {why}")


def _close(gone: Gone) -> str:
    return f"{gone.code} {shown(gone.reason)}".rstrip()


def _type_of(event: wire.ServerEvent) -> str:
    return str(type(event).__struct_config__.tag)
