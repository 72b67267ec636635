"""The trunk's norm: float32 inside, whatever comes in, and rounded once to what is asked for."""

import mlx.core as mx

from voicechat_core.nn import cuda

__all__ = ["rms_norm"]


def rms_norm(x: mx.array, factors: mx.array, eps: float, dtype: mx.Dtype) -> mx.array:
    """``x / rms(x) * factors``, ``[..., D]`` -> the same shape in ``dtype``.

    ``factors`` is ``[D]``, or ``[G, D]`` for x ``[..., G, D]``: MLX's own norm knows one row of them.
    """
    if cuda.on_cuda():
        return cuda.rms_norm(x, factors, eps, dtype)
    wide, one_row = x.astype(mx.float32), factors.ndim == 1
    y = mx.fast.rms_norm(wide, factors.astype(mx.float32) if one_row else None, eps)
    return (y if one_row else y * factors.astype(mx.float32)).astype(dtype)
