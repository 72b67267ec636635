"""The soak for a few seconds, and that it sees what does not come back."""

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from tests.server.processes import RUN
from tests.server.server_process import ServerProcess, serving
from tests.soak.measures import MEMORY_ALLOWANCE, Held, not_given_back
from tests.soak.soak import SoakError, soak

BEGAN = Held(slots=0, sessions=0, connections=1, tasks=8, threads=8, files=10, memory=100.0)
WARM = replace(BEGAN, threads=7, memory=130.0)

LEAKY = f"""
import os
from voicechat_server import app
kept, whole = [], app.App._converse
def leaks(self, *arguments):
    kept.append(open(os.devnull))
    return whole(self, *arguments)
app.App._converse = leaks
{RUN}"""


def run_soak(server: ServerProcess, settle_seconds: float = 30.0) -> list[str]:
    told: list[str] = []
    trio.run(lambda: soak(server, minutes=0.03, seed=1, warm_turns=0, settle_seconds=settle_seconds, tell=told.append))
    return told


def test_a_few_seconds(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tiny_path, tmp_path / "log") as server:
        told = run_soak(server)
    assert told[0] == "seed 1, 0.03 minutes"
    assert [line.split()[0] for line in told[2:5]] == ["began", "warm", "end"]
    turns, _, faults, *_ = told[5].split()
    assert int(turns) >= 2
    assert int(faults) >= 2


def test_a_server_that_keeps_a_file_of_each_session(tiny_path: Path, tmp_path: Path) -> None:
    with serving(tiny_path, tmp_path / "log", run=LEAKY) as server, pytest.raises(SoakError, match=r"^files: \d+ when"):
        run_soak(server, settle_seconds=1.0)


@pytest.mark.parametrize("count", ["slots", "sessions", "connections", "tasks", "threads", "files"])
def test_one_more_of_anything_is_seen(count: str) -> None:
    end = replace(WARM, **{count: getattr(BEGAN, count) + 1})
    before = getattr(BEGAN, count)
    assert not_given_back(BEGAN, WARM, end) == f"{count}: {before} when it began, {before + 1} at the end"


def test_memory_may_grow_by_what_is_allowed() -> None:
    assert not_given_back(BEGAN, WARM, replace(WARM, memory=WARM.memory + MEMORY_ALLOWANCE)) is None
    told = not_given_back(BEGAN, WARM, replace(WARM, memory=WARM.memory + MEMORY_ALLOWANCE + 1))
    assert told == f"memory: 130.0 MB when warm, 179.0 MB at the end; {MEMORY_ALLOWANCE:g} MB may come"
