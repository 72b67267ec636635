"""A directory that appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from voicechat_core.errors import CheckpointError

__all__ = ["written_whole"]


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """A place beside ``directory`` to write in, which takes its name when all is there.

    If the writing fails, it goes again. If the process is killed, a hidden directory stays and hinders nobody. A
    directory that exists is filled if it is empty: its owner and its rights are then kept.

    Raises:
        CheckpointError: when it exists and is not empty, or cannot be written.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise CheckpointError(f"{directory}: exists already and is not an empty directory")
        directory.parent.mkdir(parents=True, exist_ok=True)
        draft = _draft_of(directory)
        try:
            draft.mkdir()
            yield draft
            _publish(draft, directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except (OSError, RuntimeError, UnicodeError) as error:  # MLX says RuntimeError where a disk is full
        raise CheckpointError(f"{directory}: cannot be written: {error}") from error


def _draft_of(directory: Path) -> Path:
    """Beside a directory that is to come, so that it can be renamed; inside one that is there."""
    inside = directory.exists()
    return (directory if inside else directory.parent) / f".{directory.name}.partial-{os.getpid()}"


def _publish(draft: Path, directory: Path) -> None:
    if not directory.exists():
        draft.rename(directory)
        return
    for file in draft.iterdir():
        file.rename(directory / file.name)
