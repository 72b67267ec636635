"""The model's thread and Trio: a real thread, the tiny checkpoint. Order is forced by frames, never by time.

``Watched`` calls the test back from within a frame, on the model thread; what the test then does in Trio is done while
that frame runs. The time limits are nets: no test depends on them.
"""

import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.server.fake_worker import FakeVoiceChat, FakeWorker, frame_events, session_events
from voicechat_core import (
    AudioError,
    AudioFrame,
    Cancelled,
    CheckpointError,
    ContextLimitError,
    Done,
    InputError,
    ModelError,
    Session,
    SessionClosedError,
    VoiceChat,
    load,
)
from voicechat_server.model_messages import Ended, News
from voicechat_server.model_thread import ModelThread
from voicechat_server.worker import (
    Failed,
    FrameTime,
    Opening,
    Result,
    Skipped,
    Stage,
    Worker,
    WorkerBusyError,
    WorkerEndedError,
    WorkerSession,
)

NET = 60.0  # seconds, after which a test that hangs is a failed one

OnFrame = Callable[[int, int], None]  # told a session's seed and the frame's index


class Watched:
    """The model as it is, but for a call at the beginning of each frame and each opening, on the model thread."""

    def __init__(self, path: Path, on_frame: OnFrame, on_open: Callable[[], None]) -> None:
        self.voicechat = load(path)
        self.model = self.voicechat.model
        self.warm_up = self.voicechat.warm_up
        self.first_frame_samples = self.voicechat.first_frame_samples
        self.on_frame = on_frame
        self.on_open = on_open

    def session(self, **options: Any) -> Session:
        self.on_open()
        session = self.voicechat.session(**options)
        step = session._step

        def watched(index: int, samples: Any) -> Any:
            if "seed" in options:  # not while warming up
                self.on_frame(options["seed"], index)
            return step(index, samples)

        session._step = watched  # type: ignore[method-assign]
        return session


def nothing(*_: object) -> None:
    pass


@asynccontextmanager
async def running(
    path: Path, on_frame: OnFrame = nothing, on_open: Callable[[], None] = nothing, **limits: Any
) -> AsyncIterator[Worker]:
    """A worker with the tiny checkpoint, loaded."""
    with trio.fail_after(NET):
        loads: Any = partial(Watched, path, on_frame, on_open)
        async with Worker(loads, warm_prompt_tokens=0, **limits) as worker:
            await worker.loaded()
            yield worker


def sound(frames: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(int(frames * 1280)) * 3000).astype(np.int16)


def plain(tiny: VoiceChat, samples: np.ndarray, *, pad_partial: bool = True, **options: Any) -> list[Result]:
    """What a session in this thread gives."""
    session = tiny.session(**options)
    return [*session.push(samples), *session.flush(pad_partial=pad_partial)]


async def taken(session: WorkerSession) -> list[Result]:
    return [result async for result in session]


async def answered(worker: Worker, opening: Opening, samples: np.ndarray) -> list[Result]:
    """All results of a session that hears ``samples`` at once."""
    with worker.open(opening) as session:
        await session.opened()
        await session.push(samples)
        session.flush()
        return await taken(session)


def frames_of(results: Iterable[Result]) -> list[int]:
    return [result.frame_index for result in results if isinstance(result, AudioFrame)]


class Gate:
    """Holds the model thread in a frame until it is opened."""

    def __init__(self) -> None:
        self.entered = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._open = threading.Event()

    def hold(self, *_: object) -> None:
        """On the model thread."""
        trio.from_thread.run_sync(self.entered.set, trio_token=self._token)
        assert self._open.wait(NET / 2)

    def open(self) -> None:
        self._open.set()


def in_trio(token: trio.lowlevel.TrioToken, call: Callable[..., Any], *args: Any) -> Any:
    """On the model thread: call it in Trio, and wait for it."""
    return trio.from_thread.run_sync(call, *args, trio_token=token)


# ---- what comes out


@pytest.mark.trio
@pytest.mark.parametrize("chunk", [1, 159, 160, 1279, 1280, 1281, 5000, 10**6])
async def test_events_are_those_of_a_plain_session(tiny: VoiceChat, tiny_path: Path, chunk: int) -> None:
    samples = sound(2.9 if chunk == 1 else 6.9)
    expected = plain(tiny, samples, system_prompt="hi", seed=3)
    async with running(tiny_path) as worker:
        with worker.open(Opening(system_prompt="hi", seed=3)) as session:

            async def push() -> None:
                await session.opened()
                for start in range(0, len(samples), chunk):
                    await session.push(samples[start : start + chunk])
                session.flush()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(push)
                found = await taken(session)
    assert found == expected
    assert len(frames_of(found)) == (3 if chunk == 1 else 7)


