"""A conversation by microphone and speaker, from the first block to the last sample of the answer.

Five tasks under one nursery:

* one **hears**: fifty times a second it takes what the microphone gave, makes zeros of it while it is muted, and never
  waits for the network, so that what is muted is what was said while the speaker sounded;
* one **sends** what was heard, and waits where the server does; then 10 s are kept, and what comes after is counted;
* one **listens** to events and puts their audio to the speaker;
* one **watches** for devices that have gone, and one gives up, some time after the end, what does not end.

Knows neither sockets nor PortAudio.
"""

import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import trio

from voicechat_client.capture import Capture
from voicechat_client.devices import DeviceError, Microphone, Speaker
from voicechat_client.playout import MOST_SECONDS, RESERVE_SECONDS, Playout
from voicechat_core import wire
from voicechat_core.errors import VoiceChatError

__all__ = ["DRAIN_SECONDS", "Conversation", "TalkReport", "talk"]

BLOCK_SECONDS: Final = 0.02
KEPT_BLOCKS: Final = 500  # 10 s that wait for the server
DRAIN_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 0.5
GONE_LOOKS: Final = 6  # in a row without a callback: a device that is there calls many times a second
ZERO_SECONDS: Final = 2.0
BELIEVED_SECONDS: Final = 2.0  # an error of sending, if the events have not said by then that they end
HANG_OVER_SECONDS: Final = 0.25  # a room is not silent as soon as the speaker is

HEADPHONES: Final = (
    "use headphones: what the speaker says reaches the microphone, and the assistant hears itself "
    "(or mute the microphone meanwhile: --half-duplex)"
)
ONLY_ZEROS: Final = (
    "the microphone has given nothing but zeros for 2 s: it is muted, or the system does not permit its use "
    "(macOS: System Settings, Privacy & Security, Microphone, for this terminal)"
)

Samples16 = npt.NDArray[np.int16]


class Conversation(Protocol):
    """What is needed of an open session."""

    async def append(self, samples: Samples16) -> None:
        """Send samples ``[S]`` of 16 kHz; waits while the server does not read."""

    async def commit(self) -> None:
        """Nothing more will be said."""

    def __aiter__(self) -> AsyncIterator[wire.ServerEvent]:
        """Events until the session has ended."""


@dataclass
class TalkReport:
    """What a talk was like; kept up to date while it lasts.

    Attributes:
        heard_seconds: by the microphone's clock.
        sent_seconds: taken by the server; behind what was heard while the server does not read.
        muted_seconds: sent as zeros, because the speaker sounded.
        unheard_seconds: lost on the way from the microphone: the process, or the server, stood still.
        overflows: times that the microphone's driver lost samples.
        answer_seconds: audio that the server gave.
        waiting_seconds: audio that waits for the speaker now.
        gaps: times that the speaker had nothing to play.
        gap_seconds: in all.
        skipped_seconds: silence of the answer that was left out to catch up.
        dropped_seconds: audio of the answer that came too late to be played at all.
        underflows: times that the speaker's driver ran out.
        drift_ppm: how much slower the speaker's clock is than the microphone's, made up for by stretching.
        microphone_level: peak of the last block, 1.0 is full scale.
        muted: whether the microphone is muted now.
        drained: whether the answer came to its end and was played.
        hints: what a person was told.
    """

    heard_seconds: float = 0.0
    sent_seconds: float = 0.0
    muted_seconds: float = 0.0
    unheard_seconds: float = 0.0
    overflows: int = 0
    answer_seconds: float = 0.0
    waiting_seconds: float = 0.0
    gaps: int = 0
    gap_seconds: float = 0.0
    skipped_seconds: float = 0.0
    dropped_seconds: float = 0.0
    underflows: int = 0
    drift_ppm: float = 0.0
    microphone_level: float = 0.0
    muted: bool = False
    drained: bool = False
    hints: list[str] = field(default_factory=list)


