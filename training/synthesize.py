"""All the speech that is trained on and tested with, made from text: ``python -m training.synthesize --part users``.

A part is a list of sentences in an order drawn at random, made in chunks by any number of processes. A chunk that is on
the disk is not made again, so a run that was ended goes on; at its end, or with ``--pack``, what there is becomes a
bank (``training.bank``): ``users_train`` (parts ``users``, ``rare``, ``varied``, ``kokoro``) and ``users_test`` (part
``test``) at 16 kHz, ``assistant`` at 22,050 Hz.
"""

import argparse
import hashlib
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import soxr

from training import bank, domain
from training.bank import Pcm
from training.carriers import carriers, lists

__all__ = ["PARTS", "Sentence", "assistant", "kokoro", "rare", "test", "users", "varied"]

USER_RATE, ANSWER_RATE = 16000, 22050
CHUNK = 40  # sentences
REPEATS, SEEDS, CARRIER_ROUNDS, LISTS = 8000, 4, 10, 8000
HELD_REPEATS = 40
ANSWER_RMS, ANSWER_PEAK = 0.09, 0.95
FADE = 220  # samples, 10 ms
ANSWER_FILE_BYTES = 15_500_000
OPUS_BYTES = {"users": 19_000_000, "rare": 4_300_000, "varied": 9_000_000, "kokoro": 5_000_000, "test": 6_000_000}
OPUS_FILES = {"users": 4, "rare": 2, "varied": 2, "kokoro": 1, "test": 1}

ESPEAK = (
    *(f"en-us+{name}" for name in ("m1", "m3", "m5", "m7", "f1", "f3", "f5", "Annie", "Andrea", "linda", "michael")),
    *(f"en-us+{name}" for name in ("rob", "edward", "max", "steph", "Gene")),
    *("en-gb", "en-us", "en-gb-scotland+m2", "en-gb+belinda", "en-gb-x-rp+f4"),
)
# voice: how many questions with a finite answer, to repeat, and unknown
TRAINED = {
    **{f"flite:{name}": (220, 300, 80) for name in ("slt", "rms", "kal16")},
    "heart:heart": (320, 450, 120),
    **{f"espeak:{name}": (60, 100, 25) for name in ESPEAK},
}
MIXTURE = {"kokoro:mixture": (480, 700, 320)}
VARIED = {"heart:varied": (1300, 2300, 400)}
# Kinds with so few questions that a draw from all would hear each by a few voices only; and how often each voice asks.
RARE_KINDS = ("greet", "name", "count", "animal", "bye", "about", "stop", "time", "dice", "weather")
RARELY = {"flite": 3, "heart": 3, "espeak": 1, "kokoro": 8}
TESTED = ("flite:awb", "espeak:en-us+Alicia", "espeak:en-gb+m8", "piper:joe", "kokoro:jm_kumo")
TEST_KINDS = {
    "greet": 2, "name": 2, "mine": 2, "plus": 5, "minus": 3, "color": 3, "opposite": 3, "day": 2, "animal": 2,
    "count": 2, "bye": 2, "about": 1, "stop": 1, "unknown": 3, "time": 2, "dice": 4, "weather": 6,
}  # fmt: skip
TEST_REPEATS, TEST_UNKNOWN = 16, 10  # of those held out


@dataclass(frozen=True)
class Sentence:
    """One thing to be said: by whom, and with which random draws."""

    text: str
    voice: str
    seed: int
    kind: str = ""
    split: str = "train"


def _questions(kinds: tuple[str, ...]) -> list[str]:
    return sorted({turn.user for kind in kinds for turn in domain.finite_turns(kind)})


def _some(rng: random.Random, texts: list[str], count: int) -> list[str]:
    """``count`` of ``texts``, none a second time before each was taken once."""
    taken: list[str] = []
    while len(taken) < count:
        taken += rng.sample(texts, min(len(texts), count - len(taken)))
    return taken


