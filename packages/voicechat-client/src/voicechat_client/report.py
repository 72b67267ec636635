"""What a conversation came to, in a few lines."""

from voicechat_client.answer import Answer
from voicechat_core import wire
from voicechat_core.terminal import printable

__all__ = ["report"]


def report(answer: Answer, sent_samples: int) -> str:
    """What was said, what was answered, and the numbers. ``sent_samples`` are of 16 kHz."""
    lines = [f"user:      {_said(answer.transcript)}", f"assistant: {_said(answer.text)}"]
    if answer.function_text.strip():
        lines.append(f"function:  {_said(answer.function_text)}")
    numbers = [f"sent {sent_samples / wire.INPUT_RATE:.2f} s", f"heard {answer.seconds:.2f} s ({answer.frames} frames)"]
    if (delay := answer.first_audio_seconds) is not None:
        numbers.append(f"first audio after {delay:.2f} s")
    numbers.append(f"at most {answer.most_behind_ms} ms behind")
    if answer.frames_skipped:
        numbers.append(f"{answer.frames_skipped} frames skipped")
    if answer.ended != "done":
        numbers.append("not finished")
    return "\n".join([*lines, ", ".join(numbers)])


def _said(text: str) -> str:
    return printable(text.strip(), " ") or "(nothing)"
