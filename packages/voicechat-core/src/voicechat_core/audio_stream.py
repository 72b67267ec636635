"""Audio that is not all there at once: files and pipes read in blocks, WAV files written as samples come.

Choices:

* The blocks of an ``AudioReader`` joined are what ``read_audio`` gives for the same file, to the bit, whatever their
  size; also where rates differ, since soxr in pieces computes what it computes at once (tests hold both).
* What is wrong in the middle of a file is told when it is reached, after everything before it was given.
* A ``WavWriter``'s file is whole after every write: samples first, then the header that counts them, in one call. A
  process that is killed leaves what it had written. A machine that loses power may lose more: nothing is synced.
* Every call may block, a reader of a pipe for as long as the pipe is silent: in an event loop they are for a thread.
  One thread at a time. Needs no MLX.
"""

import contextlib
import io
import math
import os
import shutil
import struct
import tempfile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Protocol

import numpy as np
import numpy.typing as npt

from voicechat_core.audio import BLOCK_SAMPLES, LOUDEST, WIRE_SCALE, float_to_pcm16
from voicechat_core.audio_files import (
    LARGEST_WAV_BYTES,
    LOWEST_RATE,
    STREAMED_FROM,
    Decoder,
    Samples,
    StrPath,
    about,
    prepared,
    require_bytes,
    target_of,
    wav_header,
)
from voicechat_core.errors import AudioError, InputError

__all__ = ["AudioReader", "Resampler", "WavWriter"]

Pcm16 = npt.NDArray[np.int16]

STANDARD_INPUT: Final = "-"
LONGEST_HEAD: Final = 1 << 20  # bytes before a pipe's samples that are kept in memory
EXTENSIBLE: Final = 0xFFFE
# PCM, float, A-law, mu-law, and their bits: every sample has its own bytes.
PLAIN: Final = {1: (8, 16, 24, 32), 3: (32, 64), 6: (8,), 7: (8,)}
HEADER_BYTES: Final = 44
NO_SIZE: Final = 0xFFFFFFFF  # in the header of a pipe, which nobody can go back to


class Resampler:
    """One channel at another rate, piece by piece: soxr's high quality, in step with the original.

    It holds back some 50 ms until ``finish``. All pieces joined are what soxr makes of the whole at once. Equal rates
    pass through.
    """

    def __init__(self, rate: int, wanted: int) -> None:
        import soxr  # here, so that importing this module stays light

        self._stream = None if rate == wanted else soxr.ResampleStream(rate, wanted, 1, dtype="float32", quality="HQ")

    def push(self, samples: Samples) -> Samples:
        """What can be said so far: float32 ``[S]`` in, ``[any number]`` out."""
        if self._stream is None:
            return samples
        result: Samples = self._stream.resample_chunk(np.ascontiguousarray(samples))
        return result

    def finish(self) -> Samples:
        """What was held back. Nothing can be pushed afterwards."""
        nothing = np.zeros(0, np.float32)
        if self._stream is None:
            return nothing
        result: Samples = self._stream.resample_chunk(nothing, last=True)
        return result


# ---- reading


