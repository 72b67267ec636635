"""Leaving the block: by itself, by an error, by cancellation at any await, by a reset at any point."""

import json
import signal
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.client.peers import (
    CREATED,
    DONE,
    PONG,
    QUICK,
    UPDATED,
    Raw,
    closes,
    ends,
    error_event,
    names,
    nap,
    reads_nothing,
    run,
    scripted,
    silence,
    text_event,
)
from tests.server.frames import CLOSE, TEXT, frame
from voicechat_client import (
    ClientError,
    ClientLimits,
    Conversation,
    EndedError,
    LostError,
    NotVoiceChatError,
    connect,
)
from voicechat_client.address import parse
from voicechat_client.link import open_link
from voicechat_core import wire
from voicechat_core.errors import InputError

# ---- leaving


@asynccontextmanager
async def talking(*messages: Any, limits: ClientLimits = QUICK) -> AsyncIterator[Conversation]:
    async def script(raw: Raw) -> None:
        await raw.begin(*messages)
        while await raw.next() is not None:
            pass

    async with scripted(script) as place, connect(place, limits=limits) as conversation:
        await conversation.update()
        yield conversation


def test_the_blocks_own_errors_come_out_as_they_are() -> None:
    async def converse(place: str, error: BaseException) -> None:
        async with connect(place, limits=QUICK) as conversation:
            await conversation.update()
            raise error

    async def main() -> None:
        for error in (ValueError("mine"), StopAsyncIteration(), KeyboardInterrupt(), ExceptionGroup("g", [KeyError()])):
            async with scripted(reads_nothing) as place:
                with pytest.raises(type(error)) as caught:
                    await converse(place, error)
                assert caught.value is error
                assert error.__context__ is None

    run(main)


def test_an_error_of_ours_that_is_not_caught_comes_out_alone() -> None:
    async def converse(place: str) -> None:
        async with connect(place) as conversation:
            await conversation.update()
            await names(conversation)

    async def main() -> None:
        async with scripted(ends(closes(1011))) as place:
            with pytest.raises(LostError):
                await converse(place)

    run(main)


def test_ctrl_c_in_one_of_our_tasks_comes_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Conversation, event: wire.ServerEvent) -> None:
        raise KeyboardInterrupt

    async def converse(place: str) -> None:
        async with connect(place, limits=QUICK) as conversation:
            monkeypatch.setattr(Conversation, "_notice", interrupted)
            await conversation.update()

    async def main() -> None:
        async with scripted(reads_nothing) as place:
            with pytest.raises(KeyboardInterrupt):
                await converse(place)

    run(main)


def test_ctrl_c_while_we_say_goodbye_ends_it_at_once() -> None:
    """Of a server that does not read, and one that does not answer; in every place where closing waits."""

    @trio.lowlevel.enable_ki_protection  # it is not this task that is meant
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    async def interrupts() -> None:
        await trio.sleep(0.5)
        interrupt()

    async def converse(place: str, seconds: float) -> None:
        async with connect(place, limits=ClientLimits(close_seconds=60)) as conversation:
            await conversation.update()
            with trio.move_on_after(0.2):
                await conversation.append(silence(int(16000 * seconds)))

    async def main() -> None:
        for seconds in (3600, 1):
            async with scripted(reads_nothing) as place, trio.open_nursery() as nursery:
                began = trio.current_time()
                nursery.start_soon(interrupts)
                with pytest.raises(KeyboardInterrupt):
                    await converse(place, seconds)
                assert trio.current_time() - began < 2
                nursery.cancel_scope.cancel()

    run(main)


@pytest.mark.parametrize("gap", [0.3, 1.5])
def test_a_second_ctrl_c_ends_the_command(gap: float, tmp_path: Path) -> None:
    """Within the two seconds that it may take to say goodbye to a server that does not read."""
    begun = trio.Event()

    async def script(raw: Raw) -> None:
        await raw.begin()
        begun.set()
        await trio.sleep_forever()

    async def main() -> None:
        async with scripted(script) as place, trio.open_nursery() as nursery:
            words = ["send", "-", "--url", place, "--pace", "fast", "--out", str(tmp_path / "a.wav")]
            command = [sys.executable, "-m", "voicechat_client", *words]
            sound = wav(b"\0" * 2**26)  # more than sockets hold
            run_it = partial(trio.run_process, command, stdin=sound, capture_stderr=True, check=False)
            process = await nursery.start(run_it)
            await begun.wait()
            await trio.sleep(0.3)
            process.send_signal(signal.SIGINT)
            await trio.sleep(gap)
            process.send_signal(signal.SIGINT)
            with trio.fail_after(2):
                await process.wait()
            assert process.returncode in (130, -signal.SIGINT)

    run(main)


