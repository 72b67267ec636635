"""A subject in a process of its own answers as it would here."""

import sys
from pathlib import Path

import pytest

from tests.bench.fake import Fake
from tests.bench.serving import Remote, WorkerError

ROOT = Path(__file__).parents[2]


def test_a_remote_subject_answers_as_a_local_one() -> None:
    local = Fake()
    with Remote([sys.executable, "-m", "tests.bench.fake"], ROOT) as remote:
        assert remote.facts() == local.facts()
        for subject in (remote, local):
            assert subject.open("four", staged=True) == 4.0
        assert [remote.frame() for _ in range(3)] == [local.frame() for _ in range(3)]
        assert remote.frame().stages_ms["codec"] == 0.5
        assert remote.open(None) == 0.5
        assert remote.frame().stages_ms == {}
        assert remote.count(3) == {"host_waits": 1.0, "primitives": 30.0}


def test_a_worker_that_ends_is_named_with_its_status() -> None:
    with pytest.raises(WorkerError, match=r"-c import sys; sys.exit\(3\) ended with status 3"):
        Remote([sys.executable, "-c", "import sys; sys.exit(3)"], ROOT)
