"""A window's frames are those of a session, and its sounds are the recordings at their places."""

import json
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from training import domain
from training.listening import recordings, tables, timeline
from training.listening.recordings import Durations, Question, cuts, gathered
from training.listening.timeline import BOS, CALL, CALL_END, EOS, PAD, RESPONSE_END, Script, Shape, Speech, Window
from training.vocabulary import rnnt_pieces, text_tokenizer
from voicechat_core.tokenizer import RnntVocabulary

DURATIONS = Durations({"Apple.": 10, "Hello! How can I help you?": 20, "You rolled a six.": 15})
TEXTS = ("hello", "who are you", "roll a dice", "repeat after me apple", "what is two plus three", "count to ten")


def questions(samples: int = 16000) -> dict[str, list[Question]]:
    made = {}
    for i, text in enumerate(TEXTS):
        start = 100_000 * i
        made[text] = [Question(text, "v", "train", start, start + samples + 777 * i, (start + samples // 2,))]
    return made


def windows(shape: Shape, count: int, seed: int = 0) -> list[Window]:
    script = Script(questions(), DURATIONS, random.Random(seed))
    return [script.window(shape) for _ in range(count)]


def whole_length(answer: str) -> int:
    """Frames from BOS to EOS of an answer that nobody interrupts."""
    return max(5 + DURATIONS(answer), len(timeline.token_ids(answer)) + 1)


def read(ids: list[int]) -> str:
    return text_tokenizer().decode([i for i in ids if i != PAD], skip_special_tokens=False)


def test_a_tool_may_take_a_while() -> None:
    """What stands between call and response is neither the model's choice nor learned."""
    window = Window(12)
    assert window.call(1, [30, 31], [40, 41], wait=3) == 11
    assert window.function == [PAD, CALL, 30, 31, CALL_END, PAD, PAD, PAD, 40, 41, RESPONSE_END, PAD]
    assert window.function_weight[5:10] == [0] * 5
    assert window.function_weight[4] == window.function_weight[10] == timeline.CALLING_WEIGHT


def test_a_reply_stands_where_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool's turn, frame by frame."""
    monkeypatch.setattr(timeline, "REPLY_AFTER", (5,))
    monkeypatch.setattr(timeline, "TOOL_TAKES", (0,))
    script, window = Script(questions(), DURATIONS, random.Random(0)), Window(90)
    turn = next(t for t in domain.turns_of("roll a dice") if t.answer == "You rolled a six.")
    speech = Speech(0, 12800, 1.0, 0)  # ten frames
    begun, ends = script._turn(window, 3, turn, [speech])
    call, response = (timeline.token_ids(text) for text in turn.tool or ())
    starts = 3 + 10 + 5
    assert [h.place for h in window.hearing[3:13]] == list(range(10))
    assert [h.speech.end for h in window.hearing[:3] + window.hearing[13:]] == [0] * 80
    expected = [CALL, *call, CALL_END, *response, RESPONSE_END]
    assert window.function[starts : starts + len(expected)] == expected
    assert set(window.function[:starts] + window.function[starts + len(expected) :]) == {PAD}
    forced = starts + len(call) + 2
    assert window.function_weight[forced : forced + len(response)] == [timeline.RESPONSE_WEIGHT] * len(response)
    assert timeline.RESPONSE_WEIGHT < 0.5
    assert window.function_weight[starts] == 1.5
    assert window.function_weight[forced - 1] == window.function_weight[forced + len(response)] == 1.0
    assert begun == starts + len(expected)
    ids = timeline.token_ids("You rolled a six.")
    assert window.text[begun : begun + 1 + len(ids)] == [BOS, *ids]
    assert ends == begun + 2 + 15 + 3
    assert window.text[ends] == EOS
    assert sum(i != PAD for i in window.text) == len(ids) + 2
    assert window.text_weight[begun] == 3.0
    assert window.text_weight[ends] == 0.8
    assert window.text_weight[begun + 1] == 1.5
    assert window.text_weight[begun + 1 + len(ids)] == 0.4


def test_an_answer_longer_in_ids_than_in_frames_is_not_cut() -> None:
    window = Window(20)
    assert window.say(0, [30, 31, 32, 33, 34], 1) == 6
    assert window.text[:8] == [BOS, 30, 31, 32, 33, 34, EOS, PAD]
    assert window.say(17, [40, 41], 30) == 52
    assert window.text[17:] == [BOS, 40, 41]
    assert len(window.text) == len(window.text_weight) == 20


def test_a_stop_takes_the_rest_of_the_answer_away() -> None:
    window = Window(30)
    ends = window.say(2, [40, 41, 42, 43, 44, 45], 20)
    window.stop(6, ends)
    assert window.text[2:8] == [BOS, 40, 41, 42, EOS, PAD]
    assert set(window.text[7:]) == {PAD}
    assert window.text_weight[6] == 2.0
    assert set(window.text_weight[7:]) == {0.4}


def test_every_window_is_a_conversation_that_holds_together() -> None:
    shape, vocabulary = Shape(200, 60), RnntVocabulary(rnnt_pieces())
    drawn = windows(shape, 300)
    stops = hesitations = quiet = prompts = 0
    for window in drawn:
        assert {len(window.hearing), len(window.text), len(window.function)} == {200}
        heard = [h.speech.end > 0 for h in window.hearing]
        onsets = [t for t in range(200) if heard[t] and (t == 0 or not heard[t - 1])]
        asked = vocabulary.text(window.labels)
        begins = [t for t in range(200) if window.text[t] == BOS]
        assert len(window.labels) <= shape.labels
        quiet += not onsets
        prompts += bool(window.prompt)
        begun = [
            h.speech.start for h in window.hearing if h.place == 0 and h.speech.start % 100_000 == 0 and h.speech.end
        ]
        assert asked == " ".join(TEXTS[start // 100_000] for start in begun)
        for begin in begins:
            said = window.text[begin + 1 :]
            end = said.index(EOS) if EOS in said else len(said)
            answer = read(said[:end])
            # No reply begins while somebody speaks, nor sooner than five frames of silence.
            assert not any(heard[begin - 5 : begin])
            assert BOS not in said[:end]
            interrupted = any(heard[begin + 1 : begin + 1 + end + 1]) and begin + 1 + end < 200
            whole = begin + 1 + end < 200 and not interrupted
            if whole:
                assert any(t.answer == answer for text in TEXTS for t in domain.turns_of(text)) or "I am" in answer
            if interrupted:
                stops += 1
                onset = next(t for t in onsets if t > begin)
                assert 3 <= begin + 1 + end - onset <= 6 or whole_length(answer) == end + 1
        speeches = {h.speech for h in window.hearing if h.speech.end}
        hesitations += sum(s.start % 100_000 != 0 for s in speeches)
        # What is heard last leaves room for its labels.
        assert not any(heard[-8:])
    assert 70 < stops < 220
    assert 30 < hesitations < 200
    assert 5 < quiet < 40
    assert 80 < prompts < 220


def test_a_pause_inside_of_a_question_is_shorter_than_any_reply_waits() -> None:
    assert max(timeline.HESITATION) + 1 < min(timeline.REPLY_AFTER) + 1
    for window in windows(Shape(150, 60), 200, seed=1):
        for t in range(1, 150):
            here, before = window.hearing[t], window.hearing[t - 1]
            if here.speech.start % 100_000 and here.place == 0:  # a second part
                since = next(k for k in range(1, 10) if window.hearing[t - k].speech.end)
                assert since - 1 in timeline.HESITATION
                assert window.hearing[t - since].speech.end == here.speech.start
                assert window.text[t - since : t] == [PAD] * since or EOS in window.text[t - since : t]
            assert before.speech.end == 0 or here.speech != before.speech or here.place == before.place + 1


def test_the_name_follows_the_prompt() -> None:
    script, seen = Script({"who are you": questions()["who are you"]}, DURATIONS, random.Random(2)), set()
    for _ in range(40):
        window = script.window(Shape(90, 20))
        if BOS not in window.text:
            continue
        said = window.text[window.text.index(BOS) + 1 :]
        answer = read(said[: said.index(EOS)] if EOS in said else said)
        prompt = read(window.prompt)
        named = [name for name in domain.NAMES if name in prompt]
        assert (named or [domain.TINY_NAME])[0] in answer
        assert not window.prompt or (window.prompt[0], window.prompt[-1]) == (BOS, EOS)
        seen.add(answer)
    assert len(seen) > 5


def test_a_prompt_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain, "system_prompt", lambda rng: ("You are Anna. Be concise. Be friendly.", "Anna"))
    with pytest.raises(ValueError, match="windows have 5"):
        windows(Shape(90, 20, prompt=5), 1)


def test_questions_that_nobody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match="none of the recorded"):
        Script({"colorless green ideas": []}, DURATIONS, random.Random(0))


def test_durations_are_the_longest_recorded_or_a_line_through_them() -> None:
    known = Durations({"One.": 8, "One two.": 12, "One two three.": 16, "One two three four.": 20})
    assert known("One two.") == 12
    assert known("Six two three one two.") in range(22, 27)
    assert known("") >= recordings.LEAST_FRAMES


def test_of_several_recordings_of_an_answer_the_longest_counts(tmp_path: Path) -> None:
    said = [("One.", 1764 * 5), ("One.", 1764 * 7 + 1), ("One.", 100), ("Two three.", 1764 * 9)]
    items = [{"text": text, "samples": samples} for text, samples in said]
    (tmp_path / "assistant.json").write_text(json.dumps({"items": items}), encoding="utf-8")
    known = recordings.read_durations(tmp_path)
    assert (known("One."), known("Two three.")) == (8, 9)


def test_cuts_lie_in_the_silence() -> None:
    rng = np.random.default_rng(0)
    loud = rng.integers(-9000, 9000, 8000).astype(np.int16)
    sound = np.concatenate([loud, np.zeros(1600, np.int16), loud, np.zeros(1600, np.int16)])
    assert cuts(sound) == (8800,)
    assert cuts(loud) == ()
    assert cuts(np.zeros(10, np.int16)) == ()


def test_a_row_plays_each_recording_at_its_place() -> None:
    rng = np.random.default_rng(1)
    pieces = [rng.integers(-3000, 3000, 4000).astype(np.int16) for _ in range(2)]
    bank = gathered([({"text": t, "voice": "v", "split": "train"}, p) for t, p in zip("ab", pieces, strict=True)])
    assert [(q.start, q.end) for q in bank.items] == [(0, 4000), (4000, 8000)]
    window = Window(12)
    after = window.hear(2, Speech(0, 4000, 1.0, 100))
    assert after == 6
    window.hear(7, Speech(4000, 8000, 2.0, 0))
    row = tables.rows(tables.table_of([tables.arrays_of([window], Shape(12, 4))]), mx.array([0]))
    heard = np.array(tables.sound(mx.array(bank.samples), row))[0].ravel() * 32768
    expected = np.zeros(12 * 1280)
    expected[2 * 1280 + 100 : 2 * 1280 + 4100] = pieces[0]
    expected[7 * 1280 : 7 * 1280 + 2000] = pieces[1][::2]
    assert np.abs(heard - expected).max() < 1e-2


def test_other_speeds_read_between_the_samples() -> None:
    ramp = (10 * np.arange(3000)).astype(np.int16)
    window = Window(3)
    window.hear(0, Speech(0, 3000, 0.9, 7))
    row = tables.rows(tables.table_of([tables.arrays_of([window], Shape(3, 4))]), mx.array([0]))
    heard = np.array(tables.sound(mx.array(ramp), row))[0].ravel() * 32768
    assert np.abs(heard[7:3307] - 9 * np.arange(3300)).max() < 0.2
    assert not heard[:7].any()
    assert not heard[7 + 3340 :].any()


def test_a_table_is_drawn_the_same_by_any_number_of_processes() -> None:
    plan, shape = tables.Plan(questions(), DURATIONS, 5), Shape(90, 30)
    alone = tables.draw(plan, {shape: 40})[shape]
    many = tables.draw(plan, {shape: 40}, workers=2)[shape]
    assert alone["text"].shape == (40, 90)
    assert {name for name in alone if not mx.array_equal(alone[name], many[name]).item()} == set()
    other = tables.draw(tables.Plan(questions(), DURATIONS, 6), {shape: 40})[shape]
    assert not mx.array_equal(alone["text"], other["text"]).item()


def test_a_prompt_stands_right_before_the_first_frame() -> None:
    window = Window(5, prompt=[1, 300, 2])
    arrays = tables.arrays_of([window], Shape(5, 4, prompt=6))
    assert arrays["prompt"][0].tolist() == [PAD, PAD, PAD, 1, 300, 2]
    assert arrays["prompt_length"].tolist() == [3]
