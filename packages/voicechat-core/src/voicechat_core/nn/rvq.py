"""Residual vector quantization: each codebook names the centre nearest to what the ones before it left."""

import mlx.core as mx
import mlx.nn as nn

__all__ = ["ResidualVQ"]


class ResidualVQ(nn.Module):
    """``mus_list``: one codebook ``[V, L]`` a quantizer. The variances trained beside them play no part here."""

    def __init__(self, num_quantizers: int, codebook_size: int, latent_dim: int) -> None:
        super().__init__()
        self.mus_list = [mx.zeros((codebook_size, latent_dim)) for _ in range(num_quantizers)]
        self._first = mx.array([level * codebook_size for level in range(num_quantizers)], mx.int32)
        self._stack, self._views = mx.zeros((0, codebook_size, latent_dim)), tuple[mx.array, ...]()

    def share(self, stack: mx.array) -> None:
        """Take all codebooks ``[Q, V, L]`` from one array, which is not copied: they become views of it."""
        self.mus_list = list(stack)
        mx.eval(stack, self.mus_list)  # what is pending belongs to this thread
        self._stack, self._views = stack, tuple(self.mus_list)

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
        """Codes ``[B, T, Q]`` to latents ``[B, T, L]`` float32: the sum of their centres."""
        rows = self._table().flatten(0, 1)[codes + self._first]
        return rows.astype(mx.float32).sum(axis=2)

    def _table(self) -> mx.array:
        """All codebooks as one array ``[Q, V, L]``, laid out anew where a codebook was replaced."""
        pairs = zip(self.mus_list, self._views, strict=False)
        if len(self.mus_list) != len(self._views) or any(book is not view for book, view in pairs):
            self.share(mx.stack(self.mus_list))
        return self._stack


def squared_distances(x: mx.array, centres: mx.array) -> mx.array:
    """``[..., L]`` against ``[V, L]``: ``[..., V]``."""
    return mx.square(x).sum(-1, keepdims=True) + mx.square(centres).sum(-1) - 2 * (x @ centres.T)
