"""A worker without a thread and without MLX: the real ``Worker`` and its thread's code, run by a Trio task.

    async with FakeWorker(frame_seconds=0.08) as worker:  # everything else as with the real one
        ...

A mock clock sees all of it: loading, opening and frames take the seconds they are told to take, of Trio's clock, and
their results come afterwards. ``FakeVoiceChat`` stands in for the model: same chunks, limits and ends as a real
session, and frames that ``frame_events`` tells in advance.

One thing is earlier than with a thread: what a frame reads is no longer queued when it begins, not when it ends.
"""

from collections.abc import Callable, Container, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import trio

from voicechat_core import (
    AudioFrame,
    Cancelled,
    ContextLimitError,
    Done,
    Event,
    InputError,
    ModelError,
    SessionClosedError,
    TextDelta,
    ToolCall,
    VoiceChat,
)
from voicechat_core.audio import check_samples
from voicechat_core.framing import Framing
from voicechat_server.model_messages import Delivery, Ended, News, Opened
from voicechat_server.worker import Worker

FRAME, LOOKAHEAD = 1280, 200

Before = Callable[[int, int], None]


def frame_events(seed: int, index: int) -> list[Event]:
    """What a fake session gives for a frame: text with every fourth one, and audio that its seed and index tell."""
    audio = AudioFrame(
        frame_index=index,
        samples=np.full(1764, (seed % 1000 + index) / 100000, np.float32),
        codes=np.full(31, (seed + index) % 1024, np.int32),
        text_token=index % 128,
        function_token=0,
    )
    return [TextDelta(index, f"{seed}.{index} "), audio] if index % 4 == 3 else [audio]


def session_events(seed: int, frames: int) -> list[Event]:
    """All that a fake session of so many frames gives, ``Done`` included."""
    return [*(event for index in range(frames) for event in frame_events(seed, index)), Done(frames)]


class FakeVoiceChat:
    """Stands in for a loaded model. ``before_frame(seed, index)`` is called in each frame, and may raise.

    ``opened`` has the options of each session that was opened, ``warmed`` what was done before the first one. In the
    frames ``calling`` a session with tools calls ``roll_dice``; ``outputs`` has what it was given, before which frame.
    A text of more than ten characters is too long for it.
    """

    def __init__(self, before_frame: Before = lambda seed, index: None, calling: Container[int] = ()) -> None:
        self.calling = calling
        self.outputs: list[tuple[int, str, object]] = []
        self.before_frame = before_frame
        self.opened: list[dict[str, Any]] = []
        self.warmed: list[str] = []
        self.first_frame_samples = LOOKAHEAD
        self.model = SimpleNamespace(config=SimpleNamespace(input_frame_samples=FRAME), compiled=False)

    def warm_up(self, prompt_tokens: int = 256, *, tts_context_frames: int | None = None) -> None:
        self.warmed.append(f"{prompt_tokens} prompt tokens")

    def session(self, **options: Any) -> "FakeSession":
        if "seed" not in options:  # warming up
            return FakeSession(0, None, lambda seed, index: self.warmed.append(f"frame {index}"))
        self.opened.append(options)
        session = FakeSession(options["seed"], options["max_frames"], self.before_frame)
        if options["tools"]:
            session.calling, session.outputs = self.calling, self.outputs
        return session


class FakeSession:
    """A session of it: frames fall due as in a real one."""

    def __init__(self, seed: int, max_frames: int | None, before_frame: Before) -> None:
        self._seed = seed
        self._max_frames = max_frames
        self._before = before_frame
        self._framing = Framing(FRAME, LOOKAHEAD)
        self._ended = False
        self.calling: Container[int] = ()
        self.outputs: list[tuple[int, str, object]] = []
        self._waits = ""

    def respond(self, call_id: str, output: object) -> None:
        if call_id != self._waits:
            raise InputError(f"call_id is {call_id!r}; the fake waits for {self._waits!r}")
        if isinstance(output, str) and len(output) > 10:
            raise InputError(f"the output of {call_id} has {len(output)} characters; the fake takes 10")
        self._waits = ""
        self.outputs.append((self.frame_index, call_id, output))

    @property
    def frame_index(self) -> int:
        return self._framing.taken

    def push(self, samples: Any) -> Iterator[Event]:
        if self._ended:
            raise SessionClosedError("the fake session ended")
        self._framing.push(check_samples(samples))
        return self._due()

    def flush(self, *, pad_partial: bool = True) -> Iterator[Event]:
        if self._ended:
            return
        if pad_partial:
            self._framing.pad()
        yield from self._due()
        self._ended = True
        yield Done(self.frame_index)

    def cancel(self) -> list[Event]:
        if self._ended:
            return []
        self._ended = True
        return [Cancelled(self.frame_index)]

    def _due(self) -> Iterator[Event]:
        while self._framing.due:
            index = self.frame_index
            if self._max_frames is not None and index >= self._max_frames:
                self._framing.drop()
                raise ContextLimitError(f"frame {index} would pass the session's limit of {self._max_frames} frames")
            self._framing.take()
            try:
                self._before(self._seed, index)
            except ModelError:
                self._ended = True
                raise
            if index in self.calling:
                self._waits = f"call_{index}_0"
                yield ToolCall(index, self._waits, "roll_dice", {"sides": 6})
            yield from frame_events(self._seed, index)


class FakeWorker(Worker):
    """A ``Worker`` whose thread is a task. Takes the same limits; ``voicechat`` is its model."""

    def __init__(
        self,
        voicechat: FakeVoiceChat | None = None,
        *,
        load_seconds: float = 0.0,
        open_seconds: float = 0.0,
        frame_seconds: float = 0.0,
        load_error: Exception | None = None,
        **limits: Any,
    ) -> None:
        self.voicechat = voicechat or FakeVoiceChat()
        self._load_seconds, self._fails_with = load_seconds, load_error
        self._open_seconds, self._frame_seconds = open_seconds, frame_seconds
        self._untold: list[News] = []
        self._commanded = trio.lowlevel.ParkingLot()
        super().__init__(self._loads, **limits)

    def _loads(self) -> VoiceChat:
        if self._fails_with is not None:
            raise self._fails_with
        return cast(VoiceChat, self.voicechat)

    def _tell(self, news: News) -> None:
        self._untold.append(news)

    def _send(self, command: Any) -> None:
        super()._send(command)
        self._commanded.unpark_all()

    async def stop(self, seconds: float = 10.0) -> bool:
        self._side.halt()
        self._commanded.unpark_all()
        return await super().stop(seconds)

    def _run_side(self) -> None:
        trio.lowlevel.spawn_system_task(self._run)

    async def _join(self) -> None:
        await self._ended.wait()

    async def _run(self) -> None:
        error: BaseException | None = None
        try:
            await trio.sleep(self._load_seconds)
            self._side.load()
            await self._pass_on()
            while self._side.turn(wait=False):
                await self._pass_on()
                if self._side.idle:
                    await self._commanded.park()
        except trio.Cancelled:  # the test is over
            raise
        except BaseException as failure:
            error = failure
        await self._pass_on()
        self._hear(Ended(error))

    async def _pass_on(self) -> None:
        """What has been told, each after the time that it took."""
        await trio.lowlevel.checkpoint()
        told, self._untold = self._untold, []
        for news in told:
            if isinstance(news, Opened):
                await trio.sleep(self._open_seconds)
            elif isinstance(news, Delivery) and news.seconds is not None:
                await trio.sleep(self._frame_seconds)
            self._hear(news)