def wav(samples: bytes) -> bytes:
    sizes = struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    return b"RIFF\xff\xff\xff\xffWAVEfmt " + sizes + b"data\xff\xff\xff\xff" + samples


def test_closing_waits_for_a_server_that_says_nothing_only_so_long() -> None:
    async def main() -> None:
        async with scripted(reads_nothing) as place:
            began = trio.current_time()
            async with connect(place, limits=QUICK) as conversation:
                await conversation.update()
                with trio.move_on_after(0.2):
                    await conversation.append(silence(16000 * 3600))
            assert trio.current_time() - began < 1.5

    run(main)


def test_what_was_sent_last_goes_out_before_the_close_frame() -> None:
    heard: list[str] = []
    code: list[bytes] = []

    async def script(raw: Raw) -> None:
        await raw.begin()
        while (found := await raw.next()) is not None:
            if found[0] == CLOSE:
                code.append(found[1])
                await raw.write(frame(CLOSE, found[1], masked=False))
                return
            heard.append(json.loads(found[1])["type"])

    async def main() -> None:
        async with scripted(script) as place:
            for busy in [False, True] * 10:
                async with connect(place) as conversation:
                    await conversation.update()
                    await conversation.append(silence(40000))
                    if not busy:
                        await nap()
                    await conversation.cancel()

    run(main)
    assert Counter(heard) == {"input_audio_buffer.append": 60, "session.cancel": 20}
    assert code == [struct.pack("!H", 1000)] * 20


def test_after_the_block_nothing_works_and_nothing_hangs() -> None:
    async def main() -> None:
        async with talking() as conversation:
            await conversation.aclose()
            await conversation.aclose()
            with pytest.raises(EndedError, match="closed"):
                await conversation.append(silence(1))
        for call in (conversation.ping(), conversation.commit(), conversation.update()):
            with pytest.raises((EndedError, InputError)):
                await call
        assert type(await anext(conversation)).__name__ == "SessionUpdated"
        with pytest.raises(EndedError):
            await anext(conversation)

    run(main)


def test_the_goodbye_reaches_a_server_that_writes_before_it_reads() -> None:
    """What nobody takes any more must not hold it up: our message and its messages would wait for each other."""
    code: list[bytes] = []
    many = frame(TEXT, "x" * 50_000, masked=False) * 300  # more than sockets hold, and than anybody keeps

    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.write(many)
        code.append(await raw.goodbye())

    async def main() -> None:
        async with scripted(script) as place, trio.open_nursery() as nursery:
            link = await open_link(nursery, parse(place))
            await link.send('{"type": "session.update"}')
            with trio.move_on_after(0.2):  # until one stands before the server
                while True:
                    await link.send("x" * 1_000_000)
            await link.close()
            await nap()

    run(main)
    assert code == [struct.pack("!H", 1000)]


# ---- cancellation


def test_a_block_that_is_cancelled_says_goodbye() -> None:
    """Whole messages, then a close frame, also where the server does not read for a moment."""
    code: list[bytes] = []

    async def script(raw: Raw) -> None:
        await raw.begin()
        await trio.sleep(0.3)
        code.append(await raw.goodbye())

    async def main() -> None:
        async with scripted(script) as place:
            began = trio.current_time()
            with trio.move_on_after(0.2) as scope:
                async with connect(place) as conversation:
                    await conversation.update()
                    await conversation.append(silence(16000 * 3600))
            assert scope.cancelled_caught
            assert trio.current_time() - began < 4
            await nap()

    run(main)
    assert code == [struct.pack("!H", 1000)]


