"""NVIDIA's whole offline run, ours with its draws, and every wrong timeline that must not pass for it."""

from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import GOLDEN_FOLDERS
from voicechat_core import duplex, offline
from voicechat_core import frame as frames
from voicechat_core.checkpoint import load_model
from voicechat_core.model import VoiceChatModel
from voicechat_core.verify import compare, tolerance, verify
from voicechat_core.verify_stages import STAGES

END_TO_END = next(stage for stage in STAGES if stage.key == "e2e")
RUNS = ("e2e_plain", "e2e_prompt")


@cache
def model(folder: Path) -> VoiceChatModel:
    return load_model(folder / "checkpoint")


def misses(folder: Path, run: str) -> set[str]:
    """Names of the tensors of one end-to-end golden that do not match."""
    golden = mx.load(str(folder / "goldens" / f"{run}.safetensors"))
    ours = END_TO_END.run(model(folder), golden)
    checks = [
        compare(run, name, np.array(value), np.array(golden[name]), tolerance("e2e", name))
        for name, value in ours.items()
        if name in golden
    ]
    assert len(checks) >= 14
    return {check.tensor for check in checks if not check.passed}


@pytest.mark.parametrize("folder", GOLDEN_FOLDERS, ids=lambda p: p.name)
def test_every_stage_of_the_folder(folder: Path) -> None:
    report = verify(folder)
    assert [check for check in report.checks if not check.passed] == []
    assert {check.stage for check in report.checks} >= {
        "codec", "e2e_plain", "e2e_prompt", "llm", "perception_exact", "perception_odd", "rnnt", "tts", "tts_q8",
    }  # fmt: skip
    assert len(report.checks) > 100


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("folder", GOLDEN_FOLDERS, ids=lambda p: p.name)
def test_the_runs_exercise_the_rules(folder: Path, run: str) -> None:
    """Were a clip to hold no EOS, no BOS and no constant function channel, the mutations below would prove little."""
    golden = mx.load(str(folder / "goldens" / f"{run}.safetensors"))
    config = model(folder).config
    text = np.array(golden["gen_text_timeline"])[0].tolist()
    assert text[:-1].count(config.eos_token_id) >= 1
    assert text.count(config.bos_token_id) >= 1
    assert len(set(np.array(golden["gen_function_timeline"])[0].tolist())) > 2
    assert golden["rnnt_tokens"].size > 2


# ------------------------------------------------------------------------------------- wrong timelines

Patch = Callable[[pytest.MonkeyPatch, VoiceChatModel], None]


def wrapped(name: str, around: Callable[..., Any]) -> Patch:
    """Replace ``duplex.<name>`` by ``around(original, *arguments)``."""

    def patch(monkeypatch: pytest.MonkeyPatch, model: VoiceChatModel) -> None:
        original = getattr(duplex, name)
        monkeypatch.setattr(duplex, name, lambda *arguments: around(original, *arguments))

    return patch


def fused_otherwise(change: Callable[..., tuple[mx.array, mx.array, mx.array]]) -> Patch:
    """Make the trunk's input of what ``change(model, index of the call, audio, text, function)`` gives."""

    def patch(monkeypatch: pytest.MonkeyPatch, model: VoiceChatModel) -> None:
        original, calls = frames.fused, count()
        changed = lambda embed, weight, *parts: original(embed, weight, *change(model, next(calls), *parts))  # noqa: E731
        monkeypatch.setattr(frames, "fused", changed)

    return patch


def bos_history(model: Any, call: int, audio: Any, text: Any, function: Any) -> Any:
    return audio, mx.full(text.shape, model.config.bos_token_id) if call == 0 else text, function


def unweighted_functions(model: Any, call: int, audio: Any, text: Any, function: Any) -> Any:
    return audio - model.networks.stt_model.embed_tokens(function), text, function


def no_function_feedback(model: Any, call: int, audio: Any, text: Any, function: Any) -> Any:
    return audio, text, mx.full(function.shape, model.config.pad_token_id)


def eos_keeps_the_codes(monkeypatch: pytest.MonkeyPatch, model: VoiceChatModel) -> None:
    monkeypatch.setattr(frames.FrameFunctions, "previous", lambda self, text, codes: codes)


def silence_after_eos(original: Any, model: Any, text: Any, speech: Any, draws: Any) -> Any:
    spoken, finite = original(model, text, speech, draws)
    if text.item() == model.config.eos_token_id:
        spoken.codes = model.silence_codes
    return spoken, finite


def silent_prompt(original: Any, model: Any, speech: Any, noise: Any) -> Any:
    speech.steps += 1
    return speech, mx.array(True)


def silence_at_zero(monkeypatch: pytest.MonkeyPatch, model: VoiceChatModel) -> None:
    monkeypatch.setattr(offline, "_nvidia_codes_at_zero", lambda model: model.silence_codes)


def prompt_cut_off(monkeypatch: pytest.MonkeyPatch, model: VoiceChatModel) -> None:
    """Codes of the prompt span dropped before the codec hears them, as other ports do."""
    original = offline.speech

    def speech(model: VoiceChatModel, codes: mx.array) -> np.ndarray:
        cut = original(model, codes[:, 6:])
        return np.concatenate([np.zeros(codes.shape[1] * 1764 - len(cut), np.float32), cut])

    monkeypatch.setattr("voicechat_core.verify_stages.speech", speech)


MUTATIONS: list[tuple[str, Patch, tuple[str, ...], str]] = [
    ("BOS before position 0", fused_otherwise(bos_history), RUNS, "hidden"),
    ("functions weigh one", fused_otherwise(unweighted_functions), RUNS, "hidden"),
    ("functions are not fed back", fused_otherwise(no_function_feedback), RUNS, "hidden"),
    ("EOS keeps the codes", eos_keeps_the_codes, RUNS, "codes_from_t1"),
    ("EOS silences the next step too", wrapped("_speak", silence_after_eos), RUNS, "codes_from_t1"),
    ("D7: silence codes at time 0", silence_at_zero, ("e2e_plain",), "audio"),
    ("the decoder skips the prompt", wrapped("prompt_step", silent_prompt), ("e2e_prompt",), "codes_from_t1"),
    ("D8: the prompt's codes cut before decoding", prompt_cut_off, ("e2e_prompt",), "audio"),
]


@pytest.mark.parametrize(
    ("patch", "run", "tensor"),
    [pytest.param(patch, run, tensor, id=f"{name}-{run}") for name, patch, runs, tensor in MUTATIONS for run in runs],
)
@pytest.mark.parametrize("folder", GOLDEN_FOLDERS, ids=lambda p: p.name)
def test_wrong_timelines_are_seen(
    folder: Path, run: str, patch: Patch, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, model(folder))
    assert tensor in misses(folder, run)
