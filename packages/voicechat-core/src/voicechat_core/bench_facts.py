"""What a bench finds out once: on what it runs, and what happens before a session's first frame."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version

import mlx.core as mx
import numpy as np

from voicechat_core import blas
from voicechat_core.machine import Machine
from voicechat_core.model import VoiceChatModel
from voicechat_core.nn.linear import matrices
from voicechat_core.voicechat import WARM_PROMPT_TOKENS, VoiceChat

__all__ = ["Build", "Starts"]

PROMPT_TOKENS = 170  # a page of instructions: the length that the peer was measured with
SOME = 5  # how often what is short is timed: its median counts


@dataclass(frozen=True)
class Build:
    """The model and what runs it. ``quantization`` is empty where every matrix is dense, ``blas`` on a GPU."""

    machine: Machine
    device: str
    device_name: str
    mlx_version: str
    blas: str
    precision: str
    quantization: str
    compiled: bool
    fingerprint: str
    date: str

    @classmethod
    def of(cls, model: VoiceChatModel) -> "Build":
        """Of a loaded model, here and today."""
        found = {str(matrix.quantization) for matrix in matrices(model.networks).values() if matrix.quantization}
        device = mx.default_device()
        return cls(
            machine=Machine.here(),
            device=str(device),
            device_name=str(mx.device_info(device).get("device_name", "")),
            mlx_version=version("mlx"),
            blas=_blas() if device == mx.cpu else "",
            precision=str(model.networks.stt_model.lm_head.dtype).rpartition(".")[2],
            quantization="; ".join(sorted(found)),
            compiled=model.compiled,
            fingerprint=model.fingerprint,
            date=datetime.now(UTC).date().isoformat(),
        )


@dataclass(frozen=True)
class Starts:
    """What is done before the first frame, in milliseconds.

    ``compile_ms``: three first frames, and compiling the steps of every length; ``prompt_states_ms``: what sessions
    share. Both once in a process, by ``VoiceChat.warm_up``.
    ``session_start_ms``: a session with the checkpoint's own prompt, after that; ``prompt_prefill_ms``: one with a
    prompt of ``prompt_tokens`` that is new; medians. ``session_bytes``: the state of the former.
    """

    prompt_states_ms: float
    compile_ms: float
    session_start_ms: float
    prompt_prefill_ms: float
    prompt_tokens: int
    session_bytes: int

    @classmethod
    def of(cls, voicechat: VoiceChat, tts_context_frames: int | None = None) -> "Starts":
        """Measure them; the first two only where nobody has warmed up before, for such sessions."""
        compile_ms = _milliseconds(partial(voicechat.compile_ahead, tts_context_frames))
        states_ms = _milliseconds(lambda: voicechat.prompts.warm_up(WARM_PROMPT_TOKENS))
        start_ms = statistics.median(_milliseconds(voicechat.session) for _ in range(SOME))
        rng, vocabulary = np.random.default_rng(0), voicechat.model.config.text_config.vocab_size
        prompts = [rng.integers(0, vocabulary, PROMPT_TOKENS).tolist() for _ in range(SOME)]
        prefill = statistics.median(_milliseconds(partial(voicechat.prompts.opening, prompt)) for prompt in prompts)
        return cls(states_ms, compile_ms, start_ms, prefill, PROMPT_TOKENS, voicechat.session().nbytes)


def _blas() -> str:
    """File and threads of what multiplies on a CPU."""
    library, threads = blas.library(), blas.threads()
    return f"{library.name if library else 'an unknown BLAS'}, {threads} thread{'s' if threads > 1 else ''}"


def _milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - start)
