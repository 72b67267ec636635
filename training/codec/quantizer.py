"""The codebooks while they are learned: found by k-means, then moved by averages of what chooses each entry.

No gradient reaches them. All levels lie in one array ``[Q, K, L]`` (Q levels, K entries, L latent), so that a level's
search is five kernels and all levels' averages are four. Entries that nobody chooses are put where data is.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

__all__ = ["Found", "Quantizer"]

DECAY = 0.97
DEAD = 0.05  # choices a step, averaged
LOOK_AT = (1, 2, 4, 8, 16)  # levels after which the encoder is pulled to what is found so far


@dataclass
class Found:
    """Of latents ``[N, L]``: codes ``[Q, N]``, and residuals ``[Q + 1, N, L]`` before each level and after the last."""

    codes: mx.array
    residuals: mx.array


class Quantizer(nn.Module):
    """Codebooks, and for each entry how often it is chosen and the sum of what chose it (both averaged over steps)."""

    def __init__(self, levels: int, entries: int, width: int) -> None:
        super().__init__()
        self.centres = mx.zeros((levels, entries, width))
        self.counts = mx.ones((levels, entries))
        self.sums = mx.zeros((levels, entries, width))

    def search(self, latents: mx.array) -> Found:
        """The nearest entry of each level to what the levels before left of ``[N, L]``; nothing has a gradient."""
        centres, rest = mx.stop_gradient(self.centres), mx.stop_gradient(latents)
        lengths = mx.square(centres).sum(-1)
        codes, residuals = [], [rest]
        for level in range(centres.shape[0]):
            code = mx.argmin(lengths[level] - 2 * (rest @ centres[level].T), axis=-1)
            rest = rest - centres[level][code]
            codes.append(code)
            residuals.append(rest)
        return Found(mx.stack(codes), mx.stack(residuals))

    def learn(self, found: Found) -> None:
        """Move every entry towards the mean of what chose it."""
        levels, entries, _ = self.centres.shape
        chosen = (found.codes[:, :, None] == mx.arange(entries)).astype(mx.float32)
        self.counts = DECAY * self.counts + (1 - DECAY) * chosen.sum(1)
        self.sums = DECAY * self.sums + (1 - DECAY) * (chosen.swapaxes(1, 2) @ found.residuals[:levels])
        self.centres = self.sums / mx.maximum(self.counts, 1e-3)[:, :, None]

    def revive(self, residuals: mx.array) -> None:
        """Put each entry that is hardly chosen at a random one of its level's ``residuals`` ``[Q + 1, N, L]``."""
        levels, entries, width = self.centres.shape
        rows = mx.random.randint(0, residuals.shape[1], (levels, entries, 1))
        places = mx.take_along_axis(residuals[:levels], mx.broadcast_to(rows, (levels, entries, width)), axis=1)
        dead = (self.counts < DEAD)[:, :, None]
        self.centres = mx.where(dead, places, self.centres)
        self.sums = mx.where(dead, places, self.sums)
        self.counts = mx.where(dead[:, :, 0], 1.0, self.counts)

    def used(self) -> mx.array:
        """The fraction of entries that are chosen."""
        return (self.counts >= DEAD).mean()

    def initialise(self, latents: mx.array, batch: int, rounds: int = 12) -> None:
        """k-means, level by level, on ``[N, L]``; counts as if a step had ``batch`` latents."""
        rest, centres, counts = latents, [], []
        for _ in range(self.centres.shape[0]):
            found, sizes, rest = _k_means(rest, self.centres.shape[1], rounds)
            centres.append(found)
            counts.append(mx.maximum(sizes, 0.1) * (batch / latents.shape[0]))
        self.centres, self.counts = mx.stack(centres), mx.stack(counts)
        self.sums = self.centres * self.counts[:, :, None]
        mx.eval(self.parameters())

    # ---- what a step does with what was found

    def kept(self, latents: mx.array, found: Found, levels: mx.array) -> mx.array:
        """``[B, T, L]`` as the first ``levels`` ``[B]`` (1 .. Q) make it; the gradient passes unchanged."""
        batch, frames, width = latents.shape
        residuals = found.residuals.reshape(-1, batch, frames, width)
        chosen = mx.broadcast_to(levels.reshape(1, batch, 1, 1), (1, batch, frames, width))
        return latents - mx.take_along_axis(residuals, chosen, axis=0)[0]

    def commitment(self, latents: mx.array, found: Found) -> mx.array:
        """How far latents ``[N, L]`` are from what is found, after the last level and a tenth as much after some."""
        made = mx.stop_gradient(latents) - found.residuals
        levels = self.centres.shape[0]
        whole = mx.square(latents - made[levels]).mean()
        some = [level for level in LOOK_AT if level <= levels]
        return whole + 0.1 * mx.square(latents - made[mx.array(some)]).mean()


def _k_means(points: mx.array, entries: int, rounds: int) -> tuple[mx.array, mx.array, mx.array]:
    """Centres ``[K, L]``, how many points each has, and what they leave of the points."""
    centres = points[mx.random.permutation(points.shape[0])[:entries]]
    if centres.shape[0] < entries:
        centres = points[mx.random.randint(0, points.shape[0], (entries,))]
    for _ in range(rounds):
        chosen = _nearest(points, centres)[:, None] == mx.arange(entries)
        sizes = chosen.astype(mx.float32).sum(0)
        means = (chosen.astype(mx.float32).T @ points) / mx.maximum(sizes, 1.0)[:, None]
        others = points[mx.random.randint(0, points.shape[0], (entries,))]
        centres = mx.where((sizes > 0)[:, None], means, others)
        mx.eval(centres)
    nearest = _nearest(points, centres)
    sizes = (nearest[:, None] == mx.arange(entries)).astype(mx.float32).sum(0)
    rest = points - centres[nearest]
    mx.eval(sizes, rest)
    return centres, sizes, rest


def _nearest(points: mx.array, centres: mx.array) -> mx.array:
    return mx.argmin(mx.square(centres).sum(-1) - 2 * (points @ centres.T), axis=-1)
