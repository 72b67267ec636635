"""The head that predicts a frame's latent: a mixture of Gaussians whose means have low rank (NeMo's MoGHead).

Of the mixture only the drawn component is ever computed: its rows are gathered, not all 65,536 outputs.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from voicechat_core.config import TtsConfig
from voicechat_core.nn.gemma import GatedMLP, RMSNorm
from voicechat_core.nn.linear import GatheredLinear, Joined, Linear
from voicechat_core.nn.sampler import choose_component

__all__ = ["MogHead"]


def guide(x: mx.array, scale: float) -> mx.array:
    """Classifier-free guidance: rows ``[2B, ...]`` [conditional; unconditional] -> ``[B, ...]``; off at scale 0."""
    if scale == 0:
        return x
    conditional, unconditional = mx.split(x, 2)
    return conditional + scale * (conditional - unconditional)


class MLPLayer(nn.Module):
    """A residual gated MLP between two norms."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.pre_norm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, inner)
        self.post_norm = RMSNorm(width, eps)

    def __call__(self, x: mx.array) -> mx.array:
        """``[..., width]`` -> ``[..., width]``."""
        return x + self.post_norm(self.mlp(self.pre_norm(x)), x.dtype)


class MogHead(nn.Module):
    """MLP stack, guidance, and the projections of one guided vector."""

    def __init__(self, config: TtsConfig) -> None:
        super().__init__()
        head, width, out = config.mog_head, config.hidden_size, config.latent_size
        self.components, self.rank, self.min_log_std = head.num_predictions, head.low_rank, head.min_log_std
        self.guidance_scale, self.top_p = config.guidance_scale, config.top_p
        layers = [MLPLayer(width, head.intermediate_size, head.eps) for _ in range(head.num_layers)]
        self.mlp_stack = [*layers, RMSNorm(width, head.eps)]
        self.proj_logits = Linear(width, self.components, bias=False)
        self.proj_mus = GatheredLinear(width, self.components * self.rank, bias=False)
        self.proj_logs = Linear(width, 1, bias=False)
        self.proj_else = Linear(width, out, bias=False)
        self.low_mat = mx.zeros((self.components, out, self.rank))
        self._joint = Joined(self.proj_logits, self.proj_logs, self.proj_else)
        self._ranks = mx.array(np.arange(self.rank))

    def __call__(self, x: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
        """Draw a component with uniforms ``u`` ``[N]``.

        ``x`` is ``[2B, 1, width]``, conditional rows first (``[B, 1, width]`` with guidance off). Returns the mean
        ``[B, 1, L]`` and the logarithm of the standard deviation ``[B, 1, 1]``, in float32.
        """
        for layer in self.mlp_stack:
            x = layer(x)
        x = guide(x, self.guidance_scale)
        logits, log_std, rest = self.project(x)
        return self.gaussian(x, choose_component(logits, self.top_p, u), log_std, rest)

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """What all components share, at the guided ``x`` ``[B, 1, width]``, in one product and in float32.

        The components' logits ``[B, 1, N]``, the log standard deviation ``[B, 1, 1]`` before its lower bound, and what
        is added to every mean ``[B, 1, L]``.
        """
        logits, log_std, rest = mx.split(self._joint(x), [self.components, self.components + 1], axis=-1)
        return logits.astype(mx.float32), log_std.astype(mx.float32), rest.astype(mx.float32)

    def gaussian(
        self, x: mx.array, component: mx.array, log_std: mx.array, rest: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Mean and log standard deviation of ``component`` ``[B, 1]`` at ``x``, whose ``project`` gave the others."""
        # What is gathered is one component in a thousand: widening it here costs nothing, and rounds nothing.
        rows = self._rows(component).astype(mx.float32)
        mean = self.low_mat[component].astype(mx.float32) @ (rows @ x[..., None])
        log_std = mx.maximum(log_std, self.min_log_std)
        return mean[..., 0] * mx.exp(log_std) + rest, log_std

    def _rows(self, component: mx.array) -> mx.array:
        """The rows of ``proj_mus`` that are a component's: ``[B, 1]`` -> ``[B, 1, rank, width]``."""
        if self.proj_mus.quantization is not None:
            return self.proj_mus.rows(component[..., None] * self.rank + self._ranks)
        return self.proj_mus.weight.reshape(self.components, self.rank, -1)[component]
