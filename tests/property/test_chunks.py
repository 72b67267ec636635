"""Chunks never matter: for any audio and any way to cut it, a session's events are equal to the bit."""

from collections.abc import Iterator
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import GOLDEN_FOLDERS
from tests.core.scripted import END, START, script
from voicechat_core import AudioFrame, Done, Event, Session, Snapshot, ToolCall, VoiceChat, load
from voicechat_core.nn import kv_cache

# The checkpoint is only read. A frame takes some 8 ms, an example some hundred frames.
tries = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

PROMPTS = [None, "", "hi", "Be concise."]


@st.composite
def recordings(draw: st.DrawFn) -> np.ndarray:
    """Up to ten frames of noise, silence, a tone or full-scale steps, as float32 or int16."""
    length, seed = draw(st.integers(0, 12800)), draw(st.integers(0, 2**32 - 1))
    rng, kind = np.random.default_rng(seed), draw(st.sampled_from(["noise", "silence", "tone", "steps", "int16"]))
    if kind == "silence":
        return np.zeros(length, np.float32)
    if kind == "tone":
        return np.sin(np.arange(length) * rng.uniform(0.01, 3)).astype(np.float32)
    if kind == "steps":
        return rng.choice(np.array([-1, 1], np.float32), length)
    noise = (rng.standard_normal(length) * 0.2).astype(np.float32)
    return (noise * 8000).astype(np.int16) if kind == "int16" else noise


sizes = st.one_of(st.integers(0, 3), st.sampled_from([0, 160, 199, 200, 201, 1279, 1280, 1281]), st.integers(0, 6000))
cuts = st.lists(sizes, max_size=25)


def cut(samples: np.ndarray, parts: list[int]) -> Iterator[np.ndarray]:
    """``samples`` in parts of these sizes, then what is left; parts beyond the end are empty."""
    start = 0
    for size in parts:
        yield samples[start : start + size]
        start += size
    yield samples[start:]


def run(session: Session, chunks: Iterator[np.ndarray] | list[np.ndarray], *, pad: bool = True) -> list[Event]:
    events = [event for chunk in chunks for event in session.push(chunk)]
    return [*events, *session.flush(tail=True, pad_partial=pad)]


@tries
@given(recordings(), cuts, st.sampled_from(PROMPTS), st.integers(0, 2**64 - 1), st.booleans(), st.booleans())
def test_any_cut_gives_the_events_of_one_push(
    tiny: VoiceChat, samples: np.ndarray, parts: list[int], prompt: str | None, seed: int, wait: bool, bound: bool
) -> None:
    options = {"system_prompt": prompt, "seed": seed, "tts_context_frames": 3 if bound else None}
    whole = run(tiny.session(**options), [samples])
    assert run(tiny.session(**options, wait_for_full_frame=wait), cut(samples, parts)) == whole


