"""One training step as one compiled graph, and what a run needs around it: a budget, a log, files to go on from.

It knows no network and no loss. A ``Trainer`` holds all trained weights as one flat array: the optimizer, the average
and the norm of the gradient are then a handful of kernels, where MLX would launch several for each weight. Inside the
step the flat array is split into the module's weights (views, no kernel); the gradient of a split is one concatenation.
Weights, moments and sums are float32; weights that ``half`` names are rounded to bfloat16 for the loss.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

__all__ = ["Budget", "DivergedError", "Every", "Log", "Loss", "Predicate", "Trainer"]

# Takes the module and a batch. Terms are scalars; their sum is minimised. What stands under a name that begins with an
# underscore is not: a scalar is logged, an array only handed back.
Loss = Callable[..., dict[str, mx.array]]
Predicate = Callable[[str, mx.array], bool]
State = dict[str, Any]

EPSILON = 1e-8
STATE_FILE = "trainer.safetensors"


class DivergedError(ArithmeticError):
    """A term of the loss is not finite."""


# ---- where weights stand


@dataclass(frozen=True)
class Slot:
    """One weight: where it stands in the module (``container[key]``), its dotted name and its shape."""

    container: Any
    key: Any
    name: str
    shape: tuple[int, ...]

    def read(self) -> mx.array:
        """What stands there."""
        return self.container[self.key]  # type: ignore[no-any-return]

    def write(self, value: mx.array) -> None:
        """Put ``value`` there."""
        self.container[self.key] = value


def slots(module: nn.Module) -> list[Slot]:
    """Every array of a module that MLX counts as a parameter, in the tree's order."""
    return list(_slots(module, ""))


def _slots(container: Any, path: str) -> Iterator[Slot]:
    items = enumerate(container) if isinstance(container, list | tuple) else container.items()
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        if str(key).startswith("_"):
            continue
        if isinstance(value, mx.array):
            yield Slot(container, key, name, tuple(value.shape))
        elif isinstance(value, dict | list):
            yield from _slots(value, name)


class Layout:
    """Which weights are trained, their order in the flat array, and how they get from there into the module.

    First come those that ``half`` names, in either part the matrices (more than one axis) before the rest, so that
    what is cast and what decays are each a range or two.
    """

    def __init__(self, module: nn.Module, frozen: Predicate | None, half: Predicate | None) -> None:
        everything = slots(module)
        self.carried = [s for s in everything if not _trained(s, frozen)]
        trained = [s for s in everything if _trained(s, frozen)]
        rounded = {s.name: half is not None and half(s.name, s.read()) for s in trained}
        self.trained = sorted(trained, key=lambda s: (not rounded[s.name], len(s.shape) < 2))
        self.ends = _running_sum([math.prod(s.shape) for s in self.trained])
        self.half_slots = sum(rounded.values())
        if not self.trained:
            raise ValueError(f"{type(module).__name__} has no weight to train")

    @property
    def names(self) -> list[str]:
        """The trained weights in the flat array's order."""
        return [slot.name for slot in self.trained]

    @property
    def half_size(self) -> int:
        """Numbers that are rounded to bfloat16: a prefix of the flat array."""
        return self.ends[self.half_slots - 1] if self.half_slots else 0

    def flat(self) -> mx.array:
        """The module's weights, float32 in one array."""
        return mx.concatenate([slot.read().astype(mx.float32).reshape(-1) for slot in self.trained])

    def decays(self) -> mx.array:
        """1 where the flat array holds matrices, else 0: float32 of its size."""
        return mx.concatenate([mx.full((math.prod(s.shape),), float(len(s.shape) > 1)) for s in self.trained])

    def parts(self, flat: mx.array) -> list[mx.array]:
        """The flat array as the weights that the loss sees."""
        halves, border = self.half_slots, self.half_size
        if not halves:
            return self.whole_parts(flat)
        low, high = mx.split(flat, [border])
        pieces = split(low.astype(mx.bfloat16), self.ends[:halves])
        pieces += split(high, [end - border for end in self.ends[halves:]]) if high.size else []
        return self._shaped(pieces)

    def whole_parts(self, flat: mx.array) -> list[mx.array]:
        """The same in float32, for what stands in the module between steps."""
        return self._shaped(split(flat, self.ends))

    def _shaped(self, pieces: list[mx.array]) -> list[mx.array]:
        return [piece.reshape(slot.shape) for piece, slot in zip(pieces, self.trained, strict=True)]


