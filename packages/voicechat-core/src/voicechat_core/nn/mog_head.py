"""The head that predicts a frame's latent: a mixture of Gaussians whose means have low rank (NeMo's MoGHead).

Of the mixture only the drawn component is ever computed: its rows are gathered, not all 65,536 outputs.
"""

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import TtsConfig
from voicechat_core.nn.gemma import GatedMLP, RMSNorm
from voicechat_core.nn.linear import Linear
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
        return x + self.post_norm(self.mlp(self.pre_norm(x)))


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
        self.proj_mus = Linear(width, self.components * self.rank, bias=False)
        self.proj_logs = Linear(width, 1, bias=False)
        self.proj_else = Linear(width, out, bias=False)
        self.low_mat = mx.zeros((self.components, out, self.rank))

    def __call__(self, x: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
        """Draw a component with uniforms ``u`` ``[N]``.

        ``x`` is ``[2B, 1, width]``, conditional rows first (``[B, 1, width]`` with guidance off). Returns the mean
        ``[B, 1, L]`` and the logarithm of the standard deviation ``[B, 1, 1]``, in float32.
        """
        for layer in self.mlp_stack:
            x = layer(x)
        x = guide(x, self.guidance_scale)
        return self.gaussian(x, choose_component(self.proj_logits(x).astype(mx.float32), self.top_p, u))

    def gaussian(self, x: mx.array, component: mx.array) -> tuple[mx.array, mx.array]:
        """Mean and log standard deviation of ``component`` ``[B, 1]`` at the guided ``x`` ``[B, 1, width]``."""
        # What is gathered is one component in a thousand: widening it here costs nothing, and rounds nothing.
        rows = self.proj_mus.rows(component[..., None] * self.rank + mx.arange(self.rank))  # [B, 1, rank, width]
        mean = self.low_mat[component].astype(mx.float32) @ (rows.astype(mx.float32) @ x[..., None])
        log_std = mx.maximum(self.proj_logs(x).astype(mx.float32), self.min_log_std)
        rest = self.proj_else(x).astype(mx.float32)
        return mean[..., 0] * mx.exp(log_std) + rest, log_std
