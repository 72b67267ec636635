"""Sends a recording through a conversation, and gives what comes back to whoever wants it.

    async with opened(path) as recording:
        spoken = Blocks(recording, 1280, tail_samples=48000)
        await send(conversation, spoken, pacer=Pacer("fast", 16000), heard=answer.add)

Two tasks: one sends, one hears. Neither waits for the other, so that a server that is busy is no reason to stop
listening, and the other way round. Knows no file, no terminal and no clock but Trio's.
"""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

import numpy as np
import trio

from voicechat_client.client import Conversation
from voicechat_client.errors import ClientError
from voicechat_client.pacing import Pacer
from voicechat_client.recording import Pcm16
from voicechat_core import wire

__all__ = ["Blocks", "Reader", "send"]


class Reader(Protocol):
    """What gives a recording: ``recording.Recording`` does."""

    async def read(self, count: int) -> Pcm16:
        """The next samples ``[S]`` at 16 kHz, fewer than ``count`` at the end, then none."""


class Blocks:
    """A recording in blocks of so many samples, then silence: the model answers on the same clock as it listens.

    An asynchronous iterator of int16 ``[S]`` at 16 kHz; only the last block may be shorter. It reads no further ahead
    than it is asked for, and raises what the reader does.
    """

    def __init__(self, reader: Reader, samples: int, *, tail_samples: int = 0) -> None:
        self._reader = reader
        self._samples = samples
        self._silence = tail_samples
        self._ended = False
        self._ahead: Pcm16 | None = None

    @property
    def ended(self) -> bool:
        """Whether all of it was given, the silence too."""
        return self._ended and self._silence == 0 and self._ahead is None

    async def begin(self) -> None:
        """Read the first block, before anything is done that a recording without one would not be worth."""
        self._ahead = self._ahead if self._ahead is not None else await self._next()

    def __aiter__(self) -> "Blocks":
        return self

    async def __anext__(self) -> Pcm16:
        """The next block."""
        block, self._ahead = self._ahead, None
        if block is None:
            block = await self._next()
        if block is None:
            raise StopAsyncIteration
        return block

    async def _next(self) -> Pcm16 | None:
        block = np.zeros(0, np.int16)
        if not self._ended:
            block = await self._reader.read(self._samples)
            self._ended = len(block) < self._samples
            if self._ended and len(block):
                await self._reader.read(1)  # what is wrong behind the last good sample is told by the next call
        fill = min(self._silence, self._samples - len(block))
        self._silence -= fill
        if len(block) + fill == 0:
            return None
        return np.concatenate([block, np.zeros(fill, np.int16)])


async def send(
    conversation: Conversation,
    recording: AsyncIterator[Pcm16],
    *,
    pacer: Pacer,
    heard: Callable[[wire.ServerEvent], None],
    sent: Callable[[Pcm16], None] = lambda samples: None,
) -> None:
    """Send all of a recording, commit, and hear until the server is done.

    Args:
        conversation: whose session is open.
        recording: blocks ``[S]``, int16 at 16 kHz.
        pacer: says when.
        heard: given every event, in order.
        sent: given every block once it is sent.

    Raises:
        ClientError: when the conversation is lost; what had arrived was given to ``heard`` before.
        Exception: whatever the recording, ``heard`` or ``sent`` raise, as it is.
    """

    failure: Exception | None = None

    async def speak() -> None:
        nonlocal failure
        try:
            async for block in recording:
                await pacer.wait(len(block))
                await conversation.append(block)
                sent(block)
            await conversation.commit()
        except ClientError:
            pass  # the conversation is over, and says so itself when all that had arrived is heard
        except Exception as error:
            failure = failure or error  # what went wrong on the other side may be why
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(speak)
        try:
            async for event in conversation:
                heard(event)
        except Exception as error:
            failure = failure or error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