def _asked(voices: dict[str, tuple[int, int, int]]) -> list[Sentence]:
    """Training questions by ``voices``, shuffled so that any part of them is a fair sample."""
    known, unknown = _questions(tuple(set(domain.FINITE) - {"unknown"})), _questions(("unknown",))
    sentences = []
    for voice, (finite, repeats, others) in voices.items():
        rng = random.Random(voice)
        said = _some(rng, known, finite) + _some(rng, unknown, others)
        said += [domain.repeat(rng).user for _ in range(repeats)]
        sentences += [Sentence(text, voice, rng.randrange(2**31)) for text in said]
    random.Random("order").shuffle(sentences)
    return sentences


def users() -> list[Sentence]:
    """Training questions by all voices but Kokoro's, which take far longer."""
    return _asked(TRAINED)


def kokoro() -> list[Sentence]:
    """Training questions by mixtures of Kokoro's voices."""
    return _asked(MIXTURE)


def varied() -> list[Sentence]:
    """Training questions by one voice made larger and smaller: as many speakers as sentences, at little cost."""
    return _asked(VARIED)


def rare() -> list[Sentence]:
    """The questions of which there are few, by every training voice."""
    sentences = []
    for voice in (*TRAINED, *MIXTURE):
        rng = random.Random(f"rare {voice}")
        said = _questions(RARE_KINDS) * RARELY[voice.split(":")[0]]
        sentences += [Sentence(text, voice, rng.randrange(2**31)) for text in said]
    random.Random("order").shuffle(sentences)
    return sentences


def test() -> list[Sentence]:
    """Questions by voices that no training set holds, some of them of turns that none holds either."""
    unheard = sorted(turn.user for turn in domain.finite_turns("unknown", True))
    sentences = []
    for voice in TESTED:
        rng = random.Random(voice)
        said = [text for kind, count in TEST_KINDS.items() for text in _some(rng, _questions((kind,)), count)]
        held = [domain.repeat(rng, held=True).user for _ in range(TEST_REPEATS)] + _some(rng, unheard, TEST_UNKNOWN)
        sentences += [Sentence(text, voice, rng.randrange(2**31)) for text in said]
        sentences += [Sentence(text, voice, rng.randrange(2**31), split="held") for text in held]
    return sentences


def assistant() -> list[Sentence]:
    """Every finite answer some times, repetitions, every word in carriers and in lists, and what is held out."""
    rng, repeated = random.Random("assistant"), dict[str, None]()
    while len(repeated) < REPEATS:
        repeated.setdefault(domain.repeat(rng).answer)
    held = domain.finite_answers(held=True)
    unheard = [(turn.answer, "repeat") for turn in domain.held_out_repeats(HELD_REPEATS)] + list(held.items())
    never = {text for text, _ in unheard}
    free = {"carrier": carriers(CARRIER_ROUNDS), "list": lists(LISTS)}
    answers = [(text, seed, kind) for text, kind in domain.finite_answers().items() for seed in range(SEEDS)]
    answers += [(text, 0, "repeat") for text in repeated]
    answers += [(text, 0, kind) for kind, texts in free.items() for text in texts if text not in never]
    trained = [Sentence(text, "heart:heart", seed, kind) for text, seed, kind in answers]
    sentences = trained + [Sentence(text, "heart:heart", 0, kind, "held") for text, kind in unheard]
    random.Random("order").shuffle(sentences)
    return sentences


PARTS = {"assistant": assistant, "users": users, "rare": rare, "varied": varied, "kokoro": kokoro, "test": test}
# Of parts.
BANKS = {"assistant": ("assistant",), "users_train": ("users", "rare", "varied", "kokoro"), "users_test": ("test",)}


def question(sentence: Sentence) -> Pcm:
    """A question at 16 kHz, trimmed, half of full scale at its peak."""
    from training.voices import speak, trimmed

    samples, rate = speak(sentence.voice, sentence.text, random.Random(f"{sentence}"))
    samples = trimmed(samples, rate, 0.02, 0.03, 0.03)
    return _pcm(soxr.resample(samples * (0.5 / np.abs(samples).max()), rate, USER_RATE))


