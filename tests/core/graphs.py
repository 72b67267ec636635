"""What is still to be run for arrays, as MLX draws it: operations by name."""

import io
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

VIEWS = {
    "AsStrided", "Broadcast", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze",
    "StopGradient", "Transpose", "Unflatten",
}  # fmt: skip


def operations(*arrays: mx.array) -> Counter[str]:
    """Operations that compute something; a fused chain is one ``Compiled``."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    names = re.findall(r'label ?= ?"([^"]+)", ?shape ?= ?rectangle', text.getvalue())
    return Counter("Compiled" if name.startswith("Compiled") else name for name in names if name not in VIEWS)


def one_norm_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm is one operation, as on a GPU: the CPU backend writes it out. Its numbers are wrong from now on."""

    def norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return mx.concatenate([x.reshape(-1), weight])[: x.size].reshape(x.shape)

    monkeypatch.setattr(mx.fast, "rms_norm", norm)


def compiled_operations(function: Callable[..., Any], *arrays: mx.array) -> Counter[str]:
    """Operations of a compiled function of arrays; it has been run once as it is written, as a step is."""
    mx.eval(function(*arrays))
    outputs = mx.compile(function)(*arrays)
    return operations(*(outputs if isinstance(outputs, tuple | list) else (outputs,)))
