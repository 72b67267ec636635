"""Before a run on a GPU: one step of every kind there and on the CPU, from the same weights and draws.

It finds what would otherwise end a run after minutes: a convolution without a plan, a kernel that computes something
else. What it makes MLX compile is compiled for the run.
"""

from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx

__all__ = ["TOLERANCE", "Figures", "agree", "on_cpu"]

T = TypeVar("T")
Figures = dict[str, float]
TOLERANCE = 0.02  # relative; rounding differs, and a sum of many absolute values has kinks


def on_cpu(function: Callable[[], T]) -> T:
    """What ``function`` gives when everything is computed on the CPU, nothing compiled."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    try:
        return function()
    finally:
        mx.enable_compile()
        mx.set_default_device(device)


def agree(here: Figures, known: Figures, tolerance: float = TOLERANCE) -> None:
    """Compare two computations of the same figures.

    Raises:
        ArithmeticError: naming the first figure that differs by more than ``tolerance``, with both values.
    """
    for name, value in known.items():
        if not abs(here[name] - value) <= tolerance * max(abs(value), 1e-3):
            raise ArithmeticError(f"{name} is {here[name]:.5g} here and {value:.5g} on the CPU")
