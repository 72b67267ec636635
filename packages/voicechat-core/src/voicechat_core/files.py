"""A directory that appears whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from voicechat_core.errors import CheckpointError

__all__ = ["written_whole"]


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """A corner of ``directory`` to write in: what is there at the end moves up, so that nobody finds half of it.

    The directory is made if it does not exist, and goes again if the writing fails.

    Raises:
        CheckpointError: when it exists and is not empty, or cannot be written.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise CheckpointError(f"{directory}: exists already and is not an empty directory")
        is_new = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory) as scratch:
                yield Path(scratch)
                for file in Path(scratch).iterdir():
                    file.rename(directory / file.name)
        except BaseException:
            if is_new:
                shutil.rmtree(directory, ignore_errors=True)
            raise
    except (OSError, RuntimeError) as error:  # MLX says RuntimeError where a disk is full
        raise CheckpointError(f"{directory}: cannot be written: {error}") from error
