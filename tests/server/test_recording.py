"""Recordings: what is in them, disks that are full or slow, connections that end anywhere. Trio's mock clock."""

import base64
import errno
import json
import logging
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.server.fake_worker import FakeVoiceChat
from tests.server.recording_house import (
    CANCEL,
    COMMIT,
    FINGERPRINT,
    PING,
    RecordedWorker,
    append,
    at_once,
    facts,
    hear_all,
    hear_until,
    house,
    lines,
    pcm,
    run,
    sound,
    update,
)
from voicechat_core import InputError
from voicechat_server.app import App, Settings
from voicechat_server.auth import Gate
from voicechat_server.http import Request
from voicechat_server.recording import OnDisk, Recorder, RecordingLimits, Recordings, recorded
from voicechat_server.recording_files import Folder
from voicechat_server.transport import MemoryPeer, memory_transport

HEARD = sound(3.5)


def spoken(messages: list[dict[str, Any]]) -> bytes:
    return b"".join(base64.b64decode(m["delta"]) for m in messages if m["type"] == "response.audio.delta")


def slow(seconds: float) -> OnDisk:
    async def slowly(work: Callable[[], None]) -> None:
        await trio.sleep(seconds)
        work()

    return slowly


def of(kind: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in found if line["what"] == kind]


# ---- what is in a folder


def test_a_conversation_as_it_lies_on_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path, frame_seconds=0.5, tts_context_frames=9) as home:
            peer = home.enter()
            created = await hear_until(peer, "session.created")
            assert created[0]["session"]["recording"] is True
            lag = {"policy": "skip", "max_seconds": 1000}
            await peer.say(update(seed=7, system_prompt="Be kind.", lag=lag))
            await hear_until(peer, "session.updated")
            for message in (PING, "no JSON", b"\x00\x01\x02", append(HEARD[:3000]), append(HEARD[3000:]), COMMIT):
                await peer.say(message)
            messages = await hear_all(peer)
            await home.over.wait()

            folder = home.folder()
            assert folder.name.endswith("Z-sess_0000000000000000")
            assert np.array_equal(pcm(folder / "input.pcm"), HEARD)
            assert (folder / "output.pcm").read_bytes() == spoken(messages)
            assert len(spoken(messages)) == 4 * 2 * 1764

            told = facts(folder)
            assert told["versions"].keys() == {
                "python", "platform", "voicechat-core", "voicechat-server", "mlx", "numpy",
            }  # fmt: skip
            ending = {"frames": 4, "seconds": told["ended"]["seconds"], "ended_by": "done", "code": 1000}
            assert 2.0 <= told["ended"]["seconds"] < 3.5
            opening = {"system_prompt": "Be kind.", "seed": 7, "max_frames": 7500, "tts_context_frames": 9}
            calls = {"tools": False, "tool_wait_frames": 125}
            assert {**told, "versions": 0, "started": 0} == {
                "format": 1, "session": "sess_0000000000000000", "started": 0, "model": "fake",
                "checkpoint": "/checkpoint", "precision": "auto", "fingerprint": FINGERPRINT, "versions": 0,
                "compiled": False,
                "opening": {**opening, **calls, "skip_beyond_seconds": 1000.0}, "ended": ending, "complete": True,
                "incomplete_because": None, "input_samples": 4480, "output_samples": 7056,
            }  # fmt: skip

    run(main)


