"""How well it listens: held-out voices, silence, interruptions and long sessions, free running.

``python -m training.listening.evaluate --data DIR --part listening.safetensors`` prints the figures as JSON. Frames are
80 ms; shares are from 0 to 1.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training import domain
from training.listening.free_run import Said, converse, hear, transcribe
from training.listening.recordings import Question, Questions, read_questions
from training.listening.sampling import balanced
from training.listening.timeline import BOS, CALL, CALL_END, EOS, PAD, SAMPLES, prompt_ids, token_ids
from training.recogniser import edits
from training.small import small_config
from training.vocabulary import rnnt_pieces, text_tokenizer
from voicechat_core.config import VoiceChatConfig
from voicechat_core.model import SttModel
from voicechat_core.nn.layout import checkpoint_axes, to_memory
from voicechat_core.tokenizer import RnntVocabulary
from voicechat_core.weights import named_parameters

__all__ = [
    "BEHIND",
    "FULL",
    "LEAD",
    "QUICK",
    "SMALL",
    "Asked",
    "Judge",
    "Scale",
    "evaluate",
    "measure",
    "read_part",
    "summary",
]

Sound = NDArray[np.float32]

LEAD, BEHIND = 4, 68  # frames before a question, and behind it for the reply
FLOOR = 3e-4  # white noise under the questions
NAMES_TRIED = ("Emma", "Oscar", "Laura", "Ben")
LONG_ANSWERS = ("name", "count", "about", "greet", "unknown")
STOP_WITHIN = 5


@dataclass(frozen=True)
class Scale:
    """How much to try: questions, interrupted answers, sessions and turns of each, frames of silence, names."""

    questions: int = 10_000
    interruptions: int = 100
    sessions: int = 12
    turns: int = 16
    silence: int = 750
    names: int = 4


FULL = Scale()
QUICK = Scale(questions=150, interruptions=30, sessions=5, turns=4, silence=250)
SMALL = Scale(questions=3, interruptions=2, sessions=1, turns=2, silence=20, names=1)


@dataclass(frozen=True)
class Asked:
    """A recorded question and the turn that it opens: what is to be answered, and what a tool says."""

    question: Question
    turn: domain.Turn
    frames: int

    @property
    def response(self) -> list[int]:
        """The tool's response as ids; none without a tool."""
        return token_ids(self.turn.tool[1]) if self.turn.tool else []


