"""Connections that are recorded: a model without a thread, sockets without a network, a disk that a test can stop.

    async with house(tmp_path, voicechat=...) as home:
        peer = await home.begin(seed=7)
        ...
    folder = home.folder()

What the app does around a connection is done here in the same order, but for the slot.
"""

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import trio
from trio.testing import MockClock

from tests.server.fake_worker import FakeVoiceChat, FakeWorker
from voicechat_core import VoiceChat
from voicechat_server.connection import Connection
from voicechat_server.exchange import Close
from voicechat_server.protocol import Limits, Protocol
from voicechat_server.recording import OnDisk, RecordingLimits, Recordings, recorded
from voicechat_server.transport import Gone, MemoryPeer, MemoryTransport, memory_transport
from voicechat_server.worker import Worker

FINGERPRINT = "0123456789abcdef"
COMMIT, CANCEL, PING = (json.dumps({"type": name}) for name in (
    "input_audio_buffer.commit", "session.cancel", "session.ping",
))  # fmt: skip


def run(test: Any) -> None:
    trio.run(test, clock=MockClock(autojump_threshold=0))


def sound(frames: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(int(frames * 1280)) * 3000).astype(np.int16)


def append(samples: np.ndarray) -> str:
    audio = base64.b64encode(samples.astype("<i2").tobytes()).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


def update(**session: Any) -> str:
    return json.dumps({"type": "session.update", "session": session})


async def hear_until(peer: MemoryPeer, kind: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    while not messages or messages[-1]["type"] != kind:
        messages.append(json.loads(await peer.hear()))
    return messages


async def hear_all(peer: MemoryPeer) -> list[dict[str, Any]]:
    messages = []
    try:
        while True:
            messages.append(json.loads(await peer.hear()))
    except Gone:
        return messages


async def at_once(work: Callable[[], None]) -> None:
    """A disk that takes no time, and no thread, which a mock clock does not see."""
    await trio.lowlevel.checkpoint()
    work()


class House:
    def __init__(
        self, recordings: Recordings | None, worker: Worker, nursery: trio.Nursery, root: Path, **options: Any
    ) -> None:
        self.recordings, self.worker, self.root = recordings, worker, root
        self.over = trio.Event()
        self.cancel = trio.CancelScope()
        self._nursery, self._options = nursery, options
        self._names = iter(range(100))

    def enter(self) -> MemoryPeer:
        transport, peer = memory_transport()
        self.over = trio.Event()
        self._nursery.start_soon(self._talk, transport)
        return peer

    async def begin(self, **session: Any) -> MemoryPeer:
        """A peer whose session is open."""
        peer = self.enter()
        await hear_until(peer, "session.created")
        await peer.say(update(**session))
        await hear_until(peer, "session.updated")
        return peer

    def folder(self) -> Path:
        """The one that is there."""
        (folder,) = (path for path in self.root.iterdir())
        return folder

    async def _talk(self, transport: MemoryTransport) -> None:
        number = next(self._names)
        protocol = Protocol(
            model="fake",
            token=lambda: f"{number:016x}",
            now=trio.current_time(),
            limits=Limits(prompt_chars=10**6),
            recording=self.recordings is not None,
        )
        with self.cancel:
            async with recorded(self.recordings, protocol.session_id) as watcher:
                connection = Connection(
                    transport, self.worker, protocol, stopping=trio.Event(), saw=watcher.saw, **self._options
                )
                close = Close(1011, "internal error")
                try:
                    close = await connection.run()
                finally:
                    watcher.ended(frames=protocol.frames, ended_by=protocol.ended_by or close.reason, code=close.code)
            await transport.close(close.code, close.reason)
        self.over.set()


@asynccontextmanager
async def house(
    root: Path,
    *,
    record: bool = True,
    on_disk: OnDisk | None = at_once,
    limits: RecordingLimits | None = None,
    checkpoint: Path = Path("/checkpoint"),
    voicechat: FakeVoiceChat | VoiceChat | None = None,
    tts_context_frames: int | None = None,
    **worker_options: Any,
) -> AsyncIterator[House]:
    recordings = Recordings(root, model="fake", checkpoint=checkpoint, precision="auto", limits=limits, on_disk=on_disk)
    recordings.prepare()
    model: Any = voicechat or FakeVoiceChat()
    if isinstance(model, FakeVoiceChat):
        model.model.fingerprint = FINGERPRINT
    async with RecordedWorker(recordings, model, warm_prompt_tokens=0, **worker_options) as worker:
        await worker.loaded()
        async with trio.open_nursery() as nursery:
            yield House(recordings if record else None, worker, nursery, root, tts_context_frames=tts_context_frames)


class RecordedWorker(FakeWorker):
    """One whose loading is shown to the recordings."""

    def __init__(self, recordings: Recordings, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._side._load = recordings.loading(self._loads)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "wire.jsonl").read_text().splitlines()]


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "session.json").read_text())
    return found


def pcm(file: Path) -> np.ndarray:
    return np.frombuffer(file.read_bytes(), "<i2")
