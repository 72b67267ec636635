"""From frames of the answer to the speaker's blocks: a small reserve, one rate into another, two clocks into one.

Frames come at the pace of the microphone's clock and of the network; the speaker takes samples by a clock of its own.
What waits between the two is looked at before each frame is put to it:

* **Nothing waits**, at the start or after a gap: silence of ``reserve_seconds`` goes first, so that the next frame may
  be late by as much.
* **A little more or less than the reserve**: the frame is stretched by up to 2 % (``MOST_STRETCH``), by soxr's
  variable-rate converter. Samples are not dropped or inserted, since a splice in a vowel is heard and two clocks that
  differ by 200 ppm would make one every few seconds; a pitch that is off by as little is not heard. What the clocks
  differ by is learnt meanwhile, so that the whole reserve is there for late frames.
* **Far more**, after the network stood still: frames without a sound are left out, so a pause gets shorter and no word
  is lost. While somebody speaks without a pause, the stretch catches up by 20 ms a second.
* **More than ``most_seconds``**: what does not fit is dropped, words too, and counted.

Samples of the answer are never lost in any other way. Knows no devices; the device's thread calls ``fill``.
"""

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from voicechat_client.resampling import MOST_STRETCH, Resampler
from voicechat_client.ring import Ring, Samples
from voicechat_core.audio import pcm16_to_float
from voicechat_core.wire import OUTPUT_RATE

__all__ = ["MOST_SECONDS", "RESERVE_SECONDS", "Playout"]

RESERVE_SECONDS: Final = 0.06  # of lateness that is not heard: a network at home, and a frame that took longer
MOST_SECONDS: Final = 3.0
LATE_SECONDS: Final = 0.1  # above the reserve; more than a frame, so that leaving one out takes nothing from it
SOUND: Final = 0.01  # a frame whose peak is lower (-40 dB) has nothing to hear
CLOSING_SECONDS: Final = 5.0  # in which a deviation is worked off
LEARNING_SECONDS: Final = 30.0  # in which what is worked off again and again is taken for the clocks' own difference
SMOOTHING: Final = 0.05  # of a deviation that each frame adds: jitter of a single frame must not be heard as pitch


class Playout:
    """What is played on a speaker of ``rate`` hertz. Seconds are the speaker's own, but for ``played_seconds``.

    Attributes:
        asked: blocks that the device has asked for, for whoever watches whether it still does.
        underflows: blocks before which the device itself ran out, whatever waited here.
        gaps: how often nothing was there when something should have been.
        played_seconds: audio of the answer that was put here, what was left out included.
        skipped_seconds: silence of it that was left out to catch up.
    """

    def __init__(
        self, rate: float, *, reserve_seconds: float = RESERVE_SECONDS, most_seconds: float = MOST_SECONDS
    ) -> None:
        self._rate = rate
        self._reserve = reserve_seconds
        self._ring = Ring(int(rate * (reserve_seconds + most_seconds)))
        self._resampler = Resampler(OUTPUT_RATE, rate, adjustable=True)
        self._waited = reserve_seconds  # what waits when a frame comes, smoothed
        self._learnt = 0.0  # the part by which the clocks differ; without it 1 % would stand 50 ms off, for ever
        self._sounds: deque[tuple[int, int]] = deque()  # where in the ring there is something to hear
        self._starved = 0  # samples that the speaker wanted and did not get; the device's thread counts them
        self._excused = 0  # as many of them as are accounted for
        self._gap_samples = 0
        self._stretched = 0.0  # seconds that stretching took away
        self._converted = 0.0  # seconds that were converted
        self._finished = False
        self.asked = 0
        self.underflows = 0
        self.gaps = 0
        self.played_seconds = 0.0
        self.skipped_seconds = 0.0

    @property
    def waiting_seconds(self) -> float:
        """How long the speaker can go on with what is here: the delay that this side adds."""
        return self._ring.available / self._rate

    @property
    def gap_seconds(self) -> float:
        """Silence that was heard where none was meant, the new reserve included."""
        return self._gap_samples / self._rate

    @property
    def dropped_seconds(self) -> float:
        """Audio that found no room."""
        return self._ring.dropped / self._rate

    @property
    def drift_ppm(self) -> float:
        """How much slower the speaker's clock was than the microphone's, in millionths: what stretching made up for."""
        return self._stretched / self._converted * 1e6 if self._converted else 0.0

    @property
    def sounding(self) -> bool:
        """Whether what the speaker takes now can be heard."""
        now = self._ring.consumed
        return any(begin <= now < end for begin, end in self._sounds)

    @property
    def idle(self) -> bool:
        """Whether all has been played and nothing will come."""
        return self._finished and not self._ring.available

    # ---- our side

    def put(self, samples: npt.NDArray[np.int16]) -> None:
        """The next frame ``[S]`` of the answer, 22.05 kHz."""
        self.played_seconds += len(samples) / OUTPUT_RATE
        floats = pcm16_to_float(samples)
        sounds = float(np.abs(floats).max(initial=0)) >= SOUND
        if not self._ring.available:
            self._begin(self._resampler.convert(floats), sounds, len(samples) / OUTPUT_RATE)
        elif not sounds and self.waiting_seconds > self._reserve + LATE_SECONDS:
            self.skipped_seconds += len(samples) / OUTPUT_RATE
        else:
            self._follow(len(samples) / OUTPUT_RATE)
            self._write(self._resampler.convert(floats), sounds)

    def finish(self) -> None:
        """Nothing follows. Once only."""
        self._write(self._resampler.finish(), False)
        self._finished = True

    def _begin(self, frame: Samples, sounds: bool, seconds: float) -> None:
        """Nothing waits: build the reserve before the frame. Any time but the first, the speaker has run dry."""
        kept = max(0, int(seconds * self._rate) - len(frame))  # in the resampler, which gives it with the next frame
        silence = int(self._reserve * self._rate) + kept
        if self._ring.written:
            starved = self._starved
            self.gaps += 1
            self._gap_samples += starved - self._excused + silence
            self._excused = starved
        self._write(np.zeros(silence, np.float32), False)
        self._write(frame, sounds)
        self._waited = self._reserve

    def _follow(self, seconds: float) -> None:
        """Set the rate for a frame by what waits before it."""
        self._waited += (self.waiting_seconds - self._waited) * SMOOTHING
        working_off = (self._waited - self._reserve) / CLOSING_SECONDS
        wanted = working_off + self._learnt
        part = min(max(wanted, -MOST_STRETCH), MOST_STRETCH)
        if part == wanted:  # a network that stood still says nothing about clocks
            self._learnt += working_off * seconds / LEARNING_SECONDS
        self._resampler.stretch(part)
        self._stretched += part * seconds
        self._converted += seconds

    def _write(self, samples: Samples, sounds: bool) -> None:
        begin = self._ring.written
        self._ring.write(samples[:, np.newaxis])
        while self._sounds and self._sounds[0][1] <= self._ring.consumed:
            self._sounds.popleft()
        if sounds:
            self._sounds.append((begin, self._ring.written))

    # ---- the device's side

    def fill(self, out: Samples, ran_out: bool) -> None:
        """The device's callback: every sample of ``out [S, C]`` is written, each channel alike."""
        count = self._ring.read_into(out)
        out[count:] = 0
        if self._ring.consumed:  # before the first frame nothing is missed; after the last, nobody asks
            self._starved += len(out) - count
        self.underflows += ran_out
        self.asked += 1
