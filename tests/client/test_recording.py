"""A file is read where it is asked for, a pipe in a thread that can be left behind."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
import trio

from voicechat_client.recording import opened
from voicechat_core.errors import AudioError

SAMPLES = np.arange(-500, 500, dtype=np.int16)
LONGEST = 20.0


def run(test: object) -> None:
    async def bounded() -> None:
        with trio.fail_after(LONGEST):
            await test()  # type: ignore[operator]

    trio.run(bounded)


def written(tmp_path: Path) -> Path:
    soundfile.write(tmp_path / "a.wav", SAMPLES, 16000, subtype="PCM_16")
    return tmp_path / "a.wav"


def test_a_file(tmp_path: Path) -> None:
    path = written(tmp_path)

    async def main() -> None:
        async with opened(path) as recording:
            assert recording.seconds == 1000 / 16000
            assert np.array_equal(await recording.read(999), SAMPLES[:999])
            assert np.array_equal(await recording.read(999), SAMPLES[999:])
            assert len(await recording.read(999)) == 0

    run(main)


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "b.wav").write_text("no sound")

    async def main() -> None:
        for path, said in ((tmp_path / "none.wav", "No such file"), (tmp_path / "b.wav", "cannot be read as audio")):
            with pytest.raises(AudioError, match=said):
                async with opened(path):
                    pass

    run(main)


def test_a_pipe_does_not_stop_the_others(tmp_path: Path) -> None:
    """Not when it is opened, nor when it is read; and it is closed at the end."""
    data, pipe = written(tmp_path).read_bytes(), tmp_path / "pipe"
    data = data[:4] + b"\xff\xff\xff\xff" + data[8:40] + b"\xff\xff\xff\xff" + data[44:]
    os.mkfifo(pipe)
    told = trio.Event()

    async def main() -> None:
        async def feed() -> None:
            await trio.sleep(0.1)
            with await trio.to_thread.run_sync(lambda: pipe.open("wb", buffering=0)) as end:
                end.write(data[: 44 + 2 * 300])
                await told.wait()
                await trio.sleep(0.1)
                end.write(data[44 + 2 * 300 :])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed)
            async with opened(pipe) as recording:
                assert recording.seconds is None
                assert np.array_equal(await recording.read(300), SAMPLES[:300])
                told.set()
                assert np.array_equal(await recording.read(10**4), SAMPLES[300:])
                assert len(await recording.read(1)) == 0

    run(main)


@pytest.mark.parametrize("feeds", [False, True])
def test_a_silent_pipe_can_be_left(feeds: bool, tmp_path: Path) -> None:
    data, pipe = written(tmp_path).read_bytes(), tmp_path / "pipe"
    os.mkfifo(pipe)
    ends: list[int] = []

    async def main() -> None:
        with trio.move_on_after(0.3) as scope:
            async with opened(pipe) as recording:
                await recording.read(2000)
        assert scope.cancelled_caught

    if feeds:
        ends.append(os.open(pipe, os.O_RDWR))
        os.write(ends[0], data[: 44 + 600])
    run(main)
    # Let the thread go, which is still there.
    ends = ends or [os.open(pipe, os.O_RDWR)]
    os.write(ends[0], bytes(4000))
    os.close(ends[0])
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(0.2)
