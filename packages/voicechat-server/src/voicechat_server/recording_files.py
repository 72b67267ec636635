"""A recording on the disk: one folder a session. ``recording`` has it written, ``replay`` reads it. No Trio, no MLX.

    20261130T101500Z-sess_0123456789abcdef/
      session.json    what was opened with what, and how it ended (``SessionFile``); replaced whole, never half written
      wire.jsonl      what passed, a ``Line`` each, in order; ``at`` is seconds since the connection began
      input.pcm       what the session was given: 16-bit, 16 kHz; begins anew with each session.update that opens one
      output.pcm      what the peer was sent: 16-bit, 22.05 kHz

Rules of this file: samples are written before the line that tells of them, so what a line tells of is there, even if
the process is killed behind it. Nothing that a peer sends is kept at any length but samples, the prompt of an
opening, and outputs that the session took. No header and no key comes here.
"""

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from typing import Any, Final

import msgspec

from voicechat_core import wire
from voicechat_core.errors import VoiceChatError, WireError
from voicechat_core.strict_json import json_of
from voicechat_server.exchange import Push
from voicechat_server.model_messages import Opening

__all__ = [
    "FORMAT",
    "INPUT",
    "LOG",
    "OUTPUT",
    "SESSION",
    "Asked",
    "BinaryFrame",
    "Ending",
    "Flushed",
    "Folder",
    "FrameRan",
    "FromClient",
    "FromServer",
    "Item",
    "Line",
    "OutputTaken",
    "RecordingError",
    "SessionFile",
    "SkippedFrames",
    "Unreadable",
    "folder_name",
    "told",
    "versions",
]

FORMAT: Final = 1
SESSION, LOG, INPUT, OUTPUT = "session.json", "wire.jsonl", "input.pcm", "output.pcm"
DRAFT: Final = ".session.json.partial"
SAMPLE_BYTES: Final = 2
KEPT_CHARACTERS: Final = 300  # of a peer's text; a message that is right and no prompt has fewer
CUMULATIVE: Final = ("text", "transcript")  # of a delta: the deltas so far, which the log has


class RecordingError(VoiceChatError):
    """A recording cannot be written any further."""


# ---- session.json


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a connection ended: as in the server's log line."""

    frames: int
    seconds: float
    ended_by: str
    code: int


class SessionFile(msgspec.Struct, frozen=True, kw_only=True):
    """session.json.

    Attributes:
        format: of the whole folder.
        session: its identifier.
        started: UTC, ISO 8601.
        model: the name that peers were told.
        checkpoint: from where it was loaded.
        precision: as it was asked for.
        fingerprint: ``VoiceChatModel.fingerprint``.
        compiled: ``VoiceChatModel.compiled``; by rounding, the same samples may sound a little different without.
        versions: of packages, Python and platform.
        opening: of the last session that was asked for; None while there was none.
        ended: None if the connection's end was not told.
        complete: whether everything that passed is in the folder. False while the recording is written.
        incomplete_because: why not, where that is known.
        input_samples: in input.pcm, of a complete recording.
        output_samples: in output.pcm, the same.
    """

    format: int
    session: str
    started: str
    model: str
    checkpoint: str
    precision: str
    fingerprint: str
    versions: dict[str, str]
    compiled: bool = False
    opening: Opening | None = None
    ended: Ending | None = None
    complete: bool = False
    incomplete_because: str | None = None
    input_samples: int | None = None
    output_samples: int | None = None


def versions() -> dict[str, str]:
    """Of all that may change what a model says."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("voicechat-core", "voicechat-server", "mlx", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def folder_name(session_id: str, now: datetime) -> str:
    """Sorted by time: ``20261130T101500Z-sess_0123456789abcdef``."""
    return f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{session_id}"


# ---- wire.jsonl


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="what"):
    at: float


class FromClient(_Line, frozen=True, kw_only=True, tag="client"):
    """A message, as it was understood; see ``told``. Long text in it is cut."""

    message: dict[str, Any]


class Unreadable(_Line, frozen=True, kw_only=True, tag="unreadable"):
    """A text that is no message: how it begins, and how long it was."""

    begins: str
    characters: int


class BinaryFrame(_Line, frozen=True, kw_only=True, tag="binary"):
    """Which no server understands."""

    size: int


class FromServer(_Line, frozen=True, kw_only=True, tag="server"):
    """A message that the socket took; see ``told``."""

    message: dict[str, Any]


class Asked(_Line, frozen=True, kw_only=True, tag="opening"):
    """A session is asked for, and input.pcm begins anew. One that could not be opened gives nothing."""


class Flushed(_Line, frozen=True, kw_only=True, tag="flush"):
    """The session was told that its input is complete."""

    pad_partial: bool


class SkippedFrames(_Line, frozen=True, kw_only=True, tag="skipped"):
    """So many whole frames of input were dropped before frame ``before_frame`` read its own."""

    before_frame: int
    frames: int


class OutputTaken(_Line, frozen=True, kw_only=True, tag="output"):
    """A call was given this output before frame ``before_frame`` ran."""

    before_frame: int
    call_id: str
    output: Any


class FrameRan(_Line, frozen=True, kw_only=True, tag="frame"):
    """What a frame took on the model's thread."""

    frame_index: int
    seconds: float


