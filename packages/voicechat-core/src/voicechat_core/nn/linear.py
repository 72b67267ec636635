"""Matrices, dense or quantized: the one place where a weight meets its input.

A matrix casts its input to the dtype that it computes in, so that a weight is never widened on a call: what surrounds
the matrices may be float32 (norms, softmax, sums) while they are not. A packed one computes in the dtype of its scales,
which are kept as they are stored, and gives what it is told to.
"""

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.nn.derived import Derived, is_traced
from voicechat_core.quantization import Quantization

__all__ = ["Embedding", "GatheredLinear", "Joined", "Linear", "Matrix", "for_products", "lay_out", "matrices"]


class Matrix(nn.Module):
    """What Linear and Embedding share: ``weight`` ``[outputs, inputs]``, dense or packed with scales and biases."""

    _quantization: Quantization | None = None
    _rounded_to: mx.Dtype | None = None
    _columns: Derived | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, however they are stored."""
        outputs, inputs = self.weight.shape
        return outputs, inputs if self._quantization is None else self.scales.shape[1] * self._quantization.group_size

    @property
    def dtype(self) -> mx.Dtype:
        """What it gives: the weight's dtype, or where that is packed the one it was told, by default the scales'."""
        own: mx.Dtype = (self.weight if self._quantization is None else self.scales).dtype
        return own if self._quantization is None or self._rounded_to is None else self._rounded_to

    @property
    def quantization(self) -> Quantization | None:
        """How it is packed, or None if it is dense."""
        return self._quantization

    def make_packed(self, quantization: Quantization) -> None:
        """Make room for a packed weight, its scales and its biases; what was there is dropped.

        ``shape``'s inputs must be a multiple of the group size.
        """
        packed, groups = quantization.shapes(*self.shape)
        self.weight, self._quantization = mx.zeros(packed, mx.uint32), quantization
        self.scales, self.biases = mx.zeros(groups), mx.zeros(groups)

    def round_to(self, dtype: mx.Dtype) -> None:
        """Say what a packed matrix's results are rounded to; a dense one's have the weight's dtype."""
        self._rounded_to = dtype

    @property
    def columns(self) -> mx.array:
        """A dense matrix turned, ``[inputs, outputs]``: a view, made once and not in every step."""
        if self._columns is None:
            self._columns = Derived(lambda weight: weight.T)
        turned: mx.array = self._columns(self.weight)
        return turned

    def rows(self, ids: mx.array) -> mx.array:
        """The rows of ``ids`` ``[...]``: ``[..., inputs]``."""
        q = self._quantization
        if q is None:
            return self.weight[ids]
        parts = (self.weight[ids], self.scales[ids], self.biases[ids])
        return mx.dequantize(*parts, group_size=q.group_size, bits=q.bits).astype(self.dtype)

    def product(self, x: mx.array) -> mx.array:
        """``x`` ``[..., inputs]`` times the transposed matrix: ``[..., outputs]``."""
        q = self._quantization
        if q is None:
            return x.astype(self.dtype) @ self.columns
        parts = (self.weight, self.scales, self.biases)
        y = mx.quantized_matmul(
            x.astype(self.scales.dtype), *parts, transpose=True, group_size=q.group_size, bits=q.bits
        )
        return y.astype(self.dtype)


class Linear(Matrix, nn.Linear):
    """``x W^T + b``."""

    def lay_out(self) -> None:
        """Bring a dense weight into the order that products read it in; its shape stays."""
        if self._quantization is None:
            self.weight = for_products(self.weight)

    def __call__(self, x: mx.array) -> mx.array:
        """``[..., inputs]`` of any floating dtype -> ``[..., outputs]`` in ``dtype``."""
        if "bias" not in self:
            return self.product(x)
        if self._quantization is None:
            return mx.addmm(self.bias, x.astype(self.dtype), self.columns)
        return self.product(x) + self.bias

    def add(self, x: mx.array, residual: mx.array, alpha: float = 1.0) -> mx.array:
        """``residual + alpha * self(x)``, in one operation where the dtypes allow it: ``[..., outputs]`` like both."""
        if self._quantization is not None or residual.dtype != self.dtype:
            y = self(x)
            return residual + (y if alpha == 1 else alpha * y)
        if "bias" in self:
            residual = residual + alpha * self.bias
        return mx.addmm(residual, x.astype(self.dtype), self.columns, alpha=alpha)


