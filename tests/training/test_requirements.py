"""What the trainings and the judge are installed from: every package by version and hash, as SOURCES.md has them."""

import re
from pathlib import Path

from training import make

TRAINING = Path(make.__file__).parent
PINNED = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>\S+) \\\n(?P<hashes>(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M
)


def pins() -> dict[str, tuple[str, set[str]]]:
    """Version and hashes of each package."""
    text = (TRAINING / "requirements.txt").read_text(encoding="utf-8")
    found = {
        pin["name"]: (pin["version"], set(re.findall(r"[0-9a-f]{64}", pin["hashes"]))) for pin in PINNED.finditer(text)
    }
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(found) == len(lines), "a line has no hash"
    return found


def test_what_is_asked_for_is_pinned() -> None:
    asked = (TRAINING / "requirements.in").read_text(encoding="utf-8").splitlines()
    wanted = dict(line.split("==") for line in asked if line and not line.startswith("#"))
    pinned = pins()
    assert len(wanted) >= 13
    assert {name: pinned[name][0] for name in wanted} == wanted


def test_the_files_of_sources_are_among_them() -> None:
    sources = (TRAINING / "SOURCES.md").read_text(encoding="utf-8")
    listed = re.findall(r"`([a-z0-9-]+)` \| (\S+) \| `([0-9a-f]{64})`", sources)
    packages = [row for row in listed if row[0] in pins()]
    assert len(packages) == 9
    for name, version, digest in packages:
        assert pins()[name][0] == version
        assert digest in pins()[name][1], name


def test_the_versions_of_sources_are_these() -> None:
    sources = (TRAINING / "SOURCES.md").read_text(encoding="utf-8")
    runs = sources.split("## What runs them")[1].split("##")[0]
    said = dict(re.findall(r"([a-z][a-z0-9-]+)\s(\d+\.\d+\.\d+)", runs))
    assert len(said) == 8
    assert {name: pins()[name][0] for name in said} == said
