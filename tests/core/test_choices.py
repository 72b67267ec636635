"""Choices that turned out differently, with NVIDIA's margin at each place."""

import numpy as np

from voicechat_core.choices import every_flip, first_flip

CODES = np.arange(2 * 3).reshape(1, 2, 3)
GOLDEN = {"step_codes": CODES, "step_code_margin": CODES / 10.0}


def test_nothing_to_say() -> None:
    assert first_flip("step_codes", GOLDEN, GOLDEN) == ""
    assert every_flip("step_codes", GOLDEN, GOLDEN) == "0 of 6 choices differ"
    for note in (first_flip, every_flip):
        assert note("hidden", {"hidden": np.ones(3)}, {"hidden": np.zeros(3)}) == ""


def test_every_place_has_its_margin() -> None:
    ours = {"step_codes": CODES.copy()}
    ours["step_codes"][0, 0, 2] = ours["step_codes"][0, 1, 1] = 9
    assert every_flip("step_codes", ours, GOLDEN) == "2 of 6 choices differ: [0, 0, 2] by 0.2, [0, 1, 1] by 0.4"
    assert first_flip("step_codes", ours, GOLDEN) == "from [0, 0, 2] on, where NVIDIA's choice is ahead by 0.2"


def test_without_nvidias_margin_ours_is_told_or_none() -> None:
    golden, ours = {"codes": CODES}, {"codes": CODES + 1, "code_margin": CODES / 10.0}
    assert first_flip("codes", ours, golden) == "from [0, 0, 0] on, where our choice is ahead by 0"
    assert first_flip("codes", {"codes": CODES + 1}, golden) == "from [0, 0, 0] on"
    assert every_flip("codes", {"codes": np.where(CODES == 4, 9, CODES)}, golden) == "1 of 6 choices differ: [0, 1, 1]"


def test_the_largest_logit_is_a_choice() -> None:
    golden = {"text_logits": np.array([[[0.0, 2.0, 1.5], [3.0, 1.0, 0.0]]])}
    ours = {"text_logits": np.array([[[0.0, 1.7, 1.8], [1.1, 1.0, 0.0]]])}
    assert every_flip("text_logits", ours, golden) == "1 of 2 choices differ: [0, 0] by 0.5"


def test_long_lists_are_cut() -> None:
    golden = {"step_codes": np.zeros((1, 1, 50), int), "step_code_margin": np.ones((1, 1, 50))}
    note = every_flip("step_codes", {"step_codes": np.ones((1, 1, 50), int)}, golden)
    assert note.startswith("50 of 50 choices differ: [0, 0, 0] by 1, ")
    assert note.endswith("[0, 0, 19] by 1, and 30 more")
