"""The two vocabularies: the language model's byte-level BPE, and the transcript's SentencePiece pieces.

Both turn ids into text by the rule of ``detokenizer``: a token is bytes, and an id they do not have is none.

``tokenizer.json`` is used as it stands. ``fix_mistral_regex`` in ``tokenizer_config.json`` changes nothing:
``transformers`` (5.24) applies it to Mistral's own model types only, and this is none of them.
"""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import decoders

from voicechat_core.config import VoiceChatConfig, require_equal
from voicechat_core.detokenizer import IncrementalDetokenizer, piece_bytes, surface_bytes, text_of
from voicechat_core.errors import CheckpointError, InputError

__all__ = ["RnntVocabulary", "SpecialIds", "Tokenizer"]

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
RNNT_FILE = Path("rnnt_tokenizer") / "vocab.json"
RNNT_SPECIAL = re.compile(r"<unk>|<pad>|<s>|</s>|<[a-z]{2,3}-[A-Za-z]{2,4}>")


class Tokenizer:
    """The language model's tokenizer. Ids are 0 … ``size`` - 1."""

    def __init__(self, backend: tokenizers.Tokenizer, source: str = TOKENIZER_FILE) -> None:
        """Wrap a loaded ``tokenizers`` object; ``source`` names it in errors.

        Raises:
            CheckpointError: it is not byte-level, or its ids have gaps.
        """
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise CheckpointError(f"{source}: the decoder is {backend.decoder!r}; only ByteLevel is supported")
        backend.no_truncation()  # a prompt is never cut or filled, whatever the file was saved with
        backend.no_padding()
        self._backend = backend
        self._vocab = backend.get_vocab(with_added_tokens=True)
        self._strings = _in_order({token: string for string, token in self._vocab.items()}, len(self._vocab), source)

    @classmethod
    def from_directory(cls, path: Path, vocab_size: int | None = None) -> Self:
        """Read ``tokenizer.json``; ``vocab_size``, where given, is the config's and must be the tokenizer's own.

        Raises:
            CheckpointError: naming the file: it cannot be read, is not byte-level, or has another size.
        """
        file = path / TOKENIZER_FILE
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception for a file it cannot use
            raise CheckpointError(f"{file}: cannot be read as a tokenizer: {error}") from error
        tokenizer = cls(backend, str(file))
        if vocab_size not in (None, tokenizer.size):
            raise CheckpointError(f"{file} has {tokenizer.size} tokens but text_config.vocab_size is {vocab_size}")
        return tokenizer

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return len(self._strings)

    def vocab(self) -> dict[str, int]:
        """Every raw token string (``Ġthe``, ``<SPECIAL_12>``) and its id, added tokens included."""
        return dict(self._vocab)

    def token_id(self, string: str) -> int | None:
        """The id of a raw token string, or None."""
        return self._vocab.get(string)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which need not be whole characters; none for an id outside the vocabulary."""
        return surface_bytes(self._strings[token]) if 0 <= token < self.size else b""

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with nothing added before or after.

        Raises:
            InputError: ``text`` holds a lone surrogate, which no UTF-8 can express.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"the text holds the lone surrogate {text[error.start]!r} at {error.start}") from error
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, special tokens spelled out."""
        return text_of(map(self.token_bytes, ids))

    def visible_text(self, ids: Iterable[int], hidden: AbstractSet[int], turn_start: int | None = None) -> str:
        """The text of ``ids`` without the ``hidden`` ones: what ``IncrementalDetokenizer`` gives in pieces."""
        detokenizer = IncrementalDetokenizer(self.token_bytes, hidden, turn_start)
        for token in ids:
            detokenizer.push(token)
        detokenizer.finish()
        return detokenizer.text

    def prompt_ids(self, prompt: str, bos: int, eos: int) -> list[int]:
        """The positions a system prompt takes: bos, the prompt unstripped, eos; none for a blank one."""
        return [bos, *self.encode(prompt), eos] if prompt.strip() else []


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a role in the dialogue. The function markers are None in a vocabulary without them."""

    bos: int
    eos: int
    pad: int
    silence: int
    call_start: int | None
    call_end: int | None
    response_end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: VoiceChatConfig) -> Self:
        """Turn and filler ids from the config; the function channel's markers by their spelling."""
        return cls(
            bos=config.bos_token_id,
            eos=config.eos_token_id,
            pad=config.pad_token_id,
            silence=config.silence_token_id,
            call_start=tokenizer.token_id("<SPECIAL_20>"),
            call_end=tokenizer.token_id("<SPECIAL_21>"),
            response_end=tokenizer.token_id("<SPECIAL_22>"),
        )

    @property
    def hidden(self) -> frozenset[int]:
        """Ids that are never text, on either channel. The function markers are text: they are shown spelled out."""
        return frozenset({self.bos, self.eos, self.pad, self.silence})

    @property
    def roles(self) -> frozenset[int]:
        """All ids with a role: text that somebody supplies must not become one of them."""
        markers = (self.call_start, self.call_end, self.response_end)
        return self.hidden | {marker for marker in markers if marker is not None}


class RnntVocabulary:
    """The transcript's pieces by id. Without pieces the branch is off."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = tuple(pieces)
        self.special = frozenset(token for token, piece in enumerate(self.pieces) if RNNT_SPECIAL.fullmatch(piece))

    @classmethod
    def from_checkpoint(cls, path: Path, config: VoiceChatConfig) -> Self:
        """The config's ``rnnt_vocabulary``, else ``rnnt_tokenizer/vocab.json``, else none (which is logged).

        Raises:
            CheckpointError: naming the file, or both lengths where they disagree.
        """
        file = path / RNNT_FILE
        pieces: Sequence[str] = config.rnnt_vocabulary or ()
        if config.rnnt_vocabulary is None and file.exists():
            pieces = _read_pieces(file)
        if pieces:  # the config's own were compared when it was made
            require_equal(f"the length of {file}", len(pieces), "rnnt_blank_id", config.rnnt_blank_id)
        else:
            log.warning("%s has no RNNT vocabulary: there will be no user transcript", path)
        return cls(pieces)

    @property
    def enabled(self) -> bool:
        """Whether there is a transcript at all."""
        return bool(self.pieces)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one piece, ``▁`` as a space; none for a special piece or an id outside the vocabulary."""
        if not 0 <= token < len(self.pieces) or token in self.special:
            return b""
        return piece_bytes(self.pieces[token])

    def text(self, ids: Iterable[int]) -> str:
        """The transcript of ``ids``, without whitespace around it."""
        return text_of(map(self.token_bytes, ids)).strip()


def _read_pieces(file: Path) -> list[str]:
    """Pieces in the order of their ids, from a list of them or an object piece -> id."""
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
    if isinstance(data, dict):
        ids = {token: piece for piece, token in data.items() if isinstance(token, int)}
        return _in_order(ids, len(data), str(file))
    if not isinstance(data, list) or not all(isinstance(piece, str) for piece in data):
        raise CheckpointError(f"{file}: expected a list of pieces or an object piece -> id")
    return data


def _in_order(by_id: dict[int, str], count: int, source: str) -> list[str]:
    """The ``count`` strings of a vocabulary by id, or ``CheckpointError`` when their ids have gaps."""
    if set(by_id) != set(range(count)):
        raise CheckpointError(f"{source}: the ids of its {count} entries are not 0 to {count - 1}")
    return [by_id[token] for token in range(count)]
