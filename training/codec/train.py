"""Train the codec: ``python -m training.codec.train --data DIR --out DIR --seconds 200``.

Leaves ``codec.safetensors`` (a checkpoint's ``tts_model.audio_codec.*``), ``codec.json`` (figures) and ``codec.jsonl``
(the run). Killed, it goes on with ``--resume``. On a GPU a rehearsal comes first, a minute or so beyond the seconds.
Products and convolutions of float32 are computed in float32.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read by MLX at its first use. TF32 would drown quiet bands; the judges' convolutions need more plans than 128.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
os.environ.setdefault("MLX_CUDA_CONV_CACHE_SIZE", "1024")

import mlx.core as mx

from training.codec import audio
from training.codec.discriminators import Judges
from training.codec.finish import finished, measure, save
from training.codec.losses import log_mel_distance, number
from training.codec.network import NO_LIMIT
from training.codec.rehearsal import TOLERANCE, Figures, agree, on_cpu
from training.codec.steps import JUDGED, PLAIN, QUANTIZED, Coding, Sizes, draw, generator, judging, starting_codec
from training.loop import Budget, Every, Log, Trainer
from training.small import small_config
from voicechat_core.config import CodecConfig

__all__ = ["Run", "train"]

# The progress at which each phase begins, at which columns are clamped, and at which dead entries are left alone.
CODEBOOKS, JUDGES, CLAMP, LEAVE_DEAD = 0.22, 0.4, 0.6, 0.8
REVIVE_STEPS = 50
SAVE_SECONDS = 60.0
MEASURED, LOOKED_AT = 48, 8  # held-out sentences at the end, and every minute
HALF_TOLERANCE = 0.1  # of the judges in bfloat16
SMOKE_LATENTS = 60  # fewer than a codebook has entries


def phase_at(progress: float) -> str:
    """The phase of a step."""
    return PLAIN if progress < CODEBOOKS else QUANTIZED if progress < JUDGES else JUDGED


@dataclass
class Run:
    """The trained parts, their trainers, and whether the codebooks were found."""

    coding: Coding
    codec: Trainer
    judges: Trainer
    sizes: Sizes
    started: bool = False

    @classmethod
    def new(cls, config: CodecConfig, sizes: Sizes, seed: int, channels: int = 16, half: bool = False) -> "Run":
        """At its beginning. ``half``: judges in bfloat16."""
        coding = Coding(config, starting_codec(config, seed))
        mx.random.seed(seed)
        judges = judging(Judges(channels, channels), half, seed=seed + 1)
        return cls(coding, generator(coding, judges, sizes, seed=seed), judges, sizes)

    def step(self, progress: float, tape: mx.array) -> dict[str, mx.array]:
        """One step of what the phase trains; gives all terms."""
        phase = phase_at(progress)
        if phase != PLAIN and not self.started:
            self._find_codebooks(tape)
        limit = mx.array(1.0 if progress >= CLAMP else NO_LIMIT)
        terms = self.codec.step(progress, tape, limit, self.judges.weights, phase)
        residuals = terms.pop("_residuals", None)
        if residuals is not None and progress < LEAVE_DEAD and self.codec.steps % REVIVE_STEPS == 0:
            self.coding.quantizer.revive(residuals)
        if phase == JUDGED:
            judged = self.judges.step(progress, terms.pop("_real"), terms.pop("_said"))
            terms |= {f"judges_{name}": value for name, value in judged.items()}
        return terms

    def _find_codebooks(self, tape: mx.array) -> None:
        samples = self.sizes.frames * self.coding.config.frame_samples
        width = self.coding.config.latent_dim
        latents: list[mx.array] = []
        while sum(part.shape[0] for part in latents) < self.sizes.first:
            latents.append(self.coding.network.encode(draw(tape, self.sizes.clips, samples)).reshape(-1, width))
            mx.eval(latents)
        self.coding.quantizer.initialise(mx.concatenate(latents), self.sizes.latents)
        self.started = True

    def distance(self, samples: mx.array) -> float:
        """The log-mel distance of clips as they are now encoded and decoded, with the codebooks if there are any."""
        latents = self.coding.network.encode(samples)
        flat = latents.reshape(-1, latents.shape[2])
        if self.started:
            latents = (flat - self.coding.quantizer.search(flat).residuals[-1]).reshape(latents.shape)
        return log_mel_distance(self.coding.network.decode(latents), samples, self.coding.config.sample_rate)

    def save(self, folder: Path, budget: Budget) -> None:
        """Write all that a resumed run needs."""
        self.judges.save(folder / "judges")
        self.codec.save(folder / "codec", used=budget.used(), started=self.started)

    def resume(self, folder: Path) -> dict[str, Any]:
        """Go on from ``save``; gives what the budget used."""
        self.judges.resume(folder / "judges")
        notes = self.codec.resume(folder / "codec")  # the last: what is drawn next follows from its steps
        self.started = notes["started"]
        used: dict[str, Any] = notes["used"]
        return used


def rehearse(config: CodecConfig, sizes: Sizes, tape: mx.array, log: Log, channels: int) -> bool:
    """Check this device against the CPU on a small batch; whether the judges can compute in bfloat16 here.

    A step of the run's own ``sizes`` follows, so that no kernel and no convolution is missing later.

    Raises:
        ArithmeticError: if the two disagree.
        RuntimeError: if the device cannot do it.
    """
    begin = time.monotonic()
    some, few = tape[:200_000], Sizes(1, 4, (1, 4))
    mx.eval(some)
    plain, judged = on_cpu(lambda: _first_figures(config, few, some, channels, half=False))
    for half in (True, False):
        try:
            found = _first_figures(config, few, some, channels, half)
            agree(found[0], plain)
            agree(found[1], judged, HALF_TOLERANCE if half else TOLERANCE)
            _first_figures(config, sizes, tape, channels, half)
        except (ArithmeticError, RuntimeError) as error:
            log.write(event="rehearsal failed", half=half, because=str(error))
            if not half:
                raise
        else:
            break
    took = round(time.monotonic() - begin, 1)
    log.write(event="rehearsed", took=took, half=half, cpu=plain | judged, here=found[0] | found[1])
    return half


def _first_figures(
    config: CodecConfig, sizes: Sizes, tape: mx.array, channels: int, half: bool
) -> tuple[Figures, Figures]:
    """The terms of one step without and one with judges; the codebooks are all zeros, so that no choice is close."""
    run = Run.new(config, sizes, 1, channels, half)
    run.started = True
    plain, judged = run.step(0.1, tape), run.step(0.5, tape)
    return _scalars(plain), _scalars(judged)


def _scalars(terms: dict[str, mx.array]) -> Figures:
    return {name: number(value) for name, value in terms.items() if value.ndim == 0}


def train(run: Run, tape: mx.array, held: audio.Clips, budget: Budget, folder: Path, log: Log) -> None:
    """Step until the budget is spent; every minute and at the end, save and measure a few held-out clips."""
    saving = Every(SAVE_SECONDS)
    for progress in budget:
        log.step(progress, run.step(progress, tape))
        if saving.due():
            run.save(folder, budget)
            log.write(event="saved", steps=run.codec.steps, mel=run.distance(held.samples[:LOOKED_AT]))
    run.save(folder, budget)
    log.write(event="trained", steps=run.codec.steps)


def main() -> None:
    """The command."""
    options = _options()
    if options.smoke and mx.default_device() == mx.cpu:
        mx.disable_compile()  # a C++ compiler would build every kernel: minutes
    config, sizes, channels = _smoke_sizes() if options.smoke else (small_config().codec_config, Sizes(), 16)
    recordings = _recordings(options, config)
    log = Log(options.out / "codec.jsonl", 0.0 if options.smoke else 3.0)
    tape = mx.array(audio.tape(recordings, options.seed, 4 * sizes.frames * config.frame_samples))
    state = options.out / "state"
    resumed = options.resume and (state / "codec").is_dir()
    log.write(event="start", recordings=len(recordings), minutes=tape.size / config.sample_rate / 60, resumed=resumed)
    half = mx.default_device() == mx.gpu and rehearse(config, sizes, tape, log, channels)
    run = Run.new(config, sizes, options.seed, channels, half)
    used = run.resume(state) if resumed else None
    budget = Budget(None, 10, used) if options.smoke else Budget(options.seconds, None, used)
    held = audio.clips([r for r in recordings if r.about["split"] == "held"][:MEASURED], config.frame_samples)
    train(run, tape, held, budget, state, log)
    _finish(run, tape, held, options, log)


def _recordings(options: argparse.Namespace, config: CodecConfig) -> list[audio.Recording]:
    if options.data is None:
        return audio.synthetic(12, config.sample_rate)
    recordings = audio.read(options.data, options.files)
    if not options.smoke:
        return recordings
    by_split = {split: [r for r in recordings if r.about["split"] == split] for split in ("train", "held")}
    return by_split["train"][:8] + by_split["held"][:2]


def _finish(run: Run, tape: mx.array, held: audio.Clips, options: argparse.Namespace, log: Log) -> None:
    """Write the codec and its figures."""
    config, sizes = run.coding.config, run.sizes
    mx.random.seed(options.seed)
    codec, spread = finished(run.coding, draw(tape, 4 * sizes.clips, sizes.frames * config.frame_samples))
    save(codec, options.out / "codec.safetensors")
    figures = measure(run.coding, codec, config, held) | {"spread": spread}
    figures |= {"steps": run.codec.steps, "held": len(held.frames)}
    (options.out / "codec.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    log.write(event="done", **figures)


def _smoke_sizes() -> tuple[CodecConfig, Sizes, int]:
    """The codec as it is, so that the other parts fit it, in a tiny batch and with few channels of the judges."""
    return small_config().codec_config, Sizes(1, 6, (2, 6), first=SMOKE_LATENTS), 4


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the directory with assistant.json; none: synthetic vowels")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--files", type=int, help="how many of the bank's files; all, if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from DIR/state, if it is there")
    parser.add_argument("--smoke", action="store_true", help="ten steps of tiny batches, through every phase")
    return parser.parse_args()


if __name__ == "__main__":
    main()