class Judge:
    """The networks, the test questions, and what is made of them."""

    def __init__(self, stt: SttModel, config: VoiceChatConfig, questions: Questions, scale: Scale) -> None:
        self.stt, self.config, self.scale = stt, config, scale
        self._samples = questions.samples
        self._vocabulary = RnntVocabulary(rnnt_pieces())
        self._rng, self._noise = random.Random("evaluate"), np.random.default_rng(0)
        opened = [self._asked(question) for question in questions.items]
        known = [asked for asked in opened if asked is not None]
        self.asked = balanced(known, scale.questions, lambda a: a.question.voice, lambda a: a.turn.kind)

    def _asked(self, question: Question) -> Asked | None:
        turns = domain.turns_of(question.text)
        frames = -(-(question.end - question.start) // SAMPLES)
        return Asked(question, self._rng.choice(turns), frames) if turns else None

    # ---- sounds

    def scene(self, events: Iterable[tuple[int, Asked]], frames: int, floor: float = FLOOR) -> Sound:
        """``frames`` of noise with questions at their frames: ``[1280 T]``."""
        sound = (floor * self._noise.standard_normal(frames * SAMPLES)).astype(np.float32)
        for at, asked in events:
            question = asked.question
            said = self._samples[question.start : question.end][: (frames - at) * SAMPLES] / np.float32(32768)
            sound[at * SAMPLES : at * SAMPLES + len(said)] += said
        return sound

    def run(
        self, scenes: list[Sound], responses: Sequence[Sequence[int]] | None = None, prompt: str = ""
    ) -> tuple[list[str], Said]:
        """Transcripts and both channels of scenes of the same length."""
        encoded, heard = hear(self.stt, np.stack(scenes))
        transcripts = [self._vocabulary.text(ids) for ids in transcribe(self.stt, encoded)]
        return transcripts, converse(self.stt, self.config, heard, prompt_ids(prompt), responses)

    # ---- what was said

    def answer(self, text: NDArray[np.int32], since: int = 0, until: int | None = None) -> tuple[str, int | None]:
        """The first answer that begins in frames ``since`` to ``until``, and the frame of its BOS."""
        begins = np.flatnonzero(text[since:until] == BOS)
        if not len(begins):
            return "", None
        begin = since + int(begins[0])
        said = text[begin:].tolist()
        ids = said[1 : said.index(EOS)] if EOS in said else said[1:]
        return text_tokenizer().decode([i for i in ids if i not in (PAD, BOS)], skip_special_tokens=False), begin

    def call(self, function: NDArray[np.int32], until: int | None = None) -> tuple[str | None, int | None]:
        """The first call, and its first frame."""
        ids = function[:until].tolist()
        if CALL not in ids:
            return None, None
        begin = ids.index(CALL)
        inside = ids[begin + 1 : ids.index(CALL_END, begin)] if CALL_END in ids[begin:] else ids[begin + 1 :]
        return text_tokenizer().decode([i for i in inside if i != PAD], skip_special_tokens=False), begin


def evaluate(stt: SttModel, config: VoiceChatConfig, folder: Path, scale: Scale = FULL) -> dict[str, Any]:
    """All figures, of the bank ``users_test``."""
    return measure(Judge(stt, config, read_questions(folder, "users_test"), scale))


def measure(judge: Judge) -> dict[str, Any]:
    """All figures."""
    return {
        **_questions(judge),
        "names": _names(judge),
        "interruptions": _interruptions(judge),
        "silence": _silence(judge),
        "sessions": _sessions(judge),
    }


def _questions(judge: Judge) -> dict[str, Any]:
    """Every question on its own."""
    frames = LEAD + max(asked.frames for asked in judge.asked) + BEHIND
    scenes = [judge.scene([(LEAD, asked)], frames) for asked in judge.asked]
    transcripts, said = judge.run(scenes, [asked.response for asked in judge.asked])
    found = []
    for row, asked in enumerate(judge.asked):
        answer, begun = judge.answer(said.text[row])
        call, called = judge.call(said.function[row])
        reply = called if called is not None else begun
        tool = asked.turn.tool
        found.append(
            {
                "voice": asked.question.voice, "kind": asked.turn.kind, "split": asked.question.split,
                "said": asked.question.text, "heard": transcripts[row], "wanted": asked.turn.answer, "answer": answer,
                "words": len(asked.question.text.split()),
                "wrong_words": edits(transcripts[row].split(), asked.question.text.split()),
                "right": answer == asked.turn.answer, "tool": tool is not None, "called": call is not None,
                "call_right": tool is not None and call == tool[0],
                "early": reply is not None and reply < LEAD + asked.frames,
                "reaction": None if reply is None else reply - LEAD - asked.frames,
            }
        )  # fmt: skip
    held = [row for row in found if row["split"] == "held" or domain.held_out(_turn(row))]
    trained = [row for row in found if row not in held]
    return {
        "all": _figures(found), "trained": _figures(trained), "held": _figures(held),
        "by_voice": _by(found, "voice"), "by_kind": _by(found, "kind"), "trained_by_voice": _by(trained, "voice"),
        "wrong": [{k: row[k] for k in ("voice", "said", "heard", "wanted", "answer")} for row in found
                  if not row["right"]][:40],
    }  # fmt: skip


def _turn(row: dict[str, Any]) -> domain.Turn:
    return domain.Turn(row["said"], row["wanted"], None, row["kind"])


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares over questions."""
    tools, others = [r for r in rows if r["tool"]], [r for r in rows if not r["tool"]]
    reactions = sorted(r["reaction"] for r in rows if r["reaction"] is not None)
    return {
        "questions": len(rows),
        "word_error": _share(sum(r["wrong_words"] for r in rows), sum(r["words"] for r in rows)),
        "right": _mean(rows, "right"), "early": _mean(rows, "early"),
        "silent": _share(sum(r["reaction"] is None for r in rows), len(rows)),
        "tools": len(tools), "calls_right": _mean(tools, "call_right"), "false_calls": _mean(others, "called"),
        "reaction_median": reactions[len(reactions) // 2] if reactions else None,
        "reaction_most": reactions[-1] if reactions else None,
    }  # fmt: skip


def _by(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row[key]].append(row)
    return {name: _figures(group) for name, group in sorted(groups.items())}


def _share(part: float, whole: float) -> float | None:
    return round(float(part) / float(whole), 4) if whole else None


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    return _share(sum(bool(row[key]) for row in rows), len(rows))


def _names(judge: Judge) -> dict[str, Any]:
    """Who it says it is, under prompts that name it, and under one that does not."""
    asked = [a for a in judge.asked if a.turn.kind == "name"]
    if not asked:
        return {"tried": 0, "right": None, "right_without": None}
    frames = LEAD + max(a.frames for a in asked) + BEHIND
    scenes, right = [judge.scene([(LEAD, a)], frames) for a in asked], 0
    for name in NAMES_TRIED[: judge.scale.names]:
        _, said = judge.run(scenes, prompt=f"You are {name}. Be concise.")
        right += sum(judge.answer(row)[0] == domain.introduction(name) for row in said.text)
    _, said = judge.run(scenes, prompt="You are a helpful assistant.")
    other = sum(judge.answer(row)[0] == domain.introduction() for row in said.text)
    tried = len(asked) * judge.scale.names
    return {"tried": tried, "right": _share(right, tried), "right_without": _share(other, len(asked))}


def _interruptions(judge: Judge) -> dict[str, Any]:
    """A second question while the first is being answered: how soon it stops, and whether it answers the second."""
    rng = random.Random("interruptions")
    first = [a for a in judge.asked if a.turn.kind in LONG_ANSWERS] or judge.asked
    plain = [a for a in judge.asked if a.turn.tool is None] or judge.asked
    pairs = [(rng.choice(first), rng.choice(plain), rng.randint(9, 15)) for _ in range(judge.scale.interruptions)]
    starts = [LEAD + a.frames + wait for a, _, wait in pairs]
    frames = max(start + b.frames for start, (_, b, _) in zip(starts, pairs, strict=True)) + BEHIND
    scenes = [judge.scene([(LEAD, a), (start, b)], frames) for start, (a, b, _) in zip(starts, pairs, strict=True)]
    _, said = judge.run(scenes)
    stops, right = [], []
    for text, start, (_, second, _) in zip(said.text, starts, pairs, strict=True):
        _, begun = judge.answer(text)
        ends = np.flatnonzero(text == EOS)
        if begun is None or begun >= start or np.any((ends > begun) & (ends < start)):
            continue  # it was not speaking
        after = ends[ends >= start]
        stops.append(int(after[0]) - start if len(after) else 10_000)
        right.append(judge.answer(text, start)[0] == second.turn.answer)
    return {
        "tried": len(pairs), "speaking": len(stops), "stopped_within_5": _share(sum(s <= STOP_WITHIN for s in stops),
        len(stops)), "stop_median": sorted(stops)[len(stops) // 2] if stops else None,
        "right_after": _share(sum(right), len(right)),
    }  # fmt: skip


QUIET: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "zeros": lambda rng, n: np.zeros(n),
    "white -70 dB": lambda rng, n: 3e-4 * rng.standard_normal(n),
    "white -50 dB": lambda rng, n: 3e-3 * rng.standard_normal(n),
    "white -40 dB": lambda rng, n: 1e-2 * rng.standard_normal(n),
    "brown -45 dB": lambda rng, n: _brown(rng, n, 6e-3),
    "hum 50 Hz -40 dB": lambda rng, n: 1.4e-2 * np.sin(2 * np.pi * 50 / 16000 * np.arange(n)),
    "bursts": lambda rng, n: _bursts(rng, n, 2e-3),
    "clicks": lambda rng, n: 0.2 * (rng.random(n) < 2e-5) + 3e-4 * rng.standard_normal(n),
}  # fmt: skip


def _bursts(rng: np.random.Generator, samples: int, level: float) -> NDArray[np.float64]:
    louder = np.exp(3 * (rng.random(samples // SAMPLES) < 0.05))
    return np.asarray(level * rng.standard_normal(samples) * np.repeat(louder, SAMPLES))


def _brown(rng: np.random.Generator, samples: int, level: float) -> NDArray[np.float64]:
    spectrum = np.fft.rfft(rng.standard_normal(samples))
    spectrum /= np.maximum(np.arange(len(spectrum)), samples * 20 / 16000)
    sound = np.fft.irfft(spectrum, samples)
    return np.asarray(level * sound / sound.std())


def _silence(judge: Judge) -> dict[str, Any]:
    """A minute without a word, then a question."""
    rng, still = np.random.default_rng(1), judge.scale.silence
    easy = [a for a in judge.asked if a.turn.kind in ("plus", "greet", "color")] or judge.asked
    asked = [easy[i % len(easy)] for i in range(len(QUIET))]
    frames = still + max(a.frames for a in asked) + BEHIND
    scenes = []
    for make, a in zip(QUIET.values(), asked, strict=True):
        scene = judge.scene([(still, a)], frames, floor=0.0)
        scene[: still * SAMPLES] = make(rng, still * SAMPLES)
        scenes.append(scene)
    encoded, heard = hear(judge.stt, np.stack(scenes))
    labels = [len(ids) for ids in transcribe(judge.stt, encoded[:, :still])]
    said = converse(judge.stt, judge.config, heard, (), [a.response for a in asked])
    started = [
        bool(np.any(t[:still] == BOS) or np.any(f[:still] == CALL))
        for t, f in zip(said.text, said.function, strict=True)
    ]
    right = [judge.answer(text, still)[0] == a.turn.answer for text, a in zip(said.text, asked, strict=True)]
    return {
        "frames": still, "false_starts": dict(zip(QUIET, started, strict=True)),
        "false_labels": dict(zip(QUIET, labels, strict=True)), "right_after": _share(sum(right), len(right)),
    }  # fmt: skip


def _sessions(judge: Judge) -> dict[str, Any]:
    """Many turns in a row, all by one voice."""
    rng, scale = random.Random("sessions"), judge.scale
    voices = sorted({a.question.voice for a in judge.asked})
    plain = [a for a in judge.asked if a.turn.tool is None] or judge.asked
    rows, scenes = [], []
    step = max(a.frames for a in plain) + BEHIND
    for row in range(scale.sessions):
        own = [a for a in plain if a.question.voice == voices[row % len(voices)]] or plain
        rows.append([rng.choice(own) for _ in range(scale.turns)])
        scenes.append(judge.scene([(LEAD + i * step, a) for i, a in enumerate(rows[-1])], LEAD + scale.turns * step))
    _, said = judge.run(scenes)
    right = np.array(
        [
            [
                judge.answer(text, LEAD + i * step, LEAD + (i + 1) * step)[0] == a.turn.answer
                for i, a in enumerate(asked)
            ]
            for text, asked in zip(said.text, rows, strict=True)
        ]
    )
    half = scale.turns // 2
    return {
        "frames": LEAD + scale.turns * step, "turns": int(right.size), "right": _share(right.sum(), right.size),
        "right_late": _share(right[:, half:].sum(), right[:, half:].size),
    }  # fmt: skip


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of one log line."""
    every, trained = figures["all"], figures["trained"]
    return {
        "word_error": every["word_error"], "right": every["right"], "trained_right": trained["right"],
        "held_right": figures["held"]["right"], "calls_right": every["calls_right"],
        "false_calls": every["false_calls"], "reaction": every["reaction_median"],
        "name_right": figures["names"]["right"], "stopped": figures["interruptions"]["stopped_within_5"],
        "after_stop": figures["interruptions"]["right_after"],
        "false_starts": sum(figures["silence"]["false_starts"].values()),
        "after_silence": figures["silence"]["right_after"], "session_right": figures["sessions"]["right"],
        "voices": {name: [v["word_error"], v["right"]] for name, v in figures["by_voice"].items()},
    }  # fmt: skip


def read_part(file: Path) -> SttModel:
    """The networks of a trained part.

    Raises:
        ValueError: naming a tensor that is missing or of another shape.
    """
    stt = SttModel(small_config())
    tensors = cast("dict[str, mx.array]", mx.load(str(file)))
    axes, weights = dict(checkpoint_axes(stt)), []
    for name, value in named_parameters(stt):
        stored = tensors.get(f"stt_model.{name}")
        found = None if stored is None else to_memory(stored, value.shape, axes.get(name))
        if found is None:
            raise ValueError(f"{file}: stt_model.{name} is missing or has another shape")
        weights.append((name, found))
    stt.load_weights(weights)
    return stt


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the bank users_test")
    parser.add_argument("--part", type=Path, required=True, help="listening.safetensors")
    options = parser.parse_args()
    print(json.dumps(evaluate(read_part(options.part), small_config(), options.data), indent=1))


if __name__ == "__main__":
    main()
