"""The speech decoder's random draws, replaced by a recorded tape, and how near its choices of codes were to a tie."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import nemo.collections.speechlm2.modules.ear_tts_model as ear_tts_module
import numpy as np
import torch

from .recording import margin


class NoiseTape:
    """While entered, ``rand_like`` and ``randn_like`` of the speech decoder draw from PCG64(seed) and are kept.

    These two are all its randomness: uniform numbers for the Gumbel choice of a component, normal ones for the
    latent; one pair for each refinement pass that unmasks anything, in that order.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self.uniform: list[np.ndarray] = []
        self.normal: list[np.ndarray] = []

    def rand_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uniform numbers of [0, 1)."""
        return self._draw(self.uniform, self._rng.random, tensor)

    def randn_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Standard normal numbers."""
        return self._draw(self.normal, self._rng.standard_normal, tensor)

    @staticmethod
    def _draw(kept: list[np.ndarray], draw: Callable[..., np.ndarray], tensor: torch.Tensor) -> torch.Tensor:
        kept.append(draw(tuple(tensor.shape), dtype=np.float32))
        return torch.from_numpy(kept[-1].copy())

    def tensors(self) -> dict[str, torch.Tensor]:
        """All draws so far, in order of use."""
        return {
            "noise_u": torch.from_numpy(np.stack(self.uniform)),
            "noise_z": torch.from_numpy(np.stack(self.normal)),
        }

    def __enter__(self) -> Self:
        ear_tts_module.torch = _TapedTorch(self)
        return self

    def __exit__(self, *_: object) -> None:
        ear_tts_module.torch = torch


class _TapedTorch:
    """The torch module, but for the two functions of the tape."""

    def __init__(self, tape: NoiseTape) -> None:
        self.rand_like, self.randn_like = tape.rand_like, tape.randn_like

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def code_margins() -> Iterator[list[torch.Tensor]]:
    """Margins of every code chosen while the block runs: one ``[B, T, levels]`` a refinement pass."""
    seen: list[torch.Tensor] = []
    choose = ear_tts_module.depthsum_encoding_step

    def recorded(tables: torch.Tensor, rest: torch.Tensor, code: torch.Tensor, first: int, count: int) -> torch.Tensor:
        code = choose(tables, rest, code, first, count)
        margins = []
        for level in range(first, first + count):
            margins.append(margin(2 * rest @ tables[level].T - tables[level].pow(2).sum(-1)))
            rest = rest - tables[level][code[..., level]]
        seen.append(torch.stack(margins, -1))
        return code

    ear_tts_module.depthsum_encoding_step = recorded
    try:
        yield seen
    finally:
        ear_tts_module.depthsum_encoding_step = choose


def margins_by_step(seen: list[torch.Tensor], steps: int) -> torch.Tensor:
    """The passes of each step joined: ``[1, steps, all levels]``."""
    passes = len(seen) // steps
    return torch.cat([torch.cat(seen[i * passes : (i + 1) * passes], -1) for i in range(steps)], 1)
