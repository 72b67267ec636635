"""``send``, but for its options: a recording, a conversation, a view, files, and perhaps a check afterwards."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from voicechat_client.answer import Answer
from voicechat_client.check import Difference, compare, examine, generate
from voicechat_client.conversation import Conversation
from voicechat_client.errors import LostError
from voicechat_client.outputs import Outputs
from voicechat_client.pacing import Pace, Pacer
from voicechat_client.recording import Pcm16, opened
from voicechat_client.send import Blocks, send
from voicechat_client.tools import Tool, answering
from voicechat_client.view import View, note, watching
from voicechat_core import wire

__all__ = ["Check", "Sending"]


@dataclass
class Check:
    """Whether the answer is what a checkpoint gives. ``differences`` is None until that is known."""

    checkpoint: str
    spoken: Path
    differences: list[Difference] | None = None
    _heard: list[bytes] = field(default_factory=list)

    def heard(self, event: wire.ServerEvent) -> None:
        """Keep the sound: what ``--out`` is need not be readable."""
        if isinstance(event, wire.ResponseAudioDelta):
            self._heard.append(event.delta)

    async def run(self, answer: Answer, options: wire.SessionOptions) -> None:
        """Runs the model once more, so it takes as long as the conversation did."""
        offline, sound = await generate(
            self.checkpoint, self.spoken, system_prompt=options.system_prompt, seed=options.seed
        )
        self.differences = compare(answer.as_dict(), wire.samples_of(b"".join(self._heard)), offline, sound)

    def verdict(self) -> list[str]:
        """In lines; none where there is no verdict."""
        if self.differences == []:
            return [f"check: ids, codes, texts and sound are those of {self.checkpoint}"]
        return [f"check: {difference}" for difference in self.differences or []]


@dataclass
class Sending:
    """One recording to be sent, and what became of it."""

    connecting: Callable[[], AbstractAsyncContextManager[Conversation]]
    audio: Path
    options: wire.SessionOptions
    pace: Pace
    tail_samples: int
    chunk_samples: int
    outputs: Outputs
    answer: Answer
    check: Check | None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    sent_samples: int = 0

    async def run(self) -> None:
        """Connect, send, hear; files are finished whatever happens.

        Whatever can be found out before is: no server is asked for, and no file touched, for what cannot be done.
        """
        self.outputs.check()
        if self.check is not None:
            await examine(self.check.checkpoint)
        async with opened(self.audio) as recording:
            spoken = Blocks(recording, self.chunk_samples, tail_samples=self.tail_samples)
            await spoken.begin()
            seconds = recording.seconds
            total = None if seconds is None else seconds + self.tail_samples / wire.INPUT_RATE
            with watching(total) as view:
                async with self.connecting() as conversation:
                    await conversation.update(self.options)
                    with self.outputs:
                        await self._converse(conversation, spoken, view)

    async def _converse(self, conversation: Conversation, spoken: Blocks, view: View) -> None:
        async with answering(conversation, self.tools, told=note) as called:
            await self._send(conversation, spoken, view, called)
        self._require_the_end(spoken)

    async def _send(
        self, conversation: Conversation, spoken: Blocks, view: View, called: Callable[[wire.ServerEvent], None]
    ) -> None:
        def heard(event: wire.ServerEvent) -> None:
            self.answer.add(event, trio.current_time())
            self.outputs.heard(event)
            view.heard(event)
            called(event)
            if self.check is not None:
                self.check.heard(event)

        def sent(samples: Pcm16) -> None:
            self.sent_samples += len(samples)
            self.outputs.sent(samples)
            view.sent(samples)

        heard(conversation.created)
        self.answer.started(trio.current_time())
        await send(conversation, spoken, pacer=Pacer(self.pace, wire.INPUT_RATE), heard=heard, sent=sent)

    def _require_the_end(self, spoken: Blocks) -> None:
        """Nobody asked the server to stop before the end of the recording."""
        if self.answer.ended != "done" or not spoken.ended:
            seconds = self.sent_samples / wire.INPUT_RATE
            raise LostError(f"the server ended the session by itself, after {seconds:.2f} s of the recording", 1000)

    def as_dict(self, error: str | None) -> dict[str, Any]:
        """For ``--json``; ``check`` is there once the answer was compared."""
        found: dict[str, Any] = {**self.answer.as_dict(), "sent_samples": self.sent_samples}
        if self.check is not None and self.check.differences is not None:
            found["check"] = [str(difference) for difference in self.check.differences]
        if error is not None:
            found["error"] = error
        return found
