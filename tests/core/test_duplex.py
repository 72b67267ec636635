"""The order of things inside a frame: who is called, with what, and what is fed back."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core import duplex
from voicechat_core.duplex import DuplexState, Frame
from voicechat_core.model import VoiceChatModel
from voicechat_core.nn import state as states
from voicechat_core.nn.ear_tts import EarTTS
from voicechat_core.noise import KeyedNoise
from voicechat_core.prompt import PromptStates
from voicechat_core.voicechat import VoiceChat

PROMPT = [1, 40, 2]


@dataclass
class Calls:
    """What the speech decoder and the noise source were asked for."""

    conditions: list[mx.array] = field(default_factory=list)
    previous: list[mx.array] = field(default_factory=list)
    codes: list[mx.array] = field(default_factory=list)
    draws: list[tuple[Any, ...]] = field(default_factory=list)


@pytest.fixture
def model(plain: VoiceChat) -> VoiceChatModel:
    return plain.model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A record of every step of the speech decoder and every draw."""
    calls, original = Calls(), EarTTS.decode

    def decode(self: EarTTS, condition: mx.array, codes: mx.array, *rest: Any) -> Any:
        result = original(self, condition, codes, *rest)
        for record, value in ((calls.conditions, condition), (calls.previous, codes), (calls.codes, result[0])):
            record.append(value)
        return result

    prompt_step, frame = KeyedNoise.prompt_step, KeyedNoise.frame
    monkeypatch.setattr(EarTTS, "decode", decode)
    monkeypatch.setattr(
        KeyedNoise,
        "prompt_step",
        lambda self, ordinal: (calls.draws.append(("prompt", ordinal)), prompt_step(self, ordinal))[1],
    )
    monkeypatch.setattr(
        KeyedNoise,
        "frame",
        lambda self, index, ordinal: (calls.draws.append(("frame", index, ordinal)), frame(self, index, ordinal))[1],
    )
    return calls


def audio(frames: int, model: VoiceChatModel) -> mx.array:
    return mx.random.normal((1, frames, model.config.text_config.hidden_size), key=mx.random.key(1))


def run(
    model: VoiceChatModel, prompt: list[int], frames: int, seed: int = 0
) -> tuple[Frame | None, list[Frame], DuplexState]:
    noise = KeyedNoise(seed, model.config.tts_config)
    first, state = duplex.start(model, model.warm_up(), prompt, noise)
    heard, results = audio(frames, model), []
    for t in range(frames):
        frame, state = duplex.step(model, heard[:, t : t + 1], state, noise)
        results.append(frame)
    return first, results, state