def test_the_log_has_both_directions_without_their_audio(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path, frame_seconds=0.5) as home:
            peer = await home.begin(seed=7)
            for message in (PING, "no JSON", b"\x00\x01\x02", append(HEARD), COMMIT):
                await peer.say(message)
            messages = await hear_all(peer)
            await home.over.wait()
            log = lines(home.folder())

            times = [line["at"] for line in log]
            assert times == sorted(times)
            assert [m["type"] for m in (line["message"] for line in of("client", log))] == [
                "session.update", "session.ping", "input_audio_buffer.append", "input_audio_buffer.commit",
            ]  # fmt: skip
            assert of("client", log)[2]["message"] == {
                "type": "input_audio_buffer.append", "audio": 4480, "sample_rate": 16000,
            }  # fmt: skip
            assert [(line["begins"], line["characters"]) for line in of("unreadable", log)] == [("no JSON", 7)]
            assert [line["size"] for line in of("binary", log)] == [3]
            assert [line["pad_partial"] for line in of("flush", log)] == [True]
            assert [(line["frame_index"], line["seconds"] >= 0) for line in of("frame", log)] == [
                (index, True) for index in range(4)
            ]
            sent = [line["message"] for line in of("server", log)]
            assert [m["type"] for m in sent[:2]] == ["session.created", "session.updated"]
            assert [{**m, **shown(m)} for m in messages] == sent[2:]
            assert sent[-3]["text"] == len("7.3 ")
            assert sent[-2]["delta"] == 1764

    run(main)


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """What the log has instead."""
    if message["type"] == "response.audio.delta":
        return {"delta": len(base64.b64decode(message["delta"])) // 2}
    return {"text": len(message["text"])} if message["type"] == "response.text.delta" else {}


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    async def main() -> None:
        root = tmp_path / "new" / "recordings"
        async with house(root) as home:
            peer = await home.begin()
            await peer.say(CANCEL)
            await hear_all(peer)
            await home.over.wait()
            assert stat.S_IMODE(root.stat().st_mode) == 0o700
            assert stat.S_IMODE(home.folder().stat().st_mode) == 0o700
            files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in home.folder().iterdir()}
            assert files == dict.fromkeys(("session.json", "wire.jsonl", "input.pcm", "output.pcm"), 0o600)

    run(main)


def test_long_text_of_a_peer_is_cut_but_the_prompt_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path) as home:
            peer = home.enter()
            await hear_until(peer, "session.created")
            await peer.say("x" * 10**6)
            await peer.say(update(system_prompt="p" * 8000, model="m" * 10**6))
            await hear_until(peer, "session.updated")
            await peer.say(CANCEL)
            await hear_all(peer)
            await home.over.wait()
            log = lines(home.folder())
            assert of("unreadable", log)[0] == {**of("unreadable", log)[0], "begins": "x" * 300, "characters": 10**6}
            session = of("client", log)[0]["message"]["session"]
            assert session["system_prompt"] == "p" * 300 + "... (8000 characters)"
            assert session["model"] == "m" * 300 + "... (1000000 characters)"
            assert (home.folder() / "wire.jsonl").stat().st_size < 5000
            assert facts(home.folder())["opening"]["system_prompt"] == "p" * 8000

    run(main)


class Choosy(FakeVoiceChat):
    """It opens no session with seed 1."""

    def session(self, **options: Any) -> Any:
        if options.get("seed") == 1:
            raise InputError("not this seed")
        return super().session(**options)


@pytest.mark.parametrize("seconds", [0.0, 1.9])
def test_after_a_failed_update_the_input_begins_anew(tmp_path: Path, seconds: float) -> None:
    """Also where both are written at once, by a disk that was busy meanwhile."""

    async def main() -> None:
        limits = RecordingLimits(tail_seconds=10)
        async with house(tmp_path, on_disk=slow(seconds), limits=limits, voicechat=Choosy(), open_seconds=1.0) as home:
            peer = home.enter()
            await hear_until(peer, "session.created")
            await peer.say(update(seed=1))
            await peer.say(append(sound(9, seed=1)))
            await hear_until(peer, "error")
            await peer.say(update(seed=2))
            await peer.say(append(HEARD))
            await peer.say(COMMIT)
            messages = await hear_all(peer)
            await home.over.wait()
            folder = home.folder()
            assert np.array_equal(pcm(folder / "input.pcm"), HEARD)
            assert (folder / "output.pcm").read_bytes() == spoken(messages)
            assert facts(folder)["opening"]["seed"] == 2
            assert facts(folder)["input_samples"] == 4480
            assert len(of("opening", lines(folder))) == 2
            assert [line["frame_index"] for line in of("frame", lines(folder))] == [0, 1, 2, 3]

    run(main)


def test_skipped_frames_have_their_place(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path, frame_seconds=0.08) as home:
            peer = await home.begin(lag={"policy": "skip", "max_seconds": 0.4})
            await peer.say(append(sound(2)))
            await hear_until(peer, "response.audio.delta")
            await peer.say(append(sound(38)))
            await peer.say(COMMIT)
            messages = await hear_all(peer)
            await home.over.wait()
            ran = [m["frame_index"] for m in messages if m["type"] == "response.audio.delta"]
            skipped = of("skipped", lines(home.folder()))
            assert sum(line["frames"] for line in skipped) + len(ran) + 1 == 40
            assert 1 <= skipped[0]["before_frame"] <= 3
            assert pcm(home.folder() / "input.pcm").size == 40 * 1280

    run(main)


