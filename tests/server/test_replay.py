"""Recordings of the tiny checkpoint, run again: the same, and the first difference after one thing was changed."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.core.scripted import END, START, script
from tests.server.fake_worker import FakeVoiceChat
from tests.server.recording_house import (
    CANCEL,
    COMMIT,
    House,
    append,
    facts,
    hear_all,
    hear_until,
    house,
    lines,
    pcm,
    run,
    sound,
    update,
)
from voicechat_core import CheckpointError, InputError, VoiceChat
from voicechat_core.synthetic import synthesize
from voicechat_server.recording import RecordingLimits
from voicechat_server.replay import Difference, ReplayReport, compare, read, replay

SECONDS = 0.08  # of a frame, by the mock clock
Script = Callable[[House], Awaitable[None]]


def record(root: Path, model: VoiceChat | FakeVoiceChat, script: Script, **options: Any) -> Path:
    """The folder of one conversation."""
    found: list[Path] = []

    async def main() -> None:
        async with house(root, voicechat=model, frame_seconds=SECONDS, **options) as home:
            await script(home)
            await home.over.wait()
            found.append(home.folder())

    run(main)
    return found[0]


async def plainly(home: House) -> None:
    peer = await home.begin(seed=5, system_prompt="Be kind.")
    for start in range(0, 8 * 1280 + 500, 3000):
        await peer.say(append(sound(8.4)[start : start + 3000]))
    await peer.say(COMMIT)
    await hear_all(peer)


@pytest.fixture(scope="module")
def plain(tiny: VoiceChat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine frames, committed; not to be changed."""
    return record(tmp_path_factory.mktemp("plain"), tiny, plainly)


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in plain.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def again(folder: Path, tiny: VoiceChat) -> ReplayReport:
    return compare(read(folder), tiny)


def change_facts(folder: Path, **changes: Any) -> None:
    (folder / "session.json").write_text(json.dumps({**facts(folder), **changes}))


