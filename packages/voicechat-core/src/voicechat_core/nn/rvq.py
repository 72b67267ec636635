"""Residual vector quantization: each codebook names the centre nearest to what the ones before it left."""

import mlx.core as mx
import mlx.nn as nn

__all__ = ["ResidualVQ"]


class ResidualVQ(nn.Module):
    """``mus_list``: one codebook ``[V, L]`` a quantizer. The variances trained beside them play no part here."""

    def __init__(self, num_quantizers: int, codebook_size: int, latent_dim: int) -> None:
        super().__init__()
        self.mus_list = [mx.zeros((codebook_size, latent_dim)) for _ in range(num_quantizers)]

    def quantize(self, latents: mx.array) -> mx.array:
        """``[B, T, L]`` to codes ``[B, T, Q]`` int32; of equally near centres the lowest."""
        residual, codes = latents, []
        for centres in self.mus_list:
            centres = centres.astype(mx.float32)
            code = mx.argmin(squared_distances(residual, centres), axis=-1)
            residual = residual - centres[code]
            codes.append(code)
        return mx.stack(codes, axis=-1).astype(mx.int32)

    def dequantize(self, codes: mx.array) -> mx.array:
        """Codes ``[B, T, Q]`` to latents ``[B, T, L]``, summed from the first codebook on."""
        latents = self.mus_list[0][codes[:, :, 0]].astype(mx.float32)
        for q, centres in enumerate(self.mus_list[1:], start=1):
            latents = latents + centres[codes[:, :, q]]
        return latents


def squared_distances(x: mx.array, centres: mx.array) -> mx.array:
    """``[..., L]`` against ``[V, L]``: ``[..., V]``."""
    return mx.square(x).sum(-1, keepdims=True) + mx.square(centres).sum(-1) - 2 * (x @ centres.T)
