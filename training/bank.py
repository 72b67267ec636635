"""Recordings of many sentences in few files, and a list of what lies where.

A bank is ``NAME.json`` with ``{"rate", "files", "items"}``; an item has its text, what else is known of it, and where
it lies: ``file`` (an index into ``files``), ``offset`` and ``samples``. Writing is whole or not at all, the list last.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

__all__ = ["Pcm", "join", "read", "write_flac", "write_opus"]

Pcm = NDArray[np.int16]
Item = dict[str, Any]
TRIAL, MARGIN = 40, 0.96  # pieces that a level is tried on, and what of the size it may take
BLOCK = 1 << 20  # samples at a time: the Opus encoder keeps a whole write in memory


def read(folder: Path, name: str) -> tuple[list[Item], list[Pcm]]:
    """The items of ``name`` and, beside each, its samples at the bank's rate.

    Raises:
        ValueError: a file is shorter than its list says.
    """
    bank = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    audio = [soundfile.read(folder / file, dtype="int16")[0] for file in bank["files"]]
    pieces = [audio[item["file"]][item["offset"] : item["offset"] + item["samples"]] for item in bank["items"]]
    for item, piece in zip(bank["items"], pieces, strict=True):
        if len(piece) != item["samples"]:
            file = bank["files"][item["file"]]
            raise ValueError(f"{file} ends {item['samples'] - len(piece)} samples before the end of {item['text']!r}")
    return bank["items"], pieces


def write_flac(folder: Path, name: str, rate: int, items: Iterable[tuple[Item, Pcm]], most_bytes: int) -> None:
    """Lossless, in files ``NAME_00.flac`` … of at most ``most_bytes``, in the order given."""
    listed: list[Item] = []
    files: list[str] = []
    pieces: list[Pcm] = []
    size = offset = 0

    def close() -> None:
        files.append(f"{name}_{len(files):02d}.flac")
        _write(folder / files[-1], rate, pieces, "FLAC", "PCM_16", 0.8)
        pieces.clear()

    for item, pcm in items:
        estimate = len(_flac(pcm, rate))
        if pieces and size + estimate > most_bytes:
            close()
            size = offset = 0
        listed.append({**item, "file": len(files), "offset": offset, "samples": len(pcm)})
        pieces.append(pcm)
        size, offset = size + estimate, offset + len(pcm)
    close()
    _write_list(folder, name, rate, files, listed)


def write_opus(
    folder: Path, name: str, rate: int, items: Sequence[tuple[Item, Pcm]], most_bytes: int, files: int = 1
) -> None:
    """Ogg Opus in ``files`` files of together at most ``most_bytes``, as good as that allows.

    The files are made side by side. The items are in a random order: what bits they take is tried on the first ones.

    Raises:
        ValueError: not even the least bits are few enough.
    """
    files = min(files, len(items))
    gap = np.zeros(rate // 10, np.int16)  # so that one sentence does not ring into the next
    names = [f"{name}_{i}.ogg" for i in range(files)] if files > 1 else [f"{name}.ogg"]
    shares = [items[i * len(items) // files : (i + 1) * len(items) // files] for i in range(files)]
    listed: list[Item] = []
    for file, share in enumerate(shares):
        offset = 0
        for item, pcm in share:
            listed.append({**item, "file": file, "offset": offset, "samples": len(pcm)})
            offset += len(pcm) + len(gap)
    pieces = [[part for _, pcm in share for part in (pcm, gap)] for share in shares]
    samples = sum(len(part) for share in pieces for part in share)
    level = _opus_level(pieces[0], rate, most_bytes / samples)
    with ThreadPoolExecutor(files) as pool:  # the encoder does not hold the interpreter
        list(pool.map(lambda file, share: _write(folder / file, rate, share, "OGG", "OPUS", level), names, pieces))
    size = sum((folder / file).stat().st_size for file in names)
    if size > most_bytes:
        raise ValueError(f"{folder / name}: {size} bytes at compression level {level}, not {most_bytes}")
    _write_list(folder, name, rate, names, listed)


def join(folder: Path, name: str, banks: Sequence[str]) -> int:
    """The list of a bank ``name`` that is those of ``banks`` that there are, of one rate, in their own files."""
    lists = [
        json.loads((folder / f"{bank}.json").read_text(encoding="utf-8"))
        for bank in banks
        if (folder / f"{bank}.json").exists()
    ]
    (rate,) = {one["rate"] for one in lists}
    files: list[str] = []
    items: list[Item] = []
    for one in lists:
        items += [{**item, "file": item["file"] + len(files)} for item in one["items"]]
        files += one["files"]
    _write_list(folder, name, rate, files, items)
    return len(items)


def _opus_level(pieces: list[Pcm], rate: int, most: float) -> float:
    """The compression level (0 the most bits, 1 the fewest) that takes ``most`` bytes a sample, by trial on a part."""
    part = np.concatenate(pieces[:TRIAL])
    low, high = 0.8, 1.0
    while high - low > 0.003:
        level = (low + high) / 2
        buffer = BytesIO()
        options: dict[str, Any] = {"format": "OGG", "subtype": "OPUS", "compression_level": level}
        with soundfile.SoundFile(buffer, "w", rate, 1, **options) as out:
            out.write(part)
        low, high = (low, level) if len(buffer.getvalue()) < MARGIN * most * len(part) else (level, high)
    return high


def _flac(pcm: Pcm, rate: int) -> bytes:
    buffer = BytesIO()
    soundfile.write(buffer, pcm, rate, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def _blocks(pieces: list[Pcm]) -> Iterator[Pcm]:
    """The same samples, in pieces of about ``BLOCK``."""
    waiting: list[Pcm] = []
    count = 0
    for piece in pieces:
        waiting.append(piece)
        count += len(piece)
        if count >= BLOCK:
            yield np.concatenate(waiting)
            waiting, count = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _write(file: Path, rate: int, pieces: list[Pcm], form: str, subtype: str, level: float) -> None:
    partial = file.with_name(f"{file.name}.partial")
    options = {"format": form, "subtype": subtype, "compression_level": level}
    with soundfile.SoundFile(partial, "w", rate, 1, **options) as out:
        for block in _blocks(pieces):
            out.write(block)
    partial.replace(file)


def _write_list(folder: Path, name: str, rate: int, files: list[str], items: list[Item]) -> None:
    partial = folder / f"{name}.json.partial"
    text = json.dumps({"rate": rate, "files": files, "items": items}, indent=0)
    partial.write_text(text, encoding="utf-8")
    partial.replace(folder / f"{name}.json")
