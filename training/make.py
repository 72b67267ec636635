"""``voicechat-small`` from nothing but packages: ``python -m training.make [STEP ...]``, in the order of ``NAMES``.

Each step is a command of this folder in a process of its own. One whose outputs are there and no older than its inputs
is left out; a training that was interrupted goes on from its last minute. Programs are no inputs: after a change of one
``--again STEP`` says so, and what follows from its outputs follows. ``--smoke`` does everything in small, on a CPU.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from training import synthesize
from training.voices import lacking
from voicechat_core.builtin import SMALL
from voicechat_core.shards import INDEX

__all__ = ["NAMES", "Plan", "Step", "main", "run", "steps", "to_do"]

NAMES = ("banks", "codec", "encode", "listening", "speaking", "export", "evaluation")
TRAININGS = {"codec": 225.0, "listening": 700.0, "speaking": 1360.0}  # seconds on an H200, as in README.md
WAYS = {"speaking": ("--paced", "--scale", "4")}  # of the long run; in small there is nothing to choose

ROOT = Path(__file__).parents[1]
OUT = Path("build/training")
CARD = "README.md"  # of a checkpoint

Command = tuple[str, ...]  # a module of this folder and its words
Runner = Callable[[Command], int]  # gives the exit status


@dataclass(frozen=True)
class Step:
    """What one step reads, what it leaves, and the commands that do it.

    ``state`` is a training's file to go on from, and ``anew`` a folder that must not be there before.
    """

    name: str
    commands: tuple[Command, ...]
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    state: Path | None = None
    anew: Path | None = None

    def done(self) -> bool:
        """Whether all outputs are there, none older than an input."""
        return all(file.exists() for file in self.outputs) and _oldest(self.outputs) >= _newest(self.inputs)

    def goes_on(self) -> bool:
        """Whether a training was interrupted after its inputs were made."""
        return self.state is not None and self.state.exists() and _oldest((self.state,)) >= _newest(self.inputs)


def _oldest(files: Sequence[Path]) -> int:
    return min(file.stat().st_mtime_ns for file in files)


def _newest(files: Sequence[Path]) -> int:
    return max((file.stat().st_mtime_ns for file in files), default=0)


@dataclass(frozen=True)
class Plan:
    """Where everything lies, and how much of it there is: seconds of each training, or ``smoke``."""

    data: Path
    out: Path
    seconds: dict[str, float]
    workers: int = 1
    smoke: bool = False
    judge: tuple[str, ...] = ()  # what the evaluation is told of its recogniser

    @property
    def codes(self) -> Path:
        """The assistant's sentences by the codec."""
        return self.out / "codes" / "codes.npz"

    @property
    def checkpoint(self) -> Path:
        """What it all comes to."""
        return self.out / SMALL

    def part(self, name: str) -> Path:
        """The weights that a training leaves."""
        return self.out / name / f"{name}.safetensors"

    def bank(self, name: str) -> Path:
        """The list of a bank."""
        return self.data / f"{name}.json"

    def little(self) -> Command:
        """A word for the commands that can do all of it in small."""
        return ("--smoke",) if self.smoke else ()


def steps(plan: Plan) -> list[Step]:
    """All steps, in order."""
    return [_banks(plan), _codec(plan), _encode(plan), _listening(plan), _speaking(plan), _export(plan), _judge(plan)]


def _banks(plan: Plan) -> Step:
    banks = tuple(plan.bank(name) for name in synthesize.BANKS)
    if plan.smoke:
        return Step("banks", (("training.few", "--out", str(plan.data)),), (), banks)
    words = ("--out", str(plan.data), "--workers", str(plan.workers))
    commands = tuple(("training.synthesize", "--part", part, *words) for part in synthesize.PARTS)
    # A part's own list tells that it is whole; a joined one is there when its first part is.
    return Step("banks", commands, (), (*(plan.bank(part) for part in synthesize.PARTS), *banks))


def _trained(plan: Plan, name: str, data: Path, inputs: tuple[Path, ...], last: str, state: str) -> Step:
    """A training: ``last`` is the file that it writes at its very end, ``state`` where it goes on from."""
    length = plan.little() or ("--seconds", str(plan.seconds[name]), *WAYS.get(name, ()))
    folder = plan.out / name
    command = (f"training.{name}.train", "--data", str(data), "--out", str(folder), *length)
    return Step(name, (command,), inputs, (plan.part(name), folder / last), folder / state)


def _codec(plan: Plan) -> Step:
    state = "state/codec/trainer.safetensors"
    return _trained(plan, "codec", plan.data, (plan.bank("assistant"),), "codec.json", state)


def _encode(plan: Plan) -> Step:
    words = ("--data", str(plan.data), "--codec", str(plan.part("codec")), "--out", str(plan.codes))
    inputs = (plan.bank("assistant"), plan.part("codec"))
    return Step("encode", (("training.codec.encode", *words),), inputs, (plan.codes,))


def _listening(plan: Plan) -> Step:
    # It is judged with users_test, too, but not made from it.
    inputs = (plan.bank("assistant"), plan.bank("users_train"))
    return _trained(plan, "listening", plan.data, inputs, "listening.json", "trainer.safetensors")


def _speaking(plan: Plan) -> Step:
    return _trained(plan, "speaking", plan.codes.parent, (plan.codes,), "generated.npz", "trainer.safetensors")


