"""A tiny random checkpoint, shared by every test that only reads it."""

from pathlib import Path

import pytest

from voicechat_core.synthetic import synthesize
from voicechat_core.voicechat import VoiceChat, load


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