@tries
@given(recordings(), cuts, st.booleans())
def test_any_cut_without_padding_too(tiny: VoiceChat, samples: np.ndarray, parts: list[int], wait: bool) -> None:
    whole = run(tiny.session(wait_for_full_frame=wait), [samples], pad=False)
    assert run(tiny.session(wait_for_full_frame=wait), cut(samples, parts), pad=False) == whole
    # Early, a frame has run once its last sample for the model was there; late, once all of its own were.
    assert whole[-1] == Done(len(samples) // 1280 if wait else (len(samples) + 1080) // 1280)


@pytest.fixture(scope="module", params=GOLDEN_FOLDERS, ids=lambda path: path.name)
def windowed(request: pytest.FixtureRequest) -> VoiceChat:
    """Other shapes, with windows that a few frames fill."""
    return load(request.param / "checkpoint")


@tries
@given(
    cuts, st.integers(0, 25600), st.sampled_from(["", "Be concise.", "x" * 40]), st.none() | st.integers(1, 40),
    st.sampled_from([4, 32]),
)  # fmt: skip
def test_buffers_that_grow_turn_and_are_saved(
    windowed: VoiceChat, parts: list[int], middle: int, prompt: str, context: int | None, block: int
) -> None:
    """Twenty frames through buffers so small that they double, are compacted and wrap; with a fork in the middle."""
    samples = (np.random.default_rng(middle).standard_normal(25600) * 0.1).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BLOCK", block)
        model = VoiceChat(windowed.model)  # whose shared prompt states are as small
        options = {"system_prompt": prompt, "tts_context_frames": context}
        whole = run(model.session(**options), [samples])
        session = model.session(**options)
        first = list(session.push(samples[:middle]))
        assert [*first, *run(session.fork(), cut(samples[middle:], parts))] == whole
    usual = run(windowed.session(**options), [samples])
    codes = [[event.codes.tolist() for event in events if isinstance(event, AudioFrame)] for events in (usual, whole)]
    assert codes[0] == codes[1]


@tries
@given(recordings(), recordings(), cuts, st.sampled_from(PROMPTS))
def test_a_reset_forgets_everything(
    tiny: VoiceChat, before: np.ndarray, samples: np.ndarray, parts: list[int], prompt: str | None
) -> None:
    whole = run(tiny.session(system_prompt=prompt), [samples])
    session = tiny.session(system_prompt=prompt)
    run(session, cut(before, parts))
    session.reset()
    assert run(session, cut(samples, parts)) == whole


@tries
@given(recordings(), cuts, st.integers(0, 12800), st.sampled_from(PROMPTS), st.booleans(), st.booleans())
def test_a_saved_snapshot_goes_on_in_the_middle(
    tiny: VoiceChat,
    tmp_path_factory: pytest.TempPathFactory,
    samples: np.ndarray,
    parts: list[int],
    middle: int,
    prompt: str | None,
    bound: bool,
    wait: bool,
) -> None:
    options = {"system_prompt": prompt, "tts_context_frames": 4 if bound else None, "wait_for_full_frame": wait}
    whole = run(tiny.session(**options), [samples])
    session = tiny.session(**options)
    first = list(session.push(samples[:middle]))
    path = tmp_path_factory.mktemp("snapshots") / "state.safetensors"
    session.snapshot().save(path)
    session.cancel()
    assert [*first, *run(tiny.resume(Snapshot.load(path)), cut(samples[middle:], parts))] == whole


@tries
@given(recordings(), recordings(), cuts, cuts, st.sampled_from(PROMPTS))
def test_another_session_in_between_changes_nothing(
    tiny: VoiceChat, samples: np.ndarray, other: np.ndarray, parts: list[int], others: list[int], prompt: str | None
) -> None:
    alone = [run(tiny.session(system_prompt=prompt, seed=1), [samples]), run(tiny.session(seed=2), [other])]
    first, second = tiny.session(system_prompt=prompt, seed=1), tiny.session(seed=2)
    events: tuple[list[Event], list[Event]] = ([], [])
    for mine, yours in zip_longest(cut(samples, parts), cut(other, others), fillvalue=np.zeros(0, np.float32)):
        events[0].extend(first.push(mine))
        events[1].extend(second.push(yours))
    assert [[*events[0], *first.flush(tail=True)], [*events[1], *second.flush(tail=True)]] == alone


@settings(tries, max_examples=6)
@given(cuts, st.integers(0, 60 * 1280), st.integers(0, 12))
def test_a_call_that_is_answered_in_the_same_frame(tiny: VoiceChat, parts: list[int], middle: int, wait: int) -> None:
    """However it is cut, and forked somewhere; and the ids are those that every other cut has."""
    call = [START, *tiny.model.tokenizer.encode('{"name":"a"}'), END]
    samples = (np.random.default_rng(middle).standard_normal(60 * 1280) * 0.1).astype(np.float32)
    due = len(call) - 1 + wait

    def taken(session: Session, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            yield event
            if isinstance(event, AudioFrame) and event.frame_index == due:
                session.respond(f"call_{len(call) - 1}_0", 5)

    def run(chunks: Iterator[np.ndarray] | list[np.ndarray], forked: bool) -> tuple[list[Event], str]:
        with pytest.MonkeyPatch.context() as patch:
            script(patch, call)
            session, events = tiny.session(tools=True), list[Event]()
            if forked:
                events += taken(session, session.push(samples[:middle]))
                session = session.fork()
            for chunk in chunks:
                events += taken(session, session.push(chunk))
            events += taken(session, session.flush())
        return events, session.function_text

    whole, text = run([samples], forked=False)
    assert [event.frame_index for event in whole if isinstance(event, ToolCall)] == [len(call) - 1]
    assert "<TOOL_RESPONSE>[5]</TOOL_RESPONSE>" in text
    assert run(cut(samples[middle:], parts), forked=True) == (whole, text)
