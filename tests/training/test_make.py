"""The steps from packages to a checkpoint: what is done, what is left out, what goes on; and all of it in small."""

import json
import os
import re
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from training import few, make, synthesize
from training.bank import Pcm
from training.make import NAMES, Command, Plan, run, steps, to_do
from training.synthesize import Sentence
from voicechat_core import load
from voicechat_core.inspection import inspect

SECONDS = {"codec": 3.0, "listening": 4.0, "speaking": 5.0}
TRAINING = Path(make.__file__).parent


class Makers:
    """Runs nothing: each command leaves what its step should, a second after the last one did."""

    def __init__(self, plan: Plan) -> None:
        self.ran: list[Command] = []
        self.clock = 10**9
        self.ends_with: dict[str, int] = {}
        self._outputs = {command: step.outputs for step in steps(plan) for command in step.commands}

    def __call__(self, command: Command) -> int:
        self.ran.append(command)
        status = self.ends_with.get(command[0], 0)
        plain = tuple(word for word in command if word != "--resume")
        for file in self._outputs[plain] if not status else ():
            self.touch(file)
        return status

    def touch(self, file: Path) -> None:
        self.clock += 1
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (self.clock, self.clock))

    def take(self) -> list[str]:
        """The modules that ran since the last time, each once, and how they go on."""
        ran, self.ran = self.ran, []
        return list(dict.fromkeys(f"{c[0]}{' on' if '--resume' in c else ''}" for c in ran))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path / "data", tmp_path / "out", SECONDS, workers=2)


@pytest.fixture
def makers(plan: Plan) -> Makers:
    return Makers(plan)


EVERYTHING = [
    "training.synthesize", "training.codec.train", "training.codec.encode", "training.listening.train",
    "training.speaking.train", "training.export", "training.evaluate",
]  # fmt: skip


def test_all_steps_run_once_in_order(plan: Plan, makers: Makers) -> None:
    assert tuple(step.name for step in steps(plan)) == NAMES
    run(steps(plan), makers)
    parts = [command[2] for command in makers.ran if command[0] == "training.synthesize"]
    assert parts == list(synthesize.PARTS)
    assert ("training.listening.train", "--data", str(plan.data), "--out", str(plan.out / "listening"),
            "--seconds", "4.0") in makers.ran  # fmt: skip
    assert makers.take() == EVERYTHING
    run(steps(plan), makers)
    assert makers.take() == []


def test_what_follows_from_a_changed_output_follows_and_nothing_else(plan: Plan, makers: Makers) -> None:
    run(steps(plan), makers)
    makers.take()
    makers.touch(plan.bank("users_train"))
    run(steps(plan), makers)
    assert makers.take() == ["training.listening.train", "training.export", "training.evaluate"]
    makers.touch(plan.bank("users_test"))
    run(steps(plan), makers)
    assert makers.take() == ["training.evaluate"]
    plan.codes.unlink()
    run(steps(plan), makers)
    assert makers.take() == ["training.codec.encode", "training.speaking.train", *EVERYTHING[-2:]]


def test_again_does_what_is_done_from_its_beginning(plan: Plan, makers: Makers) -> None:
    run(steps(plan), makers)
    makers.touch(plan.out / "speaking" / "trainer.safetensors")
    makers.take()
    run(steps(plan), makers, again=["speaking"])
    assert makers.take() == ["training.speaking.train", "training.export", "training.evaluate"]


def test_an_interrupted_training_goes_on_unless_its_inputs_are_newer(plan: Plan, makers: Makers) -> None:
    makers.ends_with = {"training.speaking.train": 130}
    with pytest.raises(SystemExit, match=r"^speaking: training\.speaking\.train ended with status 130; it can be"):
        run(steps(plan), makers)
    assert makers.take()[-1] == "training.speaking.train"
    makers.touch(plan.out / "speaking" / "trainer.safetensors")
    makers.touch(plan.part("speaking"))  # written every minute: it is not done for that
    makers.ends_with = {}
    run(steps(plan), makers)
    assert makers.take() == ["training.speaking.train on", "training.export", "training.evaluate"]
    makers.touch(plan.codes)
    run(steps(plan), makers)
    assert makers.take() == EVERYTHING[-3:]


def test_every_training_says_where_it_goes_on_from(plan: Plan) -> None:
    found = {step.name: step.state for step in steps(plan) if step.state is not None}
    assert {name: str(file.relative_to(plan.out / name)) for name, file in found.items()} == {
        "codec": "state/codec/trainer.safetensors",
        "listening": "trainer.safetensors",
        "speaking": "trainer.safetensors",
    }


def test_an_old_checkpoint_is_replaced(plan: Plan, makers: Makers) -> None:
    run(steps(plan), makers)
    (plan.checkpoint / "old").touch()
    run(steps(plan)[5:6], makers, again=["export"])
    assert not (plan.checkpoint / "old").exists()


