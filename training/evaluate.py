"""The figures of a checkpoint's model card, through the checkpoint as users load it: ``python -m training.evaluate``.

Questions of held-out voices go through its networks many at a time (``training.listening.evaluate``), and a sample of
them through live sessions, whose speech a recogniser writes down. What is tested with is made first if ``--data`` does
not hold it: questions (``users_test``) and answers (``answers_test``). Prints a Markdown table.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from training import recogniser, synthesize
from training.evaluation import ceiling, spoken
from training.evaluation.table import markdown, rows
from training.listening import evaluate as listening
from training.listening.evaluate import Judge, Scale
from training.listening.recordings import read_questions
from training.recogniser import Hears, Recogniser, Samples
from training.vocabulary import rnnt_pieces, text_tokenizer
from training.voices import lacking
from voicechat_core import load
from voicechat_core.builtin import SMALL
from voicechat_core.errors import VoiceChatError
from voicechat_core.voicechat import VoiceChat

__all__ = ["Extent", "main", "measure", "of_at_most", "prepare"]

T = TypeVar("T")

DATA = Path("build/training/data")
QUESTIONS = "users_test"


@dataclass(frozen=True)
class Extent:
    """How much is measured: the listening's scale, questions that are answered aloud, sentences through the codec."""

    listening: Scale = listening.FULL
    spoken: int = 100
    codec: int = 60


SMOKE = Extent(listening.SMALL, spoken=2, codec=2)


def of_at_most(count: int) -> Extent:
    """The same with ``count`` of everything that is asked or said; silence stays as long as it is."""
    full = Extent()
    sessions = max(1, min(full.listening.sessions, count // full.listening.turns))
    some = min(full.listening.interruptions, count)
    scale = replace(full.listening, questions=count, interruptions=some, sessions=sessions)
    return Extent(scale, min(full.spoken, count), min(full.codec, count))


def measure(voicechat: VoiceChat, data: Path, extent: Extent, hears: Hears | None) -> dict[str, Any]:
    """All figures; without ``hears`` nothing of what only a recogniser can tell."""
    stt, config = voicechat.model.networks.stt_model, voicechat.model.config
    questions = read_questions(data, QUESTIONS)
    judge, every = (Judge(stt, config, questions, scale) for scale in (extent.listening, listening.FULL))
    trained = {sentence.text for sentence in synthesize.assistant() if sentence.split == "train"}
    asked = spoken.chosen(every.asked, trained, extent.spoken)
    # Answered before anything is heard: a recogniser beside a session would slow it.
    replies = [spoken.ask(voicechat, every, one) for one in _told("answered aloud", asked)]
    times = [timing for reply in replies for timing in reply.timings]
    figures = {
        "spoken": spoken.figures(replies, trained, hears, config.output_sample_rate),
        "speed": spoken.speed(times) | {"cores": os.cpu_count()},
    }
    if hears is not None:
        figures["codec"] = ceiling.figures(voicechat.model, ceiling.read(data, extent.codec), hears)
    return figures | {"listening": listening.measure(judge)}


def _told(what: str, items: Sequence[T]) -> Iterator[T]:
    """The items, with a line on stderr for every tenth."""
    for done, item in enumerate(items, 1):
        yield item
        if done % 10 == 0 or done == len(items):
            print(f"{done} of {len(items)} {what}", file=sys.stderr, flush=True)


def _counted(hears: Hears) -> Hears:
    """The same, with a line on stderr for every tenth clip."""
    heard = itertools.count(1)

    def hear(samples: Samples, rate: int) -> str:
        text = hears(samples, rate)
        if (done := next(heard)) % 10 == 0:
            print(f"{done} clips heard", file=sys.stderr, flush=True)
        return text

    return hear


def check_vocabularies(voicechat: VoiceChat) -> None:
    """Refuse a checkpoint whose ids mean something else than those of this folder.

    Raises:
        ValueError: naming the vocabulary and both sizes.
    """
    model, text = voicechat.model, text_tokenizer().get_vocab()
    pairs = (
        ("text", dict(model.tokenizer.vocab()), text),
        ("transcript", list(model.rnnt_vocabulary.pieces), rnnt_pieces()),
    )
    for name, theirs, ours in pairs:
        if theirs != ours:
            sizes = f"{len(theirs)} entries there, {len(ours)} here"
            raise ValueError(f"its {name} vocabulary is not that of training/vocabulary.py ({sizes})")


def prepare(data: Path, workers: int, *, answers: bool) -> None:
    """Make what is tested with where it is not there: questions, and ``answers`` for the codec.

    Raises:
        SystemExit: saying what the voices lack.
    """
    questions = not (data / f"{QUESTIONS}.json").exists()
    answers = answers and not ceiling.present(data)
    if (questions or answers) and (missing := lacking()):
        raise SystemExit(missing)
    data.mkdir(parents=True, exist_ok=True)
    if questions:
        synthesize.make(data, "test", workers)
        synthesize.pack(data, "test")
    if answers:
        ceiling.make(data)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = _options(arguments)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    try:
        voicechat = load(options.checkpoint)
        check_vocabularies(voicechat)
    except (VoiceChatError, ValueError) as error:
        raise SystemExit(f"{options.checkpoint}: {error}") from error
    prepare(options.data, os.cpu_count() or 1, answers=not options.no_judge)
    begun = time.monotonic()
    extent = SMOKE if options.smoke else of_at_most(options.limit) if options.limit else Extent()
    hears = None if options.no_judge else _counted(Recogniser(options.whisper))
    figures = {"checkpoint": options.checkpoint, "fingerprint": voicechat.model.fingerprint}
    figures |= measure(voicechat, options.data, extent, hears)
    figures["seconds"] = round(time.monotonic() - begun, 1)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(markdown(rows(figures)))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=SMALL, help=f"its name or folder; {SMALL} if not given")
    parser.add_argument("--data", type=Path, default=DATA, help=f"folder of the banks; {DATA} if not given")
    parser.add_argument("--whisper", type=Path, default=recogniser.FOLDER, help="the recogniser's folder")
    parser.add_argument("--no-judge", action="store_true", help="leave out what a recogniser must hear")
    parser.add_argument("--limit", type=_positive, help="so much of everything, for a short run")
    parser.add_argument("--smoke", action="store_true", help="hardly anything, to see that it runs")
    parser.add_argument("--json", type=Path, help="write all figures there too")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


if __name__ == "__main__":
    main()
