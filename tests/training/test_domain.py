"""The domain: what is asked, what is answered, and what no training set may hold."""

import json
import random
import re
from collections import Counter

import pytest

from training import domain
from training.carriers import LETTERS, answer_words, carriers, lists
from training.domain import Turn, finite_turns, held_out, repeat, sample, share, system_prompt, turns_of
from training.unknown import UNKNOWN_ANSWER, questions

ALL = finite_turns(held=None)


def test_every_sum_and_difference_of_zero_to_ten_is_trained() -> None:
    said = {turn.user: turn.answer for turn in finite_turns()}
    words = domain.NUMBERS
    for a in range(11):
        for b in range(11):
            assert said[f"what is {words[a]} plus {words[b]}"].endswith(f" is {words[a + b]}.")
            if b <= a:
                assert said[f"what is {words[a]} minus {words[b]}"].endswith(f" is {words[a - b]}.")
    assert len(finite_turns("plus")) == 121
    assert len(finite_turns("minus")) == 66


@pytest.mark.parametrize(
    ("user", "answer"),
    [
        ("what is seven plus five", "Seven plus five is twelve."),
        ("what day comes after sunday", "Monday comes after Sunday."),
        ("what day comes before monday", "Sunday comes before Monday."),
        ("what is the opposite of closed", "The opposite of closed is open."),
        ("what color is the tomato", "The tomato is red."),
        ("count to four", "One, two, three, four."),
        ("what does the sheep say", "The sheep says baa."),
        ("who are you", "I am Micro, a tiny voice assistant."),
        ("my name is laura", "Nice to meet you, Laura."),
        ("what is the weather in my town", UNKNOWN_ANSWER),
        ("repeat after me little dragon", "Little dragon."),
        ("please say money", "Money."),
    ],
)
def test_answers(user: str, answer: str) -> None:
    assert {turn.answer for turn in turns_of(user)} == {answer}


def test_a_question_outside_the_domain_has_no_turn() -> None:
    assert turns_of("repeat after me elephant") == ()
    assert turns_of("please say") == ()
    assert turns_of("what is eleven plus one") == ()


def test_questions_are_transcripts_and_answers_are_text() -> None:
    for turn in [*ALL, *(repeat(random.Random(i)) for i in range(200))]:
        assert re.fullmatch(r"[a-z']+( [a-z']+)*", turn.user), turn.user
        assert re.fullmatch(r"[A-Z][A-Za-z', ]*[.!?]( [A-Z][A-Za-z', ]*[.!?])*", turn.answer), turn.answer


def test_a_question_has_one_answer_unless_a_tool_gives_it() -> None:
    answers: dict[str, set[str]] = {}
    for turn in ALL:
        if turn.tool is None:
            answers.setdefault(turn.user, set()).add(turn.answer)
        else:
            assert turn.user not in answers
    assert {user: given for user, given in answers.items() if len(given) > 1} == {}


def test_tool_answers_say_what_the_tool_said() -> None:
    tools = Counter()
    for turn in ALL:
        if turn.tool is None:
            continue
        call, response = turn.tool
        ((name, arguments),) = [
            (entry["name"], entry["arguments"])
            for entry in json.loads(call.removeprefix("<TOOLCALL>").removesuffix("</TOOLCALL>"))
        ]
        (result,) = json.loads(response.removeprefix("<TOOL_RESPONSE>").removesuffix("</TOOL_RESPONSE>"))
        tools[name] += 1
        assert result in turn.answer
        if name == "get_weather":
            assert turn.user == f"what is the weather in {arguments['city'].lower()}"
            assert turn.answer == f"It is {result} in {arguments['city']}."
        elif name == "roll_dice":
            assert arguments["sides"] in (6, 12, 20)
            assert domain.NUMBERS.index(result) <= arguments["sides"]
        else:
            assert arguments == {}
    assert tools == {"get_time": 2 * 48, "roll_dice": 2 * 6 + 6 + 12 + 20 - 6 + 6, "get_weather": 30}


def test_articles_of_dice() -> None:
    said = {turn.answer for turn in finite_turns("dice")}
    assert {"You rolled an eight.", "You rolled an eleven.", "You rolled an eighteen.", "You rolled a one."} <= said
    assert "You rolled a eight." not in said


def test_what_is_held_out() -> None:
    counts = {kind: len(finite_turns(kind, True)) for kind in domain.FINITE if finite_turns(kind, True)}
    assert counts == {"time": 24, "weather": 8, "unknown": 49}
    assert len(finite_turns("unknown")) == 201
    assert {turn.user for turn in finite_turns("weather")} == {
        f"what is the weather in {c.lower()}" for c in domain.CITIES
    }
    assert len(domain.finite_answers(held=True)) == 20
    assert not domain.finite_answers(held=True).keys() & domain.finite_answers().keys()