def split(flat: mx.array, ends: list[int]) -> list[mx.array]:
    """Pieces of a flat array that end at ``ends``: views; their gradient is one concatenation.

    MLX's own split into more than ten is as many slices, each with a gradient of the whole array's size.
    """

    @mx.custom_function
    def pieces(flat: mx.array) -> list[mx.array]:
        return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @pieces.vjp
    def gradient(_: Any, cotangents: list[mx.array], outputs: list[mx.array]) -> mx.array:
        return mx.concatenate(cotangents)

    return cast(list[mx.array], pieces(flat))


def _trained(slot: Slot, frozen: Predicate | None) -> bool:
    value = slot.read()
    return bool(mx.issubdtype(value.dtype, mx.floating)) and not (frozen is not None and frozen(slot.name, value))


def _running_sum(sizes: list[int]) -> list[int]:
    return list(itertools.accumulate(sizes))


# ---- the step


class Trainer:
    """AdamW on a module's weights: cosine schedule with warm-up, clipping by the global norm, averaged weights.

    Between steps the module holds the current weights. ``frozen`` weights and integer arrays are carried: they are read
    from the module before each step, and the loss may replace them (running statistics); what then stands in the module
    stays. ``batch`` is any tree of arrays. The learning rate falls from ``peak`` to ``peak * floor``.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        *,
        peak: float = 2e-3,
        warmup: int = 400,
        floor: float = 0.015,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.03,
        clip: float = 1.0,
        ema: float | None = None,
        frozen: Predicate | None = None,
        half: Predicate | None = None,
        seed: int = 0,
        compile: bool = True,
    ) -> None:
        self.module, self._loss = module, loss
        self._peak, self._warmup, self._floor = peak, warmup, floor
        self._betas, self._decay, self._clip, self._ema = betas, weight_decay, clip, ema
        self.layout = Layout(module, frozen, half)
        self._decays = self.layout.decays()
        self._state = self._initial()
        self._seed, self.steps = seed, 0
        self._in_flight: dict[str, mx.array] = {}
        random = mx.random.state
        self._run = mx.compile(self._advance, inputs=random, outputs=random) if compile else self._advance
        self._settle()

    @property
    def weights(self) -> mx.array:
        """The trained weights, float32 in one array: what ``using`` takes."""
        return self._state["weights"]  # type: ignore[no-any-return]

    def step(self, progress: float, *batch: Any) -> dict[str, mx.array]:
        """One update at ``progress`` (0 .. 1) of the run; gives the loss's terms without waiting for them.

        It waits for the step before, so that never more than two are under way. ``norm`` is the gradient's before
        clipping. ``mx.random`` is seeded by the step's number, inside and anew for what is drawn after it, so that a
        resumed run draws the same. Numbers and strings in ``batch`` are constants: each has a graph of its own.
        """
        mx.random.seed(self._seed << 32 | 2 * self.steps)
        rates = mx.array(self._rates(progress), mx.float32)
        carried = [slot.read() for slot in self.layout.carried]
        state, parts, carried, terms = self._run(self._state, carried, rates, batch)
        mx.async_eval(state, carried, terms)
        mx.eval(self._in_flight)
        self._state, self._in_flight = state, terms
        self.steps += 1
        self._fill(parts, carried)
        self._settle()
        return terms

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The module with the averaged weights (the current ones if ``ema`` is None), float32, while the block runs."""
        flat = self._state.get("average", self.weights)
        self._fill(self.layout.whole_parts(flat))
        try:
            yield self.module
        finally:
            self._fill(self.layout.whole_parts(self.weights))

    @contextmanager
    def using(self, flat: mx.array) -> Iterator[nn.Module]:
        """The module with the weights of ``flat`` as the loss sees them, also inside a graph; what stood there returns.

        For a second network inside the first one's loss: give its ``weights`` with the batch.
        """
        before = [slot.read() for slot in self.layout.trained]
        self._fill(self.layout.parts(flat))
        try:
            yield self.module
        finally:
            self._fill(before)

    def edit(self, change: Callable[[nn.Module], None]) -> None:
        """Let ``change`` replace weights in the module, and take them over (into the average too)."""
        change(self.module)
        self._state["weights"] = self.layout.flat()
        if "average" in self._state:
            self._state["average"] = self._state["weights"]
        mx.eval(self._state)

    # ---- files

    def save(self, folder: Path, **notes: Any) -> None:
        """Write all there is to go on from, whole or not at all; ``notes`` is anything JSON can hold."""
        folder.mkdir(parents=True, exist_ok=True)
        about = {"steps": self.steps, "names": self.layout.names, "notes": notes}
        arrays = dict(self._state) | {f"carried.{s.name}": s.read() for s in self.layout.carried}
        partial = folder / f"partial.{STATE_FILE}"
        mx.save_safetensors(str(partial), arrays, metadata={"trainer": json.dumps(about)})
        partial.replace(folder / STATE_FILE)

    def resume(self, folder: Path) -> dict[str, Any]:
        """Go on from ``save``; gives its notes.

        Raises:
            FileNotFoundError: if nothing was saved.
            ValueError: if it was saved by another module or another way of averaging.
        """
        arrays, metadata = cast(
            tuple[dict[str, mx.array], dict[str, str]], mx.load(str(folder / STATE_FILE), return_metadata=True)
        )
        about = json.loads(metadata["trainer"])
        state = {name: arrays[name] for name in arrays if not name.startswith("carried.")}
        if about["names"] != self.layout.names or _shapes(state) != _shapes(self._state):
            raise ValueError(f"{folder / STATE_FILE}: saved by another model: {_shapes(state)} {_shapes(self._state)}")
        mx.eval(state)
        self._state, self.steps = state, about["steps"]
        carried = [arrays[f"carried.{s.name}"] for s in self.layout.carried]
        self._fill(self.layout.whole_parts(self.weights), carried)
        self._settle()
        return about["notes"]  # type: ignore[no-any-return]

    # ---- inside

    def _initial(self) -> State:
        weights = self.layout.flat()
        state = {"weights": weights, "first": mx.zeros_like(weights), "second": mx.zeros_like(weights)}
        if self._ema is not None:
            state["average"] = weights
        mx.eval(state)
        return state

    def _settle(self) -> None:
        mx.random.seed(self._seed << 32 | (2 * self.steps + 1))

    def _fill(self, parts: list[mx.array], carried: list[mx.array] | None = None) -> None:
        for slot, part in zip(self.layout.trained, parts, strict=True):
            slot.write(part)
        for slot, value in zip(self.layout.carried, carried or [], strict=carried is not None):
            slot.write(value)

    def _rates(self, progress: float) -> list[float]:
        """Learning rate, the corrections of both moments' start from zero, and the average's decay."""
        count = self.steps + 1
        cosine = 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))
        rate = self._peak * min(1.0, count / max(self._warmup, 1)) * (self._floor + (1 - self._floor) * cosine)
        first, second = (1 / (1 - beta**count) for beta in self._betas)
        return [rate, first, second, min(self._ema or 0.0, (1 + count) / (10 + count))]

    def _advance(
        self, state: State, carried: list[mx.array], rates: mx.array, batch: Any
    ) -> tuple[State, list[mx.array], list[mx.array], dict[str, mx.array]]:
        stood = [slot.read() for slot in self.layout.trained], [slot.read() for slot in self.layout.carried]
        try:
            (_, (terms, carried)), gradient = mx.value_and_grad(self._total)(state["weights"], carried, batch)
        finally:
            self._fill(*stood)
        state, norm = self._update(state, gradient, rates)
        return state, self.layout.whole_parts(state["weights"]), carried, terms | {"norm": norm}

    def _total(
        self, flat: mx.array, carried: list[mx.array], batch: Any
    ) -> tuple[mx.array, tuple[dict[str, mx.array], list[mx.array]]]:
        self._fill(self.layout.parts(flat), carried)
        terms = self._loss(self.module, *batch)
        total = mx.array(0.0)
        for name, value in terms.items():
            total = total if name.startswith("_") else total + value.astype(mx.float32)
        replaced = [mx.stop_gradient(slot.read()) for slot in self.layout.carried]
        return total, ({k: mx.stop_gradient(v) for k, v in terms.items()}, replaced)

    def _update(self, state: State, gradient: mx.array, rates: mx.array) -> tuple[State, mx.array]:
        rate, unbias1, unbias2, keep = mx.split(rates, 4)
        beta1, beta2 = self._betas
        norm = mx.sqrt(mx.square(gradient).sum())
        gradient = gradient * mx.minimum(1.0, self._clip / (norm + 1e-6))
        first = beta1 * state["first"] + (1 - beta1) * gradient
        second = beta2 * state["second"] + (1 - beta2) * mx.square(gradient)
        direction = first * unbias1 / (mx.sqrt(second * unbias2) + EPSILON)
        weights = state["weights"] - rate * (direction + self._decay * self._decays * state["weights"])
        after = {"weights": weights, "first": first, "second": second}
        if "average" in state:
            after["average"] = keep * state["average"] + (1 - keep) * weights
        return after, norm


