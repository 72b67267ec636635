"""A stored checkpoint's tokenizer, or a small byte-level BPE with special tokens where the released one has them."""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .settings import BOS, EOS, PAD, Settings

UNKNOWN = 0

WORDS = (
    "Ġthe", "Ġcat", "Ġsat", "Ġon", "Ġmat", "Ġhello", "Ġvoice", "ing", "Ġspeech", "Ġweather", "Ġis", "Ġtoday", "Ġwhat",
    "Ġcan", "Ġyou", "Ġhelp", "Ġwith", "Ġassistant", "Ġplease", "Ġfunction",
)  # fmt: skip


def special_tokens(count: int) -> list[str]:
    """``<unk>``, ``<s>``, ``</s>``, then ``<SPECIAL_3>`` up to ``count`` tokens."""
    return ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, count))]


def grow_merges(vocab: dict[str, int], limit: int) -> list[tuple[str, str]]:
    """Merges that spell ``WORDS`` from the left, adding each new piece to ``vocab``; ``limit`` at most."""
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        piece = word[0]
        for character in word[1:]:
            if piece + character not in vocab and len(merges) < limit:
                merges.append((piece, character))
                vocab[piece + character] = len(vocab)
            piece += character
    return merges


def build(n_special: int, n_merges: int) -> Tokenizer:
    """Specials first, then the 256 byte characters, then the merged pieces."""
    specials = special_tokens(n_special)
    pieces = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = grow_merges(vocab, n_merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return tokenizer


def prepare(settings: Settings, folder: Path) -> Tokenizer:
    """The configuration's tokenizer, with its files in the new ``folder``."""
    if settings.checkpoint:
        folder.mkdir(parents=True)
        for path in settings.checkpoint_folder.glob("*token*.json"):
            shutil.copyfile(path, folder / path.name)
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = build(**settings.tokenizer)
    save(tokenizer, folder)
    return tokenizer


def roles(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens by role, as tokenizer_config.json names them."""
    ids = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNKNOWN}
    return {role: tokenizer.id_to_token(index) for role, index in ids.items()}


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """The three tokenizer files of a checkpoint."""
    from transformers import PreTrainedTokenizerFast

    named = roles(tokenizer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
    fast.save_pretrained(folder)
    whole: dict[str, Any] = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    text = json.dumps({role: {"content": token, **whole} for role, token in named.items()}, indent=2)
    (folder / "special_tokens_map.json").write_text(text + "\n", encoding="utf-8")
