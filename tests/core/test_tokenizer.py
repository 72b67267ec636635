"""Vocabularies: what is read from a checkpoint, what is refused, and the roles of ids."""

import json
import logging
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from voicechat_core.config import VoiceChatConfig
from voicechat_core.detokenizer import BYTE_OF
from voicechat_core.errors import CheckpointError, InputError
from voicechat_core.tokenizer import RnntVocabulary, SpecialIds, Tokenizer

FIXTURES = Path(__file__).parents[2] / "golden" / "fixtures"
CHECKPOINTS = sorted(FIXTURES.glob("*/checkpoint"))
TOKENIZERS = [Tokenizer.from_directory(path) for path in CHECKPOINTS]
PROMPT = "Be concise and answer in one sentence."


@pytest.fixture(params=CHECKPOINTS, ids=lambda path: path.parent.name)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    """Each golden checkpoint."""
    path: Path = request.param
    return path


@pytest.fixture
def config(checkpoint: Path) -> VoiceChatConfig:
    return VoiceChatConfig.from_file(checkpoint / "config.json")


@pytest.fixture
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_directory(checkpoint)


def library(checkpoint: Path) -> tokenizers.Tokenizer:
    """The same file read by the library alone."""
    return tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def edited(checkpoint: Path, folder: Path, **changes: object) -> Path:
    """``folder`` holding the checkpoint's tokenizer.json with top-level keys changed."""
    data = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8")) | changes
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


# --- the language model's tokenizer


def test_size_is_the_config_s_vocab_size(checkpoint: Path, config: VoiceChatConfig) -> None:
    tokenizer = Tokenizer.from_directory(checkpoint, config.text_config.vocab_size)
    assert tokenizer.size == len(tokenizer.vocab()) == config.text_config.vocab_size


def test_sizes_that_disagree_are_reported_with_the_file_and_both(checkpoint: Path, tokenizer: Tokenizer) -> None:
    for wrong in (tokenizer.size - 1, tokenizer.size + 1):
        with pytest.raises(CheckpointError, match=rf"tokenizer\.json has {tokenizer.size} tokens .* is {wrong}$"):
            Tokenizer.from_directory(checkpoint, wrong)


def test_alphabet_is_the_library_s_and_covers_every_byte() -> None:
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))


def test_vocab_holds_raw_strings_and_added_tokens(tokenizer: Tokenizer) -> None:
    vocab = tokenizer.vocab()
    assert sorted(vocab.values()) == list(range(tokenizer.size))
    assert (vocab["<s>"], vocab["</s>"], vocab["<SPECIAL_12>"]) == (1, 2, 12)
    assert set(BYTE_OF) < set(vocab)  # byte-level forms, not decoded text
    vocab.clear()
    assert tokenizer.token_id("<s>") == 1  # what was given is a copy


def test_token_id_of_an_absent_string_is_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_id("<SPECIAL_999>") is None


def test_encode_adds_nothing_and_decode_spells_specials_out(checkpoint: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(PROMPT) == library(checkpoint).encode(PROMPT, add_special_tokens=False).ids
    assert tokenizer.decode([1, *tokenizer.encode(" a , b . "), 12]) == "<s> a , b . <SPECIAL_12>"


def test_added_bos_of_a_template_is_left_out(checkpoint: Path, tmp_path: Path) -> None:
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    post = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    tokenizer = Tokenizer.from_directory(edited(checkpoint, tmp_path, post_processor=post))
    assert library(tmp_path).encode(PROMPT).ids[0] == 1
    assert tokenizer.prompt_ids(PROMPT, 1, 2)[:2] == [1, library(checkpoint).encode(PROMPT).ids[0]]


def test_truncation_and_padding_saved_in_the_file_do_not_apply(checkpoint: Path, tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.from_directory(edited(checkpoint, tmp_path, truncation=truncation))
    assert len(library(tmp_path).encode(PROMPT).ids) == 3
    assert tokenizer.decode(tokenizer.encode(PROMPT)) == PROMPT


@given(st.text())
def test_any_text_survives_encoding(text: str) -> None:
    for tokenizer in TOKENIZERS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("ids", [[-1], [10**9], [5, -1, 10**9]])
def test_ids_outside_the_vocabulary_are_no_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert tokenizer.decode(ids) == tokenizer.decode([5] if 5 in ids else [])


@pytest.mark.parametrize("text", ["\ud800", "say \udfff"])
def test_lone_surrogates_are_the_caller_s_mistake(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(InputError, match="lone surrogate"):
        tokenizer.encode(text)
    with pytest.raises(InputError, match="lone surrogate"):
        tokenizer.prompt_ids(text, 1, 2)


@pytest.mark.parametrize("content", [None, b"", b"{", b"{}", b"[]", b"\xff\xfe\x00", b'{"model": {"type": "BPE"}}'])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), decoders.WordPiece()])
def test_only_byte_level_tokenizers_are_accepted(checkpoint: Path, decoder: decoders.Decoder | None) -> None:
    backend = library(checkpoint)
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match="only ByteLevel is supported"):
        Tokenizer(backend, "here")


