"""The characters of every text token, from the tokenizer's vocabulary. Knows neither MLX nor weights.

A token's surface form (byte-level BPE: a leading space is ``Ġ``) is spelt with the vocabulary's own
one-character tokens, numbered densely in the order of their ids. Code points without a token of their own are left out.
One more id, the vocabulary size, stands for "no token" and is spelt with the padding character.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from voicechat_core.errors import CheckpointError, ConfigError

__all__ = ["CharTable", "Ids"]

Ids = npt.NDArray[np.signedinteger[Any]]

WORD_STARTS = ("Ġ", "▁", "<")
REGULAR, BOS, EOS = 0, 1, 2


@dataclass(frozen=True)
class CharTable:
    """Characters of ids 0 to V (V is "no token"), all in one array ``characters`` cut at ``offsets`` ``[V + 2]``.

    ``is_continuation`` ``[V + 1]`` is 1 for a token that continues a word. ``special_flags`` ``[V]`` is 1 for bos,
    2 for eos, and its last entry is 0 because it serves every id from V - 1 on. ``padding`` is the padding character.
    """

    characters: Ids
    offsets: Ids
    is_continuation: Ids
    special_flags: Ids
    padding: int

    @classmethod
    def from_vocab(
        cls, vocab: Mapping[str, int], *, vocab_size: int, char_vocab_size: int, bos_token_id: int, eos_token_id: int
    ) -> Self:
        """Spell each token of ``vocab`` (token string -> id); ``char_vocab_size`` counts the padding character too.

        Raises:
            CheckpointError: the ids are not 0 to ``vocab_size`` - 1, each once.
            ConfigError: the vocabulary has another number of one-character tokens than ``char_vocab_size`` - 1.
        """
        tokens = _by_id(vocab, vocab_size)
        numbers = _number_characters(tokens, char_vocab_size)
        padding = len(numbers)
        spelled = [[numbers[c] for c in token if c in numbers] for token in tokens] + [[padding]]
        flags = np.zeros(vocab_size, np.int64)
        flags[bos_token_id], flags[eos_token_id] = BOS, EOS
        flags[-1] = REGULAR
        return cls(
            characters=np.array([c for characters in spelled for c in characters], np.int32),
            offsets=np.cumsum([0] + [len(characters) for characters in spelled]),
            is_continuation=np.array([not token.startswith(WORD_STARTS) for token in tokens] + [False], np.int64),
            special_flags=flags,
            padding=padding,
        )

    def __len__(self) -> int:
        """Number of ids, "no token" included."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ids:
        """Characters of each id, ``[V + 1]``."""
        return np.diff(self.offsets)

    def rows(self, ids: Ids) -> tuple[Ids, Ids]:
        """Characters of N ids ``[N, L]``, padded to the longest of them (L >= 1), and their lengths ``[N]``."""
        lengths = self.lengths[ids]
        columns = np.arange(max(1, int(lengths.max(initial=0))))
        inside = columns < lengths[:, None]
        where = np.where(inside, self.offsets[ids][:, None] + columns, 0)
        return np.where(inside, self.characters[where], self.padding), lengths

    def blocks(self, limit: int) -> Iterator[Ids]:
        """Every id once, in blocks of equal length that hold at most ``limit`` characters (or one id)."""
        lengths = self.lengths
        for length in np.unique(lengths):
            ids = np.flatnonzero(lengths == length)
            size = max(1, limit // max(1, int(length)))
            for start in range(0, len(ids), size):
                yield ids[start : start + size]


def _by_id(vocab: Mapping[str, int], vocab_size: int) -> list[str]:
    tokens: list[str | None] = [None] * vocab_size
    for token, number in vocab.items():
        if not 0 <= number < vocab_size:
            raise CheckpointError(f"tokenizer: {token!r} has id {number}, outside vocab_size {vocab_size}")
        if tokens[number] is not None:
            raise CheckpointError(f"tokenizer: {tokens[number]!r} and {token!r} both have id {number}")
        tokens[number] = token
    found = [token for token in tokens if token is not None]
    if len(found) != vocab_size:
        missing = tokens.index(None)
        raise CheckpointError(f"tokenizer: {len(found)} tokens but vocab_size {vocab_size}; no token has id {missing}")
    return found


def _number_characters(tokens: list[str], char_vocab_size: int) -> dict[str, int]:
    single = [token for token in tokens if len(token) == 1]
    if len(single) != char_vocab_size - 1:
        raise ConfigError(
            f"character_encoder.char_vocab_size is {char_vocab_size} (padding included) "
            f"but the tokenizer has {len(single)} one-character tokens"
        )
    return {character: number for number, character in enumerate(single)}
