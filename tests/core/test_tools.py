"""Tools whose results are supplied: what a call says, what stands in which frame, who may answer and when."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core import scripted
from tests.core.scripted import DONE, END, PAD, SAID, START
from voicechat_core import (
    AudioFrame,
    Event,
    FunctionDelta,
    InputError,
    Session,
    SessionClosedError,
    Snapshot,
    ToolCall,
    ToolCallFailed,
    VoiceChat,
    duplex,
    tools,
)
from voicechat_core.duplex import Frame
from voicechat_core.nn.ear_tts import EarTTS
from voicechat_core.tokenizer import Tokenizer
from voicechat_core.tools import Forced, ToolChannel, parse_calls

EOS, SILENCE = 2, 11
SHORT = '{"name":"a"}'  # in a session each id takes a frame
SHORT_TWO = '[{"name":"a"},{"name":"b","arguments":{"n":2}}]'
DICE = '<TOOLCALL>[{"name": "roll_dice", "arguments": {"sides": 6}}]</TOOLCALL>'
TWO = '[{"name": "time"}, {"name": "roll_dice", "arguments": {"sides": 20}}]'
MUTE = Forced(text=PAD)

# ---- what a call says


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (DICE, [("roll_dice", {"sides": 6})]),
        ('[{"name": "time", "arguments": {}}]', [("time", {})]),
        ('{"name": "time"}', [("time", {})]),
        (' \n{"name": "time", "arguments": null} ', [("time", {})]),
        (TWO, [("time", {}), ("roll_dice", {"sides": 20})]),
        ('{"name": "dice", "arguments": "{\\"sides\\": 6}"}', [("dice", {"sides": 6})]),
        ('{"name": "dice", "arguments": " {\\"sides\\": 6}"}', [("dice", {"sides": 6})]),
        ('{"name": "dice", "arguments": "six"}', [("dice", {})]),
        ('{"name": "dice", "arguments": ""}', [("dice", {})]),
        ('well <TOOLCALL>{"name": "time"}</TOOLCALL> then', [("time", {})]),
        ('<TOOLCALL>{"name": "time"}', [("time", {})]),
        ('{"name": "say", "arguments": {"what": "h\\u00e9 \\"quoted\\" <b>"}}', [("say", {"what": 'hé "quoted" <b>'})]),
    ],
)
def test_what_is_a_call(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    assert parse_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the call is not JSON: character 0 cannot stand there"),
        ('[{"name": "time"', "the call is not JSON: character 16 cannot stand there"),
        ("[]", "the call is an empty list"),
        (json.dumps([{"name": "time"}] * 17), "the call is a list of 17; 16 are the most"),
        ('"time"', "a call is 'time'; an object is needed"),
        ("[[]]", "a call is an array; an object is needed"),
        ('{"arguments": {}}', "a call's name is null; text is needed"),
        ('{"name": ""}', "a call's name is ''; text is needed"),
        ('{"name": 5}', "a call's name is 5; text is needed"),
        ('{"name": "dice", "arguments": [6]}', "dice's arguments are an array; an object is needed"),
        ('{"name": "dice", "arguments": 6}', "dice's arguments are 6; an object is needed"),
        (
            '{"name": "dice", "arguments": "{6}"}',
            "the text of dice's arguments is not JSON: character 1 cannot stand there",
        ),
        ('{"name": "dice", "arguments": {"sides": NaN}}', "the call holds NaN, which is not JSON"),
        ('{"name": "a", "name": "b"}', "the call has the key 'name' twice in one object"),
        ('{"name": "\\ud800"}', "the call holds the lone surrogate '\\ud800'"),
        (
            f'{{"name": "a", "arguments": {{"b": {"[" * 64}{"]" * 64}}}}}',
            "the object of a's arguments has 65 levels; 64 are the most",
        ),
        ("[" * 100000, "the call is nested too deeply"),
    ],
)
def test_what_is_none(text: str, reason: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_calls(text)
    assert str(raised.value) == reason


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
some_calls = st.lists(st.tuples(words.filter(bool), st.dictionaries(words, values, max_size=3)), min_size=1, max_size=3)


@given(some_calls, st.booleans(), st.booleans(), st.booleans())
def test_whatever_is_called_is_read(
    calls: list[tuple[str, dict[str, Any]]], tagged: bool, escaped: bool, as_text: bool
) -> None:
    if tagged and "TOOLCALL>" in str(calls):  # who writes tags inside of a call ends it there
        return
    entries = [{"name": name, "arguments": json.dumps(given) if as_text else given} for name, given in calls]
    text = json.dumps(entries if len(entries) > 1 else entries[0], ensure_ascii=escaped)
    assert parse_calls(f"<TOOLCALL>{text}</TOOLCALL>" if tagged else text) == calls


@given(st.text(max_size=40) | st.lists(st.sampled_from(['{"name": "a"', "}", "[", "]", ",", "1", '"'])).map("".join))
def test_any_text_is_a_call_or_is_refused(text: str) -> None:
    with suppress(InputError):
        assert parse_calls(text)


# ---- frame by frame


@pytest.fixture(scope="session")
def tokenizer(tiny: VoiceChat) -> Tokenizer:
    return tiny.model.tokenizer


@pytest.fixture
def channel(tiny: VoiceChat) -> ToolChannel:
    return ToolChannel(tiny.model.tokenizer, tiny.model.config, wait_frames=4)


def take(channel: ToolChannel, ids: Iterable[int], first: int = 0) -> list[ToolCall | ToolCallFailed]:
    """Frames in which the model chooses these ids."""
    events = []
    for index, chosen in enumerate(ids, first):
        forced = channel.forced().function
        events += channel.took(index, chosen if forced is None else forced)
    return events


def written(channel: ToolChannel) -> list[int]:
    """What stands on the channel until it is idle again; every frame is mute."""
    ids = []
    while (forced := channel.forced()) != Forced(silenced_by=START):
        assert (forced.text, forced.silenced_by) == (PAD, None)
        assert forced.function is not None
        channel.took(0, forced.function)
        ids.append(forced.function)
    return ids


def called(channel: ToolChannel, tokenizer: Tokenizer, text: str = DICE, first: int = 0) -> list[Any]:
    return take(channel, [START, *tokenizer.encode(text), END], first)


def response(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(f"<TOOL_RESPONSE>[{text}]</TOOL_RESPONSE>"), DONE]


def test_one_call_from_its_start_to_its_end(channel: ToolChannel, tokenizer: Tokenizer) -> None:
    assert channel.forced() == Forced(silenced_by=START)
    assert take(channel, [PAD, END, DONE, 45, START], 5) == []  # markers without a start are nothing
    ids = tokenizer.encode(DICE)
    for index, token in enumerate(ids, 10):
        assert channel.forced() == MUTE
        assert channel.took(index, token) == []
    last = 10 + len(ids)
    assert channel.took(last, END) == [ToolCall(last, f"call_{last}_0", "roll_dice", {"sides": 6})]
    for index in (1, 2):
        assert channel.forced() == Forced(text=PAD, function=PAD)
        assert channel.took(last + index, PAD) == []
    channel.respond(f"call_{last}_0", "five")
    assert written(channel) == response(tokenizer, '"five"')


def test_what_is_no_text_is_no_part_of_a_call(channel: ToolChannel, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(DICE)
    mixed = chain.from_iterable(zip(ids, repeat(PAD), repeat(START), repeat(EOS), repeat(SILENCE), strict=False))
    (event,) = take(channel, [START, START, *mixed, END])
    assert (event.name, event.arguments) == ("roll_dice", {"sides": 6})


def test_a_call_that_cannot_be_read_is_told_and_over(channel: ToolChannel, tokenizer: Tokenizer) -> None:
    text = ' <TOOLCALL>[{"name": 5}]</TOOLCALL> '
    (event,) = called(channel, tokenizer, text)
    frame = 1 + len(tokenizer.encode(text))
    assert event == ToolCallFailed(frame, "a call's name is 5; text is needed", text.strip())
    assert channel.forced() == Forced(silenced_by=START)
    assert called(channel, tokenizer, first=100)[0].name == "roll_dice"  # the next one has nothing of it


@pytest.mark.parametrize(
    ("ids", "reason", "text"),
    [
        ([45, *[PAD] * 125], "no token of it came in 125 frames", 1),
        ([45, *[PAD] * 60, EOS, START, *[PAD] * 63], "no token of it came in 125 frames", 1),
        ([START] * 125, "no token of it came in 125 frames", 0),
        (([45] + [PAD] * 124) * 4 + [45] * 12, "it did not end in 512 frames", 16),
        ([45] * 512, "it did not end in 512 frames", 512),
    ],
)
def test_a_call_without_an_end(
    channel: ToolChannel, tokenizer: Tokenizer, ids: list[int], reason: str, text: int
) -> None:
    saved = channel.saved()
    for index, token in enumerate([START, *ids[:-1]]):
        channel.restore(saved)  # what it counts is part of a snapshot
        assert channel.took(index, token) == []
        saved = channel.saved()
        channel._become_idle()
    channel.restore(saved)
    assert channel.forced() == MUTE
    expected = ToolCallFailed(9, reason, tokenizer.decode([45] * text).strip())
    assert channel.took(9, ids[-1]) == [expected]
    assert channel.forced() == Forced(silenced_by=START)


def test_two_calls_wait_for_each_other_and_answer_in_their_order(channel: ToolChannel, tokenizer: Tokenizer) -> None:
    first, second = called(channel, tokenizer, TWO)
    assert (first.name, second.name, second.arguments) == ("time", "roll_dice", {"sides": 20})
    assert first.frame_index == second.frame_index
    channel.respond(second.call_id, {"value": 37})
    assert channel.forced() == Forced(text=PAD, function=PAD)
    channel.respond(first.call_id, "three thirty")
    assert written(channel) == response(tokenizer, '"three thirty", {"value": 37}')


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("five", '"five"'), (5, "5"), (None, "null"), ({"a": [1, 2.5], "b": True}, '{"a": [1, 2.5], "b": true}'),
        (np.int64(5), "5"), ({"n": [np.float32(2.5), np.bool_(True)]}, '{"n": [2.5, true]}'), (mx.array(3), "3"),
        ("Zürich 😀", '"Z\\u00fcrich \\ud83d\\ude00"'), ("\ud800", '"\\ud800"'), ('say "hi"\n', '"say \\"hi\\"\\n"'),
    ],
)  # fmt: skip
def test_how_an_output_is_written(channel: ToolChannel, tokenizer: Tokenizer, output: object, text: str) -> None:
    (call,) = called(channel, tokenizer)
    channel.respond(call.call_id, output)
    assert written(channel) == response(tokenizer, text)


@pytest.mark.parametrize("spelled", ["<SPECIAL_22>", "<SPECIAL_20>", "</s>", "<SPECIAL_12>"])
def test_no_output_becomes_a_marker(channel: ToolChannel, tokenizer: Tokenizer, spelled: str) -> None:
    (call,) = called(channel, tokenizer)
    channel.respond(call.call_id, f"a {spelled} b")
    *ids, last = written(channel)
    assert (last, {*ids} & {1, EOS, SILENCE, PAD, START, END, DONE}) == (DONE, set())
    inside = tokenizer.decode(ids).removeprefix("<TOOL_RESPONSE>").removesuffix("</TOOL_RESPONSE>")
    assert json.loads(inside) == [f"a {spelled} b"]


def test_who_answers_late_or_twice_or_for_nobody_changes_nothing(channel: ToolChannel, tokenizer: Tokenizer) -> None:
    for _ in range(2):
        with pytest.raises(InputError, match=r"^call_id is 'call_1_0'; no call waits for an output$"):
            channel.respond("call_1_0", "five")
        assert channel.forced() == Forced(silenced_by=START)
    first, second = called(channel, tokenizer, TWO)
    channel.respond(first.call_id, "noon")
    with pytest.raises(InputError, match=r"^call_id is an array; what waits"):
        channel.respond([], "five")  # type: ignore[arg-type]
    for call_id in (first.call_id, "call_1_0"):
        with pytest.raises(InputError, match=f"^call_id is '{call_id}'; what waits for an output is {second.call_id}$"):
            channel.respond(call_id, "five")
    channel.respond(second.call_id, 1)
    with pytest.raises(InputError, match="no call waits for an output"):
        channel.respond(second.call_id, 2)  # it is being written
    assert written(channel) == response(tokenizer, '"noon", 1')


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({1, 2}, "a tool's output is no JSON value: Object of type set"), (float("nan"), "no JSON value"),
        (np.float32("nan"), "no JSON value"), (np.array([5]), "Object of type ndarray"), (np.longdouble(5), "no JSON"),
        ("five " * 300, r"makes a response of \d+ tokens; 1024 are the most"),
    ],
)  # fmt: skip
def test_an_output_that_cannot_be_written_leaves_the_call_waiting(
    channel: ToolChannel, tokenizer: Tokenizer, output: object, words: str
) -> None:
    (call,) = called(channel, tokenizer)
    with pytest.raises(InputError, match=words):
        channel.respond(call.call_id, output)
    channel.respond(call.call_id, "five")
    assert written(channel) == response(tokenizer, '"five"')


def test_the_response_may_have_as_many_tokens_as_that(channel: ToolChannel, tokenizer: Tokenizer) -> None:
    around = len(response(tokenizer, '""')) - 1
    (call,) = called(channel, tokenizer)
    with pytest.raises(InputError, match="1025 tokens"):
        channel.respond(call.call_id, "7" * (1025 - around))
    channel.respond(call.call_id, "7" * (1024 - around))
    assert len(written(channel)) == 1024 + 1


def test_who_does_not_answer_is_answered_for(channel: ToolChannel, tokenizer: Tokenizer) -> None:
    first, second = called(channel, tokenizer, TWO)
    channel.respond(second.call_id, 7)
    take(channel, [PAD] * 3)
    assert channel.forced() == Forced(text=PAD, function=PAD)
    take(channel, [PAD])
    with pytest.raises(InputError, match="no call waits"):
        channel.respond(first.call_id, "noon")
    assert written(channel) == response(tokenizer, '{"error": "the tool did not answer in time"}, 7')


def test_a_vocabulary_without_markers_can_call_nothing(tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Tokenizer.token_id
    monkeypatch.setattr(Tokenizer, "token_id", lambda self, name: None if "21" in name else known(self, name))
    with pytest.raises(InputError, match="the vocabulary has no <SPECIAL_21>: this model cannot call any"):
        tiny.session(tools=True)
    tiny.session().cancel()


steps = st.lists(
    st.sampled_from([PAD, EOS, START, END, DONE, 45, "respond", "wrong", "save", DICE, TWO, "7"]), max_size=60
)


@settings(deadline=None)
@given(steps)
def test_whatever_comes_in_whatever_order(tiny: VoiceChat, script: list[Any]) -> None:
    """Text is free only while nothing is called, what a response is made of is what was supplied, nothing is raised."""
    tokenizer, config = tiny.model.tokenizer, tiny.model.config
    channel, frame, open_calls = ToolChannel(tokenizer, config, 6), 0, dict[str, object]()
    for step in script:
        if step == "respond" and open_calls:
            channel.respond(open_calls.popitem()[0], "seven")
        elif step == "wrong":
            with pytest.raises(InputError):
                channel.respond("call_x", "seven")
        elif step == "save":
            saved, channel = json.loads(json.dumps(channel.saved())), ToolChannel(tokenizer, config, 6)
            channel.restore(saved)
            assert channel.saved() == saved
        ids = [START, *tokenizer.encode(step), END] if step in (DICE, TWO) else [step] if isinstance(step, int) else []
        for chosen in ids:
            forced = channel.forced()
            assert (forced.text is None) == (forced.silenced_by == START)
            if forced.function != PAD:
                open_calls.clear()
            for event in channel.took(frame, chosen if forced.function is None else forced.function):
                if isinstance(event, ToolCall):
                    open_calls[event.call_id] = event
            frame += 1
            if channel.forced() != Forced(text=PAD, function=PAD):
                open_calls.clear()


# ---- in a session


Script = Callable[[Iterable[int]], None]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Make the function head choose ids, one a frame, then PAD; the text head always says ``SAID``."""
    return partial(scripted.script, monkeypatch)


