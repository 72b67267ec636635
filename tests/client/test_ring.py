"""Samples between two threads: none twice, none out of order, and what found no room is counted."""

import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from voicechat_client.ring import Ring, Samples


def ramp(start: int, count: int, channels: int = 1) -> Samples:
    """Samples that say which they are; channel c adds c/4."""
    return (np.arange(start, start + count)[:, np.newaxis] + np.arange(channels) / 4).astype(np.float32)


def test_what_is_written_is_read_once_and_in_order_around_the_end() -> None:
    ring = Ring(7, 2)
    got = []
    for start in range(0, 50, 5):
        assert ring.write(ramp(start, 5, 2)) == 5
        got.append(ring.read())
    np.testing.assert_array_equal(np.concatenate(got), ramp(0, 50, 2))
    assert (ring.written, ring.consumed, ring.available, ring.dropped) == (50, 50, 0, 0)


def test_what_finds_no_room_is_the_newest_and_is_counted() -> None:
    ring = Ring(10)
    assert [ring.write(ramp(0, 8)), ring.write(ramp(8, 5)), ring.write(ramp(13, 3))] == [8, 2, 0]
    assert (ring.dropped, ring.room) == (6, 0)
    np.testing.assert_array_equal(ring.read(), ramp(0, 10))
    assert ring.room == 10
    assert ring.write(ramp(20, 25)) == 10
    np.testing.assert_array_equal(ring.read(), ramp(20, 10))
    assert ring.dropped == 21


def test_reading_into_leaves_what_is_not_there() -> None:
    ring = Ring(8)
    ring.write(ramp(1, 6))
    ring.read_into(np.zeros((5, 1), np.float32))
    ring.write(ramp(7, 5))
    out = np.full((9, 3), -1, np.float32)
    assert ring.read_into(out) == 6
    np.testing.assert_array_equal(out[:, 0], [6, 7, 8, 9, 10, 11, -1, -1, -1])
    np.testing.assert_array_equal(out[:, 1:], out[:, :2])  # one channel serves all


def test_it_keeps_a_copy() -> None:
    ring = Ring(4)
    block = ramp(1, 3)
    ring.write(block)
    block[:] = -1
    read = ring.read()
    ring.write(ramp(9, 4))
    np.testing.assert_array_equal(read, ramp(1, 3))


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads that change a hundred times as often as they would."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("capacity", [97, 4096])
def test_two_threads(capacity: int) -> None:
    """The writer offers samples again and again until they are in; the reader sees each once, in order."""
    ring, total, read = Ring(capacity), 40 * capacity, []

    def write() -> None:
        at = 0
        while at < total:
            written = ring.write(ramp(at, min(61, total - at)))
            at += written
            time.sleep(0 if written else 1e-4)

    writer = threading.Thread(target=write)
    writer.start()
    while ring.consumed < total:
        read.append(ring.read())
    writer.join()
    np.testing.assert_array_equal(np.concatenate(read), ramp(0, total))
    assert ring.available == 0
