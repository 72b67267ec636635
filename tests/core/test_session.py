"""A live session: limits, ends, options, snapshots, what is counted. Chunks are in tests/property."""

import gc
import json
import shutil
import threading
from collections import deque
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.core import scripted
from tests.core.scripted import PAD
from voicechat_core import (
    AudioError,
    AudioFrame,
    AudioTail,
    Cancelled,
    ContextLimitError,
    Done,
    Event,
    FunctionDelta,
    InputError,
    ModelError,
    Profiler,
    SessionClosedError,
    Snapshot,
    TextDelta,
    VoiceChat,
    VoiceChatError,
    duplex,
    load,
)
from voicechat_core.compilation import wanted
from voicechat_core.memory import filled_bytes
from voicechat_core.nn import state as states
from voicechat_core.nn.ear_tts import EarTTS
from voicechat_core.nn.nemotron_h import NemotronH
from voicechat_core.profile import STAGES
from voicechat_core.prompt import PromptStates
from voicechat_core.streaming import events_of
from voicechat_core.weights import named_parameters


def sound(frames: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(int(frames * 1280)) * 0.1).astype(np.float32)


def audio(events: list[Event]) -> list[AudioFrame]:
    return [event for event in events if isinstance(event, AudioFrame)]


# ---- the shape of what comes out


def test_a_frame_is_complete_and_the_end_is_done(tiny: VoiceChat) -> None:
    session = tiny.session(seed=3)
    events = [*session.push(sound(4.5)), *session.flush()]
    frames = audio(events)
    assert [frame.frame_index for frame in frames] == [0, 1, 2, 3, 4]
    assert events[-1] == Done(5)
    for frame in frames:
        assert (frame.samples.shape, frame.samples.dtype) == ((1764,), np.float32)
        assert (frame.codes.shape, frame.codes.dtype) == ((31,), np.int32)
        assert type(frame.text_token) is type(frame.function_token) is int
    order = {"TranscriptDelta": 0, "TextDelta": 1, "FunctionDelta": 2, "AudioFrame": 3, "Done": 4}
    keys = [(getattr(e, "frame_index", 5), order[type(e).__name__]) for e in events]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_deltas_join_to_the_cumulative_texts(tiny: VoiceChat) -> None:
    session, joined = tiny.session(system_prompt="hi"), {"TranscriptDelta": "", "TextDelta": "", "FunctionDelta": ""}
    for event in [*session.push(sound(40)), *session.flush()]:
        if type(event).__name__ in joined:
            joined[type(event).__name__] += event.text  # type: ignore[union-attr]
    assert joined == {
        "TranscriptDelta": session.transcript, "TextDelta": session.text, "FunctionDelta": session.function_text,
    }  # fmt: skip
    assert all(joined.values())


