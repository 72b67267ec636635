"""The ``voicechat`` command: generate, synthesize, verify."""

import json
import shutil
import sys
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from voicechat_core.errors import ContextLimitError, InputError, VoiceChatError
from voicechat_core.progress import discard

if TYPE_CHECKING:
    from voicechat_core.offline import GenerationResult

__all__ = ["main"]

app = typer.Typer(
    help="Full-duplex speech with NVIDIA NemotronLabs VoiceChat on MLX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command. A deliberate error is one line on stderr and status 1; misuse of an option is status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a letter is no reason to fail
    try:
        app()
    except InputError as error:
        _fail(error, status=1 if isinstance(error, ContextLimitError) else 2)
    except VoiceChatError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "mlx":
            raise
        _fail("MLX is not installed: install voicechat-core[mlx], or voicechat-core[cuda] for CUDA 13")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: Exception | str, status: int = 1) -> NoReturn:
    print("voicechat:", str(error).replace("\n", "\\n"), file=sys.stderr)
    sys.exit(status)


def _say(text: str) -> None:
    """Print, and notice at once if nobody can read it."""
    if sys.stdout is None:
        raise VoiceChatError("standard output is closed")
    try:
        print(text, flush=True)
    except OSError as error:
        discard(sys.stdout)
        raise VoiceChatError(f"standard output cannot be written: {error}") from error


def _print_version(wanted: bool) -> None:
    if wanted:
        print(version("voicechat-core"))
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Full-duplex speech with NVIDIA NemotronLabs VoiceChat on MLX."""


@app.command()
def generate(
    model: Annotated[
        Path, typer.Option("-m", "--model", readable=False, help="Checkpoint directory in the published layout.")
    ],
    audio: Annotated[
        Path, typer.Option("--audio", readable=False, help="What the user says: WAV, FLAC, Ogg; any rate.")
    ],
    output_audio: Annotated[
        Path, typer.Option("--output-audio", help="Where the answer goes: 22,050 Hz mono PCM16 WAV.")
    ] = Path("response.wav"),
    system_prompt: Annotated[
        str | None, typer.Option("-p", "--system-prompt", help="Default: the checkpoint's own; '' for none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the voice's random draws.", min=0)] = 0,
    extra_seconds: Annotated[float, typer.Option(help="Silence to listen to after the recording.", min=0)] = 0.0,
    max_frames: Annotated[int | None, typer.Option(help="Stop after this many 80 ms frames.", min=0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer a recording: print what was said and answered, write the spoken answer."""
    from voicechat_core.audio import check_writable, read_audio, write_wav
    from voicechat_core.config import INPUT_SAMPLE_RATE
    from voicechat_core.offline import check_arguments
    from voicechat_core.progress import position_progress
    from voicechat_core.voicechat import load

    # What can be refused is refused before the work that it would cost.
    check_arguments(system_prompt, seed, extra_seconds, max_frames)
    check_writable(output_audio)
    _refuse_overwriting(output_audio, [audio, *model.glob("*.json"), *model.glob("*.safetensors"), *model.glob("*/*")])
    samples = read_audio(audio, INPUT_SAMPLE_RATE)
    voicechat = load(model)
    with position_progress() as progress:
        result = voicechat.generate(
            samples,
            system_prompt=system_prompt,
            seed=seed,
            extra_decoding_seconds=extra_seconds,
            max_frames=max_frames,
            progress=progress,
        )
    write_wav(output_audio, result.audio, result.sample_rate)
    _say(_as_json(result) if as_json else _as_text(result, output_audio))


def _refuse_overwriting(output: Path, inputs: list[Path]) -> None:
    """The answer must not take the place of what it is made from, by whatever name."""
    for path in inputs:
        if output.is_file() and path.is_file() and output.samefile(path):
            raise InputError(f"{output}: the answer would overwrite its own input {path}")


def _as_json(result: "GenerationResult") -> str:
    names = ("transcript", "text", "function_text", "text_tokens", "function_tokens", "audio_codes", "frames")
    fields = {name: getattr(result, name) for name in (*names, "sample_rate", "seed", "seconds")}
    fields["audio_codes"] = result.audio_codes.tolist()
    return json.dumps(fields)


def _as_text(result: "GenerationResult", output_audio: Path) -> str:
    heard = "(this checkpoint has no transcript branch)" if result.transcript is None else result.transcript
    lines = [f"user:      {_printable(heard)}", f"assistant: {_printable(result.text)}"]
    if result.function_text:
        lines.append(f"function:  {_printable(result.function_text)}")
    return "\n".join([*lines, f"{output_audio}: {result.frames} frames, {result.seconds:.2f} s"])


def _printable(text: str) -> str:
    """Text that cannot move the cursor or ring the bell, whatever a model says."""
    return "".join(c if c.isprintable() else "�" for c in text.replace("\n", " "))


@app.command()
def synthesize(
    directory: Annotated[Path, typer.Argument(metavar="DST", help="A new or empty directory.")],
    seed: Annotated[int, typer.Option(help="Of the weights.", min=0)] = 0,
    preset: Annotated[str, typer.Option(help="tiny, mid or deep.")] = "tiny",
) -> None:
    """Write a checkpoint with random weights and true structure."""
    from voicechat_core.synthetic import synthesize as write

    parameters = write(directory, seed=seed, preset=preset)
    _say(f"{directory}: {preset}, seed {seed}, {parameters:,} parameters")


@app.command()
def verify(
    goldens: Annotated[Path, typer.Argument(metavar="GOLDENS_DIR", help="Holds checkpoint/, goldens/, manifest.json.")],
) -> None:
    """Compare every stage with a folder of goldens. Status 1 on any miss."""
    from voicechat_core.verify import report_text
    from voicechat_core.verify import verify as run

    report = run(goldens)
    _say(report_text(report, max(100, shutil.get_terminal_size((160, 24)).columns)))
    if not report.passed:
        raise typer.Exit(1)