def change_lines(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    found = lines(folder)
    for line in found:
        change(line)
    (folder / "wire.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))


def change_pcm(file: Path, at: int, by: int) -> None:
    samples = pcm(file).copy()
    samples[at] += by
    file.write_bytes(samples.tobytes())


def audio_of(folder: Path) -> list[dict[str, Any]]:
    return [m for m in (line.get("message", {}) for line in lines(folder)) if m.get("type") == "response.audio.delta"]


# ---- the same


def test_a_recording_is_the_same_again(plain: Path, tiny: VoiceChat) -> None:
    report = again(plain, tiny)
    assert report.difference is None
    assert report.frames == 9
    told = [line["message"]["type"] for line in lines(plain) if line["what"] == "server"]
    assert report.messages == len(told) - len(("session.created", "session.updated", "input_audio_buffer.committed"))
    assert report.notes == []
    assert report.fingerprint == tiny.model.fingerprint == facts(plain)["fingerprint"]
    assert report.text() == f"sess_0000000000000000: 9 frames and {report.messages} messages are the same"
    assert json.loads(json.dumps(report.as_dict())) == {**report.as_dict(), "same": True, "difference": None}


def test_it_loads_the_recorded_checkpoint_or_another_place_of_it(folder: Path, tiny_path: Path, tmp_path: Path) -> None:
    change_facts(folder, checkpoint=str(tiny_path))
    assert (replay(folder).same, replay(folder).checkpoint) == (True, str(tiny_path))
    change_facts(folder, checkpoint=str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="gone"):
        replay(folder)
    assert replay(folder, tiny_path).same


def test_a_commit_without_padding(tmp_path: Path, tiny: VoiceChat) -> None:
    async def script(home: House) -> None:
        peer = await home.begin()
        await peer.say(append(sound(3.1)))
        await peer.say(json.dumps({"type": "input_audio_buffer.commit", "pad_partial": False}))
        await hear_all(peer)

    report = again(record(tmp_path, tiny, script), tiny)
    assert (report.difference, report.frames) == (None, 3)


def test_a_session_that_skipped(tmp_path: Path, tiny: VoiceChat) -> None:
    """Skips before the first frame and later ones; every sample counts, so their places are right to the sample."""

    async def script(home: House) -> None:
        peer = home.enter()
        await hear_until(peer, "session.created")
        await peer.say(update(lag={"policy": "skip", "max_seconds": 0.2}))
        await peer.say(append(sound(5.3, seed=1)))  # before it is open: skipped before frame 0
        await hear_until(peer, "response.audio.delta")
        for part in range(3):
            await peer.say(append(sound(6.7, seed=part)))
            await hear_until(peer, "response.audio.delta")
        await peer.say(append(sound(0.4)))
        await peer.say(COMMIT)
        await hear_all(peer)

    folder = record(tmp_path, tiny, script, open_seconds=1.0)
    skips = [(line["before_frame"], line["frames"]) for line in lines(folder) if line["what"] == "skipped"]
    assert skips[0][0] == 0
    assert len(skips) >= 3
    report = again(folder, tiny)
    assert report.difference is None
    assert report.frames + sum(frames for _, frames in skips) == 26  # ceil(5.3 + 3 * 6.7 + 0.4)
    found = read(folder)
    assert found.heard(tiny).size == found.input.size - 1280 * sum(frames for _, frames in skips)


@pytest.mark.parametrize("which", ["before_frame", "frames"])
def test_a_skip_in_another_place_is_another_session(tmp_path: Path, tiny: VoiceChat, which: str) -> None:
    async def script(home: House) -> None:
        peer = await home.begin(lag={"policy": "skip", "max_seconds": 0.2})
        await peer.say(append(sound(2)))
        await hear_until(peer, "response.audio.delta")
        await peer.say(append(sound(8)))
        await peer.say(COMMIT)
        await hear_all(peer)

    folder = record(tmp_path, tiny, script)
    assert again(folder, tiny).same
    (skip,) = (line for line in lines(folder) if line["what"] == "skipped")
    assert skip["before_frame"] > 0

    def change(line: dict[str, Any]) -> None:
        if line["what"] == "skipped":
            line[which] += 1

    change_lines(folder, change)
    difference = again(folder, tiny).difference
    assert difference is not None
    assert difference.frame_index >= skip["before_frame"]


def test_a_bounded_history(tmp_path: Path, tiny: VoiceChat) -> None:
    async def script(home: House) -> None:
        peer = await home.begin()
        await peer.say(append(sound(14)))
        await peer.say(COMMIT)
        await hear_all(peer)

    folder = record(tmp_path, tiny, script, tts_context_frames=4)
    assert again(folder, tiny).same
    change_facts(folder, opening={**facts(folder)["opening"], "tts_context_frames": None})
    difference = again(folder, tiny).difference
    assert difference is not None
    assert difference.frame_index >= 4


def test_a_session_whose_calls_were_answered(tmp_path: Path, tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each output goes in before the frame before which it came; another output is another session."""
    ids = [START, *tiny.model.tokenizer.encode('{"name":"a"}'), END]
    long = ["x" * 1000, {"y": "z" * 400}]  # refused, and cut in the log

    async def talk(home: House) -> None:
        peer = await home.begin(function_calls=True)
        script(monkeypatch, ids)  # from here on: the model was warmed up before
        await peer.say(append(sound(len(ids) + 3)))
        *_, call = await hear_until(peer, "response.function_call_arguments.done")
        for _ in range(4):  # of its frame, and of the others that are due
            await hear_until(peer, "response.audio.delta")
        for output in (long, 5):
            item = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
            await peer.say(json.dumps({"type": "conversation.item.create", "item": item}))
            if output is long:
                *_, refused = await hear_until(peer, "error")
                assert "1024 are the most" in refused["error"]["message"]
        await peer.say(append(sound(50)))
        await peer.say(COMMIT)
        told = [m for m in await hear_all(peer) if m["type"] == "response.function.delta"]
        assert told[-1]["text"].endswith("<TOOL_RESPONSE>[5]</TOOL_RESPONSE><SPECIAL_22>")

    folder = record(tmp_path, tiny, talk)
    taken = [{**line, "at": 0} for line in lines(folder) if line["what"] == "output"]
    call_id = f"call_{len(ids) - 1}_0"
    assert taken == [{"what": "output", "at": 0, "before_frame": len(ids) + 3, "call_id": call_id, "output": 5}]
    said = [line["message"]["item"] for line in lines(folder) if "item" in line.get("message", {})]
    assert said[0]["output"] == json.dumps(long)[:300] + f"... ({len(json.dumps(long))} characters)"
    assert said[1]["output"] == "5"
    script(monkeypatch, ids)
    report = again(folder, tiny)
    assert (report.difference, report.frames) == (None, len(ids) + 53)

    for change in ({"output": 6}, {"before_frame": len(ids) + 2}):
        change_lines(folder, lambda line, change=change: line.update(change) if line["what"] == "output" else None)
        script(monkeypatch, ids)
        difference = again(folder, tiny).difference
        assert difference is not None
        assert difference.frame_index >= len(ids) + 2
    script(monkeypatch, [])  # a model that does not call has nothing to be answered
    difference = again(folder, tiny).difference
    assert difference is not None
    assert difference.frame_index == 0


@pytest.mark.parametrize("frames", [9, 5.08])
def test_a_session_that_reached_its_limit(tmp_path: Path, tiny: VoiceChat, frames: float) -> None:
    """The frames before it, and the end; what was too much is in input.pcm and is not heard.

    Of 5.08 frames only the padding of the last one passes the limit of five.
    """

    async def script(home: House) -> None:
        peer = await home.begin(max_streaming_seconds=0.4)
        await peer.say(append(sound(frames)))
        if frames == 9:
            await hear_until(peer, "error")
        await peer.say(COMMIT)
        assert [m["type"] for m in await hear_all(peer)].count("error") == (frames != 9)

    report = again(record(tmp_path, tiny, script), tiny)
    assert (report.difference, report.frames) == (None, 5)


def test_an_update_that_failed_before(tmp_path: Path, tiny: VoiceChat) -> None:
    async def script(home: House) -> None:
        peer = home.enter()
        await hear_until(peer, "session.created")
        await peer.say(update(system_prompt="word " * 40000))  # more positions than there are
        await peer.say(append(sound(2, seed=9)))
        await hear_until(peer, "error")
        await peer.say(update(seed=4))
        await peer.say(append(sound(3)))
        await peer.say(COMMIT)
        await hear_all(peer)

    folder = record(tmp_path, tiny, script)
    assert sum(line["what"] == "opening" for line in lines(folder)) == 2
    report = again(folder, tiny)
    assert (report.difference, report.frames) == (None, 3)


# ---- recordings that end in the middle


@pytest.mark.parametrize("how", ["left", "cancel", "cancelled by the server", "without a flush"])
def test_a_session_that_was_cut_off(tmp_path: Path, tiny: VoiceChat, how: str) -> None:
    async def script(home: House) -> None:
        peer = await home.begin(seed=2)
        await peer.say(append(sound(12.5)))
        if how == "left":
            await peer.say(COMMIT)
        for _ in range(12 if how == "without a flush" else 5):
            await hear_until(peer, "response.audio.delta")
        if how == "cancel":
            await peer.say(CANCEL)
            await hear_all(peer)
        elif how == "cancelled by the server":
            home.cancel.cancel()
        else:
            await trio.sleep(20 * SECONDS)
            peer.leave()

    folder = record(tmp_path, tiny, script)
    report = again(folder, tiny)
    assert facts(folder)["complete"] is True
    assert (report.difference, report.notes) == (None, [])
    assert report.frames == len(audio_of(folder))
    assert 5 <= report.frames < 13


def test_a_process_that_was_killed(folder: Path, plain: Path, tiny: VoiceChat) -> None:
    """session.json is as it was at the opening, the log ends inside a line, and each file where it may."""
    unended = {"complete": False, "ended": None, "input_samples": None, "output_samples": None}
    change_facts(folder, **unended)
    log = (plain / "wire.jsonl").read_text().splitlines(keepends=True)
    last = [n for n, line in enumerate(log) if '"response.audio.delta"' in line][6]
    (folder / "wire.jsonl").write_text("".join(log[:last]) + log[last][:50])
    report = again(folder, tiny)
    assert (report.difference, report.frames) == (None, 6)
    assert report.notes == ["the recording is not complete: it was cut off", "wire.jsonl ends inside a line"]

    (folder / "wire.jsonl").write_text("".join(log))
    (folder / "output.pcm").write_bytes((plain / "output.pcm").read_bytes()[: 4 * 3528 - 1])
    report = again(folder, tiny)
    assert (report.difference, report.frames) == (None, 3)
    assert report.notes[1:] == ["output.pcm ends before frame 3"]

    no_flush = [line for line in log if '"flush"' not in line]
    (folder / "wire.jsonl").write_text("".join(no_flush))
    (folder / "output.pcm").write_bytes((plain / "output.pcm").read_bytes())
    (folder / "input.pcm").write_bytes((plain / "input.pcm").read_bytes()[: 2 * (200 + 4 * 1280) + 1])
    report = again(folder, tiny)
    assert (report.difference, report.frames) == (None, 5)
    assert report.notes[1].startswith("the input that was kept ends before frame 5; ")


def test_a_recording_that_a_full_buffer_ended(tmp_path: Path, tiny: VoiceChat) -> None:
    async def slow(work: Callable[[], None]) -> None:
        await trio.sleep(3 * SECONDS)
        work()

    async def script(home: House) -> None:
        peer = await home.begin()
        for _ in range(3):
            await peer.say(append(sound(3)))
            for _ in range(3):
                await hear_until(peer, "response.audio.delta")
            await trio.sleep(9 * SECONDS)
        await peer.say(append(sound(60)))
        await peer.say(COMMIT)
        await hear_all(peer)

    limits = RecordingLimits(waiting_bytes=100_000)
    folder = record(tmp_path, tiny, script, on_disk=slow, limits=limits)
    report = again(folder, tiny)
    assert report.difference is None
    assert 0 < report.frames < 69
    assert report.notes[0].startswith("the recording is not complete: the disk is too slow")


# ---- the first difference


def test_a_code(folder: Path, tiny: VoiceChat) -> None:
    code = audio_of(folder)[3]["audio_codes"][17]

    def change(line: dict[str, Any]) -> None:
        if line.get("message", {}).get("frame_index") == 3 and "audio_codes" in line["message"]:
            line["message"]["audio_codes"][17] += 1

    change_lines(folder, change)
    report = again(folder, tiny)
    assert report.difference == Difference(3, "response.audio.delta", "audio_codes[17]", code + 1, code)
    assert (report.same, report.frames) == (False, 3)
    assert report.text().startswith(
        "sess_0000000000000000: first difference: frame 3, response.audio.delta, audio_codes[17]: "
        f"recorded {code + 1}, replayed {code}\nbefore it, 3 frames and "
    )
    assert json.loads(json.dumps(report.as_dict()))["difference"]["recorded"] == code + 1


@pytest.mark.parametrize("name", ["text_token", "function_token"])
def test_an_id(folder: Path, tiny: VoiceChat, name: str) -> None:
    token = audio_of(folder)[6][name]

    def change(line: dict[str, Any]) -> None:
        if line.get("message", {}).get("frame_index") == 6 and name in line["message"]:
            line["message"] |= {name: token + 1, "audio_codes": [0] * 31}  # the codes follow from it

    change_lines(folder, change)
    assert again(folder, tiny).difference == Difference(6, "response.audio.delta", name, token + 1, token)


@pytest.mark.parametrize("field", ["token_id", "delta", "text"])
def test_a_text(folder: Path, tiny: VoiceChat, field: str) -> None:
    messages = [line["message"] for line in lines(folder) if line["what"] == "server"]
    last = [m for m in messages if m["type"] == "response.text.delta"][-1]
    other = f"{last[field]}x" if field == "delta" else last[field] + 1

    def change(line: dict[str, Any]) -> None:
        if line.get("message", {}).get("event_id") == last["event_id"] and line["message"]["type"] == last["type"]:
            same = {key: line["message"][key] for key in ("frame_index", "text")} == {
                key: last[key] for key in ("frame_index", "text")
            }
            if same:
                line["message"][field] = other

    change_lines(folder, change)
    expected = Difference(last["frame_index"], "response.text.delta", field, other, last[field])
    assert again(folder, tiny).difference == expected


def test_a_step_of_the_sound(folder: Path, tiny: VoiceChat) -> None:
    at = 4 * 1764 + 1700
    was = int(pcm(folder / "output.pcm")[at])
    change_pcm(folder / "output.pcm", at, 1)
    change_pcm(folder / "output.pcm", at + 10, -3)
    report = again(folder, tiny)
    assert report.difference == Difference(4, "response.audio.delta", "sample 1700", was + 1, was, 3)
    assert "the frame's largest difference is 3" in report.text()


def test_sounds_that_lie_further_apart_than_int16_reaches(folder: Path, tiny: VoiceChat) -> None:
    samples = pcm(folder / "output.pcm").copy()
    at = int(np.flatnonzero(samples < 0)[0])
    was, samples[at] = int(samples[at]), 32767
    (folder / "output.pcm").write_bytes(samples.tobytes())
    difference = again(folder, tiny).difference
    assert difference is not None
    assert (difference.replayed, difference.largest_step) == (was, 32767 - was)


@pytest.mark.parametrize("frame", [2, 3, 7])
def test_samples_that_were_heard(folder: Path, tiny: VoiceChat, frame: int) -> None:
    """All that a frame reads: of one sample alone the answer of this checkpoint does not depend."""
    start = 200 + 1280 * (frame - 1)
    samples = pcm(folder / "input.pcm").copy()
    samples[start : start + 1280] = 0
    (folder / "input.pcm").write_bytes(samples.tobytes())
    difference = again(folder, tiny).difference
    assert difference is not None
    assert difference.frame_index == frame


@pytest.mark.parametrize("change", [{"seed": 6}, {"system_prompt": "Be cruel."}])
def test_another_opening(folder: Path, tiny: VoiceChat, change: dict[str, Any]) -> None:
    change_facts(folder, opening={**facts(folder)["opening"], **change})
    difference = again(folder, tiny).difference
    assert difference is not None
    assert difference.frame_index == 0


def test_a_message_that_was_not_sent(folder: Path, tiny: VoiceChat) -> None:
    """And one that the model does not say: the log goes on where the session had ended."""
    log = (folder / "wire.jsonl").read_text().splitlines(keepends=True)
    texts = [n for n, line in enumerate(log) if "response.text.delta" in line]
    gone = json.loads(log[texts[0]])["message"]["frame_index"]
    (folder / "wire.jsonl").write_text("".join(log[: texts[0]] + log[texts[0] + 1 :]))
    difference = again(folder, tiny).difference
    assert difference is not None
    assert (difference.frame_index, difference.field, difference.replayed) == (gone, "type", "response.text.delta")

    done = next(line for line in log if '"response.done"' in line)
    (folder / "wire.jsonl").write_text("".join([*log, done]))
    assert again(folder, tiny).difference == Difference(9, "response.done", "message", "response.done", "nothing")


def test_a_session_that_fails_when_it_is_run_again(
    folder: Path, tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_facts(folder, opening={**facts(folder)["opening"], "max_frames": 4})
    report = again(folder, tiny)
    assert report.frames == 4
    assert report.difference is not None
    assert report.difference.replayed == "response.done"  # the limit, then the flush
    from voicechat_core import ModelError, Session

    step = Session._step

    def fails(session: Session, index: int, samples: Any) -> Any:
        if index == 2:
            raise ModelError("not finite")
        return step(session, index, samples)

    monkeypatch.setattr(Session, "_step", fails)
    report = again(folder, tiny)
    assert report.frames == 2
    assert report.difference is not None
    assert report.difference.replayed == "ModelError: frame 2: not finite"


# ---- another model, other versions


def test_another_model_is_refused(folder: Path, tiny: VoiceChat, tmp_path: Path) -> None:
    synthesize(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match=rf"fingerprint {tiny.model.fingerprint}, this one's is [0-9a-f]{{16}}: "):
        replay(folder, tmp_path / "other")


def test_the_recorded_precision_is_loaded(folder: Path, tiny: VoiceChat, tiny_path: Path) -> None:
    change_facts(folder, precision="bfloat16")
    with pytest.raises(InputError, match=rf"fingerprint {tiny.model.fingerprint}, this one's is [0-9a-f]{{16}}: "):
        replay(folder, tiny_path)
    change_facts(folder, precision="float8")
    with pytest.raises(InputError, match="precision is 'float8'"):
        replay(folder, tiny_path)


@pytest.mark.parametrize(("recorded", "asked"), [(True, "on"), (False, "off"), (None, "off")])
def test_it_is_compiled_as_it_was(
    recorded: bool | None, asked: str, folder: Path, tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding may differ, and samples with it. Recordings that do not say are from before anything was compiled."""
    seen: list[str] = []

    def load(checkpoint: Path, *, precision: str, compile: str) -> VoiceChat:
        seen.append(compile)
        return tiny

    monkeypatch.setattr("voicechat_core.voicechat.load", load)
    kept = facts(folder)
    kept.pop("compiled")
    (folder / "session.json").write_text(json.dumps(kept if recorded is None else {**kept, "compiled": recorded}))
    assert replay(folder).same
    assert seen == [asked]


def test_other_versions_are_mentioned(folder: Path, tiny: VoiceChat) -> None:
    change_facts(folder, versions={**facts(folder)["versions"], "mlx": "0.1.2", "numpy": "1"})
    report = again(folder, tiny)
    assert report.same
    assert [note.split(",")[0] for note in report.notes] == ["recorded with mlx 0.1.2", "recorded with numpy 1"]
    assert "note: recorded with mlx 0.1.2, replayed with " in report.text()


# ---- what is no recording


def test_folders_that_are_none(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match=r"missing.session\.json: cannot be read: No such file"):
        read(tmp_path / "missing")
    with pytest.raises(InputError, match=r"holds 1 recordings; name one of them, .*copy for instance"):
        read(tmp_path)
    for text, complaint in (
        ("{", "not a recording's: "),
        ("[]", "not a recording's: it has no format"),
        ("{}", "not a recording's: it has no format"),
        ('{"format": 2}', "a recording of format 2; this version reads 1"),
        ('{"format": 1}', "not a recording's: .*session"),
        ("\xff", "not a recording's: "),
    ):
        (folder / "session.json").write_text(text, encoding="latin-1")
        with pytest.raises(InputError, match=rf"session\.json: {complaint}"):
            read(folder)


def test_files_that_are_broken(folder: Path, plain: Path) -> None:
    log = (plain / "wire.jsonl").read_text()
    second = log.splitlines()[1]
    for broken, complaint in (
        (log.replace(second, "{}"), r"wire\.jsonl: line 2 cannot be read: "),
        (log[:-5], r"wire\.jsonl: ends inside a line, though the recording is complete"),
        (log.replace('"delta":1764', '"delta":"x"', 1), r'wire\.jsonl: an audio delta has "x" samples'),
        (log.replace('"delta":1764', '"delta":176400', 1), r"output\.pcm: has 15876 samples; wire\.jsonl tells of"),
    ):
        (folder / "wire.jsonl").write_text(broken)
        with pytest.raises(InputError, match=complaint):
            read(folder)
    (folder / "wire.jsonl").write_text(log)
    for name, has in (("input.pcm", 2 * 10752), ("output.pcm", 2 * 15876)):
        (folder / name).write_bytes((plain / name).read_bytes()[:-2])
        with pytest.raises(
            InputError, match=rf"{name}: has {has - 2} bytes; session\.json tells of {has // 2} samples"
        ):
            read(folder)
        (folder / name).unlink()
        with pytest.raises(InputError, match=rf"{name}: cannot be read: No such file"):
            read(folder)
        (folder / name).write_bytes((plain / name).read_bytes())


# ---- a recording that says it is complete, and is not


def keep_lines(folder: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    kept = [line for line in lines(folder) if keep(line)]
    (folder / "wire.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))


def kind_of(line: dict[str, Any]) -> str:
    kind: str = line.get("message", {}).get("type", line["what"])
    return kind


def end_at(folder: Path, taken: int, told: int) -> None:
    """As if the peer had left after so many frames, of those that were told."""
    every = lines(folder)
    last = [n for n, line in enumerate(every) if kind_of(line) == "response.audio.delta"][taken]
    (folder / "wire.jsonl").write_text("".join(json.dumps(line) + "\n" for line in every[:last]))
    (folder / "output.pcm").write_bytes((folder / "output.pcm").read_bytes()[: 2 * 1764 * taken])
    ending = {**facts(folder)["ended"], "frames": told, "ended_by": "the peer left"}
    change_facts(folder, ended=ending, output_samples=1764 * taken)


@pytest.mark.parametrize(
    ("gone", "complaint"),
    [
        ("", r"wire\.jsonl: tells of no opening; session\.json has one"),
        ("server", r"wire\.jsonl: has 0 frames; session\.json tells of 9"),
        ("the last lines", r"wire\.jsonl: has 6 frames; session\.json tells of 9"),
        (
            "response.done",
            r"wire\.jsonl: response\.\S+ is the last that was said; session\.json tells of .*response\.done",
        ),
    ],
)
def test_a_log_that_has_lost_lines(folder: Path, gone: str, complaint: str) -> None:
    every = lines(folder)
    audio = [n for n, line in enumerate(every) if kind_of(line) == "response.audio.delta"]
    if gone == "the last lines":
        keep_lines(folder, lambda line: line in every[: audio[6]])
    else:
        keep_lines(folder, lambda line: bool(gone) and gone not in (line["what"], kind_of(line)))
    with pytest.raises(InputError, match=complaint):
        read(folder)
    change_facts(folder, complete=False)
    assert read(folder).notes == ["the recording is not complete: it was cut off"]


@pytest.mark.parametrize("frames", [8, 10, 77])
def test_an_end_that_tells_of_other_frames(folder: Path, frames: int) -> None:
    change_facts(folder, ended={**facts(folder)["ended"], "frames": frames})
    with pytest.raises(InputError, match=rf"wire\.jsonl: has 9 frames; session\.json tells of {frames}$"):
        read(folder)


def test_an_end_that_is_not_told(folder: Path) -> None:
    change_facts(folder, ended=None)
    with pytest.raises(InputError, match=r"session\.json: complete is true, and ended is null"):
        read(folder)


@pytest.mark.parametrize(("told", "fits"), [(5, False), (6, True), (7, True), (8, True), (9, False)])
def test_of_a_peer_that_left_some_frames_were_not_taken(folder: Path, tiny: VoiceChat, told: int, fits: bool) -> None:
    end_at(folder, 6, told)
    if fits:
        assert (again(folder, tiny).same, again(folder, tiny).frames) == (True, 6)
        return
    with pytest.raises(InputError, match=rf"wire\.jsonl: has 6 frames; session\.json tells of {told}$"):
        read(folder)


def test_two_frames_may_be_told_that_the_socket_never_took(tmp_path: Path) -> None:
    """One in the writer's hands, one behind it; of a model that says nothing but sound."""

    async def script(home: House) -> None:
        peer = await home.begin()
        await peer.say(append(sound(12.5)))
        await hear_until(peer, "response.audio.delta")
        await trio.sleep(20 * SECONDS)
        peer.leave()

    folder = record(tmp_path, FakeVoiceChat(), script)
    assert (facts(folder)["ended"]["frames"], len(audio_of(folder))) == (3, 1)
    assert len(read(folder).said) == 1


def test_who_left_before_the_last_word_has_left(tmp_path: Path, tiny: VoiceChat) -> None:
    """The protocol had said it already; the recording does not say that it was heard."""

    async def script(home: House) -> None:
        peer = await home.begin()
        await peer.say(append(sound(3)))
        await peer.say(COMMIT)
        for _ in range(3):
            await hear_until(peer, "response.audio.delta")
        await trio.sleep(20 * SECONDS)
        peer.leave()

    folder = record(tmp_path, tiny, script)
    ended = facts(folder)["ended"]
    assert (ended["frames"], ended["ended_by"], ended["code"]) == (3, "the peer left", 1000)
    assert (again(folder, tiny).same, again(folder, tiny).frames) == (True, 3)


def test_sound_that_no_line_tells_of(folder: Path) -> None:
    with (folder / "output.pcm").open("ab") as file:
        file.write(bytes(20))
    change_facts(folder, output_samples=15886)
    with pytest.raises(InputError, match=r"output\.pcm: has 15886 samples; wire\.jsonl tells of 15876$"):
        read(folder)


def test_where_nothing_was_said_nothing_is_compared(tmp_path: Path, tiny: VoiceChat) -> None:
    async def script(home: House) -> None:
        peer = await home.begin()
        peer.leave()

    report = again(record(tmp_path, tiny, script), tiny)
    assert (report.same, report.frames, report.messages) == (True, 0, 0)
    assert report.notes == ["nothing was compared: wire.jsonl has nothing that the session said"]
    assert "note: nothing was compared" in report.text()


def test_a_connection_without_a_session(tmp_path: Path, tiny: VoiceChat) -> None:
    async def script(home: House) -> None:
        peer = home.enter()
        await hear_until(peer, "session.created")
        peer.leave()

    folder = record(tmp_path, tiny, script)
    with pytest.raises(InputError, match="no session was opened in this recording"):
        read(folder)
