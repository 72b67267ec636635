"""The loss of a frame: NeMo's bound on the mixture's likelihood, with a random part of the levels given.

Of a frame's Q levels the first n are given, as in one of the sampler's passes; the target is the sum of all others. For
component k with its Gaussian at ``std * (low_k m_k) + rest`` of size ``std`` the log likelihood of the target is

    lp_k = -L (ln(2 pi) / 2 + log std) - |(target - rest) / std - low_k m_k|^2 / 2

The responsibilities ``q = 0.99 softmax(lp) + 0.01 / K`` get no gradient. ``component = -sum q lp`` draws the
components to the targets, ``choice = KL(q || softmax(logits))`` the choice to the components. Both are summed over
frames and divided by the number of levels that were to be found. Distances are float32 whatever the precision.
"""

import math

import mlx.core as mx

from training.speaking.forward import Constants, hidden_states, sums_at
from training.speaking.rows import Rows
from training.speaking.tables import Tables
from voicechat_core.nn.ear_tts import EarTTS
from voicechat_core.nn.mog_head import MogHead

__all__ = ["MAX_RATE", "SMOOTHING", "given_levels", "likelihoods", "mixture_loss", "row_loss", "row_terms"]

SMOOTHING = 0.01
MAX_RATE = 0.9  # of the sampler's eight iterations the last, at 7/8, must lie within
EXPONENT = 3.0


def given_levels(rates: mx.array, levels: int) -> mx.array:
    """Levels that are given after a share ``rates`` of the iterations; int32."""
    still_open = mx.ceil(mx.power(1 - mx.power(rates, EXPONENT), 1 / EXPONENT) * levels)
    return levels - mx.clip(still_open, 1, levels).astype(mx.int32)


def random_given(draws: int, shape: tuple[int, ...], levels: int) -> mx.array:
    """Given levels ``[draws, B, T]``; the rates of a frame's draws are spread evenly over their range."""
    share = (mx.arange(draws)[:, None, None] + mx.random.uniform(shape=(draws, *shape))) / draws
    return given_levels(MAX_RATE * share, levels)


def likelihoods(head: MogHead, x: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """``lp`` and the choice's logits, ``[N, K]`` float32 each, of ``x`` ``[N, H]`` before the stack and ``[N, L]``."""
    for layer in head.mlp_stack:
        x = layer(x)
    means = head.proj_mus(x).astype(mx.float32).reshape(-1, head.components, head.rank)
    log_std = mx.maximum(head.proj_logs(x).astype(mx.float32), head.min_log_std)
    y = (targets - head.proj_else(x).astype(mx.float32)) * mx.exp(-log_std)
    low = head.low_mat.astype(mx.float32)  # [K, L, R]
    grams = low.swapaxes(1, 2) @ low
    squares = (means.swapaxes(0, 1) @ grams).swapaxes(0, 1)  # [N, K, R]
    crossed = (y @ low.swapaxes(0, 1).reshape(low.shape[1], -1)).reshape(means.shape)
    distance = mx.square(y).sum(axis=-1, keepdims=True) + (means * (squares - 2 * crossed)).sum(axis=-1)
    lp = -targets.shape[-1] * (0.5 * math.log(2 * math.pi) + log_std) - 0.5 * mx.abs(distance)
    return lp, head.proj_logits(x).astype(mx.float32)


def mixture_loss(lp: mx.array, logits: mx.array, weights: mx.array, still_open: mx.array) -> dict[str, mx.array]:
    """``component`` and ``choice`` of frames with ``weights`` ``[N]``, of which ``still_open`` ``[N]`` levels count."""
    q = mx.stop_gradient((1 - SMOOTHING) * mx.softmax(lp, axis=-1) + SMOOTHING / lp.shape[-1])
    count = mx.maximum((weights * still_open).sum(), 1)
    component = -((q * lp).sum(axis=-1) * weights).sum() / count
    log_choice = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    choice = ((q * (mx.log(q + 1e-8) - log_choice)).sum(axis=-1) * weights).sum() / count
    return {"component": component, "choice": choice}


def row_loss(
    tts: EarTTS, rows: Rows, tables: Tables, constants: Constants, *, draws: int = 2, fused: bool = False
) -> dict[str, mx.array]:
    """Both terms over all steps of the rows; each frame is asked for ``draws`` times with other levels given.

    The more draws, the less noise in the gradient; the backbone's work does not depend on them.
    """
    given = random_given(draws, rows.ids.shape, tables.levels)
    return row_terms(tts, rows, given, tables, constants, fused=fused)


def row_terms(
    tts: EarTTS, rows: Rows, given: mx.array, tables: Tables, constants: Constants, *, fused: bool = False
) -> dict[str, mx.array]:
    """The same where ``given`` ``[draws, B, T]`` says how many levels are."""
    levels = tables.levels
    # One gather: the history, the whole frames, and what is given of them.
    frames = mx.broadcast_to(rows.frames, given.shape)
    at = mx.concatenate([rows.history[None], rows.frames[None], frames])
    part = mx.concatenate([rows.heard[None], mx.full((1, *rows.ids.shape), levels), given])
    heard, whole, known = mx.split(sums_at(tables, at, part), [1, 2])
    hidden = hidden_states(tts, rows, heard[0], constants, fused=fused)
    x = (hidden + tts.embed_code(known)).reshape(-1, hidden.shape[-1])
    lp, logits = likelihoods(tts.mog_head, x, (whole - known).reshape(x.shape[0], -1))
    weights = mx.broadcast_to(rows.weights, given.shape).reshape(-1)
    return mixture_loss(lp, logits, weights, (levels - given).reshape(-1))
