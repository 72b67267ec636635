"""Audio in and out: files, arrays, 16-bit PCM. Inside, samples are float32 mono with full scale at 1.0.

Choices:

* Nothing is lost in silence. A WAV that is shorter than its header says is refused; a header whose sizes were never
  filled in, as programs that write to a pipe leave it, is no truncation: the audio then runs to the end of the file.
* Channels are averaged, other rates are converted with soxr, values are otherwise left alone: a float above 1.0 is a
  loud sample and stays. Beyond ``LOUDEST`` it is taken for a mistake of scale and refused.
* Knows nothing about models; needs no MLX.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Literal

import numpy as np
import numpy.typing as npt

from voicechat_core.audio_files import (
    LARGEST_WAV_BYTES,
    LOWEST_RATE,
    Decoder,
    Samples,
    StrPath,
    about,
    prepared,
    target_of,
    wav_header,
)
from voicechat_core.errors import AudioError

__all__ = [
    "SERVER_SCALE",
    "WIRE_SCALE",
    "check_samples",
    "check_writable",
    "float_to_pcm16",
    "pcm16_to_float",
    "read_audio",
    "write_wav",
]

# What 1.0 becomes in 16 bits. A client sends by the first (the inverse of reading, so PCM16 survives a round trip);
# a server and the WAV writer use the second, as the native protocol's audio deltas do.
WIRE_SCALE: Final = 32768
SERVER_SCALE: Final = 32767

LOUDEST = 16.0  # 24 dB above full scale; 16-bit integers stored as floats are far beyond

BLOCK_SAMPLES = 1 << 16  # decoded at once, of each channel; the last bit of an MP3's samples depends on it


# ---- arrays


def pcm16_to_float(pcm: bytes | bytearray | memoryview | npt.NDArray[np.int16]) -> Samples:
    """16-bit samples, little-endian if bytes, to float32: divided by 32768, exactly.

    Raises:
        AudioError: for an odd number of bytes, or an array of another type.
    """
    if not isinstance(pcm, np.ndarray):
        if len(pcm) % 2:
            raise AudioError(f"{len(pcm)} bytes are not a whole number of 16-bit samples")
        pcm = np.frombuffer(pcm, "<i2")
    if pcm.dtype != np.int16:
        raise AudioError(f"PCM16 samples are int16, not {pcm.dtype}")
    return pcm.astype(np.float32) / np.float32(32768)


def float_to_pcm16(samples: npt.ArrayLike, scale: Literal[32767, 32768] = SERVER_SCALE) -> npt.NDArray[np.int16]:
    """Floats to 16-bit samples: clip to [-1, 1], multiply by ``scale``, round half to even.

    With ``WIRE_SCALE`` it is the inverse of ``pcm16_to_float``, and 1.0, which has no int16, becomes 32767.

    Raises:
        AudioError: if a sample is not a finite float.
    """
    floats = np.asarray(samples)
    if not np.issubdtype(floats.dtype, np.floating):
        raise AudioError(f"samples are {floats.dtype}; floating point is needed")
    _require_finite(floats)
    scaled = np.rint(np.clip(floats, -1, 1).astype(np.float32) * np.float32(scale))
    pcm: npt.NDArray[np.int16] = np.minimum(scaled, np.float32(32767)).astype("<i2")
    return pcm


def check_samples(samples: npt.ArrayLike) -> Samples:
    """One channel ``[S]`` as float32: floats are cast, int16 is scaled exactly; empty is fine.

    Float32 input is returned as it is, not copied. Values above 1.0 are kept.

    Raises:
        AudioError: for another type or number of axes, for a sample that is not finite or out of all scale.
    """
    try:
        array = np.asarray(samples)
    except Exception as error:  # whatever an object's own conversion raises
        raise AudioError(f"samples are {type(samples).__name__} and cannot be read as numbers: {error}") from error
    if isinstance(samples, np.ma.MaskedArray):
        raise AudioError("samples are a masked array: fill what is masked first")
    if array.ndim != 1:
        raise AudioError(
            f"samples have shape {array.shape}; one channel [S] is needed: mix down first (mean over channels)"
        )
    if array.dtype.newbyteorder("=") == np.int16:
        return pcm16_to_float(array.astype(np.int16))
    if not np.issubdtype(array.dtype, np.floating):
        raise AudioError(f"samples are {array.dtype}; float32 (full scale 1.0) or int16 is needed")
    return _require_sane(array)


def _require_sane(array: npt.NDArray[np.floating]) -> Samples:
    _require_finite(array)
    peak = float(np.abs(array).max(initial=0))
    if peak > LOUDEST:
        raise AudioError(f"the loudest sample is {peak:g}, but full scale is 1.0: scale integers first (int16 / 32768)")
    return np.ascontiguousarray(array, np.float32)


def _require_finite(array: npt.NDArray[np.floating]) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        index = int(np.argmin(finite))
        count = finite.size - int(np.count_nonzero(finite))
        raise AudioError(
            f"{count} of {finite.size} samples are not finite; the first is sample {index}: {array.flat[index]}"
        )


# ---- reading files


def read_audio(path: StrPath, sample_rate: int) -> Samples:
    """Any file libsndfile reads (WAV, FLAC, Ogg, MP3, ...) as float32 mono ``[S]`` at ``sample_rate`` hertz.

    Raises:
        AudioError: naming the file and what is wrong with it: not there, not audio, no samples, truncated, not finite.
    """
    if sample_rate < LOWEST_RATE:
        raise AudioError(f"a sample rate of {sample_rate} Hz cannot be; the lowest is {LOWEST_RATE}")
    with about(path), Path(path).open("rb") as file:
        file.raw.name = None  # type: ignore[attr-defined] # soundfile would believe a suffix, such as .raw
        samples, rate = _decoded(file)
        samples = _require_sane(samples)
        return samples if rate == sample_rate else _resampled(samples, rate, sample_rate)


def _decoded(file: BinaryIO) -> tuple[Samples, int]:
    """All samples, channels averaged, and their rate."""
    with Decoder(prepared(file)) as decoder:
        # By blocks, so that other channels are never all there at once.
        blocks: list[Samples] = []
        while len(block := decoder.read(BLOCK_SAMPLES)):
            blocks.append(block)
        return np.concatenate(blocks), decoder.rate


def _resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """``samples`` at another rate: soxr's high quality, in step with the original."""
    import soxr

    result: Samples = soxr.resample(samples, rate, wanted, quality="HQ")
    if len(result) == 0:
        raise AudioError(f"{len(samples)} samples at {rate} Hz are less than one at {wanted} Hz")
    return result


