"""A microphone's clock, a network and a speaker's clock, minutes of them in a second or two; no Trio, no threads.

The answer is one frame for each 80 ms of the microphone's clock. It comes when the network lets it, in order. Every
tenth second a frame begins with a click; when the speaker plays it, the delay is known from outside of what is tested.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from voicechat_client.playout import Playout

FRAME = 1764
FRAME_SECONDS = 0.08
CLICK_EVERY = 125  # frames
Int16 = npt.NDArray[np.int16]


def speech(number: int) -> Int16:
    """Words of 1.6 s and pauses of 0.4 s, at a tenth of full scale; and the clicks."""
    pause = number % 25 >= 20
    samples = np.full(FRAME, 0 if pause else 3000, np.int16)
    if number % CLICK_EVERY == 0:
        samples[:40] = 30000
    return samples


def hum(number: int) -> Int16:
    """Never a pause."""
    samples = np.full(FRAME, 3000, np.int16)
    if number % CLICK_EVERY == 0:
        samples[:40] = 30000
    return samples


@dataclass
class Run:
    """``delays``: seconds from when a click came from the network's other side to when it was played, and when."""

    playout: Playout
    delays: list[tuple[float, float]] = field(default_factory=list)

    def between(self, begin: float, end: float) -> list[float]:
        return [delay for at, delay in self.delays if begin <= at < end]


def simulate(
    minutes: float,
    *,
    microphone_ppm: float = 0,
    speaker_ppm: float = 0,
    rate: int = 48000,
    jitter: Callable[[int], float] = lambda number: 0,
    stalls: Sequence[tuple[float, float]] = (),
    sound: Callable[[int], Int16] = speech,
    block: int = 960,
) -> Run:
    """``jitter``: lateness of each frame in seconds. ``stalls``: when nothing comes, from and until."""
    run = Run(Playout(rate))
    arrivals = _arrivals(minutes, microphone_ppm, jitter, stalls)
    sent, arrived = next(arrivals)
    number, clicks = 0, []
    out = np.zeros((block, 1), np.float32)
    for asked in range(int(minutes * 60 * rate / block)):
        now = asked * block / rate / (1 + speaker_ppm * 1e-6)
        while arrived <= now:
            run.playout.put(sound(number))
            if number % CLICK_EVERY == 0:
                clicks.append(sent)
            number += 1
            sent, arrived = next(arrivals)
        run.playout.fill(out, False)
        if clicks and out.max() > 0.5:
            sent_at = clicks.pop(0)
            run.delays.append((sent_at, now + int(np.argmax(out > 0.5)) / rate - sent_at))
    return run


def _arrivals(
    minutes: float, ppm: float, jitter: Callable[[int], float], stalls: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """When each frame is sent and when it arrives. The sender never waits, so after a stall all comes at once."""
    before, number = 0.0, 0
    while True:
        sent = (number + 1) * FRAME_SECONDS / (1 + ppm * 1e-6)
        arrives = max(before, sent + jitter(number))
        for begin, end in stalls:
            if begin <= arrives < end:
                arrives = end
        yield sent, arrives
        before, number = arrives, number + 1
