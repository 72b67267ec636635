"""Audio in blocks: what is read is what ``read_audio`` reads, what is written is whole at any moment."""

import os
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import tracemalloc
import wave
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from tests.core.test_audio import BAD, GOOD, LIST, PCM, RATE, raising, tone_at, wav, written
from voicechat_core import audio_stream
from voicechat_core.audio import pcm16_to_float, read_audio
from voicechat_core.audio_stream import AudioReader, Resampler, WavWriter
from voicechat_core.errors import AudioError, InputError

NOISE = np.random.default_rng(0).integers(-9999, 9999, (50_000, 2)).astype(np.int16)


def blocks_of(path: Path | str, count: int, rate: int = RATE) -> list[np.ndarray]:
    with AudioReader(path, rate) as reader:
        return list(_blocks(reader, count))


def _blocks(reader: AudioReader, count: int) -> Iterator[np.ndarray]:
    while len(block := reader.read(count)):
        yield block


def until_it_breaks(path: Path, count: int, rate: int = RATE) -> tuple[np.ndarray, str]:
    """What is given before the error, and the error."""
    given: list[np.ndarray] = [np.zeros(0, np.float32)]
    with AudioReader(path, rate) as reader, pytest.raises(AudioError) as caught:
        given.extend(_blocks(reader, count))
    return np.concatenate(given), str(caught.value)


# ---- reading files


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_good_files(name: str, count: int, tmp_path: Path) -> None:
    path = written(tmp_path, GOOD[name][0])
    blocks = blocks_of(path, count)
    expected = read_audio(path, RATE)
    assert np.concatenate(blocks).tolist() == expected.tolist()
    assert {len(block) for block in blocks[:-1]} <= {count}
    assert len(blocks) == -(-len(expected) // count)
    assert blocks[0].dtype == np.float32


FORMS = [
    ("WAV", "PCM_16"), ("WAVEX", "PCM_24"), ("WAV", "ULAW"), ("WAV", "IMA_ADPCM"), ("RF64", "PCM_16"),
    ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16"), ("CAF", "PCM_16"),
]  # fmt: skip


@pytest.mark.parametrize(("container", "subtype"), FORMS)
@pytest.mark.parametrize("rate", [16000, 22050, 48000])
def test_blocks_are_what_is_read_at_once(container: str, subtype: str, rate: int, tmp_path: Path) -> None:
    path = tmp_path / "a.raw"  # known by content, not by name
    soundfile.write(path, NOISE[:20_000], rate, format=container, subtype=subtype)
    expected = read_audio(path, RATE)
    for count in (320, 999, 1 << 20):
        assert np.array_equal(np.concatenate(blocks_of(path, count)), expected)
    with AudioReader(path) as reader:
        assert reader.seconds == pytest.approx(20_000 / rate, abs=0.04)  # ADPCM fills its last block


@pytest.mark.parametrize("rate", [1000, 8000, 11025, 22050, 24000, 44056, 44100, 48000, 96000, 192000])
@pytest.mark.parametrize("count", [1280, 77_777])
def test_other_rates_are_the_same_to_the_bit(rate: int, count: int, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, NOISE[: rate // 4 + 13, 0], rate)
    blocks = blocks_of(path, count)
    assert np.array_equal(np.concatenate(blocks), read_audio(path, RATE))
    assert {len(block) for block in blocks[:-1]} <= {count}


def test_pcm16_passes_through(tmp_path: Path) -> None:
    every = np.arange(-32768, 32768).astype(np.int16)
    path = written(tmp_path, wav(every.tobytes()))
    with AudioReader(path) as reader:
        assert reader.seconds == 65536 / 16000
        first, rest, nothing = reader.read_pcm16(1000), reader.read_pcm16(1 << 20), reader.read_pcm16(1)
    assert first.dtype == np.int16
    assert np.array_equal(np.concatenate([first, rest]), every)
    assert (len(first), len(nothing)) == (1000, 0)


def test_what_is_decoded_at_once_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ogg"
    soundfile.write(path, NOISE, 44100, format="OGG", subtype="VORBIS")
    monkeypatch.setattr(audio_stream, "BLOCK_SAMPLES", 501)
    assert np.array_equal(np.concatenate(blocks_of(path, 1 << 20)), read_audio(path, RATE))


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, tmp_path: Path) -> None:
    content, _ = BAD[name]
    path = written(tmp_path, content)
    with pytest.raises(AudioError) as expected:
        read_audio(path, RATE)
    with pytest.raises(AudioError) as caught:
        blocks_of(path, 100)
    if name in OTHER_WORDS:  # a stream cannot know how many more there are
        assert str(caught.value) == f"{path}: {OTHER_WORDS[name]}"
    else:
        assert str(caught.value) == str(expected.value)


OTHER_WORDS = {
    "not a number": "sample 1 (at 0.000 s) is not finite: nan",
    "infinite": "sample 0 (at 0.000 s) is not finite: -inf",
    "integers as floats": "sample 1 (at 0.000 s) is 9000, but full scale is 1.0: scale integers first (int16 / 32768)",
}


@pytest.mark.parametrize("at_once", [1000, 1 << 16])
@pytest.mark.parametrize("count", [320, 30_000])
def test_a_truncated_flac_gives_all_that_is_there_first(
    count: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio_stream, "BLOCK_SAMPLES", at_once)
    path = tmp_path / "a.flac"
    soundfile.write(path, NOISE, RATE)
    whole = read_audio(path, RATE)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10])
    given, error = until_it_breaks(path, count)
    assert 28_000 < len(given) < 31_000  # its frames are 4096 samples: less than one is lost
    assert np.array_equal(given, whole[: len(given)])
    assert error.startswith(f"{path}: cannot be read as audio: ")


