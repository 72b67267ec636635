"""What is kept of a conversation, written while it goes on: the answer's sound, both voices, every event, the words.

    with Outputs(wav=Path("response.wav"), events=Path("log.jsonl")) as outputs:
        ... outputs.heard(event), outputs.sent(samples) ...

Sound and events are valid files at any time; all are finished however the block ends. The words are written then.
Where one cannot be written, the others are still given what had come.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
import numpy as np
import trio

from voicechat_client.answer import FRAME_SAMPLES
from voicechat_client.ledger import INPUT_FRAME
from voicechat_client.recording import Pcm16
from voicechat_client.stereo import StereoWriter
from voicechat_core import wire
from voicechat_core.audio import check_writable
from voicechat_core.audio_stream import WavWriter
from voicechat_core.errors import AudioError, InputError
from voicechat_core.files import expanded

__all__ = ["Outputs", "told"]

FRAME_SECONDS: Final = 0.08
SAMPLE_BYTES: Final = 2
STANDARD_OUTPUT: Final = "-"
CUMULATIVE: Final = ("text", "transcript")  # of a delta: all deltas so far, which the log has

UserWords = wire.ConversationItemInputAudioTranscriptionDelta
Words = UserWords | wire.ResponseTextDelta | wire.ResponseFunctionDelta
SPEAKERS: Final = {UserWords: "user", wire.ResponseTextDelta: "assistant", wire.ResponseFunctionDelta: "function"}


def told(event: wire.ServerEvent) -> dict[str, Any]:
    """An event as the log tells it: audio by its number of samples, cumulative text by its number of characters."""
    fields: dict[str, Any] = msgspec.to_builtins(event, builtin_types=(bytes,))
    if isinstance(event, wire.ResponseAudioDelta):
        fields["delta"] = len(event.delta) // SAMPLE_BYTES
    if isinstance(event, Words):
        fields |= {name: len(fields[name]) for name in CUMULATIVE if name in fields}
    return fields


class Outputs:
    """The files of one conversation; None for what is not wanted."""

    def __init__(
        self,
        *,
        wav: Path | None = None,
        stereo: Path | None = None,
        events: Path | None = None,
        transcript: Path | None = None,
        spoken: Path | None = None,
        inputs: Iterable[Path] = (),
    ) -> None:
        """Where they go. Nothing is opened yet.

        Args:
            wav: the answer, 22,050 Hz mono.
            stereo: the user left and the answer right, on one clock, 22,050 Hz.
            events: every message of the server, a JSON line each, with its time; samples and cumulative text by their
                number, so that it grows with the time and not with its square.
            transcript: who said what and when, as JSON.
            spoken: what was sent, 16,000 Hz mono.
            inputs: which none of them may be.

        Raises:
            InputError: when two of them are one file, or one is where the report goes.
        """
        wanted = {"wav": wav, "stereo": stereo, "events": events, "transcript": transcript, "spoken": spoken}
        self._paths = {name: expanded(path) for name, path in wanted.items() if path is not None}
        _require_files(self._paths.values())
        _require_different([*map(expanded, inputs), *self._paths.values()])
        self._open = contextlib.ExitStack()
        self._wav: WavWriter | None = None
        self._stereo: StereoWriter | None = None
        self._events: _Lines | None = None
        self._spoken: WavWriter | None = None
        self._words: dict[tuple[str, int], str] = {}  # of a speaker in a frame
        self._texts = dict.fromkeys(SPEAKERS.values(), "")
        self._skipped = 0
        self._sent = 0  # samples
        self._began = 0.0

    def check(self) -> None:
        """Find out before the conversation, without touching a file, that one of them could not be written.

        Raises:
            AudioError: naming it.
        """
        for path in self._paths.values():
            if path.is_fifo():  # opening it would wait for somebody who reads it, and hold everything up
                raise AudioError(f"{path}: is a pipe; an output needs a file")
            check_writable(path)

    def __enter__(self) -> Self:
        """Open all of them; what they held is gone.

        Raises:
            AudioError: naming the one that cannot be written.
        """
        with self._open:
            self._began = trio.current_time()
            self._wav = self._writer("wav", wire.OUTPUT_RATE)
            self._spoken = self._writer("spoken", wire.INPUT_RATE)
            if "stereo" in self._paths:
                self._stereo = self._open.enter_context(StereoWriter(self._paths["stereo"]))
            self._events = self._lines("events")
            if (transcript := self._lines("transcript")) is not None:
                self._open.callback(lambda: transcript.write(self._said()))
            self._open = self._open.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish them.

        Raises:
            AudioError: naming one that cannot be finished; an error in the block is the one to tell.
        """
        with contextlib.suppress(*([] if error is None else [AudioError])):
            self._open.__exit__(kind, error, trace)

    def sent(self, samples: Pcm16) -> None:
        """Samples ``[S]`` that the server was sent.

        Raises:
            AudioError: when they cannot be written.
        """
        self._sent += len(samples)
        _all(samples, self._keep_spoken, self._keep_user)

    def _keep_spoken(self, samples: Pcm16) -> None:
        if self._spoken is not None:
            self._spoken.write(samples)

    def _keep_user(self, samples: Pcm16) -> None:
        if self._stereo is not None:
            self._stereo.user(samples)

    def heard(self, event: wire.ServerEvent) -> None:
        """What the server says.

        Raises:
            AudioError: when it cannot be written.
        """
        _all(event, self._keep_event, self._keep_sound, self._keep_both, self._keep_words)

    def _keep_event(self, event: wire.ServerEvent) -> None:
        if self._events is not None:
            seconds = round(trio.current_time() - self._began, 4)
            self._events.write({"seconds": seconds, **told(event)})

    def _keep_sound(self, event: wire.ServerEvent) -> None:
        if self._wav is not None and isinstance(event, wire.ResponseAudioDelta):
            self._wav.write(wire.samples_of(event.delta))

    def _keep_both(self, event: wire.ServerEvent) -> None:
        if self._stereo is not None and isinstance(event, wire.ResponseAudioDelta):
            self._stereo.assistant(wire.samples_of(event.delta))
        elif self._stereo is not None and isinstance(event, wire.SessionLag):
            self._stay_on_the_clock(self._stereo, event.frames_skipped)

    def _keep_words(self, event: wire.ServerEvent) -> None:
        if isinstance(event, Words):
            self._hear_words(SPEAKERS[type(event)], event)

    def _stay_on_the_clock(self, stereo: StereoWriter, skipped: int) -> None:
        """Where the server dropped what the user said, nobody answers."""
        most = self._sent // INPUT_FRAME  # a server cannot have dropped what it was not sent
        for _ in range(min(skipped, most) - self._skipped):
            stereo.assistant(np.zeros(FRAME_SAMPLES, np.int16))
        self._skipped = max(min(skipped, most), self._skipped)

    def _hear_words(self, who: str, event: Words) -> None:
        whole = event.transcript if isinstance(event, UserWords) else event.text
        if whole != self._texts[who] + event.delta:  # the server has thought again, and tells all of it
            self._words = {place: text for place, text in self._words.items() if place[0] != who}
        self._texts[who] = whole
        if event.delta:  # else there are no words, however often
            place = who, event.frame_index
            self._words[place] = self._words.get(place, "") + event.delta

    # ---- files

    def _writer(self, name: str, rate: int) -> WavWriter | None:
        return self._open.enter_context(WavWriter(self._paths[name], rate)) if name in self._paths else None

    def _lines(self, name: str) -> "_Lines | None":
        return self._open.enter_context(contextlib.closing(_Lines(self._paths[name]))) if name in self._paths else None

    def _said(self) -> list[dict[str, Any]]:
        """The words of a frame and who said them."""
        return [
            {"seconds": round(frame * FRAME_SECONDS, 2), "who": who, "text": text}
            for (who, frame), text in self._words.items()
        ]


