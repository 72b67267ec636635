"""The server's life in its process: listeners, the model's worker, signals, the exit.

    run(worker, App(worker, settings, gate, metrics), Place("127.0.0.1", 8080))

It listens while the model loads, so that ``/ready`` can say so. It ends by a signal, or with the model's thread:
without a model there is nothing to serve, and whoever supervises the process learns it from the status.
"""

import logging
import os
import signal
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from voicechat_core.errors import InputError, VoiceChatError
from voicechat_server.app import App
from voicechat_server.worker import Worker, WorkerEndedError

__all__ = ["Place", "run", "tls_context"]

log: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where to listen; port 0 is any that is free. ``tls`` None is plain TCP."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """What TLS is spoken with; None where no certificate is given.

    Args:
        certificate: a PEM file, the server's own certificate first, then those that lead to a root.
        key: a PEM file; None where the key is in the certificate's file.

    Raises:
        InputError: for files that cannot be read, are no such thing, or do not belong together.
    """
    if certificate is None:
        if key is not None:
            raise InputError(f"a TLS key was given ({key}) and no certificate")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    what = f"the TLS certificate {certificate}" + (f" with the key {key}" if key else "")
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        why = (error.reason or "not in PEM form").lower().replace("_", " ")
        raise InputError(f"{what} cannot be used: {why}") from None
    except OSError as error:
        raise InputError(f"{what} cannot be read: {error.strerror}") from None
    return context


def _no_password() -> str:
    """Otherwise OpenSSL asks on a terminal, which a server may not have."""
    raise InputError("the TLS key is encrypted; a key without a password is needed")


def run(worker: Worker, app: App, place: Place) -> None:
    """Serve until a signal comes. Returns after an end in good order.

    Raises:
        VoiceChatError: when it cannot listen there, and for what kept the model from loading, or ended its thread.
    """
    if not trio.run(_run, worker, app, place):
        # It is loading, or something hangs. It holds nothing that the process does not give back by ending.
        log.warning("the model's thread does not end; leaving without it")
        logging.shutdown()
        os._exit(0)
    if isinstance(worker.error, VoiceChatError):
        raise worker.error
    if worker.error is not None:  # its traceback is in the log
        raise WorkerEndedError(f"the model's thread has ended: {type(worker.error).__name__}")


async def _run(worker: Worker, app: App, place: Place) -> bool:
    """Whether the model's thread has ended in time."""
    listeners = await _listen(place)
    async with trio.open_nursery() as nursery:
        await nursery.start(_obey_signals, app)
        async with worker:
            nursery.start_soon(_watch, worker, app, [_url(listener, place) for listener in listeners])
            await app.run(_dressed(listeners, place))
        nursery.cancel_scope.cancel()
    return await worker.stop(seconds=0)


async def _listen(place: Place) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(place.port, host=place.host)
    except OSError as error:  # a port that is taken, a host that is not ours or not known
        raise VoiceChatError(f"cannot listen on {place.host}, port {place.port}: {error.strerror}") from None


def _dressed(listeners: list[trio.SocketListener], place: Place) -> Sequence[trio.abc.Listener[trio.abc.Stream]]:
    if place.tls is None:
        return listeners
    # The handshake is part of the first read, so the time for a request's header bounds it, too.
    return [trio.SSLListener(listener, place.tls, https_compatible=True) for listener in listeners]


def _url(listener: trio.SocketListener, place: Place) -> str:
    host, port = listener.socket.getsockname()[:2]
    scheme = "ws" if place.tls is None else "wss"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1/realtime"


async def _watch(worker: Worker, app: App, urls: list[str]) -> None:
    """Say when it is ready, and stop serving when the thread ends, for whatever reason."""
    with suppress(Exception):  # it is in ``worker.error``
        await worker.loaded()
        for url in urls:
            log.info("ready on %s", url)
    await worker.ended()
    app.stop()


async def _obey_signals(app: App, task_status: trio.TaskStatus[None]) -> None:
    """The first one ends the sessions in good order, the second one everything at once."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            log.info("%s: shutting down", signal.Signals(number).name)
            app.stop()
            break
        async for number in signals:
            log.warning("%s again: leaving at once", signal.Signals(number).name)
            logging.shutdown()
            os._exit(128 + number)
