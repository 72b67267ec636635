"""Banks of a few sentences, for a run in small: ``python -m training.few --out DIR``.

They are the first sentences of those that are really made, by every synthesiser, some of them held out.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from training import bank, synthesize
from training.bank import Pcm
from training.synthesize import Sentence

__all__ = ["make"]

ANSWERS, HELD = 12, 3
EACH = 2  # questions of each synthesiser to train on
MOST_BYTES = 10**9  # one file

Speaks = Callable[[Sentence], Pcm]


def make(folder: Path, question: Speaks = synthesize.question, answer: Speaks = synthesize.answer) -> None:
    """The banks ``assistant``, ``users_train`` and ``users_test``, said by ``question`` and ``answer``."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = list(_of_each([*synthesize.users(), *synthesize.kokoro()], EACH, _synthesiser))
    tested = list(_of_each(synthesize.test(), 1, lambda sentence: sentence.voice))
    _write(folder, "assistant", synthesize.ANSWER_RATE, _answers(), answer)
    _write(folder, "users_train", synthesize.USER_RATE, asked, question)
    _write(folder, "users_test", synthesize.USER_RATE, tested, question)


def _answers() -> list[Sentence]:
    known = synthesize.assistant()
    trained, held = ([s for s in known if s.split == split] for split in ("train", "held"))
    return trained[:ANSWERS] + held[:HELD]


def _synthesiser(sentence: Sentence) -> str:
    return sentence.voice.split(":")[0]


def _of_each(sentences: Iterable[Sentence], most: int, name: Callable[[Sentence], str]) -> Iterator[Sentence]:
    """The first ``most`` of every name."""
    taken: dict[str, int] = {}
    for sentence in sentences:
        taken[name(sentence)] = taken.get(name(sentence), 0) + 1
        if taken[name(sentence)] <= most:
            yield sentence


def _write(folder: Path, name: str, rate: int, sentences: Sequence[Sentence], speaks: Speaks) -> None:
    bank.write_flac(folder, name, rate, [(asdict(s), speaks(s)) for s in sentences], MOST_BYTES)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the banks")
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
