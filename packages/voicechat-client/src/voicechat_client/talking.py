"""``talk``, but for its options: devices, a conversation, a view; Ctrl-C ends it in good order.

The first Ctrl-C (or SIGTERM, or SIGHUP) commits: what was heard is answered and played to its end, for some seconds at
most. A second one ends it at once.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

import trio

from voicechat_client.answer import Answer
from voicechat_client.conversation import Conversation
from voicechat_client.devices import Microphone, Speaker
from voicechat_client.interrupts import stopping_signals
from voicechat_client.report import report
from voicechat_client.talk import TalkReport, talk
from voicechat_client.tools import Tool, answering
from voicechat_client.view import note, watching
from voicechat_core import wire

__all__ = ["hold", "talk_report"]


async def hold(
    connecting: Callable[[], AbstractAsyncContextManager[Conversation]],
    microphone: Microphone,
    speaker: Speaker,
    *,
    options: wire.SessionOptions,
    half_duplex: bool,
    answer: Answer,
    counts: TalkReport,
    tools: Mapping[str, Tool] | None = None,
) -> None:
    """Connect, talk until Ctrl-C or the session's end, play the rest.

    Args:
        connecting: gives the conversation.
        microphone: not started yet.
        speaker: the same.
        options: of the session.
        half_duplex: mute the microphone while the speaker sounds.
        answer: takes what the server says.
        counts: takes what the devices did.
        tools: answer what the model calls, if ``options`` ask for it.

    Raises:
        ClientError: whatever the conversation, or a device, fails by.
    """
    stop = trio.Event()
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_by_signal, stop, nursery.cancel_scope)
        try:
            async with connecting() as conversation:
                await conversation.update(options)
                async with answering(conversation, tools or {}, told=note) as called:
                    await _talk(conversation, microphone, speaker, half_duplex, answer, counts, stop, called)
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _talk(
    conversation: Conversation,
    microphone: Microphone,
    speaker: Speaker,
    half_duplex: bool,
    answer: Answer,
    counts: TalkReport,
    stop: trio.Event,
    called: Callable[[wire.ServerEvent], None],
) -> None:
    with watching(None) as view:

        def heard(event: wire.ServerEvent) -> None:
            answer.add(event, trio.current_time())
            view.heard(event)
            called(event)
            view.sent_seconds = counts.sent_seconds

        note(f"listening to {microphone.name}, speaking on {speaker.name}; Ctrl-C ends the conversation")
        heard(conversation.created)
        answer.started(trio.current_time())
        await talk(
            conversation,
            microphone,
            speaker,
            half_duplex=half_duplex,
            stop=stop,
            on_event=heard,
            on_hint=note,
            report=counts,
        )


async def _stop_by_signal(
    stop: trio.Event, scope: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(*stopping_signals()) as signals:
        task_status.started()
        async for _ in signals:
            if stop.is_set():
                scope.cancel()
            stop.set()


def talk_report(answer: Answer, counts: TalkReport) -> str:
    """What was said, and what the devices did."""
    lines = [report(answer, round(counts.sent_seconds * wire.INPUT_RATE))]
    devices = [
        f"{counts.gaps} gaps of {counts.gap_seconds:.2f} s in the answer's sound",
        f"{counts.dropped_seconds:.2f} s of it dropped",
        f"{counts.unheard_seconds:.2f} s of the microphone lost",
        f"clocks {counts.drift_ppm:+.0f} ppm apart",
    ]
    if counts.muted_seconds:
        devices.append(f"muted for {counts.muted_seconds:.1f} s")
    lines.append(", ".join(devices))
    return "\n".join(lines)
