"""How long the frames of a live session take, stage by stage. Pure Python: knows no model and no arrays.

A frame waits once, at its end. To time a stage one must wait after it, and those waits cost what a real frame does
not pay: so there are two kinds of profiler. Without a ``wait`` it sees each frame's true total and nothing else; with
one it sees the stages, and a total that is too large. A report (``profile_text``) shows one of each side by side.
"""

import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from voicechat_core.errors import InputError

__all__ = ["FRAME_MS", "STAGES", "FrameTiming", "Profiler", "Summary", "profile_json", "profile_text"]

FRAME_MS = 80.0
STAGES = ("perception", "rnnt", "language", "tts", "codec")
# What is done for the first time: kernels are compiled, buffers allocated.
COLD = ("first frame", "second frame")


@dataclass(frozen=True)
class FrameTiming:
    """One frame's milliseconds; ``stages_ms`` is empty where only the total was taken. ``cold`` says why it is."""

    frame_index: int
    total_ms: float
    stages_ms: dict[str, float]
    cold: str | None


class Profiler:
    """Collects the timings of a session, or of one after another: ``timings`` has an entry for each frame."""

    def __init__(
        self, wait: Callable[..., object] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``wait`` (``mlx.core.eval``) makes it time stages: it is called with what each stage ends with."""
        self.timings: list[FrameTiming] = []
        self._wait = wait
        self._clock = clock
        self._last = 0.0
        self._stages: dict[str, float] = {}

    @property
    def stages(self) -> bool:
        """Whether it times stages."""
        return self._wait is not None

    @contextmanager
    def frame(self, index: int) -> Iterator[None]:
        """Around one frame; a frame that fails is not recorded."""
        self._stages = {}
        start = self._last = self._clock()
        yield
        total = self._clock() - start
        # The first of a session, or the first seen here: a resumed session begins at a later index.
        place = min(index, len(self.timings))
        cold = COLD[place] if place < len(COLD) else None
        self.timings.append(FrameTiming(index, 1000 * total, self._stages, cold))

    def mark(self, stage: str, *values: Any) -> None:
        """``stage`` has ended with ``values``. Without a ``wait`` this does nothing.

        Raises:
            InputError: for a stage that does not exist.
        """
        if stage not in STAGES:
            raise InputError(f"stage is {stage!r}; one of {', '.join(STAGES)} is needed")
        if self._wait is None:
            return
        self._wait(*values)
        now = self._clock()
        self._stages[stage] = self._stages.get(stage, 0.0) + 1000 * (now - self._last)
        self._last = now


@dataclass(frozen=True)
class Percentiles:
    """Of a row of milliseconds: nearest rank, so each is one of them. None of nothing."""

    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        """The percentile p of n values is the ``ceil(p n / 100)``-th smallest."""
        ordered = sorted(values)
        if not ordered:
            return cls(None, None, None, None)
        return cls(*(ordered[math.ceil(p * len(ordered) / 100) - 1] for p in (50, 95, 99, 100)))


@dataclass(frozen=True)
class Summary:
    """What a session's timings come to. Cold frames are listed by name and count nowhere else.

    ``realtime_factor`` is the mean frame over 80 ms: below 1 it keeps up. ``deadline_misses`` are warm frames of more
    than 80 ms, ``cold_misses`` cold ones.
    """

    frames: int
    total: Percentiles
    stages: dict[str, Percentiles]
    mean_ms: float | None
    realtime_factor: float | None
    deadline_misses: int
    cold: list[FrameTiming]
    cold_misses: int

    @property
    def miss_share(self) -> float | None:
        """The part of the warm frames that missed the deadline, 0 to 1."""
        return self.deadline_misses / self.frames if self.frames else None

    @classmethod
    def of(cls, timings: Iterable[FrameTiming]) -> "Summary":
        """Sum up."""
        every = list(timings)
        warm, cold = [t for t in every if t.cold is None], [t for t in every if t.cold is not None]
        mean = sum(t.total_ms for t in warm) / len(warm) if warm else None
        timed = [stage for stage in STAGES if any(stage in t.stages_ms for t in every)]
        return cls(
            frames=len(warm),
            total=Percentiles.of(t.total_ms for t in warm),
            stages={s: Percentiles.of(t.stages_ms[s] for t in warm if s in t.stages_ms) for s in timed},
            mean_ms=mean,
            realtime_factor=mean / FRAME_MS if mean else None,
            deadline_misses=_late(warm),
            cold=cold,
            cold_misses=_late(cold),
        )


def _late(timings: list[FrameTiming]) -> int:
    return sum(t.total_ms > FRAME_MS for t in timings)


# ---- reports

WIDTH = 80
COLD_LISTED = 10
NOTE = (
    "Stages and 'total with waits' are taken with a wait after each stage, which a real frame does not have. "
    "'total' is of the same frames without those waits: what a session costs."
)


def profile_json(real: Iterable[FrameTiming], staged: Iterable[FrameTiming] = ()) -> dict[str, Any]:
    """Both profilers' timings as one JSON object: sums, then every frame.

    Raises:
        InputError: when the two are not of the same frames, or ``real`` was taken with waits.
    """
    real, staged = list(real), list(staged)
    true, waited = Summary.of(real), Summary.of(staged)
    return {
        "note": NOTE if staged else None,
        "frame_ms": FRAME_MS,
        "frames": true.frames,
        "total": vars(true.total),
        "mean_ms": true.mean_ms,
        "realtime_factor": true.realtime_factor,
        "deadline_misses": true.deadline_misses,
        "deadline_miss_share": true.miss_share,
        "cold_deadline_misses": true.cold_misses,
        "cold_frames": [{"frame_index": t.frame_index, "total_ms": t.total_ms, "why": t.cold} for t in true.cold],
        "stages_with_waits": {stage: vars(found) for stage, found in waited.stages.items()},
        "total_with_waits": vars(waited.total),
        "per_frame": [_frame_json(a, b) for a, b in _paired(real, staged)],
    }


def _paired(real: list[FrameTiming], staged: list[FrameTiming]) -> list[tuple[FrameTiming, FrameTiming | None]]:
    """Each frame of the one run with the same frame of the other."""
    if any(t.stages_ms for t in real):
        raise InputError("the run without waits has stage times: it was taken with waits")
    if not staged:
        return [(t, None) for t in real]
    indices = [[t.frame_index for t in run] for run in (real, staged)]
    if indices[0] != indices[1]:
        raise InputError(f"the two runs have different frames: {len(real)} and {len(staged)}")
    return list(zip(real, staged, strict=True))


def _frame_json(real: FrameTiming, staged: FrameTiming | None) -> dict[str, Any]:
    waited = {}
    if staged is not None:
        waited = {"stages_with_waits_ms": staged.stages_ms, "total_with_waits_ms": staged.total_ms}
    return {"frame_index": real.frame_index, "total_ms": real.total_ms, "cold": real.cold, **waited}


def profile_text(real: Iterable[FrameTiming], staged: Iterable[FrameTiming] = ()) -> str:
    """The same as a table for people, of 80 columns.

    Raises:
        InputError: as ``profile_json``.
    """
    real, staged = list(real), list(staged)
    _paired(real, staged)
    true, waited = Summary.of(real), Summary.of(staged)
    rows = [*waited.stages.items(), *([("total with waits", waited.total)] if staged else []), ("total", true.total)]
    table = [f"{'ms a frame':<18}{'p50':>9}{'p95':>9}{'p99':>9}{'max':>9}"]
    table += [f"{name:<18}" + "".join(f"{_ms(value):>9}" for value in vars(row).values()) for name, row in rows]
    lines = [*_verdict(true), *([NOTE] if staged else [])]
    return "\n".join([*table, "", *(part for line in lines for part in textwrap.wrap(line, WIDTH))])


def _verdict(true: Summary) -> Iterator[str]:
    if true.realtime_factor is None or true.miss_share is None:
        yield "no warm frames"
    else:
        yield f"realtime factor: {true.realtime_factor:.2f} (the mean over 80 ms; below 1 it keeps up)"
        yield (
            f"deadline misses: {true.deadline_misses} of {true.frames} warm frames over 80 ms "
            f"({100 * true.miss_share:.2f} %), {true.cold_misses} of {len(true.cold)} cold ones"
        )
    listed = [f"frame {t.frame_index} {_ms(t.total_ms)} ms ({t.cold})" for t in true.cold[:COLD_LISTED]]
    more = [f"{len(true.cold) - COLD_LISTED} more"] if len(true.cold) > COLD_LISTED else []
    yield "cold frames, counted nowhere else: " + (", ".join([*listed, *more]) or "none")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