def test_nothing_is_recorded_unless_it_is_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path, record=False) as home:
            peer = home.enter()
            created = await hear_until(peer, "session.created")
            assert "recording" not in created[0]["session"]
            await peer.say(update())
            await hear_until(peer, "session.updated")
            await peer.say(append(HEARD))
            await peer.say(COMMIT)
            assert (await hear_all(peer))[-1]["type"] == "response.done"
            await home.over.wait()
            assert list(tmp_path.iterdir()) == []

    run(main)


def test_what_is_there_while_the_conversation_goes_on(tmp_path: Path) -> None:
    """And if the process is killed."""

    async def main() -> None:
        async with house(tmp_path, frame_seconds=0.5) as home:
            peer = await home.begin(seed=3)
            await peer.say(append(sound(30)))
            heard = [m for _ in range(4) for m in await hear_until(peer, "response.audio.delta")]
            await wait_all_tasks_blocked()
            folder = home.folder()
            told = facts(folder)
            assert (told["complete"], told["ended"], told["opening"]["seed"]) == (False, None, 3)
            assert pcm(folder / "input.pcm").size == 30 * 1280
            assert (folder / "output.pcm").read_bytes() == spoken(heard)
            sent = [line["message"]["type"] for line in of("server", lines(folder))]
            assert sent.count("response.audio.delta") == 4
            peer.leave()

    run(main)


def test_input_that_waits_for_room_was_not_heard(tmp_path: Path) -> None:
    """Of three messages one waits, as more than a second is queued; the session never gets it."""

    async def main() -> None:
        async with house(tmp_path, frame_seconds=1000, most_input_seconds=1.0) as home:
            peer = await home.begin()
            parts = [sound(10, seed=part) for part in range(3)]
            for part in parts:
                await peer.say(append(part))
            await wait_all_tasks_blocked()
            home.cancel.cancel()
            await home.over.wait()
            log = lines(home.folder())
            assert [line["message"]["type"] for line in of("client", log)].count("input_audio_buffer.append") == 3
            assert np.array_equal(pcm(home.folder() / "input.pcm"), np.concatenate(parts[:2]))

    run(main)


# ---- connections that end


@pytest.mark.parametrize("moment", ["before created", "before update", "during open", "mid frame", "after commit"])
def test_a_peer_that_vanishes(tmp_path: Path, moment: str) -> None:
    async def main() -> None:
        async with house(tmp_path, open_seconds=1.0, frame_seconds=0.5) as home:
            peer = home.enter()
            if moment != "before created":
                await hear_until(peer, "session.created")
            if moment not in ("before created", "before update"):
                await peer.say(update(seed=3))
            heard: list[dict[str, Any]] = []
            if moment in ("mid frame", "after commit"):
                await hear_until(peer, "session.updated")
                await peer.say(append(sound(30)))
                heard += await hear_until(peer, "response.audio.delta")
            if moment == "after commit":
                await peer.say(COMMIT)
                heard += await hear_until(peer, "response.audio.delta")
            if heard:
                await trio.sleep(2)  # a message waits for the peer to take it
            await wait_all_tasks_blocked()
            peer.leave()
            await home.over.wait()
            folder = home.folder()
            told = facts(folder)
            assert (told["complete"], told["ended"]["ended_by"], told["ended"]["code"]) == (True, "the peer left", 1000)
            assert (told["opening"] is None) == (moment in ("before created", "before update"))
            assert pcm(folder / "input.pcm").size == (30 * 1280 if heard else 0)
            assert (folder / "output.pcm").read_bytes() == spoken(heard)
            assert len(of("flush", lines(folder))) == (moment == "after commit")

    run(main)


def test_a_connection_that_is_cancelled_is_written_to_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path, on_disk=slow(0.3), frame_seconds=0.01) as home:
            peer = await home.begin()
            await peer.say(append(sound(20)))
            heard = [m for _ in range(20) for m in await hear_until(peer, "response.audio.delta")]
            began = trio.current_time()
            home.cancel.cancel()
            await home.over.wait()
            assert trio.current_time() - began <= 2.0
            folder = home.folder()
            assert (folder / "output.pcm").read_bytes() == spoken(heard)
            told = facts(folder)
            assert (told["complete"], told["ended"]["frames"], told["ended"]["code"]) == (True, 20, 1011)
            assert told["output_samples"] == 20 * 1764

    run(main)


