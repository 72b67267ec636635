"""Any chunks of samples -> frames: which samples, when, and how many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from voicechat_core.framing import Framing

SAMPLES = np.arange(9000, dtype=np.float32)


def frames_of(chunks: list[int], *, wait: bool = False, pad: bool = True) -> tuple[list[np.ndarray], list[int]]:
    """The frames of consecutive chunks of ``SAMPLES``, and the samples received when each was taken."""
    framing, start = Framing(1280, 200, wait_for_full_frame=wait), 0
    frames: list[np.ndarray] = []
    when: list[int] = []

    def take() -> None:
        while framing.due:
            frames.append(framing.take())
            when.append(framing.received)

    for size in chunks:
        framing.push(SAMPLES[start : start + size])
        start += size
        take()
    if pad:
        framing.pad()
        take()
    assert framing.taken == len(frames)
    return frames, when


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize(
    ("received", "frames"), [(0, 0), (1, 1), (199, 1), (200, 1), (1280, 1), (1281, 2), (1480, 2), (2560, 2), (2561, 3)]
)
def test_a_padded_end_gives_a_frame_for_each_that_has_begun(received: int, frames: int, wait: bool) -> None:
    found, _ = frames_of([received], wait=wait)
    assert [len(frame) for frame in found] == [200, *[1280] * (frames - 1)][:frames]
    heard = np.concatenate([*found, np.zeros(0, np.float32)])
    expected = np.concatenate([SAMPLES[:received], np.zeros(5000, np.float32)])
    assert np.array_equal(heard, expected[: len(heard)])


@pytest.mark.parametrize(("wait", "last"), [(False, [200, 1480, 2760]), (True, [1280, 2560, 3840])])
def test_a_frame_is_due_with_its_last_sample(wait: bool, last: list[int]) -> None:
    """Frame k with sample 1280 k + 199, about 67 ms earlier than with all of its own."""
    _, when = frames_of([1] * 4000, wait=wait, pad=False)
    assert when == last


@given(st.lists(st.integers(0, 3000), max_size=12).filter(lambda chunks: sum(chunks) <= 9000), st.booleans())
def test_chunks_do_not_matter(chunks: list[int], wait: bool) -> None:
    cut, _ = frames_of(chunks, wait=wait)
    whole, _ = frames_of([sum(chunks)])
    assert len(cut) == len(whole) == -(-sum(chunks) // 1280)
    assert all(np.array_equal(a, b) for a, b in zip(cut, whole, strict=True))


@given(st.lists(st.integers(0, 3000), max_size=6), st.lists(st.integers(0, 3000), max_size=3))
def test_a_restored_framing_goes_on(before: list[int], after: list[int]) -> None:
    first, start = Framing(1280, 200), 0
    for size in before:
        first.push(SAMPLES[start : start + size])
        start += size
        if first.due:
            first.take()
    numbers, pending = first.saved()
    second = Framing(1280, 200).restore(numbers, pending)
    for size in after:
        for framing in (first, second):
            framing.push(SAMPLES[start : start + size])
        start += size
    while first.due:
        assert second.due
        assert np.array_equal(first.take(), second.take())
    assert not second.due
    assert (first.received, first.taken) == (second.received, second.taken)


def test_room_and_drop() -> None:
    framing = Framing(1280, 200)
    framing.push(SAMPLES[:3000])
    assert framing.room(3) == 840
    assert framing.room(2) == 0
    framing.take()
    assert framing.drop() == 2800
    assert not framing.due
    assert framing.received == 200
