"""How two subjects take turns, and what is made of their times."""

import pytest

from tests.bench.pairing import Ratio, in_turns, ratio, stage_ratios, totals
from tests.bench.subject import STAGES, FrameTime


def test_the_order_is_swapped_every_time() -> None:
    order: list[str] = []
    count = iter(range(100))

    def turn(name: str) -> int:
        order.append(name)
        return next(count)

    assert in_turns(lambda: turn("a"), lambda: turn("b"), 3) == [(0, 1), (3, 2), (4, 5)]
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_a_ratio_is_of_blocks_and_leaves_out_what_is_over() -> None:
    pairs = [(1.0, 4.0), (3.0, 4.0), (2.0, 4.0), (1.0, 8.0), (8.0, 4.0), (8.0, 12.0), (100.0, 1.0)]
    found = ratio(pairs, block=2)  # blocks of 4/8, 3/12, 16/16; medians are of all
    assert found == Ratio(ours_ms=3.0, peer_ms=4.0, least=0.25, median=0.5, greatest=1.0)


def test_no_block_no_ratio() -> None:
    with pytest.raises(ValueError, match="3 pairs make no block of 4"):
        ratio([(1.0, 1.0)] * 3, block=4)


def test_stages_and_totals_are_paired_by_name() -> None:
    ours = FrameTime(9.0, dict.fromkeys(STAGES, 1.0))
    peer = FrameTime(20.0, {stage: 2.0 + index for index, stage in enumerate(reversed(STAGES))})
    found = stage_ratios([(ours, peer)] * 2, block=2)
    assert totals([(ours, peer)]) == [(9.0, 20.0)]
    assert [found[stage].peer_ms for stage in STAGES] == [6.0, 5.0, 4.0, 3.0, 2.0]
    assert found["codec"].median == 0.5
