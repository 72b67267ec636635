"""A recording in blocks, and two tasks that send and hear, with a conversation that does what a test says."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from tests.client.events import done, frame
from voicechat_client.errors import EndedError, LostError
from voicechat_client.pacing import Pacer
from voicechat_client.send import Blocks, send
from voicechat_core.errors import AudioError


def run(test: Callable[[], Any]) -> None:
    trio.run(test, clock=MockClock(autojump_threshold=0))


class Reader:
    """Samples 1, 2, 3, ..., and then an error if there is one. ``asked`` is what it was asked for."""

    def __init__(self, samples: int, error: Exception | None = None) -> None:
        self._samples = np.arange(1, samples + 1).astype(np.int16)
        self._error = error
        self.asked: list[int] = []

    async def read(self, count: int) -> np.ndarray:
        await trio.lowlevel.checkpoint()
        self.asked.append(count)
        block, self._samples = self._samples[:count], self._samples[count:]
        if len(block) == 0 and self._error is not None:
            raise self._error
        return block


async def all_of(recording: AsyncIterator[np.ndarray]) -> list[np.ndarray]:
    return [block async for block in recording]


@pytest.mark.parametrize("tail", [0, 1, 3, 4, 5, 20])
@pytest.mark.parametrize("length", [1, 3, 4, 7, 8])
def test_blocks_and_silence(length: int, tail: int) -> None:
    async def main() -> None:
        found = await all_of(Blocks(Reader(length), 4, tail_samples=tail))
        joined = np.concatenate(found)
        assert joined.tolist() == [*range(1, length + 1), *[0] * tail]
        assert joined.dtype == np.int16
        assert {len(block) for block in found[:-1]} <= {4}
        assert 1 <= len(found[-1]) <= 4

    run(main)


def test_the_first_block_may_be_read_before() -> None:
    """And is given then, once; a recording that cannot give it is found out."""

    async def main() -> None:
        for length, tail in ((9, 0), (3, 0), (3, 6), (4, 0)):
            reader = Reader(length)
            recording = Blocks(reader, 4, tail_samples=tail)
            await recording.begin()
            await recording.begin()
            assert reader.asked[0] == 4
            assert len(reader.asked) <= 2
            assert not recording.ended
            joined = np.concatenate(await all_of(recording))
            assert joined.tolist() == [*range(1, length + 1), *[0] * tail]
            assert recording.ended
        for length in (0, 3):
            with pytest.raises(AudioError, match="is none"):
                await Blocks(Reader(length, AudioError("is none")), 4, tail_samples=100).begin()

    run(main)


def test_no_further_ahead_than_asked() -> None:
    async def main() -> None:
        reader = Reader(100)
        recording = Blocks(reader, 10)
        await anext(recording)
        await anext(recording)
        assert reader.asked == [10, 10]

    run(main)


@pytest.mark.parametrize("length", [8, 9, 11])
def test_damage_is_told_wherever_the_last_block_ends(length: int) -> None:
    async def main() -> None:
        recording = Blocks(Reader(length, AudioError("cut short")), 4, tail_samples=100)
        assert (await anext(recording)).tolist() == [1, 2, 3, 4]
        assert (await anext(recording)).tolist() == [5, 6, 7, 8]
        with pytest.raises(AudioError, match="cut short"):
            await anext(recording)

    run(main)


class Talk:
    """A conversation: keeps what it is sent, says what it is told to."""

    def __init__(self, *says: Any, after: int = 0) -> None:
        self.log: list[Any] = []
        self._says = list(says)
        self._after = after
        self._sent = trio.Event()
        if after == 0:
            self._sent.set()

    async def append(self, samples: np.ndarray) -> None:
        await trio.lowlevel.checkpoint()
        self.log.append(samples.tolist())
        if len(self.log) >= self._after:
            self._sent.set()

    async def commit(self) -> None:
        await trio.lowlevel.checkpoint()
        self.log.append("commit")
        if len(self.log) >= self._after:
            self._sent.set()

    def __aiter__(self) -> "Talk":
        return self

    async def __anext__(self) -> Any:
        await self._sent.wait()
        await trio.lowlevel.checkpoint()
        if not self._says:
            raise StopAsyncIteration
        event = self._says.pop(0)
        if isinstance(event, Exception):
            raise event
        return event


def test_all_is_sent_and_heard() -> None:
    async def main() -> None:
        heard: list[Any] = []
        talk: Any = Talk(frame(0), done(1), after=4)
        await send(talk, Blocks(Reader(9), 4), pacer=Pacer("fast", 16000), heard=heard.append)
        assert talk.log == [[1, 2, 3, 4], [5, 6, 7, 8], [9], "commit"]
        assert heard == [frame(0), done(1)]

    run(main)


def test_a_lost_conversation_is_told_after_what_had_arrived() -> None:
    """The sending task fails first, which is no news: how it ended, the conversation says."""

    class Lost(Talk):
        async def append(self, samples: np.ndarray) -> None:
            await super().append(samples)
            raise EndedError("no more is taken")

    async def main() -> None:
        heard: list[Any] = []
        talk: Any = Lost(frame(0), frame(1), LostError("gone"), after=1)
        with pytest.raises(LostError, match="gone"):
            await send(talk, Blocks(Reader(9), 4), pacer=Pacer("fast", 16000), heard=heard.append)
        assert heard == [frame(0), frame(1)]
        assert talk.log == [[1, 2, 3, 4]]

    run(main)


def test_what_the_recording_raises_ends_it() -> None:
    async def main() -> None:
        talk: Any = Talk(frame(0), done(1), after=100)
        spoken = Blocks(Reader(9, AudioError("cut short")), 4)
        with pytest.raises(AudioError, match="cut short"):
            await send(talk, spoken, pacer=Pacer("fast", 16000), heard=lambda event: None)
        assert "commit" not in talk.log

    run(main)


def test_what_the_listener_raises_ends_it() -> None:
    def full(event: Any) -> None:
        raise AudioError("disk full")

    async def main() -> None:
        talk: Any = Talk(frame(0), done(1), after=1)
        with pytest.raises(AudioError, match="disk full"):
            await send(talk, Blocks(Reader(10**6), 4), pacer=Pacer("realtime", 16000), heard=full)
        assert len(talk.log) < 10

    run(main)


def test_the_first_of_two_errors_is_told() -> None:
    """A file that is full is closed, and so of no use to the other task, which is about to find that."""
    found: list[str] = []

    class AtOnce(Talk):
        async def append(self, samples: np.ndarray) -> None:
            await now.wait()

        async def __anext__(self) -> Any:
            await now.wait()
            return frame(0)

    def fails(what: Any) -> None:
        found.append("no room" if not found else "is closed")
        raise AudioError(found[-1])

    async def main() -> None:
        talk: Any = AtOnce()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(soon)
            with pytest.raises(AudioError, match="no room"):
                await send(talk, Blocks(Reader(4), 4), pacer=Pacer("fast", 16000), heard=fails, sent=fails)
        assert found == ["no room", "is closed"]

    async def soon() -> None:
        await trio.sleep(1)
        now.set()

    for _ in range(20):  # which of the two tasks is first, Trio draws
        found.clear()
        now = trio.Event()
        run(main)


def test_what_was_sent_is_told_after_it_was() -> None:
    async def main() -> None:
        told: list[list[int]] = []
        talk: Any = Talk(done(0), after=100)

        def sent(block: np.ndarray) -> None:
            assert talk.log[-1] == block.tolist()
            told.append(block.tolist())
            if len(told) == 2:
                raise AudioError("full")

        spoken = Blocks(Reader(80), 4)
        with pytest.raises(AudioError, match="full"):
            await send(talk, spoken, pacer=Pacer("fast", 16000), heard=lambda event: None, sent=sent)
        assert told == talk.log == [[1, 2, 3, 4], [5, 6, 7, 8]]

    run(main)


def test_hearing_goes_on_while_sending_waits() -> None:
    class Stuck(Talk):
        async def append(self, samples: np.ndarray) -> None:
            await super().append(samples)
            await trio.sleep_forever()

    async def main() -> None:
        heard: list[Any] = []
        talk: Any = Stuck(*[frame(index) for index in range(5)], done(5))
        await send(talk, Blocks(Reader(9), 4), pacer=Pacer("fast", 16000), heard=heard.append)
        assert len(heard) == 6

    run(main)
