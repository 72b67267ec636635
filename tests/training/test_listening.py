"""The whole of it in small: a bank of noise, four steps, an evaluation, a part that loads, a run that goes on."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from training import bank
from training.initial import initialise
from training.listening import evaluate, free_run, train
from training.listening.augment import _echoed, hide_parts, in_a_room
from training.listening.evaluate import read_part
from training.listening.losses import losses
from training.listening.network import Dropout
from training.listening.timeline import PAD
from training.recogniser import edits
from training.small import small_config
from voicechat_core.frame import fused
from voicechat_core.model import Networks, SttModel
from voicechat_core.nn.rnnt import greedy_decode
from voicechat_core.weights import named_parameters

TRAINED = ("hello", "who are you", "what is two plus three", "repeat after me apple", "roll a dice", "good morning")


def noise_bank(folder: Path) -> None:
    """Noise that is called questions, and a list of answers' lengths."""
    rng = np.random.default_rng(0)

    def spoken(texts: tuple[str, ...]) -> list[tuple[dict[str, object], bank.Pcm]]:
        sounds = [rng.integers(-8000, 8000, 16000 + 1000 * i).astype(np.int16) for i in range(len(texts))]
        items = [{"text": text, "voice": f"v{i % 2}", "split": "train"} for i, text in enumerate(texts)]
        return list(zip(items, sounds, strict=True))

    bank.write_flac(folder, "users_train", 16000, spoken(TRAINED), 10**9)
    bank.write_flac(folder, "users_test", 16000, spoken(("hello", "roll a dice", "who are you")), 10**9)
    answers = [("Hello! How can I help you?", 30000), ("Apple.", 14000), ("You rolled a six.", 26000)]
    items = [{"text": text, "samples": samples, "file": 0, "offset": 0} for text, samples in answers]
    (folder / "assistant.json").write_text(json.dumps({"rate": 22050, "files": [], "items": items}), encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a smoke run leaves."""
    folder = tmp_path_factory.mktemp("listening")
    noise_bank(folder)
    train.main(["--data", str(folder), "--out", str(folder / "out"), "--smoke"])
    return folder


def test_a_run_leaves_its_figures_its_log_and_a_part(trained: Path) -> None:
    figures = json.loads((trained / "out" / "listening.json").read_text())
    assert figures["all"]["questions"] == 3
    assert figures["all"]["tools"] == 1
    assert figures["interruptions"]["tried"] == 2
    assert set(figures["silence"]["false_starts"]) == set(evaluate.QUIET)
    lines = [json.loads(line) for line in (trained / "out" / "log.jsonl").read_text().splitlines()]
    assert lines[0]["questions"] == 6
    assert "word_error" in lines[-1]


def test_the_part_has_every_tensor_of_the_checkpoint_and_loads_as_it_was(trained: Path) -> None:
    part = trained / "out" / "listening.safetensors"
    stt, fresh = read_part(part), Networks(small_config())
    initialise(fresh, 0)
    names = {f"stt_model.{name}" for name, _ in named_parameters(stt)}
    stored = mx.load(str(part))
    assert set(stored) == names
    assert stored["stt_model.llm.layers.0.mixer.conv1d.weight"].shape == (384, 1, 4)
    assert stored["stt_model.perception.encoder.pre_encode.conv.0.weight"].shape == (32, 1, 3, 3)
    before = dict(named_parameters(fresh.stt_model))
    moved = [mx.abs(value - before[name]).max().item() for name, value in named_parameters(stt)]
    assert min(moved) >= 0
    assert sum(m > 0 for m in moved) > 0.9 * len(moved)


def test_a_run_goes_on_where_it_was(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = json.loads((trained / "out" / "listening.json").read_text())
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: figures)
    out = trained / "out"
    steps = train.Trainer(SttModel(small_config()), lambda m: {}, compile=False)
    steps.resume(out)
    assert steps.steps == 4
    train.main(["--data", str(trained), "--out", str(out), "--smoke", "--resume"])
    steps.resume(out)
    assert steps.steps == 4  # its budget was used up


@pytest.fixture(scope="module")
def stt() -> SttModel:
    networks = Networks(small_config())
    initialise(networks, 3)
    return networks.stt_model


def batch_of(rng: np.random.Generator, frames: int) -> dict[str, mx.array]:
    """Two windows of random ids, one behind a prompt of five positions."""
    ids = {name: mx.array(rng.integers(0, 640, (2, frames)), mx.int32) for name in ("text", "function")}
    weights = {f"{name}_weight": mx.ones((2, frames)) for name in ids}
    prompt = np.full((2, 8), PAD)
    prompt[0, 3:] = [1, 400, 401, 402, 2]
    return {
        **ids, **weights, "prompt": mx.array(prompt, mx.int32), "prompt_length": mx.array([5, 0]),
        "labels": mx.array(rng.integers(0, 128, (2, 6)), mx.int32), "lengths": mx.array([6, 2]),
    }  # fmt: skip


def test_what_is_trained_is_what_is_served(stt: SttModel) -> None:
    """Teacher-forced hidden states of training equal those of ``duplex``'s order, position by position."""
    from training.listening.losses import window_hidden

    config, frames = small_config(), 7
    batch = batch_of(np.random.default_rng(0), frames)
    audio = mx.random.normal((2, frames, 128), key=mx.random.key(0))
    found = window_hidden(stt, config, audio, batch, Dropout())
    for row, prompt in enumerate(([1, 400, 401, 402, 2], [])):
        state, pad = stt.llm.new_state(1), mx.array([[PAD]])
        for token in prompt:
            _, state = served(stt, stt.embed_tokens(mx.array([[token]])), pad, pad, state)
        text = function = pad
        for t in range(frames):
            hidden, state = served(stt, audio[row : row + 1, t : t + 1], text, function, state)
            assert mx.abs(hidden[0, 0] - found[row, t]).max().item() < 2e-5
            text, function = (batch[name][row : row + 1, t : t + 1] for name in ("text", "function"))


def served(
    stt: SttModel, audio: mx.array, text: mx.array, function: mx.array, state: object
) -> tuple[mx.array, object]:
    """The product's own fused input and the trunk's step."""
    inputs = fused(stt.embed_tokens, small_config().function_channel_weight, audio, text, function)
    hidden, state = stt.llm.step(inputs, state)
    return hidden, state


def test_the_loss_counts_each_part(stt: SttModel) -> None:
    config, rng = small_config(), np.random.default_rng(1)
    batch = batch_of(rng, 9)
    mel = mx.array(rng.standard_normal((2, 65, 128)), mx.float32)
    terms = losses(stt, config, mel, batch, Dropout())
    # Untrained, each of 640 ids is about as likely.
    assert abs(terms["text"].item() - np.log(640)) < 1.0
    only = dict(batch, text_weight=mx.zeros((2, 9)).at[1, 4].add(2.0))
    logits_loss = losses(stt, config, mel, only, Dropout())["text"].item()
    ids = dict(only, text=batch["text"].at[0, 8].add(1))  # the last frame's id is nobody's past, and weighs nothing
    assert losses(stt, config, mel, ids, Dropout())["text"].item() == pytest.approx(logits_loss, abs=1e-6)
    seen = dict(only, text=mx.where(mx.arange(9) == 4, (batch["text"] + 1) % 640, batch["text"]))
    assert abs(losses(stt, config, mel, seen, Dropout())["text"].item() - logits_loss) > 1e-3


def test_many_transcripts_at_once_are_those_of_one(stt: SttModel) -> None:
    bias, weight = stt.rnnt_joint.joint_net[2].bias, stt.rnnt_joint.pred.weight
    encoded = 3.0 * mx.random.normal((3, 12, 112), key=mx.random.key(2))
    stt.rnnt_joint.joint_net[2].bias, stt.rnnt_joint.pred.weight = bias.at[-1].add(1.2), 30.0 * weight
    try:
        found = free_run.transcribe(stt, encoded, 3)
        alone = [greedy_decode(stt.rnnt_decoder, stt.rnnt_joint, encoded[i : i + 1], 3)[0] for i in range(3)]
    finally:
        stt.rnnt_joint.joint_net[2].bias, stt.rnnt_joint.pred.weight = bias, weight
    assert found == alone
    assert len(found[0]) > 3
    assert len({tuple(labels) for labels in found}) == 3


def test_perception_of_many_recordings_is_the_served_one(stt: SttModel) -> None:
    sounds = 0.1 * np.random.default_rng(3).standard_normal((2, 1280 * 20)).astype(np.float32)
    encoded, heard = free_run.hear(stt, sounds)
    expected = stt.perception(mx.array(sounds))
    assert mx.abs(encoded - expected.encoded).max().item() < 5e-5
    assert mx.abs(heard - expected.projected).max().item() < 5e-5


def test_a_tools_response_is_written_once_behind_its_call() -> None:
    server = free_run._Server([[7, 8], [9]])
    chosen = [[20, 12], [30, 21], [21, 12], [12, 12], [12, 20], [22, 21], [20, 12], [21, 12], [5, 5]]
    written = [server.forced(np.array(frame)).tolist() for frame in chosen]
    assert [row[0] for row in written] == [20, 30, 21, 7, 8, 22, 20, 21, 5]
    # An end without a beginning is no call. The second recording's tool takes a frame.
    assert [row[1] for row in written] == [12, 21, 12, 12, 20, 21, 12, 9, 5]
    nobody = free_run._Server([[]] * 4)
    assert [nobody.forced(np.full(4, token))[3] for token in (20, 21, 7)] == [20, 21, 7]


def test_a_room_changes_level_and_adds_noise() -> None:
    mx.random.seed(0)
    quiet = in_a_room(mx.zeros((64, 3, 1280)))
    level = np.sqrt(np.square(np.array(quiet)).mean(axis=1))
    assert quiet.shape == (64, 3840)
    assert 0.02 < (level == 0).mean() < 0.3
    assert 1e-5 < np.median(level) < 2e-2
    tone = mx.sin(0.2 * mx.arange(3 * 1280)).reshape(1, 3, 1280)
    loud = np.sqrt(np.square(np.array(in_a_room(mx.repeat(tone, 64, axis=0)))).mean(axis=1)) * np.sqrt(2)
    assert 0.1 < loud.min() < 0.35
    assert 1.2 < loud.max() < 3.0


def test_bands_and_moments_are_hidden() -> None:
    mx.random.seed(1)
    mel = mx.random.normal((8, 1193, 128))
    changed = np.array(hide_parts(mel) != mel)
    bands, moments = changed.all(axis=1), changed.all(axis=2)
    assert (changed == bands[:, None] | moments[:, :, None]).all()
    assert 4 < bands.sum(axis=1).mean() <= 28
    assert 6 < moments.sum(axis=1).mean() <= 42


def test_an_echo_is_later_and_weaker() -> None:
    mx.random.seed(2)
    click = mx.zeros((64, 4000)).at[:, 1000].add(1.0)
    heard = np.array(_echoed(click))
    assert (heard[:, :1000] == 0).all()
    assert (heard[:, 1000] == 1).all()
    echoes = (heard[:, 1001:] != 0).sum(axis=1)
    assert 0.2 < (echoes > 0).mean() < 0.6
    assert echoes.max() <= 2
    assert 0 < heard[:, 1001:].max() < 0.8
    assert np.flatnonzero(heard.any(axis=0)).max() <= 1900
    first = np.array(_echoed(mx.zeros((64, 2000)).at[:, 0].add(1.0)))
    assert (first[:, 1:30] == 0).all()
    assert ((first[:, 1:] != 0).sum(axis=1) <= 2).all()


@pytest.mark.parametrize(
    ("heard", "said", "count"), [("a b c", "a b c", 0), ("a c", "a b c", 1), ("x b c d", "a b c", 2), ("", "a b", 2)]
)
def test_edits(heard: str, said: str, count: int) -> None:
    assert edits(heard.split(), said.split()) == count
