"""Copies of the tiny checkpoint to spoil, and an empty cache."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.checkpoints import pack_mixed
from voicechat_core import VoiceChat


@pytest.fixture
def plain(tiny: VoiceChat) -> VoiceChat:
    """The synthetic checkpoint with steps as they are written: compiled ones hold their functions and their weights."""
    return VoiceChat(replace(tiny.model, compiled=False))


@pytest.fixture
def broken(tiny_path: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_path, tmp_path / "broken"))


@pytest.fixture
def mixed(broken: Path) -> Path:
    """It with its language model in 4 bits, its embedding and heads in 8, and bfloat16 elsewhere."""
    pack_mixed(broken)
    return broken


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the hub's cache, not made yet."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"
