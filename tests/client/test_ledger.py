"""What a server may say by what it was sent, and when it owes something."""

from collections.abc import Callable

import pytest

from tests.client.events import assistant, error, frame, lag
from voicechat_client import ServerFaultError
from voicechat_client.ledger import Ledger
from voicechat_core import wire

PONG = wire.SessionPong(event_id="e")


def sent(ledger: Ledger, samples: int) -> None:
    with ledger.sending(samples):
        pass


def fails(ledger: Ledger, samples: int = 0, *, ends: bool = False) -> None:
    with pytest.raises(KeyError), ledger.sending(samples, ends=ends):
        raise KeyError


@pytest.mark.parametrize(("samples", "most"), [(0, 1), (1279, 1), (1280, 2), (1281, 2), (12800, 11)])
def test_no_more_frames_than_the_input_has_and_one_that_has_begun(samples: int, most: int) -> None:
    ledger = Ledger()
    sent(ledger, samples)
    for index in range(most):
        ledger.heard(frame(index))
    words = (
        f"the server gave {most + 1} frames and skipped 0; the {samples} samples that it was sent are {most} at most"
    )
    for _ in range(2):
        with pytest.raises(ServerFaultError, match=words):
            ledger.heard(frame(most))
    sent(ledger, 1280)
    ledger.heard(frame(most))


def test_what_was_skipped_is_answered_by_nothing() -> None:
    ledger = Ledger()
    sent(ledger, 5 * 1280)
    ledger.heard(frame(0))
    ledger.heard(lag(80, skipped=4))
    ledger.heard(lag(80, skipped=4))
    ledger.heard(frame(1))
    with pytest.raises(ServerFaultError, match=r"3 frames and skipped 4; the 6400 samples .* 6 at most"):
        ledger.heard(frame(2))
    with pytest.raises(ServerFaultError, match=f"2 frames and skipped {10**12};"):
        ledger.heard(lag(80, skipped=10**12))


def test_an_answer_may_be_faster_than_the_return_of_the_call() -> None:
    ledger = Ledger()
    with ledger.sending(1280):
        ledger.heard(frame(0))
        ledger.heard(frame(1))


def test_what_was_not_sent_does_not_count() -> None:
    ledger = Ledger()
    fails(ledger, 1280 * 10)
    ledger.heard(frame(0))
    with pytest.raises(ServerFaultError):
        ledger.heard(frame(1))


def test_what_is_owed() -> None:
    ledger = Ledger()
    assert not ledger.owed
    sent(ledger, 1279)
    assert not ledger.owed  # no frame yet
    sent(ledger, 1)
    assert ledger.owed
    ledger.heard(PONG)
    assert ledger.owed
    ledger.heard(frame(0))
    assert not ledger.owed
    sent(ledger, 1279)
    assert not ledger.owed
    sent(ledger, 1)
    assert ledger.owed
    ledger.heard(assistant(1, "a", "a"))
    assert not ledger.owed  # whatever it says shows that it goes on


def test_a_message_that_is_not_taken_is_owed() -> None:
    ledger = Ledger()
    with ledger.sending():
        assert ledger.owed
    assert not ledger.owed


@pytest.mark.parametrize(("how", "owed"), [(sent, False), (fails, False)])
def test_an_end_that_was_asked_for_is_owed_until_it_comes(how: Callable[..., None], owed: bool) -> None:
    ledger = Ledger()
    how(ledger, 10)
    assert ledger.owed is owed
    fails(ledger, ends=True)
    assert not ledger.owed
    with ledger.sending(ends=True):
        pass
    ledger.heard(frame(0))
    sent(ledger, 0)
    assert ledger.owed


def test_no_more_errors_than_messages_and_one_for_the_end() -> None:
    ledger = Ledger()
    sent(ledger, 0)
    sent(ledger, 1280)
    for _ in range(3):
        ledger.heard(error("a", "b"))
    words = "the server sent 4 errors; the 2 messages that it was sent can have 3 at most"
    with pytest.raises(ServerFaultError, match=words):
        ledger.heard(error("a", "b"))


def test_words_are_counted() -> None:
    ledger = Ledger()
    for event in (frame(0), PONG, assistant(0, "a", "a"), lag(0)):
        ledger.heard(event)
    assert ledger.words == 3