class AudioReader:
    """A file, or a pipe, as 16 kHz mono, a block at a time and never more of it in memory. A context manager.

    Reads whatever ``read_audio`` reads. A WAV that comes through a pipe is given as it arrives; another format in a
    pipe is first copied to a temporary file, since libsndfile must seek in it.

    Attributes:
        name: as errors call it: the path, or ``stdin``.
        seconds: of audio, as the header says; None if it does not, as in a WAV from a pipe.

    Args:
        path: ``-`` is standard input.
        sample_rate: hertz, of what is given.

    Raises:
        AudioError: naming the file: not there, not audio, no samples, a WAV that is shorter than its header says.
    """

    def __init__(self, path: StrPath, sample_rate: int = 16000) -> None:
        if sample_rate < LOWEST_RATE:
            raise AudioError(f"a sample rate of {sample_rate} Hz cannot be; the lowest is {LOWEST_RATE}")
        self.name = "stdin" if os.fspath(path) == STANDARD_INPUT else os.fspath(path)
        self._wanted = sample_rate
        with about(self.name), contextlib.ExitStack() as opened:
            file = opened.enter_context(_opened(path))
            self._source = _source_of(file, opened)
            self._resampler = Resampler(self._source.rate, sample_rate)
            self._opened = opened.pop_all()
        self.seconds = None if self._source.frames is None else self._source.frames / self._source.rate
        self._pending = np.zeros(0, np.float32)
        self._decoded = 0  # samples at the source's rate
        self._given = 0  # at the rate that is wanted
        self._ended = False
        self._failure: AudioError | None = None

    def read(self, count: int) -> Samples:
        """The next ``count`` samples, float32 ``[count]``; fewer at the end, then none.

        Raises:
            AudioError: once everything before it was given: cut short, damaged, not finite, out of all scale.
            InputError: if ``count`` is less than 1.
        """
        if count < 1:
            raise InputError(f"{count} samples cannot be read")
        with about(self.name):
            while len(self._pending) < count and not self._ended:
                self._advance(count - len(self._pending))
            block, self._pending = self._pending[:count], self._pending[count:]
            self._given += len(block)
            if len(block) == 0 and self._failure is not None:
                raise self._failure
            return block

    def read_pcm16(self, count: int) -> Pcm16:
        """The same as int16 (``WIRE_SCALE``): 16-bit mono at the wanted rate passes through as it is."""
        return float_to_pcm16(self.read(count), WIRE_SCALE)

    def _advance(self, missing: int) -> None:
        """Decode a block, as ``read_audio`` does; of a pipe what is missing, no more: it may not have it yet."""
        step = BLOCK_SAMPLES
        if isinstance(self._source, _PipedWav):
            step = min(math.ceil(missing * self._source.rate / self._wanted), BLOCK_SAMPLES)
        try:
            block = self._source.read(step)
        except AudioError as error:
            self._end(error)
            return
        good, failure = self._sane(block)
        self._decoded += len(good)
        self._add(self._resampler.push(good))
        if failure is not None or len(block) == 0:
            self._end(failure)

    def _sane(self, block: Samples) -> tuple[Samples, AudioError | None]:
        """What comes before the first sample that cannot be, and what is wrong with that one."""
        wrong = ~(np.abs(block) <= LOUDEST)  # also of what is not a number
        if not wrong.any():
            return block, None
        index = int(np.argmax(wrong))
        value, at = float(block[index]), self._decoded + index
        place = f"sample {at} (at {at / self._source.rate:.3f} s)"
        if not math.isfinite(value):
            return block[:index], AudioError(f"{place} is not finite: {value}")
        hint = "full scale is 1.0: scale integers first (int16 / 32768)"
        return block[:index], AudioError(f"{place} is {value:g}, but {hint}")

    def _end(self, failure: AudioError | None) -> None:
        self._ended = True
        self._failure = failure
        self._add(self._resampler.finish())
        if failure is None and self._given + len(self._pending) == 0:
            rates = f"at {self._source.rate} Hz are less than one at {self._wanted} Hz"
            self._failure = AudioError(f"{self._decoded} samples {rates}")

    def _add(self, samples: Samples) -> None:
        self._pending = np.concatenate([self._pending, samples])

    def close(self) -> None:
        """Let go of the file. Again is fine."""
        self._opened.close()

    def __enter__(self) -> "AudioReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Source(Protocol):
    """Samples at their own rate; ``Decoder`` says the rest."""

    @property
    def rate(self) -> int: ...
    @property
    def frames(self) -> int | None: ...
    def read(self, most: int) -> Samples: ...


def _opened(path: StrPath) -> BinaryIO:
    file = open(0, "rb", closefd=False) if os.fspath(path) == STANDARD_INPUT else Path(path).open("rb")  # noqa: SIM115
    file.raw.name = None  # type: ignore[attr-defined] # soundfile would believe a suffix, such as .raw
    return file


def _source_of(file: BinaryIO, opened: contextlib.ExitStack) -> _Source:
    if file.seekable():
        return opened.enter_context(Decoder(prepared(file)))
    head = bytearray()
    form, declared = _piped_form(file, head)
    if form is not None:
        return _PipedWav(file, form, declared)
    return opened.enter_context(Decoder(prepared(_copied(file, head, opened))))


def _copied(file: BinaryIO, head: bytearray, opened: contextlib.ExitStack) -> BinaryIO:
    copy = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    copy.write(head)
    shutil.copyfileobj(file, copy)
    return copy


def _piped_form(file: BinaryIO, head: bytearray) -> tuple[bytes | None, int | None]:
    """Read up to the samples of a WAV: its fmt chunk, and how many bytes of audio it says, None if it does not know.

    No fmt chunk: it is something else, or a coding in which samples do not have bytes of their own. ``head`` is then
    what was read.
    """

    def take(count: int) -> bytes:
        data = file.read(count)
        head.extend(data)
        return data

    riff, riff_bytes, kind = struct.unpack("<4sI4s", take(12).ljust(12, b"\0"))
    form: bytes | None = None
    while riff == b"RIFF" and kind == b"WAVE" and len(header := take(8)) == 8:
        name, declared = struct.unpack("<4sI", header)
        if name == b"data":
            # A RIFF that goes on behind a data size of 0 has no samples; one that ends there may not know.
            unknown = declared >= STREAMED_FROM or (declared == 0 and not len(head) < riff_bytes + 8 < STREAMED_FROM)
            return form, None if unknown else declared
        if declared > LONGEST_HEAD - len(head):
            break
        chunk = take(declared + declared % 2)[:declared]
        if name == b"fmt ":
            form = chunk if _is_plain(chunk) else None
    return None, None


def _is_plain(form: bytes) -> bool:
    if len(form) < 16:
        return False
    tag, channels, _, _, align, bits = struct.unpack_from("<HHIIHH", form)
    if tag == EXTENSIBLE and len(form) >= 26:
        tag = int.from_bytes(form[24:26], "little")
    return bits in PLAIN.get(tag, ()) and 0 < align * 8 == channels * bits


