"""How well it speaks, short of listening: teacher-forced figures in a second, and free-running codes to be decoded.

    python -m training.speaking.evaluate --data DIR --weights speaking.safetensors --out DIR

writes ``generated.npz``: codes of held-out and of trained sentences as a session would draw them, alone, late, after
another turn and interrupted. ``training.speaking.judge`` decodes and judges them.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.small import small_config
from training.speaking.forward import hidden_states, sums_at
from training.speaking.generate import generate, random_draws, sample
from training.speaking.losses import row_terms
from training.speaking.rows import SILENCE, Rows, planned
from training.speaking.setting import Setting
from training.speaking.tables import DELAY, Sentences, natural_end

__all__ = ["Case", "Generated", "cases", "forced", "run_cases"]

LEAD = 4  # silent steps before a turn
MARGIN = 3  # steps by which its EOS comes later than the recording ended
FORCED_STEPS = 64
STOPS = 5  # frames after an EOS within which there must be silence


def forced(setting: Setting, indices: NDArray[np.int64], steps: int = FORCED_STEPS) -> dict[str, float]:
    """Loss and accuracy of sentences with everything before each frame given, with their text and with another's.

    ``component`` and ``choice`` are the loss's terms over the sampler's own passes, ``wrong`` the first with the text
    of another sentence; ``first``, ``second`` and ``eighth`` the share of frames of speech whose code of that level
    is drawn right. What a sentence has beyond ``steps`` is not looked at.
    """
    tables, tts, ids = setting.tables, setting.tts, setting.constants.ids
    rows = planned(tables, indices, LEAD, steps, ids)
    rows = replace(rows, weights=(rows.frames != SILENCE).astype(mx.float32))
    starts = mx.array([start for start, _ in tts.passes])
    given = mx.broadcast_to(starts[:, None, None], (len(tts.passes), *rows.ids.shape))
    right = row_terms(tts, rows, given, tables, setting.constants)
    other = replace(rows, ids=mx.concatenate([rows.ids[1:], rows.ids[:1]]))
    wrong = row_terms(tts, other, given, tables, setting.constants)
    found = {**right, "wrong": wrong["component"], **_accuracy(setting, rows)}
    mx.eval(found)
    return {name: float(np.array(value)) for name, value in found.items()}


def _accuracy(setting: Setting, rows: Rows) -> dict[str, mx.array]:
    tts, constants = setting.tts, setting.constants
    heard = sums_at(setting.tables, rows.history, rows.heard)
    hidden = hidden_states(tts, rows, heard, constants)
    if tts.rows == 2:
        without = replace(rows, unconditional=mx.ones_like(rows.unconditional))
        hidden = mx.concatenate([hidden, hidden_states(tts, without, heard, constants)])
    count = rows.ids.size
    draws = random_draws(tts, count, mx.random.key(0))
    codes = sample(tts, hidden.reshape(tts.rows * count, 1, -1), draws).reshape(*rows.ids.shape, -1)
    truth = np.concatenate([setting.sentences.silence[None], setting.sentences.codes])[np.array(rows.frames)]
    right = (codes == mx.array(truth.astype(np.int32))) * rows.weights[..., None]
    share = right.sum(axis=(0, 1)) / rows.weights.sum()
    return {name: share[level] for name, level in (("first", 0), ("second", 1), ("eighth", 7)) if level < share.size}


@dataclass(frozen=True)
class Case:
    """A session's text ids ``[T]``, and the frames ``[start, stop)`` in which ``text`` is to be heard."""

    kind: str
    text: str
    ids: NDArray[np.int32]
    start: int
    stop: int