@pytest.mark.trio
async def test_every_end_is_that_of_a_plain_session(tiny: VoiceChat, tiny_path: Path) -> None:
    async with running(tiny_path) as worker:
        for length in (0, 1, 199, 200, 1279, 1280, 1281, 1480, 2560):
            for pad_partial in (True, False):
                samples = sound(2)[:length]
                with worker.open(Opening(seed=length)) as session:
                    await session.push(samples)  # before it is open: it waits behind the opening
                    session.flush(pad_partial=pad_partial)
                    session.flush()
                    assert await taken(session) == plain(tiny, samples, pad_partial=pad_partial, seed=length)


@pytest.mark.trio
async def test_sessions_side_by_side_and_after_each_other(tiny: VoiceChat, tiny_path: Path) -> None:
    first, second, third = sound(6.5, 1), sound(5, 2), sound(3.2, 3)
    async with running(tiny_path) as worker:
        with worker.open(Opening(seed=1)) as a, worker.open(Opening(seed=2, system_prompt="")) as b:
            for start in range(0, len(first), 900):
                await a.push(first[start : start + 900])
                await b.push(second[start : start + 900])
            a.flush()
            b.flush()
            assert await taken(b) == plain(tiny, second, seed=2, system_prompt="")
            assert await taken(a) == plain(tiny, first, seed=1)
            assert a.generation != b.generation
        assert await answered(worker, Opening(seed=3), third) == plain(tiny, third, seed=3)


@pytest.mark.trio
async def test_sessions_take_turns(tiny_path: Path) -> None:
    gate, ran = Gate(), list[tuple[int, int]]()

    def on_frame(seed: int, index: int) -> None:
        ran.append((seed, index))
        if seed == 0:
            gate.hold()

    async with running(tiny_path, on_frame) as worker:
        a, b, c = (worker.open(Opening(seed=seed)) for seed in (1, 2, 0))
        await c.push(sound(1))
        await gate.entered.wait()
        for session, frames in ((a, 3), (b, 5)):
            await session.push(sound(frames))
            session.flush()
        gate.open()
        await taken(a)
        await taken(b)
    assert ran == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (2, 3), (2, 4)]


@pytest.mark.trio
async def test_a_frame_in_flight_does_not_reach_the_next_session(tiny: VoiceChat, tiny_path: Path) -> None:
    token, samples, other = trio.lowlevel.current_trio_token(), sound(40, 1), sound(4, 2)
    ran: list[tuple[int, int]] = []
    sessions: list[WorkerSession] = []

    def swap() -> None:  # the client vanishes, and the next one is there
        sessions[0].close()
        sessions.append(worker.open(Opening(seed=2)))

    def on_frame(seed: int, index: int) -> None:
        ran.append((seed, index))
        if (seed, index) == (1, 2):
            in_trio(token, swap)

    async with running(tiny_path, on_frame) as worker:
        sessions.append(worker.open(Opening(seed=1)))
        await sessions[0].push(samples)
        before = await taken(sessions[0])
        with sessions[1] as second:
            await second.push(other)
            second.flush()
            assert await taken(second) == plain(tiny, other, seed=2)
        in_flight = [e for e in plain(tiny, samples[:5000], seed=1) if getattr(e, "frame_index", 9) == 2]
        assert worker.dropped_results == len(in_flight) > 0
        assert 2 not in frames_of(before)
    assert ran == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3)]


# ---- the end of a session


@pytest.mark.trio
async def test_a_cancel_waits_for_one_frame(tiny_path: Path) -> None:
    token = trio.lowlevel.current_trio_token()
    ran: list[int] = []
    sessions: list[WorkerSession] = []

    def on_frame(seed: int, index: int) -> None:
        ran.append(index)
        if index == 3:
            in_trio(token, sessions[0].cancel)

    async with running(tiny_path, on_frame) as worker:
        with worker.open(Opening(seed=1)) as session:
            sessions.append(session)
            await session.push(sound(750))  # 60 s
            await session.opened()
            *before, last = await taken(session)
            assert (ran, last) == ([0, 1, 2, 3], Cancelled(4))
            assert frames_of(before) == [0, 1, 2][: len(frames_of(before))]
            await worker.ping()
            assert (session.queued_samples, session.frames, ran[-1]) == (0, 4, 3)
            session.cancel()
            session.flush()
            await session.push(sound(1))
            await worker.ping()
            assert (ran[-1], await taken(session)) == (3, [])


@pytest.mark.trio
async def test_a_cancel_drops_results_that_wait(tiny_path: Path) -> None:
    async with running(tiny_path) as worker:
        with worker.open(Opening()) as session:
            await session.push(sound(4))
            while session.frames < 4:
                await worker.ping()
            session.cancel()
            assert await taken(session) == [Cancelled(4)]
            assert worker._side._seats == {}  # its memory is free before it is closed


