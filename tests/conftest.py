"""Golden folders for every test: ``golden`` is each committed one in turn."""

from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from voicechat_core.config import VoiceChatConfig
from voicechat_core.weights import assign

FIXTURES = Path(__file__).parents[1] / "golden" / "fixtures"
GOLDEN_FOLDERS = sorted(path for path in FIXTURES.iterdir() if path.is_dir())


@dataclass
class Golden:
    """One folder of goldens: the checkpoint they were made with, and the tensors of every stage."""

    path: Path
    config: VoiceChatConfig = field(init=False)
    weights: dict[str, mx.array] = field(init=False)

    def __post_init__(self) -> None:
        self.config = VoiceChatConfig.from_file(self.path / "checkpoint" / "config.json")
        self.weights = mx.load(str(self.path / "checkpoint" / "model.safetensors"))

    def stage(self, name: str) -> dict[str, mx.array]:
        """The tensors of ``goldens/<name>.safetensors``."""
        return mx.load(str(self.path / "goldens" / f"{name}.safetensors"))

    def fill(self, module: nn.Module, prefix: str) -> nn.Module:
        """``module`` with the weights found under ``prefix``."""
        assign(module, dict(self.weights), prefix)
        return module


@pytest.fixture(scope="session", params=GOLDEN_FOLDERS, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest) -> Golden:
    """Each committed golden folder."""
    return Golden(request.param)
