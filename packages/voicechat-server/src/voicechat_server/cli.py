"""The ``voicechat-server`` command: its options, and what they mean together."""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from voicechat_core.builtin import SMALL
from voicechat_core.errors import InputError, VoiceChatError
from voicechat_server.app import App
from voicechat_server.auth import KEY_VARIABLE, Gate, read_key, require_safe_listening
from voicechat_server.http import HttpLimits
from voicechat_server.metrics import Metrics
from voicechat_server.protocol import Limits
from voicechat_server.recording import Recordings
from voicechat_server.replay import replay
from voicechat_server.running import Place, run, tls_context
from voicechat_server.settings import Settings
from voicechat_server.transport import SocketLimits
from voicechat_server.worker import Worker

if TYPE_CHECKING:
    from voicechat_core import VoiceChat

__all__ = ["main"]

log = logging.getLogger(__name__)

EPILOG = """
Limits in seconds may be "inf". Status: 0 after a signal, 1 when it cannot serve (a checkpoint, a port), 2 for options
that cannot be meant; 128 and the signal's number after a second signal.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, invoke_without_command=True, epilog=EPILOG)


def main() -> None:
    """Run the command. A deliberate error is one line on stderr and status 1; misuse of an option is status 2."""
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s", level=logging.INFO)
    try:
        app()
    except InputError as error:
        _fail(error, 2)
    except VoiceChatError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "mlx":
            raise
        _fail("MLX is not installed: install voicechat-server[mlx], or voicechat-server[cuda] for CUDA 13", 1)


def _fail(error: Exception | str, status: int) -> NoReturn:
    print("voicechat-server:", str(error).replace("\n", "\\n"), file=sys.stderr)
    sys.exit(status)


def _limit(help_text: str, **options: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel="Limits", **options)


def _door(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel="Who may connect")


@app.callback()
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Option("-m", "--model", help="A checkpoint: a folder, voicechat-small or a hub name.")
    ] = SMALL,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any that is free.", min=0, max=65535)] = 8080,
    system_prompt: Annotated[
        str | None, typer.Option(help="For sessions that ask for none. Default: the checkpoint's own.")
    ] = None,
    precision: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    compile: Annotated[
        str, typer.Option(help="auto, on or off: whether a frame's steps are compiled. auto is on, where possible.")
    ] = "auto",
    tts_context_frames: Annotated[
        int | None, typer.Option(help="Frames of speech that are looked back on. Default: all.", min=1)
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Keep every session in a folder of its own in here, and tell the clients so.")
    ] = None,
    api_key_file: Annotated[
        Path | None, _door(f"Holds the key that clients must give; or the variable {KEY_VARIABLE}.")
    ] = None,
    allow_origin: Annotated[list[str] | None, _door("Origin of web pages that may connect; may be repeated.")] = None,
    insecure: Annotated[bool, _door("Listen on other addresses without a key.", "--insecure")] = False,
    tls_cert: Annotated[Path | None, _door("PEM file of a certificate: speak TLS (wss, https).")] = None,
    tls_key: Annotated[Path | None, _door("PEM file of its key, where it is not in the same file.")] = None,
    session_seconds: Annotated[float, _limit("Of a session, by the clock and in audio: the slot comes round.")] = 600,
    configure_seconds: Annotated[float, _limit("Until session.update: a slot is for use.")] = 30,
    idle_seconds: Annotated[float, _limit("In which a session neither hears nor says anything.")] = 120,
    queued_seconds: Annotated[float, _limit("Of audio that waits; past it the server reads no further.")] = 120,
    queued_events: Annotated[int, _limit("Events that wait for a client; past it the model pauses.", min=1)] = 256,
    write_seconds: Annotated[float, _limit("For a client to take a message; then it is closed (1008).")] = 10,
    tool_seconds: Annotated[float, _limit("For a client to answer a call; then the model reads an error.")] = 10,
    output_chars: Annotated[int, _limit("Of a function's output, as JSON.", min=1)] = Limits.output_chars,
    prompt_chars: Annotated[int, _limit("Of a client's system prompt: it is read step by step.", min=1)] = (
        Limits.prompt_chars
    ),
    message_chars: Annotated[int, _limit("Of one message; past it 1009. As it is, 120 s of audio.", min=1024)] = (
        SocketLimits.message_chars
    ),
    header_bytes: Annotated[int, _limit("Of a request's header.", min=256)] = HttpLimits.header_bytes,
    header_seconds: Annotated[float, _limit("For the whole header to come.")] = 10,
    connections: Annotated[int, _limit("Open at once, of any kind: each is a file.", min=2)] = 100,
) -> None:
    """Serve live speech on ws://HOST:PORT/v1/realtime: one session at a time."""
    if context.invoked_subcommand is not None:
        _refuse_options_before(context)
        return
    key = read_key(api_key_file, os.environ)
    require_safe_listening(host, key, insecure=insecure)
    gate = Gate(key, origins=allow_origin or [])
    place = Place(host, port, tls_context(tls_cert, tls_key))
    name, checkpoint = _checkpoint(model)
    settings = Settings(
        model=name,
        system_prompt=system_prompt,
        tts_context_frames=tts_context_frames,
        limits=Limits(
            configure_seconds, idle_seconds, session_seconds, prompt_chars=prompt_chars, output_chars=output_chars
        ),
        tool_seconds=tool_seconds,
        http_limits=HttpLimits(header_bytes, header_seconds),
        socket_limits=SocketLimits(message_chars),
        write_seconds=write_seconds,
        connections=connections,
        queued_seconds=queued_seconds,
        queued_events=queued_events,
    )
    load = _loader(checkpoint, precision, compile)
    recordings = None
    if record is not None:
        recordings = Recordings(record, model=name, checkpoint=checkpoint, precision=precision)
        recordings.prepare()
        load = recordings.loading(load)
    metrics = Metrics()
    worker = Worker(
        load,
        most_input_seconds=settings.queued_seconds,
        most_results=settings.queued_events,
        warm_prompt=system_prompt,
        warm_context_frames=tts_context_frames,
        frame_took=metrics.frame_took,
    )
    run(worker, App(worker, settings, gate, metrics, recordings), place)


def _refuse_options_before(context: typer.Context) -> None:
    """They are a server's, and would be passed over without a word."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise InputError(f"{option} stands before {context.invoked_subcommand}, whose options come after it")


@app.command("replay")
def replay_command(
    folder: Annotated[Path, typer.Argument(help="Of one session, inside what --record named.")],
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="A checkpoint. Default: the one that the recording names.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a recorded session again and report the first difference: status 0 if there is none, 1 if there is."""
    report = replay(folder, model)
    print(json.dumps(report.as_dict()) if as_json else report.text())
    raise typer.Exit(0 if report.same else 1)


def _checkpoint(model: str) -> tuple[str, Path]:
    """What peers are told that it is, and where it lies, of which they are told nothing."""
    from voicechat_core.hub import locate

    directory = locate(model)
    return (directory.resolve().name if Path(model).expanduser().is_dir() else model), directory


def _loader(checkpoint: Path, precision: str, compile: str) -> "Callable[[], VoiceChat]":
    from voicechat_core.compilation import check_compile
    from voicechat_core.precision import check_precision
    from voicechat_core.voicechat import load

    return partial(load, checkpoint, precision=check_precision(precision), compile=check_compile(compile))
