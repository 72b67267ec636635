"""What a library user holds: a loaded checkpoint that answers recordings and holds conversations."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path

import numpy as np

from voicechat_core import live
from voicechat_core.audio import check_samples, read_audio
from voicechat_core.checkpoint import load_model
from voicechat_core.compilation import Compile, wanted
from voicechat_core.hub import locate
from voicechat_core.model import VoiceChatModel
from voicechat_core.offline import GenerationResult, Progress, generate
from voicechat_core.precision import Precision, check_precision
from voicechat_core.profile import Profiler
from voicechat_core.prompt import PromptStates
from voicechat_core.session import Session, open_session
from voicechat_core.snapshot import Snapshot
from voicechat_core.tools import WAIT_FRAMES, ToolFunctions

__all__ = ["VoiceChat", "load"]

WARM_PROMPT_TOKENS = 256  # a page of instructions; the speech decoder takes them one by one, about as fast as frames


class VoiceChat:
    """A loaded checkpoint. ``model`` holds the networks, the configuration and the vocabularies."""

    def __init__(self, model: VoiceChatModel) -> None:
        self.model = model
        self.prompts = PromptStates(model)

    @property
    def first_frame_samples(self) -> int:
        """Samples that a session's first frame reads: 200. Each later one reads ``config.input_frame_samples``, 1,280.

        So frame k has read ``first_frame_samples + 1280 k`` samples, however they were cut.
        """
        return self.model.networks.stt_model.perception.samples_until(1)

    def generate(
        self,
        samples_or_path: np.ndarray | str | PathLike[str],
        *,
        system_prompt: str | None = None,
        seed: int = 0,
        extra_decoding_seconds: float = 0.0,
        max_frames: int | None = None,
        tts_prompt_steps: bool = True,
        tts_context_frames: int | None = None,
        tools: ToolFunctions | None = None,
        progress: Progress | None = None,
    ) -> GenerationResult:
        """Answer a recording: a path, or mono samples at 16 kHz ``[S]`` (float in [-1, 1], or int16).

        The other arguments are those of ``voicechat_core.offline.generate``.

        Raises:
            AudioError: when the recording cannot be read or is not finite.
            InputError: for an argument out of range, ``ContextLimitError`` for a recording that is too long.
        """
        if isinstance(samples_or_path, str | PathLike):
            samples = read_audio(Path(samples_or_path), self.model.config.input_sample_rate)
        else:
            samples = check_samples(samples_or_path)
        return generate(
            self.prompts,
            samples,
            system_prompt=system_prompt,
            seed=seed,
            extra_decoding_seconds=extra_decoding_seconds,
            max_frames=max_frames,
            tts_prompt_steps=tts_prompt_steps,
            tts_context_frames=tts_context_frames,
            tools=tools,
            progress=progress,
        )

    def session(
        self,
        *,
        system_prompt: str | None = None,
        seed: int = 0,
        max_frames: int | None = None,
        wait_for_full_frame: bool = False,
        tts_prompt_steps: bool = True,
        tts_context_frames: int | None = None,
        tools: bool = False,
        tool_wait_frames: int = WAIT_FRAMES,
        profiler: Profiler | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Session:
        """Open a live session: ``push`` samples, take events. Sessions of one model may run side by side.

        Args:
            system_prompt: None for the checkpoint's own, blank for none.
            seed: of the speech decoder's draws. A frame's draws depend on the seed and the frame's index alone.
            max_frames: frames that the session may have; None for as many as the model has positions.
            wait_for_full_frame: run a frame when all of its 1,280 samples are there, not as soon as the last one is
                that the model reads, 67 ms earlier. The events are the same.
            tts_prompt_steps: whether the speech decoder takes its steps over the system prompt, as ``generate`` does.
            tts_context_frames: let the speech decoder look back at the voice prompt and this many positions only
                (frames, and before them its steps over the system prompt), so that a long conversation costs no more
                with time. None for all of them, which is exact.
            tools: whether calls on the function channel are events to be answered by ``Session.respond``. Without it
                the model writes the responses, too: it makes them up.
            tool_wait_frames: how long a call waits for its output; then the model reads an error in its place.
            profiler: told the time of every frame.
            progress: called while a prompt is read for the first time, with its positions done. What it raises ends
                the opening; the steps that were done by then are kept for the next one.

        Raises:
            InputError: for an argument out of range; ``ContextLimitError`` for a prompt that leaves no position.
        """
        return open_session(
            self.prompts,
            system_prompt=system_prompt,
            seed=seed,
            max_frames=max_frames,
            wait_for_full_frame=wait_for_full_frame,
            tts_prompt_steps=tts_prompt_steps,
            tts_context_frames=tts_context_frames,
            tools=tools,
            tool_wait_frames=tool_wait_frames,
            profiler=profiler,
            progress=progress,
        )

    def resume(self, snapshot: Snapshot | str | PathLike[str], *, profiler: Profiler | None = None) -> Session:
        """A session that goes on where a snapshot was taken: the value itself, or the file it was saved in.

        Raises:
            InputError: for a file that cannot be read, or a snapshot of another model or precision.
        """
        taken = snapshot if isinstance(snapshot, Snapshot) else Snapshot.load(snapshot)
        return Session.resumed(self.prompts, taken, profiler=profiler)

    def warm_up(self, prompt_tokens: int = WARM_PROMPT_TOKENS, *, tts_context_frames: int | None = None) -> None:
        """Compute and compile ahead what sessions share, so that no user waits for it.

        Compiled are the steps of a frame, for every length that a session with ``tts_context_frames`` can come to.
        Computed are the state after the checkpoint's own prompt, and the speech decoder's state for prompts of up to
        ``prompt_tokens`` tokens. Without it, the first session that needs them pays.
        """
        self.compile_ahead(tts_context_frames)
        self.prompts.warm_up(prompt_tokens)

    def compile_ahead(self, tts_context_frames: int | None = None) -> None:
        """The first half of ``warm_up``: three frames, and what longer sessions need. Uncompiled, the frames alone."""
        live.warm_up(self.model, self.prompts.opening([], tts_context_frames=tts_context_frames))


def load(checkpoint: str | PathLike[str], *, precision: Precision = "auto", compile: Compile = "auto") -> VoiceChat:
    """Load a checkpoint in the published layout.

    Args:
        checkpoint: its directory; ``voicechat-small``, which comes with this package; or its name on the hub
            (``owner/name``), from where it is downloaded once.
        precision: what the networks compute in: "float32", "bfloat16", or "auto" for what most of the weights that are
            not quantized are stored in. See ``voicechat_core.precision``.
        compile: whether the steps of a frame are compiled: "on", "off", or "auto" for on where that is possible. On a
            CPU it takes the system's g++. See ``voicechat_core.compilation``.

    Raises:
        CheckpointError: naming what is missing, left over or inconsistent, and both values where two disagree.
        HubError: when it is to be downloaded and cannot be.
        InputError: for a precision or a compile that does not exist, an empty name, and "on" where nothing can be
            compiled.
    """
    check_precision(precision)
    compiled = wanted(compile)
    return VoiceChat(load_model(locate(checkpoint), precision, compiled=compiled))