def test_ids_with_gaps_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    data = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    model = data["model"]
    model["vocab"]["never"] = max(model["vocab"].values()) + 2
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: the ids of its \d+ entries are not 0 to"):
        Tokenizer.from_directory(edited(checkpoint, tmp_path, model=model))


# --- the system prompt


@pytest.mark.parametrize("prompt", ["", " ", "\n\t ", "\u3000"])
def test_a_blank_prompt_takes_no_positions(tokenizer: Tokenizer, prompt: str) -> None:
    assert tokenizer.prompt_ids(prompt, 1, 2) == []


def test_a_prompt_is_bos_text_eos_and_not_stripped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.prompt_ids(f"  {PROMPT}\n", 1, 2)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids[1:-1]) == f"  {PROMPT}\n"


def test_prompt_ids_are_those_the_goldens_were_run_with(checkpoint: Path, tokenizer: Tokenizer) -> None:
    stage = mx.load(str(checkpoint.parent / "goldens" / "e2e_prompt.safetensors"))
    assert isinstance(stage, dict)
    ids = [int(token) for token in stage["prompt_ids"][0]]
    prompt = tokenizer.visible_text(ids, {1, 2})
    assert len(prompt) > 3
    assert tokenizer.prompt_ids(prompt, 1, 2) == ids


# --- roles


@pytest.mark.parametrize(("folder", "markers"), [("plain", (20, 21, 22)), ("grouped", (None, None, None))])
def test_function_markers_are_found_by_their_spelling(folder: str, markers: tuple[int | None, ...]) -> None:
    path = FIXTURES / folder / "checkpoint"
    roles = SpecialIds.of(Tokenizer.from_directory(path), VoiceChatConfig.from_file(path / "config.json"))
    assert (roles.call_start, roles.call_end, roles.response_end) == markers
    assert roles.hidden == {1, 2, 11, 12}


def test_function_markers_need_not_have_the_usual_ids(config: VoiceChatConfig) -> None:
    backend = library(FIXTURES / "grouped" / "checkpoint")
    size = backend.get_vocab_size()
    backend.add_special_tokens(["<SPECIAL_22>", "<SPECIAL_20>", "<SPECIAL_21>"])
    roles = SpecialIds.of(Tokenizer(backend), config)
    assert (roles.call_start, roles.call_end, roles.response_end) == (size + 1, size + 2, size)


def test_config_ids_rule_whatever_the_vocabulary_calls_them(tokenizer: Tokenizer, config: VoiceChatConfig) -> None:
    roles = SpecialIds.of(tokenizer, msgspec.structs.replace(config, bos_token_id=7, silence_token_id=9))
    assert (roles.bos, roles.eos, roles.pad, roles.silence) == (7, 2, 12, 9)


# --- the transcript's vocabulary


def with_pieces(config: VoiceChatConfig, pieces: tuple[str, ...] | None) -> VoiceChatConfig:
    return msgspec.structs.replace(config, rnnt_vocabulary=pieces)


def write_pieces(folder: Path, content: object) -> Path:
    (folder / "rnnt_tokenizer").mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "rnnt_tokenizer" / "vocab.json").write_text(text, encoding="utf-8")
    return folder