def answer(sentence: Sentence) -> Pcm:
    """An answer at 22,050 Hz: 30 ms before it, 60 ms after it, all answers as loud as each other."""
    from training.voices import heart, trimmed

    seed = int(domain.share(f"{sentence.text} {sentence.seed}") * 2**31)
    samples = soxr.resample(heart.answer(sentence.text, seed), heart.RATE, ANSWER_RATE)
    samples = trimmed(samples, ANSWER_RATE, 0.015, 0.03, 0.059)
    samples[:FADE] *= np.linspace(0, 1, FADE)
    samples[-FADE:] *= np.linspace(1, 0, FADE)
    loudness = min(ANSWER_RMS / np.sqrt((samples**2).mean()), ANSWER_PEAK / np.abs(samples).max())
    return _pcm(samples * loudness)


def _pcm(samples: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Pcm:
    return np.round(np.clip(samples, -1, 1) * 32767).astype(np.int16)


def _chunks(part: str, limit: int | None) -> list[list[Sentence]]:
    sentences = PARTS[part]()[:limit]
    return [sentences[i : i + CHUNK] for i in range(0, len(sentences), CHUNK)]


def _chunk_file(folder: Path, part: str, chunk: list[Sentence]) -> Path:
    """Named by what is said in it, so that a change of the domain makes new chunks."""
    name = hashlib.sha256(repr(chunk).encode()).hexdigest()[:16]
    return folder / "parts" / f"{part}-{name}.npz"


def _make(job: tuple[Path, str, list[Sentence]]) -> int:
    """One chunk, if it is not there; the number of samples made."""
    folder, part, chunk = job
    file = _chunk_file(folder, part, chunk)
    if file.exists():
        return 0
    said = [answer(sentence) if part == "assistant" else question(sentence) for sentence in chunk]
    partial = file.with_suffix(".partial")
    with partial.open("wb") as out:
        np.savez(out, audio=np.concatenate(said), lengths=[len(pcm) for pcm in said])
    partial.replace(file)
    return sum(map(len, said))


def _made(folder: Path, part: str, limit: int | None) -> Iterator[tuple[dict[str, object], Pcm]]:
    """What there is of a part, in its order."""
    for chunk in _chunks(part, limit):
        file = _chunk_file(folder, part, chunk)
        if not file.exists():
            continue
        with np.load(file) as made:
            pieces = np.split(made["audio"], np.cumsum(made["lengths"])[:-1])
        for sentence, pcm in zip(chunk, pieces, strict=True):
            yield asdict(sentence), pcm


def pack(folder: Path, part: str, limit: int | None = None) -> str:
    """Write what there is of a part, as a bank of its own and into the one that it belongs to; what was written."""
    items = list(_made(folder, part, limit))
    if not items:
        raise SystemExit(f"{folder / 'parts'}: no chunk of {part}")
    if part == "assistant":
        bank.write_flac(folder, part, ANSWER_RATE, items, ANSWER_FILE_BYTES)
        return f"{part}: {len(items)} sentences"
    bank.write_opus(folder, part, USER_RATE, items, OPUS_BYTES[part], files=OPUS_FILES[part])
    name = next(name for name, parts in BANKS.items() if part in parts)
    return f"{name}: {bank.join(folder, name, BANKS[name])} sentences, {len(items)} of {part}"


def make(folder: Path, part: str, workers: int, limit: int | None = None) -> None:
    """All missing chunks of a part."""
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    jobs = [(folder, part, chunk) for chunk in _chunks(part, limit)]
    begun, samples, rate = time.monotonic(), 0, ANSWER_RATE if part == "assistant" else USER_RATE
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, count in enumerate(pool.imap(_make, jobs), 1):
            samples += count
            took = time.monotonic() - begun
            print(f"{part}: {done}/{len(jobs)} chunks, {samples / rate / 60:.1f} min in {took:.0f} s", flush=True)


def main() -> None:
    """Make a part and pack the bank that it belongs to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", required=True, choices=list(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the banks")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=int, help="only so many sentences, for a trial")
    parser.add_argument("--pack", action="store_true", help="pack what there is and make nothing")
    options = parser.parse_args()
    if not options.pack:
        make(options.out, options.part, options.workers, options.limit)
    print(pack(options.out, options.part, options.limit), flush=True)


if __name__ == "__main__":
    main()
