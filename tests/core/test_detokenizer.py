"""Incremental text: the joined deltas are the text of the whole list, whatever the ids."""

import json
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from voicechat_core.detokenizer import IncrementalDetokenizer, IncrementalTranscript, surface_bytes, text_of
from voicechat_core.tokenizer import RnntVocabulary, Tokenizer

CHECKPOINTS = sorted((Path(__file__).parents[2] / "golden" / "fixtures").glob("*/checkpoint"))
HIDDEN = frozenset({1, 2, 11, 12})
# Spellings the byte alphabet has only partly, wholly, or wholly but meaning bytes that are no UTF-8.
ADDED = ["<SPECIAL_20>", "<SPECIAL_21>", " spaced out", "日本", "é", "naïve", "aĠb", "🙂"]

STRINGS = [
    "The capital of France is Paris.",
    "e\u0301 o\u0308\u0323",  # combining marks
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇫🇷",  # joiners, modifiers, flags
    "漢字かな交じり文 한국어 ไทย",
    "a\ufffdb\ufffd",  # real replacement characters
    "\x00\x7f\u0085\u2028\U0010ffff",
    "<SPECIAL_20><TOOLCALL>[]</TOOLCALL><SPECIAL_21>",
]
# Byte sequences on which UTF-8 decoders have been known to differ.
MALFORMED = [
    b"\x80", b"\xbf\xbf", b"\xc3", b"\xc3A", b"\xc0\x80", b"\xe2\x82", b"\xe2\x82A", b"\xe2\x82\xe2\x82\xac",
    b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xed\xbf\xbf", b"\xf0\x9f\x99", b"\xf0\x9f\x99\xf0", b"\xf0\x80\x80\x80",
    b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80", b"\xff\xfe", b"\xef\xbf\xbd", b"\xef\xbf", b"\xf0\x9f<",
]  # fmt: skip


@cache
def library(index: int) -> tokenizers.Tokenizer:
    """A fixture tokenizer with more added tokens, as the library sees it."""
    backend = tokenizers.Tokenizer.from_file(str(CHECKPOINTS[index] / "tokenizer.json"))
    backend.add_tokens(ADDED)
    return backend


@cache
def ours(index: int) -> Tokenizer:
    return Tokenizer(library(index))


@cache
def plain(index: int) -> Tokenizer:
    """The fixture as it is: with ``ADDED``'s é, which is the byte E9 to the library as well, é would not survive."""
    return Tokenizer.from_directory(CHECKPOINTS[index])


def byte_ids(index: int, data: bytes) -> list[int]:
    """``data`` as one token a byte."""
    by_bytes = {surface_bytes(string): token for string, token in ours(index).vocab().items() if len(string) == 1}
    return [by_bytes[bytes([byte])] for byte in data]


