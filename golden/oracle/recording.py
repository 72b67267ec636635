"""What stages share: hooks on modules, margins, and how a tensor is stored."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Tensors = dict[str, torch.Tensor]


@contextmanager
def outputs_of(modules: dict[str, torch.nn.Module]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Every output of the named modules while the block runs, in order of the calls."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in modules}

    def keep(name: str):
        return lambda _module, _inputs, output: seen[name].append(output[0] if isinstance(output, tuple) else output)

    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(layers: torch.nn.ModuleList) -> dict[str, torch.nn.Module]:
    """``layer0``, ``layer1``, ... for :func:`outputs_of`."""
    return {f"layer{index}": layer for index, layer in enumerate(layers)}


def margin(logits: torch.Tensor) -> torch.Tensor:
    """The best value less the second best, over the last axis: how near a greedy choice was to a tie."""
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1]


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """As written to a file: contiguous, integers and booleans as int32."""
    plain = tensor.detach().clone().contiguous()
    return plain if plain.is_floating_point() else plain.to(torch.int32)
