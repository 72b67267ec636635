"""Two subjects in turns, and what their times say of each other. Knows no model and no process."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from tests.bench.subject import STAGES, FrameTime

__all__ = ["BLOCK", "Ratio", "in_turns", "ratio", "stage_ratios", "totals"]

BLOCK = 10  # frames: the ratio of two single ones would tell of the system's interruptions
Pair = tuple[float, float]  # ours, the peer's, in milliseconds
A, B = TypeVar("A"), TypeVar("B")


@dataclass(frozen=True)
class Ratio:
    """Ours over the peer's: medians of the milliseconds; the least, median and greatest ratio of blocks of pairs."""

    ours_ms: float
    peer_ms: float
    least: float
    median: float
    greatest: float


def in_turns(ours: Callable[[], A], peer: Callable[[], B], times: int) -> list[tuple[A, B]]:
    """Call both ``times`` times: ours and the peer's, then the peer's and ours, and so on."""
    results = []
    for index in range(times):
        if index % 2:
            theirs = peer()
            results.append((ours(), theirs))
        else:
            own = ours()
            results.append((own, peer()))
    return results


def ratio(pairs: list[Pair], block: int = BLOCK) -> Ratio:
    """Of blocks of ``block`` pairs, each one's sum over the other's; a block that is not full is left out.

    Raises:
        ValueError: for fewer pairs than one block.
    """
    if len(pairs) < block:
        raise ValueError(f"{len(pairs)} pairs make no block of {block}")
    sums = [_sums(pairs[start : start + block]) for start in range(0, len(pairs) - block + 1, block)]
    ratios = [ours / peer for ours, peer in sums]
    ours_ms, peer_ms = (median(side) for side in zip(*pairs, strict=True))
    return Ratio(ours_ms, peer_ms, min(ratios), median(ratios), max(ratios))


def _sums(pairs: list[Pair]) -> Pair:
    return sum(ours for ours, _ in pairs), sum(peer for _, peer in pairs)


def totals(frames: list[tuple[FrameTime, FrameTime]]) -> list[Pair]:
    """Whole frames."""
    return [(ours.total_ms, peer.total_ms) for ours, peer in frames]


def stage_ratios(frames: list[tuple[FrameTime, FrameTime]], block: int = BLOCK) -> dict[str, Ratio]:
    """Each stage's ratio, of staged frames."""
    times = {s: [(ours.stages_ms[s], peer.stages_ms[s]) for ours, peer in frames] for s in STAGES}
    return {stage: ratio(pairs, block) for stage, pairs in times.items()}
