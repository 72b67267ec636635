"""Audio files in and out, and PCM16: values, and every way a file can be wrong."""

import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from voicechat_core import audio
from voicechat_core.audio import (
    SERVER_SCALE,
    WIRE_SCALE,
    check_samples,
    check_writable,
    float_to_pcm16,
    pcm16_to_float,
    read_audio,
    write_wav,
)
from voicechat_core.errors import AudioError

RATE = 16000
PCM = np.array([0, 1, -1, 100, -32768, 32767, 12345, -12345], np.int16)


def chunk(name: bytes, payload: bytes, size: int | None = None) -> bytes:
    declared = len(payload) if size is None else size
    return name + struct.pack("<I", declared) + payload + b"\0" * (len(payload) % 2)


def wav(
    data: bytes, *, tag: int = 1, bits: int = 16, channels: int = 1, rate: int = RATE,
    riff: int | None = None, size: int | None = None, before: bytes = b"", after: bytes = b"",
) -> bytes:  # fmt: skip
    align = channels * bits // 8
    form = chunk(b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, rate * align, align, bits))
    body = b"WAVE" + form + before + chunk(b"data", data, size) + after
    return b"RIFF" + struct.pack("<I", len(body) if riff is None else riff) + body


def written(tmp_path: Path, content: bytes, name: str = "a.wav") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


# ---- PCM16


@given(hnp.arrays(np.int16, st.integers(0, 300)))
def test_pcm16_survives_the_wire_unchanged(pcm: np.ndarray) -> None:
    floats = pcm16_to_float(pcm.tobytes())
    assert floats.dtype == np.float32
    assert np.array_equal(floats.astype(np.float64) * 32768, pcm)
    assert np.array_equal(float_to_pcm16(floats, WIRE_SCALE), pcm)


@given(hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-3, 3, width=32)))
def test_both_scales_are_clip_multiply_round(samples: np.ndarray) -> None:
    for scale in (WIRE_SCALE, SERVER_SCALE):
        expected = np.minimum(np.clip(samples.astype(np.float64), -1, 1) * scale, 32767)
        # Half a step of rounding, and the float32 product's own 2^-9.
        assert np.abs(float_to_pcm16(samples, scale) - expected).max() <= 0.5 + 2**-9


def test_known_pcm16_values() -> None:
    samples = np.array([-2, -1, -0.5, 0, 0.5, 1, 2], np.float32)
    assert float_to_pcm16(samples).tolist() == [-32767, -32767, -16384, 0, 16384, 32767, 32767]
    assert float_to_pcm16(samples, WIRE_SCALE).tolist() == [-32768, -32768, -16384, 0, 16384, 32767, 32767]
    assert pcm16_to_float(b"\x00\x80\xff\x7f\x01\x00").tolist() == [-1.0, 32767 / 32768, 1 / 32768]
    assert float_to_pcm16(np.array([1e300, -1e300])).tolist() == [32767, -32767]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pcm16_to_float(b"123"), "3 bytes are not a whole number of 16-bit samples"),
        (lambda: pcm16_to_float(np.zeros(2, np.int32)), "PCM16 samples are int16, not int32"),
        (lambda: float_to_pcm16(np.zeros(2, np.int16)), "samples are int16; floating point is needed"),
        (lambda: float_to_pcm16([0.0, np.nan]), "1 of 2 samples are not finite; the first is sample 1: nan"),
        (lambda: float_to_pcm16([0.0, 1.0, -np.inf, np.inf]), "2 of 4 samples .* sample 2: -inf"),
    ],
)
def test_what_is_not_pcm16(call, message: str) -> None:
    with pytest.raises(AudioError, match=message):
        call()


# ---- arrays


@pytest.mark.parametrize(
    ("given_samples", "expected"),
    [
        (np.array([0.5, -0.25], np.float32), [0.5, -0.25]),
        (np.array([0.5, -0.25], np.float64), [0.5, -0.25]),
        (np.array([0.5, -0.25], np.float16), [0.5, -0.25]),
        ([0.5, -0.25], [0.5, -0.25]),
        (np.array([16384, -32768], np.int16), [0.5, -1.0]),
        (np.array([1.5, -16.0], np.float32), [1.5, -16.0]),  # loud, not wrong
        (np.array([0.5, 9.0, -0.25, 9.0], np.float32)[::2], [0.5, -0.25]),
        (np.zeros(0, np.float32), []),
    ],
)
def test_accepted_samples(given_samples, expected: list[float]) -> None:
    result = check_samples(given_samples)
    assert result.dtype == np.float32
    assert result.flags.c_contiguous
    assert result.tolist() == expected


