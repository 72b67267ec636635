"""Attention's heads: out of the width of a projection, and back into it."""

import mlx.core as mx

__all__ = ["merge_heads", "split_heads"]


def split_heads(x: mx.array, heads: int) -> mx.array:
    """``[B, T, heads * D]`` -> ``[B, heads, T, D]``."""
    batch, time, width = x.shape
    return x.reshape(batch, time, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """``[B, H, T, D]`` -> ``[B, T, H * D]``."""
    batch, heads, time, dim = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, time, heads * dim)