def test_a_cancelled_append_leaves_whole_messages_and_a_conversation() -> None:
    """The server stops reading for a while; what it reads then are whole messages, and more can be said."""
    go_on, sizes = trio.Event(), []

    async def script(raw: Raw) -> None:
        await raw.begin()
        await go_on.wait()
        while (message := await raw.hear())["type"] == "input_audio_buffer.append":
            sizes.append(len(message["audio"]) * 3 // 8)
        assert message["type"] == "input_audio_buffer.commit"
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(place) as conversation:
            await conversation.update()
            with trio.move_on_after(0.3) as scope:
                await conversation.append(silence(16000 * 3600))
            assert scope.cancelled_caught
            go_on.set()
            await conversation.commit()
            assert (await names(conversation))[-1] == "ResponseDone"
            assert sum(sizes) == conversation.sent_samples
            assert set(sizes) == {16000}

    run(main)


def test_a_cancelled_iteration_loses_nothing() -> None:
    async def script(raw: Raw) -> None:
        await raw.begin()
        await raw.hear_audio(50)
        for index in range(50):
            await raw.say(text_event(index))
            await trio.sleep(0.004)
        await raw.say(DONE)
        await raw.close()

    async def main() -> None:
        async with scripted(script) as place, connect(place) as conversation:
            await conversation.update()
            await conversation.append(silence(50 * 1280))
            heard: list[Any] = []
            while not heard or not isinstance(heard[-1], wire.ResponseDone):
                with trio.move_on_after(0.003):
                    while True:
                        heard.append(await anext(conversation))
                        if isinstance(heard[-1], wire.ResponseDone):
                            break
            assert [e.frame_index for e in heard if isinstance(e, wire.ResponseTextDelta)] == list(range(50))

    run(main)


class CancelAt(trio.abc.Instrument):
    """Cancels a scope when a task has been scheduled so many times: at each of its awaits, one after the other."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.scope = trio.CancelScope()
        self.task: Any = None

    def before_task_step(self, task: Any) -> None:
        if task is self.task:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


@pytest.mark.parametrize("busy", [False, True])
def test_cancellation_at_each_await(busy: bool) -> None:
    """From the first to the last: it ends soon, with Cancelled and nothing else; no task and no socket stay."""

    async def script(raw: Raw) -> None:
        await raw.accept()
        if busy:
            await raw.say(error_event("server_busy", "no"))
            return await raw.close(1013)
        await raw.say(CREATED)
        while (found := await raw.next()) is not None:
            if found[0] == CLOSE:
                return await raw.write(frame(CLOSE, found[1], masked=False))
            kind = json.loads(found[1])["type"]
            answer = {"session.update": UPDATED, "session.ping": PONG, "input_audio_buffer.commit": DONE}.get(kind)
            await raw.say(*([answer] if answer else []))
        return None

    async def converse(place: str) -> None:
        async with connect(place, limits=QUICK, retry_busy_seconds=0.02 if busy else 0) as conversation:
            await conversation.update()
            await conversation.append(silence(20000))
            await conversation.ping()
            await conversation.commit()
            await names(conversation)

    async def main() -> None:
        finished, at = False, 0
        async with scripted(script) as place:
            while not finished:
                at += 1
                watch = CancelAt(at)
                watch.task = trio.lowlevel.current_task()
                before = trio.lowlevel.current_statistics().tasks_living
                trio.lowlevel.add_instrument(watch)
                try:
                    with watch.scope:
                        try:
                            await converse(place)
                        except ClientError:
                            assert busy
                        finished = watch.left > 0
                finally:
                    trio.lowlevel.remove_instrument(watch)
                await trio.sleep(0.005)
                assert trio.lowlevel.current_statistics().tasks_living <= before + 1  # the peer's may still say goodbye
                assert at < 200
        assert at > 10

    run(main)


@pytest.mark.parametrize("after", range(8))
def test_a_reset_at_each_point(after: int) -> None:
    """After each of the server's steps: one of our errors, whatever the client was doing."""

    async def script(raw: Raw) -> None:
        steps: list[Callable[[], Awaitable[Any]]] = [
            raw.head,
            partial(raw.write, b"HTTP/1.1 101 Switching"),
            raw.accept,
            partial(raw.say, CREATED),
            raw.hear,
            partial(raw.say, UPDATED),
            partial(raw.write, b"\x81\x7e\x01"),
            raw.hear,
        ]
        skipped = (0, 1) if after > 1 else (2,)
        for index, step in enumerate(steps[: after + 1]):
            if index not in skipped:
                await step()
        raw.reset()

    async def converse(place: str) -> None:
        async with connect(place, limits=QUICK) as conversation:
            await conversation.update()
            await conversation.append(silence(20000))
            await conversation.commit()
            await names(conversation)

    async def main() -> None:
        async with scripted(script) as place:
            with pytest.raises(ClientError) as caught:
                await converse(place)
            # A reset takes back what was not read, so the first message may have come or not.
            late, early = (LostError,), (NotVoiceChatError,)
            assert type(caught.value) in (late if after > 3 else early + late if after == 3 else early)

    run(main)
