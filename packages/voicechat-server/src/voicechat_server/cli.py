"""The ``voicechat-server`` command."""

import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import trio
import typer

from voicechat_core.errors import InputError, VoiceChatError
from voicechat_server.app import App, Settings
from voicechat_server.auth import Gate, read_key, require_safe_listening
from voicechat_server.metrics import Metrics
from voicechat_server.worker import Worker

__all__ = ["main"]

log = logging.getLogger(__name__)

KEY_VARIABLE = "VOICECHAT_API_KEY"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command. A deliberate error is one line on stderr and status 1; misuse of an option is status 2."""
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s", level=logging.INFO)
    try:
        app()
    except InputError as error:
        _fail(error, 2)
    except VoiceChatError as error:
        _fail(error, 1)
    except OSError as error:  # a port that is taken, a host that is not ours
        _fail(error, 1)


def _fail(error: Exception, status: int) -> NoReturn:
    print("voicechat-server:", str(error).replace("\n", "\\n"), file=sys.stderr)
    sys.exit(status)


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", help="A checkpoint: directory or hub name. Default: a small random one."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any that is free.", min=0, max=65535)] = 8080,
    system_prompt: Annotated[
        str | None, typer.Option(help="For sessions that ask for none. Default: the checkpoint's own.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"Holds the key that clients must give; or the variable {KEY_VARIABLE}.")
    ] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help="Origins of web pages that may connect.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen on other addresses without a key.")] = False,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
) -> None:
    """Serve live speech on ws://HOST:PORT/v1/realtime: one session at a time."""
    from voicechat_core.hub import locate
    from voicechat_core.precision import check_precision
    from voicechat_core.voicechat import load

    wanted = check_precision(precision)
    key = read_key(api_key_file, os.environ)
    require_safe_listening(host, key, insecure=insecure)
    gate = Gate(key, origins=allow_origin or [])
    directory = _small_checkpoint() if model is None else locate(model)
    name = "small random checkpoint" if model is None else model
    settings = Settings(model=name, system_prompt=system_prompt)
    trio.run(_serve, partial(load, directory, precision=wanted), settings, gate, host, port)


def _small_checkpoint() -> Path:
    """Made on the first start without a model, so that the server runs out of the box."""
    from voicechat_core.synthetic import synthesize

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "voicechat" / "tiny-0"
    if not (home / "config.json").exists():
        synthesize(home, seed=0)
    log.warning("no model was given: serving %s, small and random; its words are noise", home)
    return home


async def _serve(load: partial, settings: Settings, gate: Gate, host: str, port: int) -> None:  # type: ignore[type-arg]
    listeners = await trio.open_tcp_listeners(port, host=host)
    metrics = Metrics()
    async with Worker(load, frame_took=metrics.frame_took) as worker, trio.open_nursery() as nursery:
        server = App(worker, settings, gate, metrics)
        nursery.start_soon(_obey_signals, server)
        nursery.start_soon(_say_when_ready, worker, listeners)
        await server.run(listeners)
        nursery.cancel_scope.cancel()


async def _say_when_ready(worker: Worker, listeners: list[trio.SocketListener]) -> None:
    await worker.loaded()
    for listener in listeners:
        host, port = listener.socket.getsockname()[:2]
        log.info("ready on ws://%s:%d/v1/realtime", f"[{host}]" if ":" in host else host, port)


async def _obey_signals(server: App) -> None:
    """The first one ends the sessions in good order, the second one everything at once."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            server.stop()
            break
        async for number in signals:
            os._exit(128 + number)