@pytest.mark.trio
async def test_cancelled_before_it_is_open(tiny_path: Path) -> None:
    gate, opened = Gate(), list[int]()
    async with running(tiny_path, gate.hold, lambda: opened.append(1)) as worker:
        opened.clear()  # of warming up
        with worker.open(Opening()) as first:
            await first.push(sound(1))
            await gate.entered.wait()
            with worker.open(Opening()) as second:
                await second.push(sound(1))
                second.cancel()
                await second.opened()
                assert await taken(second) == [Cancelled(0)]
                gate.open()
                await worker.ping()
                assert (opened, await taken(second)) == ([1], [])


@pytest.mark.trio
@pytest.mark.parametrize("ended_by", ["cancel", "close"])
async def test_ended_while_it_is_being_opened(tiny: VoiceChat, tiny_path: Path, ended_by: str) -> None:
    token, sessions = trio.lowlevel.current_trio_token(), list[WorkerSession]()

    def on_open() -> None:
        if sessions:
            in_trio(token, getattr(sessions.pop(), ended_by))

    async with running(tiny_path, on_open=on_open) as worker:
        with worker.open(Opening(seed=1)) as session:
            sessions.append(session)
            await session.push(sound(2))
            assert await taken(session) == ([Cancelled(0)] if ended_by == "cancel" else [])
            await worker.ping()
            assert (await taken(session), worker._side._seats) == ([], {})
        assert await answered(worker, Opening(seed=2), sound(2)) == plain(tiny, sound(2), seed=2)


@pytest.mark.trio
@pytest.mark.parametrize("ended_by", ["cancel", "close"])
async def test_a_long_prompt_is_given_up_and_stops_no_ping(tiny: VoiceChat, tiny_path: Path, ended_by: str) -> None:
    prompt = "a" * 3000  # a minute's work, and its own prompt states are not to be kept from the next session
    async with running(tiny_path) as worker:
        with worker.open(Opening(system_prompt=prompt)) as session:
            for _ in range(3):
                assert await worker.ping() < 5
            assert not session._opened.is_set()
            getattr(session, ended_by)()
            assert await answered(worker, Opening(seed=2), sound(2)) == plain(tiny, sound(2), seed=2)
            steps = worker._side._voicechat.voicechat.prompts._speech.steps  # type: ignore[union-attr]
            assert steps < 1000


@pytest.mark.trio
async def test_a_long_prompt_does_not_hold_up_the_end(tiny_path: Path) -> None:
    async with running(tiny_path) as worker:
        with worker.open(Opening(system_prompt="a" * 3000)) as session:
            await worker.ping()
            assert await worker.stop()
            with pytest.raises(WorkerEndedError):
                await session.opened()


@pytest.mark.trio
async def test_a_server_prompt_that_is_impossible_is_an_error_of_loading(tiny_path: Path) -> None:
    async with Worker(lambda: load(tiny_path), warm_prompt="a" * 140000) as worker:
        with pytest.raises(ContextLimitError, match="131072"):
            await worker.loaded()
        await worker.ended()
        assert isinstance(worker.error, ContextLimitError)


@pytest.mark.trio
async def test_what_is_closed_before_it_is_open_is_never_opened(tiny_path: Path) -> None:
    opened: list[int] = []
    gate = Gate()
    async with running(tiny_path, gate.hold, lambda: opened.append(1)) as worker:
        opened.clear()
        with worker.open(Opening()) as first:
            await first.push(sound(1))
            await gate.entered.wait()
            for session in [worker.open(Opening()), worker.open(Opening())]:
                session.cancel()
                session.close()
            closed = worker.open(Opening())
            closed.close()
            with pytest.raises(SessionClosedError, match="closed before it was open"):
                await closed.opened()
            closed.close()
            with pytest.raises(trio.EndOfChannel):
                await closed.receive()
            assert worker.held_sessions == 4
            gate.open()
        await worker.ping()
        assert (opened, worker.held_sessions) == ([1], 0)


@pytest.mark.trio
async def test_pushing_after_flush_is_refused(tiny_path: Path) -> None:
    async with running(tiny_path) as worker:
        with worker.open(Opening()) as session:
            session.flush()
            with pytest.raises(SessionClosedError, match="after the session was flushed"):
                await session.push(sound(1))
            assert await taken(session) == [Done(0)]


@pytest.mark.trio
@pytest.mark.parametrize("samples", [np.zeros(4, np.float32), np.zeros((2, 2), np.int16), [1, 2], np.zeros(4, ">i2")])
async def test_other_samples_are_refused(tiny_path: Path, samples: Any) -> None:
    async with running(tiny_path) as worker:
        with worker.open(Opening()) as session:
            with pytest.raises(AudioError, match=r"int16 \[S\] is needed"):
                await session.push(samples)
            assert session.queued_samples == 0


