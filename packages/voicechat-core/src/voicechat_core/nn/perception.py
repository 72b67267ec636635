"""Perception: microphone samples -> what the transcript branch and the language model hear, every 80 ms."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import AudioConfig
from voicechat_core.nn.conformer import ConformerEncoder, EncoderState
from voicechat_core.nn.linear import Linear
from voicechat_core.nn.mel import LogMel, MelState
from voicechat_core.nn.state import evaluate

__all__ = ["Perception", "PerceptionOutput", "PerceptionState"]

# Frames encoded together from a whole clip (10 s). The widest activation, 4 rows a frame of 65 bins and 256
# channels, is then 34 MB.
BLOCK_FRAMES = 128


@dataclass
class PerceptionOutput:
    """``encoded`` ``[B, T, D]`` for the transcript branch, ``projected`` ``[B, T, H]`` for the language model."""

    encoded: mx.array
    projected: mx.array


@dataclass
class PerceptionState:
    """What perception remembers between frames."""

    mel: MelState
    encoder: EncoderState


class Perception(nn.Module):
    """Log-mel, FastConformer and the projection into the language model's width."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.preprocessor = LogMel(config.preprocessor)
        self.encoder = ConformerEncoder(config.encoder)
        self.proj = Linear(config.encoder.d_model, config.output_dim)
        self._dim = config.encoder.d_model
        self._frame = config.encoder.subsampling_factor * self.preprocessor.hop

    def __call__(self, samples: mx.array, *, nvidia_edges: bool = False) -> PerceptionOutput:
        """A whole clip ``[B, S]``: ``ceil(S / 1280)`` frames, those of a live session that is flushed with zeros.

        With ``nvidia_edges`` the frames of NVIDIA's offline code: often one more, and the last ones made of a mel
        row that it masks and of padding. No samples give no frames.
        """
        if samples.shape[1] == 0:
            return self._output(mx.zeros((samples.shape[0], 0, self._dim)))
        if nvidia_edges:
            mel = self.preprocessor(samples, mask_last=True)
            return self._output(self.encoder(mel, samples.shape[1] // self.preprocessor.hop))
        return self._by_blocks(samples)

    def samples_until(self, frames: int) -> int:
        """Samples that the first ``frames`` frames need: frame k reaches up to sample ``1280 k + 199``."""
        return self._frame * (frames - 1) + self.preprocessor.lookahead if frames else 0

    def new_state(self, batch: int = 1) -> PerceptionState:
        """No sample heard yet."""
        return PerceptionState(self.preprocessor.new_state(batch), self.encoder.new_state(batch))

    def step(self, samples: mx.array, state: PerceptionState) -> tuple[PerceptionOutput, PerceptionState]:
        """The next n frames, of ``1280 (n - 1) + 200`` samples in the first step, of ``1280 n`` in every later one.

        Raises ``InputError`` for any other number of samples.
        """
        mel, mel_state = self.preprocessor.step(samples, state.mel)
        encoded, encoder_state = self.encoder.step(mel, state.encoder)
        return self._output(encoded), PerceptionState(mel_state, encoder_state)

    def _by_blocks(self, samples: mx.array) -> PerceptionOutput:
        frames = -(-samples.shape[1] // self._frame)
        missing = max(0, self.samples_until(frames) - samples.shape[1])
        samples = mx.pad(samples, [(0, 0), (0, missing)])
        state, blocks = self.new_state(samples.shape[0]), []
        for start in range(0, frames, BLOCK_FRAMES):
            end = min(start + BLOCK_FRAMES, frames)
            output, state = self.step(samples[:, self.samples_until(start) : self.samples_until(end)], state)
            blocks.append(output)
            # One graph for an hour of audio would hold all of its activations at once.
            evaluate([output, state])
        return PerceptionOutput(
            mx.concatenate([block.encoded for block in blocks], axis=1),
            mx.concatenate([block.projected for block in blocks], axis=1),
        )

    def _output(self, encoded: mx.array) -> PerceptionOutput:
        return PerceptionOutput(encoded, self.proj(encoded))
