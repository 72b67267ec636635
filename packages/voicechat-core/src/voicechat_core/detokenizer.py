"""From tokens to text, all at once or while they arrive, with the same result.

A token is bytes. The text of a list of them is their bytes joined and read as UTF-8, each malformed stretch (Unicode's
"maximal subpart") becoming one U+FFFD; the ``tokenizers`` library decodes byte-level BPE in the same way. A token may
end inside a character: while tokens arrive, its unfinished bytes (at most three) wait for the next one, so that what
was given is never taken back. A push costs the length of its own token, however long the text is.
"""

import codecs
import re
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Self

__all__ = ["IncrementalDetokenizer", "IncrementalTranscript", "piece_bytes", "surface_bytes", "text_of"]

TokenBytes = Callable[[int], bytes]

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_START = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """The byte-level BPE alphabet of GPT-2: printable Latin-1 is itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def surface_bytes(surface: str) -> bytes:
    """The bytes a token string stands for; one with a character outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF[char] for char in surface])
    except KeyError:
        return surface.encode("utf-8")


def piece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: ``▁`` is a space, ``<0x0A>`` one byte of a character it had no piece for."""
    if byte := BYTE_PIECE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace(WORD_START, " ").encode("utf-8", "replace")


def text_of(tokens: Iterable[bytes]) -> str:
    """The text of a whole list of tokens, given as bytes."""
    return b"".join(tokens).decode("utf-8", "replace")


class IncrementalDetokenizer:
    """One channel's tokens in, text out."""

    def __init__(self, token_bytes: TokenBytes, hidden: AbstractSet[int] = frozenset()) -> None:
        """``token_bytes`` is a vocabulary's method of that name; ``hidden`` ids are skipped as if never pushed."""
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text this token completes; empty for a hidden one, or while a character is unfinished."""
        return "" if token in self._hidden else self._utf8.decode(self._token_bytes(token))

    def finish(self) -> str:
        """U+FFFD for a character left unfinished, else nothing; the next push starts a new text."""
        return self._utf8.decode(b"", final=True)

    def fork(self) -> Self:
        """Another detokenizer at the same place in the text."""
        other = type(self)(self._token_bytes, self._hidden)
        other._utf8.setstate(self._utf8.getstate())
        return other


class IncrementalTranscript:
    """RNNT labels in, the user's transcript out.

    ``text`` is ``RnntVocabulary.text`` of all labels so far, less an unfinished character, and only ever grows:
    whitespace at its end waits until something follows.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        """``token_bytes`` is the RNNT vocabulary's."""
        self._detokenizer = IncrementalDetokenizer(token_bytes)
        self._said: list[str] = []
        self._space: list[str] = []

    @property
    def text(self) -> str:
        """The transcript so far."""
        if len(self._said) > 1:
            self._said = ["".join(self._said)]
        return "".join(self._said)

    def push(self, labels: Iterable[int]) -> str | None:
        """One frame's labels: what they add to ``text``, or None when that is nothing."""
        return self._append("".join(map(self._detokenizer.push, labels)))

    def finish(self) -> str | None:
        """What a character left unfinished adds (U+FFFD), or None."""
        return self._append(self._detokenizer.finish())

    def fork(self) -> Self:
        """Another transcript with the same past."""
        other = object.__new__(type(self))
        other._detokenizer = self._detokenizer.fork()
        other._said, other._space = self._said.copy(), self._space.copy()
        return other

    def _append(self, added: str) -> str | None:
        words = added.rstrip()
        if not words:
            if added:
                self._space.append(added)
            return None
        delta = "".join(self._space) + words
        if not self._said:
            delta = delta.lstrip()
        self._said.append(delta)
        self._space = [added[len(words) :]]
        return delta