@dataclass(frozen=True)
class Generated:
    """Cases and their codes ``[T, Q]``."""

    cases: list[Case]
    codes: list[NDArray[np.uint8]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """What ``save`` wrote; the cases come without their ids."""
        with np.load(path) as file:
            ends, none = np.cumsum(file["lengths"]), np.zeros(0, np.int32)
            spans = file["spans"].tolist()
            known = zip(file["kinds"].tolist(), file["texts"].tolist(), spans, strict=True)
            cases = [Case(kind, text, none, start, stop) for kind, text, (start, stop) in known]
            return cls(cases, np.split(file["codes"], ends[:-1]))

    def save(self, path: Path) -> None:
        """As ``generated.npz``."""
        np.savez_compressed(
            path,
            kinds=np.array([case.kind for case in self.cases]),
            texts=np.array([case.text for case in self.cases]),
            spans=np.array([(case.start, case.stop) for case in self.cases], np.int32),
            lengths=np.array([len(codes) for codes in self.codes], np.int32),
            codes=np.concatenate(self.codes),
        )


def _turn(setting: Setting, text: str, frames: int, stop: int | None = None) -> NDArray[np.int32]:
    """BOS, tokens, PAD, EOS of an answer of so many frames; with ``stop`` the EOS stands so many frames after BOS."""
    pad, bos, eos = setting.constants.ids
    tokens = setting.tokenizer.encode(text)
    end = natural_end(frames + MARGIN, len(tokens)) if stop is None else stop
    ids = np.full(end + 1, pad, np.int32)
    ids[0] = bos
    written = tokens[: end - 1]
    ids[1 : 1 + len(written)] = written
    ids[end] = eos
    return ids


def _case(setting: Setting, kind: str, parts: list[NDArray[np.int32] | int], text: str) -> Case:
    """Turns and numbers of silent steps one after another; the last turn is the one that counts."""
    pad = setting.constants.pad
    pieces = [np.full(part, pad, np.int32) if isinstance(part, int) else part for part in parts]
    before = sum(len(piece) for piece in pieces[:-2])
    ids = np.concatenate(pieces)
    return Case(kind, text, ids, before, before + len(pieces[-2]))


def cases(
    setting: Setting, held: int = 60, trained: int = 24, others: int = 8, late: int = 0, silence: int = 0
) -> list[Case]:
    """What is generated: that many held-out and trained sentences, and a few of the held ones in other places.

    Of ``others`` each is said as the ``second`` answer, and ``interrupted`` by an EOS in the middle; of ``late`` each
    comes after 20 s of silence; and there is one session of ``silence`` frames.
    """
    sentences, tail = setting.sentences, STOPS + 3
    rest = np.flatnonzero(sentences.held)[:held]
    known = sentences.trained()
    known = known[:: max(1, len(known) // max(1, trained))][:trained]
    whole = {i: _turn(setting, sentences.texts[i], int(sentences.lengths[i])) for i in (*rest, *known)}
    found = [_case(setting, "held", [LEAD, whole[i], tail], sentences.texts[i]) for i in rest]
    found += [_case(setting, "trained", [LEAD, whole[i], tail], sentences.texts[i]) for i in known]
    found += [_case(setting, "late", [250, whole[i], tail], sentences.texts[i]) for i in rest[:late]]
    for i, other in zip(rest[:others], known, strict=False):
        text = sentences.texts[i]
        found.append(_case(setting, "second", [LEAD, whole[other], 20, whole[i], tail], text))
        cut = _turn(setting, text, 0, DELAY + max(2, int(sentences.lengths[i]) // 2))
        found.append(_case(setting, "interrupted", [LEAD, cut, tail], text))
    if silence:
        nothing = np.full(silence, setting.constants.pad, np.int32)
        found.append(Case("silence", "", nothing, 0, silence))
    return found


def run_cases(setting: Setting, wanted: list[Case], latents: mx.array, seed: int = 0, batch: int = 128) -> Generated:
    """The codes of each case, free running; cases of like lengths go together."""
    order = sorted(range(len(wanted)), key=lambda i: len(wanted[i].ids))
    codes: dict[int, NDArray[np.uint8]] = {}
    for some in _batches([len(wanted[i].ids) for i in order], batch):
        members = [order[j] for j in some]
        longest = max(len(wanted[i].ids) for i in members)
        ids = np.full((len(members), longest), setting.constants.pad, np.int32)
        for row, i in enumerate(members):
            ids[row, : len(wanted[i].ids)] = wanted[i].ids
        drawn = generate(setting.tts, ids, latents, setting.silence, setting.constants, setting.chars, seed=seed)
        codes |= {i: drawn[row, : len(wanted[i].ids)].astype(np.uint8) for row, i in enumerate(members)}
    return Generated(wanted, [codes[i] for i in range(len(wanted))])


def _batches(lengths: list[int], most: int) -> list[list[int]]:
    """Runs of indices of at most ``most``; a run ends where the next is more than half again as long."""
    runs: list[list[int]] = []
    for i, length in enumerate(lengths):
        if runs and len(runs[-1]) < most and length <= 1.5 * lengths[runs[-1][0]]:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of codes.npz")
    parser.add_argument("--weights", type=Path, required=True, help="speaking.safetensors of a training")
    parser.add_argument("--out", type=Path, required=True, help="the folder for generated.npz")
    parser.add_argument("--held", type=int, default=60, help="held-out sentences")
    parser.add_argument("--silence", type=int, default=750, help="frames of a session in which nothing is said")
    options = parser.parse_args(arguments)
    setting = Setting.build(small_config(), Sentences.from_file(options.data / "codes.npz"))
    setting.load(options.weights)
    print(forced(setting, np.flatnonzero(setting.sentences.held)))
    latents = setting.networks.tts_model.audio_prompt_latents[setting.config.speaker]
    wanted = cases(setting, held=options.held, late=8, silence=options.silence)
    options.out.mkdir(parents=True, exist_ok=True)
    run_cases(setting, wanted, latents).save(options.out / "generated.npz")


if __name__ == "__main__":
    main()
