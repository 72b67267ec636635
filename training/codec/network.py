"""The project's codec for whole batches at once: what ``Codec`` computes by steps, in few kernels and with gradients.

The weights are those of ``voicechat_core.nn.codec``; only the way through them is written again, where a step has a
state that training does not need or a gradient that costs many kernels. That both agree is tested.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from training.codec.framing import depthwise, frames, overlap_add
from voicechat_core.config import CodecConfig
from voicechat_core.nn.codec import Codec
from voicechat_core.nn.convnext import ConvNeXt, ConvStack
from voicechat_core.nn.stft import forward_dft, hann, inverse_dft, magnitude

__all__ = ["NO_LIMIT", "CodecNetwork"]

NO_LIMIT = 1e6  # times the window: no column is ever clamped


class CodecNetwork(nn.Module):
    """Encoder and decoder of a ``Codec``. B batch, S samples, T frames, L latent."""

    def __init__(self, codec: Codec, config: CodecConfig) -> None:
        super().__init__()
        self.encoder, self.decoder = codec.encoder, codec.decoder
        self._config = config
        n, hop = config.n_fft, config.hop_length
        self._edge = (n - hop) // 2
        window = hann(n)
        self._window = mx.array(window, mx.float32)
        self._analysis = mx.array(window[:, None] * forward_dft(n), mx.float32)
        self._synthesis = mx.array(inverse_dft(n), mx.float32)

    def encode(self, samples: mx.array) -> mx.array:
        """``[B, S]``, whole frames, to latents ``[B, T, L]``."""
        padded = mx.pad(samples, [(0, 0), (self._edge, self._edge)])
        spectra = frames(padded, self._config.n_fft, self._config.hop_length) @ self._analysis
        return _through(self.encoder, spectra)

    def decode(self, latents: mx.array, limit: mx.array | float = 1.0) -> mx.array:
        """Latents ``[B, T, L]`` to samples ``[B, S]``.

        Args:
            latents: what the decoder is given.
            limit: how many times the window a column may reach. The codec serves with 1; beyond, no gradient passes.
        """
        logits, phase = mx.split(_through(self.decoder, latents), 2, axis=2)
        size, bins = magnitude(logits), logits.shape[2]
        columns = (size * mx.cos(phase)) @ self._synthesis[:bins] + (size * mx.sin(phase)) @ self._synthesis[bins:]
        bound = self._window * limit
        columns = mx.clip(columns, -bound, bound) * self._window
        raw = overlap_add(columns, self._config.hop_length)
        return raw[:, self._edge : -self._edge] / self._envelope(columns.shape[1])

    def _envelope(self, count: int) -> mx.array:
        """The sum of the squared windows that overlap at each sample of ``count`` columns."""
        size, hop = self._config.n_fft, self._config.hop_length
        total = np.zeros((count - 1) * hop + size)
        for j in range(0, size, hop):
            part = total[j : j + count * hop].reshape(-1, hop)
            part += np.square(hann(size))[j : j + hop]
        return mx.array(total[self._edge : -self._edge], mx.float32)


def _through(stack: ConvStack, x: mx.array) -> mx.array:
    for layer in stack.layers:
        x = _block(layer, x) if isinstance(layer, ConvNeXt) else layer(x)
    return x


def _block(layer: ConvNeXt, x: mx.array) -> mx.array:
    y = depthwise(x, layer.dwconv.weight) + layer.dwconv.bias
    return x + layer.pwconv2(nn.gelu(layer.pwconv1(layer.norm(y))))
