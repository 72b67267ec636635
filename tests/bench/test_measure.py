"""What both are made to do, of subjects whose times are known; and the table of it."""

from typing import Any

import pytest

from tests.bench.compare import MismatchError, check_ground
from tests.bench.fake import Fake
from tests.bench.measure import Sizes, measure, spread
from tests.bench.table import DIFFERENCES, table


@pytest.fixture
def found() -> dict[str, Any]:
    return measure(Fake(2.0, 3.0), Fake(10.0, 90.0), ["twelve chars", "four"], Sizes(20, 10))


def test_ratios_of_steady_frames(found: dict[str, Any]) -> None:
    frame = found["frame"]
    assert (frame["ours_ms"], frame["peer_ms"], frame["median"]) == (2.0, 10.0, pytest.approx(0.2))
    assert frame["peer"] == {"p50_ms": 10.0, "p95_ms": 10.0, "p99_ms": 10.0, "max_ms": 10.0}  # the second one is not
    assert {stage: row["peer_ms"] for stage, row in found["stages"].items()}["tts"] == 2.5


def test_beginnings_are_counted_in_steady_frames(found: dict[str, Any]) -> None:
    first = found["first_frames"]
    assert first["ours"]["frame_0_over_steady"] == 1.0
    assert (first["ours"]["frame_1_over_steady"], first["peer"]["frame_1_over_steady"]) == (1.5, 9.0)
    starts = found["starts"]
    assert starts["default_over_peer"] == {"least": 0.5 / 12, "median": (0.5 / 12 + 0.5 / 4) / 2, "greatest": 0.5 / 4}
    assert starts["fresh_over_peer"]["greatest"] == 1.0
    assert (starts["ours_default_ms"], starts["peer_fresh_ms"]) == (0.5, 8.0)


def test_each_fresh_prompt_is_read_once_on_each_side() -> None:
    ours, peer = Fake(), Fake()
    measure(ours, peer, ["one", "other"], Sizes(10, 10))
    assert [ours.asked.count(f"open {prompt!r}") for prompt in ("one", "other", None)] == [1, 1, 2]
    assert [peer.asked.count(f"open {prompt!r}") for prompt in ("one", "other", None)] == [1, 1, 0]
    assert ours.asked.count("open '' staged") == peer.asked.count("open '' staged") == 1


def test_percentiles_are_of_nearest_rank() -> None:
    assert spread([float(ms) for ms in range(1, 201)]) == {
        "p50_ms": 100.0, "p95_ms": 190.0, "p99_ms": 198.0, "max_ms": 200.0,
    }  # fmt: skip
    assert spread([7.0])["p50_ms"] == 7.0


def test_two_backends_are_not_compared() -> None:
    one = {"backend": {"mlx": "1", "libraries": {"libblas.so": "aa"}}}
    check_ground(one, {"backend": dict(one["backend"])})
    with pytest.raises(MismatchError, match=r"libraries: ours is .*aa.*, the peer's .*bb.*; both need the same"):
        check_ground(one, {"backend": {"mlx": "1", "libraries": {"libblas.so": "bb"}}})


def test_the_table_says_what_was_found(found: dict[str, Any]) -> None:
    machine = {"cpu": "a processor", "cores": "2 cores", "system": "Linux", "python": "Python 3", "gpu": None}
    backend = {"device": "cpu", "mlx_wheels": {"mlx": "1"}, "libraries": {"libblas.so": "aa"}}
    facts = {"machine": machine, "backend": backend}
    text = table(
        found
        | {"ours": facts | {"fingerprint": "f00d", "compiled": True}, "peer": facts | {"versions": {"mlx-vlm": "0"}}}
        | {"date": "a day", "checkpoint": "preset x", "prompt_positions": 170, "in_process": False}
        | {"counted_preset": "deep", "counts": {"ours": {"primitives": 2332.0, "host_waits": 1.0}}}
    )
    assert "preset x, fingerprint f00d; a day\na processor, 2 cores, Linux, Python 3\n" in text
    assert "libblas.so aa\nours: steps compiled; peer: mlx-vlm 0\n" in text
    assert "whole frame                   2.00     10.00   0.200   0.200   0.200\n" in text
    assert "default prompt of 170 positions, over the peer's: 0.50 / 8.00 ms = 0.08333" in text
    assert "fresh prompt of 170 positions, over the peer's: 8.00 / 8.00 ms = 1.00000 (1.00000 to 1.00000)\n" in text
    assert "peer: frame 0 (silence, by rule) 10.00 ms, frame 1 (the first that is spoken) 90.00 ms = 9.00" in text
    assert "ours: 2332 primitives and 1 host waits a frame\n" in text
    assert all(line in text for line in DIFFERENCES)
