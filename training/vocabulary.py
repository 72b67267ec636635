"""The two vocabularies of ``voicechat-small``, learned from its domain: the same bytes at every build.

The language model's is a byte-level BPE whose first 24 ids have the roles of the published tokenizer and whose next 256
are the bytes, so that it can write any text; the fixed parts of a tool call are one id each, since every id of a call
takes a frame. The transcript's is a BPE of words in lower case, U+2581 before each.
"""

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training import domain

__all__ = ["SPECIAL", "rnnt_ids", "rnnt_pieces", "text_tokenizer", "write_tokenizer"]

TEXT_SIZE, RNNT_SIZE = 640, 128
SPECIAL = ("<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, 24)))
# What never changes in a call and its response; short parts, since the longest id sets what spelling costs in training.
CALL_PARTS = (
    *("<TOOLCALL>", '[{"name": "', "get_time", "roll_dice", "get_weather", '", "arguments": ', '{"city": "'),
    *('{"sides": ', '"}}]', "}}]", "{}}]", "</TOOLCALL>", "<TOOL_RESPONSE>", '["', '"]', "</TOOL_RESPONSE>"),
)
WORD_START = "\u2581"
SAMPLES, CITY_SAMPLES = 20000, 200


def _turns() -> Iterator[tuple[domain.Turn, str]]:
    """Turns as often as they are trained on, each with a system prompt that fits its answer."""
    rng = random.Random("vocabulary")
    for _ in range(SAMPLES):
        prompt, name = domain.system_prompt(rng)
        yield domain.sample(rng, name=name), prompt


def _written() -> Iterator[str]:
    """What the language model reads and writes."""
    for turn, prompt in _turns():
        yield from (turn.answer, prompt)
    for city in domain.CITIES:
        yield from [city] * CITY_SAMPLES  # in a call nothing stands before it


@cache
def text_tokenizer() -> Tokenizer:
    """The language model's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_SIZE - len(CALL_PARTS),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_written(), trainer)
    tokenizer.add_tokens([AddedToken(part, normalized=False) for part in CALL_PARTS])
    return tokenizer


@cache
def _rnnt_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=WORD_START, prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=RNNT_SIZE,
        special_tokens=["<unk>"],
        initial_alphabet=[*ascii_lowercase, "'", WORD_START],
        show_progress=False,
    )
    tokenizer.train_from_iterator((turn.user for turn, _ in _turns()), trainer)
    return tokenizer


def rnnt_pieces() -> list[str]:
    """The transcript's 128 pieces by id, for ``rnnt_vocabulary`` in config.json. The blank's id is their count."""
    vocab = _rnnt_tokenizer().get_vocab()
    return sorted(vocab, key=lambda piece: vocab[piece])


def rnnt_ids(text: str) -> list[int]:
    """The labels of a transcript: lower case letters, apostrophes and single spaces.

    Raises:
        ValueError: ``text`` has a character that no piece has.
    """
    ids: list[int] = _rnnt_tokenizer().encode(text).ids
    if 0 in ids:
        raise ValueError(f"no transcript piece for a character of {text!r}")
    return ids


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and its two companions, as the published checkpoints have them."""
    text_tokenizer().save(str(directory / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<SPECIAL_12>", "unk_token": "<unk>"}
    config = roles | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", roles)):
        (directory / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
