"""The scan of Mamba-2 from an empty state: ``voicechat_core.nn.mamba2.ssm_scan`` with products that do not broadcast.

Letters as there: B batch, n positions, H heads of size P, G groups of R heads, N state size.
"""

import mlx.core as mx

from voicechat_core.nn.mamba2 import _segment_sums

__all__ = ["scan"]


def scan(x: mx.array, delta: mx.array, a: mx.array, b: mx.array, c: mx.array, chunk: int) -> mx.array:
    """Outputs ``[B, n, H, P]`` without the skip term; arguments as of ``ssm_scan``, ``chunk`` positions a product."""
    B, n, H, P = x.shape
    G = b.shape[2]
    x = (delta[..., None] * x).reshape(B, n, G, -1, P).transpose(0, 2, 3, 1, 4)
    decay = (delta * a).reshape(B, n, G, -1).transpose(0, 2, 3, 1)
    b, c = (v.transpose(0, 2, 1, 3) for v in (b, c))
    outputs: list[mx.array] = []
    state: mx.array | None = None  # [B, G, R, P, N] after the chunks so far
    for start in range(0, n, chunk):
        at = slice(start, min(start + chunk, n))
        driven, log_decay, b_in, c_out = x[..., at, :], decay[..., at], b[:, :, at], c[:, :, at]
        between = mx.exp(_segment_sums(log_decay))
        y = ((c_out @ b_in.swapaxes(-1, -2))[:, :, None] * between) @ driven
        since_start = mx.exp(mx.cumsum(log_decay, axis=-1))
        if state is not None:
            y = y + since_start[..., None] * _read(c_out, state)
        if at.stop < n:
            added = _written(between[..., -1, :, None] * driven, b_in)
            state = added if state is None else since_start[..., -1, None, None] * state + added
        outputs.append(y)
    whole = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=3)
    return whole.transpose(0, 3, 1, 2, 4).reshape(B, n, H, P)


def _read(c: mx.array, state: mx.array) -> mx.array:
    """c ``[B, G, q, N]`` and ``[B, G, R, P, N]`` -> ``[B, G, R, q, P]``: all heads of a group in one product."""
    heads = state.shape[2]
    read = c @ state.flatten(2, 3).swapaxes(-1, -2)
    return mx.unflatten(read, -1, (heads, -1)).swapaxes(2, 3)


def _written(driven: mx.array, b: mx.array) -> mx.array:
    """Inputs ``[B, G, R, q, P]`` and b ``[B, G, q, N]`` -> what they add to the state ``[B, G, R, P, N]``."""
    heads = driven.shape[2]
    return mx.unflatten(driven.swapaxes(-1, -2).flatten(2, 3) @ b, 2, (heads, -1))