async def talk(
    conversation: Conversation,
    microphone: Microphone,
    speaker: Speaker,
    *,
    half_duplex: bool = False,
    stop: trio.Event | None = None,
    on_event: Callable[[wire.ServerEvent], None] | None = None,
    on_hint: Callable[[str], None] | None = None,
    report: TalkReport | None = None,
    drain_seconds: float = DRAIN_SECONDS,
    reserve_seconds: float = RESERVE_SECONDS,
    most_seconds: float = MOST_SECONDS,
) -> TalkReport:
    """Talk until ``stop`` is set or the session ends; then the input is committed and the answer played to its end.

    Args:
        conversation: a session that is ready to hear.
        microphone: not started yet; stopped when this returns, as the speaker is.
        speaker: the same.
        half_duplex: mute the microphone while the speaker sounds.
        stop: set it to end the talk; without it only the session's end or a cancellation does.
        on_event: called with every event, before its audio is played.
        on_hint: called once with each thing that the person should know.
        report: filled in while the talk lasts, so that it can be shown, and read after an error.
        drain_seconds: after ``stop``, how long the rest may take before it is given up.
        reserve_seconds: how late audio may come without a gap; as much is added to the delay.
        most_seconds: how much audio may wait for the speaker before some is dropped.

    Raises:
        DeviceError: a device cannot be started, or has gone.
        VoiceChatError: whatever the conversation raises, as itself and never in a group.
    """
    call = _Talk(
        conversation, microphone, speaker, half_duplex,
        trio.Event() if stop is None else stop,
        TalkReport() if report is None else report,
        on_event or (lambda event: None), on_hint or (lambda hint: None),
        Capture(microphone.rate, microphone.channels),
        Playout(speaker.rate, reserve_seconds=reserve_seconds, most_seconds=most_seconds),
    )  # fmt: skip
    try:
        await call.run(drain_seconds)
    except BaseExceptionGroup as group:
        raise _the_one(group) from None
    return call.report


