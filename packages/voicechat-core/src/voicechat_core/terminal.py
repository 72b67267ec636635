"""What a person reads while a command runs: progress on stderr, and text that cannot do anything but be read.

Progress is a bar on a terminal, elsewhere a line now and then. Knows nothing of models.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["discard", "printable", "progress"]

A_LINE = 125  # of what is counted: ten seconds of audio, or a fourteenth of a checkpoint's tensors


def discard(stream: TextIO) -> None:
    """Drop what a stream that cannot be written still holds: Python would flush it at its end, and fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str, newline: str = "\\n") -> str:
    """Text that stays one line and can neither move the cursor nor ring the bell, whatever a model or a file says."""
    return "".join(c if c.isprintable() else "�" for c in text.replace("\n", newline))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A callback ``(done, in all)`` that shows how many of ``what`` are done while the context lasts."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: _print_line(what, done, total)
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_line(what: str, done: int, total: int) -> None:
    if done % A_LINE == 0 or (done == total and total > A_LINE):
        try:
            print(f"{done} of {total} {what}", file=sys.stderr, flush=True)
        except (OSError, ValueError):
            discard(sys.stderr)  # nobody listens: no reason to lose the work