def test_share_is_the_same_everywhere_and_looks_uniform() -> None:
    assert share("It is rainy in Paris.") == pytest.approx(0.5, abs=0.5)
    assert share("a") == int.from_bytes(bytes.fromhex("ca978112ca1b"), "big") / 2**48
    shares = sorted(share(str(i)) for i in range(1000))
    assert max(abs(value - i / 1000) for i, value in enumerate(shares)) < 0.05


def test_samples_are_never_held_out_and_come_by_weight() -> None:
    rng = random.Random(0)
    turns = [sample(rng) for _ in range(6000)]
    assert not any(map(held_out, turns))
    counts = Counter(turn.kind for turn in turns)
    total = sum(domain.WEIGHTS.values())
    for kind, weight in domain.WEIGHTS.items():
        assert counts[kind] / 6000 == pytest.approx(weight / total, abs=0.02), kind
    assert 1 - counts["repeat"] / 6000 > 0.5


def test_every_question_of_a_kind_is_as_likely_however_many_answers_it_has() -> None:
    rng = random.Random(1)
    counts = Counter(sample(rng, "dice").user for _ in range(2000))
    assert set(counts) == {
        "roll a dice", "please roll a dice", "roll a six sided dice", "roll a twelve sided dice",
        "roll a twenty sided dice",
    }  # fmt: skip
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_the_same_seed_gives_the_same_turns() -> None:
    def drawn(seed: int) -> list[Turn]:
        rng = random.Random(seed)
        return [sample(rng) for _ in range(50)]

    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


def test_repetitions() -> None:
    rng = random.Random(2)
    trained = [repeat(rng) for _ in range(3000)]
    assert {len(turn.answer.split()) for turn in trained} == {1, 2, 3}
    assert {word.strip(".").lower() for turn in trained for word in turn.answer.split()} == set(domain.SAID_WORDS)
    held = domain.held_out_repeats(40)
    assert len({turn.answer for turn in held}) == 40
    assert all(map(held_out, held))
    assert not {turn.answer for turn in held} & {turn.answer for turn in trained}
    assert domain.held_out_repeats(10) == held[:10]


def test_system_prompts_give_the_name_that_they_say() -> None:
    rng = random.Random(3)
    drawn = [system_prompt(rng) for _ in range(4000)]
    for prompt, name in drawn:
        assert (name in prompt) or name == "Micro", prompt
        assert all(other not in prompt for other in domain.NAMES if other != name), prompt
        assert "{" not in prompt
    assert {name for _, name in drawn} == {"Micro", *domain.NAMES}
    assert sum(not prompt for prompt, _ in drawn) / 4000 == pytest.approx(0.52, abs=0.04)
    assert sample(rng, "name", "Emma").answer == "I am Emma, a tiny voice assistant."


def test_carriers_say_every_word_in_every_place() -> None:
    words = set(answer_words()) - LETTERS
    assert len(words) > 170
    sentences = carriers(rounds=5)
    assert len(sentences) == 5 * len(words)
    plain = [[word.strip(".,!?").lower() for word in sentence.split()] for sentence in sentences]
    for word in words:
        assert sum(word.lower() in sentence for sentence in plain) >= 8, word
        assert any(sentence[-1] == word.lower() for sentence in plain), word
    assert len({word.lower() for word in words} - {sentence[0] for sentence in plain}) <= 10
    assert not {"Am", "A", "An"} & {sentence.split()[0] for sentence in sentences}
    assert carriers(rounds=2) == sentences[: 2 * len(words)]


def test_unknown_questions_are_unknown() -> None:
    asked = list(questions())
    assert len(asked) == len(set(asked)) >= 240
    known = {turn.user for turn in ALL if turn.kind != "unknown"}
    assert not known & set(asked)
    inside = {word for user in known for word in user.split()}
    assert sum(any(word in inside for word in user.split()[-1:]) for user in asked) > 40  # not told by odd words alone


def test_lists_are_short_all_different_and_put_words_beside_each_other() -> None:
    sentences = lists(3000)
    assert len(set(sentences)) == 3000
    assert lists(3000) == sentences
    assert lists(100) == sentences[:100]
    spoken = [sentence.removesuffix(".").replace(",", "").split() for sentence in sentences]
    assert {len(words) for words in spoken} == {2, 3, 4, 5}
    known = {word.lower() for word in answer_words()} - {word.lower() for word in LETTERS}
    assert {word.lower() for words in spoken for word in words} == known
    firsts, lasts = ({words[place].lower() for words in spoken} for place in (0, -1))
    assert firsts == lasts == known
    assert 0.25 < sum("," in sentence for sentence in sentences) / 3000 < 0.42
