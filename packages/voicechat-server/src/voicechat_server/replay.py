"""Runs a recorded session again, and says where it is not what was recorded.

    >>> print(replay("recordings/20261130T101500Z-sess_0123456789abcdef").text())

The model hears what the session was given, without what was skipped, with the same options; what it says becomes
messages by the server's own ``Telling`` and is held against those that the socket took, in order: kind, frame, texts,
ids, codes, and each sample of the sound. What depends on the clock or on the peer (lag, errors, pongs) is not compared.
The comparison ends where the recording does, and the model runs no further.

No Trio and no thread: the caller's thread loads the checkpoint and runs it.
"""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec
import numpy as np
import numpy.typing as npt

from voicechat_core import wire
from voicechat_core.errors import ContextLimitError, InputError, VoiceChatError
from voicechat_core.events import AudioFrame, Event
from voicechat_server.model_messages import Opening
from voicechat_server.recording_files import (
    FORMAT,
    INPUT,
    LOG,
    OUTPUT,
    SESSION,
    Asked,
    Flushed,
    FromServer,
    Line,
    OutputTaken,
    SessionFile,
    SkippedFrames,
    told,
    versions,
)
from voicechat_server.telling import Telling

if TYPE_CHECKING:
    from voicechat_core import Session, VoiceChat

__all__ = ["Difference", "Recorded", "ReplayReport", "compare", "read", "replay"]

Samples = npt.NDArray[np.int16]

# What a session says, in the log's words.
SAID: Final = {
    kind.__struct_config__.tag
    for kind in (
        wire.ConversationItemInputAudioTranscriptionDelta,
        wire.ResponseTextDelta,
        wire.ResponseFunctionDelta,
        wire.ResponseFunctionCallArgumentsDone,
        wire.ResponseFunctionCallFailed,
        wire.ResponseAudioDelta,
        wire.ResponseDone,
    )
}
AUDIO: Final = wire.ResponseAudioDelta.__struct_config__.tag
DONE: Final = wire.ResponseDone.__struct_config__.tag
# Frames that were told and that no socket took, where the peer is gone: one in the writer's hands, one behind it.
UNTAKEN: Final = 2
# Compared in this order, so that a cause is told before its effects: ids, then codes, then what is made of them.
FIRST: Final = ("type", "frame_index", "text_token", "function_token", "token_id", "audio_codes")
NOTHING: Final = "nothing"
SHOWN: Final = 120  # characters of a value


# ---- the report


@dataclass(frozen=True)
class Difference:
    """The first one: ``recorded`` and ``replayed`` are the values of ``field`` in a message of that ``type``.

    ``frame_index`` is that of the recorded message. ``largest_step`` is given for samples: how far the frame's furthest
    pair lies apart.
    """

    frame_index: int
    type: str
    field: str
    recorded: object
    replayed: object
    largest_step: int | None = None

    def text(self) -> str:
        """In one line."""
        step = "" if self.largest_step is None else f"; the frame's largest difference is {self.largest_step}"
        values = f"recorded {_shown(self.recorded)}, replayed {_shown(self.replayed)}"
        return f"first difference: frame {self.frame_index}, {self.type}, {self.field}: {values}{step}"


