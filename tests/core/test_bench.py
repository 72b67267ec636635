"""The bench: which frames it compares, what it counts; times themselves are never judged."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from voicechat_core import ContextLimitError, InputError, VoiceChat
from voicechat_core.bench import bench, bench_json, bench_text, context_effect

RUN = "from voicechat_core.cli import main; main()"


def test_two_stretches_and_what_is_held(tiny: VoiceChat) -> None:
    found = bench(tiny, frames=12, tts_context_frames=3)
    assert [t.frame_index for t in found.timings] == list(range(12))
    assert (found.first.first_frame, found.first.frames) == (2, 5)
    assert (found.last.first_frame, found.last.frames) == (7, 5)
    first, last = ([t.total_ms for t in found.timings[a : a + 5]] for a in (2, 7))
    assert (found.first.p50_ms, found.last.p50_ms) == (np.median(first), np.median(last))
    assert found.cost_ratio == pytest.approx(np.mean(last) / np.mean(first))
    session = tiny.session(tts_context_frames=3)
    for _ in session.push(np.zeros(12 * 1280, np.float32)):
        pass
    assert found.last.state_bytes == session.nbytes  # shapes alone: what is heard does not count
    assert found.peak_bytes >= found.last.active_bytes > session.nbytes


def test_each_stretch_has_its_own_memory(tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of eight slots double between the two: what is held after frame 6 is less than after frame 11."""
    monkeypatch.setattr("voicechat_core.nn.kv_cache.BLOCK", 8)
    voicechat = VoiceChat(tiny.model)
    found, held = bench(voicechat, frames=30), list[int]()
    for frames in (16, 30):
        session = voicechat.session()
        for _ in session.push(np.zeros(frames * 1280, np.float32)):
            pass
        held.append(session.nbytes)
    assert [found.first.state_bytes, found.last.state_bytes] == held
    assert held[0] < held[1]


def test_a_bench_beyond_the_models_positions(tiny: VoiceChat) -> None:
    with pytest.raises(ContextLimitError, match="300000 positions"):
        bench(tiny, frames=300_000)


def test_a_bounded_state_does_not_grow(tiny: VoiceChat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond voice prompt and bound the speech decoder's state stays as it is: 37 + 20 positions of 7 layers.

    With the least buffers of 8 slots a state that grew would have doubled meanwhile, as the unbounded one does.
    """
    monkeypatch.setattr("voicechat_core.nn.kv_cache.BLOCK", 8)
    voicechat = VoiceChat(tiny.model)

    def speech_bytes(frames: int, context: int | None) -> int:
        session = voicechat.session(tts_context_frames=context)
        for _ in session.push(np.zeros(frames * 1280, np.float32)):
            pass
        return sum(x.nbytes for path, x in session.snapshot().arrays.items() if "ear_tts" in path)

    layers, rows, heads, width = 7, 2, 4, 16
    slot = layers * rows * heads * width * 2 * 4
    assert speech_bytes(21, 20) == speech_bytes(60, 20) == (37 + 20) * slot
    assert [speech_bytes(frames, None) for frames in (21, 60)] == [64 * slot, 128 * slot]


def test_too_few_frames(tiny: VoiceChat) -> None:
    with pytest.raises(InputError, match="frames is 3; at least 4"):
        bench(tiny, frames=3)
    with pytest.raises(InputError, match="6 frames have no past that 5 frames leave out"):
        context_effect(tiny, 6, 5)


def test_the_effect_of_a_bound(tiny: VoiceChat) -> None:
    """A shorter memory changes more; of 2 frames' memory at least something."""
    short, longer = context_effect(tiny, 40, 2), context_effect(tiny, 40, 30)
    assert (short.frames, longer.frames) == (37, 9)
    assert short.hidden_error > longer.hidden_error > 0
    assert 0 < short.codes_changed <= short.frames_changed <= 1


def test_reports(tiny: VoiceChat) -> None:
    found, effect = bench(tiny, frames=4), context_effect(tiny, 12, 4)
    data = json.loads(json.dumps(bench_json(found, effect)))
    assert data["cost_ratio"] == found.cost_ratio
    assert data["context_effect"]["context_frames"] == 4
    assert data["frames"] == 2
    assert "per_frame" not in data
    text = bench_text(found, effect)
    assert f"cost of the last over the first: {found.cost_ratio:.3f}" in text
    assert f"hidden states {effect.hidden_error:.4f}" in text


def test_the_command(tiny_path: Path) -> None:
    words = ["bench", "-m", str(tiny_path), "--frames", "8", "--tts-context-frames", "2", "--effect", "--json"]
    result = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert (data["tts_context_frames"], data["last"]["first_frame"], data["context_effect"]["frames"]) == (2, 5, 5)
    refused = subprocess.run([sys.executable, "-c", RUN, *words[:5], "--effect"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "voicechat: --effect measures --tts-context-frames: give that too\n"
