"""``voicechat-client`` as a process of its own: run to its end, or held while something happens to it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile

if TYPE_CHECKING:  # the client's own tests run where there is no MLX
    from voicechat_core.offline import GenerationResult

RUN = "from voicechat_client.__main__ import main; main()"
LONGEST = 120.0  # seconds of a test that hangs
FRAME = 1764
OUTSIDE = ("VOICECHAT_API_KEY", "COLUMNS", "LINES")  # what this process was told: a test's terminal has its own size
IDS = ("text_tokens", "function_tokens", "transcript", "text", "function_text", "frames")


@dataclass(frozen=True)
class Ended:
    """What a command did."""

    status: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        found: dict[str, Any] = json.loads(self.out)
        assert self.out.count("\n") == 1
        return found

    def complaint(self) -> str:
        """The one line on stderr by which it failed, the last."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("voicechat-client: ")]
        assert len(lines) == 1, self.err
        assert self.err.splitlines()[-1] == lines[0], self.err
        return lines[0].removeprefix("voicechat-client: ")


def client(*words: object, **environment: str) -> Ended:
    """Run it to its end."""
    with begun(*words, **environment) as process:
        return ended(process)


@contextmanager
def begun(
    *words: object, stdin: Any = None, stderr: Any = subprocess.PIPE, run: str = RUN, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed at the end if it still runs."""
    outside = {name: value for name, value in os.environ.items() if name not in OUTSIDE}
    command = [sys.executable, "-c", run, *map(str, words)]
    pipes: dict[str, Any] = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    with subprocess.Popen(command, env=outside | environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for its end."""
    out, err = process.communicate(timeout=LONGEST)
    return Ended(process.returncode, out, err)


def wait_for(what: Callable[[], bool]) -> None:
    """Until it is so."""
    deadline = time.monotonic() + LONGEST
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def samples_in(path: Path) -> int:
    """How many are in a WAV that may be growing; 0 as long as it is not there."""
    size = path.stat().st_size if path.exists() else 0
    return max(size - 44, 0) // 2


def sound_of(path: Path, rate: int = 22050, channels: int = 1) -> np.ndarray:
    """The samples of a whole WAV, int16 ``[S]`` or ``[S, channels]``: its header promises what is there."""
    info = soundfile.info(path)
    assert (info.format, info.subtype, info.samplerate, info.channels) == ("WAV", "PCM_16", rate, channels)
    samples: np.ndarray = soundfile.read(path, dtype="int16")[0]
    assert path.stat().st_size == 44 + samples.size * 2
    return samples


def events_of(path: Path) -> list[dict[str, Any]]:
    """The lines of ``--events``."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def require_same_ids(told: dict[str, Any], expected: "GenerationResult") -> None:
    """Ids, codes and texts are those of the model by itself."""
    assert {name: told[name] for name in IDS} == {name: getattr(expected, name) for name in IDS}
    assert told["audio_codes"] == expected.audio_codes.tolist()
