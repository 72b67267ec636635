"""A subject in a process of its own: JSON lines, one answer for one request, and the parent's side of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.bench.subject import FrameTime, Subject

__all__ = ["Remote", "WorkerError", "serve"]


PATIENCE_S = 30.0  # after the last answer


class WorkerError(Exception):
    """The process has ended, or its answer is an error."""


def serve(load: Callable[[], Subject]) -> None:
    """Load, say so, and answer requests until they end. What libraries print goes to stderr, not between answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    subject = load()
    _say(answers, subject.facts())
    for line in sys.stdin:
        _say(answers, _answer(subject, json.loads(line)))


def _answer(subject: Subject, request: dict[str, Any]) -> dict[str, Any]:
    match request.pop("do"):
        case "open":
            return {"ms": subject.open(**request)}
        case "frame":
            return vars(subject.frame())
        case "count":
            return subject.count(**request)
        case other:
            raise WorkerError(f"asked to do {other!r}")


def _say(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


class Remote:
    """A ``Subject`` whose work is done by a worker process."""

    def __init__(self, command: list[str], root: Path) -> None:
        self._command = command
        self._process = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        try:
            self._facts = self._read()
        except BaseException:
            self.__exit__()
            raise

    def facts(self) -> dict[str, Any]:
        return self._facts

    def open(self, prompt: str | None, *, staged: bool = False) -> float:
        return float(self._ask("open", prompt=prompt, staged=staged)["ms"])

    def frame(self) -> FrameTime:
        return FrameTime(**self._ask("frame"))

    def count(self, frames: int) -> dict[str, Any]:
        return self._ask("count", frames=frames)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The process ends when it is asked nothing more; one that does not answer is ended."""
        try:
            self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the reading says what happened
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # What is printed before ``serve`` takes stdout away, while modules are imported, is no answer.
        line = next((line for line in self._process.stdout if line.startswith("{")), None)
        if line is None:
            raise WorkerError(f"{' '.join(self._command)} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
