"""The figures of a checkpoint as the table of its model card, each beside its target. Knows no network and no file."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from voicechat_core.profile import FRAME_MS

__all__ = ["Row", "markdown", "rows"]

Figures = Mapping[str, Any]

# The targets of the issue that asked for the checkpoint; shares of one.
WORD_ERROR, RIGHT, CALLS, STOPPED, SPOKEN_ERROR, FACTOR = 0.08, 0.85, 0.95, 0.9, 0.15, 0.7
CODING = 0.03  # of word error, by which what is coded may be worse than the original


@dataclass(frozen=True)
class Row:
    """What was measured, what it should be (empty for no target), and whether it is."""

    what: str
    target: str
    measured: str
    reached: bool = True


def markdown(found: Iterable[Row]) -> str:
    """Rows as a Markdown table; where one is short of its target it says so."""
    lines = [f"| {r.what} | {r.target} | {r.measured}{'' if r.reached else ': not reached'} |" for r in found]
    return "\n".join(["| | target | measured |", "|---|---|---|", *lines])


def rows(figures: Figures) -> list[Row]:
    """All rows, of what ``training.evaluate`` gathers; those of the recogniser only where one listened."""
    found = [*_questions(figures["listening"]), *_manners(figures["listening"])]
    if "codec" in figures:
        found += _codec(figures["codec"])
    return [*found, *_spoken(figures["spoken"]), _speed(figures["speed"])]


def _questions(listening: Figures) -> Iterator[Row]:
    trained, held, every = listening["trained"], listening["held"], listening["all"]
    by_voice = listening["trained_by_voice"].values()
    number = trained["questions"]
    yield Row(
        f"transcript, word error, {number} questions that the training sets hold",
        f"{100 * WORD_ERROR:.0f} %",
        _percent(trained["word_error"]) + _range(voice["word_error"] for voice in by_voice),
        _at_most(trained["word_error"], WORD_ERROR),
    )
    yield Row(
        "their answers, exact",
        f"{100 * RIGHT:.0f} %",
        _percent(trained["right"]) + _range(voice["right"] for voice in by_voice),
        _at_least(trained["right"], RIGHT),
    )
    yield Row("their tool calls, exact", "", f"{_calls(trained)}; false calls {_percent(trained['false_calls'])}")
    yield Row(
        f"{held['questions']} that they do not (new combinations to repeat, unknown questions, tool results): "
        "word error, exact",
        "",
        f"{_percent(held['word_error'])}, {_percent(held['right'])}",
    )
    yield Row(
        "all tool calls, exact",
        f"{100 * CALLS:.0f} %",
        f"{_calls(every)}; false calls {_percent(every['false_calls'])}",
        _at_least(every["calls_right"], CALLS),
    )


def _manners(listening: Figures) -> Iterator[Row]:
    """Silence, interruptions, reaction, names, long sessions."""
    silence, stops = listening["silence"], listening["interruptions"]
    names, sessions, every = listening["names"], listening["sessions"], listening["all"]
    false = [name for name, started in silence["false_starts"].items() if started]
    yield Row(
        f"speech on {_seconds(silence['frames'])} of silence, hiss, hum, clicks ({len(silence['false_starts'])} kinds)",
        "none",
        f"{', '.join(false) or 'none'}; the next question is answered right in {_percent(silence['right_after'])}",
        not false,
    )
    yield Row(
        "stops within 5 frames of an interruption",
        f"{100 * STOPPED:.0f} %",
        f"{_of(stops['stopped_within_5'], stops['speaking'])}; "
        f"the new question is then answered right in {_percent(stops['right_after'])}",
        _at_least(stops["stopped_within_5"], STOPPED),
    )
    yield Row("reaction", "", _reaction(every["reaction_median"], every["reaction_most"]))
    without = f"under a prompt without one {_percent(names['right_without'])}"
    yield Row("the name that the system prompt gives", "", f"{_of(names['right'], names['tried'])}; {without}")
    length = f"answers in sessions of {_seconds(sessions['frames'])}"
    yield Row(length, "", f"{_percent(sessions['right'])}; in their second halves {_percent(sessions['right_late'])}")


def _codec(codec: Figures) -> Iterator[Row]:
    original, coded = codec["original"], codec["coded"]
    yield Row(
        f"codec: word error of a recogniser on {original['sentences']} held-out answers, original",
        "",
        _heard(original),
    )
    yield Row(
        "the same, coded and decoded",
        f"within {100 * CODING:.0f} points",
        _heard(coded),
        _at_most(coded["word_error"] - original["word_error"], CODING),
    )


def _spoken(spoken: Figures) -> Iterator[Row]:
    asked = f"{spoken['questions']} questions to live sessions"
    right = f"answers as written right in {_percent(spoken['written_right'])}, none in {spoken['unanswered']}"
    yield Row(f"{asked}: transcript, word error", "", f"{_percent(spoken['transcript_word_error'])}; {right}")
    if "against_written" not in spoken:
        return
    said = spoken["against_written"]
    target = f"{100 * SPOKEN_ERROR:.0f} %"
    reached = _at_most(said["word_error"] if said["sentences"] else None, SPOKEN_ERROR)
    yield Row("spoken answers, word error against what was written", target, _heard(said), reached)
    for part, what in (("trained", "sentences that the training sets hold"), ("new", "that they do not")):
        yield Row(f"of these, {spoken[part]['sentences']} {what}", "", _heard(spoken[part]))
    yield Row("all against the right answers", "", _heard(spoken["against_right"]))


def _speed(speed: Figures) -> Row:
    measured = "no frame"
    if speed["factor"] is not None:
        frame = f"p50 {speed['p50_ms']:.0f} ms, p95 {speed['p95_ms']:.0f} ms a frame"
        measured = f"{speed['factor']:.2f} ({frame}, {speed['late']} of {speed['frames']} over {FRAME_MS:.0f} ms)"
    where = f"realtime factor, live ({speed['device']}, {speed['cores']} cores)"
    return Row(where, f"{FACTOR} on two cores", measured, _at_most(speed["factor"], FACTOR))


# ---- numbers


def _percent(share: float | None) -> str:
    return "none tried" if share is None else f"{100 * share:.1f} %"


def _range(shares: Iterable[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f" ({100 * min(known):.1f} to {_percent(max(known))} by voice)" if len(known) > 1 else ""


def _of(share: float | None, whole: int) -> str:
    return "none tried" if share is None else f"{round(share * whole)} of {whole}"


def _calls(figures: Figures) -> str:
    return _of(figures["calls_right"], figures["tools"])


def _heard(score: Figures) -> str:
    if not score["sentences"]:
        return "none spoken"
    return f"{_percent(score['word_error'])}, exact {_percent(score['exact'])}"


def _reaction(median: int | None, most: int | None) -> str:
    return "none" if median is None else f"{median} frames ({FRAME_MS * median:.0f} ms), at most {most}"


def _seconds(frames: int) -> str:
    return f"{FRAME_MS * frames / 1000:.0f} s"


def _at_most(value: float | None, limit: float) -> bool:
    return value is not None and value <= limit


def _at_least(value: float | None, limit: float) -> bool:
    return value is not None and value >= limit
