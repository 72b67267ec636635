"""Spoken answers from end to end: recorded questions to the whole checkpoint, live, and what a recogniser hears.

Nothing of training's own networks is in the way: samples go into a session, frame by frame, and samples come out. Tools
answer themselves here, as they do where no server has any, so that any answer that a tool's question may have is right.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training import domain
from training.listening.evaluate import BEHIND, LEAD, Asked, Judge
from training.listening.sampling import balanced
from training.listening.timeline import EOS
from training.recogniser import Hears, Score, edits
from voicechat_core.offline import GenerationResult
from voicechat_core.profile import FrameTiming, Summary
from voicechat_core.streaming import generate_live
from voicechat_core.voicechat import VoiceChat

__all__ = ["Reply", "ask", "chosen", "figures", "speed"]

AROUND = 2  # frames before and after an answer that the recogniser hears with it

Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Reply:
    """What a session made of a question: its transcript, the first answer as written and its sound, each frame's time.

    ``text`` is empty and ``samples`` are none where it did not answer.
    """

    asked: Asked
    transcript: str
    text: str
    samples: Samples
    timings: list[FrameTiming]

    @property
    def right(self) -> str:
        """The right answer: what was written, if the question may be answered so."""
        possible = {turn.answer for turn in domain.turns_of(self.asked.question.text)}
        return self.text if self.text in possible else self.asked.turn.answer


def chosen(asked: Sequence[Asked], trained: Collection[str], count: int) -> list[Asked]:
    """``count`` of the questions, half of them with answers that are not among the ``trained`` if there are so many.

    What a tool says is made up here: nobody knows whether such an answer will be new.
    """
    unheard = [a.turn.tool is None and a.turn.answer not in trained for a in asked]
    new = _balanced(list(compress(asked, unheard)), count // 2)
    others = [a for a, is_new in zip(asked, unheard, strict=True) if not is_new]
    return _balanced(others, count - len(new)) + new


def _balanced(asked: Sequence[Asked], count: int) -> list[Asked]:
    return balanced(asked, count, lambda a: a.question.voice, lambda a: a.turn.kind)


def ask(voicechat: VoiceChat, judge: Judge, asked: Asked, seed: int = 0) -> Reply:
    """A session of its own for one question, with the checkpoint's own system prompt."""
    scene = judge.scene([(LEAD, asked)], LEAD + asked.frames + BEHIND)
    streamed = generate_live(voicechat, scene, seed=seed)
    result = streamed.result
    text, begun = judge.answer(np.array(result.text_tokens, np.int32))
    samples = _sound(result, begun, voicechat.model.config.output_frame_samples)
    return Reply(asked, result.transcript or "", text, samples, streamed.timings)


def _sound(result: GenerationResult, begun: int | None, frame: int) -> Samples:
    """From the answer's first frame to its last, and a little around them."""
    if begun is None:
        return np.zeros(0, np.float32)
    ids = result.text_tokens
    end = ids.index(EOS, begun) if EOS in ids[begun:] else len(ids) - 1
    return np.asarray(result.audio[max(0, begun - AROUND) * frame : (end + 1 + AROUND) * frame], np.float32)


def figures(replies: Sequence[Reply], trained: Collection[str], hears: Hears | None, rate: int) -> dict[str, Any]:
    """Shares of all questions, and word errors of what is heard: against what was written, and against what is right.

    What was written is told apart by whether it is among the sentences that the speech was ``trained`` on. A question
    without an answer counts as one of which nothing is heard, against what is right only. Without ``hears`` nobody
    listens.
    """
    words = [reply.asked.question.text.split() for reply in replies]
    wrong = sum(edits(said, r.transcript.split()) for said, r in zip(words, replies, strict=True))
    found: dict[str, Any] = {
        "questions": len(replies),
        "transcript_word_error": wrong / max(1, sum(map(len, words))),
        "written_right": sum(r.text == r.right for r in replies) / max(1, len(replies)),
        "unanswered": sum(not r.text for r in replies),
    }
    if hears is None:
        return found
    heard = [(reply, hears(reply.samples, rate) if reply.text else "") for reply in replies]
    answered = [(reply, text) for reply, text in heard if reply.text]
    return found | {
        "against_written": Score.of((r.text, text) for r, text in answered).as_dict(),
        "trained": Score.of((r.text, text) for r, text in answered if r.text in trained).as_dict(),
        "new": Score.of((r.text, text) for r, text in answered if r.text not in trained).as_dict(),
        "against_right": Score.of((r.right, text) for r, text in heard).as_dict(),
        "by_voice": dict(_by((r.asked.question.voice, r.text, text) for r, text in answered)),
        "by_kind": dict(_by((r.asked.turn.kind, r.text, text) for r, text in answered)),
    }


def _by(rows: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Scores without their lists of errors, by each row's name."""
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, said, heard in rows:
        groups[name].append((said, heard))
    for name, pairs in sorted(groups.items()):
        score = Score.of(pairs).as_dict()
        del score["wrong"]
        yield name, score


def speed(timings: Iterable[FrameTiming]) -> dict[str, Any]:
    """Of live frames, each session's first two aside: ``factor`` is the mean frame's part of its 80 ms."""
    summed = Summary.of(timings)
    return {
        "frames": summed.frames,
        "factor": summed.realtime_factor,
        "p50_ms": summed.total.p50_ms,
        "p95_ms": summed.total.p95_ms,
        "late": summed.deadline_misses,
        "device": mx.default_device().type.name,
    }
