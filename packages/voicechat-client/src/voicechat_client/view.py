"""What a person sees while a conversation goes on: live on a terminal, plain lines elsewhere. On stderr.

    with watching(total_seconds) as view:
        ... view.heard(event), view.sent(samples) ...

Text from a server is shown so that it can only be read.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from voicechat_client.recording import Pcm16
from voicechat_core import wire
from voicechat_core.terminal import discard, printable

__all__ = ["View", "note", "watching"]

FRAME_SECONDS: Final = 0.08
REFRESHES: Final = 8  # a second: what an eye follows
TAIL: Final = 600  # characters of each text on the screen: some lines
QUIET: Final = 25  # frames without a word, two seconds, end a plain line


class View:
    """What is shown. ``heard`` and ``sent`` never raise and never wait for a terminal."""

    def __init__(self, total_seconds: float | None) -> None:
        """``total_seconds`` are to be sent, None if that is not known."""
        self.total_seconds = total_seconds
        self.sent_seconds = 0.0
        self.frames = 0
        self.texts = {"user": "", "assistant": "", "function": ""}
        self.lag_ms = 0
        self.skipped = 0
        self.notes: list[str] = []
        self._began: float | None = None

    def sent(self, samples: Pcm16) -> None:
        """Samples ``[S]`` that the server was sent."""
        self.sent_seconds += len(samples) / wire.INPUT_RATE

    def heard(self, event: wire.ServerEvent) -> None:
        """What the server says."""
        match event:
            case wire.ConversationItemInputAudioTranscriptionDelta():
                self.texts["user"] = event.transcript
            case wire.ResponseTextDelta():
                self.texts["assistant"] = event.text
            case wire.ResponseFunctionDelta():
                self.texts["function"] = event.text
            case wire.ResponseAudioDelta():
                self._began = self._began or time.monotonic()
                self.frames = event.frame_index + 1
            case wire.SessionLag():
                self.lag_ms, self.skipped = event.behind_ms, event.frames_skipped
            case wire.Error():
                self.notes.append(f"{event.error.code}: {event.error.message}")

    @property
    def frames_a_second(self) -> float:
        """Of answer, since its first frame."""
        seconds = time.monotonic() - self._began if self._began is not None else 0.0
        return self.frames / seconds if seconds > 0 else 0.0

    def __rich__(self) -> Group:
        lanes = Table.grid(padding=(0, 1), expand=True)
        lanes.add_column(style="bold", width=9)
        lanes.add_column(ratio=1, overflow="fold")  # not every script has spaces
        for who, text in self.texts.items():
            if text or who != "function":
                lanes.add_row(who, Text(printable(text, " ")[-TAIL:]))
        for said in self.notes[-3:]:
            lanes.add_row(Text("error", style="red"), Text(printable(said, " ")))
        total = self.total_seconds
        bar = ProgressBar(total=total, completed=min(self.sent_seconds, total or 0), pulse=total is None)
        lanes.add_row("sent", bar)  # in the table, since by itself it does not end its line
        return Group(lanes, Text(self.status(), style="dim"))

    def status(self) -> str:
        """One line of numbers."""
        sent = f"sent {self.sent_seconds:.1f} s" + (f" of {self.total_seconds:.1f}" if self.total_seconds else "")
        lag = f", {self.lag_ms} ms behind" if self.lag_ms else ""
        skipped = f", {self.skipped} frames skipped" if self.skipped else ""
        return f"{sent}, heard {self.frames * FRAME_SECONDS:.1f} s, {self.frames_a_second:.1f} frames/s{lag}{skipped}"


class PlainView(View):
    """Writes a line for each utterance: what was said without a pause of two seconds."""

    def __init__(self, total_seconds: float | None) -> None:
        super().__init__(total_seconds)
        self._written = dict(self.texts)
        self._seen = dict(self.texts)
        self._changed_at = dict.fromkeys(self.texts, 0)  # frames

    def heard(self, event: wire.ServerEvent) -> None:
        """What the server says."""
        notes = len(self.notes)
        super().heard(event)
        for said in self.notes[notes:]:
            note(f"error {printable(said, ' ')}")
        for who, text in self.texts.items():
            if text != self._seen[who]:
                self._seen[who], self._changed_at[who] = text, self.frames
            elif self.frames - self._changed_at[who] >= QUIET:
                self.flush(who)

    def flush(self, who: str) -> None:
        """Write what was not written."""
        text = self.texts[who]
        new = text.removeprefix(self._written[who])
        self._written[who] = text
        if new.strip():
            note(f"{self.frames * FRAME_SECONDS:6.1f} s  {who:9} {printable(new.strip(), ' ')}")


@contextmanager
def watching(total_seconds: float | None) -> Iterator[View]:
    """A view for as long as the block lasts."""
    console = Console(stderr=True)
    if console.is_terminal:
        view = View(total_seconds)
        with Live(view, console=console, refresh_per_second=REFRESHES, redirect_stdout=False):
            yield view
        return
    plain = PlainView(total_seconds)
    try:
        yield plain
    finally:
        for who in plain.texts:
            plain.flush(who)


def note(line: str) -> None:
    """A line on stderr, if anybody reads it."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)  # nobody reads it: no reason to lose the conversation
