"""Headers that nobody has seen: any order of chunks that a WAV may have, and any damage, by file and by pipe.

A good one gives its samples; a damaged one its samples or one error that names the file.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from voicechat_core import audio_stream
from voicechat_core.audio import read_audio
from voicechat_core.audio_stream import AudioReader
from voicechat_core.errors import AudioError

# The same examples each time; with thousands of drawn ones nothing else was found (2026-11-30).
light = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
GUID = bytes.fromhex("000000001000800000aa00389b71")
RATE = 16000


def chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)


@dataclass(frozen=True)
class Good:
    """A WAV and its samples, mixed down."""

    content: bytes
    samples: np.ndarray


# What is written in each width for samples of 16 bits, and 8-bit ones lose their lower half.
CODINGS: dict[tuple[int, int], Any] = {
    (PCM, 8): lambda pcm: ((pcm >> 8) + 128).astype("u1"),
    (PCM, 16): lambda pcm: pcm.astype("<i2"),
    (PCM, 24): lambda pcm: (pcm.astype("<i4") << 8).view("u1").reshape(*pcm.shape, 4)[..., :3],
    (PCM, 32): lambda pcm: pcm.astype("<i4") << 16,
    (FLOAT, 32): lambda pcm: (pcm / 32768).astype("<f4"),
    (FLOAT, 64): lambda pcm: (pcm / 32768).astype("<f8"),
}

info = st.binary(max_size=9).map(lambda text: b"INFO" + chunk(b"ISFT", text))
ignored = st.one_of(
    st.tuples(st.just(b"JUNK"), st.binary(max_size=40)),
    st.tuples(st.just(b"LIST"), info),
    st.tuples(st.just(b"bext"), st.binary(max_size=20).map(lambda text: text.ljust(602, b"\0"))),
    st.tuples(st.just(b"fact"), st.integers(0, 2**32 - 1).map(lambda count: struct.pack("<I", count))),
    st.tuples(st.just(b"PAD "), st.binary(max_size=33)),
    st.tuples(st.just(b"iXML"), st.just(b"<BWFXML/>")),
).map(lambda named: chunk(*named))
behind = st.one_of(ignored, st.binary(max_size=30).map(lambda tag: chunk(b"id3 ", b"ID3\4" + tag)))


@st.composite
def forms(draw: Any, tag: int, bits: int, channels: int) -> bytes:
    """A fmt chunk. The rate of bytes is a hint that many programs write wrongly."""
    align = channels * bits // 8
    bytes_a_second = draw(st.sampled_from([align * RATE, 0, 1]))
    plain = struct.pack("<HIIHH", channels, RATE, bytes_a_second, align, bits)
    kind = draw(st.sampled_from(["plain", "with size", "extensible"]))
    if kind == "extensible":
        mask = draw(st.integers(0, 2**32 - 1))
        return struct.pack("<H", EXTENSIBLE) + plain + struct.pack("<HHIH", 22, bits, mask, tag) + GUID
    return struct.pack("<H", tag) + plain + (b"\0\0" if kind == "with size" else b"")


@st.composite
def good(draw: Any) -> Good:
    tag, bits = draw(st.sampled_from(list(CODINGS)))
    channels = draw(st.integers(1, 3))
    count = draw(st.integers(1, 50))
    pcm = np.random.default_rng(count).integers(-32768, 32767, (count, channels)).astype(np.int16)
    if bits == 8:
        pcm &= -256
    data = CODINGS[tag, bits](pcm).tobytes()
    before, between = b"".join(draw(st.lists(ignored, max_size=3))), b"".join(draw(st.lists(ignored, max_size=3)))
    after = b"".join(draw(st.lists(behind, max_size=2)))
    head = before + chunk(b"fmt ", draw(forms(tag, bits, channels))) + between
    sizes = draw(st.sampled_from(["known", "known", "0", "0xFFFFFFFF"]))
    if sizes == "known":
        body = head + chunk(b"data", data) + after
        content = b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body
    else:  # whoever does not know sizes cannot know what follows
        size = struct.pack("<I", int(sizes, 0))
        content = b"RIFF" + size + b"WAVE" + head + b"data" + size + data
    return Good(content, (pcm / 32768).mean(axis=1))


def outcomes(content: bytes, folder: Path) -> list[np.ndarray | str]:
    """What each reader makes of it: samples, or what its error says behind the name."""
    path = folder / "a.wav"
    path.write_bytes(content)
    reading, writing = os.pipe()
    os.write(writing, content)  # less than a pipe holds
    os.close(writing)
    pipe = f"/dev/fd/{reading}"
    try:
        return [outcome(str(path), at_once), outcome(str(path), in_blocks), outcome(pipe, in_blocks)]
    finally:
        os.close(reading)


def outcome(path: str, read: Any) -> np.ndarray | str:
    try:
        samples: np.ndarray = read(path)
    except AudioError as error:
        said = str(error)
    else:
        assert np.isfinite(samples).all()
        assert len(samples)
        return samples
    assert said.startswith(f"{path}: ")
    assert "\n" not in said
    return said.removeprefix(f"{path}: ")


def at_once(path: str) -> np.ndarray:
    return read_audio(path, RATE)


def in_blocks(path: str) -> np.ndarray:
    blocks = [np.zeros(0, np.float32)]
    with AudioReader(path, RATE) as reader:
        while len(block := reader.read(7)):
            blocks.append(block)
    return np.concatenate(blocks)


@given(wav=good())
@light
def test_any_good_header_gives_the_samples(wav: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a pipe, as they come: nothing is copied to a file first."""
    monkeypatch.setattr(audio_stream, "_copied", lambda *_: pytest.fail("it is copied first"))
    for found in outcomes(wav.content, tmp_path):
        assert not isinstance(found, str), found
        np.testing.assert_allclose(found, wav.samples, atol=1e-6)


