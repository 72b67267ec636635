"""What a session costs: one row of numbers for a checkpoint on a machine, from a live session over quiet noise.

Its beginning is compared with its end, for a conversation must not cost more with time. What is exact (counts, bytes)
stands beside the times. Times are of one run on one machine; nothing here passes or fails.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from voicechat_core.arguments import check_positions
from voicechat_core.bench_facts import Build, Starts
from voicechat_core.counts import HostWaits, host_waits_per_frame, primitives_per_frame
from voicechat_core.errors import InputError
from voicechat_core.events import AudioFrame
from voicechat_core.memory import Growth
from voicechat_core.nn import state as states
from voicechat_core.noise import KeyedNoise
from voicechat_core.offline import Progress
from voicechat_core.profile import FRAME_MS, FrameTiming, Profiler, Summary, profile_json, profile_text
from voicechat_core.voicechat import VoiceChat

__all__ = ["Bench", "ContextEffect", "Stretch", "bench", "bench_json", "bench_text", "check_effect", "context_effect"]

STRETCH_FRAMES = 375  # 30 s
STAGED_FRAMES = 250  # of the second session, which is timed stage by stage
COLD_FRAMES = 2  # the first two, whatever is to be left out
LOUDNESS = 0.05


@dataclass(frozen=True)
class Stretch:
    """Some frames in a row: their median, the session's state and MLX's memory in use after the last of them."""

    first_frame: int
    frames: int
    p50_ms: float
    mean_ms: float
    state_bytes: int
    active_bytes: int


@dataclass(frozen=True)
class Bench:
    """One run.

    ``timings`` are the session's frames, those of the warm-up marked as cold; ``staged`` those of a second session with
    a wait after each stage. ``peak_bytes`` is MLX's, over the first session alone and with the weights. ``load_ms`` is
    the caller's to measure.
    """

    build: Build
    tts_context_frames: int | None
    warmup: int
    load_ms: float | None
    starts: Starts
    timings: list[FrameTiming]
    staged: list[FrameTiming]
    first: Stretch
    last: Stretch
    peak_bytes: int
    bytes_a_minute: int
    host_waits: HostWaits
    primitives: int

    @property
    def cost_ratio(self) -> float:
        """The last stretch's mean frame over the first one's: 1 is flat."""
        return self.last.mean_ms / self.first.mean_ms

    @property
    def first_ratio(self) -> float:
        """The first frame after a session's start over the median of all that are warm."""
        return self.timings[0].total_ms / (Summary.of(self.timings).total.p50_ms or float("nan"))


