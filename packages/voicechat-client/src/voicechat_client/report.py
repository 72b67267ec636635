"""What a conversation came to, in a few lines."""

from collections import Counter
from typing import Final

from voicechat_client.answer import Answer
from voicechat_core import wire
from voicechat_core.terminal import printable

__all__ = ["report"]

MOST_ERRORS: Final = 5


def report(answer: Answer, sent_samples: int) -> str:
    """What was said, what was answered, and the numbers. ``sent_samples`` are of 16 kHz."""
    lines = [f"user:      {_said(answer.transcript)}", f"assistant: {_said(answer.text)}"]
    if answer.function_text.strip():
        lines.append(f"function:  {_said(answer.function_text)}")
    lines += _errors(answer.errors)
    numbers = [f"sent {sent_samples / wire.INPUT_RATE:.2f} s", f"heard {answer.seconds:.2f} s ({answer.frames} frames)"]
    if (delay := answer.first_audio_seconds) is not None:
        numbers.append(f"first audio after {delay:.2f} s")
    numbers.append(f"at most {answer.most_behind_ms} ms behind")
    if answer.frames_skipped:
        numbers.append(f"{answer.frames_skipped} frames skipped")
    if answer.recording:
        numbers.append("recorded by the server")
    if answer.ended != "done":
        numbers.append("not finished")
    return "\n".join([*lines, ", ".join(numbers)])


def _errors(errors: list[wire.ErrorBody]) -> list[str]:
    """Each that is another than those before, and how often: the conversation went on, so there may be many."""
    counts = Counter(f"{_said(error.code)}: {_said(error.message)}" for error in errors)
    lines = [f"error:     {what}" + (f" ({count} times)" if count > 1 else "") for what, count in counts.items()]
    more = len(lines) - MOST_ERRORS
    return lines if more <= 0 else [*lines[:MOST_ERRORS], f"error:     and {more} others"]


def _said(text: str) -> str:
    return printable(text.strip(), " ") or "(nothing)"
