"""The measurements: what both are made to do, and in what order."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tests.bench.pairing import Ratio, in_turns, ratio, stage_ratios, totals
from tests.bench.subject import FrameTime, Subject

__all__ = ["Sizes", "measure"]

WARM_FRAMES = 4  # of a session, before frames are counted as steady


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    frames: int = 100
    staged_frames: int = 50


def measure(ours: Subject, peer: Subject, fresh_prompts: list[str], sizes: Sizes) -> dict[str, Any]:
    """Everything, both in turns.

    ``fresh_prompts`` are used once each, for one beginning with a prompt that nobody has seen.
    """
    steady = totals(_session(ours, peer, sizes.frames, staged=False))
    staged = stage_ratios(_session(ours, peer, sizes.staged_frames, staged=True))
    frame = ratio(steady)
    return {
        "frame": {**asdict(frame), "ours": spread([a for a, _ in steady]), "peer": spread([b for _, b in steady])},
        "stages": {stage: asdict(found) for stage, found in staged.items()},
        "first_frames": _first_frames(ours, peer, len(fresh_prompts), frame),
        "starts": _starts(ours, peer, fresh_prompts),
    }


def _session(ours: Subject, peer: Subject, frames: int, *, staged: bool) -> list[tuple[FrameTime, FrameTime]]:
    """Steady frames of a session each, without a prompt: the peer would take 170 frames to read one."""
    for subject in (ours, peer):
        subject.open("", staged=staged)
    return in_turns(ours.frame, peer.frame, WARM_FRAMES + frames)[WARM_FRAMES:]


def spread(times: list[float]) -> dict[str, float]:
    """Nearest-rank percentiles."""
    ordered = sorted(times)
    rank = {p: ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 95, 99, 100)}
    return {"p50_ms": rank[50], "p95_ms": rank[95], "p99_ms": rank[99], "max_ms": rank[100]}


def _first_frames(ours: Subject, peer: Subject, times: int, steady: Ratio) -> dict[str, Any]:
    """The first frames of sessions without a prompt, over a steady frame.

    Frame 0 is silence without the speech decoder; frame 1 is the first one that it speaks.
    """
    beginnings = in_turns(lambda: _beginning(ours), lambda: _beginning(peer), times)
    ours_times, peer_times = zip(*beginnings, strict=True)
    return {"ours": _over(ours_times, steady.ours_ms), "peer": _over(peer_times, steady.peer_ms)}


def _over(times: Sequence[list[float]], steady_ms: float) -> dict[str, float]:
    """Medians of the first and of the second frame, and how many steady frames they are."""
    middle = {f"frame_{k}": median(frames) for k, frames in enumerate(zip(*times, strict=True))}
    return {f"{k}_ms": ms for k, ms in middle.items()} | {
        f"{k}_over_steady": ms / steady_ms for k, ms in middle.items()
    }


def _beginning(subject: Subject) -> list[float]:
    subject.open("")
    return [subject.frame().total_ms for _ in range(2)]


def _starts(ours: Subject, peer: Subject, fresh_prompts: list[str]) -> dict[str, Any]:
    """Session starts, each prompt once on each side: ours also with its default prompt, which is the peer's fresh."""
    rows = []
    for prompt in fresh_prompts:
        rows.append({"ours_default": ours.open(None), "ours_fresh": ours.open(prompt), "peer_fresh": peer.open(prompt)})
    middle = {f"{key}_ms": median(row[key] for row in rows) for key in rows[0]}
    return {
        **middle,
        "default_over_peer": _ratios([row["ours_default"] / row["peer_fresh"] for row in rows]),
        "fresh_over_peer": _ratios([row["ours_fresh"] / row["peer_fresh"] for row in rows]),
    }


def _ratios(values: list[float]) -> dict[str, float]:
    return {"least": min(values), "median": median(values), "greatest": max(values)}
