"""What a library user holds: a loaded checkpoint that answers recordings."""

from os import PathLike
from pathlib import Path

import numpy as np

from voicechat_core.audio import check_samples, read_audio
from voicechat_core.checkpoint import load_model
from voicechat_core.hub import locate
from voicechat_core.model import VoiceChatModel
from voicechat_core.offline import GenerationResult, Progress, generate
from voicechat_core.precision import Precision, check_precision

__all__ = ["VoiceChat", "load"]


class VoiceChat:
    """A loaded checkpoint. ``model`` holds the networks, the configuration and the vocabularies."""

    def __init__(self, model: VoiceChatModel) -> None:
        self.model = model

    def generate(
        self,
        samples_or_path: np.ndarray | str | PathLike[str],
        *,
        system_prompt: str | None = None,
        seed: int = 0,
        extra_decoding_seconds: float = 0.0,
        max_frames: int | None = None,
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
            self.model,
            samples,
            system_prompt=system_prompt,
            seed=seed,
            extra_decoding_seconds=extra_decoding_seconds,
            max_frames=max_frames,
            progress=progress,
        )


def load(checkpoint: str | PathLike[str], *, precision: Precision = "auto") -> VoiceChat:
    """Load a checkpoint in the published layout.

    Args:
        checkpoint: its directory, or its name on the hub (``owner/name``), from where it is downloaded once.
        precision: what the networks compute in: "float32", "bfloat16", or "auto" for what most of the weights that are
            not quantized are stored in. See ``voicechat_core.precision``.

    Raises:
        CheckpointError: naming what is missing, left over or inconsistent, and both values where two disagree.
        HubError: when it is to be downloaded and cannot be.
        InputError: for a precision that does not exist, and an empty name.
    """
    check_precision(precision)
    return VoiceChat(load_model(locate(checkpoint), precision))
