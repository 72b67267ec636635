"""The ``voicechat`` command: generate, inspect, list, quantize, convert, synthesize, bench, verify."""

import json
import logging
import shutil
import signal
import sys
import time
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from voicechat_core.errors import ContextLimitError, InputError, VoiceChatError
from voicechat_core.files import expanded
from voicechat_core.profile import profile_json, profile_text
from voicechat_core.terminal import discard, printable

if TYPE_CHECKING:
    from voicechat_core.convert import Converted
    from voicechat_core.offline import GenerationResult
    from voicechat_core.quantization import Quantization
    from voicechat_core.streaming import Streamed

__all__ = ["main"]

CHECKPOINT_HELP = (
    "A checkpoint: its directory, voicechat-small (comes with this package), or its name on the hub, from where it is "
    "downloaded once."
)
PRECISION_HELP = "auto (as the checkpoint's dense weights are stored), float32 or bfloat16."
COMPILE_HELP = "auto, on or off: whether a frame's steps are compiled. auto is on, where that is possible."
PROMPT_STEPS_HELP = (
    "Step the speech decoder over the system prompt, as NVIDIA's offline run does; its live one does not."
)
CONTEXT_HELP = "Positions that the speech decoder looks back at besides the voice prompt. Default: all, exactly."
PUBLISHED_BITS = (4, 8)

