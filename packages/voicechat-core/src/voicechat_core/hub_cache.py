"""The hub's cache on this disk, and which files a checkpoint needs of a repository. Asks no network."""

import json
import logging
import os
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from voicechat_core.errors import HubError
from voicechat_core.files import expanded
from voicechat_core.shards import INDEX, SINGLE, numbered

__all__ = [
    "CONFIG",
    "TOKENIZER",
    "absent_from",
    "cache_directory",
    "is_file",
    "missing_files",
    "named",
    "quiet",
    "read_config",
    "size_text",
    "small_files",
    "snapshots_of",
    "storage",
    "weight_files",
]

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
SMALL_FILES = (
    CONFIG, INDEX, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "rnnt_tokenizer/vocab.json",
)  # fmt: skip
SINGLE_FILE = re.compile(r"model[^/\\]*\.safetensors")  # the weights of a checkpoint without an index
NOTICE = re.compile(r"(?:LICEN[CS]E|NOTICE)[^/\\]*|[^/\\]+\.(?:md|txt|json)|rnnt_tokenizer/[^/\\]+")

NAMED_AT_MOST = 3  # missing files in one message


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's warnings (no token, no symlinks, retries) off the terminal, unless it was told to say more."""
    try:
        import huggingface_hub.utils.logging  # sets the logger's level
    except Exception as error:  # it reads its settings from the environment as it is imported
        raise HubError(f"the hub's library cannot be used: {type(error).__name__}: {error}") from error
    logger = logging.getLogger(huggingface_hub.__name__)
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if level == logging.WARNING:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)


def storage(name: str) -> Path:
    """Where the cache keeps a repository."""
    return cache_directory() / f"models--{name.replace('/', '--')}"


def cache_directory() -> Path:
    """Where the library keeps every repository; HF_HOME and HF_HUB_CACHE say."""
    from huggingface_hub import constants

    return expanded(constants.HF_HUB_CACHE)


def snapshots_of(storage: Path) -> list[Path]:
    """A repository's snapshots: the main branch's first, then the newest."""
    try:
        folders = [(path.stat().st_mtime, path) for path in (storage / "snapshots").iterdir() if path.is_dir()]
    except OSError:
        return []
    try:
        main = (storage / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        main = ""
    return [path for _, path in sorted(folders, key=lambda item: (item[1].name != main, -item[0]))]


def missing_files(name: str, folder: Path, notices: bool = False) -> list[str]:
    """What a snapshot lacks to be a whole checkpoint, as far as can be known without a network."""
    known = _known_files(name, folder.name)
    small = (CONFIG, TOKENIZER) if known is None else (CONFIG, *small_files(known, notices))
    return absent_from(folder, dict.fromkeys((*small, *weight_files(folder, known))))


def _known_files(name: str, commit: str) -> set[str] | None:
    """The files of a commit, where the cache remembers them (it does for whole snapshots made by other tools)."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return {file.path for file in get_cached_repo_tree(name, revision=commit)}
    except (CachedRepoTreeNotFoundError, OSError, ValueError):
        return None


def small_files(names: Collection[str], notices: bool) -> list[str]:
    """Of a repository's files those that stand beside the weights; with ``notices`` its licence and texts too."""
    small = [file for file in SMALL_FILES if file in names]
    return small + sorted(file for file in names if notices and NOTICE.fullmatch(file))


def weight_files(folder: Path, known: Collection[str] | None) -> list[str]:
    """The shards that the index names, else every ``model*.safetensors``; ``model.safetensors`` if there is none."""
    index = folder / INDEX
    if is_file(index):
        return _shards(index)
    names = [path.name for path in folder.glob("model*.safetensors")] if known is None else known
    found = {file for file in names if SINGLE_FILE.fullmatch(file)}
    return sorted(found | numbered(found)) or [SINGLE]


def _shards(index: Path) -> list[str]:
    """The index's files. What is no plain name of a safetensors file is left out: the loader refuses it."""
    weight_map = _json(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return sorted({str(file) for file in names if re.fullmatch(r"[^/\\:]+\.safetensors", str(file))})


def absent_from(folder: Path, files: Collection[str]) -> list[str]:
    """Of some files those that a folder does not have."""
    return [file for file in files if not is_file(folder / file)]


def is_file(path: Path) -> bool:
    """Whether there is a file that can be looked at."""
    return os.path.isfile(path)  # noqa: PTH113 - pathlib's raises where it may not look


def read_config(folder: Path) -> dict[str, Any]:
    """A snapshot's config.json, or an empty object where there is none that can be read."""
    return _json(folder / CONFIG)


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is something else: saying so is the loader's."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if is_file(path) else None
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def named(files: Collection[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(files)
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more


def size_text(count: int) -> str:
    """Bytes in megabytes or gigabytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
