"""What the two sides of a session share: counts, and who has to be told what."""

import numpy as np

from voicechat_server.mailbox import Mailbox


def pcm(count: int, start: int = 0) -> bytes:
    return np.arange(start, start + count).astype(np.int16).tobytes()


def test_what_is_put_comes_out_once_and_in_order() -> None:
    mailbox = Mailbox(100, 4)
    for start in range(0, 30, 3):
        mailbox.put(pcm(3, start))
    taken = [mailbox.take(20), mailbox.take(20), mailbox.take_rest(), mailbox.take_rest()]
    assert taken == [pcm(20), None, pcm(10, 20), b""]


def test_samples_of_a_running_frame_count_until_it_has_run() -> None:
    mailbox = Mailbox(100, 4)
    mailbox.put(pcm(30))
    mailbox.take(20)
    assert mailbox.queued == 30
    mailbox.stepped(3)
    assert (mailbox.queued, mailbox.waiting) == (10, 3)


def test_a_sleeper_is_woken_once_and_for_its_own_reason() -> None:
    mailbox = Mailbox(100, 1)
    assert not mailbox.put(pcm(5))  # nobody sleeps
    mailbox.take(20)
    assert [mailbox.took(0), mailbox.put(b""), mailbox.put(pcm(1)), mailbox.put(pcm(1))] == [False, False, True, False]
    mailbox.stepped(3)
    assert not mailbox.may_step()
    assert [mailbox.put(pcm(1)), mailbox.took(1), mailbox.took(1), mailbox.took(1)] == [False, False, True, False]
    assert mailbox.may_step()


def test_the_bound_of_results_may_be_reached_not_passed() -> None:
    mailbox = Mailbox(100, 2)
    mailbox.stepped(2)
    assert mailbox.may_step()
    mailbox.stepped(1)
    assert not mailbox.may_step()


def test_room_is_told_once_and_only_to_who_asked() -> None:
    mailbox = Mailbox(10, 4)
    mailbox.put(pcm(15))
    mailbox.take(2)
    assert not mailbox.stepped(0)  # nobody asked
    assert mailbox.full()
    mailbox.take(3)
    assert not mailbox.stepped(0)  # 10 are still queued
    mailbox.take(1)
    assert [mailbox.stepped(0), mailbox.stepped(0), mailbox.full()] == [True, False, False]


def test_whole_frames_beyond_the_bound_are_skipped() -> None:
    mailbox = Mailbox(100, 4)
    mailbox.put(pcm(39))
    assert [mailbox.skip(10, 10), mailbox.skip(10, 10)] == [2, 0]
    assert mailbox.take_rest() == pcm(19, 20)


def test_a_shut_mailbox_takes_and_holds_nothing() -> None:
    mailbox = Mailbox(10, 4)
    mailbox.put(pcm(15))
    assert mailbox.full()
    mailbox.shut()
    assert mailbox.is_shut
    assert [mailbox.put(pcm(5)), mailbox.queued, mailbox.full(), mailbox.take(1)] == [False, 0, False, None]