def bench(
    voicechat: VoiceChat,
    *,
    frames: int,
    warmup: int = COLD_FRAMES,
    tts_context_frames: int | None = None,
    system_prompt: str | None = None,
    load_ms: float | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Run a session of ``frames`` frames of quiet noise; the first ``warmup`` count in no percentile.

    Raises:
        InputError: for a warm-up of less than two frames, which are cold anyway, or fewer than two frames after it:
            the two stretches need one each.
    """
    if warmup < COLD_FRAMES:
        raise InputError(f"warmup is {warmup}; the first {COLD_FRAMES} frames are cold whatever is asked for")
    if frames < warmup + 2:
        raise InputError(f"frames is {frames}; at least {warmup + 2} are needed")
    options: dict[str, Any] = {"system_prompt": system_prompt, "tts_context_frames": tts_context_frames}
    check_positions(voicechat.model, len(voicechat.model.prompt_ids(system_prompt)), frames)
    starts, stretch = Starts.of(voicechat, tts_context_frames), min(STRETCH_FRAMES, (frames - warmup) // 2)
    profiler, held = Profiler(), dict[int, tuple[int, int]]()
    session = voicechat.session(**options, profiler=profiler, max_frames=frames)
    mx.reset_peak_memory()
    rng = np.random.default_rng(0)
    for index in range(frames):
        for _ in session.push(_noise(rng, 1280)):
            pass
        if index in (warmup + stretch - 1, frames - 1):
            held[index] = (session.nbytes, mx.get_active_memory())
        if progress is not None:
            progress(index + 1, frames)
    peak = mx.get_peak_memory()
    del session
    return Bench(
        build=Build.of(voicechat.model),
        tts_context_frames=tts_context_frames,
        warmup=warmup,
        load_ms=load_ms,
        starts=starts,
        timings=_warm_from(warmup, profiler.timings),
        staged=_warm_from(warmup, _staged(voicechat, min(frames, STAGED_FRAMES), options)),
        first=_stretch(profiler, warmup, stretch, held),
        last=_stretch(profiler, frames - stretch, stretch, held),
        peak_bytes=peak,
        bytes_a_minute=Growth.of(voicechat.model).a_minute,
        host_waits=host_waits_per_frame(voicechat),
        primitives=primitives_per_frame(voicechat).total(),
    )


def _staged(voicechat: VoiceChat, frames: int, options: dict[str, Any]) -> list[FrameTiming]:
    """The same session's beginning once more, timed stage by stage: after the first, whose memory it would add to."""
    profiler = Profiler(wait=mx.eval)
    session, rng = voicechat.session(**options, profiler=profiler, max_frames=frames), np.random.default_rng(0)
    for _ in session.push(_noise(rng, frames * 1280)):
        pass
    return profiler.timings


def _warm_from(warmup: int, timings: list[FrameTiming]) -> list[FrameTiming]:
    """The frames before ``warmup`` count as cold."""
    return [replace(t, cold=t.cold or ("warm-up" if t.frame_index < warmup else None)) for t in timings]


def _noise(rng: np.random.Generator, samples: int) -> npt.NDArray[np.float32]:
    return (LOUDNESS * rng.standard_normal(samples)).astype(np.float32)


def _stretch(profiler: Profiler, start: int, count: int, held: dict[int, tuple[int, int]]) -> Stretch:
    times = sorted(t.total_ms for t in profiler.timings[start : start + count])
    state_bytes, active_bytes = held[start + count - 1]
    return Stretch(start, count, times[(count - 1) // 2], sum(times) / count, state_bytes, active_bytes)


# ---- reports


def bench_json(found: Bench, effect: "ContextEffect | None" = None) -> dict[str, Any]:
    """One JSON object, flat but for what belongs together; ``per_frame`` is left out."""
    profile = profile_json(found.timings)
    for name in ("per_frame", "note", "stages_with_waits", "total_with_waits"):
        del profile[name]
    profile["cold_frames"] = profile["cold_frames"][:COLD_FRAMES]
    return {
        **asdict(found.build),
        "load_ms": found.load_ms,
        **asdict(found.starts),
        "bytes_a_minute": found.bytes_a_minute,
        "tts_context_frames": found.tts_context_frames,
        "warmup_frames": found.warmup,
        **profile,
        "first_frame_ratio": found.first_ratio,
        "stages_p50_ms": {stage: of.p50_ms for stage, of in Summary.of(found.staged).stages.items()},
        "first": asdict(found.first),
        "last": asdict(found.last),
        "cost_ratio": found.cost_ratio,
        "peak_bytes": found.peak_bytes,
        "host_waits_per_frame": found.host_waits.frame,
        "label_waits_in_that_frame": found.host_waits.labels,
        "primitives_per_frame": found.primitives,
        "context_effect": None if effect is None else asdict(effect),
    }


def bench_text(found: Bench, effect: "ContextEffect | None" = None) -> str:
    """A table for people."""
    lines = [*_build_lines(found), "", *_start_lines(found), "", profile_text(found.timings), _stage_line(found), ""]
    lines.append(f"{'':<26}{'p50 ms':>9}{'mean ms':>9}{'state MB':>10}{'in use MB':>11}")
    for name, part in (("first", found.first), ("last", found.last)):
        label = f"{name} {part.frames * FRAME_MS / 1000:.1f} s (from {part.first_frame})"
        memory = f"{part.state_bytes / 1e6:>10.2f}{part.active_bytes / 1e6:>11.2f}"
        lines.append(f"{label:<26}{part.p50_ms:>9.2f}{part.mean_ms:>9.2f}{memory}")
    lines.append(f"cost of the last over the first: {found.cost_ratio:.3f}; peak {found.peak_bytes / 1e6:.1f} MB")
    if effect is not None:
        lines.append(
            f"effect over {effect.frames} frames with more past than {effect.context_frames}, on the same inputs: "
            f"hidden states {effect.hidden_error:.4f}, codes changed {effect.codes_changed:.4f}, in "
            f"{effect.frames_changed:.4f} of the frames"
        )
    return "\n".join(lines)


def _build_lines(found: Bench) -> list[str]:
    build, context = found.build, "all" if found.tts_context_frames is None else str(found.tts_context_frames)
    backend = f"MLX {build.mlx_version}{build.blas and f' with {build.blas}'}"
    form = f"{build.precision}, {build.quantization or 'dense'}, {'compiled' if build.compiled else 'not compiled'}"
    return [
        f"{build.machine}; {build.date}",
        f"{build.device} ({build.device_name}), {backend}; checkpoint {build.fingerprint}: {form}",
        f"frames that the speech decoder looks back at: {context}; frames of warm-up: {found.warmup}",
    ]


def _start_lines(found: Bench) -> list[str]:
    starts, load = found.starts, "" if found.load_ms is None else f"load {found.load_ms:.0f} ms, "
    waits, kilobytes = found.host_waits, starts.session_bytes / 1e3
    once = f"{load}prompt states {starts.prompt_states_ms:.0f} ms, compile {starts.compile_ms:.0f} ms"
    start = f"session start {starts.session_start_ms:.2f} ms"
    prefill = f"a new prompt of {starts.prompt_tokens} tokens {starts.prompt_prefill_ms:.2f} ms"
    labels = f"those for transcript labels ({waits.labels} in the one that was counted)"
    return [
        f"{once}; {start}, {prefill}",
        f"a session {kilobytes:.1f} kB at its start, and {found.bytes_a_minute / 1e3:.1f} kB a minute",
        f"a frame: {found.primitives} primitives, waits of the host: {waits.frame}, and {labels}",
    ]


def _stage_line(found: Bench) -> str:
    stages = Summary.of(found.staged).stages
    return "stages, each with a wait, p50 ms: " + ", ".join(f"{s} {of.p50_ms or 0:.2f}" for s, of in stages.items())


# ---- what a bounded history changes


@dataclass(frozen=True)
class ContextEffect:
    """A speech decoder that looks back at ``context_frames`` frames against one that looks back at all.

    Both hear the same frames, so that one change does not cause the next. Over the ``frames`` that have more past than
    that: hidden states' error relative to their size (rms), and the parts of codes and of frames that differ.
    """

    context_frames: int
    frames: int
    hidden_error: float
    codes_changed: float
    frames_changed: float


def check_effect(frames: int, context_frames: int) -> None:
    """Whether there is an effect to be measured, which can be told before anything is loaded.

    Raises:
        InputError: when no frame has more past than ``context_frames``.
    """
    if frames <= context_frames + 1:
        raise InputError(f"{frames} frames have no past that {context_frames} frames leave out")


def context_effect(voicechat: VoiceChat, frames: int, context_frames: int) -> ContextEffect:
    """Measure it over a session of ``frames`` frames of quiet noise without a prompt.

    Raises:
        InputError: when no frame has more past than ``context_frames``.
    """
    check_effect(frames, context_frames)
    model, noise = voicechat.model, KeyedNoise(0, voicechat.model.config.tts_config)
    tts = model.networks.tts_model.tts_model
    exact = voicechat.prompts.speech(0)
    bounded = tts.bounded(exact.ear_tts, model.config.prompt_frames, context_frames)
    whole, previous, rows = exact.ear_tts, exact.codes, list[list[mx.array]]()
    for text in _said(voicechat, frames)[1:]:  # at time 0 the speech decoder does not run
        index = len(rows) + 1
        condition, draws = model.subword_table[mx.array([[text]])], noise.frame(index, index - 1)
        codes, hidden, whole = tts.step(condition, previous, draws, whole)
        other_codes, other_hidden, bounded = tts.step(condition, previous, draws, bounded)
        rows.append([mx.square(other_hidden - hidden).sum(), mx.square(hidden).sum(), (other_codes != codes).sum()])
        mx.eval(rows[-1], codes, [x for state in (whole, bounded) for _, x in states.arrays(state)])
        previous = codes
    table = np.array([[float(np.array(x)) for x in row] for row in rows[context_frames:]])
    error, size, changed = table.sum(axis=0)
    quantizers = model.config.tts_config.num_quantizers
    return ContextEffect(
        context_frames,
        len(table),
        float(np.sqrt(error / size)),
        float(changed / (len(table) * quantizers)),
        float((table[:, 2] > 0).mean()),
    )


def _said(voicechat: VoiceChat, frames: int) -> list[int]:
    """The text ids of a session that hears quiet noise."""
    session, rng = voicechat.session(system_prompt=""), np.random.default_rng(0)
    samples = _noise(rng, frames * 1280)
    return [event.text_token for event in session.push(samples) if isinstance(event, AudioFrame)]
