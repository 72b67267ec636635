"""What a long conversation costs: a live session over minutes of noise, its first half minute against its last.

Times are ratios within one run on one machine; nothing here passes or fails.
"""

from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from voicechat_core.arguments import check_positions
from voicechat_core.errors import InputError
from voicechat_core.events import AudioFrame
from voicechat_core.nn import state as states
from voicechat_core.noise import KeyedNoise
from voicechat_core.offline import Progress
from voicechat_core.profile import FRAME_MS, FrameTiming, Profiler, profile_json, profile_text
from voicechat_core.voicechat import VoiceChat

__all__ = ["Bench", "ContextEffect", "Stretch", "bench", "bench_json", "bench_text", "context_effect"]

STRETCH_FRAMES = 375  # 30 s
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
    """One run. ``peak_bytes`` is MLX's, over the session alone and with the weights."""

    device: str
    mlx_version: str
    tts_context_frames: int | None
    timings: list[FrameTiming]
    first: Stretch
    last: Stretch
    peak_bytes: int

    @property
    def cost_ratio(self) -> float:
        """The last stretch's mean frame over the first one's: 1 is flat."""
        return self.last.mean_ms / self.first.mean_ms


def bench(
    voicechat: VoiceChat,
    *,
    frames: int,
    tts_context_frames: int | None = None,
    system_prompt: str | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Run a session of ``frames`` frames of quiet noise.

    Raises:
        InputError: for fewer than four frames: two are cold, and the two stretches need one each.
    """
    if frames < 4:
        raise InputError(f"frames is {frames}; at least 4 are needed")
    stretch = min(STRETCH_FRAMES, (frames - 2) // 2)
    profiler = Profiler()
    session = voicechat.session(
        system_prompt=system_prompt, tts_context_frames=tts_context_frames, profiler=profiler, max_frames=frames
    )
    check_positions(voicechat.model, len(session.options.prompt_ids), frames)
    mx.reset_peak_memory()
    rng, held = np.random.default_rng(0), {}
    for index in range(frames):
        for _ in session.push(_noise(rng, 1280)):
            pass
        if index in (2 + stretch - 1, frames - 1):
            held[index] = (session.nbytes, mx.get_active_memory())
        if progress is not None:
            progress(index + 1, frames)
    first, last = _stretch(profiler, 2, stretch, held), _stretch(profiler, frames - stretch, stretch, held)
    device, mlx_version = str(mx.default_device()), version("mlx")
    return Bench(device, mlx_version, tts_context_frames, profiler.timings, first, last, mx.get_peak_memory())


def _noise(rng: np.random.Generator, samples: int) -> npt.NDArray[np.float32]:
    return (LOUDNESS * rng.standard_normal(samples)).astype(np.float32)


def _stretch(profiler: Profiler, start: int, count: int, held: dict[int, tuple[int, int]]) -> Stretch:
    times = sorted(t.total_ms for t in profiler.timings[start : start + count])
    state_bytes, active_bytes = held[start + count - 1]
    return Stretch(start, count, times[(count - 1) // 2], sum(times) / count, state_bytes, active_bytes)


def bench_json(found: Bench, effect: "ContextEffect | None" = None) -> dict[str, Any]:
    """One JSON object; ``per_frame`` is left out."""
    profile = profile_json(found.timings)
    del profile["per_frame"]
    return {
        "device": found.device,
        "mlx_version": found.mlx_version,
        "tts_context_frames": found.tts_context_frames,
        **profile,
        "first": asdict(found.first),
        "last": asdict(found.last),
        "cost_ratio": found.cost_ratio,
        "peak_bytes": found.peak_bytes,
        "context_effect": None if effect is None else asdict(effect),
    }


def bench_text(found: Bench, effect: "ContextEffect | None" = None) -> str:
    """A table for people."""
    context = "all" if found.tts_context_frames is None else str(found.tts_context_frames)
    lines = [f"{found.device}, MLX {found.mlx_version}; frames that the speech decoder looks back at: {context}", ""]
    lines += [profile_text(found.timings), ""]
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


def context_effect(voicechat: VoiceChat, frames: int, context_frames: int) -> ContextEffect:
    """Measure it over a session of ``frames`` frames of quiet noise without a prompt.

    Raises:
        InputError: when no frame has more past than ``context_frames``.
    """
    if frames <= context_frames + 1:
        raise InputError(f"{frames} frames have no past that {context_frames} frames leave out")
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