@pytest.mark.parametrize(
    ("given_samples", "message"),
    [
        (np.zeros((2, 3), np.float32), r"shape \(2, 3\); one channel \[S\] is needed: mix down"),
        (np.zeros((3, 1), np.float32), r"shape \(3, 1\)"),
        (np.float32(0.5), r"shape \(\)"),
        (np.zeros(3, np.int32), r"samples are int32; float32 \(full scale 1.0\) or int16 is needed"),
        (np.zeros(3, np.uint8), "samples are uint8"),
        (np.zeros(3, bool), "samples are bool"),
        (np.zeros(3, complex), "samples are complex128"),
        (["a"], "samples are <U1"),
        ([0.0, np.nan, 0.0], "1 of 3 samples are not finite; the first is sample 1: nan"),
        ([np.inf], "1 of 1 samples are not finite; the first is sample 0: inf"),
        ([0.0, -12345.0], "the loudest sample is 12345, but full scale is 1.0"),
        ([1e300], r"the loudest sample is 1e\+300"),
    ],
)
def test_refused_samples(given_samples, message: str) -> None:
    with pytest.raises(AudioError, match=message):
        check_samples(given_samples)


# ---- reading


FLOATS = np.array([0.0, 0.5, -0.25, 1.5, -1.0], np.float32)
LIST = chunk(b"LIST", b"INFOISFTx\0\0\0\0")
GOOD = {
    "pcm16": (wav(PCM.tobytes()), PCM / 32768),
    "pcm16 with chunks around": (wav(PCM.tobytes(), before=LIST, after=LIST), PCM / 32768),
    "odd chunk before": (wav(PCM.tobytes(), before=chunk(b"junk", b"abc")), PCM / 32768),
    "half a sample at the end": (wav(PCM.tobytes() + b"x"), PCM / 32768),
    "8-bit": (wav(bytes([128, 0, 255, 192]), bits=8), [0, -1, 127 / 128, 0.5]),
    "odd 8-bit": (wav(bytes([128, 0, 255]), bits=8, after=LIST), [0, -1, 127 / 128]),
    "24-bit": (wav(b"\x00\x00\x80\xff\xff\x7f\x01\x00\x00", bits=24), [-1, 1 - 2**-23, 2**-23]),
    "32-bit": (wav(struct.pack("<2i", -(2**31), 2**30), bits=32), [-1, 0.5]),
    "float32": (wav(FLOATS.tobytes(), tag=3, bits=32), FLOATS),
    "float64": (wav(FLOATS.astype("<f8").tobytes(), tag=3, bits=64), FLOATS),
    "A-law": (wav(b"\xd5\x55", tag=6, bits=8), [8 / 32768, -8 / 32768]),
    "stereo": (wav(struct.pack("<4h", 16384, 0, -32768, -16384), channels=2), [0.25, -0.75]),
    "three channels": (wav(struct.pack("<3h", 3, 6, 12), channels=3), [7 / 32768]),
    "the end of RIFF forgotten": (wav(PCM.tobytes(), riff=0xFFFFFFFF), PCM / 32768),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_files(name: str, tmp_path: Path) -> None:
    content, expected = GOOD[name]
    samples = read_audio(written(tmp_path, content), RATE)
    assert samples.dtype == np.float32
    assert samples.tolist() == np.asarray(expected, np.float32).tolist()


@pytest.mark.parametrize(
    ("riff", "size"),
    [
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0, 0),
        (36, 0),
        (0x7FFFF024, 0x7FFFF000),
        (0x7FFFFF24, 0x7FFFFF00),
        (0x80000024, 0x80000000),
    ],
)
@pytest.mark.parametrize("before", [b"", LIST])
def test_a_wav_from_a_pipe_is_read_to_its_end(riff: int, size: int, before: bytes, tmp_path: Path) -> None:
    content = wav(PCM.tobytes(), riff=riff, size=size, before=before)
    assert np.array_equal(read_audio(written(tmp_path, content), RATE), pcm16_to_float(PCM))


def test_a_pipe_itself_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "fifo.wav"
    os.mkfifo(path)
    writer = subprocess.Popen(
        [sys.executable, "-c", "import sys; open(sys.argv[1], 'wb').write(bytes.fromhex(sys.argv[2]))", path,
         wav(PCM.tobytes(), riff=0, size=0).hex()]
    )  # fmt: skip
    samples = read_audio(path, RATE)
    assert writer.wait() == 0
    assert np.array_equal(samples, pcm16_to_float(PCM))