Line = FromClient | Unreadable | BinaryFrame | FromServer | Asked | Flushed | SkippedFrames | OutputTaken | FrameRan


def told(message: wire.ClientEvent | wire.ServerEvent) -> dict[str, Any]:
    """A message as the log tells it: audio by its number of samples, cumulative text by its number of characters."""
    fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    for name, value in fields.items():
        if isinstance(value, bytes):
            fields[name] = len(value) // SAMPLE_BYTES
        elif name in CUMULATIVE:
            fields[name] = len(value)
    return fields


def _cut(value: Any) -> Any:
    """A message of a peer with its texts made short."""
    if isinstance(value, dict):
        return {name: _cut(each) for name, each in value.items()}
    if isinstance(value, str) and len(value) > KEPT_CHARACTERS:
        return f"{value[:KEPT_CHARACTERS]}... ({len(value)} characters)"
    return value


def _from_client(at: float, text: str) -> Line:
    try:
        message = told(wire.decode_client(text))
        if "item" in message:  # whatever it holds; in full it is an ``OutputTaken``
            message["item"]["output"] = json_of(message["item"]["output"], "the output")
        return FromClient(at=at, message=_cut(message))
    except WireError:
        begins = text[:KEPT_CHARACTERS].encode(errors="replace").decode()
        return Unreadable(at=at, begins=begins, characters=len(text))


# ---- the folder, while it is written

Item = str | Opening | Push | wire.ServerEvent | Line


class Folder:
    """Writes one. Its calls block, so they are for a thread, and for one at a time."""

    def __init__(self, path: Path, session: SessionFile, most_bytes: int) -> None:
        self.path = path
        self._session = session
        self._most_bytes = most_bytes
        self._bytes = 0
        self._samples = {INPUT: 0, OUTPUT: 0}
        self._files: dict[str, FileIO] = {}
        self._pending = {INPUT: bytearray(), OUTPUT: bytearray(), LOG: bytearray()}  # in the order of writing

    def begin(self) -> None:
        """Make it, for nobody but its owner: it holds people's speech.

        Raises:
            OSError: when it cannot be made; also from the other calls.
        """
        self.path.mkdir(mode=0o700)
        for name in self._pending:
            self._files[name] = FileIO(self.path / name, "x", opener=_private)
        self._write_session()

    def write(self, items: Iterable[tuple[float, Item]]) -> None:
        """Add what passed, each with its time.

        Raises:
            RecordingError: when the folder would grow beyond its bound.
        """
        for at, item in items:
            self._take(at, item)
        self._put()

    def say(self, ending: Ending | None, failure: str | None) -> None:
        """Say how it ended, after the last ``write``; ``failure`` is why not everything is there."""
        changes: dict[str, object] = {"ended": ending, "complete": failure is None, "incomplete_because": failure}
        if failure is None:
            changes |= {"input_samples": self._samples[INPUT], "output_samples": self._samples[OUTPUT]}
        self._session = msgspec.structs.replace(self._session, **changes)
        self._write_session()

    def close(self) -> None:
        """Let go of the files. Never raises."""
        for file in self._files.values():
            with suppress(OSError):  # of a disk that is full: what could not be written has been told
                file.close()

    # ---- one thing after the other

    def _take(self, at: float, item: Item) -> None:
        if isinstance(item, Opening):
            self._open(at, item)
        elif isinstance(item, Push):
            self._add_samples(INPUT, wire.bytes_of(item.samples))
        elif isinstance(item, str):
            self._add_line(_from_client(at, item))
        elif isinstance(item, Line):
            self._add_line(item)
        else:
            if isinstance(item, wire.ResponseAudioDelta):
                self._add_samples(OUTPUT, item.delta)
            self._add_line(FromServer(at=at, message=told(item)))

    def _open(self, at: float, opening: Opening) -> None:
        self._put()
        self._files[INPUT].truncate(0)
        self._files[INPUT].seek(0)
        self._samples[INPUT] = 0
        self._session = msgspec.structs.replace(self._session, opening=opening)
        self._write_session()
        self._add_line(Asked(at=at))

    def _add_samples(self, name: str, pcm: bytes) -> None:
        self._pending[name] += pcm

    def _add_line(self, line: Line) -> None:
        self._pending[LOG] += msgspec.json.encode(line) + b"\n"

    def _put(self) -> None:
        self._bytes += sum(map(len, self._pending.values()))
        if self._bytes > self._most_bytes:
            raise RecordingError(f"it would grow beyond {self._most_bytes} bytes")
        for name, data in self._pending.items():
            _write_all(self._files[name], data)
            if name in self._samples:
                self._samples[name] += len(data) // SAMPLE_BYTES
            data.clear()

    def _write_session(self) -> None:
        data = msgspec.json.format(msgspec.json.encode(self._session), indent=2) + b"\n"
        draft = self.path / DRAFT
        with FileIO(draft, "w", opener=_private) as file:
            _write_all(file, data)
        draft.replace(self.path / SESSION)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write_all(file: FileIO, data: bytes | bytearray) -> None:
    """A disk that becomes full takes a part first."""
    with memoryview(data) as view:
        written = 0
        while written < len(view):
            written += file.write(view[written:])
