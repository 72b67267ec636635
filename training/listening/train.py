"""Train perception, transcript branch and language model together: ``python -m training.listening.train --help``.

Reads the banks ``users_train`` and ``users_test`` and ``assistant.json`` of ``--data``. Leaves in ``--out`` the state
to go on from (``--resume``), ``log.jsonl``, ``listening.safetensors`` (``stt_model.*`` as a checkpoint has it)
and ``listening.json`` (``evaluate``'s figures). ``--smoke`` does all of it in small.
"""

import os

# Products in TF32 are exact enough to train with; importing the networks would turn it off.
os.environ.setdefault("MLX_ENABLE_TF32", "1")

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from training.initial import initialise
from training.listening import evaluate, rnnt_loss
from training.listening.losses import batch_of, listening_loss
from training.listening.recordings import Durations, Questions, read_durations, read_questions
from training.listening.tables import Plan, Table, draw
from training.listening.timeline import Shape
from training.loop import Budget, Every, Log, Trainer
from training.small import small_config
from voicechat_core.model import Networks, SttModel
from voicechat_core.nn.layout import checkpoint_axes, to_checkpoint
from voicechat_core.weights import named_parameters

__all__ = ["Course", "main", "write_part"]


@dataclass(frozen=True)
class Lesson:
    """Windows of one shape: how many a step, and how many to draw before the training."""

    shape: Shape
    batch: int
    windows: int


@dataclass(frozen=True)
class Course:
    """Which lesson comes when: short windows only at first, then ``order`` over and over."""

    lessons: tuple[Lesson, ...]
    order: tuple[int, ...]
    short_until: float = 0.15

    def lesson(self, step: int, progress: float) -> int:
        """The index of the lesson of a step."""
        return 0 if progress < self.short_until else self.order[step % len(self.order)]


# 12 s with two or three turns; 32 s; 128 s, for late questions and long silence. All have as many frames a step.
FULL = Course(
    (
        Lesson(Shape(150, 48), 96, 96_000),
        Lesson(Shape(400, 104), 36, 18_000),
        Lesson(Shape(1600, 240), 9, 1_800),
    ),
    order=(0, 1, 0, 0, 0, 1, 0, 2),
)
SMALL = Course((Lesson(Shape(90, 24), 2, 6), Lesson(Shape(110, 30), 1, 2)), order=(1, 0), short_until=0.5)

PEAK, WARMUP, DROPOUT = 2e-3, 400, 0.15


def rows_of(lesson: Lesson, step: int) -> mx.array:
    """The rows of a step, drawn by its number."""
    return mx.array(np.random.default_rng(step).integers(0, lesson.windows, lesson.batch), mx.int32)


def tables_of(course: Course, questions: Questions, durations: Durations, seed: int) -> list[Table]:
    """The course's windows."""
    plan = Plan(questions.by_text(), durations, seed)
    workers = max(1, (os.cpu_count() or 1) - 1) if course.lessons[0].windows > 1000 else 1
    drawn = draw(plan, {lesson.shape: lesson.windows for lesson in course.lessons}, workers)
    return [drawn[lesson.shape] for lesson in course.lessons]


def write_part(stt: SttModel, file: Path) -> None:
    """The weights as a checkpoint stores them: its names, its axes, float32."""
    axes = dict(checkpoint_axes(stt))
    tensors = {f"stt_model.{name}": to_checkpoint(value, axes.get(name)) for name, value in named_parameters(stt)}
    partial = file.with_name(f"partial.{file.name}")
    mx.save_safetensors(str(partial), {name: mx.contiguous(value) for name, value in tensors.items()})
    partial.replace(file)


def choose_lattice(log: Log) -> None:
    """The transducer's kernels where they run and are right, loudly the plain form elsewhere on a GPU."""
    if mx.default_device().type != mx.gpu:
        return
    try:
        far = rnnt_loss.agrees()
        rnnt_loss.use_kernels(True)
        log.write(transducer="kernels", differ=far)
    except Exception as error:  # whatever goes wrong in a kernel, the plain form is right
        rnnt_loss.use_kernels(False)
        log.write(transducer="PLAIN AND SLOW: THE KERNELS ARE WRONG", error=repr(error)[:300])


def steps_of(budget: Budget, course: Course, trainer: Trainer) -> Iterator[tuple[float, int, int]]:
    """Progress, lesson, and the step's number."""
    for progress in budget:
        yield progress, course.lesson(trainer.steps, progress), trainer.steps


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole training; gives the evaluation."""
    course, log = SMALL if options.smoke else FULL, Log(options.out / "log.jsonl")
    config = small_config()
    networks = Networks(config)
    initialise(networks, options.seed)
    stt = networks.stt_model
    trainer = Trainer(
        stt, listening_loss(config, DROPOUT), peak=PEAK, warmup=WARMUP, seed=options.seed, compile=_compiles(options)
    )
    used = trainer.resume(options.out)["used"] if options.resume else None
    questions = read_questions(options.data, "users_train")
    log.write(questions=len(questions.items), minutes=len(questions.samples) / 960_000)
    tables = tables_of(course, questions, read_durations(options.data), options.seed + trainer.steps)
    samples = mx.array(questions.samples)
    mx.eval(samples, tables)
    choose_lattice(log)
    log.write(windows=[lesson.windows for lesson in course.lessons], parameters=int(trainer.weights.size))
    budget = Budget(options.seconds, 4 if options.smoke else options.steps, used)
    saving, judging = Every(60), Every((options.seconds or 1e9) / 2)
    for progress, which, step in steps_of(budget, course, trainer):
        terms = trainer.step(progress, *batch_of(stt, samples, tables[which], rows_of(course.lessons[which], step)))
        log.step(progress, terms, step=step, shape=course.lessons[which].shape.frames)
        if saving.due():
            trainer.save(options.out, used=budget.used())
        if judging.due() and progress < 0.8:
            log.write(**evaluate.summary(judge(stt, options, full=False)))
    trainer.save(options.out, used=budget.used())
    write_part(stt, options.out / "listening.safetensors")
    figures = judge(stt, options, full=True)
    (options.out / "listening.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    log.write(**evaluate.summary(figures))
    return figures


def _compiles(options: argparse.Namespace) -> bool:
    """On a CPU the compiling of a step takes minutes: too long for four of them."""
    return not (options.smoke and mx.default_device().type == mx.cpu)


def judge(stt: SttModel, options: argparse.Namespace, *, full: bool) -> dict[str, Any]:
    """The figures of ``evaluate``: all, or in passing of fewer questions; in small for a smoke test."""
    scale = evaluate.SMALL if options.smoke else evaluate.FULL if full else evaluate.QUICK
    return evaluate.evaluate(stt, small_config(), options.data, scale)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the banks")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, help="how long to train")
    parser.add_argument("--steps", type=int, help="how many steps to train at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from what --out holds")
    parser.add_argument("--smoke", action="store_true", help="four steps on a handful of windows")
    run(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