def _export(plan: Plan) -> Step:
    parts = tuple(plan.part(name) for name in TRAININGS)
    command = ("training.export", *map(str, parts), "--out", str(plan.checkpoint))
    return Step("export", (command,), parts, (plan.checkpoint / INDEX,), anew=plan.checkpoint)


def _judge(plan: Plan) -> Step:
    # What nobody heard is not the whole evaluation.
    figures = plan.out / ("unheard.json" if "--no-judge" in plan.judge else "evaluation.json")
    words = ("--checkpoint", str(plan.checkpoint), "--data", str(plan.data), "--json", str(figures))
    command = ("training.evaluate", *words, *plan.judge, *plan.little())
    return Step("evaluation", (command,), (plan.checkpoint / INDEX, plan.bank("users_test")), (figures,))


# ---- doing them


def to_do(wanted: Sequence[Step], again: Sequence[str] = ()) -> list[str]:
    """The first step that is not done, and those behind it, which may follow from it: what must be possible here."""
    names = [step.name for step in wanted]
    due = [step.name for step in wanted if not step.done() or step.name in again]
    return names[names.index(due[0]) :] if due else []


def run(wanted: Sequence[Step], runner: Runner, again: Sequence[str] = ()) -> None:
    """Do what is not done; those of ``again`` in any case, from their beginning.

    Raises:
        SystemExit: saying what a step lacks, or which command ended with what status.
    """
    for step in wanted:
        anew = step.name in again
        missing = [str(file) for file in step.inputs if not file.exists()]
        if missing:
            raise SystemExit(f"{step.name}: there is no {', no '.join(missing)}")
        if step.done() and not anew:
            _say(f"{step.name}: done already")
            continue
        begun = time.monotonic()
        _do(step, runner, goes_on=step.goes_on() and not anew)
        _say(f"{step.name}: done in {time.monotonic() - begun:.0f} s")


def _do(step: Step, runner: Runner, *, goes_on: bool) -> None:
    kept = _cleared(step.anew) if step.anew is not None else None
    for command in step.commands:
        words = (*command, "--resume") if goes_on else command
        _say(f"{step.name}: python -m {' '.join(words)}")
        if status := runner(words):
            raise SystemExit(f"{step.name}: {command[0]} ended with status {status}; it can be gone on with")
    absent = [str(file) for file in step.outputs if not file.exists()]
    if absent:
        raise SystemExit(f"{step.name}: it ended well and left no {', no '.join(absent)}")
    if step.anew is not None and kept is not None:
        (step.anew / CARD).write_bytes(kept)


def _cleared(folder: Path) -> bytes | None:
    """Take a folder away but for its model card, which somebody wrote by hand."""
    card = folder / CARD
    kept = card.read_bytes() if card.exists() else None
    shutil.rmtree(folder, ignore_errors=True)
    return kept


def _say(line: str) -> None:
    print(line, flush=True)


def _process(command: Command) -> int:
    """A command of this folder in a process of its own, so that each has MLX as it wants it."""
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = _options(arguments)
    names, plan = options.steps or NAMES, _plan(options)
    wanted = [step for step in steps(plan) if step.name in names]
    due = to_do(wanted, options.again)
    if set(due) & set(TRAININGS) and not plan.smoke and mx.default_device().type != mx.gpu:
        raise SystemExit("there is no GPU, and the trainings' seconds are a GPU's; --smoke does all of it in small")
    if "banks" in due and (missing := lacking()):
        raise SystemExit(missing)
    run(wanted, _process, options.again)
    if "export" in names:
        _say(f"{plan.checkpoint}: its model card, {CARD}, is written by hand")


def _plan(options: argparse.Namespace) -> Plan:
    """With ``--smoke`` everything lies in a folder of its own, so that nothing small is taken for the real thing."""
    out = (options.out / "smoke" if options.smoke else options.out).resolve()
    own = options.data is None or options.smoke
    judge: Command = ("--no-judge",) if options.no_judge else ()
    judge += ("--whisper", str(options.whisper.resolve())) if options.whisper else ()
    seconds = {name: getattr(options, f"{name}_seconds") for name in TRAININGS}
    data = out / "data" if own else options.data.resolve()
    return Plan(data, out, seconds, options.workers, options.smoke, judge)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"only these of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of all that is made; {OUT} if not given")
    parser.add_argument("--data", type=Path, help="folder of the banks; data in --out if not given")
    for name, seconds in TRAININGS.items():
        parser.add_argument(f"--{name}-seconds", type=float, default=seconds, help=f"{seconds:.0f} if not given")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that speak the banks")
    parser.add_argument("--again", action="append", default=[], metavar="STEP", help="do this one even if it is done")
    parser.add_argument("--whisper", type=Path, help="the recogniser's folder")
    parser.add_argument("--no-judge", action="store_true", help="evaluate without a recogniser")
    parser.add_argument("--smoke", action="store_true", help="all of it in small, in the folder smoke of --out")
    options = parser.parse_args(arguments)
    for name in (*options.steps, *options.again):
        if name not in NAMES:
            parser.error(f"there is no step {name!r}; the steps are {', '.join(NAMES)}")
    if options.steps and (left := [name for name in options.again if name not in options.steps]):
        parser.error(f"--again {', '.join(left)}: only {', '.join(options.steps)} is to be done")
    if options.smoke and options.data is not None:
        parser.error("--smoke makes data of its own; --data is not read")
    return options


if __name__ == "__main__":
    main()
