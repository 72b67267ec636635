"""Rows to train on, drawn on the device: a session's steps after the voice prompt, exactly as ``duplex`` feeds them.

A row begins with PAD (a system prompt's steps and the time until the first answer are the same to the speech decoder),
then come turns with silence between them. A turn is BOS, all tokens, PAD, EOS; its speech begins ``DELAY`` frames after
BOS. A turn that is interrupted has its EOS at any time, with silence from that frame on. What stands beyond a row's end
is cut off.

The history of a step is the frame before it; at the first step it is nothing, at an EOS silence. In training part of it
is damaged, so that the network does not rely on what a sampler may get wrong.
"""

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.speaking.tables import DELAY, Tables

__all__ = ["Damage", "Layout", "Rows", "draw", "planned"]

SILENCE = 0  # the frame of it in the tables
SPEECH_WEIGHT, SILENCE_WEIGHT = 1.0, 0.07
AROUND = 2  # frames after the speech, and after an EOS, that weigh as much as speech
SHORTEST = 13  # frames of a turn with its gap, of those that most rows hold; a row has room for as many


@dataclass(frozen=True)
class Layout:
    """How turns lie in a row; lengths in frames, both ends included."""

    lead: tuple[int, int] = (1, 8)
    long_lead: tuple[int, int] = (9, 60)
    gap: tuple[int, int] = (1, 10)
    long_gap: tuple[int, int] = (11, 40)
    lateness: tuple[int, int] = (-1, 6)  # of an EOS, against the end of its speech
    p_long: float = 0.15  # of leads, and of gaps
    p_interrupted: float = 0.12
    variants: tuple[float, ...] = (1.0,)  # shares of the tables' ways to lay text out


@dataclass(frozen=True)
class Damage:
    """What is done to the history, and how often the text is hidden."""

    p_partial: float = 0.4  # of frames: only the first levels are heard
    p_wrong: float = 0.1  # of frames, in half of the rows: another frame
    p_dropped: float = 0.3  # of frames, in half of the rows: nothing
    p_unconditional: float = 0.1  # of rows


@dataclass(frozen=True)
class Rows:
    """A batch of B rows of T steps; every frame as an index into the tables.

    ``history`` and the number ``heard`` of its levels are what is fed, ``frames`` what is to be said; ``weights`` are
    the frames' in the loss; ``unconditional`` ``[B]`` hides the text.
    """

    ids: mx.array  # [B, T] int32
    frames: mx.array  # [B, T] int32
    history: mx.array  # [B, T] int32
    heard: mx.array  # [B, T] int32
    weights: mx.array  # [B, T] float32
    unconditional: mx.array  # [B] bool


@dataclass(frozen=True)
class Plan:
    """Turns in rows, ``[B, M]`` each: where BOS stands, how far after it EOS stands, and the sentence's facts."""

    starts: mx.array
    ends: mx.array
    facts: mx.array  # [B, M, 4]


class Chances:
    """Uniform numbers in [0, 1) for a whole batch: one draw, cut into pieces, since each draw is several kernels."""

    def __init__(self, count: int) -> None:
        self._numbers, self._taken, self._count = mx.random.uniform(shape=(count,)), 0, count

    def take(self, *shape: int) -> mx.array:
        """The next ones."""
        start, self._taken = self._taken, self._taken + math.prod(shape)
        if self._taken > self._count:
            raise ValueError(f"{self._taken} random numbers are asked for; there are {self._count}")
        return self._numbers[start : self._taken].reshape(shape)

    def integers(self, bounds: tuple[int, int], *shape: int) -> mx.array:
        """Integers, both bounds included."""
        return _between(self.take(*shape), bounds)


def _between(chance: mx.array, bounds: tuple[int, int]) -> mx.array:
    low, high = bounds
    return mx.minimum(low + mx.floor(chance * (high - low + 1)), high).astype(mx.int32)


def _mixed(chances: Chances, usual: tuple[int, int], rare: tuple[int, int], p_rare: float, *shape: int) -> mx.array:
    is_rare, chance = chances.take(*shape) < p_rare, chances.take(*shape)
    return mx.where(is_rare, _between(chance, rare), _between(chance, usual))


def _natural_ends(facts: mx.array) -> mx.array:
    """The same as ``tables.natural_end``, ``[..., 4]`` -> ``[...]``."""
    return mx.maximum(DELAY + facts[..., 1] + 1, facts[..., 3] + 2)


def _plan(tables: Tables, slots: mx.array, shape: tuple[int, int], layout: Layout, chances: Chances) -> Plan:
    sentences = slots[chances.integers((0, slots.shape[0] - 1), *shape)]
    shares = layout.variants
    if len(shares) > tables.facts.shape[0]:
        raise ValueError(f"shares of {len(shares)} layouts of text are given; the tables have {tables.facts.shape[0]}")
    which = (chances.take(*shape)[..., None] >= mx.array(np.cumsum(shares)[:-1].astype(np.float32))).sum(axis=-1)
    facts = tables.facts.reshape(-1, 4)[which * tables.facts.shape[1] + sentences]
    usual = _natural_ends(facts)
    late = mx.maximum(usual + chances.integers(layout.lateness, *shape), facts[..., 3] + 1)
    early = 1 + (chances.take(*shape) * (usual - 1)).astype(mx.int32)
    ends = mx.where(chances.take(*shape) < layout.p_interrupted, early, late)
    lead = _mixed(chances, layout.lead, layout.long_lead, layout.p_long, shape[0], 1)
    gaps = _mixed(chances, layout.gap, layout.long_gap, layout.p_long, *shape)
    lengths = ends + 1 + gaps
    return Plan(lead + mx.cumsum(lengths, axis=1) - lengths, ends, facts)