@pytest.mark.parametrize("container", ["FLAC", "AIFF", "AU", "W64", "RF64", "CAF"])
def test_other_lossless_containers(container: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"  # known by content, not by name
    soundfile.write(path, PCM, RATE, format=container, subtype="PCM_16")
    assert np.array_equal(read_audio(path, RATE), pcm16_to_float(PCM))


@pytest.mark.parametrize(("container", "subtype"), [("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")])
def test_lossy_containers(container: str, subtype: str, tmp_path: Path) -> None:
    tone = tone_at(440, RATE, RATE)
    path = tmp_path / "a.bin"
    soundfile.write(path, tone, RATE, format=container, subtype=subtype)
    samples = read_audio(path, RATE)
    assert len(samples) == RATE
    assert np.abs(samples - tone)[1000:-1000].max() < 0.05  # the coders' own loss


def test_a_flac_from_a_pipe_does_not_know_its_length(tmp_path: Path) -> None:
    path = tmp_path / "a.flac"
    soundfile.write(path, PCM, RATE, format="FLAC", subtype="PCM_16")
    content = bytearray(path.read_bytes())
    content[21] &= 0xF0  # the 36 bits of total samples
    content[22:26] = bytes(4)
    path.write_bytes(content)
    with pytest.raises(AudioError, match=r"a\.flac: its FLAC header does not say how long it is"):
        read_audio(path, RATE)


def test_blocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stereo = np.random.default_rng(0).integers(-9999, 9999, (1000, 2)).astype(np.int16)
    path = tmp_path / "a.wav"
    soundfile.write(path, stereo, RATE)
    whole = read_audio(path, RATE)
    monkeypatch.setattr(audio, "BLOCK_SAMPLES", 77)
    assert np.array_equal(read_audio(path, RATE), whole)
    assert np.array_equal(whole, (stereo.astype(np.float32) / 32768).mean(axis=1))


def tone_at(hertz: float, rate: int, count: int) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(count) / rate)).astype(np.float32)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 24000, 44100, 48000, 96000])
def test_other_rates_are_converted_in_step(rate: int, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, tone_at(1000, rate, rate), rate, subtype="FLOAT")
    samples = read_audio(path, RATE)
    assert len(samples) == RATE
    # Away from the ends it is the same tone at the same times; one sample late would be 0.2.
    assert np.abs(samples - tone_at(1000, RATE, RATE))[500:-500].max() < 1e-4


BAD = {
    "empty": (b"", r"the file is empty \(0 bytes\)"),
    "text": (b"It is a truth universally acknowledged, that", "cannot be read as audio: Format not recognised"),
    "half a header": (wav(PCM.tobytes())[:30], "cannot be read as audio"),
    "no samples": (wav(b""), "holds no samples"),
    "no samples but a tail": (wav(b"", after=LIST), "holds no samples"),
    "no samples from a pipe": (wav(b"", riff=0, size=0), "holds no samples"),
    "cut short": (wav(PCM.tobytes())[:-5], "truncated: its header says 16 bytes of audio, 11 are there"),
    "cut short after a tail": (wav(PCM.tobytes(), before=LIST)[:-1], "header says 16 bytes of audio, 15 are there"),
    "only the header": (wav(PCM.tobytes())[:44], "truncated: its header says 16 bytes of audio, 0 are there"),
    "not a number": (wav(struct.pack("<3f", 0, np.nan, 0), tag=3, bits=32), "1 of 3 samples are not finite; .* 1: nan"),
    "infinite": (wav(struct.pack("<2f", -np.inf, 0), tag=3, bits=32), "the first is sample 0: -inf"),
    "integers as floats": (wav(struct.pack("<2f", 0, 9000), tag=3, bits=32), "the loudest sample is 9000"),
    "unknown coding": (wav(PCM.tobytes(), tag=0x9999), "cannot be read as audio"),
    "too short": (wav(b"\1\0", rate=96000), "1 samples at 96000 Hz are less than one at 16000 Hz"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    path = written(tmp_path, content)
    with pytest.raises(AudioError, match=message) as caught:
        read_audio(path, RATE)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("container", ["FLAC", "AIFF", "AU", "RF64", "OGG"])
def test_other_containers_cut_short(container: str, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    noise = np.random.default_rng(0).integers(-9999, 9999, RATE).astype(np.int16)
    soundfile.write(path, noise, RATE, format=container)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(
        AudioError, match=r"truncated: its header says|cut short: the Ogg page|cannot be read as audio: \S+|no samples"
    ):
        read_audio(path, RATE)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match=r"nothing\.wav: No such file or directory"):
        read_audio(tmp_path / "nothing.wav", RATE)
    with pytest.raises(AudioError, match=f"{tmp_path}: Is a directory"):
        read_audio(str(tmp_path), RATE)
    with pytest.raises(AudioError, match="a sample rate of 0 Hz cannot be"):
        read_audio(tmp_path, 0)
    with pytest.raises(AudioError, match=r"^/dev/zero: is a device; a file or a pipe is needed$"):
        read_audio("/dev/zero", RATE)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, wav(PCM.tobytes()))
    monkeypatch.setattr(Path, "open", raising(PermissionError(13, "Permission denied")))
    with pytest.raises(AudioError, match=r"a\.wav: Permission denied"):
        read_audio(path, RATE)


def raising(error: Exception):
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def test_importing_is_light() -> None:
    code = "import sys, voicechat_core.audio; print(*{'mlx', 'mlx.core', 'soundfile', 'soxr'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


# ---- writing


def test_written_files_are_plain_wav(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    write_wav(path, np.array([0.0, 0.5, -1.0, 2.0], np.float32), 22050)
    pcm = struct.pack("<4h", 0, 16384, -32767, 32767)
    assert path.read_bytes() == wav(pcm, rate=22050)
    assert soundfile.info(path).subtype == "PCM_16"
    assert sorted(tmp_path.iterdir()) == [path]


def test_writing_nothing_is_a_whole_file(tmp_path: Path) -> None:
    write_wav(tmp_path / "out.wav", np.zeros(0, np.float32), 22050)
    assert (tmp_path / "out.wav").read_bytes() == wav(b"", rate=22050)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros((2, 2), np.float32), r"shape \(2, 2\)"),
        (np.array([0.0, np.nan]), "not finite"),
        (np.zeros(2, np.int16), "samples are int16"),
    ],
)
def test_what_cannot_be_written_leaves_the_old_file(samples: np.ndarray, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, b"old")
    with pytest.raises(AudioError, match=message) as caught:
        write_wav(path, samples, 22050)
    assert str(caught.value).startswith(f"{path}: ")
    assert path.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_file_too_long_for_wav_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "LARGEST_WAV_BYTES", 6)
    write_wav(tmp_path / "fits.wav", np.zeros(3, np.float32), 22050)
    with pytest.raises(AudioError, match=r"8 bytes of audio do not fit into a WAV file \(6 at most\)"):
        write_wav(tmp_path / "not.wav", np.zeros(4, np.float32), 22050)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, b"old")
    monkeypatch.setattr(Path, "replace", raising(OSError(28, "No space left on device")))
    with pytest.raises(AudioError, match="No space left on device"):
        write_wav(path, np.zeros(4, np.float32), 22050)
    assert path.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [path]


