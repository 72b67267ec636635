"""Progress on stderr: a bar on a terminal, elsewhere a line every ten seconds of audio."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["discard", "position_progress"]

A_LINE = 125  # positions: ten seconds of audio


def discard(stream: TextIO) -> None:
    """Drop what a stream that cannot be written still holds: Python would flush it at its end, and fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def position_progress() -> Iterator[Callable[[int, int], None]]:
    """A callback ``(positions done, positions in all)`` that shows progress while the context lasts."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _print_line
        return
    columns = (TextColumn("positions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("positions", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_line(done: int, total: int) -> None:
    if done % A_LINE == 0 or (done == total and total > A_LINE):
        try:
            print(f"{done} of {total} positions", file=sys.stderr, flush=True)
        except (OSError, ValueError):
            discard(sys.stderr)  # nobody listens: no reason to lose the work