@dataclass(frozen=True)
class ReplayReport:
    """What a replay found.

    Attributes:
        folder: the recording.
        session: its identifier.
        checkpoint: what was loaded.
        fingerprint: of the model, in the recording and now.
        frames: whole frames that were compared and are equal.
        messages: the same of messages.
        difference: the first one, None if there is none.
        notes: what else is to be known: an incomplete recording, other versions.
    """

    folder: str
    session: str
    checkpoint: str
    fingerprint: str
    frames: int = 0
    messages: int = 0
    difference: Difference | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether no difference was found."""
        return self.difference is None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"same": self.same, **asdict(self)}

    def text(self) -> str:
        """For people."""
        equal = f"{self.frames} frames and {self.messages} messages are the same"
        found = equal if self.difference is None else f"{self.difference.text()}\nbefore it, {equal}"
        return "\n".join([f"{self.session}: {found}", *(f"note: {note}" for note in self.notes)])


# ---- reading


@dataclass(frozen=True)
class Said:
    """A message that was sent, as the log tells it; ``samples`` are those of an audio delta."""

    message: dict[str, Any]
    samples: Samples | None = None


@dataclass(frozen=True)
class Recorded:
    """What a folder holds of its session. ``flush`` is None if it was not flushed."""

    folder: Path
    facts: SessionFile
    opening: Opening
    input: Samples = field(repr=False)
    said: list[Said] = field(repr=False)
    skips: list[SkippedFrames] = field(repr=False)
    outputs: list[OutputTaken] = field(repr=False)
    flush: Flushed | None = None
    notes: list[str] = field(default_factory=list)

    def heard(self, voicechat: "VoiceChat") -> Samples:
        """What frames read: the input without what was skipped."""
        frame, first = voicechat.model.config.input_frame_samples, voicechat.first_frame_samples
        kept, start, skipped = [], 0, 0
        for skip in self.skips:
            read = first + frame * (skip.before_frame - 1) if skip.before_frame else 0
            kept.append(self.input[start : read + skipped])
            skipped += frame * skip.frames
            start = read + skipped
        return np.concatenate([*kept, self.input[start:]])


def read(folder: str | PathLike[str]) -> Recorded:
    """Read a recording.

    Raises:
        InputError: naming the file: it is not there, or not what a recording has; or the recording is complete, and its
            files contradict each other.
    """
    path = Path(folder)
    _require_one(path)
    facts = _facts(path)
    if facts.opening is None:
        raise InputError(f"{path}: no session was opened in this recording")
    notes = [] if facts.complete else [f"the recording is not complete: {facts.incomplete_because or 'it was cut off'}"]
    lines = _lines(path, facts, notes)
    said = [line.message for line in lines if isinstance(line, FromServer)]
    if facts.complete:
        _require_opening(path, lines)
        _require_ending(path, facts, said)
    flushes = [line for line in lines if isinstance(line, Flushed)]
    return Recorded(
        folder=path,
        facts=facts,
        opening=facts.opening,
        input=_pcm(path / INPUT, facts, facts.input_samples),
        said=_with_samples(said, _pcm(path / OUTPUT, facts, facts.output_samples), path, facts, notes),
        skips=[line for line in lines if isinstance(line, SkippedFrames)],
        outputs=[line for line in lines if isinstance(line, OutputTaken)],
        flush=flushes[0] if flushes else None,
        notes=notes,
    )


def _require_one(path: Path) -> None:
    """Refuse the folder in which recordings lie, with a word on what to name instead."""
    if not (path / SESSION).exists() and (inside := sorted(path.glob(f"*/{SESSION}"))):
        raise InputError(f"{path}: holds {len(inside)} recordings; name one of them, {inside[-1].parent} for instance")


def _facts(path: Path) -> SessionFile:
    file = path / SESSION
    data = _bytes(file)
    try:
        found = msgspec.json.decode(data)
        if not isinstance(found, dict) or "format" not in found:
            raise InputError(f"{file}: not a recording's: it has no format")
        if found["format"] != FORMAT:
            raise InputError(f"{file}: a recording of format {found['format']!r}; this version reads {FORMAT}")
        return msgspec.convert(found, SessionFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{file}: not a recording's: {error}") from error


def _lines(path: Path, facts: SessionFile, notes: list[str]) -> list[Line]:
    """What matters of all that passed. A log may be long, and mostly pings."""
    every = _every_line(path, facts, notes)
    return [line for line in every if isinstance(line, Asked | Flushed | SkippedFrames | OutputTaken) or _is_said(line)]


def _is_said(line: Line) -> bool:
    return isinstance(line, FromServer) and line.message.get("type") in SAID


def _every_line(path: Path, facts: SessionFile, notes: list[str]) -> Iterator[Line]:
    """But not a last one that is torn: the process was killed, or the disk full."""
    decoder = msgspec.json.Decoder(Line)
    with _opened(path / LOG) as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                notes.append(f"{LOG} ends inside a line")
                if facts.complete:
                    raise InputError(f"{path / LOG}: ends inside a line, though the recording is complete")
                return
            try:
                yield decoder.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InputError(f"{path / LOG}: line {number} cannot be read: {error}") from error


# Of a complete recording, what one file says of the session must be what the others say: else it has lost something.


def _require_opening(path: Path, lines: list[Line]) -> None:
    if not any(isinstance(line, Asked) for line in lines):
        raise InputError(f"{path / LOG}: tells of no opening; {SESSION} has one, and that the recording is complete")


def _require_ending(path: Path, facts: SessionFile, said: list[dict[str, Any]]) -> None:
    ended = facts.ended
    if ended is None:
        raise InputError(f"{path / SESSION}: complete is true, and ended is null; a complete recording has an end")
    frames = sum(message["type"] == AUDIO for message in said)
    untaken = 0 if ended.ended_by == "done" else UNTAKEN
    if not frames <= ended.frames <= frames + untaken:
        raise InputError(f"{path / LOG}: has {frames} frames; {SESSION} tells of {ended.frames}")
    last = said[-1]["type"] if said else NOTHING
    if ended.ended_by == "done" and last != DONE:
        raise InputError(f"{path / LOG}: {last} is the last that was said; {SESSION} tells of an end by {DONE}")


def _pcm(file: Path, facts: SessionFile, samples: int | None) -> Samples:
    data = _bytes(file)
    if facts.complete and len(data) != 2 * (samples or 0):
        raise InputError(f"{file}: has {len(data)} bytes; {SESSION} tells of {samples} samples")
    return np.frombuffer(data[: len(data) // 2 * 2], "<i2").astype(np.int16)


def _with_samples(
    said: list[dict[str, Any]], output: Samples, path: Path, facts: SessionFile, notes: list[str]
) -> list[Said]:
    """The messages with the sound of each, as far as there is any."""
    found: list[Said] = []
    start = 0
    for message in said:
        if message["type"] != AUDIO:
            found.append(Said(message))
            continue
        end = start + _count(message, path)
        if end > output.size:
            if facts.complete:
                raise InputError(f"{path / OUTPUT}: has {output.size} samples; {LOG} tells of {end} or more")
            notes.append(f"{OUTPUT} ends before frame {message.get('frame_index')}")
            return found
        found.append(Said(message, output[start:end]))
        start = end
    if facts.complete and start != output.size:
        raise InputError(f"{path / OUTPUT}: has {output.size} samples; {LOG} tells of {start}")
    return found


def _count(message: dict[str, Any], path: Path) -> int:
    count = message.get("delta")
    if not isinstance(count, int) or count < 0:
        raise InputError(f"{path / LOG}: an audio delta has {_shown(count)} samples; a number is needed")
    return count


def _bytes(file: Path) -> bytes:
    with _opened(file) as opened:
        return opened.read()


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with file.open("rb") as opened:
            yield opened
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error


# ---- running it again


def replay(folder: str | PathLike[str], model: str | PathLike[str] | None = None) -> ReplayReport:
    """Load the checkpoint, the recorded one or ``model``, and run a recording again.

    Raises:
        InputError: for a folder that is no recording, a model with another fingerprint, or a compiled one where
            nothing can be compiled.
        CheckpointError: when the checkpoint cannot be loaded, ``HubError`` when it cannot be had.
    """
    from voicechat_core.precision import check_precision
    from voicechat_core.voicechat import load

    recorded = read(folder)
    precision = check_precision(recorded.facts.precision)
    checkpoint = Path(recorded.facts.checkpoint) if model is None else model
    voicechat = load(checkpoint, precision=precision, compile="on" if recorded.facts.compiled else "off")
    return compare(recorded, voicechat, checkpoint)


def compare(recorded: Recorded, voicechat: "VoiceChat", checkpoint: str | PathLike[str] = "") -> ReplayReport:
    """Run a recording again with a model that is loaded.

    Raises:
        InputError: when it is another model, or in another precision.
    """
    theirs, ours = recorded.facts.fingerprint, voicechat.model.fingerprint
    if theirs != ours:
        raise InputError(
            f"{recorded.folder}: recorded with a model with fingerprint {theirs}, this one's is {ours}: "
            "checkpoint and precision must be the same"
        )
    notes = [*recorded.notes, *_other_versions(recorded.facts)]
    if not recorded.said:
        notes.append(f"nothing was compared: {LOG} has nothing that the session said")
    frames = messages = 0
    difference = None
    replayed = _again(recorded, voicechat)
    for said in recorded.said:
        ours_said = _next(replayed)
        if ours_said is None and not recorded.facts.complete:
            notes.append(f"the input that was kept ends before frame {frames}; {len(recorded.said)} messages were sent")
            break
        difference = _difference(said, ours_said)
        if difference is not None:
            break
        messages += 1
        frames += said.message["type"] == AUDIO
    facts = recorded.facts
    return ReplayReport(str(recorded.folder), facts.session, str(checkpoint), ours, frames, messages, difference, notes)


def _again(recorded: Recorded, voicechat: "VoiceChat") -> Iterator[wire.ServerEvent]:
    opening = recorded.opening
    session = voicechat.session(
        system_prompt=opening.system_prompt,
        seed=opening.seed,
        max_frames=opening.max_frames,
        tts_context_frames=opening.tts_context_frames,
        tools=opening.tools,
        tool_wait_frames=opening.tool_wait_frames,
    )
    telling = Telling(lambda: "")
    for event in _answered(session, _events(session, recorded.heard(voicechat), recorded.flush), recorded.outputs):
        yield from telling.tell(event)


def _answered(session: "Session", events: Iterator[Event], outputs: list[OutputTaken]) -> Iterator[Event]:
    """The events, while calls are given their outputs before the frames before which they had them."""
    waiting = deque(outputs)
    for event in events:
        yield event
        while isinstance(event, AudioFrame) and waiting and waiting[0].before_frame <= session.frame_index:
            output = waiting.popleft()
            session.respond(output.call_id, output.output)


def _events(session: "Session", heard: Samples, flush: Flushed | None) -> Iterator[Event]:
    """As the model's thread does it: past its limit a session hears no more, but can be flushed."""
    with suppress(ContextLimitError):
        yield from session.push(heard)
    if flush is None:
        return
    try:
        yield from session.flush(pad_partial=flush.pad_partial)
    except ContextLimitError:
        yield from session.flush()


