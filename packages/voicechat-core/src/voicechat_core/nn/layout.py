"""Convolution weights: PyTorch's axis order in the checkpoint, MLX's in memory.

A module class whose weights are stored with other axes says so in ``CHECKPOINT_AXES``: parameter name to
the permutation that turns the stored array into ours. The loader and the writer of checkpoints read it;
nothing else knows that two orders exist.
"""

from collections.abc import Iterator
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn

__all__ = ["Axes", "CheckpointLayout", "checkpoint_axes", "to_checkpoint", "to_memory"]

Axes = tuple[int, ...]


class CheckpointLayout:
    """Mixin for modules whose parameters are stored with their axes in another order."""

    CHECKPOINT_AXES: ClassVar[dict[str, Axes]] = {}


def checkpoint_axes(module: nn.Module) -> Iterator[tuple[str, Axes]]:
    """Full parameter name and permutation of each parameter below ``module`` that is stored differently."""
    for path, child in module.named_modules():
        if isinstance(child, CheckpointLayout):
            for name, axes in child.CHECKPOINT_AXES.items():
                yield (f"{path}.{name}" if path else name), axes


def to_memory(stored: mx.array, expected: tuple[int, ...], axes: Axes | None) -> mx.array | None:
    """A stored array in our order, or None if its shape fits neither order.

    The published order comes first; an array that is already in ours passes unchanged.
    """
    if axes is not None and stored.ndim == len(axes):
        permuted = stored.transpose(axes)
        if permuted.shape == expected:
            return permuted
    return stored if stored.shape == expected else None


def to_checkpoint(value: mx.array, axes: Axes | None) -> mx.array:
    """One of our arrays in the checkpoint's order."""
    if axes is None:
        return value
    inverse = sorted(range(len(axes)), key=axes.__getitem__)
    return value.transpose(inverse)
