"""The bench: which frames it compares, what it counts; times themselves are never judged."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core import ContextLimitError, InputError, VoiceChat, blas, load
from voicechat_core.bench import bench, bench_json, bench_text, context_effect
from voicechat_core.bench_facts import Build, Starts
from voicechat_core.counts import host_waits_per_frame, primitives_per_frame
from voicechat_core.machine import Machine
from voicechat_core.memory import Growth
from voicechat_core.nn import state as states

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
        return states.nbytes(session._live.duplex.speech.ear_tts)

    layers, rows, heads, width = 7, 2, 4, 16
    slot = layers * rows * heads * width * 2 * 4
    assert speech_bytes(21, 20) == speech_bytes(60, 20) == (37 + 20) * slot
    assert [speech_bytes(frames, None) for frames in (21, 60)] == [64 * slot, 128 * slot]


def test_too_few_frames(tiny: VoiceChat) -> None:
    with pytest.raises(InputError, match="frames is 3; at least 4"):
        bench(tiny, frames=3)
    with pytest.raises(InputError, match="frames is 11; at least 12"):
        bench(tiny, frames=11, warmup=10)
    with pytest.raises(InputError, match="warmup is 1; the first 2 frames are cold"):
        bench(tiny, frames=11, warmup=1)
    with pytest.raises(InputError, match="6 frames have no past that 5 frames leave out"):
        context_effect(tiny, 6, 5)


def test_the_effect_of_a_bound(tiny: VoiceChat) -> None:
    """A shorter memory changes more; of 2 frames' memory at least something."""
    short, longer = context_effect(tiny, 40, 2), context_effect(tiny, 40, 30)
    assert (short.frames, longer.frames) == (37, 9)
    assert short.hidden_error > longer.hidden_error > 0
    assert 0 < short.codes_changed <= short.frames_changed <= 1


def test_a_warm_up_counts_nowhere(tiny: VoiceChat) -> None:
    found = bench(tiny, frames=11, warmup=5)
    assert [t.cold for t in found.timings[:6]] == ["first frame", "second frame", "warm-up", "warm-up", "warm-up", None]
    assert (found.first.first_frame, found.first.frames, found.last.first_frame) == (5, 3, 8)
    warm = sorted(t.total_ms for t in found.timings[5:])
    data = bench_json(found)
    assert (data["frames"], data["warmup_frames"]) == (6, 5)
    assert (data["total"]["p50_ms"], data["total"]["max_ms"]) == (warm[2], warm[-1])
    assert [frame["total_ms"] for frame in data["cold_frames"]] == [t.total_ms for t in found.timings[:2]]
    assert data["first_frame_ratio"] == found.timings[0].total_ms / warm[2]
    staged = sorted(t.stages_ms["tts"] for t in found.staged[5:])
    assert (len(found.staged), data["stages_p50_ms"]["tts"]) == (11, staged[2])


def test_a_row_says_what_ran_where(tiny: VoiceChat) -> None:
    data = bench_json(bench(tiny, frames=4, load_ms=12.5))
    assert (data["fingerprint"], data["compiled"]) == (tiny.model.fingerprint, tiny.model.compiled)
    assert (data["precision"], data["quantization"], data["load_ms"]) == ("float32", "", 12.5)
    assert (data["device"], data["mlx_version"]) == (str(mx.default_device()), mx.__version__)
    assert data["machine"] == vars(Machine.here())
    assert list(data["stages_p50_ms"]) == ["perception", "rnnt", "language", "tts", "codec"]
    assert (data["session_bytes"], data["bytes_a_minute"]) == (tiny.session().nbytes, Growth.of(tiny.model).a_minute)
    assert data["primitives_per_frame"] == primitives_per_frame(tiny).total()
    assert (data["host_waits_per_frame"], data["label_waits_in_that_frame"]) == (1, host_waits_per_frame(tiny).labels)


