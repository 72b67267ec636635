"""Paths as people write them, and a directory that appears whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from uuid import uuid4

from voicechat_core.errors import CheckpointError

__all__ = ["expanded", "written_whole"]

TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # what a rename says where something has that name


def expanded(path: str | PathLike[str]) -> Path:
    """A path with its ``~`` resolved; as it is where there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's raises there


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """A place beside ``directory`` to write in, which takes its name when all is there.

    If the writing fails, it goes again. If the process is killed, a hidden directory stays and hinders nobody. A
    directory that exists is filled if it is empty: its owner and its rights are then kept. Of two that write at the
    same time one is refused at its end.

    Raises:
        CheckpointError: when it exists and is not empty, at the start or at the end, or cannot be written.
    """
    try:
        inside = directory.exists()
        if inside:
            _check_empty(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        draft = _draft_of(directory, inside)
        draft.mkdir()  # before the try: a draft that is not ours must stay
        try:
            yield draft
            _fill(draft, directory) if inside else _rename(draft, directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except (OSError, RuntimeError, UnicodeError) as error:  # MLX says RuntimeError where a disk is full
        raise CheckpointError(f"{directory}: cannot be written: {error}") from error


def _check_empty(directory: Path) -> None:
    """Refuse what holds more than drafts: those of killed runs, and of others that write now."""
    drafts = _drafts_begin(directory)
    if not directory.is_dir() or any(not file.name.startswith(drafts) for file in directory.iterdir()):
        raise CheckpointError(f"{directory}: exists already and is not an empty directory")


def _drafts_begin(directory: Path) -> str:
    return f".{directory.name}.partial-"


def _draft_of(directory: Path, inside: bool) -> Path:
    """Beside a directory that is to come, so that it can be renamed; inside one that is there."""
    unique = f"{os.getpid()}-{uuid4().hex[:12]}"  # not by the process alone: threads, and disks that machines share
    return (directory if inside else directory.parent) / f"{_drafts_begin(directory)}{unique}"


def _rename(draft: Path, directory: Path) -> None:
    try:
        draft.rename(directory)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        raise CheckpointError(f"{directory}: exists already: it was made while this was written") from error


def _fill(draft: Path, directory: Path) -> None:
    _check_empty(directory)
    for file in draft.iterdir():
        file.rename(directory / file.name)