# ---- writing files


def write_wav(path: StrPath, samples: npt.ArrayLike, sample_rate: int) -> None:
    """Write mono 16-bit WAV (``SERVER_SCALE``). An existing file is replaced only by a whole one.

    Raises:
        AudioError: for samples that are not one channel of finite floats, or a file that cannot be written.
    """
    with about(path):
        pcm = float_to_pcm16(samples)
        if pcm.ndim != 1:
            raise AudioError(f"samples have shape {pcm.shape}; one channel [S] is needed")
        if pcm.nbytes > LARGEST_WAV_BYTES:
            raise AudioError(f"{pcm.nbytes} bytes of audio do not fit into a WAV file ({LARGEST_WAV_BYTES} at most)")
        target = target_of(path)
        if target.exists() and not target.is_file():  # a pipe or a device: nothing to replace
            target.write_bytes(wav_header(pcm.nbytes, sample_rate) + pcm.tobytes())
            return
        with _beside(target) as (temporary, file):
            file.write(wav_header(pcm.nbytes, sample_rate))
            file.write(pcm.tobytes())
            file.close()
            if target.exists():
                shutil.copymode(target, temporary)
            temporary.replace(target)


def check_writable(path: StrPath) -> None:
    """Find out before the work, not after it, that ``write_wav`` could not write. Leaves nothing behind.

    Raises:
        AudioError: naming the file and the reason.
    """
    with about(path):
        target = target_of(path)
        if not target.exists() or target.is_file():
            with _beside(target):
                pass


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in the target's directory, gone afterwards unless it was renamed."""
    temporary = target.parent / f".voicechat-{os.getpid()}-{os.urandom(4).hex()}.part"
    try:
        with temporary.open("xb") as file:
            yield temporary, file
    finally:
        temporary.unlink(missing_ok=True)
