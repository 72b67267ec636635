"""Audio files as libsndfile can read them: opened, their sizes held against what is there, decoded piece by piece.

Below ``audio`` and ``audio_stream``, which are what others use. Every error is one ``AudioError``; ``about`` puts the
file's name before it. Knows nothing about scale, rates that are wanted, or models; needs no MLX.
"""

import contextlib
import io
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, cast

import numpy as np
import numpy.typing as npt

from voicechat_core.errors import AudioError

__all__ = [
    "LARGEST_WAV_BYTES",
    "LOWEST_RATE",
    "STREAMED_FROM",
    "Decoder",
    "Samples",
    "StrPath",
    "about",
    "prepared",
    "require_bytes",
    "target_of",
    "wav_header",
]

Samples = npt.NDArray[np.float32]
StrPath = str | os.PathLike[str]

# Piping writers leave sizes of 0, 0xFFFFFFFF (ffmpeg), 0x7FFFF000 (sox) or 0x7FFFFF00 (arecord).
STREAMED_FROM: Final = 0x7FFFF000
LARGEST_WAV_BYTES: Final = 0xFFFFFFFF - 36

# What libsndfile takes for a WAV that nobody closed: it reads to the end, and that end may be beyond 4 GiB.
UNCLOSED_RIFF: Final = 8

OGG_HEAD, OGG_SUM = 27, 22  # bytes of a page's fixed head; where its checksum is
LARGEST_OGG_PAGE: Final = 65307
MIRRORED: Final = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))

LOWEST_RATE: Final = 1000  # hertz; below it a file is mislabelled, and converting it up would take memory without end
UNKNOWN_LENGTH: Final = 1 << 62  # libsndfile says 2^63 - 1 of a piped FLAC, and cannot find its end


@contextlib.contextmanager
def about(path: StrPath) -> Iterator[None]:
    """Put the file's name before any error about it."""
    try:
        yield
    except OSError as error:
        raise AudioError(f"{os.fspath(path)}: {error.strerror or error}") from error
    except AudioError as error:
        raise AudioError(f"{os.fspath(path)}: {error}") from error


# ---- before reading


def prepared(file: BinaryIO) -> BinaryIO:
    """The file as libsndfile can read it, once it is known to be all there. One that cannot seek is read whole.

    Raises:
        AudioError: if it is empty, a WAV that is shorter than its header says, or an Ogg with a damaged page.
    """
    source = file if file.seekable() else io.BytesIO(file.read())
    total = source.seek(0, os.SEEK_END)
    if total == 0:
        raise AudioError(_why_empty(file))
    _check_ogg_pages(source)
    streamed_at = _check_wav_sizes(source, total)
    source.seek(0)
    if streamed_at is None:
        return source
    riff, data = total - 8, total - streamed_at - 4
    if riff > 0xFFFFFFFF:
        riff, data = UNCLOSED_RIFF, 0
    repaired = _Repaired(source, {4: struct.pack("<I", riff), streamed_at: struct.pack("<I", data)})
    return cast(BinaryIO, repaired)


def _why_empty(file: BinaryIO) -> str:
    with contextlib.suppress(OSError):  # what is no file of the system has no number
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):  # /dev/zero, whose end would never come
            return "is a device; a file or a pipe is needed"
    return "the file is empty (0 bytes)"


def _check_wav_sizes(file: BinaryIO, total: int) -> int | None:
    """Refuse a truncated WAV. Returns where a data size must be filled in first, or None if it may be read as it is."""
    file.seek(0)
    form, riff_bytes, kind = struct.unpack("<4sI4s", file.read(12).ljust(12, b"\0"))
    if form != b"RIFF" or kind != b"WAVE":
        return None
    while len(header := file.read(8)) == 8:
        name, declared = struct.unpack("<4sI", header)
        here = file.tell()
        if name == b"data":
            # Under a RIFF size that fits the file, a data size of 0 is the truth: no samples.
            if (declared == 0 or declared >= STREAMED_FROM) and riff_bytes + 8 != total:
                return here - 4
            require_bytes(declared, total - here)
            return None
        file.seek(here + declared + declared % 2)
    return None


def _check_ogg_pages(file: BinaryIO) -> None:
    """Refuse an Ogg whose pages do not match their checksums: libsndfile fills such holes, of Opus without a word."""
    file.seek(0)
    at = 0
    while len(head := file.read(OGG_HEAD)) == OGG_HEAD and head.startswith(b"OggS"):
        lengths = file.read(head[-1])
        page = head[:OGG_SUM] + bytes(4) + head[OGG_SUM + 4 :] + lengths + file.read(sum(lengths))
        if _ogg_checksum(page) != int.from_bytes(head[OGG_SUM : OGG_SUM + 4], "little"):
            raise AudioError(f"damaged or cut short: the Ogg page at byte {at} does not match its checksum")
        at += len(page)
    if at and b"OggS" in head + file.read(LARGEST_OGG_PAGE):  # what is behind the last page is no matter
        raise AudioError(f"damaged or cut short: there is no whole Ogg page at byte {at}, where one is due")


