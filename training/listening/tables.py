"""Windows as arrays that lie on the device, and batches cut out of them inside the training step.

The host draws many windows before training, in as many processes as there are cores, and does nothing in between: a
step takes its rows from the tables and gathers their samples from the one array of all questions.
"""

import multiprocessing
import random
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from training.listening.recordings import Durations, Question
from training.listening.timeline import PAD, SAMPLES, Script, Shape, Window

__all__ = ["Plan", "Table", "arrays_of", "draw", "sound", "table_of"]

Table = dict[str, mx.array]
Arrays = dict[str, NDArray[np.generic]]
CHUNK = 500  # windows that a process draws at a time


@dataclass(frozen=True)
class Plan:
    """Which windows to draw: the questions and durations to draw from, how many of which shape, and the seed."""

    recorded: dict[str, list[Question]]
    durations: Durations
    seed: int


def arrays_of(windows: Sequence[Window], shape: Shape) -> Arrays:
    """A row for each window. Weights are float16, ids and places int16, samples int32."""
    heard = [[(*h.speech, h.place) for h in window.hearing] for window in windows]
    start, end, speed, shift, place = (np.array([[h[i] for h in row] for row in heard]) for i in range(5))
    return {
        "start": start.astype(np.int32), "end": end.astype(np.int32), "speed": speed.astype(np.float32),
        "shift": shift.astype(np.int16), "place": place.astype(np.int16),
        "text": np.array([w.text for w in windows], np.int16),
        "function": np.array([w.function for w in windows], np.int16),
        "text_weight": np.array([w.text_weight for w in windows], np.float16),
        "function_weight": np.array([w.function_weight for w in windows], np.float16),
        "labels": np.array([_filled(w.labels, shape.labels) for w in windows], np.int16),
        "lengths": np.array([len(w.labels) for w in windows], np.int32),
        # A prompt stands right before the first frame.
        "prompt": np.array([_filled(w.prompt[::-1], shape.prompt, PAD)[::-1] for w in windows], np.int16),
        "prompt_length": np.array([len(w.prompt) for w in windows], np.int32),
    }  # fmt: skip


def _filled(ids: list[int], size: int, filler: int = 0) -> list[int]:
    if len(ids) > size:
        raise ValueError(f"{len(ids)} ids, {size} places")
    return ids + [filler] * (size - len(ids))


_plan: list[Plan] = []


def _keep(plan: Plan) -> None:
    _plan[:] = [plan]


def _chunk(job: tuple[Shape, int, int]) -> Arrays:
    shape, count, number = job
    plan = _plan[0]
    script = Script(plan.recorded, plan.durations, random.Random(f"{plan.seed} {shape} {number}"))
    return arrays_of([script.window(shape) for _ in range(count)], shape)


def draw(plan: Plan, wanted: dict[Shape, int], workers: int = 1) -> dict[Shape, Table]:
    """Tables of so many windows of each shape. The same plan draws the same, with any number of processes."""
    jobs = [(shape, min(CHUNK, n - i), i) for shape, n in wanted.items() for i in range(0, n, CHUNK)]
    if workers > 1:
        with multiprocessing.get_context("spawn").Pool(workers, _keep, (plan,)) as pool:
            chunks = pool.map(_chunk, jobs, chunksize=1)
    else:
        _keep(plan)
        chunks = [_chunk(job) for job in jobs]
    return {
        shape: table_of([chunk for job, chunk in zip(jobs, chunks, strict=True) if job[0] == shape]) for shape in wanted
    }


def table_of(chunks: Sequence[Arrays]) -> Table:
    """One table on the device."""
    return {name: mx.array(np.concatenate([chunk[name] for chunk in chunks])) for name in chunks[0]}


def rows(table: Table, index: mx.array) -> Table:
    """The rows ``index`` ``[B]`` of a table, ids as int32 and weights as float32."""
    taken = {name: value[index] for name, value in table.items()}
    wide = {mx.int16: mx.int32, mx.float16: mx.float32}
    return {name: value.astype(wide.get(value.dtype, value.dtype)) for name, value in taken.items()}


def sound(samples: mx.array, heard: Table) -> mx.array:
    """What the rows of a table hear: int16 ``[N]`` of all questions -> ``[B, T, 1280]`` float32 in [-1, 1].

    Speeds other than 1 read between the samples, on a straight line.
    """
    start, end, place, shift, speed = (
        heard[name][..., None].astype(mx.float32 if name == "speed" else mx.int32)
        for name in ("start", "end", "place", "shift", "speed")
    )
    # From the speech's own start, so that float32 has places left behind the comma.
    at = (SAMPLES * place - shift + mx.arange(SAMPLES)).astype(mx.float32) * speed
    whole = mx.floor(at)
    between = at - whole
    index = start + whole.astype(mx.int32)
    inside = (index >= start) & (index < end)
    index = mx.clip(index, 0, samples.shape[0] - 2)
    left, right = (samples[i].astype(mx.float32) for i in (index, index + 1))
    return mx.where(inside, left + between * (right - left), 0.0) * (1 / 32768)