# ---- Trio never waits for the model


@pytest.mark.trio
async def test_every_wait_can_be_cancelled_while_a_frame_runs(tiny: VoiceChat, tiny_path: Path) -> None:
    gate, samples = Gate(), sound(3)
    async with running(tiny_path, gate.hold, most_input_seconds=0.1) as worker:
        with worker.open(Opening()) as session, worker.open(Opening(seed=7)) as other:
            await session.push(samples)
            await gate.entered.wait()
            waits = [
                worker.ping, session.receive, other.receive, partial(session.push, sound(1)), partial(worker.stop, 0)
            ]  # fmt: skip
            for wait in waits[:-1]:
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(wait)
                        await wait_all_tasks_blocked()
                        scope.cancel()
                assert scope.cancelled_caught
            assert session.queued_samples == len(samples)  # a cancelled push has pushed nothing
            gate.open()
            session.flush()
            assert await taken(session) == plain(tiny, samples)


@pytest.mark.trio
async def test_pings_share_an_answer(tiny_path: Path) -> None:
    gate, times = Gate(), list[float]()
    async with running(tiny_path, gate.hold) as worker:
        with worker.open(Opening()) as session:
            await session.push(sound(1))
            await gate.entered.wait()

            async def ping() -> None:
                times.append(await worker.ping())

            async with trio.open_nursery() as nursery:
                for _ in range(500):
                    nursery.start_soon(ping)
                await wait_all_tasks_blocked()
                assert (worker._side.commands.qsize(), times) == (1, [])
                gate.open()
    assert len(times) == 500
    assert min(times) >= 0


@pytest.mark.trio
async def test_a_flood_of_sessions_is_bounded(tiny: VoiceChat, tiny_path: Path) -> None:
    gate, refused = Gate(), list[str]()
    async with running(tiny_path, gate.hold, most_sessions=5) as worker:
        with worker.open(Opening()) as session:
            await session.push(sound(1))
            await gate.entered.wait()
            for _ in range(1000):
                try:
                    vain = worker.open(Opening())
                except WorkerBusyError as error:
                    refused.append(str(error))
                    continue
                await vain.push(sound(1))
                vain.flush()
                vain.cancel()
                vain.close()
            assert refused == 996 * ["5 sessions are not closed yet; 5 may be"]
            assert worker._side.commands.qsize() <= 4 * 5
            gate.open()
        await worker.ping()
        assert worker.held_sessions == 0
        assert await answered(worker, Opening(seed=4), sound(2)) == plain(tiny, sound(2), seed=4)


# ---- bounds


@pytest.mark.trio
async def test_a_reader_pauses_at_the_bound_and_nothing_is_dropped(tiny: VoiceChat, tiny_path: Path) -> None:
    gate, samples, pushed = Gate(), sound(25), 0
    async with running(tiny_path, gate.hold, most_input_seconds=1.0) as worker, trio.open_nursery() as nursery:
        with worker.open(Opening()) as session:

            async def push() -> None:
                nonlocal pushed
                for start in range(0, len(samples), 1000):
                    await session.push(samples[start : start + 1000])
                    pushed += 1
                session.flush()

            nursery.start_soon(push)
            await gate.entered.wait()
            await wait_all_tasks_blocked()
            assert (pushed, session.queued_samples, session.lag_seconds) == (16, 16000, 1.0)
            gate.open()
            most, results = 0, []
            async for result in session:
                most = max(most, session.queued_samples)
                results.append(result)
            assert results == plain(tiny, samples)
            assert (pushed, session.queued_samples) == (32, 0)
            assert most < 17000


@pytest.mark.trio
@pytest.mark.parametrize("bound", [0, 1, 7])
async def test_a_session_that_is_not_read_is_not_stepped(tiny: VoiceChat, tiny_path: Path, bound: int) -> None:
    samples, ran = sound(12), list[int]()
    expected, allowed = plain(tiny, samples, seed=5), 0
    while len([e for e in expected if getattr(e, "frame_index", 99) < allowed]) <= bound:
        allowed += 1
    async with running(tiny_path, lambda seed, index: ran.append(index), most_results=bound) as worker:
        with worker.open(Opening(seed=5)) as session:
            await session.push(samples)
            session.flush()
            for _ in range(20):  # each is answered after another frame, if there is one to run
                await worker.ping()
            assert ran == list(range(allowed))
            assert bound < session.waiting_results <= bound + 4
            results = []
            async for result in session:
                results.append(result)
                assert session.waiting_results <= bound + 4
            assert results == expected
            assert session.waiting_results == 0