def test_an_error_in_the_block_passes_and_the_folder_is_whole(tmp_path: Path) -> None:
    async def main() -> None:
        recordings = Recordings(tmp_path, model="m", checkpoint=tmp_path, precision="auto", on_disk=at_once)

        async def fail() -> None:
            async with recorded(recordings, "sess_1") as watcher:
                watcher.saw("no JSON")
                raise ZeroDivisionError

        with pytest.raises(ExceptionGroup) as caught:
            await fail()
        assert caught.group_contains(ZeroDivisionError)
        (folder,) = tmp_path.iterdir()
        assert (facts(folder)["complete"], facts(folder)["ended"]) == (True, None)
        assert len(lines(folder)) == 1

    run(main)


# ---- disks


async def talk_to_the_end(home: Any) -> list[dict[str, Any]]:
    peer = await home.begin()
    await peer.say(append(sound(20)))
    await peer.say(COMMIT)
    messages = await hear_all(peer)
    await home.over.wait()
    assert peer.closed == (1000, "done")
    assert [m["type"] for m in messages].count("response.audio.delta") == 20
    return messages


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_becomes_full_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the system's own limit on files, which takes a part of the last write first."""

    async def full(work: Callable[[], None]) -> None:
        await trio.lowlevel.checkpoint()
        with files_of_at_most(20001):
            work()

    async def main() -> None:
        async with house(tmp_path, on_disk=full, frame_seconds=0.01) as home:
            await talk_to_the_end(home)
            folder = home.folder()
            told = facts(folder)
            assert told["complete"] is False
            assert told["incomplete_because"].startswith("it cannot be written: ")
            assert told["ended"]["ended_by"] == "done"
            assert (told["input_samples"], told["output_samples"]) == (None, None)
            assert (folder / "input.pcm").stat().st_size == 20001
            assert (folder / "output.pcm").stat().st_size == 0  # it was the end

    run(main)
    (line,) = complaints(caplog)
    assert line.startswith(f"sess_0000000000000000: the recording in {tmp_path}")
    assert "is not complete: it cannot be written: " in line


def test_no_line_tells_of_samples_that_are_not_there(tmp_path: Path) -> None:
    """The third frame's sound does not fit any more."""

    async def full(work: Callable[[], None]) -> None:
        await trio.lowlevel.checkpoint()
        with files_of_at_most(2 * 3528 + 100):
            work()

    async def main() -> None:
        async with house(tmp_path, on_disk=full) as home:
            peer = await home.begin()
            await peer.say(append(sound(2.2)))
            for _ in range(3):
                await hear_until(peer, "response.audio.delta")
                await wait_all_tasks_blocked()  # until it is written
            peer.leave()
            await home.over.wait()
            folder = home.folder()
            sent = [line["message"]["type"] for line in of("server", lines(folder))]
            assert sent.count("response.audio.delta") == 2
            assert (folder / "output.pcm").stat().st_size == 2 * 3528 + 100
            assert facts(folder)["complete"] is False

    run(main)


def test_a_failure_is_marked_before_the_conversation_ends(tmp_path: Path) -> None:
    """For a process that is killed then."""

    async def main() -> None:
        async with house(tmp_path, limits=RecordingLimits(folder_bytes=2000)) as home:
            peer = await home.begin()
            await peer.say(append(sound(3)))
            await hear_until(peer, "response.audio.delta")
            await wait_all_tasks_blocked()
            told = facts(home.folder())
            assert told["incomplete_because"] == "it would grow beyond 2000 bytes"
            assert told["ended"] is None
            peer.leave()
            await home.over.wait()
            assert facts(home.folder())["ended"]["ended_by"] == "the peer left"

    run(main)


def test_a_disk_on_which_nothing_can_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(work: Callable[[], None]) -> None:
        await trio.lowlevel.checkpoint()
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main() -> None:
        async with house(tmp_path, on_disk=broken) as home:
            await talk_to_the_end(home)
            assert list(tmp_path.iterdir()) == []

    run(main)
    (line,) = complaints(caplog)
    assert line.endswith("is not complete: it cannot be written: No space left on device")


