"""The vocabularies of synthetic checkpoints: small, but built like the published ones."""

import json
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

__all__ = ["RNNT_PIECES", "vocabulary_size", "write_tokenizer"]

# Ids 1, 2, 11, 12 and 20 to 22 are the roles of the published tokenizer.
SPECIAL = ("<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 24)))
WORDS = (
    *("the", "and", "you", "that", "what", "with", "have", "this", "how", "can", "help", "today", "hello", "voice"),
    *("speech", "weather", "answer", "question", "please", "thanks", "assistant", "concise", "time", "good", "is"),
    *("of", "to", "in", "be"),
)

# SentencePiece pieces of the transcript branch; U+2581 marks the start of a word.
RNNT_PIECES = (
    "<unk>",
    *(f"▁{word}" for word in WORDS),
    *(f"▁{letter}" for letter in ascii_lowercase),
    *ascii_lowercase,
    ".",
    ",",
    "?",
    "'",
)


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token ids and merges of a byte-level BPE that knows ``WORDS``, with and without a leading space."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: dict[tuple[str, str], None] = {}
    for spelling in [s for word in WORDS for s in (word, f"Ġ{word}")]:
        prefix = spelling[0]
        for letter in spelling[1:]:
            merges.setdefault((prefix, letter))
            prefix += letter
            vocab.setdefault(prefix, len(vocab))
    return vocab, list(merges)


def vocabulary_size() -> int:
    """Ids of the text vocabulary."""
    return len(_vocabulary()[0])


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and its two companions."""
    vocab, merges = _vocabulary()
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<SPECIAL_12>", "unk_token": "<unk>"}
    config = roles | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", roles)):
        (directory / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
