"""Mamba-2 mixer: a gated state space layer whose memory is one matrix per head.

Per head, with step size Δ = softplus(dt + dt_bias) and decay a = exp(-exp(A_log) Δ):

    S_t = a_t S_{t-1} + Δ_t x_t ⊗ B_t          y_t = S_t C_t + D x_t

(Dao and Gu, "Transformers are SSMs", 2024). One position uses the recurrence as written; many use the paper's
chunked form, which is the same sum ordered for matrix products. Δ is not clamped: the model has no step size limit.

The state and all arithmetic on it are float32, whatever the activations are.
Letters: B batch, n positions, H heads, P head size, G groups (B and C are shared by R = H / G heads), N state size.
"""

from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import TextConfig
from voicechat_core.nn import cuda
from voicechat_core.nn.derived import Derived
from voicechat_core.nn.layout import Axes, CheckpointLayout
from voicechat_core.nn.linear import Linear
from voicechat_core.nn.norms import rms_norm

__all__ = ["CausalConv1d", "GatedRMSNorm", "Mamba2Mixer", "MambaState", "ssm_scan", "ssm_step", "step_sizes"]

# Positions of one matrix product in the scan. The decays between its positions take H * CHUNK**2 exponentials, so
# work per position grows with it and the number of kernels shrinks. The result is the same for any value.
CHUNK = 64

# Selects the first of two rows: ``[2, 1, 1, 1]``.
IS_DELTA = mx.array([[[[True]]], [[[False]]]])


@dataclass
class MambaState:
    """The convolution's last inputs ``conv [B, K - 1, channels]``, oldest first, and ``ssm [B, H, P, N]`` float32."""

    conv: mx.array
    ssm: mx.array


def step_sizes(dt: mx.array, bias: mx.array) -> mx.array:
    """Δ ``[B, n, H]`` in float32: how far each head moves at each position. Any positive value is allowed."""
    return mx.logaddexp(dt.astype(mx.float32) + bias.astype(mx.float32), 0.0)


