"""An API key, as a server compares it and a client sends it, and where both find it.

    key = read_key(path, os.environ)  # None where there is none

A key appears in no message, no ``repr`` and no log. Needs no MLX.
"""

import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from voicechat_core.errors import InputError

__all__ = ["KEY_VARIABLE", "Key", "read_key"]

KEY_VARIABLE: Final = "VOICECHAT_API_KEY"


class Key:
    """An API key. It can be compared and sent, and not be looked at.

    Raises:
        InputError: when it could not be sent in a header: empty, or with spaces or anything but ASCII in it.
    """

    def __init__(self, text: str) -> None:
        if not re.fullmatch(r"[!-~]+", text):
            found = f"{len(text)} characters, some of them others" if text else "nothing"
            raise InputError(f"an API key is visible ASCII characters without spaces; this one is {found}")
        self._bytes = text.encode("ascii")

    def matches(self, candidate: bytes) -> bool:
        """Whether it is this key; in a time that tells nothing of where they differ."""
        return hmac.compare_digest(self._bytes, candidate)

    def header(self) -> tuple[bytes, bytes]:
        """The header line, name and value, by which a client shows it to a server."""
        return (b"Authorization", b"Bearer " + self._bytes)

    def __repr__(self) -> str:
        return "Key(hidden)"


def read_key(file: Path | None, environment: Mapping[str, str]) -> Key | None:
    """The key in a file, which goes first, else in ``VOICECHAT_API_KEY``; None where neither is given.

    White space around it is dropped: most files end with a new line.

    Raises:
        InputError: when the file cannot be read, or what is given is no key. An empty variable counts as not given,
            an empty file does not: it would open what was meant to be locked.
    """
    if file is None:
        text = environment.get(KEY_VARIABLE, "").strip()
        return Key(text) if text else None
    try:
        return Key(file.expanduser().read_text(encoding="ascii").strip())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise InputError(f"the API key file {file} cannot be read: {why}") from None
    except InputError as error:
        raise InputError(f"the API key file {file}: {error}") from None
