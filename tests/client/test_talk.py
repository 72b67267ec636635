"""A talk with fake devices on a clock that does not wait: what is sent, what is played, how it ends."""

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from tests.client.fake_conversation import OUT, FakeConversation, Int16, LostInTestError, hum
from tests.client.fake_devices import FakeMicrophone, FakeSpeaker
from voicechat_client.devices import DeviceError
from voicechat_client.ring import Samples
from voicechat_client.talk import HEADPHONES, ONLY_ZEROS, TalkReport, talk
from voicechat_core import wire

pytestmark = pytest.mark.trio


def voice(at: Samples) -> Samples:
    """A sine of 500 Hz at 48 kHz: never silent for a block."""
    return 0.5 * np.sin(2 * np.pi * 500 * at / 48000)


def alternating(number: int) -> Int16:
    """Two seconds of sound, two of silence."""
    return np.full(OUT, 3000 if number // 25 % 2 == 0 else 0, np.int16)


async def stop_after(seconds: float, stop: trio.Event) -> None:
    await trio.sleep(seconds)
    stop.set()


async def test_what_is_said_is_sent_committed_and_answered_to_the_last_sample(autojump_clock: MockClock) -> None:
    conversation, events, report = FakeConversation(hum), [], TalkReport()
    async with trio.open_nursery() as nursery:
        microphone, speaker, stop = FakeMicrophone(nursery, sound=voice), FakeSpeaker(nursery), trio.Event()
        nursery.start_soon(stop_after, 10, stop)
        returned = await talk(conversation, microphone, speaker, stop=stop, on_event=events.append, report=report)
    assert returned is report
    assert (conversation.commits, microphone.starts, speaker.starts) == (1, 1, 1)
    assert min(microphone.stops, speaker.stops) >= 1
    sent = conversation.input() / 32768
    assert len(sent) == pytest.approx(160_000, abs=321)
    angles = 2 * np.pi * 500 * (np.arange(len(sent)) / 16000)
    np.testing.assert_allclose(sent[2000:-500], 0.5 * np.sin(angles)[2000:-500], atol=0.17)  # 0.1 ms, soxr's own
    assert report.drained
    assert report.sent_seconds == pytest.approx(len(sent) / 16000)
    assert report.heard_seconds == pytest.approx(10, abs=0.021)
    assert report.microphone_level == pytest.approx(0.5, abs=1e-3)
    assert report.answer_seconds == pytest.approx(125 * 0.08)
    assert (report.gaps, report.dropped_seconds, report.unheard_seconds, report.muted_seconds) == (0, 0, 0, 0)
    loud = np.abs(speaker.sound()) > 0.08
    assert loud.sum() / 48000 == pytest.approx(10, abs=0.021)  # a block of the device's, as above
    assert [type(event) for event in events] == [wire.ResponseAudioDelta] * 125 + [wire.ResponseDone]


@pytest.mark.parametrize("news_after", [0, 1.5])
async def test_the_session_may_end_by_itself(autojump_clock: MockClock, news_after: float) -> None:
    """What cannot be sent any more, before the news of the end has come, is no error."""
    conversation = FakeConversation(hum, ends_after=50, news_after=news_after)
    async with trio.open_nursery() as nursery:
        microphone, speaker = FakeMicrophone(nursery), FakeSpeaker(nursery)
        report = await talk(conversation, microphone, speaker)
    assert report.drained
    assert conversation.commits == 0
    assert (np.abs(speaker.sound()) > 0.08).sum() / 48000 == pytest.approx(4, abs=0.02)
    assert trio.current_time() < 4.6 + news_after


async def test_after_the_sessions_end_all_that_waits_is_played(autojump_clock: MockClock) -> None:
    """2.5 s of it, longer than an error of sending would be kept back."""
    conversation = FakeConversation(
        lambda number: np.full(OUT * (31 if number == 49 else 1), 3000, np.int16), ends_after=50
    )
    async with trio.open_nursery() as nursery:
        report = await talk(conversation, FakeMicrophone(nursery), speaker := FakeSpeaker(nursery))
    assert report.drained
    assert (np.abs(speaker.sound()) > 0.08).sum() / 48000 == pytest.approx(80 * 0.08, abs=0.02)
    assert report.sent_seconds == pytest.approx(4, abs=0.03)


async def test_what_does_not_end_is_given_up(autojump_clock: MockClock) -> None:
    conversation = FakeConversation(hum, done_after=1000)
    async with trio.open_nursery() as nursery:
        microphone, speaker, stop = FakeMicrophone(nursery), FakeSpeaker(nursery), trio.Event()
        nursery.start_soon(stop_after, 2, stop)
        report = await talk(conversation, microphone, speaker, stop=stop, drain_seconds=3)
    assert not report.drained
    assert conversation.commits == 1
    assert trio.current_time() == pytest.approx(5, abs=0.05)
    assert (microphone.stopped_at, speaker.stopped_at) == pytest.approx((2, 5), abs=0.05)


async def test_a_server_that_does_not_read_holds_nothing_up_but_the_sending(autojump_clock: MockClock) -> None:
    """It stands still for 4 s: all is sent afterwards. For 20 s: 10 s are kept, the rest is counted."""
    for stall, lost in ((4, 0), (20, 10)):
        async with trio.open_nursery() as nursery:
            began = trio.current_time()
            waits = iter([0.0] * 50 + [float(stall)])
            conversation = FakeConversation(blocked=lambda waits=waits: next(waits, 0.0))
            microphone, speaker, stop = FakeMicrophone(nursery, sound=voice), FakeSpeaker(nursery), trio.Event()
            nursery.start_soon(stop_after, 30, stop)
            report = await talk(conversation, microphone, speaker, stop=stop)
        assert report.unheard_seconds == pytest.approx(lost, abs=0.1)
        assert report.sent_seconds == pytest.approx(30 - lost, abs=0.1)
        assert report.heard_seconds == pytest.approx(30, abs=0.05)
        assert trio.current_time() - began < 31


async def test_half_duplex_mutes_while_the_speaker_sounds_and_a_little_longer(autojump_clock: MockClock) -> None:
    conversation = FakeConversation(alternating)
    async with trio.open_nursery() as nursery:
        microphone, speaker, stop = FakeMicrophone(nursery, sound=voice), FakeSpeaker(nursery), trio.Event()
        nursery.start_soon(stop_after, 12, stop)
        report = await talk(conversation, microphone, speaker, stop=stop, half_duplex=True)
    sent = np.abs(conversation.input().reshape(-1, 320)).max(axis=1) > 0  # for each 20 ms
    played = np.array([np.abs(block).max() > 0.05 for _, block in speaker.played])
    assert len(sent) == pytest.approx(600, abs=2)  # the clock goes on
    muted_from = np.flatnonzero(sent[:-1] & ~sent[1:]) * 0.02
    muted_until = np.flatnonzero(~sent[:-1] & sent[1:]) * 0.02
    sounds_from = np.flatnonzero(~played[:-1] & played[1:]) * 0.02
    sounds_until = np.flatnonzero(played[:-1] & ~played[1:]) * 0.02
    assert len(muted_from) == len(sounds_from) == 3
    # The first block of zeros is the one that was heard while the speaker began; a block as coarse as these.
    assert muted_from == pytest.approx(sounds_from, abs=0.05)
    assert muted_until == pytest.approx(sounds_until + 0.22, abs=0.06)  # 250 ms and two latencies, less the blocks
    assert report.muted_seconds == pytest.approx((~sent).sum() * 0.02, abs=0.06)
    assert report.hints == []


async def test_muted_is_what_was_heard_then_not_what_is_sent_then(autojump_clock: MockClock) -> None:
    """The server stands still for a second from the middle of the sound: the echo of that second stays muted."""
    waits = iter([0.0] * 120 + [1.0])
    conversation = FakeConversation(alternating, blocked=lambda: next(waits, 0.0))
    usual = FakeConversation(alternating)
    muted = []
    for session in (usual, conversation):
        async with trio.open_nursery() as nursery:
            microphone, speaker, stop = FakeMicrophone(nursery, sound=voice), FakeSpeaker(nursery), trio.Event()
            nursery.start_soon(stop_after, 3.5, stop)
            await talk(session, microphone, speaker, stop=stop, half_duplex=True)
        muted.append(np.abs(session.input().reshape(-1, 320)).max(axis=1) == 0)
    assert (muted[0][:130] != muted[1][:130]).sum() <= 4  # blocks at the edges
    assert muted[1][10:115].all()
    assert not muted[1][150:165].any()  # the speaker had run dry


async def test_full_duplex_sends_all_and_recommends_headphones(autojump_clock: MockClock) -> None:
    conversation, hints = FakeConversation(hum), []
    async with trio.open_nursery() as nursery:
        microphone, speaker, stop = FakeMicrophone(nursery, sound=voice), FakeSpeaker(nursery), trio.Event()
        nursery.start_soon(stop_after, 5, stop)
        report = await talk(conversation, microphone, speaker, stop=stop, on_hint=hints.append)
    assert hints == report.hints == [HEADPHONES]
    assert (np.abs(conversation.input().reshape(-1, 320)).max(axis=1) > 0).all()


@pytest.mark.parametrize(("seconds", "hints"), [(1.8, []), (5, [ONLY_ZEROS])])
async def test_a_microphone_of_zeros_is_told_once(autojump_clock: MockClock, seconds: float, hints: list[str]) -> None:
    conversation = FakeConversation()
    async with trio.open_nursery() as nursery:
        microphone = FakeMicrophone(nursery, sound=np.zeros_like)
        speaker, stop = FakeSpeaker(nursery), trio.Event()
        nursery.start_soon(stop_after, seconds, stop)
        report = await talk(conversation, microphone, speaker, stop=stop, half_duplex=True)
    assert report.hints == hints


@pytest.mark.parametrize("which", ["microphone", "speaker"])
async def test_a_device_that_goes_is_named(autojump_clock: MockClock, which: str) -> None:
    report = TalkReport()
    async with trio.open_nursery() as nursery:
        microphone = FakeMicrophone(nursery, name="the left one", gone_after=4 if which == "microphone" else 1e9)
        speaker = FakeSpeaker(nursery, name="the left one", gone_after=4 if which == "speaker" else 1e9)
        with pytest.raises(DeviceError, match=f"the {which} 'the left one' has not been heard of for 3 s"):
            await talk(FakeConversation(hum), microphone, speaker, report=report)
        assert min(microphone.stops, speaker.stops) >= 1
    assert trio.current_time() == pytest.approx(7.2, abs=0.4)  # it looks twice a second
    assert report.heard_seconds == pytest.approx(4 if which == "microphone" else trio.current_time(), abs=0.1)
    assert not report.drained


@pytest.mark.parametrize("which", ["microphone", "speaker"])
async def test_a_device_that_does_not_start_leaves_nothing_running(autojump_clock: MockClock, which: str) -> None:
    async with trio.open_nursery() as nursery:
        microphone = FakeMicrophone(nursery, refuses=which == "microphone")
        speaker = FakeSpeaker(nursery, refuses=which == "speaker")
        with pytest.raises(DeviceError, match="fake cannot be started"):
            await talk(FakeConversation(), microphone, speaker)
        assert min(microphone.stops, speaker.stops) >= 1


@pytest.mark.parametrize(("news_after", "message"), [(0, "lost"), (1, "lost"), (1000, "cannot be sent")])
async def test_a_lost_connection_comes_out_as_itself_and_the_report_stays(
    autojump_clock: MockClock, news_after: float, message: str
) -> None:
    """The events say it, behind what had arrived; the sending only if they do not."""
    conversation, report = FakeConversation(hum, fails_after=30, news_after=news_after), TalkReport()
    async with trio.open_nursery() as nursery:
        microphone, speaker = FakeMicrophone(nursery), FakeSpeaker(nursery)
        with pytest.raises(LostInTestError, match=f"^{message}$"):
            await talk(conversation, microphone, speaker, report=report)
        assert min(microphone.stops, speaker.stops) >= 1
    assert report.answer_seconds == pytest.approx(2.4)
    assert report.sent_seconds == pytest.approx(2.4, abs=0.1)
    assert trio.current_time() == pytest.approx(2.4 + min(news_after, 2), abs=0.1)
    assert not report.drained


async def test_a_cancelled_talk_stops_its_devices(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        microphone, speaker = FakeMicrophone(nursery), FakeSpeaker(nursery)
        with trio.move_on_after(2) as scope:
            await talk(FakeConversation(hum), microphone, speaker)
        assert min(microphone.stops, speaker.stops) >= 1
    assert scope.cancelled_caught


async def test_flags_of_the_drivers_are_counted(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        microphone, speaker = FakeMicrophone(nursery, flag=True), FakeSpeaker(nursery, flag=True)
        report = await talk(FakeConversation(ends_after=25), microphone, speaker)
    assert report.overflows >= 100
    assert report.underflows >= 100


async def test_two_clocks(autojump_clock: MockClock) -> None:
    """240 ms between them in two minutes, at two rates: the last frame is heard as soon as ever.

    Ten minutes, and what the delay does meanwhile, are in test_drift.
    """
    conversation = FakeConversation(hum)
    async with trio.open_nursery() as nursery:
        microphone = FakeMicrophone(nursery, rate=44100, channels=1, block=1764, ppm=1000)
        speaker, stop = FakeSpeaker(nursery, channels=2, block=1920, ppm=-1000), trio.Event()
        nursery.start_soon(stop_after, 120, stop)
        report = await talk(conversation, microphone, speaker, stop=stop, half_duplex=True)
    assert report.drained
    assert trio.current_time() < 120.35
    assert (report.gaps, report.dropped_seconds, report.skipped_seconds, report.unheard_seconds) == (0, 0, 0, 0)
    assert report.drift_ppm == pytest.approx(2000, abs=400)
    assert len(conversation.input()) == pytest.approx(120 * 16000 * 1.001, abs=1300)