@st.composite
def damaged(draw: Any) -> bytes:
    content = bytearray(draw(good()).content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        how = draw(st.sampled_from(["flip", "number", "cut", "remove", "insert", "magic"]))
        if how == "flip" and content:
            content[at] ^= draw(st.integers(1, 255))
        elif how == "number":
            content[at : at + 4] = struct.pack("<I", draw(st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1])))
        elif how == "magic":
            content[:4] = draw(st.sampled_from([b"RIFX", b"RF64", b"BW64", b"FORM", b"fLaC", b"OggS"]))
        elif how == "cut":
            del content[at:]
        elif how == "remove":
            del content[at : at + draw(st.integers(1, 9))]
        else:
            content[at:at] = draw(st.binary(min_size=1, max_size=9))
    return bytes(content)


def require_samples_or_errors(content: bytes, folder: Path) -> None:
    """Samples, or an error, or either by a pipe: whether its length contradicts the header is not known there."""
    at_once, in_blocks, piped = outcomes(content, folder)
    assert isinstance(at_once, str) == isinstance(in_blocks, str), (at_once, in_blocks)
    heard = [samples for samples in (at_once, in_blocks, piped) if not isinstance(samples, str)]
    for samples in heard[1:]:
        np.testing.assert_array_equal(samples, heard[0])


@given(content=damaged())
@light
def test_any_damage_gives_samples_or_one_error(content: bytes, tmp_path: Path) -> None:
    require_samples_or_errors(content, tmp_path)


odd_forms = st.tuples(
    st.sampled_from([0, PCM, 2, FLOAT, 6, 7, 0x11, 0x31, 0x55, EXTENSIBLE, 0xFFFF]),
    st.sampled_from([0, 1, 2, 3, 1024, 1025, 65535]),  # channels
    st.sampled_from([0, 1, 999, 1000, 8000, 44100, 2**31, 2**32 - 1]),  # hertz
    st.sampled_from([0, 32000, 2**32 - 1]),  # bytes a second
    st.sampled_from([0, 1, 2, 3, 4, 65535]),  # bytes of a sample of all channels
    st.sampled_from([0, 1, 4, 7, 8, 12, 16, 20, 24, 32, 33, 64, 65535]),  # bits
)


@example(form=(6, 2, RATE, 0, 3, 12), rest=b"", size=6)  # A-law of twelve bits: it has eight
@given(form=odd_forms, rest=st.binary(max_size=30), size=st.integers(1, 99))
@light
def test_any_form_gives_samples_or_one_error(form: tuple[int, ...], rest: bytes, size: int, tmp_path: Path) -> None:
    """Numbers that contradict each other, or that nobody can mean."""
    body = b"WAVE" + chunk(b"fmt ", struct.pack("<HHIIHH", *form) + rest) + chunk(b"data", bytes(range(size)))
    require_samples_or_errors(b"RIFF" + struct.pack("<I", len(body)) + body, tmp_path)


@pytest.mark.parametrize("length", range(44))
def test_a_header_that_ends_anywhere(length: int, tmp_path: Path) -> None:
    form = struct.pack("<HHIIHH", PCM, 1, RATE, 2 * RATE, 2, 16)
    content = b"RIFF" + struct.pack("<I", 44) + b"WAVE" + chunk(b"fmt ", form) + chunk(b"data", b"\1\0" * 4)
    assert all(isinstance(found, str) for found in outcomes(content[:length], tmp_path))
