"""The real server on a real socket, with a worker that needs no model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from tests.server.fake_worker import FakeWorker
from voicechat_server.app import App, Settings
from voicechat_server.auth import Gate


@asynccontextmanager
async def real_app(
    gate: Gate | None = None, settings: Settings | None = None, **options: Any
) -> AsyncIterator[tuple[str, App]]:
    """The real server with a worker that needs no model, on a real socket."""
    async with FakeWorker(**options) as worker, trio.open_nursery() as nursery:
        if not options.get("load_seconds"):
            await worker.loaded()
        app = App(worker, settings or Settings(model="fake"), gate or Gate(None))
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(app.run, listeners)
        try:
            yield f"127.0.0.1:{listeners[0].socket.getsockname()[1]}", app
        finally:
            nursery.cancel_scope.cancel()
