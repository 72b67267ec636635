"""A tiny random checkpoint that every property is tried on."""

import pytest

from voicechat_core.synthetic import synthesize
from voicechat_core.voicechat import VoiceChat, load


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> VoiceChat:
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    synthesize(path, seed=0)
    return load(path)
