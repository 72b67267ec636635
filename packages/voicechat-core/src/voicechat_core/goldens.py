"""A folder of goldens: what its files hold, and where they are not what its manifest says. Knows no model."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from voicechat_core.errors import GoldensError
from voicechat_core.hub import locate

__all__ = ["Arrays", "Fault", "Goldens"]

Arrays = dict[str, np.ndarray[Any, Any]]

MISSING = "missing: the manifest lists it"
CHANGED = "changed: its bytes are not the manifest's"
LEFT_OVER = "left over: the manifest does not list it"
DIGITS = 12  # of a hash, enough to tell two files apart


@dataclass(frozen=True)
class Fault:
    """A tensor or a file that is not as it should be, and why; for a file of the checkpoint, ``stage`` says so."""

    stage: str
    tensor: str
    note: str


@dataclass(frozen=True)
class Named:
    """A checkpoint that lies elsewhere: its ``name``, and what a person does to ``remake`` the goldens of it."""

    name: str
    remake: str


@dataclass(frozen=True)
class Goldens:
    """``goldens/``, ``manifest.json``, and ``checkpoint/`` unless the manifest names one that lies elsewhere.

    ``listed`` holds the manifest's entries by (stage, tensor), ``files`` its hashes of the checkpoint's files (older
    manifests have none), ``stages`` the tensors themselves.
    """

    path: Path
    listed: dict[tuple[str, str], dict[str, Any]]
    files: dict[str, str]
    named: Named | None
    stages: dict[str, Arrays]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read everything but the checkpoint.

        Raises:
            GoldensError: naming the file that is missing or cannot be read.
        """
        listed, files, named = _read_manifest(path / "manifest.json")
        paths = sorted((path / "goldens").glob("*.safetensors"))
        if not paths:
            raise GoldensError(f"{path / 'goldens'}: no safetensors files")
        return cls(path, listed, files, named, {file.stem: _read_tensors(file) for file in paths})

    def checkpoint(self) -> Path:
        """The checkpoint's directory: the folder's own, or the named one, if it is still the one that it was.

        Raises:
            GoldensError: for a named one that has changed: nothing here is of it.
            HubError: when it is to be downloaded and cannot be.
        """
        if self.named is None:
            return self.path / "checkpoint"
        directory = locate(self.named.name)
        if directory.is_dir():  # else it is for the loader to say
            self._refuse_another(directory, self.named)
        return directory

    def _refuse_another(self, directory: Path, named: Named) -> None:
        for file, found in self._unlike(directory):
            expected = f"{self.files[file][:DIGITS]} in the manifest"
            what = f"has SHA-256 {found[:DIGITS]} here, {expected}" if found else "is missing here"
            which = f"made with another {named.name}: {file} {what}"
            raise GoldensError(f"{self.path}: {which}; to make it of this one: {named.remake}")

    def _unlike(self, directory: Path) -> Iterator[tuple[str, str]]:
        """The checkpoint's files that are not the manifest's, each with its hash, which is empty for an absent one."""
        for name, expected in sorted(self.files.items()):
            path = directory / name
            found = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            if found != expected:
                yield name, found

    def faults(self) -> Iterator[Fault]:
        """Each tensor and file that is absent, changed or left over."""
        for name, found in self._unlike(self.checkpoint()):
            yield Fault("checkpoint", name, CHANGED if found else MISSING)
        for (stage, tensor), entry in sorted(self.listed.items()):
            note = _difference(entry, self.stages.get(stage, {}).get(tensor))
            if note:
                yield Fault(stage, tensor, note)
        for stage, tensors in sorted(self.stages.items()):
            for tensor in sorted(tensors):
                if (stage, tensor) not in self.listed:
                    yield Fault(stage, tensor, LEFT_OVER)


def _difference(entry: dict[str, Any], found: np.ndarray | None) -> str:
    """Why a tensor is not the one that an entry describes; empty if it is."""
    if found is None:
        return MISSING
    for key, value in (("shape", list(found.shape)), ("dtype", str(found.dtype))):
        if entry.get(key, value) != value:
            return f"changed: {key} {value} here, {entry[key]} in the manifest"
    digest = hashlib.sha256(found.tobytes()).hexdigest()
    return CHANGED if entry.get("sha256", digest) != digest else ""


def _read_manifest(path: Path) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[str, str], Named | None]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        listed = {_split(name): dict(entry) for name, entry in manifest["tensors"].items()}
        files = {str(name): str(digest) for name, digest in manifest.get("files", {}).items()}
        return listed, files, _named(manifest.get("checkpoint"))
    except FileNotFoundError as error:
        parts = "checkpoint/, goldens/ and manifest.json"
        raise GoldensError(f"{path}: no such file; a goldens folder holds {parts}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GoldensError(f"{path}: not a manifest with tensors: {error!r}") from error


def _named(entry: Any) -> Named | None:
    if entry is None:
        return None
    name, remake = entry["name"], entry["remake"]
    if not (isinstance(name, str) and isinstance(remake, str)):
        raise TypeError(f"checkpoint is {entry!r}")
    return Named(name, remake)


def _split(name: str) -> tuple[str, str]:
    stage, tensor = name.split("/", 1)
    return stage, tensor


def _read_tensors(path: Path) -> Arrays:
    try:
        return load_file(path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise GoldensError(f"{path}: not a whole safetensors file: {error}") from error
