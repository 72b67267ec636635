"""A server process for each module that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.processes import ServerProcess, serving


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It serves the tiny checkpoint, and is as good as new at the end."""
    with serving(tiny_path, tmp_path_factory.mktemp("server") / "log") as process:
        yield process
        process.wait_until_ready()
        assert process.get("/health")[0] == 200
        assert process.metrics()["voicechat_slots_taken"] == 0
