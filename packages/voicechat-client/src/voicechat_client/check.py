"""Proves an installation: what a server answered must be what ``voicechat generate`` answers to the same samples.

The model runs in a process of its own, the core's command: this package needs no MLX. Ids, codes and texts must be
equal on all frames. A live answer is heard eight samples later than a recording's, since the codec looks that far
ahead; from then on each sample may be one 16-bit step off.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from voicechat_client.recording import Pcm16
from voicechat_core.audio_stream import AudioReader
from voicechat_core.errors import VoiceChatError

__all__ = ["CheckError", "Difference", "command", "compare", "examine", "generate", "scratch"]

LEAD_IN: Final = 8  # samples, of 22,050 a second
SETTLED: Final = 14  # the first sample of a live answer that no longer hangs on what was before time 0
MOST_STEPS: Final = 1  # of 16 bits: float32 sums that were added in another order
SHOWN: Final = 60


class CheckError(VoiceChatError):
    """``voicechat generate`` could not be run."""


@dataclass(frozen=True)
class Difference:
    """Where an answer is not the offline one."""

    what: str
    live: object
    offline: object

    def __str__(self) -> str:
        return f"{self.what}: the server gave {_shown(self.live)}, generate {_shown(self.offline)}"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for what only the check needs.

    Raises:
        CheckError: when there can be none.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="voicechat-check-")
    except OSError as error:
        raise CheckError(f"--check needs a temporary folder: {error.strerror}") from None
    with folder as name:
        yield Path(name)


def command() -> list[str]:
    """The core's command: beside this Python, or on the path.

    Raises:
        CheckError: when there is none.
    """
    found = shutil.which("voicechat", path=str(Path(sys.executable).parent)) or shutil.which("voicechat")
    if found is None:
        raise CheckError('--check needs the command voicechat: install "voicechat-core[mlx]"')
    return [found]


async def examine(checkpoint: str, *, program: list[str] | None = None) -> None:
    """Find out before the conversation that ``generate`` could not be run. Reads no weights, so it takes a second.

    Raises:
        CheckError: when there is no such checkpoint, it is not whole, or the command does not work.
    """
    result = await _run(["inspect", "--json", "--", checkpoint], program)
    if result.returncode == 0:
        return
    problems = json.loads(result.stdout)["problems"] if result.stdout else []
    raise CheckError(f"--check: {problems[0]}" if problems else _failure("inspect", result))


async def generate(
    checkpoint: str, spoken: Path, *, system_prompt: str | None, seed: int, program: list[str] | None = None
) -> tuple[dict[str, Any], Pcm16]:
    """What ``voicechat generate --json`` prints for a recording, and the answer's samples ``[S]`` at 22,050 Hz.

    A call that is cancelled ends its process.

    Raises:
        CheckError: when it fails, with its own words.
    """
    with scratch() as folder:
        wav = folder / "offline.wav"
        words = ["generate", "-m", checkpoint, "--audio", str(spoken), "--output-audio", str(wav)]
        words += ["--seed", str(seed), "--json", *([] if system_prompt is None else ["-p", system_prompt])]
        result = await _run(words, program)
        if result.returncode:
            raise CheckError(_failure("generate", result))
        with AudioReader(wav, 22050) as reader:
            return json.loads(result.stdout), reader.read_pcm16(2**62)


async def _run(words: list[str], program: list[str] | None) -> subprocess.CompletedProcess[bytes]:
    """Run the core's command to its end."""
    line = [*(program or command()), *words]
    try:
        return await trio.run_process(line, capture_stdout=True, capture_stderr=True, check=False)
    except OSError as error:
        raise CheckError(f"--check: {line[0]} cannot be run: {error.strerror}") from None


def _failure(name: str, result: subprocess.CompletedProcess[bytes]) -> str:
    said = result.stderr.decode(errors="replace").strip().splitlines() or ["no word"]
    return f"voicechat {name} failed with {result.returncode}: {said[-1].removeprefix('voicechat: ')}"


def compare(live: dict[str, Any], live_pcm: Pcm16, offline: dict[str, Any], offline_pcm: Pcm16) -> list[Difference]:
    """Every difference, the ids' first ones first; none if the answers are the same."""
    found: list[Difference] = []
    if live["frames_skipped"]:
        found.append(Difference("frames that the server skipped", live["frames_skipped"], 0))
    offline = {**offline, "transcript": offline["transcript"] or ""}  # null where the checkpoint has no such branch
    for name in ("frames", "text_tokens", "function_tokens", "audio_codes", "transcript", "text", "function_text"):
        if live[name] != offline[name]:
            found.append(_first(name, live[name], offline[name]))
    if live_pcm.size != offline_pcm.size:
        found.append(Difference("samples of sound", live_pcm.size, offline_pcm.size))
    elif live_pcm.size > SETTLED:
        found += _of_sound(live_pcm[SETTLED:], offline_pcm[SETTLED - LEAD_IN : -LEAD_IN])
    return found


def _first(name: str, live: Any, offline: Any) -> Difference:
    """Of a list its first place that differs."""
    if isinstance(live, list) and isinstance(offline, list):
        for frame, (ours, theirs) in enumerate(zip(live, offline, strict=False)):
            if ours != theirs:
                return Difference(f"{name} of frame {frame}", ours, theirs)
        return Difference(f"number of {name}", len(live), len(offline))
    return Difference(name, live, offline)


def _of_sound(live: Pcm16, offline: Pcm16) -> list[Difference]:
    off = np.abs(live.astype(np.int32) - offline)
    if off.max() <= MOST_STEPS:
        return []
    place = int(off.argmax())
    what = f"sound, {int((off > MOST_STEPS).sum())} samples, the furthest at sample {place + SETTLED}"
    return [Difference(what, int(live[place]), int(offline[place]))]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