def _the_one(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a caller is to see of errors that came together: an interrupt, else the first that is no cancellation."""
    leaves = list(_leaves(group))
    errors = [error for error in leaves if not isinstance(error, trio.Cancelled)]
    return next((error for error in errors if not isinstance(error, Exception)), (errors or leaves)[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> "list[BaseException]":
    parts = (_leaves(part) if isinstance(part, BaseExceptionGroup) else [part] for part in group.exceptions)
    return [leaf for part in parts for leaf in part]


@dataclass
class _Talk:
    conversation: Conversation
    microphone: Microphone
    speaker: Speaker
    half_duplex: bool
    stop: trio.Event
    report: TalkReport
    on_event: Callable[[wire.ServerEvent], None]
    on_hint: Callable[[str], None]
    capture: Capture
    playout: Playout
    saying: trio.CancelScope = field(default_factory=trio.CancelScope)  # over once the session has ended
    last_sound: float = -math.inf  # by Trio's clock
    unsent: int = 0  # samples that found no room on their way to the server

    async def run(self, drain_seconds: float) -> None:
        if not self.half_duplex:
            self._hint(HEADPHONES)
        try:
            async with trio.open_nursery() as nursery:
                # The microphone first: a headset may change the speaker's ways when its microphone opens.
                self.microphone.start(self.capture.take)
                self.speaker.start(self.playout.fill)
                nursery.start_soon(self._say)
                nursery.start_soon(self._watch)
                nursery.start_soon(self._end, nursery.cancel_scope, drain_seconds)
                await self._listen()
                nursery.cancel_scope.cancel()
        finally:
            self.microphone.stop()
            self.speaker.stop()
            self._account()

    async def _say(self) -> None:
        into, heard = trio.open_memory_channel[Samples16](KEPT_BLOCKS)
        with self.saying:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hear, into)
                nursery.start_soon(self._send, heard)

    async def _hear(self, heard: "trio.MemorySendChannel[Samples16]") -> None:
        with heard:
            while not self.stop.is_set():
                self._pass_on(heard, self.capture.read())
                self._account()
                if self.capture.zero_seconds >= ZERO_SECONDS:
                    self._hint(ONLY_ZEROS)
                with trio.move_on_after(BLOCK_SECONDS):
                    await self.stop.wait()
            self.microphone.stop()
            self._pass_on(heard, self.capture.finish())

    def _pass_on(self, heard: "trio.MemorySendChannel[Samples16]", samples: Samples16) -> None:
        self.report.muted = self._is_muted()
        if not len(samples):
            return
        if self.report.muted:
            samples = np.zeros_like(samples)
            self.report.muted_seconds += len(samples) / wire.INPUT_RATE
        try:
            heard.send_nowait(samples)
        except trio.WouldBlock:
            self.unsent += len(samples)

    def _is_muted(self) -> bool:
        if self.playout.sounding:
            self.last_sound = trio.current_time()
        # What was taken from us sounds later, and what sounded then is heard later still.
        after = HANG_OVER_SECONDS + self.speaker.latency + self.microphone.latency
        return self.half_duplex and trio.current_time() < self.last_sound + after

    async def _send(self, heard: "trio.MemoryReceiveChannel[Samples16]") -> None:
        try:
            async for samples in heard:
                await self.conversation.append(samples)
                self.report.sent_seconds += len(samples) / wire.INPUT_RATE
            await self.conversation.commit()
        except VoiceChatError:
            # Why it ended, well or not, is said by the events, behind all that had arrived before.
            await trio.sleep(BELIEVED_SECONDS)
            raise

    async def _listen(self) -> None:
        async for event in self.conversation:
            self.on_event(event)
            if isinstance(event, wire.ResponseAudioDelta):
                self.playout.put(wire.samples_of(event.delta))
        self.saying.cancel()
        self.playout.finish()
        while not self.playout.idle:
            await trio.sleep(BLOCK_SECONDS)
        await trio.sleep(self.speaker.latency)
        self.report.drained = True

    async def _end(self, scope: trio.CancelScope, drain_seconds: float) -> None:
        await self.stop.wait()
        scope.deadline = trio.current_time() + drain_seconds

    async def _watch(self) -> None:
        """Raise when a device has gone. Looks are counted, not seconds: a machine that slept has lost no device."""
        looks, before = [0, 0], [-1, -1]
        while True:
            now = [self.capture.taken, self.playout.asked]
            looks = [0 if new != old else count + 1 for new, old, count in zip(now, before, looks, strict=True)]
            before = now
            if looks[0] >= GONE_LOOKS and not self.stop.is_set():
                raise _gone("microphone", self.microphone.name)
            if looks[1] >= GONE_LOOKS:
                raise _gone("speaker", self.speaker.name)
            await trio.sleep(LOOK_SECONDS)

    def _hint(self, hint: str) -> None:
        if hint not in self.report.hints:
            self.report.hints.append(hint)
            self.on_hint(hint)

    def _account(self) -> None:
        report, capture, playout = self.report, self.capture, self.playout
        report.heard_seconds = capture.heard_seconds
        report.unheard_seconds = capture.dropped_seconds + self.unsent / wire.INPUT_RATE
        report.overflows = capture.overflows
        report.microphone_level = capture.level
        report.answer_seconds = playout.played_seconds
        report.waiting_seconds = playout.waiting_seconds
        report.gaps = playout.gaps
        report.gap_seconds = playout.gap_seconds
        report.skipped_seconds = playout.skipped_seconds
        report.dropped_seconds = playout.dropped_seconds
        report.underflows = playout.underflows
        report.drift_ppm = playout.drift_ppm


def _gone(what: str, name: str) -> DeviceError:
    return DeviceError(
        f"the {what} {name!r} has not been heard of for {GONE_LOOKS * LOOK_SECONDS:g} s: was it unplugged?"
    )
