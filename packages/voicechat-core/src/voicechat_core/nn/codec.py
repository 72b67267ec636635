"""The speech codec: 22.05 kHz samples <-> latents <-> one code a quantizer every 1,764 samples.

The network is NVIDIA's RVQ-VAE: a short-time spectrum, three stages of causal ConvNeXt blocks, and residual vector
quantization; the decoder mirrors it and ends in an inverse STFT. All of it is float32, whatever comes in: the
depthwise convolutions are audibly worse in less.

Streaming emits 1,764 samples a frame, 8 samples late: ``stream[n] = offline[n - 8]``. The first 8 are lead-in, the
last 8 come out of ``tail``, or as NVIDIA's stream ends, out of ``flush``. ``decode`` runs that same stream in blocks,
so memory does not grow with the activations of a whole clip, and then corrects its two ends, where fewer columns
overlap.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from voicechat_core.config import CodecConfig
from voicechat_core.errors import InputError, ModelError
from voicechat_core.nn.convnext import BlockConv1d, BlockConvTranspose1d, ConvNeXt, ConvStack
from voicechat_core.nn.rvq import ResidualVQ
from voicechat_core.nn.stft import Stft

__all__ = ["CONTROL_CODES", "Codec", "CodecState", "check_codes"]

# Ids right after a codebook's own: speech BOS, EOS and PAD. They are not audio.
CONTROL_CODES = 3
# At the published size a frame takes 26 MB of activations while it is computed (measured): a block stays near 200 MB,
# and the matmuls of the widest stage, 9 columns a frame, have 72 rows.
BLOCK_FRAMES = 8
SILENCE_SECONDS = 10


@dataclass
class CodecState:
    """One tail a ConvNeXt block of the decoder, and the last windowed columns ``[B, 4, n_fft]`` of the iSTFT."""

    tails: list[mx.array]
    columns: mx.array


def build_encoder(config: CodecConfig) -> ConvStack:
    """Spectra to latents: a 1x1 convolution, then per stage its blocks and one strided convolution."""
    widths = [config.base_channels * m for m in config.channel_multipliers]
    layers: list[nn.Module] = [BlockConv1d(config.n_fft + 2, widths[0])]
    for width, following, rate in zip(widths, [*widths[1:], config.latent_dim], config.downsample_rates, strict=True):
        layers += [ConvNeXt(width, config.block_kernel_size) for _ in range(config.blocks_per_stage)]
        layers.append(BlockConv1d(width, following, rate))
    return ConvStack(layers)


def build_decoder(config: CodecConfig) -> ConvStack:
    """Latents to magnitude logits and phases: the encoder's stages in reverse."""
    widths = [config.base_channels * m for m in reversed(config.channel_multipliers)]
    rates = reversed(config.downsample_rates)
    layers: list[nn.Module] = []
    for previous, width, rate in zip([config.latent_dim, *widths], widths, rates, strict=False):
        layers.append(BlockConvTranspose1d(previous, width, rate))
        layers += [ConvNeXt(width, config.block_kernel_size) for _ in range(config.blocks_per_stage)]
    layers.append(BlockConv1d(widths[-1], config.n_fft + 2))
    return ConvStack(layers)


