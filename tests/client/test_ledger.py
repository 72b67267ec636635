"""What a server may say by what it was sent, and when it owes something."""

from collections.abc import Callable

import pytest

from tests.client.events import assistant, call, done, error, frame, function, lag, no_call, user
from voicechat_client import ServerFaultError
from voicechat_client.ledger import Ledger
from voicechat_core import wire

PONG = wire.SessionPong(event_id="e")


COMMIT = wire.InputAudioBufferCommit()


def audio(samples: int) -> wire.ClientEvent:
    return wire.InputAudioBufferAppend(audio=bytes(2 * samples))


def sends(ledger: Ledger, event: wire.ClientEvent) -> None:
    with ledger.sending(event):
        pass


def sent(ledger: Ledger, samples: int) -> None:
    sends(ledger, audio(samples))


def fails(ledger: Ledger, event: wire.ClientEvent) -> None:
    with pytest.raises(KeyError), ledger.sending(event):
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
    with ledger.sending(audio(1280)):
        ledger.heard(frame(0))
        ledger.heard(frame(1))


def test_what_was_not_sent_does_not_count() -> None:
    ledger = Ledger()
    fails(ledger, audio(1280 * 10))
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
    sends(ledger, wire.SessionPing())
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
    with ledger.sending(wire.SessionUpdate()):
        assert ledger.owed
    assert not ledger.owed


@pytest.mark.parametrize("how", [sends, fails])
@pytest.mark.parametrize("end", [COMMIT, wire.SessionCancel(), wire.ResponseCancel()])
def test_an_end_that_was_asked_for_is_owed_until_it_comes(how: Callable[..., None], end: wire.ClientEvent) -> None:
    ledger = Ledger()
    how(ledger, audio(10))
    assert not ledger.owed
    fails(ledger, end)
    assert not ledger.owed
    sends(ledger, end)
    ledger.heard(frame(0))
    sent(ledger, 0)
    assert ledger.owed


def test_a_pong_is_owed_to_a_ping_that_was_sent() -> None:
    ledger = Ledger()
    fails(ledger, wire.SessionPing())
    assert not ledger.owes_a_pong
    for _ in range(2):
        sends(ledger, wire.SessionPing())
    ledger.heard(PONG)
    assert ledger.owes_a_pong
    assert not ledger.owed  # of the session nothing is
    ledger.heard(PONG)
    assert not ledger.owes_a_pong


CREATED = wire.SessionCreated(event_id="e", session=wire.CreatedSession(id="s"))
UPDATED = wire.SessionUpdated(event_id="e", session=wire.UpdatedSession(id="s", model="m"))
COMMITTED = wire.InputAudioBufferCommitted(event_id="e")


@pytest.mark.parametrize(
    ("event", "asked", "most"),
    [
        (CREATED, [wire.SessionUpdate()], 0),
        (UPDATED, [], 0),
        (UPDATED, [wire.SessionUpdate(), COMMIT, audio(12800)], 1),
        (COMMITTED, [wire.SessionUpdate(), wire.SessionPing()], 0),
        (COMMITTED, [COMMIT, COMMIT], 2),
        (PONG, [wire.SessionPing(), wire.SessionUpdate()], 1),
        (error("a", "b"), [audio(0), audio(1280)], 3),  # and one for the end
        (done(0), [], 1),
        (user(0, "", ""), [audio(1280 * 3)], 5),  # and what the last token left unfinished
        (assistant(0, "", ""), [audio(1280 * 3)], 5),
        (function(0, "", ""), [audio(1280 * 3)], 5),
    ],
)
def test_no_more_than_can_be(event: wire.ServerEvent, asked: list[wire.ClientEvent], most: int) -> None:
    ledger = Ledger()
    for each in asked:
        fails(ledger, each)
        sends(ledger, each)
    for _ in range(most):
        ledger.heard(event)
    for _ in range(2):
        with pytest.raises(ServerFaultError, match=f"^the server sent {most + 1} of .*, can have {most} at most$"):
            ledger.heard(event)


def test_the_bound_is_told_with_what_was_sent() -> None:
    ledger = Ledger()
    sends(ledger, wire.SessionUpdate())
    sent(ledger, 1000)
    words = "2 of session.updated; the 2 messages and 1000 samples that it was sent, in 7 s, can have 1 at most"
    ledger.heard(UPDATED)
    with pytest.raises(ServerFaultError, match=words):
        ledger.heard(UPDATED, seconds=7.3)


def test_each_text_has_a_bound_of_its_own() -> None:
    ledger = Ledger()
    for event in (user(0, "a", "a"), assistant(0, "a", "a"), function(0, "a", "a")) * 2:
        ledger.heard(event)