def deltas(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def check(index: int, ids: list[int]) -> None:
    """One by one, at once, and by the library: one text."""
    expected = library(index).decode([token for token in ids if token >= 0], skip_special_tokens=False)
    assert ours(index).decode(ids) == expected
    assert "".join(deltas(IncrementalDetokenizer(ours(index).token_bytes), ids)) == expected


indices = st.integers(0, len(CHECKPOINTS) - 1)
any_ids = st.lists(st.integers(-1, library(0).get_vocab_size() + 60), max_size=40)


@pytest.mark.parametrize("index", range(len(CHECKPOINTS)))
@pytest.mark.parametrize("text", STRINGS)
def test_known_strings(index: int, text: str) -> None:
    check(index, ours(index).encode(text))
    check(index, byte_ids(index, text.encode()))
    assert "".join(deltas(IncrementalDetokenizer(plain(index).token_bytes), plain(index).encode(text))) == text


@pytest.mark.parametrize("data", MALFORMED)
@pytest.mark.parametrize("around", [b"", b"z", "é".encode()])
def test_malformed_bytes(data: bytes, around: bytes) -> None:
    check(0, byte_ids(0, around + data + around))
    marker = ours(0).token_id("<SPECIAL_20>")
    assert marker is not None
    check(0, [marker, *byte_ids(0, data), marker])


@settings(max_examples=300)
@given(indices, st.text())
def test_any_string(index: int, text: str) -> None:
    ids = plain(index).encode(text)
    assert "".join(deltas(IncrementalDetokenizer(plain(index).token_bytes), ids)) == text


@settings(max_examples=500)
@given(indices, any_ids)
def test_any_ids(index: int, ids: list[int]) -> None:
    check(index, ids)


@settings(max_examples=500)
@given(indices, st.binary(max_size=24))
def test_any_bytes(index: int, data: bytes) -> None:
    check(index, byte_ids(index, data))


@given(any_ids, st.sets(st.integers(0, 350)))
@example([1, 12, 300, 2], HIDDEN)
def test_hidden_ids_are_as_if_never_pushed(ids: list[int], hidden: set[int]) -> None:
    tokenizer = ours(0)
    joined = "".join(deltas(IncrementalDetokenizer(tokenizer.token_bytes, hidden), ids))
    assert joined == tokenizer.visible_text(ids, hidden)
    assert joined == tokenizer.decode([token for token in ids if token not in hidden])


def test_a_character_waits_for_its_last_token_across_hidden_ones() -> None:
    first, second, third = byte_ids(0, "€".encode())
    detokenizer = IncrementalDetokenizer(ours(0).token_bytes, HIDDEN)
    assert deltas(detokenizer, [first, 12, second, 12, third, 12]) == ["", "", "", "", "€", "", ""]


BEGIN = 1
TURNS = [
    (["Two.", BEGIN, "Five."], "Two. Five."),
    (["Two. ", BEGIN, "Five."], "Two. Five."),
    (["Two.", BEGIN, "\nFive."], "Two.\nFive."),
    ([BEGIN, "Two.", 2, 12, BEGIN, 12, BEGIN, "Five", "."], "Two. Five."),
    (["Two", 12, 11, "."], "Two."),
    (["Two.", BEGIN], "Two."),
    ([BEGIN, BEGIN], ""),
]


def turns_of(parts: list[str | int]) -> list[int]:
    return [*chain.from_iterable([part] if isinstance(part, int) else plain(0).encode(part) for part in parts)]


@pytest.mark.parametrize(("parts", "text"), TURNS)
def test_a_space_stands_between_turns(parts: list[str | int], text: str) -> None:
    ids = turns_of(parts)
    assert "".join(deltas(IncrementalDetokenizer(plain(0).token_bytes, HIDDEN, BEGIN), ids)) == text
    assert plain(0).visible_text(ids, HIDDEN, BEGIN) == text


def test_a_turn_begins_with_a_character_of_its_own() -> None:
    detokenizer = IncrementalDetokenizer(ours(0).token_bytes, HIDDEN, BEGIN)
    lead, rest = byte_ids(0, "é".encode())
    assert deltas(detokenizer, [lead, BEGIN, rest]) == ["", "\ufffd", " \ufffd", ""]


@given(any_ids, any_ids)
def test_a_place_between_turns_is_restored(past: list[int], mine: list[int]) -> None:
    first = IncrementalDetokenizer(ours(0).token_bytes, HIDDEN, BEGIN)
    for token in [*past, BEGIN]:
        first.push(token)
    second = IncrementalDetokenizer(ours(0).token_bytes, HIDDEN, BEGIN).restore(json.loads(json.dumps(first.saved())))
    assert deltas(second, mine) == deltas(first, mine)
    assert first.text == second.text == ours(0).visible_text([*past, BEGIN, *mine], HIDDEN, BEGIN)


@given(st.lists(st.lists(st.integers(13, 300), max_size=6), max_size=6))
def test_turns_are_texts_of_their_own(turns: list[list[int]]) -> None:
    """Each turn's text as if it were alone; where one meets another, a space unless one of both has one."""
    whole = ""
    for text in map(ours(0).decode, turns):
        meet = whole and text and not whole[-1].isspace() and not text[0].isspace()
        whole += f" {text}" if meet else text
    ids = [*chain.from_iterable([BEGIN, *turn] for turn in turns)]
    assert ours(0).visible_text(ids, HIDDEN, BEGIN) == whole


def test_function_markers_are_spelled_out_on_both_channels() -> None:
    tokenizer = ours(0)
    start, end = tokenizer.token_id("<SPECIAL_20>"), tokenizer.token_id("<SPECIAL_21>")
    assert start is not None
    assert end is not None
    ids = [12, start, 12, *tokenizer.encode("[{}]"), end, 12, 1, 2, 11]
    assert tokenizer.visible_text(ids, HIDDEN) == "<SPECIAL_20>[{}]<SPECIAL_21>"


def test_finish_ends_a_text_and_the_next_one_starts_clean() -> None:
    detokenizer = IncrementalDetokenizer(ours(0).token_bytes)
    lead, *rest = byte_ids(0, "é".encode())
    assert deltas(detokenizer, [lead]) == ["", "\ufffd"]
    assert deltas(detokenizer, rest) == ["\ufffd", ""]
    assert deltas(detokenizer, [lead, *rest]) == ["", "é", ""]


@given(any_ids, any_ids, any_ids)
def test_a_restored_place_is_independent(past: list[int], mine: list[int], yours: list[int]) -> None:
    tokenizer = ours(0)
    first = IncrementalDetokenizer(tokenizer.token_bytes)
    start = "".join(map(first.push, past))
    second = IncrementalDetokenizer(tokenizer.token_bytes).restore(json.loads(json.dumps(first.saved())))
    assert first.text == second.text == start
    assert start + "".join(deltas(first, mine)) == tokenizer.decode(past + mine)
    assert start + "".join(deltas(second, yours)) == second.text == tokenizer.decode(past + yours)
    assert first.text == tokenizer.decode(past + mine)


def test_at_most_three_bytes_wait() -> None:
    """What a push leaves behind does not grow: no token sequence makes later pushes dearer."""
    detokenizer = IncrementalDetokenizer(ours(0).token_bytes)
    for token in byte_ids(0, b"".join(MALFORMED) * 50):
        detokenizer.push(token)
        assert len(detokenizer._utf8.getstate()[0]) <= 3


# --- the transcript

PIECES = ["<unk>", "▁What", "▁is", "<en-US>", "▁it", "?", "▁", "a", "\u00a0", "▁▁b▁", "<0xE2>", "<0x82>", "<0xAC>", "é"]
VOCABULARY = RnntVocabulary(PIECES)
frames_of_labels = st.lists(st.lists(st.integers(-1, len(PIECES) + 1), max_size=10), max_size=20)


def said(frames: list[list[int]]) -> list[str | None]:
    transcript = IncrementalTranscript(VOCABULARY.token_bytes)
    return [*map(transcript.push, frames), transcript.finish()]


def test_transcript_deltas_and_no_event_for_a_tag() -> None:
    assert said([[1], [2], [3], [4], [5]]) == ["What", " is", None, " it", "?", None]


def test_several_labels_in_a_frame_are_one_delta() -> None:
    assert said([[], [1, 2], [3], [4, 5]]) == [None, "What is", None, " it?", None]


def test_whitespace_waits_and_is_stripped_at_both_ends() -> None:
    assert said([[6], [6, 8], [1], [6], [8], [2], [6]]) == [None, None, "What", None, None, " \u00a0 is", None, None]


def test_an_unfinished_character_waits_and_is_replaced_at_the_end() -> None:
    assert said([[7, 10], [11], [12], [10]]) == ["a", None, "€", None, "\ufffd"]
    assert said([[7, 10], [11], [7]]) == ["a", None, "\ufffda", None]


def test_text_read_before_anything_is_said_changes_nothing() -> None:
    transcript = IncrementalTranscript(VOCABULARY.token_bytes)
    assert transcript.text == ""
    assert transcript.push([1]) == "What"
    assert transcript.text == "What"


@settings(max_examples=300)
@given(frames_of_labels)
def test_deltas_join_to_the_whole_transcript(frames: list[list[int]]) -> None:
    transcript = IncrementalTranscript(VOCABULARY.token_bytes)
    joined, labels = "", []
    for frame in frames:
        labels += frame
        delta = transcript.push(frame)
        assert delta != ""
        joined += delta or ""
        assert transcript.text == joined
        whole = VOCABULARY.text(labels)
        assert whole.startswith(joined)
        assert whole.removeprefix(joined).strip() in ("", "\ufffd")  # at most the unfinished character is held back
    joined += transcript.finish() or ""
    assert joined == transcript.text == VOCABULARY.text(labels)
    assert joined == text_of(map(VOCABULARY.token_bytes, labels)).strip()


@given(frames_of_labels, frames_of_labels)
def test_a_transcript_s_restored_place_is_independent(past: list[list[int]], mine: list[list[int]]) -> None:
    first = IncrementalTranscript(VOCABULARY.token_bytes)
    for frame in past:
        first.push(frame)
    before, second = first.text, IncrementalTranscript(VOCABULARY.token_bytes)
    second.restore(json.loads(json.dumps(first.saved())))
    for frame in mine:
        second.push(frame)
    second.finish()
    assert second.text == VOCABULARY.text(chain.from_iterable(past + mine))
    assert first.text == before
