"""Frame timings: what is counted where, and how it is said."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from voicechat_core import InputError
from voicechat_core.profile import (
    NOTE,
    STAGES,
    FrameTiming,
    Percentiles,
    Profiler,
    Summary,
    profile_json,
    profile_text,
)


def clock(*seconds: float) -> Iterator[float]:
    return iter(seconds)


def timing(index: int, total: float, cold: str | None = None, **stages: float) -> FrameTiming:
    return FrameTiming(index, total, stages, cold)


def test_a_profiler_without_a_wait_sees_totals_only() -> None:
    ticks = clock(1.0, 1.05, 2.0, 2.02, 3.0, 3.01)
    profiler = Profiler(clock=lambda: next(ticks))
    for index in (4, 5, 6):
        with profiler.frame(index):
            profiler.mark("perception", "encoded")
    assert [(t.frame_index, round(t.total_ms, 6), t.stages_ms, t.cold) for t in profiler.timings] == [
        (4, 50, {}, "first frame"), (5, 20, {}, "second frame"), (6, 10, {}, None),
    ]  # fmt: skip


def test_a_profiler_with_a_wait_times_what_it_waited_for() -> None:
    ticks, waited = clock(0.0, 0.004, 0.005, 0.025, 0.035, 0.037, 0.038), []
    profiler = Profiler(wait=lambda *values: waited.append(values), clock=lambda: next(ticks))
    with profiler.frame(0):
        for stage in STAGES:
            profiler.mark(stage, stage.upper(), 1)
    (found,) = profiler.timings
    assert {stage: round(ms, 6) for stage, ms in found.stages_ms.items()} == {
        "perception": 4, "rnnt": 1, "language": 20, "tts": 10, "codec": 2,
    }  # fmt: skip
    assert round(found.total_ms, 6) == 38
    assert waited == [(stage.upper(), 1) for stage in STAGES]


def test_a_failed_frame_is_not_recorded() -> None:
    profiler = Profiler()
    with pytest.raises(ZeroDivisionError), profiler.frame(0):
        raise ZeroDivisionError
    assert profiler.timings == []


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(InputError, match="stage is 'ears'; one of perception, rnnt"):
        Profiler().mark("ears")


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], (None,) * 4), ([7.0], (7.0,) * 4), ([2.0, 1.0], (1.0, 2.0, 2.0, 2.0)), (range(1, 101), (50, 95, 99, 100))],
)
def test_percentiles_by_nearest_rank(values: list[float], expected: tuple[float | None, ...]) -> None:
    assert tuple(vars(Percentiles.of(values)).values()) == expected


@given(st.lists(st.floats(0, 1e4), min_size=1))
def test_percentiles_are_of_the_data_and_in_order(values: list[float]) -> None:
    found = list(vars(Percentiles.of(values)).values())
    assert set(found) <= set(values)
    assert found == sorted(found)
    assert found[3] == max(values)


REAL = [timing(0, 300, "first frame"), timing(1, 60, "second frame"), *(timing(i, ms) for i, ms in ((2, 40), (3, 81)))]
STAGED = [
    timing(0, 310, "first frame", perception=300.0, language=10.0), timing(1, 70, "second frame"),
    timing(2, 45, perception=15.0, language=30.0), timing(3, 85, perception=25.0, language=60.0),
]  # fmt: skip


def test_cold_frames_count_nowhere_else() -> None:
    found = Summary.of(REAL)
    assert (found.frames, found.mean_ms, found.realtime_factor) == (2, 60.5, 60.5 / 80)
    assert (found.deadline_misses, found.cold_misses) == (1, 1)
    assert found.total == Percentiles(40, 81, 81, 81)
    assert [t.frame_index for t in found.cold] == [0, 1]
    assert Summary.of(STAGED).stages == {
        "perception": Percentiles(15, 25, 25, 25), "language": Percentiles(30, 60, 60, 60),
    }  # fmt: skip


def test_exactly_80_ms_is_no_miss() -> None:
    assert Summary.of([timing(0, 80.0)]).deadline_misses == 0


TABLE = """\
ms a frame              p50      p95      p99      max
perception            15.00    25.00    25.00    25.00
language              30.00    60.00    60.00    60.00
total with waits      45.00    85.00    85.00    85.00
total                 40.00    81.00    81.00    81.00

