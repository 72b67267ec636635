"""The measurements: what both are made to do, and in what order."""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tests.bench.pairing import in_turns, ratio, stage_ratios, totals
from tests.bench.subject import FrameTime, Subject

__all__ = ["Sizes", "measure"]

WARM_FRAMES = 4  # of a session, before frames are counted as steady


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    frames: int = 100
    staged_frames: int = 50
    beginnings: int = 3
    counted_frames: int = 4


def measure(ours: Subject, peer: Subject, fresh_prompts: list[str], sizes: Sizes) -> dict[str, Any]:
    """Everything, both in turns.

    ``fresh_prompts`` are used once each, for one beginning with a prompt that nobody has seen.
    """
    steady = totals(_session(ours, peer, sizes.frames, staged=False))
    frame = ratio(steady)
    return {
        "frame": {**asdict(frame), "ours": spread([a for a, _ in steady]), "peer": spread([b for _, b in steady])},
        "stages": {
            s: asdict(r) for s, r in stage_ratios(_session(ours, peer, sizes.staged_frames, staged=True)).items()
        },
        "first_frames": _first_frames(ours, peer, sizes.beginnings, frame.ours_ms, frame.peer_ms),
        "starts": _starts(ours, peer, fresh_prompts),
        "counts": {"ours": ours.count(sizes.counted_frames), "peer": peer.count(sizes.counted_frames)},
    }


def _session(ours: Subject, peer: Subject, frames: int, *, staged: bool) -> list[tuple[FrameTime, FrameTime]]:
    """Steady frames of a session each, with the checkpoint's own prompt."""
    for subject in (ours, peer):
        subject.open(None, staged=staged)
    return in_turns(ours.frame, peer.frame, WARM_FRAMES + frames)[WARM_FRAMES:]


def spread(times: list[float]) -> dict[str, float]:
    """Nearest-rank percentiles."""
    ordered = sorted(times)
    rank = {p: ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 95, 99, 100)}
    return {"p50_ms": rank[50], "p95_ms": rank[95], "p99_ms": rank[99], "max_ms": rank[100]}


def _first_frames(ours: Subject, peer: Subject, times: int, ours_ms: float, peer_ms: float) -> dict[str, Any]:
    """The first frames of sessions without a prompt, over a steady frame.

    Frame 0 is silence without the speech decoder; frame 1 is the first one that it speaks.
    """
    beginnings = in_turns(lambda: _beginning(ours), lambda: _beginning(peer), times)
    frames = [[[times[k] for times in side] for k in (0, 1)] for side in zip(*beginnings, strict=True)]
    return {
        name: {f"frame_{k}_ms": median(side[k]) for k in (0, 1)}
        | {f"frame_{k}_over_steady": median(side[k]) / steady for k in (0, 1)}
        for name, side, steady in (("ours", frames[0], ours_ms), ("peer", frames[1], peer_ms))
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
