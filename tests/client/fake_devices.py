"""A microphone and a speaker whose clocks run as fast as they are told, on Trio's clock."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import trio

from voicechat_client.devices import DeviceError, Fill, Take
from voicechat_client.ring import Samples


@dataclass
class Clocked:
    """Calls back every ``block`` samples of a clock that is ``ppm`` millionths fast. ``gone_after``: seconds."""

    nursery: trio.Nursery
    rate: float = 48000
    channels: int = 2
    ppm: float = 0
    block: int = 960
    latency: float = 0.01
    name: str = "fake"
    gone_after: float = float("inf")
    flag: bool = False
    refuses: bool = False
    starts: int = 0
    stops: int = 0
    stopped_at: float = float("inf")  # the first time
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    blocks: int = 0  # that were called back for
    began: float = 0.0
    once: Callable[[float], None] = lambda at: None

    def begin(self, once: Callable[[float], None]) -> None:
        if self.refuses:
            raise DeviceError(f"{self.name} cannot be started")
        self.starts += 1
        self.began, self.once = trio.current_time(), once
        self.nursery.start_soon(self._run)

    def due(self, blocks: int) -> float:
        """When so many blocks are full."""
        return self.began + blocks * self.block / self.rate / (1 + self.ppm * 1e-6)

    def go_on(self, until: float) -> None:
        """Call back for all that is due by then: as a device's own thread does while Trio's stands still."""
        while self.due(self.blocks + 1) <= until:
            self.blocks += 1
            self.once((self.blocks - 1) * self.block)

    def stop(self) -> None:
        self.stops += 1
        self.stopped_at = min(self.stopped_at, trio.current_time())
        self.scope.cancel()

    async def _run(self) -> None:
        with self.scope:
            while self.blocks * self.block / self.rate < self.gone_after:
                await trio.sleep_until(self.due(self.blocks + 1))
                self.go_on(trio.current_time())


def a_room(samples: Samples) -> Samples:
    """Something that is never zero. ``samples``: their indices."""
    return 0.001 + 0.0 * samples


@dataclass
class FakeMicrophone(Clocked):
    """``sound``: indices of samples to samples, the same in each channel."""

    sound: Callable[[Samples], Samples] = a_room

    def start(self, take: Take) -> None:
        self.begin(lambda at: take(self.heard(at), self.flag))

    def heard(self, at: float) -> Samples:
        mono = self.sound(np.arange(at, at + self.block)).astype(np.float32)
        return np.repeat(mono[:, np.newaxis], self.channels, axis=1)


@dataclass
class FakeSpeaker(Clocked):
    """``played``: per block, when it was asked for and what it was (first channel)."""

    played: list[tuple[float, Samples]] = field(default_factory=list)

    def start(self, fill: Fill) -> None:
        self.begin(lambda _at: self.play(fill))

    def play(self, fill: Fill) -> None:
        out = np.full((self.block, self.channels), np.nan, np.float32)
        fill(out, self.flag)
        assert (out == out[:, :1]).all()
        self.played.append((self.due(self.blocks), out[:, 0]))

    def sound(self) -> Samples:
        """All that was played."""
        return np.concatenate([block for _, block in self.played])
