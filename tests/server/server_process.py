"""A real server process that serves all tests of a file: asked how it is, stopped; and what it has logged."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.server.processes import RUN, started

HOST = "127.0.0.1"
NET = 60.0  # seconds after which a test has failed; nothing here takes so long


@dataclass(frozen=True)
class ServerProcess:
    """One that serves. Its log is a file: a pipe that nobody reads would fill up and stop it."""

    process: subprocess.Popen[str]
    port: int
    log_file: Path

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a plain request."""
        connection = HTTPConnection(HOST, self.port, timeout=NET)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """By name, those with labels left out."""
        text = self.get("/metrics")[1]
        return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}

    def is_ready(self) -> bool:
        return self.get("/ready") == (200, '{"ready": true}')

    def wait_until_ready(self, seconds: float = 5.0) -> None:
        """A slot is free as soon as the server has seen that its peer left, which no peer can see.

        Asked twice: whose request is just being read, and may be gone already, is not yet counted by the first.
        """
        deadline = time.monotonic() + seconds
        while not (self.is_ready() and self.is_ready()):
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, f"after {seconds} s: {self.get('/ready')}"
            time.sleep(0.002)

    def log(self) -> str:
        return self.log_file.read_text()

    def sessions(self) -> list[dict[str, Any]]:
        """The log's line of each session that has ended."""
        lines = (line.partition("{") for line in self.log().splitlines())
        return [json.loads("{" + rest) for _, brace, rest in lines if brace and rest.startswith('"session"')]


@contextmanager
def serving(checkpoint: Path | None, log_file: Path, *options: str, run: str = RUN) -> Iterator[ServerProcess]:
    """A server on a free port, without ``-m`` if there is no checkpoint.

    At the end it must leave with 0, and have logged no error.
    """
    model = [] if checkpoint is None else ["-m", str(checkpoint)]
    words = [*model, "--port", "0", *options]
    with log_file.open("wb") as log, started(*words, stderr=log, run=run) as process:
        server = ServerProcess(process, _port(process, log_file), log_file)
        yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, server.log()
    assert "Traceback" not in server.log(), server.log()
    assert "\nERROR" not in server.log(), server.log()


def _port(process: subprocess.Popen[str], log_file: Path) -> int:
    deadline = time.monotonic() + NET
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"ready on (\S+)\n", log_file.read_text())
        if found:
            return urlsplit(found[1]).port or 0
        time.sleep(0.02)
    raise AssertionError(log_file.read_text())
