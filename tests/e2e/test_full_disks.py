"""A disk that becomes full while an output grows: status 1, one line that names the file, and the others are whole.

Whatever had arrived by then is in every other output, and in the full one what found room, in whole samples or lines.
"""

import json
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import FRAME, RUN, Ended, begun, client, ended, events_of, sound_of
from tests.e2e.conftest import SPOKEN
from tests.server.server_process import ServerProcess

PAGE = resource.getpagesize()  # what a tmpfs gives room by
NAMES = {"--out": "answer.wav", "--stereo": "both.wav", "--events": "log.jsonl", "--transcript": "words.json"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 pages."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={16 * PAGE}", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def leave(pages: int, disk: Path) -> None:
    (disk / "ballast").write_bytes(bytes((16 - pages) * PAGE))


def require_whole(found: Ended, paths: dict[str, Path], full: str) -> None:
    """All but the full one hold what is told; that one holds a part, and nothing that is half a thing."""
    told = found.json()
    if full != "--out":
        assert len(sound_of(paths["--out"])) == FRAME * told["frames"]
    if full != "--stereo":
        assert len(sound_of(paths["--stereo"], channels=2)) >= FRAME * told["frames"]
    codes = [event["audio_codes"] for event in events_of(paths["--events"]) if event["type"] == "response.audio.delta"]
    assert codes == told["audio_codes"][: len(codes)]
    if full != "--events":
        assert len(codes) == told["frames"]
    if full != "--transcript":
        words = json.loads(paths["--transcript"].read_text())
        assert "".join(word["text"] for word in words if word["who"] == "assistant") == told["text"]


@pytest.mark.parametrize(
    ("full", "pages", "frames"), [("--out", 16, 18), ("--stereo", 16, 9), ("--events", 4, 10), ("--transcript", 0, 75)]
)
def test_a_disk_that_becomes_full(
    full: str, pages: int, frames: int, server: ServerProcess, url: str, tmp_path: Path, small_disk: Path
) -> None:
    paths = {option: (small_disk if option == full else tmp_path) / name for option, name in NAMES.items()}
    leave(pages, small_disk)
    options: list[Any] = [word for pair in paths.items() for word in pair]
    found = client("send", SPOKEN, "--url", url, "--pace", "fast", "--json", *options)
    assert found.status == 1
    assert found.complaint().startswith(f"{paths[full]}: ")
    assert "No space left on device" in found.complaint()
    told = found.json()
    assert told["error"] == found.complaint()
    assert told["frames"] >= frames
    assert paths[full].stat().st_size <= pages * PAGE
    require_whole(found, paths, full)
    if full == "--out":
        assert len(sound_of(paths[full])) == (16 * PAGE - 44) // 2
    if full == "--stereo":
        assert len(sound_of(paths[full], channels=2)) == (16 * PAGE - 44) // 4
    server.wait_until_ready()  # the client has left in good order


def test_a_stereo_file_that_may_not_grow(url: str, tmp_path: Path) -> None:
    """The same where nothing can be mounted: no file may grow beyond 50 kB, which stereo reaches first."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50000, {resource.RLIM_INFINITY}))\n"
    paths = {option: tmp_path / name for option, name in NAMES.items()}
    options: list[Any] = [word for pair in paths.items() for word in pair]
    with begun("send", SPOKEN, "--url", url, "--pace", "realtime", "--json", *options, run=limit + RUN) as process:
        found = ended(process)
    assert found.status == 1
    assert found.complaint() == f"{paths['--stereo']}: File too large"
    assert len(sound_of(paths["--stereo"], channels=2)) == (50000 - 44) // 4
    assert found.json()["frames"] >= 7
    require_whole(found, paths, "--stereo")