def ogg(path: Path, coding: str) -> tuple[bytes, list[int]]:
    """A file of some pages, and where each begins."""
    soundfile.write(path, NOISE, 16000, format="OGG", subtype=coding)
    data = path.read_bytes()
    return data, [found.start() for found in re.finditer(b"OggS", data)]


@pytest.mark.parametrize("coding", ["VORBIS", "OPUS"])
def test_a_damaged_ogg_is_refused_at_once(coding: str, tmp_path: Path) -> None:
    """One bit of any page, its head too; a hole that hides where pages begin; a cut. Named by the page's place."""
    path = tmp_path / "a.ogg"
    data, pages = ogg(path, coding)
    assert len(pages) >= 4
    blocks_of(path, 1000)
    damages = [(page, page + offset, bytes([data[page + offset] ^ 1])) for page in pages for offset in (5, 22, 40)]
    damages += [(pages[2], pages[2], bytes(100)), (pages[-1], len(data) - 1, b"")]
    for page, at, instead in damages:
        path.write_bytes(data[:at] + instead + data[at + max(len(instead), 1) :])
        for read in (partial(blocks_of, path, 1000), partial(read_audio, path, RATE)):
            with pytest.raises(AudioError, match=rf"a.ogg: damaged or cut short: .* Ogg page at byte {page}\b"):
                read()


@pytest.mark.parametrize("coding", ["VORBIS", "OPUS"])
def test_what_is_behind_an_ogg_does_not_matter(coding: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ogg"
    data, _ = ogg(path, coding)
    whole = read_audio(path, RATE)
    path.write_bytes(data + bytes(100))
    assert np.array_equal(read_audio(path, RATE), whole)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 17.0])
@pytest.mark.parametrize("rate", [16000, 48000])
@pytest.mark.parametrize("at_once", [1000, 1 << 16])
def test_what_comes_before_a_sample_that_cannot_be_is_given(
    at_once: int, value: float, rate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio_stream, "BLOCK_SAMPLES", at_once)
    samples = tone_at(440, rate, 40_000)
    samples[30_001] = value
    path = tmp_path / "a.wav"
    soundfile.write(path, samples, rate, subtype="FLOAT")
    given, error = until_it_breaks(path, 320)
    before = samples[:30_001]
    assert np.array_equal(given, before if rate == RATE else soxr.resample(before, rate, RATE))
    assert error.startswith(f"{path}: sample 30001 (at {30_001 / rate:.3f} s) is ")