def force(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    """Make the text channel say ``ids``, one a frame."""
    original, left = duplex._think, iter(ids)

    def think(*arguments: Any) -> Frame:
        frame = original(*arguments)
        frame.text = mx.array([[next(left)]], dtype=mx.int32)
        return frame

    monkeypatch.setattr(duplex, "_think", think)


@pytest.mark.parametrize("prompt", [[], [1], PROMPT])
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_the_schedule(model: VoiceChatModel, calls: Calls, prompt: list[int], frames: int) -> None:
    _, results, state = run(model, prompt, frames)
    length = len(prompt)
    assert state.position == length + frames
    prompted = [("prompt", t - 1) for t in range(1, length)]
    framed = [("frame", t - length, t - 1) for t in range(max(1, length), length + frames)]
    assert calls.draws == prompted + framed
    assert len(calls.codes) == length + frames - 1  # never at position 0
    silence = mx.array_equal(results[0].codes, model.silence_codes)
    assert silence == (length == 0)


def test_codes_at_zero_can_be_nvidias(model: VoiceChatModel) -> None:
    noise, zeros = KeyedNoise(0, model.config.tts_config), mx.zeros_like(model.silence_codes)
    _, state = duplex.start(model, model.warm_up(), [], noise, zeros)
    frame, _ = duplex.step(model, audio(1, model), state, noise, zeros)
    assert mx.array_equal(frame.codes, zeros)


def test_both_histories_start_as_pad_and_functions_weigh_double(model: VoiceChatModel) -> None:
    _, results, _ = run(model, [], 3)
    embed, heard = model.networks.stt_model.embed_tokens, audio(3, model)
    pad = embed(mx.array([[model.config.pad_token_id]]))
    assert mx.allclose(results[0].inputs, heard[:, :1] + 3 * pad, atol=1e-5)
    for t in (1, 2):
        before = results[t - 1]
        expected = heard[:, t : t + 1] + embed(before.text) + 2.0 * embed(before.function)
        assert mx.allclose(results[t].inputs, expected, atol=1e-5)


def test_the_prompt_says_nothing_and_is_heard_as_its_own_embeddings(model: VoiceChatModel) -> None:
    first, results, _ = run(model, PROMPT, 1)
    assert first is not None
    pad, embed = model.config.pad_token_id, model.networks.stt_model.embed_tokens
    assert first.text.tolist() == first.function.tolist() == [[pad] * 3]
    expected = embed(mx.array([PROMPT])) + 3 * embed(mx.array([[pad]]))
    assert mx.allclose(first.inputs, expected, atol=1e-5)
    assert mx.array_equal(first.codes[:, :1], model.silence_codes)
    assert mx.allclose(results[0].inputs, audio(1, model) + 3 * embed(mx.array([[pad]])), atol=1e-5)


def test_one_scan_of_the_prompt_is_its_steps(model: VoiceChatModel) -> None:
    """Different kernels for one and many positions: hidden states within 1e-5 of their largest value."""
    first, _, _ = run(model, PROMPT, 1)
    assert first is not None
    llm = model.networks.stt_model.llm
    state, hidden = llm.new_state(1), []
    for t in range(len(PROMPT)):
        h, state = llm.step(first.inputs[:, t : t + 1], state)
        hidden.append(h)
    stepped = mx.concatenate(hidden, axis=1)
    assert float(mx.abs(stepped - first.hidden).max() / mx.abs(stepped).max()) < 1e-5


def test_the_first_step_has_no_previous_codes(model: VoiceChatModel, calls: Calls) -> None:
    run(model, [1], 1)
    assert set(np.array(calls.previous[0]).flat) == {model.config.tts_config.codebook_size}


def test_codes_feed_back_except_after_eos_for_one_step(
    model: VoiceChatModel, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model.config
    ids = [40, 41, config.eos_token_id, config.pad_token_id, config.bos_token_id, 42]
    force(monkeypatch, ids)
    run(model, [], len(ids))
    steps = ids[1:]  # the decoder does not run at position 0
    for t, (text, previous) in enumerate(zip(steps, calls.previous, strict=True)):
        if text == config.eos_token_id:
            assert mx.array_equal(previous, model.silence_codes)
        elif t > 0:
            assert mx.array_equal(previous, calls.codes[t - 1])
    for text, condition in zip(steps, calls.conditions, strict=True):
        assert mx.array_equal(condition[0, 0], model.subword_table[text])


def test_a_prompts_speech_state_does_not_depend_on_the_seed(model: VoiceChatModel) -> None:
    results = [run(model, PROMPT, 1, seed) for seed in (0, 1)]
    (first_a, _, _), (first_b, _, _) = results
    assert first_a is not None
    assert first_b is not None
    assert mx.array_equal(first_a.codes, first_b.codes)
    a, b = (frames[0].codes for _, frames, _ in results)
    assert not mx.array_equal(a, b)


def test_a_copy_of_the_state_goes_its_own_way(model: VoiceChatModel) -> None:
    noise = KeyedNoise(0, model.config.tts_config)
    heard = audio(4, model)
    _, state = duplex.start(model, model.warm_up(), [], noise)
    _, state = duplex.step(model, heard[:, :1], state, noise)
    fork = states.copy(state)
    straight = [duplex.step(model, heard[:, t : t + 1], state, noise)[0].codes for t in (1, 2)]
    mx.eval(straight)
    forked = [duplex.step(model, heard[:, t : t + 1], fork, noise)[0].codes for t in (1, 2)]
    assert all(mx.array_equal(a, b) for a, b in zip(straight, forked, strict=True))
    assert states.nbytes(fork) == states.nbytes(state) > 0


@pytest.mark.parametrize("length", [0, 1, 2, 40])
def test_shared_prompt_states_are_those_of_a_run(model: VoiceChatModel, length: int) -> None:
    """To the bit, whether computed for this prompt, extended from a shorter one or rewound from a longer one."""
    prompt = [1, *range(20, 20 + length - 2), 2][:length]
    noise = KeyedNoise(9, model.config.tts_config)  # a prompt ignores the seed
    _, expected = duplex.start(model, model.warm_up(), prompt, noise)
    alone, extended, rewound = (PromptStates(model) for _ in range(3))
    extended.speech(max(0, length - 2))
    rewound.speech(length + 30)
    for prompts in (alone, extended, rewound):
        found = prompts.opening(prompt)
        assert dict(states.numbers(found)) == dict(states.numbers(expected))
        assert same_arrays(found, expected)


def same_arrays(found: DuplexState, expected: DuplexState) -> bool:
    """Equal shapes and values, of the speech decoder's buffers the filled part."""
    filled = slice(0, expected.speech.ear_tts.caches[0].length)
    mine, theirs = (dict(states.arrays(state)) for state in (found, expected))
    for name in mine:
        part = (slice(None), slice(None), filled) if "caches" in name else ...
        if mine[name].shape != theirs[name].shape or not mx.array_equal(mine[name][part], theirs[name][part]):
            return False
    return mine.keys() == theirs.keys()
