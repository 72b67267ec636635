"""For every test: each folder of goldens of random weights (``golden``), and a tiny random checkpoint (``tiny``)."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from voicechat_core.config import VoiceChatConfig
from voicechat_core.errors import GoldensError
from voicechat_core.goldens import Goldens
from voicechat_core.synthetic import synthesize
from voicechat_core.voicechat import VoiceChat, load
from voicechat_core.weights import assign

FIXTURES = Path(__file__).parents[1] / "golden" / "fixtures"
GOLDEN_FOLDERS = sorted(path for path in FIXTURES.iterdir() if (path / "checkpoint").is_dir())
SMALL_FOLDER = FIXTURES / "small"  # of voicechat-small, which lies in the package


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


@cache
def goldens_of(folder: Path) -> Goldens:
    """A whole folder; made with another checkpoint than the one that there is, it ends the test with one line."""
    found, fault = Goldens.read(folder), ""
    try:
        found.checkpoint()
    except GoldensError as error:
        fault = str(error)
    if fault:  # failing inside the handler would print it twice
        pytest.fail(fault, pytrace=False)
    return found


@pytest.fixture(scope="session", params=GOLDEN_FOLDERS, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest) -> Golden:
    """Each golden folder of random weights."""
    return Golden(request.param)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a synthetic checkpoint; not to be changed."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    synthesize(path, seed=0)
    return path


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> VoiceChat:
    """It, loaded."""
    return load(tiny_path)