def test_a_disk_that_is_too_slow_for_the_buffer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The buffer is full; the write that runs is waited for, and the mark is set."""

    async def main() -> None:
        limits = RecordingLimits(waiting_bytes=50_000)
        async with house(tmp_path, on_disk=slow(1.0), limits=limits, frame_seconds=0.08) as home:
            await talk_to_the_end(home)
            told = facts(home.folder())
            assert told["complete"] is False
            assert told["incomplete_because"] == "the disk is too slow: more than 50000 bytes wait for it"

    run(main)
    assert len(complaints(caplog)) == 1


def test_what_is_being_written_counts_as_waiting(tmp_path: Path) -> None:
    """15,000 samples are 30,000 bytes, and 40,000 as text; the first text is being written, one more follows."""
    holding, released = trio.Event(), trio.Event()

    async def held(work: Callable[[], None]) -> None:
        if holding.is_set():
            await released.wait()
        await at_once(work)

    async def main() -> None:
        limits = RecordingLimits(waiting_bytes=100_000)
        async with house(tmp_path, on_disk=held, limits=limits) as home:
            peer = await home.begin()
            await wait_all_tasks_blocked()
            holding.set()
            for _ in range(2):
                await peer.say(append(np.zeros(15000, np.int16)))
                await wait_all_tasks_blocked()
            peer.leave()
            released.set()
            await home.over.wait()
            assert "more than 100000 bytes" in str(facts(home.folder())["incomplete_because"])

    run(main)


def test_what_is_written_waits_no_more(tmp_path: Path) -> None:
    """Ten times the buffer, in turns."""

    async def main() -> None:
        async with house(tmp_path, limits=RecordingLimits(waiting_bytes=20_000)) as home:
            peer = await home.begin()
            for _ in range(20):
                await peer.say(append(sound(1)))
                await hear_until(peer, "response.audio.delta")
                await wait_all_tasks_blocked()
            await peer.say(CANCEL)
            await hear_all(peer)
            await home.over.wait()
            assert facts(home.folder())["complete"] is True

    run(main)


def test_a_recording_that_has_ended_keeps_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        limits = RecordingLimits(waiting_bytes=10_000, tail_seconds=0)
        recordings = Recordings(
            tmp_path, model="m", checkpoint=tmp_path, precision="auto", limits=limits, on_disk=slow(1.0)
        )
        async with recorded(recordings, "sess_1") as watcher:
            assert isinstance(watcher, Recorder)
            for count in range(1, 40):
                watcher.saw(PING)
                assert len(watcher._items) == (count if count < 19 else 0)  # 512 bytes each, and the text
        recordings.directory = tmp_path / "none"
        async with recorded(recordings, "sess_2") as watcher:
            assert isinstance(watcher, Recorder)
            await trio.sleep(2)
            watcher.saw(PING)
            assert watcher._items == []

    run(main)


def test_a_disk_that_keeps_up_late_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with house(tmp_path, on_disk=slow(0.6), frame_seconds=0.08) as home:
            messages = await talk_to_the_end(home)
            assert facts(home.folder())["complete"] is True
            assert (home.folder() / "output.pcm").read_bytes() == spoken(messages)

    run(main)
    assert complaints(caplog) == []


def hangs_in(root: Path) -> OnDisk:
    """A disk that makes a folder, and does nothing any more."""

    async def hangs(work: Callable[[], None]) -> None:
        if list(root.iterdir()):
            await trio.sleep_forever()
        await at_once(work)

    return hangs


def test_a_disk_that_hangs_delays_the_close_by_two_seconds_at_most(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with house(tmp_path, on_disk=hangs_in(tmp_path), frame_seconds=0.08) as home:
            await talk_to_the_end(home)
            assert trio.current_time() == pytest.approx(20 * 0.08 + 2.0, abs=0.1)
            told = facts(home.folder())
            assert (told["complete"], told["ended"], told["opening"]) == (False, None, None)

    run(main)
    (line,) = complaints(caplog)
    assert line.endswith("the disk is too slow: the rest was not written within 2 seconds")


def test_a_disk_that_hangs_does_not_hold_a_server_that_stops(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path, on_disk=hangs_in(tmp_path)) as home:
            peer = await home.begin()
            await peer.say(append(HEARD))
            await hear_until(peer, "response.audio.delta")
            began = trio.current_time()
            home.cancel.cancel()
            await home.over.wait()
            assert trio.current_time() == pytest.approx(began + 2.0, abs=0.1)

    run(main)


def test_a_peer_cannot_fill_the_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with house(tmp_path, limits=RecordingLimits(folder_bytes=20_000)) as home:
            peer = await home.begin()
            for _ in range(500):
                await peer.say(PING)
                await hear_until(peer, "session.pong")
            await peer.say(CANCEL)
            assert (await hear_all(peer))[-1]["type"] == "response.cancelled"
            await home.over.wait()
            told = facts(home.folder())
            assert told["incomplete_because"] == "it would grow beyond 20000 bytes"
            assert 19_000 < (home.folder() / "wire.jsonl").stat().st_size <= 20_000

    run(main)


def test_a_fault_of_ours_ends_the_recording_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(Folder, "write", broken)

    async def main() -> None:
        async with house(tmp_path) as home:
            await talk_to_the_end(home)
            assert facts(home.folder())["incomplete_because"] == "it cannot be written: ZeroDivisionError"

    run(main)
    assert len(complaints(caplog)) == 1
    assert caplog.records[-1].exc_info is not None


# ---- threads, as they are; no mock clock


def test_a_thread_writes_and_is_left_alone_when_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second session's disk hangs until the test lets it go: the block ends, and the files are closed by then."""
    limits = RecordingLimits(tail_seconds=0.05)
    recordings = Recordings(tmp_path, model="m", checkpoint=tmp_path, precision="auto", limits=limits)
    hangs, closed = threading.Event(), threading.Event()
    write, close = Folder.write, Folder.close

    def written(folder: Folder, items: Any) -> None:
        if "two" in folder.path.name:
            assert hangs.wait(60)
        write(folder, items)

    def closing(folder: Folder) -> None:
        close(folder)
        if "two" in folder.path.name:
            closed.set()

    monkeypatch.setattr(Folder, "write", written)
    monkeypatch.setattr(Folder, "close", closing)

    async def main() -> None:
        with trio.fail_after(60):
            for name in ("one", "two"):
                async with recorded(recordings, name) as watcher:
                    watcher.saw("no JSON")
                    while not list(tmp_path.glob(f"*-{name}/session.json")):
                        await trio.sleep(0.001)
                    watcher.ended(frames=0, ended_by="done", code=1000)
            assert not closed.is_set()
            hangs.set()
            await trio.to_thread.run_sync(partial(closed.wait, 60))

    trio.run(main)
    one, two = sorted(tmp_path.iterdir(), key=lambda path: path.name.split("-")[1])
    assert (facts(one)["complete"], facts(one)["ended"]["code"]) == (True, 1000)
    assert len(lines(one)) == 1
    assert (facts(two)["complete"], facts(two)["ended"]) == (False, None)