def test_links_and_modes_are_kept(tmp_path: Path) -> None:
    path, link = written(tmp_path, b"old"), tmp_path / "link.wav"
    path.chmod(0o640)
    link.symlink_to(path)
    write_wav(link, np.zeros(1, np.float32), 22050)
    assert link.is_symlink()
    assert path.read_bytes() == wav(b"\0\0", rate=22050)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device files")
def test_devices_are_written_not_replaced() -> None:
    check_writable("/dev/null")
    write_wav("/dev/null", np.zeros(1, np.float32), 22050)
    assert Path("/dev/null").is_char_device()
    with pytest.raises(AudioError, match="/dev/full: No space left on device"):
        write_wav("/dev/full", np.zeros(1, np.float32), 22050)


def test_check_writable_leaves_no_trace(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.wav")
    assert list(tmp_path.iterdir()) == []
    old = written(tmp_path, b"old")
    check_writable(old)
    assert old.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [old]


@pytest.mark.parametrize("function", [check_writable, lambda path: write_wav(path, np.zeros(1, np.float32), 22050)])
def test_what_is_not_writable(function, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AudioError, match=rf"out\.wav: there is no directory {tmp_path}/none"):
        function(tmp_path / "none" / "out.wav")
    with pytest.raises(AudioError, match="is a directory"):
        function(tmp_path)
    file = written(tmp_path, b"old")
    with pytest.raises(AudioError, match=r"there is no directory|Not a directory"):
        function(file / "out.wav")
    with pytest.raises(AudioError, match="File name too long"):
        function(tmp_path / ("x" * 300))
    monkeypatch.setattr(Path, "open", raising(OSError(30, "Read-only file system")))
    with pytest.raises(AudioError, match=r"new\.wav: Read-only file system"):
        function(tmp_path / "new.wav")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(AudioError, match=r"a\.wav: is write-protected"):
        function(file)
    monkeypatch.undo()
    assert file.read_bytes() == b"old"


def test_a_rate_too_low_to_be_sound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slow.wav"
    soundfile.write(path, np.zeros(100, np.float32), 999)
    with pytest.raises(AudioError, match="its sample rate is 999 Hz; the lowest is 1000") as caught:
        read_audio(path, 16000)
    assert str(path) in str(caught.value)


def test_opposite_infinities_are_refused_without_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "inf.wav"
    soundfile.write(path, np.array([[0, 0], [np.inf, -np.inf]], np.float32), 16000, subtype="FLOAT")
    with pytest.raises(AudioError, match="1 of 2 samples are not finite"):
        read_audio(path, 16000)
