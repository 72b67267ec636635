"""Prompts of an exact length."""

import pytest

from tests.bench.prompts import prompt_of


def positions(text: str) -> int:
    """Each pair of letters is a token, as is what is left of a word; and two more stand around them."""
    return 2 + sum((len(word) + 1) // 2 for word in text.split())


def test_exactly_so_many_and_another_for_each_seed() -> None:
    one, again, other = (prompt_of(170, positions, seed) for seed in (1, 1, 2))
    assert positions(one) == positions(other) == 170
    assert one == again != other


def test_what_cannot_be_reached() -> None:
    with pytest.raises(ValueError, match="no text of 7 positions was found; 6 were reached"):
        prompt_of(7, lambda text: 2 * (len(text) > 0) + 4 * (len(text.split()) > 1) if len(text.split()) < 3 else 9, 0)