@pytest.mark.parametrize(
    ("library", "threads", "text"),
    [
        (Path("/usr/lib/libopenblas.so.0"), 4, "libopenblas.so.0, 4 threads"),
        (Path("/x/libblas.so.3"), 1, "libblas.so.3, 1 thread"),
        (None, 1, "an unknown BLAS, 1 thread"),
    ],
)
def test_a_row_names_what_multiplies_on_a_cpu(
    tiny: VoiceChat, library: Path | None, threads: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "library", lambda: library)
    monkeypatch.setattr(blas, "threads", lambda: threads)
    on_cpu = mx.default_device() == mx.cpu
    found = bench(tiny, frames=4)
    assert bench_json(found)["blas"] == (text if on_cpu else "")
    assert (f"MLX {mx.__version__} with {text}; checkpoint" in bench_text(found)) is on_cpu


def test_a_packed_build_says_how(mixed: Path) -> None:
    build = Build.of(load(mixed, precision="bfloat16", compile="off").model)
    assert (build.precision, build.compiled) == ("bfloat16", False)
    assert build.quantization == "4 bits in groups of 32; 8 bits in groups of 32"


def test_starts_are_the_medians_of_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves only while something is done, and each time longer."""
    clock, heard = [0.0], list[int]()

    def takes(*seconds: float, gives: object = None) -> Callable[..., object]:
        left = list(seconds)

        def work(*arguments: Any) -> object:
            clock[0] += left.pop(0) if left else 1000
            heard.extend(len(argument) for argument in arguments if isinstance(argument, list))
            return gives

        return work

    monkeypatch.setattr("voicechat_core.bench_facts.time.perf_counter", lambda: clock[0])
    fake: Any = SimpleNamespace(
        prompts=SimpleNamespace(warm_up=takes(3), opening=takes(0.5, 0.1, 0.2, 0.9, 0.4)),
        compile_ahead=lambda context: heard.append(context) or takes(2)(),
        session=takes(0.003, 0.001, 0.002, 0.009, 0.004, gives=SimpleNamespace(nbytes=77)),
        model=SimpleNamespace(config=SimpleNamespace(text_config=SimpleNamespace(vocab_size=9))),
    )
    found = Starts.of(fake, 12)
    times = (found.prompt_states_ms, found.compile_ms, found.session_start_ms, found.prompt_prefill_ms)
    assert times == pytest.approx((3000, 2000, 3, 400))
    assert (heard, found.prompt_tokens, found.session_bytes) == ([12, *[170] * 5], 170, 77)


def test_reports(tiny: VoiceChat) -> None:
    found, effect = bench(tiny, frames=4), context_effect(tiny, 12, 4)
    data = json.loads(json.dumps(bench_json(found, effect)))
    assert data["cost_ratio"] == found.cost_ratio
    assert data["context_effect"]["context_frames"] == 4
    assert data["frames"] == 2
    assert "per_frame" not in data
    text = bench_text(found, effect)
    assert f"checkpoint {tiny.model.fingerprint}: float32, dense, " in text
    assert f"a frame: {found.primitives} primitives, waits of the host: 1, and those" in text
    assert ("compiled" in text, "not compiled" in text) == (True, not tiny.model.compiled)
    assert "load" not in text
    assert "\nload 7 ms, prompt states " in bench_text(replace(found, load_ms=7.2))
    assert f"cost of the last over the first: {found.cost_ratio:.3f}" in text
    assert f"hidden states {effect.hidden_error:.4f}" in text


def test_the_command(tiny_path: Path) -> None:
    words = ["bench", "-m", str(tiny_path), "--frames", "8", "--tts-context-frames", "2", "--effect", "--json"]
    words += ["--warmup", "4", "--compile", "off"]
    result = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert (data["tts_context_frames"], data["last"]["first_frame"], data["context_effect"]["frames"]) == (2, 6, 5)
    assert (data["warmup_frames"], data["frames"], data["compiled"]) == (4, 4, False)
    assert data["load_ms"] > 0
    refused = subprocess.run([sys.executable, "-c", RUN, *words[:5], "--effect"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "voicechat: --effect measures --tts-context-frames: give that too\n"