def _laid_out(plan: Plan, tables: Tables, count: int, ids: tuple[int, int, int]) -> tuple[mx.array, ...]:
    """Ids, frames and weights ``[B, count]`` of a plan; ``ids`` are those of PAD, BOS and EOS."""
    pad, bos, eos = ids
    time = mx.arange(count)
    turn = (plan.starts[:, None] <= time[None, :, None]).sum(axis=-1) - 1  # -1 before the first
    every = mx.concatenate([plan.starts[..., None], plan.ends[..., None], plan.facts], axis=-1)
    here = mx.take_along_axis(every, mx.maximum(turn, 0)[..., None], axis=1)
    start, end, first, frames, first_token, tokens = (here[..., i] for i in range(6))
    since = mx.where(turn >= 0, time - start, -1)  # steps after BOS, or -1
    written = (since >= 1) & (since <= tokens) & (since < end)
    token = tables.tokens[mx.where(written, first_token + since - 1, 0)]
    text = mx.where(written, token, mx.where(since == 0, bos, mx.where((since == end) & (turn >= 0), eos, pad)))
    spoken = (since >= DELAY) & (since < DELAY + frames) & (since < end)
    said = mx.where(spoken, first + since - DELAY, SILENCE)
    loud = (since >= DELAY - 1) & (since < mx.minimum(DELAY + frames, end + 1) + AROUND)
    return text.astype(mx.int32), said, mx.where(loud, SPEECH_WEIGHT, SILENCE_WEIGHT)


def _shifted(frames: mx.array) -> mx.array:
    """The frame before each; what stands first is never heard."""
    return mx.concatenate([mx.zeros_like(frames[:, :1]), frames[:, :-1]], axis=1)


def _as_served(ids: mx.array, history: mx.array, heard: mx.array, levels: int, eos: int) -> tuple[mx.array, mx.array]:
    """Nothing was said before the first step, and at an EOS the history is silence."""
    ended, first = ids == eos, mx.arange(ids.shape[1]) == 0
    heard = mx.where(ended, levels, mx.where(first, 0, heard))
    return mx.where(ended, SILENCE, history), heard


def _damaged(history: mx.array, tables: Tables, damage: Damage, chances: Chances) -> tuple[mx.array, mx.array]:
    """A history with wrong frames in it, and how many levels of each frame are heard."""
    shape, levels = history.shape, tables.levels
    has_wrong, has_dropped = chances.take(shape[0], 1) < 0.5, chances.take(shape[0], 1) < 0.5
    wrong = has_wrong & (chances.take(*shape) < damage.p_wrong)
    history = mx.where(wrong, chances.integers((0, tables.sums.shape[0] - 1), *shape), history)
    is_partial, some = chances.take(*shape) < damage.p_partial, chances.integers((0, levels), *shape)
    dropped = has_dropped & (chances.take(*shape) < damage.p_dropped)
    return history, mx.where(dropped, 0, mx.where(is_partial, some, levels))


def draw(
    tables: Tables,
    shape: tuple[int, int],
    ids: tuple[int, int, int],
    *,
    short: bool = False,
    layout: Layout | None = None,
    damage: Damage | None = None,
) -> Rows:
    """``shape`` (rows, steps) of random turns, lazily.

    Args:
        tables: what to draw from.
        shape: rows and steps of each.
        ids: of PAD, BOS and EOS.
        short: leave out the sentences that do not fit into a short row.
        layout: how turns lie.
        damage: what is done to the history.
    """
    rows, count = shape
    slots, turns = tables.short_slots if short else tables.slots, 1 + count // SHORTEST
    chances = Chances(rows * (7 * turns + 5 * count + 5))
    plan = _plan(tables, slots, (rows, turns), layout or Layout(), chances)
    text, frames, weights = _laid_out(plan, tables, count, ids)
    damage = damage or Damage()
    history, heard = _as_served(text, *_damaged(_shifted(frames), tables, damage, chances), tables.levels, ids[2])
    hidden = chances.take(rows) < damage.p_unconditional
    return Rows(text, frames, history, heard, weights, hidden)


def planned(tables: Tables, sentences: NDArray[np.int64], lead: int, count: int, ids: tuple[int, int, int]) -> Rows:
    """One whole turn a row after ``lead`` silent steps, nothing damaged: what the loss is compared on.

    ``sentences`` ``[B]`` are indices; speech beyond ``count`` steps is cut off.
    """
    facts = tables.facts[0][mx.array(sentences)][:, None]
    ends = _natural_ends(facts)
    plan = Plan(mx.full(ends.shape, lead), ends, facts)
    text, frames, weights = _laid_out(plan, tables, count, ids)
    heard = mx.full(text.shape, tables.levels)
    history, heard = _as_served(text, _shifted(frames), heard, tables.levels, ids[2])
    return Rows(text, frames, history, heard, weights, mx.zeros((len(sentences),), mx.bool_))