def test_pieces_of_the_config_come_first(tmp_path: Path, config: VoiceChatConfig) -> None:
    folder = write_pieces(tmp_path, ["other"] * config.rnnt_blank_id)
    vocabulary = RnntVocabulary.from_checkpoint(folder, config)
    assert vocabulary.enabled
    assert vocabulary.pieces == config.rnnt_vocabulary
    assert len(vocabulary.pieces) == config.rnnt_blank_id


def test_pieces_of_a_file_as_list_or_as_object(tmp_path: Path, config: VoiceChatConfig) -> None:
    pieces = [f"p{i}" for i in range(config.rnnt_blank_id)]
    for name, content in {"list": pieces, "object": {p: i for i, p in reversed(list(enumerate(pieces)))}}.items():
        (folder := tmp_path / name).mkdir()
        vocabulary = RnntVocabulary.from_checkpoint(write_pieces(folder, content), with_pieces(config, None))
        assert vocabulary.pieces == tuple(pieces)


@pytest.mark.parametrize("content", [None, [], {}])
def test_without_pieces_the_branch_is_off_and_says_so_once(
    tmp_path: Path, config: VoiceChatConfig, content: object, caplog: pytest.LogCaptureFixture
) -> None:
    if content is not None:
        write_pieces(tmp_path, content)
    with caplog.at_level(logging.WARNING):
        vocabulary = RnntVocabulary.from_checkpoint(tmp_path, with_pieces(config, None))
    assert not vocabulary.enabled
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert vocabulary.text([0, 1]) == ""


def test_an_empty_list_in_the_config_switches_the_branch_off(tmp_path: Path, config: VoiceChatConfig) -> None:
    folder = write_pieces(tmp_path, ["p"] * config.rnnt_blank_id)
    assert not RnntVocabulary.from_checkpoint(folder, with_pieces(config, ())).enabled


def test_a_length_other_than_the_blank_id_names_both(tmp_path: Path, config: VoiceChatConfig) -> None:
    folder = write_pieces(tmp_path, ["p"] * (config.rnnt_blank_id - 1))
    expected = rf"vocab\.json is {config.rnnt_blank_id - 1} but rnnt_blank_id is {config.rnnt_blank_id}"
    with pytest.raises(CheckpointError, match=expected):
        RnntVocabulary.from_checkpoint(folder, with_pieces(config, None))


@pytest.mark.parametrize(
    "content", ["{", "3", "null", [1, 2], {"a": 0, "b": 2}, {"a": 0, "b": 0}, {"a": "0"}, {"a": [0]}]
)
def test_a_vocabulary_file_that_is_neither_is_named(tmp_path: Path, config: VoiceChatConfig, content: object) -> None:
    with pytest.raises(CheckpointError, match=r"vocab\.json"):
        RnntVocabulary.from_checkpoint(write_pieces(tmp_path, content), with_pieces(config, None))


def test_special_pieces_and_language_tags() -> None:
    special = ["<unk>", "<pad>", "<s>", "</s>", "<en-US>", "<zho-Hans>", "<es-es>"]
    ordinary = ["▁it", "<", "<b>", "<EN-us>", "<en-US>s", "<e-US>", "<en-US>\n", "<0x41>", "<english-US>"]
    assert RnntVocabulary([*special, *ordinary]).special == set(range(len(special)))


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["▁What", "▁is", "<en-US>", "▁it", "?"], "What is it?"),
        (["<unk>", "▁", "a", "▁", "b", "▁"], "a b"),
        (["▁caf", "<0xC3>", "<0xA9>", "▁au"], "café au"),
        (["<0xE2>", "<en-US>", "<0x82>", "<0xAC>"], "€"),
        (["a", "<0xE2>", "<0x82>", "b", "<0xff>"], "a\ufffdb\ufffd"),
        (["▁naïve", "🙂"], "naïve🙂"),
    ],
)
def test_transcript_text(pieces: list[str], text: str) -> None:
    assert RnntVocabulary(pieces).text(range(len(pieces))) == text
    assert RnntVocabulary(pieces).text([-1, *range(len(pieces) + 2)]) == text
