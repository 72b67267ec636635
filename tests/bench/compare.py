"""Our session beside the peer's, in turns on one machine: ``python -m tests.bench.compare``; see README.md here.

Two processes, each in its own environment; or one process (``--in-process``) where both must share a GPU.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tests.bench.checkpoints import FORMATS, positions_in, quantization_of, set_default_prompt, write_checkpoint
from tests.bench.measure import Sizes, measure
from tests.bench.prompts import prompt_of
from tests.bench.serving import Remote
from tests.bench.subject import Subject
from tests.bench.table import table
from voicechat_core.compilation import COMPILES

ROOT = Path(__file__).parents[2]
COUNTED = "deep"


@dataclass(frozen=True)
class Pair:
    """Both, loaded, and what they have loaded."""

    ours: Subject
    peer: Subject
    description: Path  # a directory with the config and the tokenizer


class MismatchError(Exception):
    """The two would not be compared on the same ground."""


def main() -> int:
    options = _options()
    try:
        found = compare(options)
    except MismatchError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument("--preset", default="mid", help="tiny, mid, deep; full (the 11B's sizes, drawn)")
    parser.add_argument("--stored", default="float32", choices=FORMATS, help="format of the weights")
    parser.add_argument("--drawn", action="store_true", help="weights drawn on the device, not written (full: always)")
    parser.add_argument("--in-process", action="store_true", help="both in this process (drawn weights: always)")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter of the peer's environment")
    parser.add_argument("--compile", default="auto", choices=COMPILES, help="our steps")
    parser.add_argument("--positions", type=int, default=170, help="of prompts: the checkpoint's own, and fresh ones")
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--staged-frames", type=int, default=50)
    parser.add_argument("--beginnings", type=int, default=3, help="sessions begun, for starts and first frames")
    parser.add_argument("--no-count", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    options.drawn |= options.preset == "full"
    options.in_process |= options.drawn
    return options


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Load both, look whether they stand on the same ground, measure.

    Raises:
        MismatchError: when MLX or BLAS are not the same on both sides.
    """
    sizes = Sizes(options.frames, options.staged_frames)
    with tempfile.TemporaryDirectory() as folder, _pair(options, Path(folder)) as pair:
        check_ground(pair.ours.facts(), pair.peer.facts())
        count = positions_in(pair.description)
        prompts = [prompt_of(options.positions, count, seed=1 + index) for index in range(options.beginnings)]
        found = measure(pair.ours, pair.peer, prompts, sizes)
        facts = {"ours": pair.ours.facts(), "peer": pair.peer.facts()}
    return {
        "date": date.today().isoformat(),
        "checkpoint": f"preset {options.preset}, {options.stored}{', drawn on the device' if options.drawn else ''}",
        "prompt_positions": options.positions,
        "in_process": options.in_process,
        **facts,
        **found,
        "counted_preset": COUNTED,
        "counts": {} if options.no_count or options.in_process else _counts(options),
    }


def check_ground(ours: dict[str, Any], peer: dict[str, Any]) -> None:
    """Refuse two backends: what is compared then is not the two programs.

    Raises:
        MismatchError: naming what differs, and both values.
    """
    for key, own in ours["backend"].items():
        theirs = peer["backend"][key]
        if own != theirs:
            raise MismatchError(f"{key}: ours is {own}, the peer's {theirs}; both need the same MLX and BLAS")


@contextmanager
def _pair(options: argparse.Namespace, folder: Path) -> Iterator[Pair]:
    if options.drawn:
        yield _drawn(options, folder)
        return
    checkpoint = write_checkpoint(folder, options.preset, options.stored)
    set_default_prompt(checkpoint, options.positions)
    if options.in_process:
        yield _loaded(checkpoint, options)
        return
    with ExitStack() as stack:
        ours, peer = (stack.enter_context(remote) for remote in _remotes(options, checkpoint))
        yield Pair(ours, peer, checkpoint)


def _remotes(options: argparse.Namespace, checkpoint: Path, *words: str) -> Iterator[Remote]:
    ours = [sys.executable, "-m", "tests.bench.own", str(checkpoint), "--compile", options.compile]
    peer = [options.peer_python, "-m", "tests.bench.peer", str(checkpoint)]
    for command in (ours, peer):
        yield Remote([*command, *words], ROOT)


def _packed(options: argparse.Namespace) -> tuple[int, int] | None:
    how = quantization_of(options.stored)
    return None if how is None else (how.bits, how.group_size)


def _loaded(checkpoint: Path, options: argparse.Namespace) -> Pair:
    from tests.bench.own import Own
    from tests.bench.peer import Peer
    from voicechat_core import load
    from voicechat_core.weights import read_tensors

    ours = Own(load(checkpoint, compile=options.compile))
    return Pair(ours, Peer.of_tensors(checkpoint, read_tensors(checkpoint), _packed(options)), checkpoint)


def _drawn(options: argparse.Namespace, folder: Path) -> Pair:
    from tests.bench.drawn import drawn_tensors, write_description
    from tests.bench.own import Own
    from tests.bench.peer import Peer
    from voicechat_core.config import VoiceChatConfig
    from voicechat_core.tokenizer import Tokenizer

    write_description(folder, options.preset)
    set_default_prompt(folder, options.positions)
    config = VoiceChatConfig.from_file(folder / "config.json")
    tokenizer = Tokenizer.from_directory(folder, config.text_config.vocab_size)
    dtype, how = FORMATS[options.stored][0], quantization_of(options.stored)

    def draw() -> dict[str, Any]:
        return drawn_tensors(config, tokenizer, dtype=dtype, quantization=how)

    ours = Own.of_tensors(folder, draw(), options.compile)
    return Pair(ours, Peer.of_tensors(folder, draw(), _packed(options)), folder)


def _counts(options: argparse.Namespace) -> dict[str, Any]:
    """Of a session each, past its beginning, on the preset that has the 11B's structure."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checkpoint = write_checkpoint(Path(folder), COUNTED, "float32")
        sides = [stack.enter_context(remote) for remote in _remotes(options, checkpoint, "--count")]
        return {name: _count(side) for name, side in zip(("ours", "peer"), sides, strict=True)}


def _count(side: Subject, before: int = 6, frames: int = 4) -> dict[str, Any]:
    side.open("")
    for _ in range(before):
        side.frame()
    return side.count(frames)


if __name__ == "__main__":
    sys.exit(main())
