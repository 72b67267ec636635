"""The character table against examples written out by hand, and the encoder's rules about masks and ids."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from voicechat_core.config import CharacterEncoderConfig
from voicechat_core.errors import CheckpointError, ConfigError, InputError
from voicechat_core.nn.char_encoder import CharAwareSubwordEncoder, soft_cap
from voicechat_core.nn.char_table import CharTable

TOY = ["<unk>", "<s>", "</s>", "a", "b", "Ġ", "c", "ab", "Ġa", "<X>", "zz"]


def toy_table(tokens: list[str] = TOY, **changes: int) -> CharTable:
    sizes = {"vocab_size": len(tokens), "char_vocab_size": 5, "bos_token_id": 1, "eos_token_id": 2} | changes
    return CharTable.from_vocab({token: i for i, token in enumerate(tokens)}, **sizes)


def spelling(table: CharTable, number: int) -> tuple[int, ...]:
    characters, lengths = table.rows(np.array([number]))
    return tuple(characters[0, : lengths[0]].tolist())


def test_toy_vocabulary() -> None:
    table = toy_table()
    assert [spelling(table, TOY.index(c)) for c in ("a", "b", "Ġ", "c")] == [(0,), (1,), (2,), (3,)]
    assert spelling(table, TOY.index("ab")) == (0, 1)
    assert spelling(table, TOY.index("Ġa")) == (2, 0)
    assert spelling(table, TOY.index("<X>")) == spelling(table, TOY.index("zz")) == ()
    assert spelling(table, len(TOY)) == (4,)
    assert len(table) == 12
    assert table.padding == 4


def test_characters_are_numbered_by_id_not_by_order_in_the_vocabulary() -> None:
    table = CharTable.from_vocab(
        {"b": 1, "ba": 2, "a": 0}, vocab_size=3, char_vocab_size=3, bos_token_id=0, eos_token_id=1
    )
    assert spelling(table, 2) == (1, 0)


def test_flags() -> None:
    table = toy_table([*TOY[:-1], "▁z"])
    #                                        <unk> <s> </s> a b Ġ c ab Ġa <X> ▁z none
    assert table.is_continuation.tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    assert table.special_flags.tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0]
    # The last flag serves all ids from there on, so eos as the last token has no flag of its own.
    assert toy_table(eos_token_id=10).special_flags.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]


def test_rows_are_padded_with_the_padding_character() -> None:
    characters, lengths = toy_table().rows(np.array([3, 8, 9]))
    assert characters.tolist() == [[0, 4], [2, 0], [4, 4]]
    assert lengths.tolist() == [1, 2, 0]


@given(st.integers(1, 40))
def test_blocks_hold_every_id_once_and_one_length(limit: int) -> None:
    table = toy_table()
    blocks = list(table.blocks(limit))
    assert sorted(np.concatenate(blocks).tolist()) == list(range(12))
    for ids in blocks:
        lengths = set(table.lengths[ids].tolist())
        assert len(lengths) == 1
        assert len(ids) == 1 or len(ids) * max(lengths) <= limit


@pytest.mark.parametrize(
    ("vocab", "size", "error", "words"),
    [
        ({"a": 0, "b": 2}, 2, CheckpointError, "'b' has id 2, outside vocab_size 2"),
        ({"a": 0, "b": 2}, 3, CheckpointError, "2 tokens but vocab_size 3; no token has id 1"),
        ({"a": 0, "b": 0}, 2, CheckpointError, "'a' and 'b' both have id 0"),
        ({"a": -1, "b": 0}, 2, CheckpointError, "'a' has id -1"),
        ({"a": 0, "bc": 1}, 2, ConfigError, "char_vocab_size is 3 .* 1 one-character tokens"),
        ({"a": 0, "b": 1, "c": 2}, 3, ConfigError, "char_vocab_size is 3 .* 3 one-character tokens"),
    ],
)
def test_wrong_vocabulary(vocab: dict[str, int], size: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        CharTable.from_vocab(vocab, vocab_size=size, char_vocab_size=3, bos_token_id=0, eos_token_id=1)


WIDTH = 16
SMALL = CharacterEncoderConfig(
    hidden_size=WIDTH, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=6, char_vocab_size=5
)


@pytest.fixture(scope="module")
def encoder() -> CharAwareSubwordEncoder:
    mx.random.seed(0)
    module = CharAwareSubwordEncoder(SMALL, WIDTH, len(TOY))
    table = toy_table()
    module.subword_flag_emb.is_continuation = mx.array(table.is_continuation)
    module.bos_eos_emb.special_flags = mx.array(table.special_flags)
    return module


def close(a: mx.array, b: mx.array) -> bool:
    """Equal but for float32 sums in another order."""
    return bool(mx.allclose(a, b, rtol=1e-5, atol=1e-6))


def test_a_vector_does_not_depend_on_its_neighbours(encoder: CharAwareSubwordEncoder) -> None:
    table, ids = toy_table(), np.array([[3, 8, 7, 12 - 1]])
    together = encoder(ids, np.ones(ids.shape, bool), table)
    for i in range(ids.shape[1]):
        assert close(together[:, i : i + 1], encoder(ids[:, i : i + 1], np.ones((1, 1), bool), table))


def test_masked_positions_keep_their_flags(encoder: CharAwareSubwordEncoder) -> None:
    ids = np.array([[1, 3, 7]])
    vectors = encoder(ids, np.array([[False, True, False]]), toy_table())
    flags = encoder.subword_flag_emb.cont_emb.weight, encoder.bos_eos_emb.special_emb.weight
    assert close(vectors[0, 0], flags[0][0] + flags[1][1])
    assert close(vectors[0, 2], flags[0][1] + flags[1][0])
    assert not close(vectors[0, 1], flags[0][1] + flags[1][0])


def test_nothing_spelt_is_exactly_zero(encoder: CharAwareSubwordEncoder) -> None:
    vectors = encoder(np.array([[1, 3]]), np.zeros((1, 2), bool), toy_table())
    assert mx.array_equal(vectors, mx.zeros((1, 2, WIDTH)))


def test_a_token_without_characters_is_its_flags(encoder: CharAwareSubwordEncoder) -> None:
    table = toy_table()
    assert mx.array_equal(encoder.encode(np.array([9, 3, 7]), table)[0], mx.zeros((WIDTH,)))
    assert mx.array_equal(encoder.encode(np.array([9]), table), mx.zeros((1, WIDTH)))


def test_table_equals_single_vectors(encoder: CharAwareSubwordEncoder) -> None:
    table, ids = toy_table(), np.arange(12)[None]
    assert close(encoder.table(table), encoder(ids, np.ones(ids.shape, bool), table)[0])


@pytest.mark.parametrize("number", [-1, 12])
def test_id_out_of_range(encoder: CharAwareSubwordEncoder, number: int) -> None:
    with pytest.raises(InputError, match=str(number)):
        encoder(np.array([[number]]), np.ones((1, 1), bool), toy_table())


def test_check_names_the_flag_that_differs(encoder: CharAwareSubwordEncoder) -> None:
    encoder.check(toy_table())
    with pytest.raises(CheckpointError, match=r"is_continuation\[10\] is 1 but the tokenizer gives 0"):
        encoder.check(toy_table([*TOY[:-1], "<z"]))
    with pytest.raises(CheckpointError, match=r"special_flags\[2\] is 2 but the tokenizer gives 0"):
        encoder.check(toy_table(eos_token_id=4))


def test_soft_cap_keeps_small_scores_and_bounds_large_ones() -> None:
    capped = np.array(soft_cap(mx.array([-1000.0, -50.0, 0.01, 50.0]), 50.0))
    assert np.allclose(capped, [-50, -50 * np.tanh(1), 0.01, 50 * np.tanh(1)], rtol=1e-6)
