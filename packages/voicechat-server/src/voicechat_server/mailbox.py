"""What Trio and the model thread share of one session: its input, and how many results wait. Knows neither of them.

Every method takes the lock for a few lines and waits for nothing else, so each side may call at any time. Neither
side ever waits for the other here; instead a method says whether the other side has to be told:

* The thread **sleeps** on a session that lacks samples or whose consumer lags. Who ends that reason is told so once,
  and wakes it. So at most one waking command a session is on its way.
* Trio waits for **room**. The call that makes room says so once.

The input is one row of bytes: a million pushes of one sample hold no more memory than one push of a million.
"""

import threading
from enum import Enum
from typing import Final

__all__ = ["BYTES_PER_SAMPLE", "SAMPLE_RATE", "Mailbox"]

SAMPLE_RATE: Final = 16000  # hertz, of what sessions hear
BYTES_PER_SAMPLE: Final = 2  # int16


class Asleep(Enum):
    """Why the thread looks at a session no more until it is woken."""

    NO = "it does look"
    INPUT = "too few samples for a frame"
    RESULTS = "more results wait than may"


class Mailbox:
    """One session's input and counts. ``most_input`` is in samples, ``most_results`` counts results."""

    def __init__(self, most_input: int, most_results: int) -> None:
        self._most_input = most_input
        self._most_results = most_results
        self._lock = threading.Lock()
        self._input = bytearray()
        self._running = 0  # samples of the frame that runs now: it counts as queued until it has run
        self._waiting = 0
        self._asleep = Asleep.NO
        self._room_wanted = False
        self._shut = False

    @property
    def queued(self) -> int:
        """Samples that were put in and that no finished frame has read."""
        with self._lock:
            return self._queued()

    @property
    def waiting(self) -> int:
        """Results that the consumer has not taken, those on their way included."""
        with self._lock:
            return self._waiting

    # ---- Trio's side

    def full(self) -> bool:
        """Whether there is no room now; whoever makes room is then told to say so."""
        with self._lock:
            self._room_wanted = not self._shut and self._queued() >= self._most_input
            return self._room_wanted

    def put(self, pcm: bytes) -> bool:
        """Add samples, all of them; after ``shut`` none. Returns whether the thread is to be woken."""
        with self._lock:
            if self._shut or not pcm:
                return False
            self._input += pcm
            return self._woken_from(Asleep.INPUT)

    def took(self, results: int) -> bool:
        """The consumer took results. Returns whether the thread is to be woken."""
        with self._lock:
            self._waiting -= results
            return self._waiting <= self._most_results and self._woken_from(Asleep.RESULTS)

    # ---- the model thread's side

    def may_step(self) -> bool:
        """Whether the consumer keeps up; if not, the thread sleeps until it has taken enough."""
        with self._lock:
            self._asleep = Asleep.RESULTS if self._waiting > self._most_results else Asleep.NO
            return self._asleep is Asleep.NO

    def skip(self, bound: int, frame: int) -> int:
        """Drop the oldest whole frames of ``frame`` samples that lie beyond the newest ``bound``; returns how many."""
        with self._lock:
            frames = max(0, self._queued() - bound) // frame
            del self._input[: frames * frame * BYTES_PER_SAMPLE]
            return frames

    def take(self, samples: int) -> bytes | None:
        """What a frame reads, oldest first; None if there is less, and then the thread sleeps until there is more."""
        with self._lock:
            if len(self._input) < samples * BYTES_PER_SAMPLE:
                self._asleep = Asleep.INPUT
                return None
            return self._taken(samples * BYTES_PER_SAMPLE)

    def take_rest(self) -> bytes:
        """All that is there, however little."""
        with self._lock:
            return self._taken(len(self._input))

    def stepped(self, results: int) -> bool:
        """What was taken has run and gave ``results``. Returns whether Trio is to be told that there is room."""
        with self._lock:
            self._running = 0
            self._waiting += results
            told = self._room_wanted and self._queued() < self._most_input
            self._room_wanted = self._room_wanted and not told
            return told

    # ---- either side

    @property
    def is_shut(self) -> bool:
        """Whether nothing will read the input."""
        with self._lock:
            return self._shut

    def shut(self) -> None:
        """Drop the input, and all that is put in from now on: nothing will read it. There is always room then."""
        with self._lock:
            self._input.clear()
            self._shut = True

    # ---- with the lock held

    def _queued(self) -> int:
        return len(self._input) // BYTES_PER_SAMPLE + self._running

    def _woken_from(self, reason: Asleep) -> bool:
        if self._asleep is not reason:
            return False
        self._asleep = Asleep.NO
        return True

    def _taken(self, size: int) -> bytes:
        taken = bytes(self._input[:size])
        del self._input[:size]
        self._running = size // BYTES_PER_SAMPLE
        return taken
