"""A configuration: one small model, drawn or stored, the seeds, and the length of every input."""

import json
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from . import published

ROOT = Path(__file__).parents[2]  # of the repository: paths in a configuration begin there
CONFIGS = ROOT / "golden" / "configs"

# Structural constants of the released model, the same in every configuration.
SOURCE_RATE_HZ, TARGET_RATE_HZ = 16000, 22050
FRAME_SECONDS = 0.08
FRAME_SAMPLES = 1280
AUDIO_PROMPT_SECONDS = 3.0
BOS, EOS, PAD, SILENCE = 1, 2, 12, 11
CODEC_RATES = (7, 7, 9)
CODEC_CHANNEL_MULT = (1, 2, 4)
CODEC_HOP = 4
SPEAKER = "Aria"


@dataclass(frozen=True)
class Settings:
    """One file of ``golden/configs``, merged with what the command line overrides.

    With a ``checkpoint`` (its ``name`` for the packages, its ``folder`` here) nothing is drawn but noise: sizes are
    those of its config.json, and the stages run on ``recordings``, each by the name of its input. Tensors that match
    ``omit`` (``stage/tensor``) are not stored.
    """

    seed: int
    function_channel_weight: float
    prompt_text: str
    tokenizer: dict[str, int]
    encoder: dict[str, Any]
    rnnt: dict[str, int]
    llm: dict[str, Any]
    tts: dict[str, Any]
    character_encoder: dict[str, Any]
    mog_head: dict[str, Any]
    codec: dict[str, Any]
    sampling: dict[str, float]
    inputs: dict[str, int]
    redraw: dict[str, int] = field(default_factory=dict)
    preprocessor: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, str] = field(default_factory=dict)
    recordings: dict[str, str] = field(default_factory=dict)
    omit: list[str] = field(default_factory=list)
    audio_seed: int | None = None
    noise_seed: int | None = None

    @classmethod
    def load(cls, name: str, overrides: dict[str, Any] | None = None) -> Self:
        """The configuration ``name`` with ``overrides`` merged in, table by table."""
        own = tomllib.loads((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"))
        overrides, known = overrides or {}, {field.name for field in fields(cls)}
        if "checkpoint" in overrides and "checkpoint" not in own:
            raise SystemExit(f"{name} draws its weights: it takes no checkpoint")
        data = sizes_of(own.get("checkpoint", {}) | overrides.get("checkpoint", {})) | own
        for key, value in overrides.items():
            if key not in known:
                raise SystemExit(f"unknown setting {key!r}; there are {', '.join(sorted(known))}")
            data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
        return cls(**data)._with_seeds()

    def _with_seeds(self) -> Self:
        audio = self.seed + 1000 if self.audio_seed is None else self.audio_seed
        noise = self.seed + 2000 if self.noise_seed is None else self.noise_seed
        return replace(self, audio_seed=audio, noise_seed=noise)

    @property
    def checkpoint_folder(self) -> Path:
        """Where the stored checkpoint lies."""
        return ROOT / self.checkpoint["folder"]

    def seed_of(self, tensor: str) -> int:
        """The seed of one tensor: ``redraw`` adds to the seed of those whose names it begins, to choose among draws."""
        return self.seed + sum(step for prefix, step in self.redraw.items() if tensor.startswith(prefix))

    def inputs_for(self, stage: str) -> np.random.Generator:
        """The random stream of one stage's inputs: no stage's draws move another's."""
        assert self.audio_seed is not None
        return keyed_generator(self.audio_seed, stage)


def sizes_of(checkpoint: dict[str, str]) -> dict[str, Any]:
    """What a stored checkpoint's config.json says; nothing for a model that is drawn."""
    return published.settings(ROOT / checkpoint["folder"]) if checkpoint else {}


def keyed_generator(seed: int, name: str) -> np.random.Generator:
    """A PCG64 stream that depends on the seed and the name only."""
    return np.random.Generator(np.random.PCG64([seed, *name.encode()]))


def read_overrides(path: Path | None) -> dict[str, Any]:
    """The JSON object in ``path``, or nothing."""
    return {} if path is None else json.loads(path.read_text(encoding="utf-8"))


def names() -> list[str]:
    """Every configuration there is."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))