class Codec(nn.Module):
    """Encoder, quantizer and decoder. Shapes: B batch, S samples, T frames, L latent, Q quantizers."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.encoder = build_encoder(config)
        self.decoder = build_decoder(config)
        self.prvq = ResidualVQ(config.num_quantizers, config.codebook_size, config.latent_dim)
        self._config = config
        self._stft = Stft(config.n_fft, config.hop_length)

    @property
    def frame_samples(self) -> int:
        """Samples of one code frame (1764)."""
        return self._config.frame_samples

    # ---- samples to codes

    def encode(self, samples: mx.array, block_frames: int = BLOCK_FRAMES) -> mx.array:
        """Samples ``[B, S]`` to latents ``[B, S / 1764, L]``, a block of frames at a time.

        Raises:
            InputError: if S is not a whole number of frames.
            ModelError: if a latent is not finite.
        """
        if samples.shape[1] % self.frame_samples:
            raise InputError(f"{samples.shape[1]} samples are not a multiple of {self.frame_samples}")
        spectra = self._stft.analyse(samples.astype(mx.float32))
        state, latents = self.encoder.new_state(samples.shape[0]), []
        for block in _blocks(spectra, block_frames * self._config.columns_per_frame):
            block_latents, state = self.encoder.step(block, state)
            mx.eval(block_latents, state)
            latents.append(block_latents)
        if not latents:
            return mx.zeros((samples.shape[0], 0, self._config.latent_dim))
        return _finite(mx.concatenate(latents, axis=1), "codec latents")

    def quantize(self, latents: mx.array) -> mx.array:
        """Latents ``[B, T, L]`` to codes ``[B, T, Q]`` int32."""
        return self.prvq.quantize(latents.astype(mx.float32))

    def silence_codes(self) -> mx.array:
        """The codes ``[Q]`` of silence: the most frequent frame in ten seconds of zeros."""
        frames = -(-SILENCE_SECONDS * self._config.sample_rate // self.frame_samples)
        codes = self.quantize(self.encode(mx.zeros((1, frames * self.frame_samples))))
        rows = Counter(tuple(row) for row in np.asarray(codes[0]).tolist())
        return mx.array(rows.most_common(1)[0][0], mx.int32)

    # ---- codes to samples

    def dequantize(self, codes: mx.array) -> mx.array:
        """Codes ``[B, T, Q]``, each below the codebook size, to latents ``[B, T, L]`` float32."""
        return self.prvq.dequantize(codes)

    def replace_control_codes(self, codes: mx.array | np.ndarray, silence: mx.array) -> mx.array:
        """Each control code of ``[..., Q]`` becomes its own codebook's entry of ``silence [Q]``; the others stay.

        Raises:
            InputError: for an id that is neither, if ``codes`` is NumPy. Codes on the device are not waited for.
        """
        size = self._config.codebook_size
        if isinstance(codes, np.ndarray):
            check_codes(codes, size + CONTROL_CODES - 1)
            codes = mx.array(codes)
        return mx.where(codes >= size, silence, codes).astype(mx.int32)

    def new_state(self, batch: int = 1) -> CodecState:
        """The state of a stream before its first frame."""
        return CodecState(self.decoder.new_state(batch), self._stft.new_kept(batch))

    def step(self, codes: mx.array, state: CodecState) -> tuple[mx.array, CodecState]:
        """Codes ``[B, n, Q]`` to the samples ``[B, n * 1764]`` that are now complete, and the new state.

        ``codes`` are taken as they are: control codes must be replaced before.
        """
        if codes.shape[1] == 0:
            return mx.zeros((codes.shape[0], 0)), state
        channels, tails = self.decoder.step(self.dequantize(codes), state.tails)
        samples, columns = self._stft.stream(self._stft.synthesise(channels), state.columns)
        return samples, CodecState(tails, columns)

    def flush(self, state: CodecState) -> mx.array:
        """The last samples ``[B, 8]`` of a stream that ends here, as if silent columns followed: NVIDIA's flush."""
        return self._stft.flush(state.columns)

    def tail(self, state: CodecState) -> mx.array:
        """The last samples ``[B, 8]`` of a stream that ends here, equal to the end of ``decode``."""
        return self._stft.tail(state.columns)

    def decode(self, codes: mx.array, block_frames: int = BLOCK_FRAMES) -> mx.array:
        """Codes ``[B, T, Q]`` of a whole clip to samples ``[B, T * 1764]``, a block of frames at a time.

        Raises:
            InputError: for a code outside the codebook.
            ModelError: if a sample is not finite.
        """
        check_codes(codes, self._config.codebook_size - 1)
        if codes.shape[1] == 0:
            return mx.zeros((codes.shape[0], 0))
        state, parts = self.new_state(codes.shape[0]), []
        for block in _blocks(codes, block_frames):
            samples, state = self.step(block, state)
            mx.eval(samples, state.tails, state.columns)
            parts.append(samples)
        stream = mx.concatenate([*parts, self.flush(state)], axis=1)
        return _finite(self._stft.whole(stream), "codec samples")


def check_codes(codes: mx.array | np.ndarray, highest: int) -> None:
    """Raise ``InputError`` with the first code outside ``0 .. highest``. Waits for the values."""
    values = np.asarray(codes)
    wrong = values[(values < 0) | (values > highest)]
    if wrong.size:
        raise InputError(f"code {wrong[0]} is outside 0 .. {highest}")


def _blocks(x: mx.array, length: int) -> Iterator[mx.array]:
    for start in range(0, x.shape[1], length):
        yield x[:, start : start + length]


def _finite(x: mx.array, name: str) -> mx.array:
    """``x``, or ``ModelError``: the caller has waited for it anyway."""
    if not mx.isfinite(x).all():
        raise ModelError(f"{name} are not finite")
    return x
