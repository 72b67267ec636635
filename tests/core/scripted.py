"""A model whose heads choose what a test says."""

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any

import mlx.core as mx
import pytest

from voicechat_core import duplex
from voicechat_core.duplex import Frame

PAD, START, END, DONE = 12, 20, 21, 22
SAID = 40  # a text id that the model would always say


def script(monkeypatch: pytest.MonkeyPatch, ids: Iterable[int], text: Iterable[int] | None = None) -> None:
    """From now on the function head chooses ``ids``, one a frame of whatever session, then PAD, and the text head
    ``text``, then PAD too; without one, always ``SAID``."""
    original = getattr(duplex._think, "original", duplex._think)
    left: Iterator[int] = chain(ids, repeat(PAD))
    words: Iterator[int] = repeat(SAID) if text is None else chain(text, repeat(PAD))

    def think(model: Any, audio: mx.array, *rest: Any) -> Frame:
        frame: Frame = original(model, audio, *rest)
        if audio.shape[1] == 1:
            frame.text = mx.array([[next(words)]], mx.int32)
            frame.function = mx.array([[next(left)]], mx.int32)
        return frame

    think.original = original  # type: ignore[attr-defined]
    monkeypatch.setattr(duplex, "_think", think)