def sound(frames: int) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(frames * 1280) * 0.1).astype(np.float32)


def answering(session: Session, events: Iterable[Event], output: object, wait: int = 0) -> Iterator[Event]:
    """All events; each call is answered ``wait`` frames after its own."""
    due: list[tuple[int, str]] = []
    for event in events:
        yield event
        if isinstance(event, ToolCall):
            due.append((event.frame_index + wait, event.call_id))
        if isinstance(event, AudioFrame) and due and event.frame_index == due[0][0]:
            session.respond(due.pop(0)[1], output)


def ids_of(events: Iterable[Event]) -> tuple[list[int], list[int]]:
    frames = [event for event in events if isinstance(event, AudioFrame)]
    return [frame.text_token for frame in frames], [frame.function_token for frame in frames]


def test_every_position_of_a_call(tiny: VoiceChat, tokenizer: Tokenizer, script: Script) -> None:
    ids = tokenizer.encode(DICE)
    call = [START, *ids[:4], PAD, START, *ids[4:], END]
    script([PAD, PAD, *call, *[47] * 200])
    session, answer = tiny.session(tools=True), response(tokenizer, '"five"')
    frames = 2 + len(call) + 3 + len(answer) + 4
    events = list(answering(session, session.push(sound(frames + 1)), "five", wait=3))
    text, function = ids_of(events)
    assert function[:frames] == [PAD, PAD, *call, PAD, PAD, PAD, *answer, 47, 47, 47, 47]
    mute = len(call) + 3 + len(answer)  # from the call's start to the response's end, both of them too
    assert text[:frames] == [SAID, SAID, *[PAD] * mute, SAID, SAID, SAID, SAID]
    last = 1 + len(call)
    assert [e for e in events if isinstance(e, ToolCall)] == [
        ToolCall(last, f"call_{last}_0", "roll_dice", {"sides": 6})
    ]
    assert '<SPECIAL_21><TOOL_RESPONSE>["five"]</TOOL_RESPONSE><SPECIAL_22>' in session.function_text