def test_a_card_written_by_hand_stays(plan: Plan, makers: Makers) -> None:
    run(steps(plan), makers)
    (plan.checkpoint / "README.md").write_text("By hand.")
    run(steps(plan)[5:6], makers, again=["export"])
    assert (plan.checkpoint / "README.md").read_text() == "By hand."


def test_what_nobody_heard_is_not_the_whole_evaluation(plan: Plan, makers: Makers) -> None:
    silent = replace(plan, judge=("--no-judge",))
    run(steps(silent), Makers(silent))
    run(steps(plan), makers)
    assert makers.take() == ["training.evaluate"]


def test_a_step_whose_inputs_are_not_there_is_refused(plan: Plan, makers: Makers) -> None:
    with pytest.raises(SystemExit, match=re.escape(f"speaking: there is no {plan.codes}")):
        run([step for step in steps(plan) if step.name == "speaking"], makers)
    assert makers.ran == []


def test_a_step_that_leaves_nothing_is_not_done(plan: Plan) -> None:
    with pytest.raises(SystemExit, match=r"^banks: it ended well and left no .*assistant\.json"):
        run(steps(plan)[:1], lambda command: 0)


@pytest.mark.parametrize("words", [["codecs"], ["--again", "codecs"]])
def test_there_is_no_such_step(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make.main(words)
    assert "there is no step 'codecs'; the steps are banks, codec, encode," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["banks", "--again", "codec"], "--again codec: only banks is to be done"),
        (["--smoke", "--data", "here"], "--smoke makes data of its own; --data is not read"),
    ],
)
def test_nothing_asked_for_is_left_out_silently(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make.main(words)
    assert told in capsys.readouterr().err


def test_what_may_be_to_do_begins_with_the_first_that_is(plan: Plan, makers: Makers) -> None:
    assert to_do(steps(plan)) == list(NAMES)
    run(steps(plan), makers)
    assert to_do(steps(plan)) == []
    assert to_do(steps(plan), again=["encode"]) == list(NAMES[2:])
    makers.touch(plan.part("speaking"))
    assert to_do(steps(plan)) == ["export", "evaluation"]


def test_no_training_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make.mx, "default_device", lambda: make.mx.Device(make.mx.cpu))
    with pytest.raises(SystemExit, match="there is no GPU"):
        make.main(["codec", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"export: there is no .*codec\.safetensors, no .*listening\.s"):
        make.main(["export", "--out", str(tmp_path)])


def test_no_banks_without_voices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^the voices lack flite, espeak-ng.*: apt-get install flite espeak-ng"):
        make.main(["banks", "--out", str(tmp_path)])


def test_the_defaults_are_those_of_the_readme() -> None:
    readme = (TRAINING / "README.md").read_text(encoding="utf-8")
    said = dict(re.findall(r"training\.(\w+)\.train .*--seconds (\d+)", readme))
    assert {name: float(seconds) for name, seconds in said.items()} == make.TRAININGS


def hummed(sentence: Sentence) -> Pcm:
    """A tone for a voice: as long as the text is, at a pitch of its own."""
    samples = 3000 + 400 * len(sentence.text)
    pitch = 100 + zlib.crc32(repr(sentence).encode()) % 200
    return np.round(8000 * np.sin(2 * np.pi * pitch / 16000 * np.arange(samples))).astype(np.int16)


def test_the_few_sentences_are_of_every_synthesiser_and_some_held_out(tmp_path: Path) -> None:
    few.make(tmp_path, hummed, hummed)
    banks = {name: json.loads((tmp_path / f"{name}.json").read_text())["items"] for name in synthesize.BANKS}
    assert [item["voice"].split(":")[0] for item in banks["users_test"]] == [
        "flite", "espeak", "espeak", "piper", "kokoro",
    ]  # fmt: skip
    voices = [item["voice"].split(":")[0] for item in banks["users_train"]]
    assert {voice: voices.count(voice) for voice in voices} == {"flite": 2, "espeak": 2, "heart": 2, "kokoro": 2}
    assert [item["split"] for item in banks["assistant"]] == ["train"] * 12 + ["held"] * 3


@pytest.mark.slow
def test_all_of_it_in_small_makes_a_checkpoint_that_loads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A minute on two cores. Only voices and recogniser are missing: the banks are hummed before."""
    few.make(tmp_path / "smoke" / "data", hummed, hummed)
    make.main(["--smoke", "--no-judge", "--out", str(tmp_path)])
    said = capfd.readouterr().out
    assert "banks: done already" in said
    assert "| transcript, word error, " in said
    checkpoint = tmp_path / "smoke" / "voicechat-small"
    assert inspect(checkpoint).passed
    assert load(checkpoint).generate(np.zeros(2560, np.float32)).frames == 2
    figures = json.loads((tmp_path / "smoke" / "unheard.json").read_text())
    assert figures["checkpoint"] == str(checkpoint)
    assert figures["listening"]["all"]["questions"] == 3
    make.main(["--smoke", "--no-judge", "--out", str(tmp_path)])
    assert [line for line in capfd.readouterr().out.splitlines() if line.endswith("done already")] == [
        f"{name}: done already" for name in NAMES
    ]
