"""From tokens to text, all at once or while they arrive, with the same result.

A token is bytes. The text of a list of them is their bytes joined and read as UTF-8, each malformed stretch (Unicode's
"maximal subpart") becoming one U+FFFD; the ``tokenizers`` library decodes byte-level BPE in the same way. A token may
end inside a character: while tokens arrive, its unfinished bytes (at most three) wait for the next one, so that what
was given is never taken back. A push costs the length of its own token, however long the text is.

Separate turns are separate texts: where one begins after another, a space stands between them, unless one is there.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Self

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


class Said:
    """Pieces of text, joined only when somebody asks for all of them: a piece costs its own length."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: str) -> None:
        """Append; an empty piece is nothing."""
        if piece:
            self._pieces.append(piece)

    @property
    def is_open(self) -> bool:
        """Whether it has an end that what follows without a space would run together with."""
        return bool(self._pieces) and not self._pieces[-1][-1].isspace()

    @property
    def text(self) -> str:
        """All of it."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return "".join(self._pieces)


def new_utf8() -> codecs.IncrementalDecoder:
    """A decoder that keeps an unfinished character's bytes until the next call."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


class IncrementalDetokenizer:
    """One channel's tokens in, text out. ``text`` is all that was given since the start."""

    def __init__(
        self, token_bytes: TokenBytes, hidden: AbstractSet[int] = frozenset(), turn_start: int | None = None
    ) -> None:
        """``token_bytes`` is a vocabulary's method of that name; ``hidden`` ids are skipped as if never pushed.

        ``turn_start``, which is no text itself, ends what was said, an unfinished character too; what follows is
        another turn. None where there are no turns.
        """
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._turn_start = turn_start
        self._utf8 = new_utf8()
        self._said = Said()
        self._begins = False  # whether what comes next is the first of a turn

    @property
    def text(self) -> str:
        """The text so far, without an unfinished character."""
        return self._said.text

    def push(self, token: int) -> str:
        """The text this token completes; empty for a hidden one, or while a character is unfinished."""
        if token == self._turn_start:
            ended = self.finish()
            self._begins = True
            return ended
        return self._given("" if token in self._hidden else self._utf8.decode(self._token_bytes(token)))

    def finish(self) -> str:
        """U+FFFD for a character left unfinished, else nothing; the next push starts a new character."""
        return self._given(self._utf8.decode(b"", final=True))

    def saved(self) -> dict[str, Any]:
        """The place in the text, for ``restore``; it can be written as JSON."""
        return {"text": self.text, "unfinished": self._utf8.getstate()[0].hex(), "begins": self._begins}

    def restore(self, saved: Mapping[str, Any]) -> Self:
        """Go on where another one was saved."""
        self._said = Said()
        self._said.add(saved["text"])
        self._begins = saved["begins"]
        self._utf8.setstate((bytes.fromhex(saved["unfinished"]), 0))
        return self

    def _given(self, text: str) -> str:
        if not text:
            return ""
        if self._begins and self._said.is_open and not text[0].isspace():
            text = f" {text}"
        self._begins = False
        self._said.add(text)
        return text


class IncrementalTranscript:
    """RNNT labels in, the user's transcript out.

    ``text`` is ``RnntVocabulary.text`` of all labels so far, less an unfinished character, and only ever grows:
    whitespace at its end waits until something follows.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        """``token_bytes`` is the RNNT vocabulary's."""
        self._token_bytes = token_bytes
        self._utf8 = new_utf8()
        self._said = Said()
        self._space = Said()

    @property
    def text(self) -> str:
        """The transcript so far."""
        return self._said.text

    def push(self, labels: Iterable[int]) -> str | None:
        """One frame's labels: what they add to ``text``, or None when that is nothing."""
        return self._append(self._utf8.decode(b"".join(map(self._token_bytes, labels))))

    def finish(self) -> str | None:
        """What a character left unfinished adds (U+FFFD), or None."""
        return self._append(self._utf8.decode(b"", final=True))

    def saved(self) -> dict[str, str]:
        """The place in the text, for ``restore``; it can be written as JSON."""
        return {"text": self.text, "space": self._space.text, "unfinished": self._utf8.getstate()[0].hex()}

    def restore(self, saved: Mapping[str, str]) -> Self:
        """Go on where another one was saved."""
        self._said, self._space = Said(), Said()
        self._said.add(saved["text"])
        self._space.add(saved["space"])
        self._utf8.setstate((bytes.fromhex(saved["unfinished"]), 0))
        return self

    def _append(self, added: str) -> str | None:
        words = added.rstrip()
        if not words:
            self._space.add(added)
            return None
        delta = self._space.text + words
        if not self._said:
            delta = delta.lstrip()
        self._said.add(delta)
        self._space = Said()
        self._space.add(added[len(words) :])
        return delta