def test_what_stands_there_is_what_is_heard_and_spoken(
    plain: VoiceChat, tokenizer: Tokenizer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next input is made of the ids that stand, not of those that were chosen; so is the speech."""
    frames: list[tuple[mx.array, Frame]] = []
    spoken: list[mx.array] = []
    step, speak = duplex.step, EarTTS.decode

    def kept(model: Any, audio: mx.array, *words: Any, **options: Any) -> Any:
        result = step(model, audio, *words, **options)
        frames.append((audio, result[0]))
        return result

    def heard(self: EarTTS, condition: mx.array, *words: Any) -> Any:
        spoken.append(condition)
        return speak(self, condition, *words)

    monkeypatch.setattr(duplex, "step", kept)
    script([START, *tokenizer.encode(SHORT), END, 47])
    session = plain.session(tools=True, system_prompt="hi")
    monkeypatch.setattr(EarTTS, "decode", heard)
    text, _ = ids_of(answering(session, session.push(sound(60)), 5, wait=2))
    assert {*text} == {SAID, PAD}
    embed = plain.model.networks.stt_model.embed_tokens
    for (_, before), (audio, frame) in pairwise(frames):
        assert mx.allclose(frame.inputs, audio + embed(before.text) + 2.0 * embed(before.function), atol=1e-5)
    for condition, token in zip(spoken, text, strict=True):
        assert mx.array_equal(condition[0, 0], plain.model.subword_table[token])


def test_the_events_of_a_frame_are_in_order(tiny: VoiceChat, tokenizer: Tokenizer, script: Script) -> None:
    script([START, *tokenizer.encode(SHORT_TWO), END])
    last = 1 + len(tokenizer.encode(SHORT_TWO))
    events = list(tiny.session(tools=True).push(sound(last + 3)))
    mine = [type(event) for event in events if getattr(event, "frame_index", None) == last]
    assert mine[-4:] == [FunctionDelta, ToolCall, ToolCall, AudioFrame]


def test_without_a_call_nothing_is_different(tiny: VoiceChat, script: Script) -> None:
    everything = []
    for tools_on in (False, True):
        script([PAD, 45, END, DONE, 47])
        session = tiny.session(tools=tools_on, seed=4)
        everything.append([*session.push(sound(9)), *session.flush(tail=True)])
    assert everything[0] == everything[1]


def test_without_tools_a_call_is_only_text(tiny: VoiceChat, tokenizer: Tokenizer, script: Script) -> None:
    script([START, *tokenizer.encode(SHORT), END, 47])
    session = tiny.session()
    events = list(session.push(sound(len(tokenizer.encode(SHORT)) + 6)))
    assert not [event for event in events if isinstance(event, ToolCall | ToolCallFailed)]
    assert set(ids_of(events)[0]) == {SAID}
    with pytest.raises(InputError, match="call_id is 'call_9_0'; the session was opened without tools"):
        session.respond("call_9_0", 5)


def test_a_frame_waits_as_often_as_without_tools(
    tiny: VoiceChat, tokenizer: Tokenizer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, original = [0], mx.eval

    def counted(*values: Any) -> None:
        waits[0] += 1
        original(*values)

    monkeypatch.setattr(mx, "eval", counted)
    counts = []
    for tools_on in (False, True):
        script([START, *tokenizer.encode(SHORT), END])
        session, waits[0] = tiny.session(tools=tools_on), 0
        events = session.push(sound(len(tokenizer.encode(SHORT)) + 50))
        list(answering(session, events, "five") if tools_on else events)
        counts.append(waits[0] / session.frame_index)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("wait", [0, 5])
def test_a_session_is_generate_with_tools_too(
    tiny: VoiceChat, tokenizer: Tokenizer, script: Script, wait: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ids, codes and texts, where the response is given in the same frame."""
    ids, samples = [PAD, START, *tokenizer.encode(SHORT_TWO), END, 47, 47], sound(len(tokenizer.encode(SHORT_TWO)) + 70)
    functions = {"a": lambda: "x", "b": lambda n: {"of": n}}
    if wait:  # generate answers at once; here it is told to wait, too
        monkeypatch.setattr(tools, "AnsweredTools", AnsweredLater)
        monkeypatch.setattr("voicechat_core.offline.AnsweredTools", lambda *words: AnsweredLater(*words, wait))
    script(ids)
    result = tiny.generate(samples, seed=3, tools=functions)
    script(ids)
    session, events = tiny.session(seed=3, tools=True), []
    waiting: list[ToolCall] = []
    for event in chain(session.push(samples), session.flush()):
        events.append(event)
        waiting += [event] if isinstance(event, ToolCall) else []
        if isinstance(event, AudioFrame) and waiting and event.frame_index == waiting[0].frame_index + wait:
            for call in waiting:
                session.respond(call.call_id, functions[call.name](**call.arguments))
            waiting.clear()
    frames = [event for event in events if isinstance(event, AudioFrame)]
    assert ids_of(events) == (result.text_tokens, result.function_tokens)
    assert np.array_equal([frame.codes for frame in frames], result.audio_codes)
    assert (session.transcript, session.text, session.function_text) == (
        result.transcript, result.text, result.function_text,
    )  # fmt: skip
    assert '<TOOL_RESPONSE>["x", {"of": 2}]</TOOL_RESPONSE>' in result.function_text


class AnsweredLater(tools.AnsweredTools):
    """Whose functions take so many frames."""

    def __init__(self, channel: ToolChannel, functions: tools.ToolFunctions, wait: int) -> None:
        super().__init__(channel, functions)
        self.wait, self.due = wait, list[tuple[int, ToolCall]]()

    def took(self, frame_index: int, function: int) -> None:
        for event in self._channel.took(frame_index, function):
            if isinstance(event, ToolCall):
                self.due.append((frame_index + self.wait, event))
        for at, call in self.due:
            if at == frame_index:
                self._channel.respond(call.call_id, self._functions[call.name](**call.arguments))


def test_a_tool_that_fails_and_one_that_is_not_there(
    tiny: VoiceChat, tokenizer: Tokenizer, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(n: int) -> int:
        raise ValueError(f"not {n}")

    script([START, *tokenizer.encode(SHORT_TWO), END])
    with caplog.at_level(logging.WARNING):
        result = tiny.generate(sound(len(tokenizer.encode(SHORT_TWO)) + 150), tools={"b": fails})
    outputs = '[{"error": "there is no tool a"}, {"error": "ValueError: not 2"}]'
    assert f"<TOOL_RESPONSE>{outputs}</TOOL_RESPONSE><SPECIAL_22>" in result.function_text
    assert [record.getMessage() for record in caplog.records] == ["the tool b failed"]


class UntellableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def raising(error: BaseException) -> Callable[..., object]:
    def fails() -> object:
        raise error

    return fails


NO_JSON = "InputError: a tool's output is no JSON value: "


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (raising(ValueError("word " * 3000)), f"ValueError: {'word ' * 37}..."),
        (raising(UntellableError()), "UntellableError"),
        (lambda: float("nan"), f"{NO_JSON}Out of range float values are not JSON compliant"),
        (lambda: {1}, f"{NO_JSON}Object of type set is not JSON serializable"),
        (lambda: np.zeros(2), f"{NO_JSON}Object of type ndarray is not JSON serializable"),
        (lambda: np.zeros(1), f"{NO_JSON}Object of type ndarray is not JSON serializable"),
        (lambda n: 1, "TypeError: "),
        (lambda: "word " * 3000, "InputError: the output of call_13_0 makes a response of "),
    ],
)
def test_a_tool_that_fails_is_an_error_that_the_model_reads(
    tiny: VoiceChat,
    tokenizer: Tokenizer,
    script: Script,
    caplog: pytest.LogCaptureFixture,
    function: Callable[..., object],
    error: str,
) -> None:
    ids = [START, *tokenizer.encode(SHORT), END]
    script(ids)
    with caplog.at_level(logging.WARNING):
        frames = len(ids) + (300 if len(error) > 150 else 200)  # each character of the response may take one
    result = tiny.generate(sound(frames), tools={"a": function})
    assert [record.getMessage() for record in caplog.records] == ["the tool a failed"]
    found = result.function_text.partition("<TOOL_RESPONSE>")[2].partition("</TOOL_RESPONSE>")[0]
    [payload] = json.loads(found)
    assert payload["error"].startswith(error)
    assert len(payload["error"]) <= 200
    assert result.function_tokens[-1] == PAD  # the run went on after the response