class GatheredLinear(Linear):
    """A Linear of which a frame gathers some rows: its weight stays row by row."""

    def lay_out(self) -> None:
        """Nothing: by columns, each gathered row would cost a copy of the whole."""


class Joined:
    """Matrices that read the same input, as one product: fewer, larger operations.

    The weights lie one after another in one array, and the parts' parameters, which keep their names, become views of
    it: nothing is held twice. It is made at the first call, and again when a part was given another weight. Parts that
    are packed in different ways are multiplied one by one.
    """

    def __init__(self, *parts: Linear) -> None:
        self._parts = parts
        self._joint: Linear | None = None
        self._sources: list[mx.array] = []

    def __call__(self, x: mx.array, bias: mx.array | None = None) -> mx.array:
        """``x`` ``[..., inputs]`` -> ``[..., sum of outputs]``, the parts' results in order; with ``bias`` added."""
        joint = self.ready()
        if joint is None:
            y = mx.concatenate([part(x) for part in self._parts], axis=-1)
        elif bias is not None and joint.quantization is None and "bias" not in joint:
            return mx.addmm(bias, x.astype(joint.dtype), joint.columns)
        else:
            y = joint(x)
        return y if bias is None else y + bias

    def ready(self) -> Linear | None:
        """Lay the parts out, if that is not done yet. None where they cannot be joined, or must stay as they lie: in
        training they are inputs of what is compiled.
        """
        held = [value for part in self._parts for value in part.parameters().values()]
        if len(held) != len(self._sources) or any(a is not b for a, b in zip(held, self._sources, strict=True)):
            if is_traced(held):
                return None
            self._joint = _join(self._parts)
            self._sources = [value for part in self._parts for value in part.parameters().values()]
        return self._joint


def _join(parts: tuple[Linear, ...]) -> Linear | None:
    """One matrix whose rows are those of all parts, each of which becomes a view of its own; None if they differ."""
    names = [
        "weight",
        *(["scales", "biases"] if parts[0].quantization else []),
        *(["bias"] if "bias" in parts[0] else []),
    ]
    kinds = {(part.quantization, part.dtype, *((name, part[name].dtype) for name in part)) for part in parts}
    if len(kinds) > 1:
        return None
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    joint = Linear(inputs, outputs, bias="bias" in names)
    if parts[0].quantization is not None:
        joint.make_packed(parts[0].quantization)
        joint.round_to(parts[0].dtype)
    for name in names:
        value = mx.concatenate([part[name] for part in parts])
        joint[name] = for_products(value) if name == "weight" and not joint.quantization else value
        mx.eval(joint[name])
        start = 0
        for part in parts:
            end = start + part[name].shape[0]
            part[name] = joint[name][start:end]
            start = end
        mx.eval([part[name] for part in parts])
    return joint


class Embedding(Matrix, nn.Embedding):
    """A vector for each id."""

    def __call__(self, ids: mx.array) -> mx.array:
        """Integers ``[...]`` -> ``[..., inputs]`` in ``dtype``."""
        return self.rows(ids)


def for_products(weight: mx.array) -> mx.array:
    """The same matrix ``[outputs, inputs]``, its numbers lying as ``x W^T`` reads them fastest on the default device.

    On a CPU that is column by column: MLX's Linux wheels bring the reference BLAS, whose innermost loop is then over
    outputs, several at a time, and not one long sum that must be added in order. Measured: 3.5 to 4.2 instead of 2.1
    to 2.5 billion products a second, at any number of rows. On a GPU it stays as it is.
    """
    return mx.contiguous(weight.T).T if mx.default_device() == mx.cpu else weight


def lay_out(module: nn.Module) -> None:
    """Bring the dense matrices below ``module`` into the order of ``for_products``, and join what is to be joined."""
    for child in module.modules():
        if hasattr(child, "lay_out"):
            child.lay_out()
            mx.eval(child.weight)
    for child in module.modules():
        for value in vars(child).values():
            if isinstance(value, Joined):
                value.ready()


def matrices(module: nn.Module) -> dict[str, Matrix]:
    """Each matrix below ``module`` with its path, in the tree's order."""
    children = reversed(module.named_modules())  # MLX walks from the last to the first
    return {path: child for path, child in children if isinstance(child, Matrix)}