def test_lag_is_told_once_a_second_or_with_a_frame() -> None:
    """One that comes late comes beside the next."""
    ledger = Ledger()
    sent(ledger, 1280 * 2)
    for _ in range(9):
        ledger.heard(lag(80), seconds=5.9)
    with pytest.raises(ServerFaultError, match=r"10 of session.lag; .* in 6 s, can have 9 at most"):
        ledger.heard(lag(80), seconds=5.9)
    ledger.heard(lag(80), seconds=6.0)


@pytest.mark.parametrize("kind", [user, assistant, function])
def test_so_many_characters_of_text_a_frame(kind: Callable[..., wire.ServerEvent]) -> None:
    """Of the deltas together, and of the whole."""
    ledger = Ledger()
    sent(ledger, 1280)
    ledger.heard(kind(0, "a" * 1500, ""))
    with pytest.raises(
        ServerFaultError, match=r"said 2001 characters by .*; the 1280 samples .* can have 2000 at most"
    ):
        ledger.heard(kind(1, "a" * 501, ""))
    with pytest.raises(ServerFaultError, match="said 2001 characters"):
        ledger.heard(kind(1, "", "a" * 2001))
    ledger.heard(kind(1, "a" * 500, "a" * 2000))


def test_what_a_message_may_have_beside_its_texts() -> None:
    ledger = Ledger()
    sent(ledger, 1280)
    ledger.heard(error("a", "b"), characters=16384)
    with pytest.raises(ServerFaultError, match="error has 16385 characters; 16384 at most are needed"):
        ledger.heard(error("a", "b"), characters=16385)
    escaped = assistant(0, "\U0001f600" * 500, "\U0001f600" * 500)  # JSON may write each in twelve characters
    ledger.heard(escaped, characters=16384 + 12 * 1000)
    with pytest.raises(ServerFaultError, match="28385 characters; 28384 at most"):
        ledger.heard(assistant(0, "a" * 500, "a" * 500), characters=28385)


def test_a_frame_of_speech_fits_far_and_wide() -> None:
    assert 3 * len(wire.encode(frame(10**6))) < 16384 + 3000


def test_words_are_counted() -> None:
    ledger = Ledger()
    sends(ledger, wire.SessionPing())
    for event in (frame(0), PONG, assistant(0, "a", "a"), lag(0)):
        ledger.heard(event)
    assert ledger.words == 3


# ---- calls

CALLS = wire.SessionUpdate(session=wire.SessionOptions(function_calls=True))


@pytest.mark.parametrize("event", [call(0, "dice"), no_call(0, "{")])
def test_a_call_that_nobody_asked_for(event: wire.ServerEvent) -> None:
    ledger = Ledger()
    sends(ledger, wire.SessionUpdate())
    with pytest.raises(ServerFaultError, match=r"sent 1 of response\.function_call.* can have 0 at most"):
        ledger.heard(event)
    sends(ledger, CALLS)
    ledger.heard(event)


@pytest.mark.parametrize("event", [call(0, "dice"), no_call(0, "{")])
def test_no_more_calls_than_frames(event: wire.ServerEvent) -> None:
    ledger = Ledger()
    sends(ledger, CALLS)
    sent(ledger, 1280)
    ledger.heard(event)
    ledger.heard(event)
    with pytest.raises(ServerFaultError, match="can have 2 at most"):
        ledger.heard(event)


@pytest.mark.parametrize(
    "event",
    [call(0, "d" * 500, text="x" * 592), no_call(0, "{" * 1090), call(0, "d" * 1090), call(0, "", text="x" * 1092)],
)
def test_what_calls_say_is_bounded_by_the_frames(event: wire.ServerEvent) -> None:
    """1,100 characters each, where two frames may have 2,000 in all."""
    ledger = Ledger()
    sends(ledger, CALLS)
    sent(ledger, 1280)
    ledger.heard(event)
    with pytest.raises(
        ServerFaultError, match=r"said 2200 characters by response\.function_call.* can have 2000 at most"
    ):
        ledger.heard(event)
    sent(ledger, 1280)
    ledger.heard(event)


def test_a_long_call_is_no_long_message() -> None:
    ledger = Ledger()
    sends(ledger, CALLS)
    sent(ledger, 100 * 1280)
    event = call(0, "say", text="x" * 50000)
    ledger.heard(event, characters=len(wire.encode(event)))
    with pytest.raises(ServerFaultError, match="has 10000000 characters"):
        ledger.heard(event, characters=10**7)