@pytest.mark.trio
async def test_a_session_that_is_not_read_stops_no_other(tiny: VoiceChat, tiny_path: Path) -> None:
    async with running(tiny_path, most_results=3) as worker:
        with worker.open(Opening()) as unread:
            await unread.push(sound(20))
            assert await answered(worker, Opening(seed=1), sound(9)) == plain(tiny, sound(9), seed=1)
            assert unread.frames < 9


# ---- lag


@pytest.mark.trio
async def test_lag_is_counted_to_the_sample(tiny_path: Path) -> None:
    token, samples = trio.lowlevel.current_trio_token(), sound(6.5)
    seen: list[int] = []
    sessions: list[WorkerSession] = []

    def on_frame(seed: int, index: int) -> None:
        seen.append(in_trio(token, lambda: sessions[0].queued_samples))

    async with running(tiny_path, on_frame) as worker:
        with worker.open(Opening()) as session:
            sessions.append(session)
            await session.push(samples)
            await session.opened()
            while session.frames < 7:
                await worker.ping()
            assert session.queued_samples == len(samples) - 200 - 6 * 1280
            assert session.lag_seconds == session.queued_samples / 16000
    read = [0, *(200 + 1280 * frame for frame in range(6))]
    assert seen == [len(samples) - samples_read for samples_read in read]


@pytest.mark.trio
async def test_skipping_drops_the_oldest_whole_frames_and_says_so(tiny: VoiceChat, tiny_path: Path) -> None:
    token, samples, more = trio.lowlevel.current_trio_token(), sound(62.5), sound(20, 1)
    sessions: list[WorkerSession] = []

    def on_frame(seed: int, index: int) -> None:
        if index == 4:
            trio.from_thread.run(sessions[0].push, more, trio_token=token)

    async with running(tiny_path, on_frame) as worker:
        with worker.open(Opening(skip_beyond_seconds=1.0)) as session:
            sessions.append(session)
            await session.push(samples)
            results = []
            async for result in session:
                results.append(result)
                if session.queued_samples < 1280 and session.frames > 5:
                    session.flush()
        # Of 80,000 samples 16,000 may wait: 50 frames are beyond. After frame 4 there are 10,680, and 25,600 new ones.
        assert [result for result in results if isinstance(result, Skipped)] == [
            Skipped(50, 64000),
            Skipped(15, 19200),
        ]
        assert session.skipped_frames == 65
        rest = np.concatenate([samples[64000:], more])
        read = 200 + 4 * 1280
        kept = np.concatenate([rest[:read], rest[read + 19200 :]])
        assert [result for result in results if not isinstance(result, Skipped)] == plain(tiny, kept)
        assert frames_of(results) == list(range(len(frames_of(results))))
        places = [i for i, result in enumerate(results) if isinstance(result, Skipped)]
        assert [frames_of(results[: places[0]]), frames_of(results[: places[1]])] == [[], [0, 1, 2, 3, 4]]


@pytest.mark.trio
@pytest.mark.parametrize("bound", [1.0, 1.7e308])
async def test_nothing_is_skipped_within_the_bound(tiny: VoiceChat, tiny_path: Path, bound: float) -> None:
    samples = sound(12.5 + 0.9)  # less than a frame more than the bound
    async with running(tiny_path) as worker:
        results = await answered(worker, Opening(skip_beyond_seconds=bound), samples)
        assert results == plain(tiny, samples)


@pytest.mark.trio
async def test_the_least_bound_leaves_a_frame(tiny: VoiceChat, tiny_path: Path) -> None:
    samples = sound(10)
    async with running(tiny_path) as worker:
        results = await answered(worker, Opening(skip_beyond_seconds=0.08), samples)
    assert results == [Skipped(9, 9 * 1280), *plain(tiny, samples[9 * 1280 :])]


# ---- failures


@pytest.mark.trio
async def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with trio.fail_after(NET):
        worker = Worker(lambda: load(tmp_path / "absent"))
        worker.start()
        waiting = worker.open(Opening())
        with pytest.raises(CheckpointError, match="no such directory"):
            await worker.loaded()
        assert (worker.alive, worker.stage) == (False, Stage.ENDED)
        assert isinstance(worker.error, CheckpointError)
        with pytest.raises(WorkerEndedError, match=r"has ended: CheckpointError$"):
            await waiting.opened()
        with pytest.raises(WorkerEndedError):
            worker.open(Opening())
        with pytest.raises(WorkerEndedError):
            await worker.ping()
        waiting.close()
        assert await worker.stop()