realtime factor: 0.76 (the mean over 80 ms; below 1 it keeps up)
deadline misses: 1 of 2 warm frames over 80 ms (50.00 %), 1 of 2 cold ones
cold frames, counted nowhere else: frame 0 300.00 ms (first frame), frame 1
60.00 ms (second frame)
Stages and 'total with waits' are taken with a wait after each stage, which a
real frame does not have. 'total' is of the same frames without those waits:
what a session costs."""


def test_the_table() -> None:
    assert profile_text(REAL, STAGED) == TABLE
    assert max(map(len, TABLE.splitlines())) <= 80


def test_without_stages_the_table_claims_none() -> None:
    text = profile_text(REAL)
    assert "waits" not in text
    assert "total                 40.00" in text
    empty = profile_text([])
    assert "no warm frames" in empty
    assert "counted nowhere else: none" in empty


def test_a_list_of_cold_frames_ends() -> None:
    text = profile_text([timing(0, 1, "first frame")] * 30)
    assert text.count("first frame") == 10
    assert "20 more" in text
    assert max(map(len, text.splitlines())) <= 80


def test_runs_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(InputError, match="taken with waits"):
        profile_text(STAGED, REAL)
    with pytest.raises(InputError, match="different frames: 4 and 3"):
        profile_json(REAL, STAGED[:3])
    with pytest.raises(InputError, match="different frames"):
        profile_json(REAL[:3], STAGED[1:])


def test_the_first_frames_of_every_session_are_cold() -> None:
    profiler = Profiler()
    for index in (7, 8, 9, 0, 1, 2):  # a resumed session, then a new one
        with profiler.frame(index):
            pass
    assert [t.cold for t in profiler.timings] == ["first frame", "second frame", None] * 2


def test_stages_are_of_their_own_frame_and_add_up() -> None:
    ticks = clock(0.0, 0.001, 0.003, 0.003, 1.0, 1.004, 1.004)
    profiler = Profiler(wait=lambda: None, clock=lambda: next(ticks))
    with profiler.frame(0):
        profiler.mark("tts")
        profiler.mark("tts")
    with profiler.frame(1):
        profiler.mark("codec")
    found = [{name: round(ms, 6) for name, ms in t.stages_ms.items()} for t in profiler.timings]
    assert found == [{"tts": 3}, {"codec": 4}]


def test_the_clock_is_read_after_the_wait() -> None:
    now = [0.0]

    def wait() -> None:
        now[0] += 0.5

    profiler = Profiler(wait=wait, clock=lambda: now[0])
    with profiler.frame(0):
        profiler.mark("codec")
    assert profiler.timings[0].stages_ms == {"codec": 500}


def test_json_says_which_is_which() -> None:
    found = json.loads(json.dumps(profile_json(REAL, STAGED)))
    assert (found["note"], found["frame_ms"], found["mean_ms"]) == (NOTE, 80, 60.5)
    assert (found["realtime_factor"], found["deadline_miss_share"]) == (60.5 / 80, 0.5)
    assert found["total"]["p50_ms"] == 40
    assert found["total_with_waits"]["p50_ms"] == 45
    assert found["stages_with_waits"]["language"]["max_ms"] == 60
    assert (found["frames"], found["deadline_misses"], found["cold_deadline_misses"]) == (2, 1, 1)
    assert found["cold_frames"][0] == {"frame_index": 0, "total_ms": 300, "why": "first frame"}
    assert found["per_frame"][3] == {
        "frame_index": 3, "total_ms": 81, "cold": None,
        "stages_with_waits_ms": {"perception": 25, "language": 60}, "total_with_waits_ms": 85,
    }  # fmt: skip
    assert profile_json(REAL)["per_frame"][2] == {"frame_index": 2, "total_ms": 40, "cold": None}
    assert profile_json([])["realtime_factor"] is None
    assert profile_json([timing(0, 0.0)])["realtime_factor"] is None  # a clock that stood still
