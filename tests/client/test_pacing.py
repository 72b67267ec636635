"""When chunks are sent, on a clock that jumps: an hour is an hour, and who was late is on time again."""

from collections.abc import Callable
from typing import Any

import trio
from trio.testing import MockClock

from voicechat_client.pacing import Pacer

RATE = 16000


def run(test: Callable[[], Any]) -> None:
    trio.run(test, clock=MockClock(autojump_threshold=0))


def test_an_hour_ends_after_an_hour() -> None:
    """Each chunk takes a while to be sent, which no chunk after it is later for."""

    async def main() -> None:
        pacer, began = Pacer("realtime", RATE), trio.current_time()
        for chunk in range(1, 3600 * 50 + 1):
            await pacer.wait(320)
            late = trio.current_time() - began - chunk * 0.02
            assert abs(late) < 1e-6
            if chunk % 1000 == 500:
                await trio.sleep(0.015)
        assert abs(trio.current_time() - began - 3600) < 1e-6

    run(main)


def test_chunks_that_are_no_whole_number_of_anything() -> None:
    """79.9375 ms, ten minutes of them: what one chunk is rounded by, no other adds to."""

    async def main() -> None:
        pacer, began = Pacer("realtime", RATE), trio.current_time()
        for _ in range(7506):
            await pacer.wait(1279)
        await pacer.wait(17)
        assert abs(trio.current_time() - began - (7506 * 1279 + 17) / RATE) < 1e-6

    run(main)


def test_a_chunk_is_sent_when_its_last_sample_is_spoken() -> None:
    async def main() -> None:
        pacer, began = Pacer("realtime", RATE), trio.current_time()
        await pacer.wait(RATE)
        assert trio.current_time() - began == 1.0
        await pacer.wait(1)
        assert trio.current_time() - began == 1.0 + 1 / RATE

    run(main)


def test_time_begins_with_the_first_chunk() -> None:
    async def main() -> None:
        pacer = Pacer("realtime", RATE)
        await trio.sleep(100)
        began = trio.current_time()
        await pacer.wait(RATE)
        assert trio.current_time() - began == 1.0

    run(main)


def test_a_stall_is_caught_up() -> None:
    """Five seconds in which the server did not read: 250 chunks follow at once, then all is as it was."""

    async def main() -> None:
        pacer, began = Pacer("realtime", RATE), trio.current_time()
        for _ in range(100):
            await pacer.wait(320)
        await trio.sleep(5)
        stalled = trio.current_time()
        for _ in range(250):
            await pacer.wait(320)
        assert trio.current_time() - stalled < 1e-6
        await pacer.wait(320)
        assert abs(trio.current_time() - stalled - 0.02) < 1e-6
        assert abs(trio.current_time() - began - 351 * 0.02) < 1e-6

    run(main)


def test_fast_never_waits_and_lets_others_run() -> None:
    async def main() -> None:
        pacer, began, turns = Pacer("fast", RATE), trio.current_time(), 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            for _ in range(1000):
                await pacer.wait(320)
            nursery.cancel_scope.cancel()
        assert trio.current_time() == began
        assert turns > 100

    run(main)