def test_an_error_may_hold_what_no_text_can(
    tiny: VoiceChat, tokenizer: Tokenizer, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged as any other, but not here: whoever runs tests in several processes could not pass such a log on."""
    ids = [START, *tokenizer.encode(SHORT), END]
    script(ids)
    with caplog.at_level(logging.CRITICAL, logger="voicechat_core.tools"):
        result = tiny.generate(sound(len(ids) + 100), tools={"a": raising(ValueError("\ud800"))})
    assert '<TOOL_RESPONSE>[{"error": "ValueError: \\ud800"}]</TOOL_RESPONSE>' in result.function_text


def test_an_interrupt_of_a_tool_is_the_caller_s(tiny: VoiceChat, tokenizer: Tokenizer, script: Script) -> None:
    script([START, *tokenizer.encode(SHORT), END])
    with pytest.raises(KeyboardInterrupt):
        tiny.generate(sound(len(tokenizer.encode(SHORT)) + 3), tools={"a": raising(KeyboardInterrupt())})


def test_an_error_finds_room_whatever_the_other_outputs_take(channel: ToolChannel, tokenizer: Tokenizer) -> None:
    first, second = called(channel, tokenizer, TWO)
    around = len(response(tokenizer, '"", {}')) - 1
    channel.respond(first.call_id, "7" * (1024 - around))
    channel.fail(second.call_id, "reasons " * 20)
    *_, last = json.loads(tokenizer.decode(written(channel)[:-1])[len("<TOOL_RESPONSE>") : -len("</TOOL_RESPONSE>")])
    assert last == {"error": "the tool failed"}
    with pytest.raises(InputError, match="no call waits for an output"):
        channel.fail(second.call_id, "again")


@pytest.mark.parametrize(
    ("tools_given", "words"),
    [
        (["roll"], r"tools is an array; functions by their names are needed"),
        (5, r"tools is 5; functions by their names are needed"),
        ({"roll": 5}, r"the tool 'roll' is 5; a function is needed"),
        ({5: print}, r"a tool's name is 5; text is needed"),
    ],
)
def test_tools_are_functions_by_name(tiny: VoiceChat, tools_given: Any, words: str) -> None:
    with pytest.raises(InputError, match=f"^{words}$"):
        tiny.generate(sound(2), tools=tools_given)


# In frames after the call: when its two parts are answered, and where the session is cut.
MIDDLES = {"calling": (3, 3, -9), "waiting": (5, 5, 3), "half answered": (5, 1, 3), "responding": (0, 0, 7)}


@pytest.mark.parametrize(("middle", "how"), [*zip(MIDDLES, ["file", "fork", "file", "fork"], strict=True)])
def test_a_snapshot_in_the_middle_of_a_call(
    tiny: VoiceChat, tokenizer: Tokenizer, script: Script, tmp_path: Path, middle: str, how: str
) -> None:
    call = [START, *tokenizer.encode(SHORT_TWO), END]
    last = len(call) - 1
    first, second, cut = (last + frames for frames in MIDDLES[middle])
    answers = [(first, f"call_{last}_0", "x"), (second, f"call_{last}_1", 2)]

    def taken(session: Session, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            yield event
            if isinstance(event, AudioFrame):
                for _, call_id, output in (answer for answer in answers if answer[0] == event.frame_index):
                    session.respond(call_id, output)

    def run(saved: bool) -> tuple[list[Event], str]:
        script(call)
        session = tiny.session(tools=True)
        events = list(taken(session, session.push(samples[: cut * 1280])))
        if saved and how == "fork":
            session = session.fork()
        elif saved:
            session.snapshot().save(tmp_path / "state.safetensors")
            session.cancel()
            session = tiny.resume(Snapshot.load(tmp_path / "state.safetensors"))
        events += taken(session, chain(session.push(samples[cut * 1280 :]), session.flush()))
        return events, session.function_text

    samples = sound(len(call) + 50)
    (events, text), (again, again_text) = run(False), run(True)
    assert events == again
    assert text == again_text
    assert '<SPECIAL_21><TOOL_RESPONSE>["x", 2]</TOOL_RESPONSE><SPECIAL_22>' in text


def test_a_reset_forgets_the_call(tiny: VoiceChat, tokenizer: Tokenizer, script: Script) -> None:
    call = [START, *tokenizer.encode(SHORT), END]
    script(call)
    session = tiny.session(tools=True)
    list(session.push(sound(len(call) + 2)))
    session.reset()
    with pytest.raises(InputError, match="no call waits for an output"):
        session.respond(f"call_{len(call) - 1}_0", "five")
    script([])
    assert set(ids_of(session.push(sound(3)))[0]) == {SAID}


def test_an_interruption_ends_nothing_but_the_session_does(
    tiny: VoiceChat, tokenizer: Tokenizer, script: Script
) -> None:
    """The user may speak on: the clock runs, and the call still has its answer."""
    call = [START, *tokenizer.encode(SHORT), END]
    script(call)
    session = tiny.session(tools=True)
    list(session.push(sound(len(call) + 1)))
    events = list(session.push(sound(20)))
    assert ids_of(events) == ([PAD] * 20, [PAD] * 20)
    session.respond(f"call_{len(call) - 1}_0", "five")
    list(session.push(sound(50)))
    assert '<TOOL_RESPONSE>["five"]</TOOL_RESPONSE><SPECIAL_22>' in session.function_text
    session.cancel()
    with pytest.raises(SessionClosedError, match="by cancel"):
        session.respond("call_1_0", "five")


def test_a_call_may_be_answered_while_the_session_is_flushed(
    tiny: VoiceChat, tokenizer: Tokenizer, script: Script
) -> None:
    call = [START, *tokenizer.encode(SHORT), END]
    script(call)
    session = tiny.session(tools=True)
    session.push(sound(len(call) + 45))  # none of it taken
    list(answering(session, session.flush(), "five"))
    assert '["five"]</TOOL_RESPONSE><SPECIAL_22>' in session.function_text


@pytest.mark.parametrize("wait", [0, -1, 1.5, True, "long", None])
def test_how_long_a_call_may_wait(tiny: VoiceChat, wait: Any) -> None:
    with pytest.raises(InputError, match=r"tool_wait_frames is .*; a whole number of at least 1 is needed"):
        tiny.session(tools=True, tool_wait_frames=wait)


def test_the_wait_is_the_sessions(tiny: VoiceChat, tokenizer: Tokenizer, script: Script) -> None:
    call = [START, *tokenizer.encode(SHORT), END]
    script(call)
    session = tiny.session(tools=True, tool_wait_frames=3)
    _, function = ids_of(session.push(sound(len(call) + 6)))
    begun = tokenizer.encode("<TOOL_RESPONSE>")[:2]
    assert function[len(call) : len(call) + 5] == [PAD, PAD, PAD, *begun]
    with pytest.raises(InputError, match="no call waits"):
        session.respond(f"call_{len(call) - 1}_0", "five")


def test_whether_there_are_tools_is_yes_or_no(tiny: VoiceChat) -> None:
    with pytest.raises(InputError, match="tools is 'roll_dice'; True or False is needed"):
        tiny.session(tools="roll_dice")  # type: ignore[arg-type]
