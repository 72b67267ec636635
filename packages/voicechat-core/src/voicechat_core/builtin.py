"""The checkpoint that comes with this package: ``voicechat-small``, trained by this project (see ``training/``)."""

from pathlib import Path

__all__ = ["SMALL", "builtin"]

SMALL = "voicechat-small"
FOLDER = Path(__file__).parent / "checkpoints"


def builtin(name: str) -> Path | None:
    """The folder of a checkpoint of this package, or None if ``name`` is none of its names."""
    return FOLDER / name if name == SMALL else None
