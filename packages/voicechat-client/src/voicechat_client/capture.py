"""From the microphone's blocks to 16 kHz mono int16, at whatever rate and in however many channels it gives them.

The device's thread copies into a ring and does nothing else; mixing down and resampling happen where they are read.
The microphone's clock is the conversation's: nothing here is stretched, the speaker's side follows.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from voicechat_client.resampling import Resampler
from voicechat_client.ring import Ring, Samples
from voicechat_core.audio import WIRE_SCALE, float_to_pcm16
from voicechat_core.wire import INPUT_RATE

__all__ = ["Capture"]

RING_SECONDS: Final = 2.0  # it is read fifty times a second; only a process that stands still fills it
MIXED: Final = 2  # channels that are mixed down: a microphone is in the first ones, and the mean of 32 is silence


class Capture:
    """What is heard.

    Attributes:
        taken: blocks that the device has given, for whoever watches whether it still does.
        overflows: blocks before which the device itself lost samples.
        level: peak of what was read last, 1.0 is full scale.
    """

    def __init__(self, rate: float, channels: int) -> None:
        self._rate = rate
        self._ring = Ring(int(rate * RING_SECONDS), channels)
        self._resampler = Resampler(rate, INPUT_RATE)
        self._zeros = 0  # in a row, up to now
        self.taken = 0
        self.overflows = 0
        self.level = 0.0

    @property
    def dropped_seconds(self) -> float:
        """Audio that was not read in time."""
        return self._ring.dropped / self._rate

    @property
    def heard_seconds(self) -> float:
        """Audio that was read, by the microphone's own clock."""
        return self._ring.consumed / self._rate

    @property
    def zero_seconds(self) -> float:
        """How long there has been nothing but zeros: no microphone in a room gives them, a system that forbids does."""
        return self._zeros / self._rate

    def take(self, block: Samples, lost: bool) -> None:
        """The device's callback."""
        self._ring.write(block)
        self.overflows += lost
        self.taken += 1

    def read(self) -> npt.NDArray[np.int16]:
        """All that came since the last time, as ``[S]`` at 16 kHz; often empty."""
        samples = self._ring.read()
        if not len(samples):
            return np.zeros(0, np.int16)
        mono = samples[:, :MIXED].mean(axis=1, dtype=np.float32)
        # A driver's accident must not stay in the resampler.
        mono = np.clip(np.nan_to_num(mono), -1, 1)
        self._note(mono)
        return float_to_pcm16(self._resampler.convert(mono), WIRE_SCALE)

    def finish(self) -> npt.NDArray[np.int16]:
        """All that is left, once the device has stopped."""
        return np.concatenate([self.read(), float_to_pcm16(self._resampler.finish(), WIRE_SCALE)])

    def _note(self, mono: Samples) -> None:
        self.level = float(np.abs(mono).max())
        sounds = np.flatnonzero(mono)
        self._zeros = self._zeros + len(mono) if not len(sounds) else len(mono) - 1 - int(sounds[-1])
