"""Checkpoints by name: a local directory as it is, this package's own, or a repository of the hub, downloaded once.

This module knows names and files, not what is in the weights; it needs no MLX. ``huggingface_hub`` is imported when a
name of the hub is asked for, so that a local directory never touches it, nor the network.
"""

import os
import re
import sys
from collections.abc import Collection
from contextlib import suppress
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voicechat_core.builtin import SMALL, builtin
from voicechat_core.config_spellings import MODEL_TYPE, reject_other_layouts
from voicechat_core.errors import ConfigError, HubError, InputError
from voicechat_core.files import expanded
from voicechat_core.hub_cache import (
    CONFIG,
    TOKENIZER,
    absent_from,
    is_file,
    missing_files,
    named,
    quiet,
    read_config,
    size_text,
    small_files,
    snapshots_of,
    storage,
    weight_files,
)
from voicechat_core.hub_errors import explained

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import RepoSibling

__all__ = ["HUB_NAME", "locate"]

# What the hub allows: ASCII letters, digits and ._- on both sides of one slash, neither side beginning or ending in
# a dot or a hyphen; no "--", no "..", no ".git" at the end.
HUB_NAME = re.compile(r"(?!.*(?:--|\.\.))(?!.*\.git\Z)\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)

REQUEST_SECONDS = 10.0  # to wait for the hub's first answer: the library's own default is for ever
PACKAGE = "voicechat-core"


def locate(checkpoint: str | PathLike[str], *, notices: bool = False) -> Path:
    """The local directory of a checkpoint: a path as it is, or the cached snapshot of a repository of the hub.

    ``voicechat-small`` is always the one that comes with this package; ``./voicechat-small`` is a directory. A path
    that exists, a ``PathLike``, and a string that is no ``owner/name`` are paths; whether there is a checkpoint is left
    to who reads it. Of a repository only what a checkpoint needs is downloaded, and only what is not yet in the cache;
    with ``notices`` its licence, notices and Markdown files too. A whole snapshot in the cache is used when the hub
    cannot be reached or refuses.

    Raises:
        InputError: for an empty name, and for what is no name.
        HubError: naming the repository and what is wrong: it does not exist, is private or gated, is no checkpoint of
            this model, the hub cannot be reached and the cache lacks files, or the download failed.
    """
    if checkpoint == "" or not isinstance(checkpoint, str | PathLike):
        wanted = f"a directory, {SMALL} or a name on the hub (owner/name) is needed"
        raise InputError(f"checkpoint is {checkpoint!r}; {wanted}")
    if isinstance(checkpoint, str) and (own := builtin(checkpoint)) is not None:
        return own
    if not isinstance(checkpoint, str) or not HUB_NAME.fullmatch(checkpoint) or _is_here(checkpoint):
        return expanded(checkpoint)
    with quiet():
        try:
            info = _ask(checkpoint)
        except Exception as error:  # the library's errors and its HTTP client's have no common base
            return _from_cache(checkpoint, notices, error)
        try:
            return _from_hub(checkpoint, info, notices)
        except (AttributeError, TypeError) as error:
            raise HubError(f"{checkpoint}: the hub's answer makes no sense ({error})") from error


def _is_here(text: str) -> bool:
    """Whether something of that name is on this disk, or may be where nobody can look."""
    try:
        os.lstat(text)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


# ---- from the network


def _ask(name: str) -> "ModelInfo":
    """The commit that the repository's main branch is at now, and its files: one request."""
    from huggingface_hub import HfApi

    api = HfApi(library_name=PACKAGE, library_version=version(PACKAGE))
    return api.model_info(name, files_metadata=True, timeout=REQUEST_SECONDS)


def _from_hub(name: str, info: "ModelInfo", notices: bool) -> Path:
    """The snapshot of one commit, with every file that it lacked: first the small ones, then what they name."""
    files = {file.rfilename: file for file in info.siblings or ()}
    if info.sha is None or CONFIG not in files:
        raise HubError(f"{name}: not a checkpoint: the repository has no {CONFIG}")
    folder = storage(name) / "snapshots" / info.sha
    _download(name, folder, small_files(files, notices))
    _check_family(name, read_config(folder))
    weights = weight_files(folder, files)
    lost = [file for file in (TOKENIZER, *weights) if file not in files]
    if lost:
        raise HubError(f"{name}: not a whole checkpoint: the repository has no {named(lost)}")
    _announce(name, [files[file] for file in absent_from(folder, weights)])
    _download(name, folder, weights, show=True)
    _remember(name, info.sha)
    return folder


def _check_family(name: str, config: dict[str, Any]) -> None:
    """Refuse another model's repository before its weights are fetched in vain; all else is left to the loader."""
    if config.get("model_type") != MODEL_TYPE:
        try:
            reject_other_layouts(config)
        except ConfigError as error:
            raise HubError(f"{name}: {error}") from error


def _announce(name: str, files: "list[RepoSibling]") -> None:
    """Say what will be downloaded, which is not what another commit in the cache has too."""
    blobs = storage(name) / "blobs"
    new = [file for file in files if not is_file(blobs / (file.lfs.sha256 if file.lfs else str(file.blob_id)))]
    if new:
        count = f"{len(new)} file{'' if len(new) == 1 else 's'}"
        _say(f"{name}: downloading {count}, {size_text(sum(file.size or 0 for file in new))}")


def _download(name: str, folder: Path, files: Collection[str], *, show: bool = False) -> None:
    """Fetch what ``folder``, named by its commit, does not hold."""
    absent = absent_from(folder, files)
    for file in absent:
        # One after the other and in this thread: an interrupt must reach the transfer, which is parallel in itself.
        try:
            _download_file(name, folder.name, file, show)
        except Exception as error:
            raise HubError(explained(name, error)) from error
    absent = absent_from(folder, absent)
    if absent:
        raise HubError(f"{name}: downloaded, but {folder} has no {named(absent)}")


def _download_file(name: str, commit: str, file: str, show: bool) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import tqdm

    class Hidden(tqdm):
        """The library's bar, not shown."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]

    bars = tqdm if show and _on_terminal() else Hidden
    hf_hub_download(
        name, file, revision=commit, tqdm_class=bars, library_name=PACKAGE, library_version=version(PACKAGE)
    )


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _say(text: str) -> None:
    from voicechat_core.terminal import discard

    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


def _remember(name: str, commit: str) -> None:
    """Point the cache's main branch at a snapshot that is whole, for those who look without a network."""
    ref = storage(name) / "refs" / "main"
    with suppress(OSError, ValueError):  # a cache that cannot be written can still be read
        if not ref.is_file() or ref.read_text(encoding="ascii") != commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            draft = ref.with_name(f"main.{os.getpid()}.tmp")
            draft.write_text(commit, encoding="ascii")
            draft.replace(ref)


def _from_cache(name: str, notices: bool, error: Exception) -> Path:
    """A whole snapshot, whatever the hub said; without one, the error that says both."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    snapshots = snapshots_of(storage(name))
    missing = [missing_files(name, folder, notices) for folder in snapshots]
    for folder, files in zip(snapshots, missing, strict=True):
        if not files:
            if not isinstance(error, OfflineModeIsEnabled):
                _say(f"{explained(name, error)}; the cached copy is used")
            return folder
    lacks = f"the cached copy has no {named(missing[0])}" if missing else "there is no cached copy"
    raise HubError(f"{explained(name, error)}; {lacks}, and no local directory of that name") from error
