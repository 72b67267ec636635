"""The two vocabularies: what the core reads from them, and that they are always the same."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from training import domain
from training.small import RNNT_VOCABULARY, TEXT_VOCABULARY, small_config
from training.vocabulary import CALL_PARTS, SPECIAL, rnnt_ids, rnnt_pieces, write_tokenizer
from voicechat_core.nn.char_table import CharTable
from voicechat_core.tokenizer import RnntVocabulary, SpecialIds, Tokenizer

ROOT = Path(__file__).parents[2]
TURNS = [*domain.finite_turns(held=None), *(domain.repeat(random.Random(i)) for i in range(100))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_directory(folder, TEXT_VOCABULARY)


def test_ids_of_the_roles_are_the_published_ones(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_id(token) for token in SPECIAL] == list(range(24))
    special = SpecialIds.of(tokenizer, small_config())
    assert (special.bos, special.eos, special.pad, special.silence) == (1, 2, 12, 11)
    assert (special.call_start, special.call_end, special.response_end) == (20, 21, 22)


def test_every_byte_has_an_id(tokenizer: Tokenizer) -> None:
    assert sorted(tokenizer.token_bytes(token) for token in range(24, 280)) == [bytes([b]) for b in range(256)]
    text = "Zürich 🙂 \x00 naïve\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_all_that_it_says_comes_back(tokenizer: Tokenizer) -> None:
    for turn in TURNS:
        for text in (turn.answer, *(turn.tool or ())):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert min(ids) >= 24  # no role is in a text


def test_a_call_and_its_response_take_few_frames(tokenizer: Tokenizer) -> None:
    spelled = [tuple(map(len, map(tokenizer.encode, turn.tool))) for turn in TURNS if turn.tool]
    assert max(call for call, _ in spelled) == 9
    assert max(response for _, response in spelled) <= 10
    call = domain.turns_of("what time is it")[0].tool
    assert call is not None
    assert [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(call[0])] == [
        "<TOOLCALL>", '[{"name": "', "get_time", '", "arguments": ', "{}}]", "</TOOLCALL>",
    ]  # fmt: skip


def test_the_speech_decoder_can_spell_every_id(tokenizer: Tokenizer) -> None:
    config = small_config()
    table = CharTable.from_vocab(
        tokenizer.vocab(),
        vocab_size=TEXT_VOCABULARY,
        char_vocab_size=config.tts_config.character_encoder.char_vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    assert table.lengths.min() >= 1
    assert table.lengths.max() == max(map(len, CALL_PARTS)) == 16


def test_transcripts_come_back() -> None:
    vocabulary = RnntVocabulary(rnnt_pieces())
    assert len(rnnt_pieces()) == len(set(rnnt_pieces())) == RNNT_VOCABULARY == small_config().rnnt_blank_id
    for turn in TURNS:
        ids = rnnt_ids(turn.user)
        assert vocabulary.text(ids) == turn.user
        assert sum(rnnt_pieces()[token].startswith("▁") for token in ids) == len(turn.user.split())
    assert vocabulary.text(rnnt_ids("quixotic zebra's jazz")) == "quixotic zebra's jazz"
    assert list(small_config(rnnt_pieces()).rnnt_vocabulary or ()) == rnnt_pieces()


def test_what_no_piece_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no transcript piece for a character of 'seven 7'"):
        rnnt_ids("seven 7")


def test_every_build_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from training.vocabulary import rnnt_pieces, write_tokenizer
write_tokenizer(Path({str(tmp_path)!r}))
print("|".join(rnnt_pieces()), end="")
"""
    environment = os.environ | {
        "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, cwd=ROOT)
    assert run.stdout.decode().split("|") == rnnt_pieces()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert _digest(folder / name) == _digest(tmp_path / name), name


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
