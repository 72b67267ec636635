"""Train the speech decoder on the codec's codes of the assistant's sentences.

    python -m training.speaking.train --data DIR --out DIR --seconds 600 [--resume]

``--data`` holds ``codes.npz``. What ``--out`` gets: ``log.jsonl``; every minute the state to go on from and
``speaking.safetensors`` with the averaged weights in the checkpoint's names; at the end ``generated.npz``, codes of
held-out sentences to be judged by ear. ``--seconds`` is the whole training's, over all calls; ``--this-call`` ends a
call before that, and ``--resume`` goes on. Where the state was lost, ``--weights speaking.safetensors --used SECONDS``
goes on from the averaged weights with the moments at zero.

    python -m training.speaking.train --data DIR --out DIR --time

trains nothing: it says how long a step takes in each way of computing it.
"""

import os

# A gradient need not be exact: products in TF32, which importing the networks would turn off.
os.environ.setdefault("MLX_ENABLE_TF32", "1")

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training import domain
from training.domain import WEIGHTS
from training.loop import Budget, Every, Log, Trainer
from training.small import small_config
from training.speaking.balance import REPEAT
from training.speaking.evaluate import cases, forced, run_cases
from training.speaking.forward import prompt_latents
from training.speaking.losses import row_loss
from training.speaking.pacing import STAGES, stage_of
from training.speaking.rows import Layout, draw
from training.speaking.setting import SHORT_STEPS, Setting, is_frozen, is_half
from training.speaking.tables import Sentences, random_sentences
from voicechat_core.config import VoiceChatConfig
from voicechat_core.nn.ear_tts import EarTTS

__all__ = ["Shapes", "Way", "main", "make_loss", "make_trainer", "run"]

EMA = 0.999
DENSE_STAGE = -1
LONG_EVERY = 4  # of so many steps one has long rows
LONG = Layout(long_lead=(9, 140), long_gap=(11, 90), p_long=0.3)
SAVE_SECONDS, EVALUATE_SECONDS = 60.0, 60.0
RESERVE = 30.0  # seconds of a call that are left for the last evaluation and the sentences
EVALUATED = 60  # sentences held out, and as many trained ones


@dataclass(frozen=True)
class Shapes:
    """Rows and steps of a batch; ``long`` ones hold sessions in which much is silent."""

    short: tuple[int, int] = (112, SHORT_STEPS)
    long: tuple[int, int] = (48, SHORT_STEPS + 128)

    def at(self, step: int) -> tuple[int, int]:
        """The shape of a step's batch."""
        return self.long if step % LONG_EVERY == LONG_EVERY - 1 else self.short


@dataclass(frozen=True)
class Way:
    """How a step computes: matrices in bfloat16, attention as one kernel, and how often a frame is asked for.

    ``paced`` is not about computing: text begins paced and ends dense, where it is otherwise dense throughout.
    """

    half: bool = True
    fused: bool = False
    draws: int = 2
    paced: bool = False


SMOKE = Shapes((2, 24), (1, 40))


def make_loss(setting: Setting, shapes: Shapes, way: Way) -> Callable[..., dict[str, mx.array]]:
    """The loss of a batch that it draws itself; what it is given is the shape and the stage."""

    def loss(tts: EarTTS, rows: int, steps: int, stage: int = DENSE_STAGE) -> dict[str, mx.array]:
        is_long = (rows, steps) == shapes.long
        variants = (1.0,) if stage == DENSE_STAGE else STAGES[stage][1]
        layout = replace(LONG if is_long else Layout(), variants=variants)
        batch = draw(setting.tables, (rows, steps), setting.constants.ids, short=not is_long, layout=layout)
        return row_loss(tts, batch, setting.tables, setting.constants, draws=way.draws, fused=way.fused)

    return loss


def make_trainer(setting: Setting, shapes: Shapes, way: Way, seed: int = 0, peak: float = 2e-3) -> Trainer:
    """The trainer of the setting's network."""
    return Trainer(
        setting.tts,
        make_loss(setting, shapes, way),
        peak=peak,
        ema=EMA,
        frozen=is_frozen,
        half=is_half if way.half else None,
        seed=seed,
    )


