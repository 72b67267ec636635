"""One rate to another while the samples come, with a rate that can be moved a little on the way.

It is soxr's variable-rate converter in both directions, also where the rate never moves, because of what the others
cost live. Measured with soxr 1.1.0, 20 ms blocks, 48 kHz to 16 kHz; the level is that of a tone beside the low one:

    setting      held back    6.5 kHz    7 kHz    7.5 kHz
    LQ            6..20 ms    -3.1 dB   -13 dB     -35 dB      the s of speech is gone
    MQ, HQ       10..38 ms     0.0 dB     0 dB    -0.5 dB
    variable         12 ms     0.0 dB     0 dB     0.0 dB

22.05 kHz to 48 kHz is held back by 10.9 ms, and a tone comes out 118 dB above what is not the tone.
"""

from typing import Any, Final

import numpy as np
import soxr

from voicechat_client.ring import Samples

__all__ = ["MOST_STRETCH", "Resampler"]

MOST_STRETCH: Final = 0.02  # a third of a semitone: heard side by side, not in speech by itself
SLEW: Final = 882  # input samples over which a new rate is reached: no step in the sound


class Resampler:
    """Mono ``[S]`` at ``rate`` hertz to ``wanted`` hertz. ``adjustable``: whether ``stretch`` will be called.

    Equal rates that are never adjusted pass through as they are.
    """

    def __init__(self, rate: float, wanted: float, *, adjustable: bool = False) -> None:
        self._rates = (rate, wanted)
        self._stream: Any = None
        if adjustable or rate != wanted:
            # The converter is built for the highest ratio that it will meet.
            most = rate * (1 + MOST_STRETCH) if adjustable else rate
            self._stream = soxr.ResampleStream(most, wanted, 1, dtype="float32", quality="HQ", vr=True)
            self._stream.set_io_ratio(rate, wanted)

    def stretch(self, part: float) -> None:
        """From now on give fewer samples by ``part`` (more if it is negative); within ``MOST_STRETCH``."""
        rate, wanted = self._rates
        self._stream.set_io_ratio(rate * (1 + part), wanted, SLEW)

    def convert(self, samples: Samples) -> Samples:
        """What is due after ``samples``, which may be fewer or more than they make."""
        if self._stream is None:
            return samples
        converted: Samples = self._stream.resample_chunk(samples)
        return converted

    def finish(self) -> Samples:
        """The rest. Nothing can be converted after it."""
        if self._stream is None:
            return np.zeros(0, np.float32)
        rest: Samples = self._stream.resample_chunk(np.zeros(0, np.float32), last=True)
        return rest