def ssm_step(
    x: mx.array, delta: mx.array, decay: mx.array, b: mx.array, c: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """One position of the recurrence; arguments and results as of ``ssm_scan`` with n = 1, ``decay`` like ``delta``.

    All that happens to the state is one expression of arrays that broadcast, so that a compiled step reads it once.
    """
    B, _, H, P = x.shape
    G, N = b.shape[2:]
    delta, decay = (v.reshape(B, G, -1, 1, 1) for v in (delta, decay))
    x, b = x.reshape(B, G, -1, P, 1), b.reshape(B, G, 1, 1, N)
    state = decay * state.reshape(B, G, -1, P, N) + (delta * x) * b
    y = state.reshape(B, G, -1, N) @ c.reshape(B, G, N, 1)
    return y.reshape(B, 1, H, P), state.reshape(B, H, P, N)


def ssm_scan(
    x: mx.array,
    delta: mx.array,
    a: mx.array,
    b: mx.array,
    c: mx.array,
    state: mx.array,
    chunk: int = CHUNK,
) -> tuple[mx.array, mx.array]:
    """Any number of positions, ``chunk`` at a time. All arrays are float32.

    Args:
        x: inputs ``[B, n, H, P]``.
        delta: step sizes ``[B, n, H]``.
        a: decay rates ``[H]``, negative.
        b: input directions ``[B, n, G, N]``.
        c: output directions ``[B, n, G, N]``.
        state: what came before, ``[B, H, P, N]``.
        chunk: positions handled by one matrix product.

    Returns:
        y ``[B, n, H, P]``, without the skip term D x, and the state after the last position.
    """
    B, n, H, P = x.shape
    G, N = b.shape[2:]
    x = x.reshape(B, n, G, -1, P).transpose(0, 2, 3, 1, 4)
    delta = delta.reshape(B, n, G, -1).transpose(0, 2, 3, 1)
    b, c = (v.transpose(0, 2, 1, 3)[:, :, None] for v in (b, c))
    a, state = a.reshape(G, -1, 1), state.reshape(B, G, -1, P, N)
    outputs = []
    for start in range(0, n, chunk):
        at = slice(start, min(start + chunk, n))
        y, state = _chunk(x[..., at, :], delta[..., at], a, b[..., at, :], c[..., at, :], state)
        outputs.append(y)
    y = mx.concatenate(outputs, axis=3).transpose(0, 3, 1, 2, 4)
    return y.reshape(B, n, H, P), state.reshape(B, H, P, N)


def _chunk(
    x: mx.array, delta: mx.array, a: mx.array, b: mx.array, c: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """q positions of all heads: x ``[B, G, R, q, P]``, b and c ``[B, G, 1, q, N]``, state ``[B, G, R, P, N]``."""
    log_decay = delta * a
    between = mx.exp(_segment_sums(log_decay))
    since_start = mx.exp(mx.cumsum(log_decay, axis=-1))[..., None]
    until_end = between[..., -1, :, None]
    driven = delta[..., None] * x
    inside = ((c @ b.swapaxes(-1, -2)) * between) @ driven
    before = since_start * (c @ state.swapaxes(-1, -2))
    kept = since_start[..., -1:, :] * state
    return inside + before, kept + (until_end * driven).swapaxes(-1, -2) @ b


def _segment_sums(values: mx.array) -> mx.array:
    """``[..., q] -> [..., q, q]``: entry (t, s) is the sum of values s+1..t, and -inf for s > t.

    Each entry is summed on its own. A difference of two running sums would lose, after a long fast decay, the
    digits of the slow one that follows; a quotient of their exponentials would underflow.
    """
    q = values.shape[-1]
    row, column = mx.arange(q)[:, None], mx.arange(q)[None, :]
    terms = mx.where(row > column, values[..., :, None], 0.0)
    return mx.where(row >= column, mx.cumsum(terms, axis=-2), -mx.inf)


class CausalConv1d(nn.Module, CheckpointLayout):
    """Depthwise convolution over the present and the ``kernel - 1`` positions before it; zeros before the first.

    The last weight is the present position's.
    """

    CHECKPOINT_AXES: ClassVar[dict[str, Axes]] = {"weight": (0, 2, 1)}

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = mx.zeros((channels, kernel, 1))
        self.bias = mx.zeros((channels,))
        self._taps = Derived(lambda weight: mx.contiguous(weight[..., 0].T).astype(mx.float32))

    def one(self, x: mx.array, past: mx.array) -> tuple[mx.array, mx.array]:
        """``step`` for n = 1, in float32 ``[B, 1, channels]``: a sum of as many terms as the kernel has taps."""
        window, taps = mx.concatenate([past, x], axis=1), self._taps(self.weight)
        y = taps[:1] * window[:, :1].astype(mx.float32)
        for k in range(1, taps.shape[0]):
            y = y + taps[k : k + 1] * window[:, k : k + 1].astype(mx.float32)
        # The slice keeps the whole window alive, which is one position more than it needs.
        return y + self.bias.astype(mx.float32), window[:, 1:]

    def step(self, x: mx.array, past: mx.array) -> tuple[mx.array, mx.array]:
        """x ``[B, n, channels]`` after ``past [B, kernel - 1, channels]`` -> y in the weight's dtype, the next past."""
        channels, kernel, _ = self.weight.shape
        window = mx.concatenate([past, x], axis=1)
        y = mx.conv1d(window.astype(self.weight.dtype), self.weight, groups=channels) + self.bias
        # A slice alone would keep the whole window alive for as long as the state lives.
        tail = mx.contiguous(window[:, window.shape[1] - (kernel - 1) :])
        return y, tail


class GatedRMSNorm(nn.Module):
    """y SiLU(gate), then RMS normalisation of each group of consecutive channels on its own; float32."""

    def __init__(self, dim: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dim,))
        self._groups = groups
        self._eps = eps

    def __call__(self, y: mx.array, gate: mx.array) -> mx.array:
        """y and gate ``[..., dim]`` -> ``[..., dim]`` in the gate's dtype."""
        return self.normal(y.astype(mx.float32) * nn.silu(gate.astype(mx.float32)), gate.dtype)

    def normal(self, gated: mx.array, dtype: mx.Dtype) -> mx.array:
        """What follows the gate: ``[..., dim]`` float32 -> the same shape in ``dtype``."""
        grouped, factors = (mx.unflatten(x, -1, (self._groups, -1)) for x in (gated, self.weight))
        return rms_norm(grouped, factors, self._eps, dtype).reshape(gated.shape)


class Mamba2Mixer(nn.Module):
    """Projection in, causal convolution, state space recurrence, gated norm, projection out."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        heads, dim = config.mamba_num_heads, config.mamba_dim
        self.in_proj = Linear(config.hidden_size, dim + config.conv_dim + heads, bias=config.use_bias)
        self.conv1d = CausalConv1d(config.conv_dim, config.conv_kernel)
        self.A_log = mx.zeros((heads,))
        self.D = mx.ones((heads,))
        self.dt_bias = mx.zeros((heads,))
        self.norm = GatedRMSNorm(dim, config.n_groups, config.layer_norm_epsilon)
        self.out_proj = Linear(dim, config.hidden_size, bias=config.use_bias)
        self.config = config
        self._for_kernel = Derived(
            lambda taps, bias, logarithms, *rest: tuple(
                x.astype(mx.float32) for x in (mx.contiguous(taps[..., 0].T), bias, -mx.exp(logarithms), *rest)
            )
        )
        self._rates = Derived(lambda logarithms: -mx.exp(logarithms.astype(mx.float32)))

    def new_state(self, batch: int = 1) -> MambaState:
        """Nothing heard yet: zeros."""
        c = self.config
        conv = mx.zeros((batch, c.conv_kernel - 1, c.conv_dim), self.in_proj.dtype)
        return MambaState(conv, mx.zeros((batch, c.mamba_num_heads, c.mamba_head_dim, c.ssm_state_size)))

    def step(self, x: mx.array, state: MambaState, residual: mx.array | None = None) -> tuple[mx.array, MambaState]:
        """x ``[B, n, hidden]``, n >= 1, consuming ``state`` -> y like x, ``residual`` added, and the next state."""
        y, state = (self._one if x.shape[1] == 1 else self._many)(self.in_proj(x), state)
        return (self.out_proj(y) if residual is None else self.out_proj.add(y, residual)), state

    def _many(self, projected: mx.array, state: MambaState) -> tuple[mx.array, MambaState]:
        gate, mixed, dt = self._projections(projected)
        mixed, conv = self.conv1d.step(mixed, state.conv)
        inputs, b, c_out = self.split(nn.silu(mixed).astype(mx.float32))
        y, ssm = ssm_scan(inputs, step_sizes(dt, self.dt_bias), self._rates(self.A_log), b, c_out, state.ssm)
        y = y + self.D.astype(mx.float32)[:, None] * inputs
        return self.norm(y.flatten(-2), gate), MambaState(conv, ssm)

    def _one(self, projected: mx.array, state: MambaState) -> tuple[mx.array, MambaState]:
        if cuda.on_cuda():
            return self._one_by_kernels(projected, state)
        gate, mixed, dt = self._projections(projected)
        mixed, conv = self.conv1d.one(mixed, state.conv)
        inputs, b, c_out = self.split(nn.silu(mixed))
        delta = step_sizes(dt, self.dt_bias)
        # Both in one array, so that they are one operation: compiled apart, the first would be computed twice.
        sizes = mx.where(IS_DELTA, delta, mx.exp(delta * self._rates(self.A_log)))
        y, ssm = ssm_step(inputs, sizes[:1], sizes[1:], b, c_out, state.ssm)
        gate = mx.unflatten(gate, -1, inputs.shape[-2:])
        gated = (y + self.D.astype(mx.float32)[:, None] * inputs) * nn.silu(gate.astype(mx.float32))
        return self.norm.normal(gated.flatten(-2), projected.dtype), MambaState(conv, ssm)

    def _one_by_kernels(self, projected: mx.array, state: MambaState) -> tuple[mx.array, MambaState]:
        """``_one`` in two launches instead of eight."""
        weights = self._for_kernel(self.conv1d.weight, self.conv1d.bias, self.A_log, self.dt_bias, self.D)
        gated, conv, ssm = cuda.mamba_step(projected, state.conv, state.ssm, weights, self.config.n_groups)
        return self.norm.normal(gated.flatten(-2), projected.dtype), MambaState(conv, ssm)

    def _projections(self, projected: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Gate, the convolution's input and the step sizes' of one product ``[B, n, ...]``, in this order."""
        c = self.config
        gate, mixed, dt = mx.split(projected, [c.mamba_dim, c.mamba_dim + c.conv_dim], axis=-1)
        return gate, mixed, dt

    def split(self, channels: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The convolution's channels as x ``[B, n, H, P]``, B and C ``[B, n, G, N]``, in this order."""
        c = self.config
        x, b, c_out = mx.split(channels, [c.mamba_dim, c.mamba_dim + c.n_groups * c.ssm_state_size], axis=-1)
        groups = (c.n_groups, c.ssm_state_size)
        return (
            mx.unflatten(x, -1, (c.mamba_num_heads, c.mamba_head_dim)),
            mx.unflatten(b, -1, groups),
            mx.unflatten(c_out, -1, groups),
        )

    def __call__(self, x: mx.array) -> mx.array:
        """A whole sequence ``[B, n, hidden]`` -> the same shape."""
        return self.step(x, self.new_state(x.shape[0]))[0]