def _choose(setting: Setting, count: int) -> dict[str, NDArray[np.int64]]:
    """The sentences that are evaluated: held-out and trained ones, repeats apart from answers of fixed form.

    Repeats show whether text is read at all: what is finite can be known by heart.
    """
    held, is_repeat = setting.sentences.held, np.array(setting.sentences.kinds) == REPEAT
    chosen = {"held_repeat": held & is_repeat, "held_fixed": held & ~is_repeat}
    chosen |= {"repeat": ~held & is_repeat, "fixed": ~held & ~is_repeat & np.isin(setting.sentences.kinds, [*WEIGHTS])}
    found = {name: np.flatnonzero(some) for name, some in chosen.items()}
    return {n: some[:: max(1, len(some) // count)][:count] for n, some in found.items() if some.size}


def _evaluate(setting: Setting, trainer: Trainer, log: Log, count: int) -> None:
    with trainer.averaged():
        figures = {name: forced(setting, some) for name, some in _choose(setting, count).items()}
    log.write(step=trainer.steps, **{f"{a}_{b}": value for a, some in figures.items() for b, value in some.items()})


def _keep(setting: Setting, trainer: Trainer, budget: Budget, out: Path) -> None:
    trainer.save(out, used=budget.used())
    with trainer.averaged():
        setting.export(out / "speaking.safetensors")


def _until(budget: Budget, end: float | None) -> Iterator[float]:
    """The budget's progress, up to the moment ``end`` at most."""
    for progress in budget:
        yield progress
        if end is not None and time.monotonic() > end:
            return


def run(
    setting: Setting,
    out: Path,
    shapes: Shapes,
    way: Way,
    *,
    seconds: float | None,
    steps: int | None = None,
    end: float | None = None,
    resume: bool = False,
    used: float = 0.0,
    seed: int = 0,
    peak: float = 2e-3,
    evaluated: int = EVALUATED,
) -> Trainer:
    """Train until the budget is used or the moment ``end`` comes; see the module's description for what is written."""
    trainer = make_trainer(setting, shapes, way, seed, peak)
    notes = trainer.resume(out) if resume else {"used": {"seconds": used, "steps": 0}}
    budget, log = Budget(seconds, steps, notes.get("used")), Log(out / "log.jsonl")
    log.write(trained=sum(x.size for x in [trainer.weights]), sentences=len(setting.sentences), way=str(way), **notes)
    save, evaluate = Every(SAVE_SECONDS), Every(EVALUATE_SECONDS)
    for progress in _until(budget, end):
        stage = stage_of(progress) if way.paced else DENSE_STAGE
        log.step(progress, trainer.step(progress, *shapes.at(trainer.steps), stage))
        if save.due():
            _keep(setting, trainer, budget, out)
        if evaluate.due():
            _evaluate(setting, trainer, log, evaluated)
    _keep(setting, trainer, budget, out)
    _evaluate(setting, trainer, log, evaluated)
    return trainer


def speak(
    setting: Setting, trainer: Trainer, out: Path, held: int = EVALUATED, trained: int = 24, others: int = 8
) -> None:
    """Write ``generated.npz`` with the averaged weights."""
    with trainer.averaged():
        latents = prompt_latents(setting.tts, setting.constants)
        run_cases(setting, cases(setting, held, trained, others), latents).save(out / "generated.npz")


def measure(setting: Setting, shapes: Shapes, count: int = 30) -> None:
    """Print the time of a step in each way and shape; each is compiled first."""
    double = (2 * shapes.short[0], shapes.short[1])
    for way in (Way(), Way(fused=True), Way(half=False)):
        trainer = make_trainer(setting, shapes, way)
        for shape in (shapes.short, shapes.long, double):
            start = time.monotonic()
            mx.eval([trainer.step(0.0, *shape) for _ in range(3)])
            first, start = time.monotonic() - start, time.monotonic()
            mx.eval([trainer.step(0.0, *shape) for _ in range(count)])
            pace = 1000 * (time.monotonic() - start) / count
            print(f"{way} {shape}: {pace:.1f} ms a step (first three {first:.1f} s)", flush=True)


def smoke_sentences(config: VoiceChatConfig) -> Sentences:
    """Noise with the domain's texts, for a run without data."""
    tts = config.tts_config
    known = dict(list(domain.finite_answers().items())[:12])
    return random_sentences(known, (tts.num_quantizers, tts.codebook_size, tts.latent_size), longest=12)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of codes.npz; without one a smoke run trains on noise")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, help="of the whole training")
    parser.add_argument("--steps", type=int, help="of the whole training, if that is less")
    parser.add_argument("--this-call", type=float, help="seconds after which this call ends, with all it needs")
    parser.add_argument("--resume", action="store_true", help="go on from what --out holds")
    parser.add_argument("--weights", type=Path, help="begin with these: a speaking.safetensors")
    parser.add_argument("--used", type=float, default=0.0, help="seconds of the training that made --weights")
    parser.add_argument("--smoke", action="store_true", help="a few steps of tiny batches")
    parser.add_argument("--time", action="store_true", help="only say how long a step takes in each way")
    parser.add_argument("--float32", action="store_true", help="no matrices in bfloat16")
    parser.add_argument("--fused", action="store_true", help="attention as one kernel (CUDA)")
    parser.add_argument("--draws", type=int, default=2, help="how often each frame is asked for")
    parser.add_argument("--paced", action="store_true", help="begin with text at the time of its speech")
    parser.add_argument("--scale", type=float, default=1.0, help="rows a batch, of the usual number")
    parser.add_argument("--peak", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    config, begun = small_config(), time.monotonic()
    if options.data is None and not options.smoke:
        parser.error("--data is needed")
    sentences = Sentences.from_file(options.data / "codes.npz") if options.data else smoke_sentences(config)
    setting = Setting.build(config, _few(sentences) if options.smoke else sentences, options.seed)
    if options.weights:
        setting.load(options.weights)
    shapes = SMOKE if options.smoke else _scaled(options.scale)
    if options.time:
        return measure(setting, shapes, 2 if options.smoke else 30)
    seconds, steps = options.seconds, options.steps
    if options.smoke:
        steps = steps or 6
    end = None if options.this_call is None else begun + options.this_call - RESERVE
    way = Way(not options.float32, options.fused, options.draws, options.paced)
    trainer = run(
        setting, options.out, shapes, way, seconds=None if seconds is None else max(1.0, seconds - RESERVE),
        steps=steps, end=end, resume=options.resume, used=options.used, seed=options.seed, peak=options.peak,
        evaluated=2 if options.smoke else EVALUATED,
    )  # fmt: skip
    if end is None or time.monotonic() < end:  # else the training goes on in another call
        speak(setting, trainer, options.out, *((1, 1, 0) if options.smoke else ()))
    return None


def _few(sentences: Sentences, count: int = 6) -> Sentences:
    """Some of each split, for a smoke run."""
    held, known = np.flatnonzero(sentences.held)[:2], sentences.trained()[:count]
    return sentences.only(np.concatenate([held, known]))


def _scaled(scale: float) -> Shapes:
    usual = Shapes()
    short, long = (max(1, round(scale * shape[0])) for shape in (usual.short, usual.long))
    return Shapes((short, usual.short[1]), (long, usual.long[1]))


if __name__ == "__main__":
    main()
