"""The ``voicechat-client`` command: its options, what they mean together, and its exit status."""

import io
import json
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, NoReturn, ParamSpec, TypeVar

import trio
import typer

from voicechat_client.answer import Answer
from voicechat_client.check import scratch
from voicechat_client.client import ClientLimits, Conversation, connect
from voicechat_client.devices import listing
from voicechat_client.errors import ClientError
from voicechat_client.interrupts import InterruptedBySignal, until_interrupted
from voicechat_client.outputs import Outputs
from voicechat_client.report import report
from voicechat_client.sending import Check, Sending
from voicechat_client.small_tools import small_tools
from voicechat_client.talk import TalkReport
from voicechat_client.talking import hold, talk_report
from voicechat_client.tool_commands import tools_of
from voicechat_client.tools import Tool
from voicechat_client.view import note
from voicechat_core import wire
from voicechat_core.errors import InputError, VoiceChatError
from voicechat_core.files import expanded
from voicechat_core.keys import KEY_VARIABLE, Key, read_key
from voicechat_core.terminal import discard, printable

__all__ = ["main"]

# Each line is a paragraph: single line breaks are not the same in every version of typer.
SENDING = """
Examples:

voicechat-client send question.wav --out answer.wav

voicechat-client send question.wav --pace fast --json > answer.json

arecord -f S16_LE -r 16000 -c 1 | voicechat-client send - --events log.jsonl

voicechat-client send question.wav --check CHECKPOINT

voicechat-client send question.wav --tools --tool 'get_weather=./weather.sh'
"""
TALKING = """
Example:

voicechat-client talk --half-duplex
"""
STATUS = """
Exit status: 0 all is well

1 an answer that differs (--check), or a file that cannot be read or written

2 options or values that make no sense

3 no connection; 4 no TLS, or no trust; 5 a key is needed, or not from here

6 no voicechat server, or ws:// where it speaks TLS; 7 busy, or still loading; 8 the session was refused

9 the connection was lost; 10 the server broke the protocol; 11 a microphone or a speaker

128 and the number of a signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP

What had arrived by then is in the files.
"""
SHORT_STATUS = "Exit status: 0 all is well; voicechat-client --help lists the others."
RECORDED = "the server keeps a recording of what it hears and says"

P = ParamSpec("P")
T = TypeVar("T")

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, epilog=f"{SENDING}{TALKING}{STATUS}"
)

Url = Annotated[str, typer.Option("--url", help="ws://HOST:PORT or wss://...; /v1/realtime is added.")]
KeyFile = Annotated[Path | None, typer.Option(help=f"Holds the server's key; or the variable {KEY_VARIABLE}.")]
CaFile = Annotated[Path | None, typer.Option(help="Certificates to trust, for wss://. Default: the system's.")]
RetryBusy = Annotated[float, typer.Option(help="Seconds to try again while the server is busy or loads.", min=0)]
SilentSeconds = Annotated[
    float, typer.Option(help="Of a server that owes an answer and says nothing, until it is given up; inf: never.")
]
Prompt = Annotated[
    str | None, typer.Option("-p", "--prompt", help="System prompt; '' for none. Default: the server's.")
]
Seed = Annotated[int, typer.Option(help="Of the voice's random draws.", min=0)]
SkipBeyond = Annotated[
    float | None, typer.Option(help="Let a slow server drop audio beyond this many seconds. Default: it keeps all.")
]
Commands = Annotated[
    list[str] | None,
    typer.Option(
        "--tool",
        help="NAME=COMMAND answers what the model calls: it reads the arguments as JSON, and writes the result: JSON, "
        "or a line of text. May be repeated.",
    ),
]
SmallTools = Annotated[
    bool, typer.Option("--tools", help="Answer get_time and roll_dice, in the words of voicechat-small.")
]


def main() -> None:
    """Run the command. Whatever fails is one line on stderr and the status that ``--help`` lists."""
    try:
        _make_streams_safe()
        app()
    except ClientError as error:
        _fail(error, error.exit_status)
    except InputError as error:
        _fail(error, 2)
    except VoiceChatError as error:
        _fail(error, 1)
    except InterruptedBySignal as stopped:
        _fail(stopped, 128 + stopped.number)
    except OSError as error:
        _fail(_unwritable(error), 1)  # the help, which is none of ours to print
    except (KeyboardInterrupt, BaseExceptionGroup) as error:  # a second Ctrl-C, while the first one was obeyed
        if isinstance(error, BaseExceptionGroup) and error.split(KeyboardInterrupt)[0] is None:
            raise
        _fail(Exception("stopped at once"), 128 + signal.SIGINT)


