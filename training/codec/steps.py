"""One step of the codec: a batch drawn on the device, the codec's loss in each phase, and the judges'.

Phases: ``PLAIN`` an auto-encoder with noisy latents; ``QUANTIZED`` with codebooks; ``JUDGED`` with judges too.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from training.codec.discriminators import Judges, judge_terms, made_terms
from training.codec.losses import reconstruction
from training.codec.network import CodecNetwork
from training.codec.quantizer import Quantizer
from training.initial import initialise
from training.loop import Loss, Trainer
from voicechat_core.config import CodecConfig
from voicechat_core.nn.codec import Codec

__all__ = ["JUDGED", "PLAIN", "QUANTIZED", "Coding", "Sizes", "draw", "generator", "judging", "starting_codec"]

PLAIN, QUANTIZED, JUDGED = "plain", "quantized", "judged"
LOUDNESS = (0.7, 1.1)
NOISE = 0.1  # of the latents' spread, while there are no codebooks
WEIGHTS = {"sound": 10.0, "commitment": 0.5, "size": 0.02, "drift": 1e-4, "fooled": 0.3, "alike": 1.0}
GENERATOR: dict[str, Any] = {
    "peak": 2e-3,
    "warmup": 200,
    "floor": 0.03,
    "betas": (0.8, 0.99),
    "weight_decay": 1e-3,
    "clip": 5.0,
}
JUDGING: dict[str, Any] = GENERATOR | {"peak": 5e-4}


@dataclass(frozen=True)
class Sizes:
    """A batch: clips, frames of each, and the frames ``judged`` of them that the judges see.

    ``first`` is how many latents the codebooks are found from.
    """

    clips: int = 32
    frames: int = 24
    judged: tuple[int, int] = (12, 20)
    first: int = 12_000

    @property
    def latents(self) -> int:
        """Latents of a batch."""
        return self.clips * self.frames


class Coding(nn.Module):
    """What is trained together: encoder and decoder by gradients, the codebooks by averages."""

    def __init__(self, config: CodecConfig, codec: Codec) -> None:
        super().__init__()
        self.network = CodecNetwork(codec, config)
        self.quantizer = Quantizer(config.num_quantizers, config.codebook_size, config.latent_dim)
        self._config = config

    @property
    def config(self) -> CodecConfig:
        """The codec's sizes."""
        return self._config


def starting_codec(config: CodecConfig, seed: int) -> Codec:
    """A codec with starting weights."""

    class Part(nn.Module):
        """So that names are those of a checkpoint, by which weights are drawn."""

    whole: Any = Part()
    whole.tts_model = Part()
    whole.tts_model.audio_codec = Codec(config)
    initialise(whole, seed)
    codec: Codec = whole.tts_model.audio_codec
    return codec


def draw(tape: mx.array, clips: int, samples: int) -> mx.array:
    """Clips ``[B, S]`` from anywhere on an int16 tape, each at a loudness of its own."""
    starts = mx.random.randint(0, tape.shape[0] - samples, (clips, 1))
    cut = tape[starts + mx.arange(samples)].astype(mx.float32) / 32768
    return cut * mx.random.uniform(*LOUDNESS, shape=(clips, 1))


def generator(coding: Coding, judges: Trainer, sizes: Sizes, **options: Any) -> Trainer:
    """The trainer of ``coding``; a step takes the tape, the decoder's limit, the judges' weights and the phase."""

    def frozen(name: str, value: mx.array) -> bool:
        return name.startswith("quantizer.")

    return Trainer(coding, _generator_loss(judges, sizes), frozen=frozen, **(GENERATOR | options))


def _generator_loss(judges: Trainer, sizes: Sizes) -> Loss:
    def loss(coding: Coding, tape: mx.array, limit: mx.array, weights: mx.array, phase: str) -> dict[str, mx.array]:
        frame = coding.config.frame_samples
        wanted = draw(tape, sizes.clips, sizes.frames * frame)
        latents = coding.network.encode(wanted)
        heard, terms = _noisy(latents) if phase == PLAIN else _quantized(coding.quantizer, latents)
        made = coding.network.decode(heard, limit)
        terms["sound"] = reconstruction(made, wanted, coding.config.sample_rate)
        if phase == JUDGED:
            seen = slice(sizes.judged[0] * frame, sizes.judged[1] * frame)
            real, said = wanted[:, seen], made[:, seen]
            with judges.using(weights) as critics:
                assert isinstance(critics, Judges)
                terms |= made_terms(critics, real, said)
            terms |= {"_real": real, "_said": said}
        return {name: value * WEIGHTS.get(name, 1.0) for name, value in terms.items()}

    return loss


def _noisy(latents: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    spread = mx.stop_gradient(mx.sqrt(latents.var()))
    noise = NOISE * spread * mx.random.normal(latents.shape)
    return latents + noise, {"size": mx.square(latents).mean(), "_spread": spread}


def _quantized(quantizer: Quantizer, latents: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
    batch, _, width = latents.shape
    flat = latents.reshape(-1, width)
    found = quantizer.search(flat)
    levels = quantizer.centres.shape[0]
    some = mx.random.randint(1, levels + 1, (batch,))
    kept = mx.where(mx.random.uniform(shape=(batch,)) < 0.5, some, levels)
    heard = quantizer.kept(latents, found, kept)
    variance = mx.stop_gradient(mx.maximum(flat.var(), 1e-3))
    commitment = quantizer.commitment(flat, found) / variance
    quantizer.learn(found)
    terms = {"commitment": commitment, "drift": mx.square(flat).mean()}
    return heard, terms | {"_spread": mx.sqrt(variance), "_used": quantizer.used(), "_residuals": found.residuals}


def judging(judges: Judges, half: bool, **options: Any) -> Trainer:
    """The trainer of the judges; a step takes real and made samples. With ``half`` they compute in bfloat16."""
    settings = JUDGING | options
    return Trainer(judges, judge_terms, half=(lambda name, value: True) if half else None, **settings)
