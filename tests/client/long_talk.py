"""A whole ``talk`` for many minutes of two clocks that disagree, with clicks that tell both delays from outside.

The microphone hears a click about once a second, and so does whoever listens to the speaker; between clicks there is
never a silence, so each zero that the speaker plays is a gap. Each frame of the answer begins with a lower click, so
that lost ones can be counted. Trio's clock must jump by itself.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import trio
from trio.testing import MockClock

from tests.client.fake_conversation import OUT, FakeConversation, Int16
from tests.client.fake_devices import Clocked, FakeMicrophone, FakeSpeaker
from voicechat_client.devices import Fill
from voicechat_client.ring import Samples
from voicechat_client.talk import TalkReport, talk
from voicechat_core import wire

RATE = 48000
CLICK_SAMPLES = 49_777  # between clicks at the microphone: no multiple of any block
CLICK_FRAMES = 13  # between high clicks of the answer
Stall = tuple[float, float]  # from and until, in seconds of the true time


def clicking(samples: Samples) -> Samples:
    """What the microphone hears, by the samples' indices."""
    return np.where(samples % CLICK_SAMPLES < 96, 0.9, 0.1)


def clicking_frame(number: int) -> Int16:
    """A frame of the answer."""
    samples = np.full(OUT, 3000, np.int16)
    samples[:40] = 30000 if number % CLICK_FRAMES == 0 else 12000
    return samples


def over(now: float, stalls: Sequence[Stall]) -> float:
    """How long a stall still lasts; 0 outside of one."""
    return max((until - now for begin, until in stalls if begin <= now < until), default=0)


class Edges:
    """Where a signal rises above a threshold, over the boundaries of blocks."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._above = False

    def of(self, block: Samples | Int16) -> list[int]:
        above = block > self._threshold
        rising = above & ~np.concatenate([[self._above], above[:-1]])
        self._above = bool(above[-1])
        return np.flatnonzero(rising).tolist()


@dataclass
class Line(FakeConversation):
    """``deaf``: when the server does not read. ``silent``: when nothing comes from it; then all at once.

    Attributes:
        clicks: when a click was sent.
        sent: samples.
        received: for each high click of the answer, when it came.
    """

    deaf: Sequence[Stall] = ()
    silent: Sequence[Stall] = ()
    clicks: list[float] = field(default_factory=list)
    sent: int = 0
    received: list[float] = field(default_factory=list)
    edges: Edges = field(default_factory=lambda: Edges(16000))

    async def append(self, samples: Int16) -> None:
        await trio.sleep(over(trio.current_time(), self.deaf))
        await super().append(samples)
        self.heard.clear()
        self.sent += len(samples)
        self.clicks += [trio.current_time() for _ in self.edges.of(samples)]

    async def __aiter__(self) -> AsyncIterator[wire.ServerEvent]:
        async for event in super().__aiter__():
            await trio.sleep(over(trio.current_time(), self.silent))
            if isinstance(event, wire.ResponseAudioDelta) and event.frame_index % CLICK_FRAMES == 0:
                self.received.append(trio.current_time())
            yield event


@dataclass
class Listener(FakeSpeaker):
    """Keeps of what is played only what is asked about.

    Attributes:
        clicks: when a high click was heard.
        frames: how many beginnings of frames were heard.
        gaps: of each silence, when it began and how many samples it had; those before and after all sound, too.
    """

    clicks: list[float] = field(default_factory=list)
    frames: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    _high: Edges = field(default_factory=lambda: Edges(0.7))
    _any: Edges = field(default_factory=lambda: Edges(0.2))
    _silent: bool = False

    def play(self, fill: Fill) -> None:
        super().play(fill)
        at, block = self.played.pop()
        self.clicks += [at + index / self.rate for index in self._high.of(block)]
        self.frames += len(self._any.of(block))
        self._listen_for_silence(at, block)

    def _listen_for_silence(self, at: float, block: Samples) -> None:
        """Silence is in one piece in each block."""
        zeros = np.flatnonzero(block == 0)
        if len(zeros) and not (self._silent and zeros[0] == 0):
            self.gaps.append((at + int(zeros[0]) / self.rate, 0))
        if len(zeros):
            began, count = self.gaps[-1]
            self.gaps[-1] = began, count + len(zeros)
        self._silent = bool(block[-1] == 0)


@dataclass
class Talked:
    """What happened. ``said`` and ``answered``: seconds from microphone to line, from line to speaker, and when."""

    report: TalkReport
    line: Line
    speaker: Listener
    said: list[tuple[float, float]]
    answered: list[tuple[float, float]]

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """When each silence between the first sound and the last one began, and its samples."""
        return self.speaker.gaps[1:-1]


def between(delays: list[tuple[float, float]], begin: float, end: float) -> list[float]:
    """The delays of that time."""
    return [delay for at, delay in delays if begin <= at < end]


async def long_talk(
    minutes: float,
    *,
    microphone_ppm: float = 0,
    speaker_ppm: float = 0,
    deaf: Sequence[Stall] = (),
    silent: Sequence[Stall] = (),
    frozen: Sequence[Stall] = (),
) -> Talked:
    """A talk of so many minutes, and all of its answer. ``frozen``: when the process stands still, but its devices."""
    line, began = Line(clicking_frame, deaf=deaf, silent=silent), trio.current_time()
    async with trio.open_nursery() as nursery:
        microphone = FakeMicrophone(nursery, rate=RATE, ppm=microphone_ppm, sound=clicking)
        speaker, stop = Listener(nursery, rate=RATE, ppm=speaker_ppm), trio.Event()

        async def end() -> None:
            await trio.sleep(60 * minutes)
            stop.set()

        nursery.start_soon(end)
        for stall in frozen:
            nursery.start_soon(_freeze, stall, microphone, speaker)
        report = await talk(line, microphone, speaker, stop=stop)
    every = CLICK_SAMPLES / RATE / (1 + microphone_ppm * 1e-6)
    said = [(at, (at - began) % every) for at in line.clicks]
    answered = [(came, min(at for at in speaker.clicks if at > came) - came) for came in line.received]
    return Talked(report, line, speaker, said, answered)


async def _freeze(stall: Stall, *devices: Clocked) -> None:
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)
    await trio.sleep_until(stall[0])
    for device in devices:
        device.go_on(stall[1])
    clock.jump(stall[1] - stall[0])
