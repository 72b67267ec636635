"""A server process for each module that asks for one, and what the model gives to a recording by itself."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.server.server_process import ServerProcess, serving
from voicechat_core import VoiceChat
from voicechat_core.offline import GenerationResult

SPOKEN = Path(__file__).parents[1] / "data" / "spoken.wav"
Offline = Callable[..., GenerationResult]


@pytest.fixture(scope="session")
def spoken() -> np.ndarray:
    """Three seconds of a person, int16 at 16 kHz."""
    samples: np.ndarray = soundfile.read(SPOKEN, dtype="int16")[0]
    return samples


@pytest.fixture(scope="module")
def server(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It serves the tiny checkpoint; at the end it must leave in good order, and have logged no error."""
    with serving(tiny_path, tmp_path_factory.mktemp("server") / "log") as process:
        yield process


@pytest.fixture
def url(server: ServerProcess) -> str:
    """Where it is, with its slot free."""
    server.wait_until_ready()
    return f"ws://127.0.0.1:{server.port}"


@pytest.fixture(scope="session")
def offline(tiny: VoiceChat) -> Offline:
    """``voicechat generate`` on samples, each case once."""
    known: dict[tuple[object, ...], GenerationResult] = {}

    def generate(samples: np.ndarray, system_prompt: str | None = None, seed: int = 0) -> GenerationResult:
        key = (samples.tobytes(), system_prompt, seed)
        if key not in known:
            known[key] = tiny.generate(samples, system_prompt=system_prompt, seed=seed)
        return known[key]

    return generate