def _make_streams_safe() -> None:
    """A closed stderr must not turn what is for it to stdout; and what a terminal cannot show is no reason to fail."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _fail(error: Exception, status: int) -> NoReturn:
    note(f"voicechat-client: {_line(error)}")
    sys.exit(status)


def _line(error: Exception) -> str:
    """What failed, the same wherever it is told, also if it names a file whose name is no text."""
    return printable(str(error))


def _told_apart(command: Callable[P, T]) -> Callable[P, T]:
    """What the system refuses a command is not about stdout: that is only written by ``_say``, which says so itself."""

    @wraps(command)
    def run(*words: P.args, **options: P.kwargs) -> T:
        try:
            return command(*words, **options)
        except OSError as error:
            raise VoiceChatError(str(error)) from error

    return run


def _unwritable(error: OSError) -> VoiceChatError:
    discard(sys.stdout)
    return VoiceChatError(f"stdout cannot be written: {error.strerror}")


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        failure = _unwritable(error)
        if not isinstance(error, BrokenPipeError):  # whoever read it has enough
            raise failure from None


@dataclass(frozen=True)
class Server:
    """Where it is, and how to come in."""

    url: str
    key: Key | None
    ca_file: Path | None
    retry_busy: float
    silent_seconds: float

    def __post_init__(self) -> None:
        if not self.silent_seconds > 0:
            raise InputError(f"--silent-seconds is {self.silent_seconds:g}; more than 0 is needed")

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Conversation]:
        """See ``client.connect``. A person is told when the server records."""
        async with connect(
            self.url,
            key=self.key,
            ca_file=self.ca_file,
            retry_busy_seconds=self.retry_busy,
            limits=ClientLimits(silent_seconds=self.silent_seconds),
            waiting=lambda error, seconds: note(f"{error}; again in {seconds:.1f} s"),
        ) as conversation:
            if conversation.created.session.recording is True:
                note(RECORDED)
            yield conversation


# ---- send


@app.command("send", epilog=f"{SENDING}\n{SHORT_STATUS}")
@_told_apart
def send_command(
    audio: Annotated[
        Path, typer.Argument(help="What the user says: a file of libsndfile, any rate and channels; - is a pipe.")
    ],
    url: Url = "ws://127.0.0.1:8080",
    out: Annotated[Path, typer.Option(help="The answer: 22,050 Hz mono PCM16 WAV.")] = Path("response.wav"),
    pace: Annotated[str, typer.Option(help="realtime, or fast: as quickly as the server takes it.")] = "realtime",
    tail: Annotated[
        float, typer.Option(help="Seconds of silence after the recording, to listen on.", min=0, max=3600)
    ] = 3.0,
    chunk_ms: Annotated[float, typer.Option(help="Milliseconds of audio in a message.", min=0.0625, max=10000)] = 20.0,
    events: Annotated[
        Path | None, typer.Option(help="Every message, a JSON line each; audio and cumulative text by their length.")
    ] = None,
    stereo: Annotated[Path | None, typer.Option(help="User left, assistant right, on one clock.")] = None,
    transcript: Annotated[Path | None, typer.Option(help="Who said what, and when, as JSON.")] = None,
    prompt: Prompt = None,
    seed: Seed = 0,
    skip_beyond: SkipBeyond = None,
    tool: Commands = None,
    tools: SmallTools = False,
    check: Annotated[
        str | None, typer.Option(help="A checkpoint: compare with what voicechat generate answers with it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")] = False,
    api_key_file: KeyFile = None,
    ca_file: CaFile = None,
    retry_busy: RetryBusy = 0.0,
    silent_seconds: SilentSeconds = ClientLimits.silent_seconds,
) -> None:
    """Send a recording, show the conversation, write the answer."""
    if pace not in ("realtime", "fast"):
        raise InputError(f"--pace is {pace!r}; realtime or fast is needed")
    answerers = _tools(tool, tools)
    if check is not None and answerers:
        raise InputError("--check compares with voicechat generate, which has no tools: leave --tool and --tools out")
    with nullcontext() if check is None else scratch() as folder:
        checking = Check(check, folder / "spoken.wav") if check is not None and folder is not None else None
        audio = expanded(audio)
        sending = Sending(
            connecting=Server(url, read_key(api_key_file, os.environ), ca_file, retry_busy, silent_seconds).connect,
            audio=audio,
            options=_options(prompt, seed, skip_beyond, calls=bool(answerers)),
            pace=pace,  # type: ignore[arg-type]
            tail_samples=round(tail * wire.INPUT_RATE),
            chunk_samples=round(chunk_ms * wire.INPUT_RATE / 1000),
            outputs=Outputs(
                wav=out,
                stereo=stereo,
                events=events,
                transcript=transcript,
                spoken=None if checking is None else checking.spoken,
                inputs=[path for path in (audio, api_key_file, ca_file) if path is not None],
            ),
            answer=Answer(seed=seed),
            check=checking,
            tools=answerers,
        )
        error = _run(sending.run)
        if error is None and checking is not None:
            note("checking: voicechat generate runs on what was sent")
            error = _run(partial(checking.run, sending.answer, sending.options))
    if as_json:
        _say(json.dumps(sending.as_dict(None if error is None else _line(error))))
    elif error is None or sending.answer.frames:
        verdict = [] if checking is None else checking.verdict()
        lines = [printable(line) for line in (str(out), *verdict)]
        _say("\n".join([report(sending.answer, sending.sent_samples), *lines]))
    if error is not None:
        raise error
    if checking is not None and checking.differences:
        raise typer.Exit(1)


def _run(work: Callable[[], Awaitable[None]]) -> Exception | None:
    try:
        trio.run(until_interrupted, work)
    except (VoiceChatError, InterruptedBySignal) as error:
        return error
    return None


def _tools(commands: list[str] | None, small: bool) -> dict[str, Tool]:
    """By their names; a command stands before what is built in."""
    return {**(small_tools() if small else {}), **tools_of(commands or ())}


def _options(prompt: str | None, seed: int, skip_beyond: float | None, *, calls: bool) -> wire.SessionOptions:
    if prompt is not None and prompt != prompt.encode(errors="replace").decode():
        raise InputError("--prompt is no text: UTF-8 is needed")
    if skip_beyond is not None and not wire.FRAME_SECONDS <= skip_beyond < math.inf:
        raise InputError(f"--skip-beyond is {skip_beyond:g}; {wire.FRAME_SECONDS} seconds, a frame, or more are needed")
    lag = wire.LagPolicy() if skip_beyond is None else wire.LagPolicy(policy="skip", max_seconds=skip_beyond)
    return wire.SessionOptions(system_prompt=prompt, seed=seed, lag=lag, function_calls=calls)


# ---- talk


@app.command("talk", epilog=f"{TALKING}\n{SHORT_STATUS}")
@_told_apart
def talk_command(
    url: Url = "ws://127.0.0.1:8080",
    input_device: Annotated[str | None, typer.Option(help="Number, or part of the name, of a microphone.")] = None,
    output_device: Annotated[str | None, typer.Option(help="The same of a speaker.")] = None,
    list_devices: Annotated[bool, typer.Option("--list-devices", help="Show them, and do nothing else.")] = False,
    half_duplex: Annotated[
        bool, typer.Option("--half-duplex", help="Mute the microphone while the speaker sounds.")
    ] = False,
    prompt: Prompt = None,
    seed: Seed = 0,
    skip_beyond: SkipBeyond = None,
    tool: Commands = None,
    tools: SmallTools = False,
    api_key_file: KeyFile = None,
    ca_file: CaFile = None,
    retry_busy: RetryBusy = 0.0,
    silent_seconds: SilentSeconds = ClientLimits.silent_seconds,
) -> None:
    """Talk by microphone and speaker until Ctrl-C. Needs the extra: pip install "voicechat-client\\[mic]"."""
    from voicechat_client import mic  # here only: it is an extra

    if list_devices:
        return _say(listing(mic.devices()) or "there are no audio devices")
    server = Server(url, read_key(api_key_file, os.environ), ca_file, retry_busy, silent_seconds)
    answerers = _tools(tool, tools)
    answer, counts = Answer(seed=seed), TalkReport()
    error: VoiceChatError | None = None
    with mic.open_microphone(input_device) as microphone, mic.open_speaker(output_device) as speaker:
        talking = partial(
            hold,
            server.connect,
            microphone,
            speaker,
            options=_options(prompt, seed, skip_beyond, calls=bool(answerers)),
            half_duplex=half_duplex,
            answer=answer,
            counts=counts,
            tools=answerers,
        )
        try:
            trio.run(talking)
        except VoiceChatError as failure:
            error = failure
    if error is None or answer.frames:
        _say(talk_report(answer, counts))
    if error is not None:
        raise error
    return None


# ---- ping


@app.command("ping", epilog=SHORT_STATUS)
@_told_apart
def ping_command(
    url: Url = "ws://127.0.0.1:8080",
    count: Annotated[int, typer.Option(help="How many.", min=1)] = 3,
    api_key_file: KeyFile = None,
    ca_file: CaFile = None,
    retry_busy: RetryBusy = 0.0,
    silent_seconds: SilentSeconds = ClientLimits.silent_seconds,
) -> None:
    """Connect, ask whether the server is there, and say how long it took. Meanwhile nobody else can talk to it."""
    server = Server(url, read_key(api_key_file, os.environ), ca_file, retry_busy, silent_seconds)
    trio.run(until_interrupted, partial(_ping, server, count))


async def _ping(server: Server, count: int) -> None:
    begun = trio.current_time()
    async with server.connect() as conversation:
        _say(f"{server.url}: {conversation.created.session.id} after {1000 * (trio.current_time() - begun):.1f} ms")
        for _ in range(count):
            _say(f"pong after {1000 * await conversation.ping():.1f} ms")
