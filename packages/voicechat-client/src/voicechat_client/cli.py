"""The ``voicechat-client`` command: its options, what they mean together, and its exit status."""

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import trio
import typer

from voicechat_client.answer import Answer
from voicechat_client.check import Difference, compare, generate
from voicechat_client.client import Conversation, connect
from voicechat_client.errors import ClientError
from voicechat_client.interrupts import InterruptedBySignal, until_interrupted
from voicechat_client.outputs import Outputs
from voicechat_client.pacing import Pacer
from voicechat_client.report import report
from voicechat_client.send import blocks, send
from voicechat_client.view import watching
from voicechat_core import wire
from voicechat_core.audio_stream import AudioReader
from voicechat_core.errors import InputError, VoiceChatError
from voicechat_core.keys import KEY_VARIABLE, Key, read_key
from voicechat_core.terminal import discard

__all__ = ["main"]

EPILOG = """
Examples:

  voicechat-client send question.wav --out answer.wav

  voicechat-client send question.wav --pace fast --json > answer.json

  voicechat-client send question.wav --check CHECKPOINT      (is the server right?)

  voicechat-client talk                                      (needs voicechat-client[mic])

Exit status: 0 all is well; 1 an answer that differs (--check), or a file that cannot be read or written; 2 options
that cannot be meant; 3 no connection; 4 TLS; 5 a key, or not from here; 6 no voicechat server; 7 busy, or still
loading; 8 the session was refused; 9 the connection was lost; 10 the server broke the protocol; 128 and the number of
a signal (130 for Ctrl-C). What had arrived by then is in the files.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True, epilog=EPILOG)

Url = Annotated[str, typer.Option("--url", help="ws://HOST:PORT or wss://...; /v1/realtime is added.")]
KeyFile = Annotated[Path | None, typer.Option(help=f"Holds the server's key; or the variable {KEY_VARIABLE}.")]
CaFile = Annotated[Path | None, typer.Option(help="Certificates to trust, for wss://. Default: the system's.")]
RetryBusy = Annotated[float, typer.Option(help="Seconds to try again while the server is busy or loads.", min=0)]
Prompt = Annotated[
    str | None, typer.Option("-p", "--prompt", help="System prompt; '' for none. Default: the server's.")
]
Seed = Annotated[int, typer.Option(help="Of the voice's random draws.", min=0)]
SkipBeyond = Annotated[
    float | None, typer.Option(help="Let a slow server drop audio beyond this many seconds. Default: it keeps all.")
]


def main() -> None:
    """Run the command. Whatever fails is one line on stderr and the status that ``--help`` lists."""
    try:
        app()
    except ClientError as error:
        _fail(error, error.exit_status)
    except InputError as error:
        _fail(error, 2)
    except VoiceChatError as error:
        _fail(error, 1)
    except InterruptedBySignal as signal:
        _fail(signal, 128 + signal.number)


def _fail(error: Exception, status: int) -> NoReturn:
    print("voicechat-client:", str(error).replace("\n", "\\n"), file=sys.stderr)
    sys.exit(status)


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # whoever read it has enough
        discard(sys.stdout)


@dataclass(frozen=True)
class Server:
    """Where it is, and how to come in."""

    url: str
    key: Key | None
    ca_file: Path | None
    retry_busy: float

    def connect(self) -> Any:
        """See ``client.connect``."""
        return connect(
            self.url,
            key=self.key,
            ca_file=self.ca_file,
            retry_busy_seconds=self.retry_busy,
            waiting=lambda error, seconds: print(f"{error}; again in {seconds:.1f} s", file=sys.stderr),
        )


# ---- send


@dataclass
class Sending:
    """One recording to be sent, and what became of it."""

    server: Server
    audio: Path
    options: wire.SessionOptions
    pace: Literal["realtime", "fast"]
    tail_samples: int
    chunk_samples: int
    outputs: Outputs
    answer: Answer
    sent_samples: int = 0
    differences: list[Difference] = field(default_factory=list)

    async def run(self) -> None:
        """Connect, send, hear; files are finished whatever happens."""
        with ExitStack() as stack:
            reader = stack.enter_context(AudioReader(self.audio))
            stack.enter_context(self.outputs)
            seconds = reader.seconds
            view = stack.enter_context(
                watching(None if seconds is None else seconds + self.tail_samples / wire.INPUT_RATE)
            )

            def heard(event: wire.ServerEvent) -> None:
                self.answer.add(event, trio.current_time())
                self.outputs.heard(event)
                view.heard(event)

            def sent(samples: Any) -> None:
                self.sent_samples += len(samples)
                self.outputs.sent(samples)
                view.sent(samples)

            async with self.server.connect() as conversation:
                await conversation.update(self.options)
                self.answer.started(trio.current_time())
                recording = blocks(reader, self.chunk_samples, tail_samples=self.tail_samples)
                pacer = Pacer(self.pace, wire.INPUT_RATE)
                await send(conversation, recording, pacer=pacer, heard=heard, sent=sent)

    def as_dict(self, error: Exception | None, checked: bool) -> dict[str, Any]:
        """For ``--json``."""
        found: dict[str, Any] = {**self.answer.as_dict(), "sent_samples": self.sent_samples}
        if checked:
            found["check"] = [str(difference) for difference in self.differences]
        if error is not None:
            found["error"] = str(error)
        return found


@app.command("send")
def send_command(
    audio: Annotated[Path, typer.Argument(help="What the user says: any format of libsndfile, any rate and channels.")],
    url: Url = "ws://127.0.0.1:8080",
    out: Annotated[Path, typer.Option(help="The answer: 22,050 Hz mono PCM16 WAV.")] = Path("response.wav"),
    pace: Annotated[str, typer.Option(help="realtime, or fast: as quickly as the server takes it.")] = "realtime",
    tail: Annotated[float, typer.Option(help="Seconds of silence after the recording, to listen on.", min=0)] = 3.0,
    chunk_ms: Annotated[float, typer.Option(help="Milliseconds of audio in a message.", min=0.0625, max=10000)] = 20.0,
    events: Annotated[Path | None, typer.Option(help="Every message, a JSON line each.")] = None,
    stereo: Annotated[Path | None, typer.Option(help="User left, assistant right, on one clock.")] = None,
    transcript: Annotated[Path | None, typer.Option(help="Who said what, and when, as JSON.")] = None,
    prompt: Prompt = None,
    seed: Seed = 0,
    skip_beyond: SkipBeyond = None,
    check: Annotated[
        str | None, typer.Option(help="A checkpoint: compare with what voicechat generate answers with it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")] = False,
    api_key_file: KeyFile = None,
    ca_file: CaFile = None,
    retry_busy: RetryBusy = 0.0,
) -> None:
    """Send a recording, show the conversation, write the answer."""
    if pace not in ("realtime", "fast"):
        raise InputError(f"--pace is {pace!r}; realtime or fast is needed")
    with tempfile.TemporaryDirectory(prefix="voicechat-") as directory:
        spoken = Path(directory) / "spoken.wav" if check is not None else None
        sending = Sending(
            server=Server(url, read_key(api_key_file, os.environ), ca_file, retry_busy),
            audio=audio,
            options=_options(prompt, seed, skip_beyond),
            pace=pace,  # type: ignore[arg-type]
            tail_samples=round(tail * wire.INPUT_RATE),
            chunk_samples=round(chunk_ms * wire.INPUT_RATE / 1000),
            outputs=Outputs(
                wav=out, stereo=stereo, events=events, transcript=transcript, spoken=spoken, inputs=[audio]
            ),
            answer=Answer(seed=seed),
        )
        error = _run(sending)
        if error is None and check is not None and spoken is not None:
            sending.differences = _checked(sending, check, spoken, out)
    if as_json:
        _say(json.dumps(sending.as_dict(error, check is not None)))
    elif error is None or sending.answer.frames:
        _say("\n".join([report(sending.answer, sending.sent_samples), str(out), *_verdict(sending, check)]))
    if error is not None:
        raise error
    if sending.differences:
        raise typer.Exit(1)


def _run(sending: Sending) -> Exception | None:
    try:
        trio.run(until_interrupted, sending.run)
    except (VoiceChatError, InterruptedBySignal) as error:
        return error
    return None


def _options(prompt: str | None, seed: int, skip_beyond: float | None) -> wire.SessionOptions:
    lag = wire.LagPolicy() if skip_beyond is None else wire.LagPolicy(policy="skip", max_seconds=skip_beyond)
    return wire.SessionOptions(system_prompt=prompt, seed=seed, lag=lag)


def _checked(sending: Sending, checkpoint: str, spoken: Path, out: Path) -> list[Difference]:
    """Runs the model once more, so it takes as long as the conversation did."""
    print("checking: voicechat generate runs on what was sent", file=sys.stderr)
    options = sending.options
    offline, sound = generate(checkpoint, spoken, system_prompt=options.system_prompt, seed=options.seed)
    with AudioReader(out, wire.OUTPUT_RATE) as reader:
        return compare(sending.answer.as_dict(), reader.read_pcm16(sending.answer.frames * 1764 + 1), offline, sound)


def _verdict(sending: Sending, check: str | None) -> list[str]:
    if check is None:
        return []
    if sending.differences:
        return [f"check: {difference}" for difference in sending.differences]
    return [f"check: ids, codes, texts and sound of {sending.answer.frames} frames are those of {check}"]


# ---- ping


@app.command("ping")
def ping_command(
    url: Url = "ws://127.0.0.1:8080",
    count: Annotated[int, typer.Option(help="How many.", min=1)] = 3,
    api_key_file: KeyFile = None,
    ca_file: CaFile = None,
    retry_busy: RetryBusy = 0.0,
) -> None:
    """Connect, ask whether the server is there, and say how long it took. Takes its slot meanwhile."""
    server = Server(url, read_key(api_key_file, os.environ), ca_file, retry_busy)
    trio.run(until_interrupted, partial(_ping, server, count))


async def _ping(server: Server, count: int) -> None:
    begun = trio.current_time()
    async with server.connect() as conversation:
        _say(f"{server.url}: {conversation.created.session.id} after {1000 * (trio.current_time() - begun):.1f} ms")
        for _ in range(count):
            _say(f"pong after {1000 * await _one_ping(conversation):.1f} ms")


async def _one_ping(conversation: Conversation) -> float:
    seconds: float = await conversation.ping()
    return seconds
