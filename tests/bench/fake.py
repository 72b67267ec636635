"""A subject that computes nothing and whose clock is a list: for tests."""

from typing import Any

from tests.bench.serving import serve
from tests.bench.subject import STAGES, FrameTime

__all__ = ["Fake"]


class Fake:
    """Its frames take ``frame_ms``, but the second of a session ``second_ms``; a start a millisecond a letter."""

    def __init__(self, frame_ms: float = 2.0, second_ms: float = 8.0) -> None:
        self.frame_ms, self.second_ms = frame_ms, second_ms
        self.asked: list[str] = []
        self._frames, self._staged = 0, False

    def facts(self) -> dict[str, Any]:
        return {"backend": {"mlx": "1"}}

    def open(self, prompt: str | None, *, staged: bool = False) -> float:
        self.asked.append(f"open {prompt!r}{' staged' if staged else ''}")
        self._frames, self._staged = 0, staged
        return 0.5 if prompt is None else float(len(prompt))

    def frame(self) -> FrameTime:
        self._frames += 1
        ms = self.second_ms if self._frames == 2 else self.frame_ms
        return FrameTime(ms, dict.fromkeys(STAGES, ms / 4) if self._staged else {})

    def count(self, frames: int) -> dict[str, Any]:
        return {"host_waits": 1.0, "primitives": 10.0 * frames}


def noisy() -> Fake:
    print('{"what a library": "prints while it loads"}')
    return Fake()


if __name__ == "__main__":
    print("what a library prints while it is imported")
    serve(noisy)