# ---- before the server starts


def test_while_the_model_loads_nothing_is_recorded(tmp_path: Path) -> None:
    """It has no fingerprint yet; who comes is refused, and leaves no folder."""

    async def main() -> None:
        recordings = Recordings(tmp_path, model="m", checkpoint=tmp_path, precision="auto", on_disk=at_once)
        model = FakeVoiceChat()
        model.model.fingerprint = FINGERPRINT
        async with RecordedWorker(recordings, model, load_seconds=100) as worker, trio.open_nursery() as nursery:
            app = App(worker, Settings(model="fake"), Gate(None), recordings=recordings)

            def enter() -> MemoryPeer:
                transport, peer = memory_transport()
                nursery.start_soon(app._talk, transport, Request("GET", "/v1/realtime", "", ()))
                return peer

            early = enter()
            assert [m["error"]["code"] for m in await hear_all(early)] == ["model_loading"]
            assert early.closed == (1013, "loading")
            assert list(tmp_path.iterdir()) == []
            await worker.loaded()
            peer = enter()
            created = await hear_until(peer, "session.created")
            assert created[0]["session"]["recording"] is True
            peer.leave()
        (folder,) = tmp_path.iterdir()
        assert facts(folder)["fingerprint"] == FINGERPRINT

    run(main)


def test_a_place_that_cannot_hold_recordings_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below"):
        with pytest.raises(InputError, match=r"file.*: recordings cannot be written there: "):
            Recordings(place, model="m", checkpoint=tmp_path, precision="auto").prepare()
    recordings = Recordings(tmp_path / "a" / "b", model="m", checkpoint=tmp_path, precision="auto")
    recordings.prepare()
    recordings.prepare()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_recording_says_of_which_model_it_is(tmp_path: Path) -> None:
    recordings = Recordings(Path("r"), model="m", checkpoint=Path("relative"), precision="bfloat16", on_disk=at_once)
    model = FakeVoiceChat()
    model.model.fingerprint, model.model.compiled = "f" * 16, True
    assert recordings.loading(lambda: model)() is model  # type: ignore[arg-type,return-value]
    session = recordings.folder("sess_1")._session
    assert (session.model, session.checkpoint) == ("m", str(Path.cwd() / "relative"))
    assert (session.fingerprint, session.precision, session.compiled) == ("f" * 16, "bfloat16", True)
    assert json.loads(json.dumps(session.versions))["numpy"] == np.__version__