def _require_files(paths: Iterable[Path]) -> None:
    """Refuse this process's own streams, by whatever name: the report and the notes would be in the middle of it."""
    streams = _streams()
    for path in paths:
        if str(path) == STANDARD_OUTPUT:
            raise InputError("-: an output needs a file; standard output has the report (./- is a file of that name)")
        if _identity(path) in streams and not path.samefile(os.devnull):
            raise InputError(f"{path}: an output needs a file of its own; standard output or error goes there")


def _streams() -> set[object]:
    found: set[object] = set()
    for number in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            status = os.fstat(number)
            found.add((status.st_dev, status.st_ino))
    return found


Kept = TypeVar("Kept")


def _all(what: Kept, *keepers: Callable[[Kept], None]) -> None:
    """Give it to each of them, whatever becomes of the others; then raise the first error."""
    failures = []
    for keep in keepers:
        try:
            keep(what)
        except AudioError as error:
            failures.append(error)
    if failures:
        raise failures[0]


class _Lines:
    """JSON, a line each, in a file that has no part of a line, also when the disk becomes full."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        with _about(path):
            self._file = path.open("wb", buffering=0)

    def write(self, value: object) -> None:
        data = memoryview(json.dumps(value).encode() + b"\n")
        with _about(self._path):
            try:
                self._append(data)
            except OSError:
                with contextlib.suppress(OSError):  # a device cannot be cut; the first error is the one to tell
                    self._file.truncate(self._size)
                    self._file.seek(self._size)
                raise
        self._size += len(data)

    def _append(self, data: memoryview) -> None:
        while data:  # a disk that becomes full takes a part first
            data = data[self._file.write(data) :]

    def close(self) -> None:
        with _about(self._path):
            self._file.close()


def _require_different(paths: list[Path]) -> None:
    seen: dict[object, Path] = {}
    for path in paths:
        where = _identity(path)
        if where in seen:
            raise InputError(f"{path} and {seen[where]} are one file; each input and output needs its own")
        if not path.is_char_device():  # /dev/null may be everything
            seen[where] = path


def _identity(path: Path) -> object:
    """The same for all names of a file, hard links too; of one that is still to come, its place."""
    try:
        found = path.stat()
    except OSError:
        return path.resolve()
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _about(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AudioError(f"{path}: cannot be written: {error.strerror}") from None