def _ogg_checksum(page: bytes) -> int:
    """A CRC-32 that takes bits from the other end than zlib's, begins with 0, and is not inverted."""
    mirrored = zlib.crc32(page.translate(MIRRORED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(mirrored.to_bytes(4, "little").translate(MIRRORED), "big")


def require_bytes(declared: int, found: int) -> None:
    """Refuse audio that is shorter than its header says."""
    if declared > found:
        raise AudioError(f"truncated: its header says {declared} bytes of audio, {found} are there")


class _Repaired(io.RawIOBase):
    """A file in which some bytes read otherwise than they are; nothing is copied or changed."""

    def __init__(self, file: BinaryIO, patches: dict[int, bytes]) -> None:
        self._file = file
        self._patches = patches

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        begin = self._file.tell()
        data = bytearray(self._file.read(len(buffer)))
        for at, patch in self._patches.items():
            for offset, byte in enumerate(patch, at - begin):
                if 0 <= offset < len(data):
                    data[offset] = byte
        buffer[: len(data)] = data
        return len(data)


# ---- reading


class Decoder:
    """A prepared file's samples, one piece after the other, channels averaged. A context manager.

    Attributes:
        rate: hertz.
        frames: how many samples its header promises.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Raises ``AudioError``, as ``read`` does, if it is not audio or cannot be used."""
        import soundfile  # here, so that importing this module stays light

        self._failure = soundfile.SoundFileError
        with self._failing():
            self._audio = soundfile.SoundFile(file)
        self.rate: int = self._audio.samplerate
        self.frames: int = self._audio.frames
        self._given = 0
        self._broken: AudioError | None = None
        self._check()

    def _check(self) -> None:
        if self.frames >= UNKNOWN_LENGTH:
            container = self._audio.format
            raise AudioError(f"its {container} header does not say how long it is; write it to a file, not a pipe")
        if self.rate < LOWEST_RATE:
            raise AudioError(f"its sample rate is {self.rate} Hz; the lowest is {LOWEST_RATE}")
        _check_other_sizes(self._audio.format, self._audio.extra_info)

    def read(self, most: int) -> Samples:
        """The next samples ``[at most `most`]``; none at the end.

        Raises:
            AudioError: once everything before the damage was given: cut short, cannot be decoded, no samples at all.
        """
        if self._broken is not None:
            raise self._broken
        block = np.empty((most, self._audio.channels), np.float32)
        try:
            with self._failing():
                block = self._audio.read(dtype="float32", always_2d=True, out=block)
        except AudioError as error:
            self._broken = error
            block = block[: self._decoded_beside_the_error(most)]
        self._given += len(block)
        if len(block) == 0:
            self._end()
        with np.errstate(invalid="ignore"):  # opposite infinities: refused with the rest, by name
            mono: Samples = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1)
        return mono

    def _decoded_beside_the_error(self, most: int) -> int:
        """soundfile throws away what a call decoded before it failed; it is in the buffer, and the position counts."""
        try:
            with self._failing():
                position: int = self._audio.tell()
                return min(max(position - self._given, 0), most)
        except AudioError:
            return 0

    def _end(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._given < self.frames:
            raise AudioError(f"truncated: its header says {self.frames} samples, {self._given} are there")
        if self._given == 0:
            raise AudioError("holds no samples")

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except self._failure as error:
            reason = getattr(error, "error_string", "") or "damaged or cut short"
            raise AudioError(f"cannot be read as audio: {reason.rstrip('.')}") from error

    def close(self) -> None:
        """Let go of the decoder, not of the file. Again is fine."""
        self._audio.close()

    def __enter__(self) -> "Decoder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _check_other_sizes(container: str, log: str) -> None:
    """What libsndfile noticed, but read over, in a truncated RF64, AIFF or AU file."""
    if container in ("WAV", "WAVEX"):
        return
    for declared, found in re.findall(r": (\d+) \(should be (\d+)\)", log):
        if int(declared) < STREAMED_FROM:
            require_bytes(int(declared), int(found))


# ---- writing


def target_of(path: StrPath) -> Path:
    """The file that is really meant, behind any links.

    Raises:
        AudioError: if it is a directory or write-protected, or has no directory to be in.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise AudioError(f"there is no directory {target.parent}") from None
        return target
    if stat.S_ISDIR(mode):
        raise AudioError("is a directory")
    if not os.access(target, os.W_OK):
        raise AudioError("is write-protected")
    return target


def wav_header(data_bytes: int, sample_rate: int, channels: int = 1) -> bytes:
    """The 44 bytes before 16-bit samples."""
    align = 2 * channels
    form = (16, 1, channels, sample_rate, align * sample_rate, align, 16)  # PCM
    sizes = min(36 + data_bytes, 0xFFFFFFFF), data_bytes
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", sizes[0], b"WAVE", b"fmt ", *form, b"data", sizes[1])