def _shapes(arrays: dict[str, mx.array]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in sorted(arrays.items())}


# ---- around the steps


class Every:
    """``due()`` is true when ``seconds`` have passed since it last was, or since the start."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, time.monotonic()

    def due(self) -> bool:
        """Whether it is time again."""
        if time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


class Budget:
    """A run's length in seconds, in steps, or the shorter of both. Iterating gives the progress before each step.

    ``used`` is what ``Budget.used()`` of the run before gave: a resumed run has that much less.
    """

    def __init__(
        self, seconds: float | None = None, steps: int | None = None, used: dict[str, Any] | None = None
    ) -> None:
        if seconds is None and steps is None:
            raise ValueError("a budget needs seconds or steps")
        self._seconds, self._steps = seconds, steps
        self._start = time.monotonic() - float((used or {}).get("seconds", 0.0))
        self._done = int((used or {}).get("steps", 0))

    def progress(self) -> float:
        """The fraction done, 0 .. 1."""
        by_time = (time.monotonic() - self._start) / self._seconds if self._seconds else 0.0
        by_steps = self._done / self._steps if self._steps else 0.0
        return min(max(by_time, by_steps), 1.0)

    def used(self) -> dict[str, Any]:
        """Seconds and steps so far, for ``Trainer.save(folder, used=budget.used())``."""
        return {"seconds": time.monotonic() - self._start, "steps": self._done}

    def __iter__(self) -> Iterator[float]:
        while (progress := self.progress()) < 1.0:
            yield progress
            self._done += 1


class Log:
    """JSON lines in a file, and the same on standard output."""

    def __init__(self, path: Path, every: float = 3.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._every = path, Every(every)
        self._start = self._since = time.monotonic()
        self._steps = 0

    def step(self, progress: float, terms: dict[str, mx.array], **more: float) -> None:
        """Count a step; write its terms if the last such line is long enough ago (this waits for them).

        Raises:
            DivergedError: if one of them is not finite.
        """
        self._steps += 1
        if not self._every.due():
            return
        values = {name: float(cast(float, value.item())) for name, value in terms.items() if value.ndim == 0}
        now = time.monotonic()
        pace = 1000 * (now - self._since) / self._steps
        self.write(progress=round(progress, 4), ms=round(pace, 1), **values, **more)
        self._since, self._steps = now, 0
        wrong = [name for name, value in values.items() if not math.isfinite(value)]
        if wrong:
            raise DivergedError(f"{wrong[0]} is {values[wrong[0]]} at {progress:.1%} of the run")

    def write(self, **values: Any) -> None:
        """Write one line now, with the seconds since the start."""
        line = json.dumps({"s": round(time.monotonic() - self._start, 1)} | {k: _short(v) for k, v in values.items()})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)