def test_an_error_stays(tmp_path: Path) -> None:
    path = written(tmp_path, BAD["not a number"][0])
    with AudioReader(path) as reader:
        assert reader.read(5).tolist() == [0.0]
        for _ in range(2):
            with pytest.raises(AudioError, match=r"sample 1 .* is not finite: nan"):
                reader.read(5)


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    path = written(tmp_path, wav(PCM.tobytes()))
    with AudioReader(path) as reader, pytest.raises(InputError, match="0 samples cannot be read"):
        reader.read(0)
    with pytest.raises(AudioError, match="a sample rate of 999 Hz cannot be; the lowest is 1000"):
        AudioReader(path, 999)
    with pytest.raises(AudioError, match=r"nothing\.wav: No such file or directory"):
        AudioReader(tmp_path / "nothing.wav")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
def test_no_file_stays_open(tmp_path: Path) -> None:
    good, bad = written(tmp_path, wav(PCM.tobytes())), written(tmp_path, wav(PCM.tobytes(), rate=500), "bad.wav")
    before = len(list(Path("/proc/self/fd").iterdir()))
    reader = AudioReader(good)
    reader.close()
    reader.close()
    with pytest.raises(AudioError, match="500 Hz"):
        AudioReader(bad)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [None, 0xFFFFFFFF])
def test_an_hour_does_not_sit_in_memory(size: int | None, tmp_path: Path) -> None:
    path, data = tmp_path / "a.wav", 3600 * 48000 * 4
    header = wav(b"", channels=2, rate=48000, riff=size or 36 + data, size=size or data)
    path.write_bytes(header)
    os.truncate(path, len(header) + data)  # 691 MB of silence, on a disk that keeps no zeros
    AudioReader(path).close()  # imports
    with memory_below(2_000_000), AudioReader(path) as reader:
        assert reader.seconds == 3600
        for _ in range(300):
            assert len(reader.read(1280)) == 1280
        assert len(reader.read(160_000)) == 160_000