log = logging.getLogger(__name__)

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
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # like an interrupt: what is half written goes
            signal.signal(getattr(signal, name), _stop)
    logging.basicConfig(format="voicechat: warning: %(message)s", level=logging.WARNING)
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


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


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
    model: Annotated[str, typer.Option("-m", "--model", help=CHECKPOINT_HELP)],
    audio: Annotated[
        Path,
        typer.Option(
            "--audio",
            readable=False,
            help="What the user says: any format of libsndfile (WAV, FLAC, Ogg, MP3), any rate.",
        ),
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
    precision: Annotated[str, typer.Option(help=PRECISION_HELP)] = "auto",
    compile: Annotated[str, typer.Option(help=COMPILE_HELP)] = "auto",
    tts_prompt_steps: Annotated[bool, typer.Option(help=PROMPT_STEPS_HELP)] = True,
    tts_context_frames: Annotated[int | None, typer.Option(help=CONTEXT_HELP, min=1)] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Through a live session, frame by frame.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="With --stream: time every stage. Takes more than twice the time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Answer a recording: print what was said and answered, write the spoken answer."""
    from voicechat_core.arguments import check_arguments
    from voicechat_core.audio import check_writable, read_audio, write_wav
    from voicechat_core.compilation import check_compile, say_what_takes_long
    from voicechat_core.config import INPUT_SAMPLE_RATE
    from voicechat_core.hub import locate
    from voicechat_core.precision import check_precision
    from voicechat_core.streaming import generate_live
    from voicechat_core.terminal import progress
    from voicechat_core.voicechat import load

    # What can be refused is refused before the work that it would cost.
    check_arguments(system_prompt, seed, extra_seconds, max_frames, tts_context_frames)
    if profile and not stream:
        raise InputError("--profile times the frames of a live session: give --stream too")
    wanted, compiling = check_precision(precision), check_compile(compile)
    check_writable(output_audio)
    _refuse_overwriting(output_audio, [audio])
    samples = read_audio(audio, INPUT_SAMPLE_RATE)
    directory = locate(model)
    parts = [path for pattern in ("*.json", "*.safetensors", "*/*") for path in directory.glob(pattern)]
    _refuse_overwriting(output_audio, parts)
    say_what_takes_long(compiling)
    voicechat = load(directory, precision=wanted, compile=compiling)
    with progress("positions") as report:
        options: dict[str, Any] = {
            "system_prompt": system_prompt,
            "seed": seed,
            "extra_decoding_seconds": extra_seconds,
            "max_frames": max_frames,
            "tts_prompt_steps": tts_prompt_steps,
            "tts_context_frames": tts_context_frames,
            "progress": report,
        }
        streamed = generate_live(voicechat, samples, profile=profile, **options) if stream else None
        result = voicechat.generate(samples, **options) if streamed is None else streamed.result
    write_wav(output_audio, result.audio, result.sample_rate)
    shown = streamed if profile else None
    _say(_as_json(result, shown) if as_json else _as_text(result, output_audio, shown))


def _width() -> int:
    """Columns for a table: the terminal's, but never so few that names break."""
    return max(100, shutil.get_terminal_size((160, 24)).columns)


def _refuse_overwriting(output: Path, inputs: list[Path]) -> None:
    """The answer must not take the place of what it is made from, by whatever name."""
    for path in inputs:
        if output.is_file() and path.is_file() and output.samefile(path):
            raise InputError(f"{output}: the answer would overwrite its own input {path}")


def _as_json(result: "GenerationResult", profile: "Streamed | None") -> str:
    fields = {name: value for name, value in vars(result).items() if name != "audio"}
    fields["audio_codes"] = result.audio_codes.tolist()
    if profile is not None:
        fields["profile"] = profile_json(profile.timings, profile.staged)
    return json.dumps(fields)


def _as_text(result: "GenerationResult", output_audio: Path, profile: "Streamed | None") -> str:
    heard = "(this checkpoint has no transcript branch)" if result.transcript is None else result.transcript
    lines = [f"user:      {printable(heard, ' ')}", f"assistant: {printable(result.text, ' ')}"]
    if result.function_text:
        lines.append(f"function:  {printable(result.function_text, ' ')}")
    lines.append(f"{output_audio}: {result.frames} frames, {result.seconds:.2f} s")
    if profile is not None:
        lines += ["", profile_text(profile.timings, profile.staged)]
    return "\n".join(lines)


@app.command()
def synthesize(
    directory: Annotated[Path, typer.Argument(metavar="DST", help="A new or empty directory.")],
    seed: Annotated[int, typer.Option(help="Of the weights.", min=0)] = 0,
    preset: Annotated[str, typer.Option(help="tiny, mid or deep.")] = "tiny",
    dtype: Annotated[str, typer.Option(help="What floats are stored in: float32 or bfloat16.")] = "float32",
) -> None:
    """Write a checkpoint with random weights and true structure."""
    from voicechat_core.synthetic import synthesize as write

    directory = expanded(directory)
    parameters = write(directory, seed=seed, preset=preset, dtype=dtype)
    _say(f"{directory}: {preset}, seed {seed}, {parameters:,} parameters in {dtype}")


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help=CHECKPOINT_HELP)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Show what a checkpoint holds, and what is missing, left over or inconsistent. Status 1 if anything is."""
    from voicechat_core.hub import locate
    from voicechat_core.inspection import inspect as run
    from voicechat_core.inspection_report import inspection_json, inspection_text

    found = run(locate(checkpoint))
    _say(json.dumps(inspection_json(found)) if as_json else inspection_text(found, _width()))
    if not found.passed:
        raise typer.Exit(1)


@app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Show which families of models run here, their published checkpoints, and which of them are on this machine."""
    from voicechat_core.catalogue import listing, listing_text

    found = listing()
    _say(json.dumps(found) if as_json else listing_text(found))


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A dense checkpoint: its directory or its hub name.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A directory that does not exist.")],
    bits: Annotated[int, typer.Option(help="Of a packed number: 4 or 8.")],
    group_size: Annotated[
        int, typer.Option(help="How many numbers of a row share a scale and a bias: 32, 64 or 128.")
    ] = 64,
    dtype: Annotated[
        str | None, typer.Option(help="Of what stays dense: float32 or bfloat16. Default: as it is in SRC.")
    ] = None,
) -> None:
    """Pack the language model's matrices, its embedding and its heads, as the published 4-bit and 8-bit builds are."""
    from voicechat_core.convert import check_quantization, check_stored, check_target
    from voicechat_core.quantization import Quantization

    if bits not in PUBLISHED_BITS:
        raise InputError(f"bits is {bits}; one of {', '.join(map(str, PUBLISHED_BITS))} is needed")
    quantization = Quantization(bits, group_size)
    check_quantization(quantization)
    if dtype is not None:
        check_stored(dtype)
    target = expanded(target)
    check_target(target)
    done = _convert(source, target, quantization, dtype)
    count = str(len(done.modules))
    if done.left_dense:
        count += f" of {len(done.modules) + len(done.left_dense)}"
        log.warning("left dense, since %d does not divide their inputs: %s", group_size, ", ".join(done.left_dense))
    _say(f"{target}: {count} modules in {quantization}; {_sizes(done)}")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A dense checkpoint: its directory or its hub name.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A directory that does not exist.")],
    dtype: Annotated[str, typer.Option(help="What floats are to be stored in: float32 or bfloat16.")],
) -> None:
    """Store a dense checkpoint's floats in another format."""
    from voicechat_core.convert import check_stored, check_target

    check_stored(dtype)
    target = expanded(target)
    check_target(target)
    done = _convert(source, target, None, dtype)
    _say(f"{target}: {dtype}; {_sizes(done)}")


