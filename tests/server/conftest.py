"""A server process for each module that asks for one, and what has to be true of it after every test."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.server.clients import converse, noise
from tests.server.server_process import ServerProcess, serving


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It serves the tiny checkpoint; at the end it must leave in good order, and have logged no error."""
    with serving(tiny_path, tmp_path_factory.mktemp("server") / "log") as process:
        yield process


@pytest.fixture
def unharmed(server: ServerProcess) -> Iterator[None]:
    """After a test: the process lives, tells the truth about itself, and serves the next client."""
    yield
    server.wait_until_ready()
    status, health = server.get("/health")
    assert (status, json.loads(health)["status"]) == (200, "ok")
    assert server.metrics()["voicechat_slots_taken"] == 0
    assert len(trio.run(converse, server, noise(0.08))) == 1
    assert server.process.poll() is None
