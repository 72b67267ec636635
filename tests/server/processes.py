"""A real server process, for tests: started, ready, talked to, stopped."""

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import trio
from trio_websocket import WebSocketConnection, wrap_client_stream

RUN = "from voicechat_server.cli import main; main()"


@dataclass
class Server:
    """``log`` is what it has said so far, as far as it was read."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    def read_until(self, word: str) -> str:
        """The first line that holds ``word``; an error with all lines if there is none."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if word in line:
                return line
        raise AssertionError("".join(self.log))

    def ready(self) -> str:
        """Its address."""
        return self.read_until("ready on").split("ready on ")[1].strip()

    def end(self) -> int:
        """Its status, and what it still said is in ``log``."""
        assert self.process.stderr is not None
        self.log.append(self.process.stderr.read())
        return self.process.wait(60)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.end()


@contextmanager
def started(*options: str, stderr: Any, run: str = RUN, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed at the end if it still runs."""
    command = [sys.executable, "-c", run, *options]
    with subprocess.Popen(command, stderr=stderr, text=True, env=os.environ | environment) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def server(*options: str, run: str = RUN, **environment: str) -> Iterator[Server]:
    """One whose log is read as it comes: for tests of how a server starts and ends, well or badly."""
    with started(*options, stderr=subprocess.PIPE, run=run, **environment) as process:
        yield Server(process)


@asynccontextmanager
async def connected(url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[WebSocketConnection]:
    """A WebSocket on a stream of our own: the library leaves its own open when the server closes first."""
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    stream: trio.abc.Stream = await trio.open_tcp_stream(place.hostname, place.port)
    if tls is not None:
        stream = trio.SSLStream(stream, tls, server_hostname=place.hostname, https_compatible=True)
    async with stream, trio.open_nursery() as nursery:
        yield await wrap_client_stream(nursery, stream, place.netloc, place.path)
        nursery.cancel_scope.cancel()