def _convert(source: str, target: Path, quantization: "Quantization | None", dtype: str | None) -> "Converted":
    """What can be refused without the source has been: from here on it may be downloaded."""
    from voicechat_core.convert import convert as run
    from voicechat_core.hub import locate
    from voicechat_core.terminal import progress

    directory = locate(source, notices=True)
    with progress("tensors") as report:
        return run(directory, target, quantization, dtype=dtype, progress=report)


def _sizes(done: "Converted") -> str:
    return f"{done.bytes_after / 1e9:.3f} GB, from {done.bytes_before / 1e9:.3f} GB"


@app.command()
def bench(
    model: Annotated[str, typer.Option("-m", "--model", help=CHECKPOINT_HELP)],
    frames: Annotated[int, typer.Option(help="Frames of 80 ms that the session lasts.", min=4)] = 750,
    warmup: Annotated[int, typer.Option(help="Frames at the beginning that count in no percentile.", min=2)] = 2,
    minutes: Annotated[
        float | None, typer.Option(help="Instead of --frames: 5 minutes are 3,750.", min=0.01, max=10_000)
    ] = None,
    tts_context_frames: Annotated[int | None, typer.Option(help=CONTEXT_HELP, min=1)] = None,
    effect: Annotated[
        bool, typer.Option("--effect", help="Also measure what --tts-context-frames changes in values.")
    ] = False,
    precision: Annotated[str, typer.Option(help=PRECISION_HELP)] = "auto",
    compile: Annotated[str, typer.Option(help=COMPILE_HELP)] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Measure a live session: a frame's percentiles, its stages, starts, memory, exact counts; beginning and end."""
    from voicechat_core.bench import bench as run
    from voicechat_core.bench import bench_json, bench_text, check_effect, context_effect
    from voicechat_core.compilation import check_compile, say_what_takes_long
    from voicechat_core.hub import locate
    from voicechat_core.precision import check_precision
    from voicechat_core.terminal import progress
    from voicechat_core.voicechat import load

    wanted, compiling = check_precision(precision), check_compile(compile)
    count = frames if minutes is None else max(warmup + 2, round(minutes * 750))
    if effect and tts_context_frames is None:
        raise InputError("--effect measures --tts-context-frames: give that too")
    if effect and tts_context_frames is not None:
        check_effect(count, tts_context_frames)
    directory, began = locate(model), time.perf_counter()
    say_what_takes_long(compiling)
    voicechat = load(directory, precision=wanted, compile=compiling)
    took = 1000 * (time.perf_counter() - began)
    options: dict[str, Any] = {"warmup": warmup, "tts_context_frames": tts_context_frames, "load_ms": took}
    with progress("frames") as report:
        found = run(voicechat, frames=count, progress=report, **options)
    changed = context_effect(voicechat, count, tts_context_frames) if effect and tts_context_frames else None
    _say(json.dumps(bench_json(found, changed)) if as_json else bench_text(found, changed))


@app.command()
def verify(
    goldens: Annotated[
        Path, typer.Argument(metavar="GOLDENS_DIR", help="Holds goldens/, manifest.json, and checkpoint/ or its name.")
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(help="Another build of the same weights, by directory or hub name: measured, not judged."),
    ] = None,
    precision: Annotated[str, typer.Option(help="float32; auto and bfloat16 are measured, not judged.")] = "float32",
    compile: Annotated[str, typer.Option(help=COMPILE_HELP)] = "auto",
) -> None:
    """Compare every stage with a folder of goldens. Status 1 on any miss."""
    from voicechat_core.compilation import check_compile
    from voicechat_core.hub import locate
    from voicechat_core.precision import check_precision
    from voicechat_core.verify import report_text
    from voicechat_core.verify import verify as run

    wanted, compiling = check_precision(precision), check_compile(compile)
    build = None if checkpoint is None else locate(checkpoint)
    report = run(goldens, checkpoint=build, precision=wanted, compile=compiling)
    _say(report_text(report, _width()))
    if not report.passed:
        raise typer.Exit(1)
