"""Both sides of a conversation on one clock: the user left, the assistant right, to hear where they overlap.

Input frame n and answer frame n are the same 80 ms: 1280 samples at 16 kHz are 1764 at 22.05 kHz. So the user's
samples, resampled, and the assistant's, as they came, are put side by side from the first on. A listener heard the
assistant later than that, by what network and model took. Knows samples only, nothing of messages.
"""

from contextlib import suppress
from types import TracebackType

import numpy as np
import numpy.typing as npt

from voicechat_core.audio import WIRE_SCALE, float_to_pcm16, pcm16_to_float
from voicechat_core.audio_files import StrPath
from voicechat_core.audio_stream import Resampler, WavWriter
from voicechat_core.errors import AudioError

__all__ = ["INPUT_RATE", "OUTPUT_RATE", "StereoMixer", "StereoWriter"]

Pcm16 = npt.NDArray[np.int16]

INPUT_RATE = 16000
OUTPUT_RATE = 22050


class StereoMixer:
    """Takes either side in pieces of any length, gives both together as far as both are there.

    What waits for the other side is kept: 44 kB for each second that they are apart, which is at most what the server
    queues (its ``--queued-seconds``) and the network holds.
    """

    def __init__(self) -> None:
        self._resampler = Resampler(INPUT_RATE, OUTPUT_RATE)
        self._left = bytearray()  # from the front of a bytearray bytes go without a copy of the rest
        self._right = bytearray()

    @property
    def waiting(self) -> tuple[int, int]:
        """Samples at 22.05 kHz of the user, of the assistant, that wait for the other side; one of them is 0."""
        return len(self._left) // 2, len(self._right) // 2

    def user(self, samples: Pcm16) -> Pcm16:
        """Add what the user said, int16 ``[S]`` at 16 kHz. Returns what is now complete: int16 ``[any number, 2]``."""
        self._add_user(self._resampler.push(pcm16_to_float(samples)))
        return self._both(min(self.waiting))

    def assistant(self, samples: Pcm16) -> Pcm16:
        """Add what the assistant said, int16 ``[S]`` at 22.05 kHz. Returns the same.

        For input frames that the server skipped there is no answer: give 1764 zeros for each, to stay on the clock.
        """
        self._right += samples.astype("<i2").tobytes()
        return self._both(min(self.waiting))

    def finish(self) -> Pcm16:
        """The rest; the side that is shorter is silent. Nothing can be added afterwards."""
        self._add_user(self._resampler.finish())
        return self._both(max(self.waiting))

    def _add_user(self, samples: npt.NDArray[np.float32]) -> None:
        self._left += float_to_pcm16(samples, WIRE_SCALE).tobytes()

    def _both(self, count: int) -> Pcm16:
        both = np.zeros((count, 2), np.int16)
        for channel, side in enumerate((self._left, self._right)):
            samples = np.frombuffer(bytes(side[: 2 * count]), "<i2")
            both[: len(samples), channel] = samples
            del side[: 2 * count]
        return both


class StereoWriter:
    """A stereo WAV at 22.05 kHz that grows while both sides speak. A context manager.

    The file holds the time that both sides have reached, valid at any moment; at the end also what only one of them
    said, as also when the block is left by an exception.

    Raises:
        AudioError: naming the file, as ``WavWriter`` does; also from the other calls.
    """

    def __init__(self, path: StrPath) -> None:
        self._mixer = StereoMixer()
        self._writer = WavWriter(path, OUTPUT_RATE, channels=2)

    def user(self, samples: Pcm16) -> None:
        """Add what the user said: int16 ``[S]`` at 16 kHz."""
        self._writer.write(self._mixer.user(samples))

    def assistant(self, samples: Pcm16) -> None:
        """Add what the assistant said: int16 ``[S]`` at 22.05 kHz."""
        self._writer.write(self._mixer.assistant(samples))

    def close(self) -> None:
        """Write the rest and finish the file. Again is fine, also after a write that failed."""
        if not self._writer.closed:
            with self._writer:
                self._writer.write(self._mixer.finish())

    def __enter__(self) -> "StereoWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        with suppress(AudioError):  # the error in the block is the one to tell
            self.close()