@pytest.mark.parametrize("riff", [0, 0xFFFFFFFF])
def test_a_piped_header_before_more_than_4_gib(riff: int, tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(wav(PCM.tobytes(), riff=riff, size=riff))
    os.truncate(path, 44 + 5 * 2**30)
    with AudioReader(path) as reader:
        assert reader.seconds == 5 * 2**30 / 2 / RATE
        assert reader.read_pcm16(8).tolist() == PCM.tolist()


# ---- reading pipes


@contextmanager
def piped(tmp_path: Path, *pieces: bytes) -> Iterator[tuple[Path, threading.Semaphore]]:
    """A pipe that gives the first piece, and each other one when the semaphore is released."""
    path, more = tmp_path / "pipe", threading.Semaphore(0)
    late: list[int] = []
    os.mkfifo(path)

    def feed() -> None:
        with suppress(BrokenPipeError), path.open("wb", buffering=0) as file:
            file.write(pieces[0])
            for piece in pieces[1:]:
                if not more.acquire(timeout=5):
                    late.append(len(piece))
                file.write(piece)

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        yield path, more
    finally:
        more.release(len(pieces))
        feeder.join()
    assert late == []  # else somebody waited for what was not there


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("count", [3, 1000])
def test_a_pipe_gives_what_the_file_gives(name: str, count: int, tmp_path: Path) -> None:
    content = GOOD[name][0]
    expected = read_audio(written(tmp_path, content), RATE)
    with piped(tmp_path, content) as (path, _):
        assert np.concatenate(blocks_of(path, count)).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("riff", "size"), [(0, 0), (36, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0), (0x7FFFF024, 0x7FFFF000)]
)
@pytest.mark.parametrize("before", [b"", LIST])
def test_a_piped_header_is_read_to_the_end(riff: int, size: int, before: bytes, tmp_path: Path) -> None:
    content = wav(NOISE.tobytes() + b"x", channels=2, rate=22050, before=before, riff=riff, size=size)
    file = written(tmp_path, content)
    assert np.array_equal(np.concatenate(blocks_of(file, 320)), read_audio(file, RATE))
    with piped(tmp_path, content) as (path, _), AudioReader(path) as reader:
        assert reader.seconds is None
        assert np.array_equal(np.concatenate(list(_blocks(reader, 320))), read_audio(file, RATE))


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "FLOAT", "DOUBLE", "ALAW", "ULAW"])
@pytest.mark.parametrize("container", ["WAV", "WAVEX"])
def test_plain_codings_are_not_copied_first(container: str, subtype: str, tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    soundfile.write(file, pcm16_to_float(NOISE[:1000]), RATE, format=container, subtype=subtype)
    content = bytearray(file.read_bytes())
    at = content.index(b"data")
    content[at + 4 : at + 8] = b"\xff" * 4
    with piped(tmp_path, bytes(content)) as (path, _), AudioReader(path) as reader:
        assert reader.seconds is None
        samples = np.concatenate(list(_blocks(reader, 77)))
    assert np.array_equal(samples[:1000], read_audio(file, RATE))


def test_a_pipe_is_given_as_it_comes(tmp_path: Path) -> None:
    content = wav(NOISE[:, 0].tobytes(), riff=0, size=0)
    half = 44 + 2 * 20_000
    with piped(tmp_path, content[:half], content[half:]) as (path, more), AudioReader(path) as reader:
        first = [reader.read_pcm16(320) for _ in range(20_000 // 320)]  # the other half is not there yet
        more.release()
        rest = reader.read_pcm16(1 << 20)
    assert np.array_equal(np.concatenate([*first, rest]), NOISE[:, 0])


def test_a_pipe_at_another_rate_lags_by_the_resampler_only(tmp_path: Path) -> None:
    content = wav(NOISE[:, 0].tobytes(), rate=48000, riff=0, size=0)
    half = 44 + 2 * 24_000
    with piped(tmp_path, content[:half], content[half:]) as (path, _), AudioReader(path) as reader:
        assert sum(len(reader.read(320)) for _ in range(23)) == 7360  # of 8000; 40 ms are held back


@pytest.mark.parametrize("container", ["FLAC", "AIFF", "WAV"])
def test_what_a_pipe_cannot_give_as_it_comes_is_copied(container: str, tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    subtype = "IMA_ADPCM" if container == "WAV" else "PCM_16"
    soundfile.write(file, NOISE, 22050, format=container, subtype=subtype)
    with piped(tmp_path, file.read_bytes()) as (path, _), AudioReader(path) as reader:
        assert reader.seconds == pytest.approx(50_000 / 22050, abs=0.1)
        assert np.array_equal(np.concatenate(list(_blocks(reader, 320))), read_audio(file, RATE))


@pytest.mark.parametrize("name", BAD)
def test_bad_pipes(name: str, tmp_path: Path) -> None:
    content, _ = BAD[name]
    with pytest.raises(AudioError) as expected:
        blocks_of(written(tmp_path, content), 100)
    with piped(tmp_path, content) as (path, _), pytest.raises(AudioError) as caught:
        blocks_of(path, 100)
    assert str(caught.value) == str(expected.value).replace("a.wav", "pipe")


def test_a_pipe_with_a_length_says_it(tmp_path: Path) -> None:
    with piped(tmp_path, wav(NOISE.tobytes(), channels=2)) as (path, _), AudioReader(path) as reader:
        assert reader.seconds == 50_000 / RATE
        assert len(reader.read(60_000)) == 50_000


def test_a_pipe_cut_short_gives_what_came(tmp_path: Path) -> None:
    content = wav(NOISE[:, 0].tobytes())[: 44 + 2 * 30_000 + 1]
    with piped(tmp_path, content) as (path, _):
        given, error = until_it_breaks(path, 320)
    assert np.array_equal(given, pcm16_to_float(NOISE[:30_000, 0].copy()))
    assert error == f"{path}: truncated: its header says 100000 bytes of audio, 60001 are there"


def test_a_wrong_header_in_a_pipe_takes_no_memory(tmp_path: Path) -> None:
    content = wav(PCM.tobytes(), before=b"junk" + struct.pack("<I", 0xFFFFFF00))
    with memory_below(3_000_000), piped(tmp_path, content) as (path, _), pytest.raises(AudioError, match="pipe: "):
        blocks_of(path, 100)


def test_standard_input_is_a_dash() -> None:
    code = (
        "from voicechat_core.audio_stream import AudioReader\n"
        "from pathlib import Path\n"
        "with AudioReader(Path('-')) as reader: print(reader.name, reader.read_pcm16(100).tolist())"
    )
    for content, said in ((wav(PCM.tobytes(), riff=0, size=0), f"stdin {PCM.tolist()}"), (b"", "stdin: the file is")):
        result = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, check=False)
        assert said in (result.stdout + result.stderr).decode()


# ---- resampling


def test_a_resampler_in_pieces_is_soxr_at_once() -> None:
    samples = pcm16_to_float(NOISE[:, 0].copy())
    resampler = Resampler(16000, 22050)
    pieces = [resampler.push(samples[at : at + 1280]) for at in range(0, len(samples), 1280)]
    pieces += [resampler.push(samples[:0]), resampler.finish()]
    assert np.array_equal(np.concatenate(pieces), soxr.resample(samples, 16000, 22050, quality="HQ"))
    assert len(pieces[-1]) < 22050 * 0.06  # held back


def test_equal_rates_pass_through() -> None:
    samples = pcm16_to_float(PCM)
    resampler = Resampler(16000, 16000)
    assert resampler.push(samples) is samples
    assert resampler.finish().tolist() == []


# ---- writing


def content_of(path: Path) -> tuple[int, np.ndarray]:
    """As three readers see it: ours, libsndfile's and Python's own."""
    with wave.open(str(path)) as file:
        frames = np.frombuffer(file.readframes(1 << 30), "<i2").reshape(-1, file.getnchannels())
        rate = file.getframerate()
    other, other_rate = soundfile.read(path, dtype="int16", always_2d=True)
    assert (rate, frames.tolist()) == (other_rate, other.tolist())
    if len(frames):
        assert len(read_audio(path, rate)) == len(frames)
    return rate, frames


def test_a_file_is_whole_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    with WavWriter(path, 22050) as writer:
        assert path.read_bytes() == wav(b"", rate=22050)
        for piece, frames in (
            (PCM[:3], 3),
            (PCM[:0], 3),
            (PCM[3:].astype(">i2"), 8),
            (np.array([[7], [8]], np.int16), 10),
        ):
            writer.write(piece)
            rate, content = content_of(path)
            assert (writer.frames, len(content), rate) == (frames, frames, 22050)
    assert writer.closed
    assert path.read_bytes() == wav(PCM.tobytes() + struct.pack("<2h", 7, 8), rate=22050)


def test_stereo(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    with WavWriter(path, 22050, channels=2) as writer:
        writer.write(NOISE[:7])
        writer.write(NOISE[7:1000])
        assert writer.frames == 1000
    assert path.read_bytes() == wav(NOISE[:1000].tobytes(), rate=22050, channels=2)


@pytest.mark.parametrize(
    ("channels", "samples", "message"),
    [
        (1, np.zeros(3, np.float32), "samples are float32; int16 is needed"),
        (1, np.zeros((3, 2), np.int16), r"samples have shape \(3, 2\); the file has 1 channels"),
        (2, np.zeros(4, np.int16), r"samples have shape \(4,\); the file has 2 channels"),
        (2, np.zeros((2, 1), np.int16), r"shape \(2, 1\)"),
        (1, np.zeros((), np.int16), r"shape \(\)"),
    ],
)
def test_samples_that_do_not_fit_change_nothing(
    channels: int, samples: np.ndarray, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.wav"
    with WavWriter(path, 22050, channels) as writer:
        with pytest.raises(AudioError, match=message) as caught:
            writer.write(samples)
        assert str(caught.value).startswith(f"{path}: ")
        writer.write(NOISE[:4, :channels])
    assert len(content_of(path)[1]) == 4


def test_an_exception_leaves_what_had_come(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    writer = WavWriter(path, 22050)

    def talk() -> None:
        with writer:
            writer.write(PCM)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        talk()
    assert path.read_bytes() == wav(PCM.tobytes(), rate=22050)
    assert writer.closed
    writer.close()
    with pytest.raises(AudioError, match=r"out\.wav: is closed; nothing can be added"):
        writer.write(PCM)


def test_an_existing_file_is_emptied_and_keeps_its_rights_and_links(tmp_path: Path) -> None:
    path, link = written(tmp_path, b"x" * 1000), tmp_path / "link.wav"
    path.chmod(0o640)
    link.symlink_to(path)
    with WavWriter(link, 22050) as writer:
        writer.write(PCM)
    assert link.is_symlink()
    assert path.read_bytes() == wav(PCM.tobytes(), rate=22050)
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    code = (
        "import sys, numpy as np\nfrom voicechat_core.audio_stream import WavWriter\n"
        "writer = WavWriter(sys.argv[1], 22050)\n"
        "while True:\n writer.write(np.full(1764, 5, np.int16)); print(writer.frames, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = [int(process.stdout.readline()) for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    told += [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()
    process.stdout.close()
    frames = content_of(path)[1]
    assert len(frames) - told[-1] in (0, 1764)  # all that was written, and perhaps what was not told
    assert np.all(frames == 5)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel takes a part of a write and refuses the next, as where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("room", [4000, 4001, 4002, 4003])
def test_a_full_disk_is_one_error_and_a_whole_file(room: int, tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    with files_of_at_most(44 + room), WavWriter(path, 22050, channels=2) as writer:
        writer.write(NOISE[:600])
        with pytest.raises(AudioError) as caught:
            writer.write(NOISE[600:1200])
        assert writer.closed
        with pytest.raises(AudioError, match="is closed"):
            writer.write(NOISE[:1])
    assert str(caught.value) == f"{path}: File too large"
    assert path.read_bytes() == wav(NOISE[:1000].tobytes(), rate=22050, channels=2)
    assert writer.frames == 1000


def test_a_disk_without_room_for_a_header(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    with files_of_at_most(20), pytest.raises(AudioError, match=r"out\.wav: no space for a header"):
        WavWriter(path, 22050)
    with files_of_at_most(0), pytest.raises(AudioError, match=r"out\.wav: File too large"):
        WavWriter(path, 22050)


@pytest.mark.parametrize("error", [None, KeyError("the block's")])
def test_the_first_error_is_the_one_told(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.wav"
    writer = WavWriter(path, 22050)
    monkeypatch.setattr(os, "pwrite", raising(OSError(5, "Input/output error")))

    def talk() -> None:
        with writer:
            if error is not None:
                raise error

    with pytest.raises((KeyError, AudioError)) as caught:
        talk()
    assert str(caught.value) == ('"the block\'s"' if error else f"{path}: Input/output error")
    assert writer.closed


def test_a_file_as_long_as_wav_can_be_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_stream, "LARGEST_WAV_BYTES", 20)
    path = tmp_path / "out.wav"
    with WavWriter(path, 22050) as writer:
        writer.write(PCM)
        writer.write(PCM[:2])
        with pytest.raises(AudioError, match=r"out\.wav: is full: a WAV file has at most 20 bytes of audio"):
            writer.write(PCM[:1])
        assert writer.closed
    assert path.read_bytes() == wav(PCM.tobytes() + PCM[:2].tobytes(), rate=22050)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match=rf"out\.wav: there is no directory {tmp_path}/none"):
        WavWriter(tmp_path / "none" / "out.wav", 22050)
    with pytest.raises(AudioError, match="is a directory"):
        WavWriter(tmp_path, 22050)
    if Path("/dev/full").exists():
        with pytest.raises(AudioError, match="/dev/full: No space left on device"):
            WavWriter("/dev/full", 22050)


def test_into_a_pipe_goes_a_header_without_sizes(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()))
    reader.start()
    with WavWriter(path, 22050) as writer:
        writer.write(PCM)
        assert writer.frames == 8
    reader.join()
    assert received == [wav(PCM.tobytes(), rate=22050, riff=0xFFFFFFFF, size=0xFFFFFFFF)]
    assert read_audio(written(tmp_path, received[0]), 22050).tolist() == pcm16_to_float(PCM).tolist()


def test_a_growing_file_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    with WavWriter(path, RATE) as writer:
        writer.write(PCM)
        with AudioReader(path) as reader:
            writer.write(PCM)
            assert reader.seconds == 8 / RATE
            assert reader.read_pcm16(100).tolist() == PCM.tolist()


def test_importing_is_light() -> None:
    code = "import sys, voicechat_core.audio_stream; print(*{'mlx', 'soundfile', 'soxr'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
