"""An end that nobody asked for is no success: the recording was not heard whole, or the answer was cut off."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.peers import run
from voicechat_client import Answer, LostError, SessionOptions
from voicechat_client.outputs import Outputs
from voicechat_client.send import Blocks
from voicechat_client.sending import Sending


class Whole:
    async def read(self, count: int) -> Any:
        return np.zeros(0, np.int16)


def nowhere() -> AbstractAsyncContextManager[Any]:
    raise AssertionError("it does not connect")


@pytest.mark.parametrize(("ended", "read"), [("done", False), ("cancelled", True), (None, True)])
def test_an_end_that_nobody_asked_for(ended: str | None, read: bool) -> None:
    async def main() -> None:
        blocks = Blocks(Whole(), 320)
        sending = Sending(nowhere, Path("x"), SessionOptions(), "fast", 0, 320, Outputs(), Answer(), None)
        if read:
            assert [block async for block in blocks] == []
        sending.answer.ended = ended
        with pytest.raises(LostError, match=r"by itself, after 0\.00 s of the recording"):
            sending._require_the_end(blocks)

    run(main)


def test_the_end_that_was_asked_for() -> None:
    async def main() -> None:
        blocks = Blocks(Whole(), 320)
        sending = Sending(nowhere, Path("x"), SessionOptions(), "fast", 0, 320, Outputs(), Answer(), None)
        assert [block async for block in blocks] == []
        sending.answer.ended = "done"
        sending._require_the_end(blocks)

    run(main)
