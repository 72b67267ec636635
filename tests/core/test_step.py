"""A step written and compiled: the same, in place, and traced once for each capacity, before it is needed."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core.nn import kv_cache
from voicechat_core.nn.ear_tts import EarTtsState
from voicechat_core.nn.step import Step
from voicechat_core.voicechat import VoiceChat


@dataclass
class Part:
    x: mx.array
    count: int = 0


@dataclass
class State:
    parts: list[Part]
    tails: list[mx.array] = field(default_factory=list)


def shifted(state: State, by: mx.array, pair: tuple[mx.array, mx.array]) -> tuple[tuple[mx.array, mx.array], State]:
    parts = [Part(part.x + by, part.count) for part in state.parts]
    total = mx.add(*pair) + sum(part.x.sum() for part in parts)
    return (total, by), State(parts, [2 * tail for tail in state.tails])


def fresh() -> State:
    return State([Part(mx.arange(4.0), 3), Part(mx.ones(2), 5)], [mx.full((3,), 7.0)])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_state_becomes_the_next_one_and_keeps_its_counters(compiled: bool) -> None:
    step, state = Step(shifted, compiled=compiled), fresh()
    parts, old = state.parts, state.parts[0].x
    for n in (1, 2):
        total, by = step(state, mx.array(2.0), (mx.array(1.0), mx.array(10.0)))
        assert by.item() == 2.0
        assert total.item() == 11 + (6 + 4 * 2 * n) + (2 + 2 * 2 * n)
    assert state.parts is parts
    assert [part.count for part in state.parts] == [3, 5]
    assert state.parts[0].x is not old
    np.testing.assert_array_equal(np.array(state.parts[0].x), [4, 5, 6, 7])
    np.testing.assert_array_equal(np.array(state.tails[0]), [28, 28, 28])
    dropped = weakref.ref(state)
    del state
    assert dropped() is None  # a step keeps no state that nobody else does


def test_it_is_traced_once_for_each_shape_and_ahead_of_need() -> None:
    traced = []

    def recorded(state: State, by: mx.array, pair: tuple[mx.array, mx.array]) -> object:
        traced.append(state.parts[0].x.shape)
        return shifted(state, by, pair)

    step = Step(recorded, compiled=True)
    inputs = mx.array(1.0), (mx.array(1.0), mx.array(2.0))
    larger = State([Part(mx.zeros(8)), Part(mx.ones(2))], [mx.zeros(3)])
    assert step.prepare(larger, *inputs)
    assert not step.prepare(larger, *inputs)
    np.testing.assert_array_equal(np.array(larger.parts[0].x), np.zeros(8))  # as it was
    for state in (fresh(), larger, fresh(), larger):
        step(state, *inputs)
    assert traced == [(8,), (4,)]
    assert not Step(shifted, compiled=False).prepare(fresh(), *inputs)


def test_a_failure_while_it_is_traced_leaves_it_usable() -> None:
    fails = [True]

    def once(state: State, by: mx.array) -> object:
        if fails.pop() if fails else False:
            raise ValueError("once")
        return shifted(state, by, (by, by))

    step, state = Step(once, compiled=True), fresh()
    with pytest.raises(ValueError, match="once"):
        step(state, mx.array(1.0))
    total, _ = step(state, mx.array(1.0))
    assert total.item() == 2 + 10 + 4


@pytest.mark.parametrize("context", [None, 5])
def test_a_growing_session_compiles_at_doublings_only_and_before_them(
    tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch, context: int | None
) -> None:
    """The capacities that the speech decoder is compiled for, with the length at which that was."""
    monkeypatch.setattr(kv_cache, "BLOCK", 16)
    functions = tiny.model.functions
    traced: list[tuple[int, ...]] = []

    def speak(state: EarTtsState, *inputs: mx.array) -> object:
        traced.append(tuple(sorted({cache.keys.shape[2] for cache in state.caches})))
        return functions.speak(state, *inputs)

    steps = type(tiny.model.steps)(functions, compiled=True)
    steps.speech = Step(speak, compiled=True)
    opening = VoiceChat(tiny.model).prompts.opening([], tts_context_frames=context)  # states of such blocks
    llm, voice = opening.llm, opening.speech.ear_tts
    at = []
    for _ in range(100):
        steps.prepare_next(llm, voice)
        before = len(traced)
        steps._for_speech(voice)  # what a frame would need
        if len(traced) > before:
            at.append(voice.caches[0].position)
        functions.voice.reserve(voice)
    if context is None:  # 37 positions of the voice prompt, then 100 more
        assert traced == [(64,), (128,), (256,)]
        assert at == [37]  # every later capacity was there before it was needed
    else:
        assert traced == [(42,)]
        assert at == [37]


def test_a_step_that_two_threads_ran_is_forgotten_in_both() -> None:
    """MLX finds what it compiled by the function's address, and forgets a function in one thread only: a step of
    another model at the same address would compute with the weights of the one before.
    """

    def scaled(by: float) -> Step[list[mx.array]]:
        weight = mx.full((1,), by)
        mx.eval(weight)
        return Step(lambda state, x: (x * weight, state), compiled=True)

    def run(step: Step[list[mx.array]]) -> float:
        return float(step([mx.zeros(1)], mx.ones(1)).item())

    def elsewhere(step: Step[list[mx.array]]) -> float:
        try:
            return run(step)
        finally:
            mx.clear_streams()

    lasting = ThreadPoolExecutor(1)  # a thread that outlives the steps, as others do not
    for by in range(1, 40):
        step = scaled(by)
        with ThreadPoolExecutor(1) as passing:
            found = [run(step), lasting.submit(run, step).result(), passing.submit(elsewhere, step).result()]
        assert found == [by] * 3
        del step
    lasting.submit(mx.clear_streams).result()
    lasting.shutdown()


def test_each_thread_compiles_ahead_for_itself() -> None:
    step, found = Step(shifted, compiled=True), list[bool]()
    inputs = (mx.array(2.0), (mx.array(1.0), mx.array(10.0)))

    def prepare() -> None:
        found.extend(step.prepare(fresh(), *inputs) for _ in range(2))

    prepare()
    thread = threading.Thread(target=prepare)
    thread.start()
    thread.join()
    assert found == [True, False, True, False]