@pytest.mark.parametrize("cut", [0, 8])  # of 8 frames the last is the second turn's start
def test_a_space_stands_between_the_turns_of_the_text(
    tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """In the deltas, as a whole, after a snapshot between them, and offline; on the function channel there are none."""
    bos, eos = tiny.model.config.bos_token_id, tiny.model.config.eos_token_id
    two = tiny.model.tokenizer.encode("Two.")
    turns = [bos, *two, eos, *[PAD] * (5 - len(two)), bos, *two, bos]
    samples = sound(len(turns) + 2)
    scripted.script(monkeypatch, turns, turns)
    session = tiny.session()
    events = list(session.push(samples[: cut * 1280]))
    session = session.fork()
    events += chain(session.push(samples[cut * 1280 :]), session.flush())
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Two. Two."
    assert (session.text, session.function_text) == ("Two. Two.", "Two.Two.")
    scripted.script(monkeypatch, turns, turns)
    result = tiny.generate(samples)
    assert (result.text, result.function_text) == ("Two. Two.", "Two.Two.")


def test_ids_and_texts_are_those_of_generate(tiny: VoiceChat) -> None:
    samples = sound(20.3)
    result, session = tiny.generate(samples, system_prompt="hi", seed=9), tiny.session(system_prompt="hi", seed=9)
    frames = audio([*session.push(samples), *session.flush()])
    assert [frame.text_token for frame in frames] == result.text_tokens
    assert [frame.function_token for frame in frames] == result.function_tokens
    assert np.array_equal([frame.codes for frame in frames], result.audio_codes)
    assert (session.transcript, session.text, session.function_text) == (
        result.transcript, result.text, result.function_text,
    )  # fmt: skip


def test_int16_is_the_same_as_its_floats(tiny: VoiceChat) -> None:
    pcm = (sound(3) * 8000).astype(np.int16)
    a, b = tiny.session(), tiny.session()
    assert [*a.push(pcm)] == [*b.push(pcm.astype(np.float32) / 32768)]


def test_a_frame_runs_when_its_last_sample_is_there(tiny: VoiceChat) -> None:
    early, late, samples = tiny.session(), tiny.session(wait_for_full_frame=True), sound(2)
    assert tiny.first_frame_samples == 200
    assert [*early.push(samples[:199])] == []
    assert len(audio([*early.push(samples[199:200])])) == 1
    assert [*late.push(samples[:1279])] == []
    assert len(audio([*late.push(samples[1279:1280])])) == 1
    assert early.frame_index == late.frame_index == 1


def test_the_pushed_array_may_be_used_again(tiny: VoiceChat) -> None:
    samples = sound(3)
    buffer = samples.copy()
    a, b = tiny.session(), tiny.session()
    events = a.push(buffer)
    buffer[:] = 0.5
    assert [*events] == [*b.push(samples)]


def test_events_not_taken_come_with_the_next_call(tiny: VoiceChat) -> None:
    whole, lazy, samples = tiny.session(), tiny.session(), sound(4)
    expected = [*whole.push(samples), *whole.flush()]
    found = [next(lazy.push(samples))]
    assert lazy.frame_index == 1
    lazy.push(np.zeros(0, np.float32))  # not taken at all
    found += [*lazy.flush()]
    assert found == expected


# ---- the end


def test_flush_can_drop_what_has_begun(tiny: VoiceChat) -> None:
    session = tiny.session()
    events = [*session.push(sound(1.1)), *session.flush(pad_partial=False)]
    assert len(audio(events)) == 1
    assert events[-1] == Done(1)


def test_the_tail_is_the_end_of_generate(tiny: VoiceChat) -> None:
    samples = sound(5)
    events = [*events_of(tiny.session(), samples, 700)]
    stream = np.concatenate([e.samples for e in events if isinstance(e, AudioFrame | AudioTail)])
    offline = tiny.generate(samples).audio
    assert isinstance(events[-2], AudioTail)
    assert stream.shape == (5 * 1764 + 8,)
    assert np.abs(stream[14:] - offline[6:]).max() < 1e-5  # blocks of eight frames: other kernels than one frame's


def test_no_samples_are_no_frames(tiny: VoiceChat) -> None:
    session = tiny.session()
    assert [*session.push(np.zeros(0, np.float32)), *session.flush(tail=True)] == [Done(0)]


def test_after_the_end_there_is_nothing(tiny: VoiceChat) -> None:
    session = tiny.session()
    list(session.push(sound(1)))
    list(session.flush())
    assert session.closed
    assert [*session.flush()] == session.cancel() == []
    for call in (lambda: session.push(sound(1)), session.snapshot, session.fork):
        with pytest.raises(SessionClosedError, match="ended after 1 frames, by flush"):
            call()


def test_cancel_drops_everything_at_once(tiny: VoiceChat) -> None:
    session = tiny.session()
    events = session.push(sound(5))
    next(events)
    assert session.cancel() == [Cancelled(1)]
    assert [*events] == [*session.flush()] == session.cancel() == []
    assert session.nbytes == 0
    with pytest.raises(SessionClosedError, match="by cancel"):
        session.push(sound(1))


def test_cancel_after_flush_and_before_its_events(tiny: VoiceChat) -> None:
    session = tiny.session()
    session.flush()
    assert session.cancel() == [Cancelled(0)]


@pytest.mark.parametrize("ended", ["flush", "cancel", "not at all"])
def test_reset_is_a_new_session(tiny: VoiceChat, ended: str) -> None:
    session, samples = tiny.session(system_prompt="hi", seed=5), sound(3.5)
    first = [*session.push(samples)]
    if ended == "flush":
        list(session.flush())
    elif ended == "cancel":
        session.cancel()
    session.reset()
    assert (session.frame_index, session.text, session.transcript, session.closed) == (0, "", "", False)
    assert [*session.push(samples)] == first


def test_an_iterator_from_before_a_reset_takes_nothing_of_what_follows(tiny: VoiceChat) -> None:
    session, samples = tiny.session(), sound(3)
    expected = [*tiny.session().push(samples)]
    old = session.push(samples)
    next(old)
    session.reset()
    new = session.push(samples)
    assert [*old] == []
    assert [*new] == expected


# ---- limits and bad input


def test_the_frame_limit_loses_nothing(tiny: VoiceChat) -> None:
    samples, events = sound(6), list[Event]()
    session, free = tiny.session(max_frames=3), tiny.session()
    expected = [*free.push(samples[: 3 * 1280])]
    with pytest.raises(ContextLimitError, match="frame 3 would pass the session's limit of 3 frames"):
        events.extend(session.push(samples))
    assert events == expected
    assert [*session.flush()][-1] == Done(3)


def test_the_limit_is_seen_in_a_padded_frame_too(tiny: VoiceChat) -> None:
    session = tiny.session(max_frames=1)
    assert len(audio([*session.push(sound(1.1))])) == 1
    with pytest.raises(ContextLimitError, match="limit of 1 frames"):
        list(session.flush())
    assert [*session.flush()][-1] == Done(1)


def test_what_is_pending_is_bounded_by_the_limit(tiny: VoiceChat) -> None:
    session, other, samples = tiny.session(max_frames=2), tiny.session(), sound(50)
    session.push(samples)
    assert session._framing.received == 3 * 1280
    with pytest.raises(ContextLimitError, match="frame 2"):
        session.push(sound(1))
    events = session.push(np.zeros(0, np.float32))
    found = [next(events) for _ in range(len([*other.push(samples[:2560])]))]
    assert len(audio(found)) == 2
    with pytest.raises(ContextLimitError, match="frame 2"):
        next(events)
    with pytest.raises(ContextLimitError, match="frame 2"):
        session.push(sound(0.01))  # nothing more is heard, not even a little
    assert [*session.flush()][-1] == Done(2)


@pytest.mark.parametrize(
    ("samples", "rate", "error", "words"),
    [
        (np.array([0.0, np.nan], np.float32), 16000, AudioError, "nan"),
        (np.array([0.0, np.inf], np.float32), 16000, AudioError, "inf"),
        (np.zeros((10, 2), np.float32), 16000, AudioError, r"\(10, 2\)"),
        (np.zeros((1, 10), np.float32), 16000, AudioError, r"\(1, 10\)"),
        (np.zeros(10, np.int32), 16000, AudioError, "int32"),
        (np.full(10, 20000.0), 16000, AudioError, "20000"),
        ("words", 16000, AudioError, "shape"),
        (np.zeros(10, np.float32), 8000, InputError, "8000.*16000"),
        (np.zeros(10, np.float32), 22050.0, InputError, "22050"),
        (np.zeros(10, np.float32), None, InputError, "None"),
    ],
)
def test_bad_samples_are_refused_and_cost_nothing(
    tiny: VoiceChat, samples: Any, rate: Any, error: type[VoiceChatError], words: str
) -> None:
    session, other = tiny.session(), tiny.session()
    good = sound(2.5)
    expected = [*other.push(good), *other.flush()]
    found = [*session.push(good[:700])]
    with pytest.raises(error, match=words):
        session.push(samples, sample_rate=rate)
    found += [*session.push(good[700:]), *session.flush()]
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"system_prompt": 7}, "system_prompt is 7"),
        ({"max_frames": -1}, "max_frames is -1"),
        ({"tts_context_frames": 0}, "tts_context_frames is 0"),
        ({"tts_context_frames": 2.5}, "tts_context_frames is 2.5"),
    ],
)
def test_options_out_of_range(tiny: VoiceChat, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        tiny.session(**arguments)


def test_a_prompt_that_leaves_no_position(tiny: VoiceChat) -> None:
    with pytest.raises(ContextLimitError, match="131072 prompt tokens and 1 frames are 131073 positions"):
        tiny.session(system_prompt="\u00e9" * (131070 // 2))


def test_the_models_positions_limit_a_session(tiny: VoiceChat) -> None:
    assert tiny.session(system_prompt="hi").options.max_frames == 131072 - 4
    assert tiny.session(max_frames=np.int64(7)).options.max_frames == 7  # type: ignore[arg-type]
    assert tiny.session(max_frames=10**9).options.max_frames == 131072


def test_a_failed_frame_ends_the_session_and_no_other(plain: VoiceChat) -> None:
    session, other, samples = plain.session(), plain.session(), sound(4)
    expected = [*plain.session().push(samples)]
    found = [*other.push(samples[:2000])]
    head = plain.model.networks.stt_model.lm_head
    before, events = head.weight, session.push(samples)
    first = next(events)
    head.weight = before * float("inf")
    try:
        with pytest.raises(ModelError, match="frame 1: the model computed a value that is not finite"):
            list(events)
    finally:
        head.weight = before
    assert first == expected[0]
    with pytest.raises(SessionClosedError, match="by the failure of frame 1"):
        session.push(samples)
    assert session.cancel() == [*session.flush()] == []
    assert [*found, *other.push(samples[2000:])] == expected
    session.reset()
    assert [*session.push(samples)] == expected


# ---- prompts


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Positions of every step of the trunk and of the speech decoder, as they are taken."""
    counts: dict[str, list[int]] = {"llm": [], "tts": []}
    trunk, decoder = NemotronH.step, EarTTS.decode

    def trunk_step(self: NemotronH, x: mx.array, state: Any) -> Any:
        counts["llm"].append(x.shape[1])
        return trunk(self, x, state)

    def decoder_step(self: EarTTS, condition: mx.array, *rest: Any) -> Any:
        counts["tts"].append(condition.shape[1])
        return decoder(self, condition, *rest)

    monkeypatch.setattr(NemotronH, "step", trunk_step)
    monkeypatch.setattr(EarTTS, "decode", decoder_step)
    return counts


@pytest.fixture
def prompted(tiny_path: Path, tmp_path: Path) -> VoiceChat:
    """A model of its own, whose checkpoint has a default prompt."""
    path = tmp_path / "prompted"
    shutil.copytree(tiny_path, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "default_system_prompt": "You are Aria."}))
    return load(path, compile="off")


def test_a_warm_model_runs_nothing_for_its_own_prompt(prompted: VoiceChat, steps: dict[str, list[int]]) -> None:
    prompted.warm_up(prompt_tokens=172)
    # Two spoken frames; one scan of the default prompt, and 171 steps that serve every prompt.
    assert steps == {"llm": [14], "tts": [1] * 2 + [1] * 171}
    for counts in steps.values():
        counts.clear()
    prompted.session()
    prompted.session(seed=4, system_prompt="You are Aria.")
    assert steps == {"llm": [], "tts": []}


def test_a_fresh_prompt_is_one_scan(prompted: VoiceChat, steps: dict[str, list[int]]) -> None:
    prompted.warm_up(prompt_tokens=172)
    for counts in steps.values():
        counts.clear()
    session = prompted.session(system_prompt="x" * 170)
    assert len(session.options.prompt_ids) == 172
    assert steps == {"llm": [172], "tts": []}


def test_without_warming_up_the_first_session_pays_once(prompted: VoiceChat, steps: dict[str, list[int]]) -> None:
    prompted.session(system_prompt="x" * 30)
    assert steps == {"llm": [32], "tts": [1] * 31}
    prompted.session(system_prompt="y" * 20, seed=8)
    assert steps == {"llm": [32, 22], "tts": [1] * 31}
    prompted.session(system_prompt="z" * 33)
    assert steps == {"llm": [32, 22, 35], "tts": [1] * 34}  # three more


def test_a_shared_prompt_state_gives_what_its_own_steps_give(tiny_path: Path) -> None:
    """Opened first, opened from a longer one by rewinding, and opened by extension: equal to the bit."""
    samples, prompt = sound(4), "Be concise."
    alone, longer, shorter = (load(tiny_path) for _ in range(3))
    longer.session(system_prompt="x" * 300)
    shorter.session(system_prompt="x")
    runs = [[*model.session(system_prompt=prompt).push(samples)] for model in (alone, longer, shorter)]
    assert runs[0] == runs[1] == runs[2]


def test_sessions_do_not_harm_what_they_share(prompted: VoiceChat) -> None:
    def bits() -> dict[str, bytes]:
        kept = [prompted.prompts._speech, prompted.prompts._default]
        return {f"{i}.{path}": np.array(x).tobytes() for i, s in enumerate(kept) for path, x in states.arrays(s)}

    prompted.warm_up(20)
    before, samples = bits(), sound(6)
    first = [*prompted.session(seed=1).push(samples)]
    forked = prompted.session(seed=1)
    list(forked.push(samples[:3000]))
    list(forked.fork().push(sound(3, seed=2)))
    forked.reset()
    assert [*forked.push(samples)] == first
    assert bits() == before


def test_prompt_steps_can_be_left_out(plain: VoiceChat, steps: dict[str, list[int]]) -> None:
    """NVIDIA's live order: the decoder is not stepped over the prompt, but at every frame."""
    session = plain.session(system_prompt="Be concise.", tts_prompt_steps=False)
    assert steps["tts"] == []
    frames = audio([*session.push(sound(3))])
    assert steps["tts"] == [1, 1, 1]
    with_steps = audio([*plain.session(system_prompt="Be concise.").push(sound(3))])
    assert [f.text_token for f in frames] == [f.text_token for f in with_steps]
    assert not np.array_equal(frames[0].codes, with_steps[0].codes)
    offline = plain.generate(sound(3), system_prompt="Be concise.", tts_prompt_steps=False)
    assert not offline.tts_prompt_steps
    assert np.array_equal([f.codes for f in frames], offline.audio_codes)


# ---- snapshots


def test_a_snapshot_goes_on_to_the_bit(tiny: VoiceChat, tmp_path: Path) -> None:
    session, samples = tiny.session(system_prompt="hi", seed=2, tts_context_frames=6), sound(12)
    list(session.push(samples[:5000]))
    snapshot = session.snapshot()
    snapshot.save(tmp_path / "state.safetensors")
    rest = [*session.push(samples[5000:]), *session.flush(tail=True)]
    for taken in (snapshot, Snapshot.load(tmp_path / "state.safetensors"), snapshot):
        resumed = tiny.resume(taken)
        assert resumed.frame_index == 4
        assert [*resumed.push(samples[5000:]), *resumed.flush(tail=True)] == rest
        assert resumed.text == session.text
        assert resumed.transcript == session.transcript
        assert resumed.function_text == session.function_text != ""
    assert tiny.resume(tmp_path / "state.safetensors").options == session.options


def test_a_fork_goes_its_own_way(tiny: VoiceChat) -> None:
    session, samples = tiny.session(), sound(6)
    list(session.push(samples[:4000]))
    fork = session.fork()
    other = [*fork.push(sound(3, seed=9))]
    straight = tiny.session()
    list(straight.push(samples[:4000]))
    assert [*session.push(samples[4000:])] == [*straight.push(samples[4000:])] != other


def test_a_snapshot_fits_its_model_only(tiny: VoiceChat, tmp_path: Path) -> None:
    from voicechat_core.synthetic import synthesize

    synthesize(tmp_path / "other", seed=1)
    other, snapshot = load(tmp_path / "other"), tiny.session().snapshot()
    with pytest.raises(InputError, match=f"{tiny.model.fingerprint}.*{other.model.fingerprint}"):
        other.resume(snapshot)
    rounded = load(tmp_path / "other", precision="bfloat16")
    assert rounded.model.fingerprint != other.model.fingerprint == load(tmp_path / "other").model.fingerprint


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read as a snapshot"), (b"", "cannot be read"), (b"RIFF" + bytes(100), "cannot be read")],
)
def test_files_that_are_no_snapshots(tiny: VoiceChat, tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "state.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        tiny.resume(path)
    assert str(path) in str(caught.value)


def test_a_cut_or_foreign_file_is_no_snapshot(tiny: VoiceChat, tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    tiny.session().snapshot().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be read as a snapshot"):
        tiny.resume(path)
    with pytest.raises(InputError, match="cannot be read as a snapshot"):
        tiny.resume(tiny_path / "model.safetensors")


def test_a_snapshot_that_cannot_be_written_leaves_nothing(tiny: VoiceChat, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        tiny.session().snapshot().save(tmp_path / "nowhere" / "state.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        tiny.session().snapshot().save(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_older_state_is_refused_by_its_paths(tiny: VoiceChat) -> None:
    snapshot = tiny.session().snapshot()
    arrays = dict(snapshot.arrays)
    arrays["duplex.extra"] = arrays.pop("duplex.text")
    with pytest.raises(InputError, match=r"duplex\.text is missing"):
        tiny.resume(Snapshot(arrays, snapshot.facts))


# ---- randomness


def test_draws_are_a_matter_of_seed_and_frame(tiny: VoiceChat) -> None:
    samples = sound(4)
    first = [*tiny.session(seed=6).push(samples)]
    mx.random.seed(99)
    np.random.seed(99)
    assert [*tiny.session(seed=6).push(samples)] == first
    assert [*tiny.session(seed=7).push(samples)] != first


# ---- what reviewers found untested


def test_an_interrupt_in_a_frame_ends_the_session(tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    session, samples = tiny.session(), sound(3)
    events = session.push(samples)
    next(events)
    with monkeypatch.context() as patch:
        patch.setattr("voicechat_core.duplex.step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            deque(events, maxlen=0)
    assert session.closed
    assert "_live" not in vars(session)  # its memory is free
    with pytest.raises(SessionClosedError, match="by the failure of frame 1"):
        session.push(samples)


def interrupt(*arguments: Any, **names: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_prompt_is_computed_again(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    voicechat, samples, left = load(tiny_path), sound(3), [3]
    step = duplex.prompt_step

    def stopped(*arguments: Any) -> Any:
        left[0] -= 1
        return step(*arguments) if left[0] else interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(duplex, "prompt_step", stopped)
        with pytest.raises(KeyboardInterrupt):
            voicechat.session(system_prompt="Be concise.")
    session = voicechat.session(system_prompt="Be concise.")
    assert [*session.push(samples)] == [*load(tiny_path).session(system_prompt="Be concise.").push(samples)]


def test_an_opening_can_be_given_up_and_keeps_its_steps(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    voicechat, samples, told = load(tiny_path), sound(3), []

    def stop_at_four(done: int) -> None:
        told.append(done)
        if done == 4:
            raise LookupError

    with pytest.raises(LookupError):
        voicechat.session(system_prompt="Be concise.", progress=stop_at_four)
    length = len(voicechat.model.prompt_ids("Be concise."))
    session = voicechat.session(system_prompt="Be concise.", progress=told.append)
    assert told == [1, 2, 3, 4, *range(5, length), length]  # the steps, of which position 0 has none; then the scan
    assert [*session.push(samples)] == [*load(tiny_path).session(system_prompt="Be concise.").push(samples)]


def test_a_reset_that_fails_changes_nothing(tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    session, other, samples = tiny.session(), tiny.session(), sound(4)
    expected, found = [*other.push(samples)], [*session.push(samples[:2000])]
    with monkeypatch.context() as patch:
        patch.setattr(PromptStates, "opening", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.reset()
    assert [*found, *session.push(samples[2000:])] == expected


@pytest.mark.parametrize("frames", range(1, 9))
def test_texts_end_as_those_of_generate(tiny: VoiceChat, frames: int) -> None:
    """Random tokens end inside a character now and then, on each channel: the flush says U+FFFD for it."""
    session, result = tiny.session(), tiny.generate(sound(frames))
    events = [*session.push(sound(frames)), *session.flush()]
    joined = ["".join(e.text for e in events if isinstance(e, kind)) for kind in (TextDelta, FunctionDelta)]
    assert joined == [session.text, session.function_text] == [result.text, result.function_text]


@pytest.mark.parametrize("context", [1, 4, 25, 30])
@pytest.mark.parametrize("prompt", ["", "Be concise."])
def test_a_bounded_history_offline_and_live(tiny: VoiceChat, prompt: str, context: int) -> None:
    samples = sound(20)
    offline = tiny.generate(samples, system_prompt=prompt, tts_context_frames=context)
    exact = tiny.generate(samples, system_prompt=prompt)
    frames = audio([*tiny.session(system_prompt=prompt, tts_context_frames=context).push(samples)])
    assert np.array_equal([f.codes for f in frames], offline.audio_codes)
    assert offline.tts_context_frames == context
    steps = 20 + len(tiny.model.prompt_ids(prompt)) - 1  # none at time 0
    assert np.array_equal(offline.audio_codes, exact.audio_codes) == (context >= steps)


def test_a_bound_pins_the_voice_prompt(tiny: VoiceChat) -> None:
    caches = tiny.prompts.opening([], tts_context_frames=9).speech.ear_tts.caches
    assert {(c.pinned, c.newest) for c in caches} == {(tiny.model.config.prompt_frames, 9)}


def test_sound_that_is_no_number_is_an_error(plain: VoiceChat) -> None:
    codec = plain.model.networks.tts_model.audio_codec.decoder.layers[-1]
    before, codec.weight = codec.weight, codec.weight * float("nan")
    try:
        with pytest.raises(ModelError, match="frame 0"):
            list(plain.session().push(sound(1)))
    finally:
        codec.weight = before


def test_a_profiler_sees_every_stage_and_changes_nothing(tiny: VoiceChat) -> None:
    waited: list[int] = []
    staged, real = Profiler(wait=lambda *arrays: waited.append(len(arrays))), Profiler()
    sessions = [tiny.session(profiler=p) for p in (None, staged, real)]
    events = [[*session.push(sound(3))] for session in sessions]
    assert events[0] == events[1] == events[2]
    assert [t.frame_index for t in staged.timings] == [t.frame_index for t in real.timings] == [0, 1, 2]
    assert all(list(t.stages_ms) == list(STAGES) for t in staged.timings)
    assert all(t.stages_ms == {} for t in real.timings)
    states_of_llm, states_of_tts = 2 * 2 + 2, 7 * 2  # two Mamba layers, one attention; seven layers' keys and values
    first = [2, 0, 3 + states_of_llm, 2 + states_of_tts + 1, 0]
    assert waited == first * 3


def test_a_fork_takes_a_profiler_of_its_own(tiny: VoiceChat) -> None:
    session, profiler = tiny.session(profiler=Profiler()), Profiler()
    list(session.push(sound(2)))
    list(session.fork(profiler=profiler).push(sound(2)))
    assert [t.frame_index for t in profiler.timings] == [2, 3]


def test_a_later_flush_may_still_ask_for_the_tail(tiny: VoiceChat) -> None:
    session = tiny.session()
    list(session.push(sound(1)))
    session.flush()
    assert [type(e) for e in session.flush(tail=True)][-2:] == [AudioTail, Done]


def test_after_a_limit_in_a_flush_the_session_is_open(tiny: VoiceChat) -> None:
    session = tiny.session(max_frames=1)
    list(session.push(sound(1.1)))
    with pytest.raises(ContextLimitError):
        list(session.flush())
    assert not session.closed
    assert session.snapshot().nbytes > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_frames": True}, "max_frames is True"),
        ({"tts_context_frames": True}, "tts_context_frames is True"),
        ({"tts_prompt_steps": "no"}, "tts_prompt_steps is 'no'"),
        ({"wait_for_full_frame": np.array([1, 2])}, "wait_for_full_frame is array"),
        ({"profiler": Profiler}, "profiler is <class"),
    ],
)
def test_options_of_another_kind(tiny: VoiceChat, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        tiny.session(**arguments)


def test_arrays_of_other_kinds(tiny: VoiceChat) -> None:
    samples = sound(2)
    pcm = (samples * 8000).astype(np.int16)
    expected = [*tiny.session().push(pcm)]
    assert [*tiny.session().push(pcm.astype(">i2"))] == expected
    for wrong in ([[1.0], [2.0, 3.0]], np.ma.masked_array(samples, samples > 0), mx.zeros((4,), mx.bfloat16)):
        with pytest.raises(AudioError):
            tiny.session().push(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sample_rate is array"):
        tiny.session().push(samples, sample_rate=np.array([16000, 16000]))  # type: ignore[arg-type]


def test_one_weight_of_another_value_is_another_model(tiny: VoiceChat, broken: Path) -> None:
    """Also a matrix, and also a vocabulary."""
    snapshot = tiny.session().snapshot()
    weights = mx.load(str(broken / "model.safetensors"))
    negated = {name: -x if name.endswith("lm_head.weight") else x for name, x in weights.items()}  # type: ignore[union-attr]
    mx.save_safetensors(str(broken / "model.safetensors"), negated, {"format": "mlx"})
    with pytest.raises(InputError, match="fingerprint"):
        load(broken).resume(snapshot)
    half = load(broken, precision="bfloat16")
    assert half.model.fingerprint != load(broken).model.fingerprint


def test_a_snapshot_holds_what_is_filled(tiny: VoiceChat) -> None:
    """Of keys and values; the transcript branch's last prediction is left out, the samples that wait are in it."""
    session = tiny.session(system_prompt="hi")
    list(session.push(sound(3)))
    state = session._live
    essential = replace(state, rnnt=replace(state.rnnt, proposal=None))
    snapshot = session.snapshot()
    assert snapshot.nbytes == filled_bytes(essential) + snapshot.arrays["pending"].nbytes
    assert 5 * snapshot.nbytes < 4 * session.nbytes  # a buffer has room for 256 positions, and 43 are filled


@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_model_is_loaded_in_one_thread_and_used_in_another(tiny_path: Path, compile: str) -> None:
    """A load leaves nothing to compute: an array that waits to be computed belongs to the thread that made it."""
    if compile == "on" and not wanted("auto"):
        pytest.skip("nothing is compiled here")
    voicechat = load(tiny_path, compile=compile)  # type: ignore[arg-type]
    found: list[list[Event]] = []
    thread = threading.Thread(target=lambda: found.append(list(voicechat.session(system_prompt="hi").push(sound(3)))))
    thread.start()
    thread.join()
    expected = [event.codes.tolist() for event in audio(found[0])]
    own = load(tiny_path, compile=compile).session(system_prompt="hi").push(sound(3))  # type: ignore[arg-type]
    assert expected == [event.codes.tolist() for event in audio([*own])]


def test_a_packed_build_in_another_precision_is_another_model(mixed: Path) -> None:
    """Its parameters are the same in both: what packed matrices give is not."""
    own, rounded = (load(mixed, precision=precision, compile="off") for precision in ("auto", "bfloat16"))
    parameters = [dict(named_parameters(x.model.networks)) for x in (own, rounded)]
    assert {n: x.dtype for n, x in parameters[0].items()} == {n: x.dtype for n, x in parameters[1].items()}
    with pytest.raises(InputError, match=f"{own.model.fingerprint}.*{rounded.model.fingerprint}"):
        rounded.resume(own.session().snapshot())


def test_another_vocabulary_is_another_model(tiny: VoiceChat, broken: Path) -> None:
    text = (broken / "tokenizer.json").read_text()
    data = json.loads(text)
    vocab = data["model"]["vocab"]
    first, second = [token for token in vocab if token.isalpha()][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (broken / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="fingerprint"):
        load(broken).resume(tiny.session().snapshot())


def spoilt(path: Path, arrays: dict[str, mx.array] | None = None, **facts: Any) -> None:
    """The file again with other arrays or facts, under the old digest."""
    found: Any = mx.load(str(path), return_metadata=True)
    metadata = found[1]
    metadata["voicechat_snapshot"] = json.dumps({**json.loads(metadata["voicechat_snapshot"]), **facts})
    mx.save_safetensors(str(path), {**found[0], **(arrays or {})}, metadata)


@pytest.mark.parametrize(
    "change",
    [
        {"arrays": {"duplex.text": mx.full((1, 1), 10**8, dtype=mx.int32)}},
        {"arrays": {"duplex.extra": mx.zeros((1,))}},
        {"numbers": None},
        {"framing": {"received": 10**9, "taken": 1}},
        {"options": []},
        {"fingerprint": None},
        {"format": 1},
        {"capacities": []},
    ],
)
def test_a_file_that_was_changed_is_refused(tiny: VoiceChat, tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "state.safetensors"
    tiny.session().snapshot().save(path)
    assert tiny.resume(path).frame_index == 0
    spoilt(path, **change)
    with pytest.raises(InputError, match="not as it was written"):
        tiny.resume(path)


@pytest.mark.parametrize(
    "change", [{"options": []}, {"framing": {}}, {"numbers": None}, {"text": {"text": "", "unfinished": "zz"}}]
)
def test_a_value_that_lacks_something_is_refused(tiny: VoiceChat, change: dict[str, Any]) -> None:
    snapshot = tiny.session().snapshot()
    with pytest.raises(InputError):
        tiny.resume(Snapshot(snapshot.arrays, {**snapshot.facts, **change}))


def test_a_snapshot_is_compared_by_identity_and_not_changed(tiny: VoiceChat, tmp_path: Path) -> None:
    snapshot = tiny.session(system_prompt="hi").snapshot()
    assert snapshot == snapshot != tiny.session(system_prompt="hi").snapshot()
    assert tiny.resume(snapshot).options.prompt_ids == tuple(tiny.model.prompt_ids("hi"))
    snapshot.save(tmp_path / ("a" * 240))
    assert tiny.resume(tmp_path / ("a" * 240)).frame_index == 0


@pytest.mark.parametrize("compile", ["off", "on"])
def test_a_model_that_is_dropped_is_gone(tiny_path: Path, compile: str) -> None:
    """At once, without Python's search for circles: at full size it is 22 GB."""
    if compile == "on" and not wanted("auto"):
        pytest.skip("nothing is compiled here")

    def used() -> int:
        voicechat = load(tiny_path, compile=compile)  # type: ignore[arg-type]
        list(voicechat.session(system_prompt="").push(sound(3)))
        return mx.get_active_memory()

    used()  # what is computed once in a process
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        most = used()
        assert mx.get_active_memory() - before < (most - before) / 100
    finally:
        gc.enable()