class _PipedWav:
    """The samples of a WAV in a pipe, of which any piece behind a header of its own is a WAV again."""

    def __init__(self, file: BinaryIO, form: bytes, declared: int | None) -> None:
        self._file = file
        self._form = form
        self._declared = declared
        self._found = 0
        self._align = int.from_bytes(form[12:14], "little")
        with self._decoder(bytes(self._align)) as decoder:
            self.rate = decoder.rate
        self.frames = None if declared is None else declared // self._align

    def read(self, most: int) -> Samples:
        wanted = most * self._align
        if self._declared is not None:
            wanted = min(wanted, self._declared - self._found)
        data = self._file.read(wanted)
        self._found += len(data)
        whole = len(data) - len(data) % self._align
        if whole == 0:
            return self._end()
        with self._decoder(data[:whole]) as decoder:
            return decoder.read(whole // self._align)

    def _end(self) -> Samples:
        require_bytes(self._declared or 0, self._found)
        if self._found < self._align:
            raise AudioError("holds no samples")
        return np.zeros(0, np.float32)

    def _decoder(self, data: bytes) -> Decoder:
        form = struct.pack("<4sI", b"fmt ", len(self._form)) + self._form + b"\0" * (len(self._form) % 2)
        body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
        return Decoder(io.BytesIO(struct.pack("<4sI", b"RIFF", len(body)) + body))


# ---- writing


class WavWriter:
    """A 16-bit WAV file that grows as samples come, and is whole after every write. A context manager.

    It writes where it was told, not beside it: an existing file is emptied when the writer is made, and keeps its
    rights and the links to it. Leaving the block by an exception finishes the file as well: it holds what had arrived.
    Into a pipe it writes a header without sizes.

    Attributes:
        path: as it was given.
        frames: samples of each channel that are in the file.

    Args:
        path: of the file.
        sample_rate: hertz.
        channels: 2 is left, right.

    Raises:
        AudioError: naming the file, if it cannot be written.
    """

    def __init__(self, path: StrPath, sample_rate: int, channels: int = 1) -> None:
        self.path = os.fspath(path)
        self.frames = 0
        self._rate = sample_rate
        self._channels = channels
        self._bytes = 0  # of audio
        with about(path):
            self._file = target_of(path).open("wb", buffering=0)
            try:
                self._sized = self._file.seekable()
                self._put(wav_header(0 if self._sized else NO_SIZE, sample_rate, channels))
            except (OSError, AudioError):
                self._file.close()
                raise

    @property
    def closed(self) -> bool:
        """Whether nothing can be written any more: it was closed, or a write has failed."""
        return self._file.closed

    def write(self, samples: Pcm16) -> None:
        """Add int16 ``[S]``, or ``[S, channels]``. None is fine.

        Raises:
            AudioError: naming the file. For samples of another kind nothing changes. When the disk is full, or the
                file as long as a WAV can be (4 GiB: 27 hours of mono at 22.05 kHz), what fits stays in a valid file,
                and the writer is closed.
        """
        with about(self.path):
            data = self._checked(samples)
            if self.closed:
                raise AudioError("is closed; nothing can be added")
            if self._sized and self._bytes + len(data) > LARGEST_WAV_BYTES:
                self.close()
                raise AudioError(f"is full: a WAV file has at most {LARGEST_WAV_BYTES} bytes of audio")
            try:
                self._append(data)
            except OSError:
                with contextlib.suppress(AudioError):  # the first error is the one to tell
                    self.close()
                raise

    def _checked(self, samples: Pcm16) -> bytes:
        if samples.dtype.newbyteorder("=") != np.int16:
            raise AudioError(f"samples are {samples.dtype}; int16 is needed")
        if samples.shape[1:] != (self._channels,) and not (samples.ndim == 1 == self._channels):
            raise AudioError(f"samples have shape {samples.shape}; the file has {self._channels} channels")
        return samples.astype("<i2").tobytes()

    def _append(self, data: bytes) -> None:
        with memoryview(data) as view:
            written = 0
            while written < len(view):  # a disk that becomes full takes a part first
                count = self._file.write(view[written:])
                written += count
                self._bytes += count
        self._tell_size()

    def _put(self, header: bytes) -> None:
        if self._file.write(header) != len(header):
            raise AudioError("no space for a header")

    def _tell_size(self) -> None:
        """In one call, so that no header is ever half written, and after the samples, so that it promises no more."""
        self.frames = self._bytes // (2 * self._channels)
        if self._sized:
            header = wav_header(2 * self._channels * self.frames, self._rate, self._channels)
            os.pwrite(self._file.fileno(), header, 0)

    def close(self) -> None:
        """Finish the file. Again is fine.

        Raises:
            AudioError: naming the file, if the system only now says that it could not be written.
        """
        if self.closed:
            return
        with about(self.path), self._file:
            self._tell_size()
            if self._sized and self._bytes % (2 * self._channels):  # part of a sample, from a disk that became full
                self._file.truncate(HEADER_BYTES + 2 * self._channels * self.frames)

    def __enter__(self) -> "WavWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(AudioError):  # the error in the block is the one to tell
            self.close()
