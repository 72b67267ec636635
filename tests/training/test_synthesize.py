"""Which sentences are spoken by whom, that an ended run goes on, and that a bank gives back what was put in."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from training import bank, domain, synthesize
from training.bank import Pcm
from training.recogniser import Score, edits, heard_words, most_ids
from training.synthesize import Sentence
from training.voices import trimmed


def tone(samples: int, cycle: float, strength: float = 0.3) -> Pcm:
    swept = np.sin(2 * np.pi * np.cumsum(np.linspace(0.5, 1.5, samples)) / cycle)
    return np.round(strength * 32767 * swept).astype(np.int16)


def test_voices_for_tests_train_nothing() -> None:
    trained = {sentence.voice for part in (synthesize.users, synthesize.rare, synthesize.kokoro) for sentence in part()}
    assert len(trained) == 3 + 1 + 21 + 1
    assert not trained & set(synthesize.TESTED)
    assert {sentence.voice for sentence in synthesize.test()} == set(synthesize.TESTED)


def test_no_held_out_turn_is_trained() -> None:
    for sentence in [*synthesize.users(), *synthesize.rare(), *synthesize.kokoro()]:
        turns = domain.turns_of(sentence.text)
        assert turns, sentence.text
        assert not all(map(domain.held_out, turns)), sentence.text


def test_each_voice_asks_its_share_and_any_part_is_a_fair_sample() -> None:
    asked = synthesize.users()
    assert Counter(sentence.voice for sentence in asked) == {v: sum(n) for v, n in synthesize.TRAINED.items()}
    assert len(synthesize.kokoro()) == 1500
    known = {turn.user for turn in domain.finite_turns()}
    assert known <= {sentence.text for sentence in [*asked, *synthesize.kokoro()]}
    fifth = asked[: len(asked) // 5]
    share = sum(s.voice == "heart:heart" for s in fifth) / len(fifth)
    assert share == pytest.approx(890 / len(asked), abs=0.03)
    assert synthesize.users() == asked


def test_every_training_voice_asks_the_rare_questions() -> None:
    asked = Counter((sentence.text, sentence.voice) for sentence in synthesize.rare())
    questions = {turn.user for kind in synthesize.RARE_KINDS for turn in domain.finite_turns(kind)}
    assert {text for text, _ in asked} == questions >= {"what time is it", "stop", "what is your name"}
    for text in questions:
        assert sum(count for (said, _), count in asked.items() if said == text) == 3 * 3 + 3 + 21 + 8


def test_every_test_voice_asks_for_tools_and_the_unknown() -> None:
    for voice in synthesize.TESTED:
        said = [sentence for sentence in synthesize.test() if sentence.voice == voice]
        turns = [domain.turns_of(sentence.text)[0] for sentence in said]
        assert sum(turn.tool is not None for turn in turns) == 12
        held = [sentence for sentence in said if sentence.split == "held"]
        assert Counter(domain.turns_of(s.text)[0].kind for s in held) == {"repeat": 16, "unknown": 10}
        assert all(domain.held_out(domain.turns_of(s.text)[0]) for s in held)


def test_the_answers() -> None:
    said = synthesize.assistant()
    trained, held = ([s for s in said if s.split == split] for split in ("train", "held"))
    assert not {s.text for s in trained} & {s.text for s in held}
    assert Counter(s.kind == "repeat" for s in held) == {True: 40, False: 20}
    repeated = [s.text for s in trained if s.kind == "repeat"]
    assert len(repeated) == len(set(repeated)) == 8000
    seeds = Counter(s.text for s in trained if s.kind not in ("repeat", "carrier", "list"))
    assert set(seeds.values()) == {4}
    assert seeds.keys() == domain.finite_answers().keys()
    assert not any(domain.held_out(domain.Turn("", s.text, None, s.kind)) for s in trained if s.kind != "unknown")


def test_a_chunk_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def spoken(sentence: Sentence) -> Pcm:
        made.append(sentence.text)
        return tone(2000 + 10 * len(made), 40)

    monkeypatch.setattr(synthesize, "question", spoken)
    (tmp_path / "parts").mkdir()
    chunks = [synthesize.users()[:3], synthesize.users()[3:5]]
    assert synthesize._make((tmp_path, "users", chunks[0])) == 2010 + 2020 + 2030
    assert synthesize._make((tmp_path, "users", chunks[0])) == 0
    assert made == [sentence.text for sentence in chunks[0]]
    assert synthesize._make((tmp_path, "users", chunks[1])) == 2040 + 2050
    monkeypatch.setattr(synthesize, "CHUNK", 3)
    assert synthesize.pack(tmp_path, "users", limit=3) == "users_train: 3 sentences, 3 of users"
    items, pieces = bank.read(tmp_path, "users_train")
    assert [item["text"] for item in items] == made[:3]
    assert [item["voice"] for item in items] == [sentence.voice for sentence in chunks[0]]
    assert [len(piece) for piece in pieces] == [2010, 2020, 2030]


def test_nothing_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no chunk of kokoro"):
        synthesize.pack(tmp_path, "kokoro", limit=3)


def test_flac_gives_the_samples_back_from_several_files(tmp_path: Path) -> None:
    said = [tone(20000 + 1000 * i, 20 + i) for i in range(6)]
    bank.write_flac(tmp_path, "a", 22050, [({"text": str(i)}, pcm) for i, pcm in enumerate(said)], 60000)
    files = sorted(file.name for file in tmp_path.glob("*.flac"))
    assert len(files) > 1
    assert all((tmp_path / file).stat().st_size < 60000 for file in files)
    items, pieces = bank.read(tmp_path, "a")
    assert [item["text"] for item in items] == list("012345")
    for piece, pcm in zip(pieces, said, strict=True):
        np.testing.assert_array_equal(piece, pcm)


@pytest.mark.parametrize("files", [1, 2])
def test_opus_keeps_every_sentence_in_its_place(tmp_path: Path, files: int) -> None:
    said = [tone(9000 + 777 * i, 25 + 3 * i) for i in range(5)]
    most = 16000
    bank.write_opus(tmp_path, "u", 16000, [({"text": str(i)}, pcm) for i, pcm in enumerate(said)], most, files)
    written = list(tmp_path.glob("*.ogg"))
    assert len(written) == files
    assert most / 2 < sum(file.stat().st_size for file in written) <= most
    items, pieces = bank.read(tmp_path, "u")
    assert [item["samples"] for item in items] == [len(pcm) for pcm in said]
    for piece, pcm in zip(pieces, said, strict=True):
        likeness = [np.corrcoef(np.roll(piece.astype(float), lag), pcm)[0, 1] for lag in (-3, 0, 3)]
        assert likeness[1] > 0.9
        assert likeness[1] == max(likeness)


def test_banks_are_joined(tmp_path: Path) -> None:
    said = {name: [tone(9000 + i, 40 + 9 * i) for i in range(n)] for name, n in (("x", 2), ("y", 3))}
    for name, pieces in said.items():
        bank.write_opus(tmp_path, name, 16000, [({"text": f"{name}{len(p)}"}, p) for p in pieces], 20000)
    assert bank.join(tmp_path, "xy", ["x", "y", "z"]) == 5
    items, pieces = bank.read(tmp_path, "xy")
    assert [item["text"] for item in items] == ["x9000", "x9001", "y9000", "y9001", "y9002"]
    apart = [piece for name in "xy" for piece in bank.read(tmp_path, name)[1]]
    for piece, other in zip(pieces, apart, strict=True):
        np.testing.assert_array_equal(piece, other)


def test_too_few_bytes_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bytes at compression level 1\.0, not 100"):
        bank.write_opus(tmp_path, "u", 16000, [({"text": "a"}, tone(16000, 30))], 100)
    assert not (tmp_path / "u.json").exists()


def test_trimming_leaves_what_was_asked() -> None:
    samples = np.zeros(1000)
    samples[400:600] = 0.5
    samples[100] = 0.004  # below the threshold
    kept = trimmed(samples, 1000, 0.02, 0.05, 0.08)
    assert len(kept) == 200 + 50 + 79
    np.testing.assert_array_equal(kept, samples[350:679])


@pytest.mark.parametrize(
    ("heard", "words"),
    [
        ("7 + 5 = 12.", "seven plus five is twelve"),
        ("7-5 is 2", "seven minus five is two"),
        ("It is 12:30.", "it is twelve thirty"),
        ("It is 10-30.", "it is ten thirty"),
        ("It's 1245", "it's twelve forty five"),
        ("It is 3:00", "it is three o'clock"),
        ("Dr. Silver,", "doctor silver"),
        ("OK.", "okay"),
        ("1-2-3-4-5", "one two three four five"),
        ("Nice to meet you, Sarah.", "nice to meet you sara"),
    ],
)
def test_what_is_heard_is_compared_as_words(heard: str, words: str) -> None:
    assert heard_words(heard) == words.split()


def test_word_error() -> None:
    assert edits(["a", "b", "c", "d"], ["a", "x", "c"]) == 2
    assert edits([], ["a"]) == 1
    score = Score()
    score.add("Seven plus five is twelve.", "7 plus 5 is 12")
    score.add("Tiny dragon.", "Tiny wagon now.")
    assert (score.words, score.edited, score.exact) == (7, 2, 1)
    assert score.as_dict() == {
        "sentences": 2,
        "word_error": 0.2857,
        "exact": 0.5,
        "wrong": [("Tiny dragon.", "Tiny wagon now.")],
    }


def test_a_recogniser_may_write_as_much_as_can_be_said() -> None:
    assert [most_ids(16000 * seconds) for seconds in (1, 4, 30, 90)] == [12, 48, 360, 360]