@pytest.mark.trio
@pytest.mark.parametrize(
    ("opening", "error", "words"),
    [
        (Opening(seed=-1), InputError, "seed is -1"),
        (Opening(system_prompt=7), InputError, "system_prompt is 7"),  # type: ignore[arg-type]
        (Opening(system_prompt="\u00e9" * (131070 // 2)), ContextLimitError, "131073 positions"),
        (Opening(max_frames=-1), InputError, "max_frames is -1"),
        (Opening(tts_context_frames=0), InputError, "tts_context_frames is 0"),
        (Opening(skip_beyond_seconds=0.079), InputError, "skip_beyond_seconds is 0.079; at least 0.08, one frame"),
        (Opening(skip_beyond_seconds=float("nan")), InputError, "skip_beyond_seconds is nan"),
    ],
)
async def test_an_opening_that_fails_is_only_that(
    tiny: VoiceChat, tiny_path: Path, opening: Opening, error: type[Exception], words: str
) -> None:
    async with running(tiny_path) as worker:
        with worker.open(opening) as session:
            await session.push(sound(1))
            with pytest.raises(error, match=words) as caught:
                await session.opened()
            assert caught.value.__context__ is None
            assert await taken(session) == []
            assert await answered(worker, Opening(seed=1), sound(2)) == plain(tiny, sound(2), seed=1)


@pytest.mark.trio
@pytest.mark.parametrize("error", [ModelError("not finite"), RuntimeError("a library's words")])
async def test_a_frame_that_fails_ends_its_session_only(
    tiny: VoiceChat, tiny_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    samples = sound(6)

    def on_frame(seed: int, index: int) -> None:
        if (seed, index) == (1, 2):
            raise error

    async with running(tiny_path, on_frame) as worker:
        with worker.open(Opening(seed=1)) as bad, worker.open(Opening(seed=2)) as good:
            await bad.push(samples)
            await good.push(samples)
            good.flush()
            *before, failed = await taken(bad)
            assert before == [e for e in plain(tiny, samples, seed=1) if getattr(e, "frame_index", 9) < 2]
            assert isinstance(failed, Failed)
            assert (type(failed.error), failed.ended) == (type(error), True)
            assert failed.error.__traceback__ is failed.error.__context__ is failed.error.__cause__ is None
            await bad.push(samples)
            bad.flush()
            assert (await taken(bad), bad.queued_samples) == ([], 0)
            assert await taken(good) == plain(tiny, samples, seed=2)
    assert ("Traceback" in caplog.text) == isinstance(error, RuntimeError)


@pytest.mark.trio
async def test_a_padded_frame_that_fails(tiny: VoiceChat, tiny_path: Path) -> None:
    def on_frame(seed: int, index: int) -> None:
        if index == 1:
            raise ModelError("not finite")

    async with running(tiny_path, on_frame) as worker:
        *before, failed = await answered(worker, Opening(), sound(1.1))
        assert before == plain(tiny, sound(1))[: len(before)]
        assert frames_of(before) == [0]
        assert isinstance(failed, Failed)
        assert (str(failed.error), failed.ended) == ("frame 1: not finite", True)
        assert worker._side._seats == {}


@pytest.mark.trio
async def test_beyond_the_frame_limit_a_session_can_still_be_flushed(tiny: VoiceChat, tiny_path: Path) -> None:
    samples = sound(8)
    async with running(tiny_path) as worker:
        with worker.open(Opening(max_frames=3)) as session:
            await session.push(samples)
            results = []
            async for result in session:
                results.append(result)
                if isinstance(result, Failed):
                    assert session.queued_samples == 0
                    await session.push(samples)
                    assert session.queued_samples == 0
                    session.flush()
    *frames, failed, done = results
    assert [*frames, done] == plain(tiny, samples[: 3 * 1280])
    assert isinstance(failed, Failed)
    assert (type(failed.error), failed.ended) == (ContextLimitError, False)


@pytest.mark.trio
async def test_a_padded_frame_beyond_the_limit(tiny: VoiceChat, tiny_path: Path) -> None:
    async with running(tiny_path) as worker:
        results = await answered(worker, Opening(max_frames=1), sound(1.1))
    (failed,) = (result for result in results if isinstance(result, Failed))
    assert (type(failed.error), failed.ended) == (ContextLimitError, False)
    assert [result for result in results if result is not failed] == plain(tiny, sound(1.1)[:1280])
    assert frames_of(results[: results.index(failed)]) == [0]


@pytest.mark.trio
async def test_what_ends_the_thread_wakes_everybody(tiny: VoiceChat, tiny_path: Path) -> None:
    gate, samples, seen = Gate(), sound(4), dict[str, BaseException]()

    def on_frame(seed: int, index: int) -> None:
        if (seed, index) == (1, 1):
            gate.hold()
            raise SystemExit(3)

    async def fails(name: str, wait: Callable[[], Any]) -> None:
        try:
            await wait()
        except WorkerEndedError as error:
            seen[name] = error

    async with running(tiny_path, on_frame, most_input_seconds=0.1) as worker, trio.open_nursery() as nursery:
        session = worker.open(Opening(seed=1))
        await session.push(samples)
        await gate.entered.wait()
        late = worker.open(Opening(seed=2))
        nursery.start_soon(fails, "ping", worker.ping)
        nursery.start_soon(fails, "opened", late.opened)
        nursery.start_soon(session.push, samples)  # waits for room, and then has nothing to do
        await wait_all_tasks_blocked()
        gate.open()
        *before, failed = await taken(session)
        assert before == [e for e in plain(tiny, samples, seed=1) if getattr(e, "frame_index", 9) < 1]
        assert isinstance(failed, Failed)
        assert (type(failed.error), failed.ended) == (WorkerEndedError, True)
        await fails("open", lambda: worker.open(Opening()))
        await fails("loaded", worker.loaded)
        assert await worker.stop()
        assert (worker.alive, worker.held_sessions, type(worker.error)) == (False, 0, SystemExit)
    assert sorted(seen) == ["loaded", "open", "opened", "ping"]
    assert {str(error) for error in seen.values()} == {"the model thread has ended: SystemExit"}


# ---- the thread's life


@pytest.mark.trio
async def test_everything_runs_on_one_thread_and_no_array_leaves_it(tiny_path: Path) -> None:
    threads: set[int] = set()
    times: list[FrameTime] = []

    def note(*_: object) -> None:
        threads.add(threading.get_ident())

    async with running(tiny_path, note, note, frame_took=times.append) as worker:
        results = await answered(worker, Opening(seed=1), sound(3))
        note_of_trio = threading.get_ident()
        (thread,) = threads
        assert worker._thread is not None
        assert (thread, worker._thread.daemon) == (worker._thread.ident, False)
        assert thread != note_of_trio
    assert [(time.frame_index, time.generation) for time in times] == [(0, 1), (1, 1), (2, 1)]
    assert all(time.seconds > 0 for time in times)
    values = [value for result in results for value in vars(result).values()]
    assert not any(isinstance(value, mx.array) for value in values)
    assert {type(value) for value in values} == {int, str, np.ndarray}


@pytest.mark.trio
async def test_it_is_warm_before_it_is_ready() -> None:
    model = FakeVoiceChat()
    with trio.fail_after(NET):
        async with Worker(lambda: model, warm_prompt_tokens=40) as worker:  # type: ignore[arg-type, return-value]
            assert worker.stage is Stage.LOADING
            await worker.loaded()
            assert worker.stage is Stage.READY
            assert model.warmed == ["40 prompt tokens", "frame 0", "frame 1"]
            assert model.opened == []


@pytest.mark.trio
async def test_stop_lets_the_frame_finish_and_closes_the_session(tiny: VoiceChat, tiny_path: Path) -> None:
    token, samples = trio.lowlevel.current_trio_token(), sound(300)
    workers: list[Worker] = []

    def on_frame(seed: int, index: int) -> None:
        if index == 2:
            in_trio(token, workers[0]._side.halt)

    async with running(tiny_path, on_frame) as worker:
        workers.append(worker)
        session = worker.open(Opening(seed=1))
        await session.push(samples)
        *before, failed = await taken(session)
        assert before == [e for e in plain(tiny, samples[:4000], seed=1) if getattr(e, "frame_index", 9) < 3]
        assert isinstance(failed, Failed)
        assert str(failed.error) == "the model thread does not run: ended"
        assert await worker.stop()
        assert await worker.stop()
        assert worker._thread is not None
        assert not worker._thread.is_alive()
        assert (worker.error, worker.alive) == (None, False)
        with pytest.raises(WorkerEndedError):
            await worker.loaded()


@pytest.mark.trio
async def test_stop_before_start() -> None:
    worker = Worker(lambda: pytest.fail("it is not loaded"))
    with pytest.raises(WorkerEndedError, match="not started"):
        await worker.ping()
    assert await worker.stop()
    assert await worker.stop()
    with pytest.raises(WorkerEndedError, match="starts once"):
        worker.start()
    with pytest.raises(WorkerEndedError):
        await worker.loaded()


@pytest.mark.trio
async def test_stop_during_load(tiny_path: Path) -> None:
    gate, loads = Gate(), list[int]()

    def slow() -> VoiceChat:
        gate.hold()
        loads.append(1)
        return load(tiny_path)

    with trio.fail_after(NET):
        worker = Worker(slow)
        worker.start()
        session = worker.open(Opening())
        await gate.entered.wait()
        assert worker.stage is Stage.LOADING
        assert not await worker.stop(0)
        assert worker.alive
        gate.open()
        with pytest.raises(WorkerEndedError):
            await worker.loaded()
        with pytest.raises(WorkerEndedError):
            await session.opened()
        assert await worker.stop()
        assert loads == [1]


@pytest.mark.trio
async def test_a_thread_that_cannot_clean_up_says_so(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError("no")

    async with running(tiny_path) as worker:
        monkeypatch.setattr(mx, "clear_cache", full)
        assert await worker.stop()
        assert await worker.stop(0)
        assert (type(worker.error), worker.alive) == (OSError, False)
        with pytest.raises(WorkerEndedError, match=r"has ended: OSError$"):
            await worker.loaded()


def test_halted_before_it_loads() -> None:
    news: list[News] = []
    side = ModelThread(lambda: pytest.fail("it is not loaded"), news.append, warm_prompt_tokens=0)
    side.halt()
    side.halt()
    assert side.commands.qsize() == 1
    thread = threading.Thread(target=side.run)
    thread.start()
    thread.join(NET)
    assert (news, thread.is_alive()) == ([Ended(None)], False)


def test_a_thread_that_nobody_listens_to_ends() -> None:
    loading = threading.Event()

    def slow() -> Any:
        assert loading.wait(NET)
        return FakeVoiceChat()

    async def main() -> Worker:
        worker = Worker(slow)
        worker.start()
        return worker

    thread = trio.run(main)._thread
    assert thread is not None
    loading.set()
    thread.join(NET)
    assert not thread.is_alive()


SCRIPT = """
import sys, trio, numpy as np, voicechat_core
from voicechat_server.worker import Opening, Worker

async def main():
    worker = Worker(lambda: voicechat_core.load(sys.argv[1]), warm_prompt_tokens=0)
    worker.start()
    await worker.loaded()
    session = worker.open(Opening())
    await session.push(np.zeros(200 * 1280, np.int16))
    while session.frames < 20:
        await worker.ping()
    print(await worker.stop(float(sys.argv[2])))

trio.run(main)
"""


@pytest.mark.parametrize(("seconds", "joined"), [("0", "False\n"), ("60", "True\n")])
def test_the_process_ends_well(tiny_path: Path, seconds: str, joined: str) -> None:
    """Also when it ends with the thread: then, without ``clear_streams``, 27 of 30 aborted."""
    for _ in range(2):
        found = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tiny_path), seconds],
            capture_output=True,
            text=True,
            timeout=NET,
            check=False,
        )
        assert (found.returncode, found.stdout, found.stderr) == (0, joined, "")


# ---- the fake, for tests of others


@pytest.mark.trio
async def test_the_fake_answers_as_the_thread_does() -> None:
    samples = sound(9.5)
    found = []
    with trio.fail_after(NET):
        for worker in (FakeWorker(), Worker(FakeVoiceChat)):  # type: ignore[arg-type]
            async with worker:
                results = await answered(worker, Opening(seed=6), samples)
                *limited, done = await answered(worker, Opening(seed=7, max_frames=4), samples)
                with worker.open(Opening(seed=8)) as session:
                    await session.push(samples)
                    while session.frames < 10:
                        await worker.ping()
                    session.cancel()
                    found.append((results, limited[:-1], done, await taken(session)))
    assert found[0] == found[1]
    assert found[0][0] == session_events(6, 10)
    assert [*found[0][1], found[0][2]] == session_events(7, 4)
    assert found[0][3] == [Cancelled(10)]


@pytest.mark.trio
async def test_the_fake_takes_the_mock_clocks_time(autojump_clock: trio.testing.MockClock) -> None:
    async with FakeWorker(load_seconds=20, open_seconds=3, frame_seconds=0.1) as worker:
        await worker.loaded()
        assert trio.current_time() == 20
        with worker.open(Opening(seed=1)) as session:
            await session.push(sound(10))
            await session.opened()
            assert trio.current_time() == 23
            session.flush()
            times = [trio.current_time() async for result in session if isinstance(result, AudioFrame)]
            assert np.allclose(times, 23 + 0.1 * np.arange(1, 11))
    assert worker.stage is Stage.ENDED


@pytest.mark.trio
async def test_the_fake_fails_where_it_is_told_to() -> None:
    def before(seed: int, index: int) -> None:
        if index == 1:
            raise ModelError("not a number")

    async with FakeWorker(FakeVoiceChat(before)) as worker:
        *events, failed = await answered(worker, Opening(seed=2), sound(3))
        assert (events, type(failed)) == (frame_events(2, 0), Failed)
    broken = FakeWorker(load_error=CheckpointError("no such directory"))
    async with broken:
        with pytest.raises(CheckpointError):
            await broken.loaded()