def _next(replayed: Iterator[wire.ServerEvent]) -> wire.ServerEvent | VoiceChatError | None:
    """The next message; the failure that came instead; None after the last one."""
    try:
        return next(replayed, None)
    except VoiceChatError as error:
        return error


def _other_versions(facts: SessionFile) -> list[str]:
    now = versions()
    return [
        f"recorded with {name} {facts.versions.get(name, NOTHING)}, replayed with {now.get(name, NOTHING)}"
        for name in sorted({*facts.versions, *now})
        if facts.versions.get(name) != now.get(name)
    ]


# ---- comparing


def _difference(said: Said, again: wire.ServerEvent | VoiceChatError | None) -> Difference | None:
    message = said.message
    frame, kind = message.get("frame_index", -1), message["type"]
    if again is None:
        return Difference(frame, kind, "message", kind, NOTHING)
    if isinstance(again, VoiceChatError):
        return Difference(frame, kind, "message", kind, f"{type(again).__name__}: {again}")
    ours = told(again)
    for name in sorted({*message, *ours} - {"event_id"}, key=_place):
        theirs, now = message.get(name, NOTHING), ours.get(name, NOTHING)
        theirs = tuple(theirs) if isinstance(theirs, list) else theirs
        now = tuple(now) if isinstance(now, list) else now
        if theirs != now:
            return Difference(frame, kind, *_first_item(name, theirs, now))
    if said.samples is not None and isinstance(again, wire.ResponseAudioDelta):
        return _sound_difference(frame, kind, said.samples, wire.samples_of(again.delta))
    return None


def _place(name: str) -> tuple[int, str]:
    return (FIRST.index(name) if name in FIRST else len(FIRST), name)


def _first_item(name: str, recorded: Any, replayed: Any) -> tuple[str, object, object]:
    """Of two arrays of one length, the first pair that differs."""
    if isinstance(recorded, tuple) and isinstance(replayed, tuple) and len(recorded) == len(replayed):
        for index, (one, other) in enumerate(zip(recorded, replayed, strict=True)):
            if one != other:
                return f"{name}[{index}]", one, other
    return name, recorded, replayed


def _sound_difference(frame: int, kind: str, recorded: Samples, replayed: Samples) -> Difference | None:
    apart = np.abs(recorded.astype(np.int32) - replayed)
    if not apart.any():
        return None
    at = int(np.flatnonzero(apart)[0])
    return Difference(frame, kind, f"sample {at}", int(recorded[at]), int(replayed[at]), int(apart.max()))


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"
