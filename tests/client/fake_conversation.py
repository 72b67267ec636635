"""A session that answers each 80 ms with a frame, with a network whose lateness is chosen; on Trio's clock."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import trio

from voicechat_core import wire
from voicechat_core.errors import VoiceChatError

Int16 = npt.NDArray[np.int16]
IN, OUT = 1280, 1764


def silence(number: int) -> Int16:
    return np.zeros(OUT, np.int16)


def hum(number: int) -> Int16:
    return np.full(OUT, 3000, np.int16)


class LostInTestError(VoiceChatError):
    """As the client's."""


@dataclass
class FakeConversation:
    """``blocked``: waited for by each ``append``, as by a server that does not read.

    ``ends_after`` frames the session ends by itself; ``fails_after`` frames the connection breaks with ``failure``.
    Either way nothing can be sent from then on, while the event that says so comes ``news_after`` seconds later.
    """

    answer: Callable[[int], Int16] = silence
    blocked: Callable[[], float] = lambda: 0
    ends_after: int = 1 << 60
    fails_after: int = 1 << 60
    failure: Exception = field(default_factory=lambda: LostInTestError("lost"))
    news_after: float = 0.0
    done_after: float = 0.0
    heard: list[Int16] = field(default_factory=list)
    commits: int = 0
    frames: int = 0
    pending: int = 0
    over: str = ""

    def __post_init__(self) -> None:
        self._events, self._taken = trio.open_memory_channel[wire.ServerEvent | Exception](100_000)

    async def append(self, samples: Int16) -> None:
        assert samples.dtype == np.int16
        assert not self.commits
        if self.over:
            raise LostInTestError(self.over)
        await trio.sleep(self.blocked())
        self.heard.append(samples)
        self.pending += len(samples)
        while self.pending >= IN:
            self.pending -= IN
            self._say_frame()

    async def commit(self) -> None:
        self.commits += 1
        await trio.sleep(self.done_after)
        if self.pending:
            self._say_frame()
        self._say(wire.ResponseDone(event_id="x", frame_index=self.frames))

    async def __aiter__(self) -> AsyncIterator[wire.ServerEvent]:
        async for event in self._taken:
            if isinstance(event, Exception):
                await trio.sleep(self.news_after)
                raise event
            if isinstance(event, wire.ResponseDone):
                await trio.sleep(self.news_after)
                yield event
                return
            yield event

    def input(self) -> Int16:
        return np.concatenate(self.heard)

    def _say_frame(self) -> None:
        delta = wire.bytes_of(self.answer(self.frames))
        self._say(wire.ResponseAudioDelta(event_id="x", frame_index=self.frames, delta=delta, audio_codes=[0] * 31))
        self.frames += 1
        if self.frames == self.ends_after:
            self.over = "it has ended"
            self._say(wire.ResponseDone(event_id="x", frame_index=self.frames))
        if self.frames == self.fails_after:
            self.over = "cannot be sent"
            self._say(self.failure)

    def _say(self, event: wire.ServerEvent | Exception) -> None:
        self._events.send_nowait(event)
