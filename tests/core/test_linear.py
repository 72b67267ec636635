"""Matrices: packed ones equal their own numbers unpacked by hand, dense ones are what MLX's are, none is widened."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from voicechat_core.nn.linear import Embedding, GatheredLinear, Joined, Linear, lay_out, matrices
from voicechat_core.quantization import Quantization

OUTPUTS, INPUTS = 24, 256


def unpacked(weight, scales, biases, bits, group_size):
    """The decode rule of the format, for bits that divide a word: fields from the least significant bit on."""
    words, per_word = np.array(weight).astype(np.uint64), 32 // bits
    fields = [(words >> np.uint64(bits * i)) & np.uint64(2**bits - 1) for i in range(per_word)]
    numbers = np.stack(fields, axis=-1).reshape(words.shape[0], -1).astype(np.float32)
    factor, offset = (np.repeat(np.array(x), group_size, axis=1) for x in (scales, biases))
    return factor * numbers + offset


def packed(kind, bits, group_size, *, bias=False):
    """A module with random packed weights, and the same matrix unpacked by MLX."""
    mx.random.seed(bits)
    module = kind(INPUTS, OUTPUTS, bias=bias) if kind is Linear else kind(OUTPUTS, INPUTS)
    parts = mx.quantize(mx.random.normal((OUTPUTS, INPUTS)), group_size=group_size, bits=bits)
    module.make_packed(Quantization(bits, group_size))
    for name, value in zip(("weight", "scales", "biases"), parts, strict=True):
        assert module[name].shape == value.shape
        assert module[name].dtype == value.dtype
        module[name] = value
    return module, mx.dequantize(*parts, group_size=group_size, bits=bits)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_rows_follow_the_decode_rule(bits, group_size):
    module, _ = packed(Embedding, bits, group_size)
    expected = unpacked(module.weight, module.scales, module.biases, bits, group_size)
    ids = np.array([[3, 0], [OUTPUTS - 1, 3]])
    found = np.array(module(mx.array(ids)))
    assert found.shape == (2, 2, INPUTS)
    # One rounding of a product and one of a sum, against a fused one.
    assert np.abs(found - expected[ids]).max() <= 2e-6


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_packed_product_is_the_unpacked_one(bits):
    module, weight = packed(Linear, bits, 64, bias=True)
    module.bias = mx.random.normal((OUTPUTS,))
    x = mx.random.normal((2, 3, INPUTS))
    expected = np.array(x, np.float64) @ np.array(weight, np.float64).T + np.array(module.bias, np.float64)
    assert np.abs(np.array(module(x)) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_dense_one_is_mlx_own_to_the_bit():
    for bias in (False, True):
        ours, theirs = Linear(INPUTS, OUTPUTS, bias=bias), nn.Linear(INPUTS, OUTPUTS, bias=bias)
        theirs.update(ours.parameters())
        x = mx.random.normal((1, 5, INPUTS))
        assert mx.array_equal(ours(x), theirs(x))
    table = Embedding(OUTPUTS, INPUTS)
    assert mx.array_equal(table(mx.array([5, 2])), table.weight[mx.array([5, 2])])


@pytest.mark.parametrize("bias", [False, True])
def test_the_weight_decides_the_dtype(bias):
    dense = Linear(INPUTS, OUTPUTS, bias=bias)
    dense.set_dtype(mx.bfloat16)
    half, _ = packed(Linear, 4, 64, bias=bias)
    half.set_dtype(mx.bfloat16)
    single, _ = packed(Linear, 4, 64, bias=bias)
    assert (dense.dtype, half.dtype, single.dtype) == (mx.bfloat16, mx.bfloat16, mx.float32)
    for x in (mx.ones((1, INPUTS)), mx.ones((1, INPUTS), mx.bfloat16)):
        assert (dense(x).dtype, half(x).dtype, single(x).dtype) == (mx.bfloat16, mx.bfloat16, mx.float32)


def test_a_packed_one_gives_what_it_is_told_and_rounds_only_that():
    module, weight = packed(Linear, 8, 64)
    x = mx.random.normal((3, INPUTS))
    exact = module(x)
    module.round_to(mx.bfloat16)
    assert module.dtype == mx.bfloat16
    assert mx.array_equal(module(x), exact.astype(mx.bfloat16))
    assert mx.array_equal(module.rows(mx.array([4])), weight[4:5].astype(mx.bfloat16))
    assert module.scales.dtype == mx.float32


def test_shape_is_the_matrix_not_its_words():
    module, _ = packed(Linear, 4, 64)
    assert module.weight.shape == (OUTPUTS, INPUTS // 8)
    assert (module.shape, module.quantization) == ((OUTPUTS, INPUTS), Quantization(4, 64))
    assert Linear(INPUTS, OUTPUTS).shape == (OUTPUTS, INPUTS)


def test_matrices_have_their_paths_in_order():
    tree = nn.Module()
    tree.layers = [nn.Sequential(Linear(4, 4), nn.ReLU()), Embedding(3, 4)]
    tree.head = Linear(4, 2)
    assert list(matrices(tree)) == ["layers.0.layers.0", "layers.1", "head"]


def test_inputs_are_cast_to_the_scales_not_the_scales_to_the_inputs():
    module, _ = packed(Linear, 4, 64)
    module.scales, module.biases = (x.astype(mx.bfloat16) for x in (module.scales, module.biases))
    x = mx.random.normal((3, INPUTS))
    parts = (module.weight, module.scales, module.biases)
    expected = mx.quantized_matmul(x.astype(mx.bfloat16), *parts, transpose=True, group_size=64, bits=4)
    assert mx.array_equal(module(x), expected)


# ---- sums and joint products


def _linears(bias, sizes=(64, 32, 32)):
    linears = [Linear(64, size, bias=bias) for size in sizes]
    for number, linear in enumerate(linears):
        linear.weight = mx.random.normal(linear.weight.shape, key=mx.random.key(number))
        if bias:
            linear.bias = mx.random.normal(linear.bias.shape, key=mx.random.key(10 + number))
    return linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_sum_is_the_residual_and_the_scaled_product(bias, alpha):
    linear = _linears(bias)[0]
    x, residual = (mx.random.normal((2, 3, 64), key=mx.random.key(n)) for n in (20, 21))
    expected = np.array(residual) + alpha * np.array(linear(x))
    np.testing.assert_allclose(np.array(linear.add(x, residual, alpha)), expected, rtol=1e-5, atol=1e-5)


def test_a_sum_of_a_wider_residual_keeps_the_residuals_dtype_and_bits():
    linear = _linears(bias=False)[0]
    linear.weight = linear.weight.astype(mx.bfloat16)
    x, residual = mx.ones((1, 64)), mx.full((1, 64), 1 + 2.0**-12)
    for alpha in (1.0, 0.5):
        y = linear.add(x, residual, alpha)
        assert y.dtype == mx.float32
        np.testing.assert_array_equal(np.array(y), np.array(residual + (alpha * linear(x)).astype(mx.float32)))


@pytest.mark.parametrize("bias", [False, True])
def test_a_joint_product_is_the_parts_side_by_side(bias):
    parts, x = _linears(bias), mx.random.normal((2, 1, 64), key=mx.random.key(30))
    expected = np.concatenate([np.array(part(x)) for part in parts], axis=-1)
    extra = mx.arange(128).astype(mx.float32)
    joined = Joined(*parts)
    np.testing.assert_allclose(np.array(joined(x)), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.array(joined(x, extra)), expected + np.array(extra), rtol=1e-5, atol=1e-5)


def test_parts_keep_their_values_and_share_the_joint_memory():
    parts = _linears(bias=False, sizes=(512, 512))
    before = [np.array(part.weight) for part in parts]
    mx.eval([part.weight for part in parts])
    held = mx.get_active_memory()
    Joined(*parts).ready()
    assert mx.get_active_memory() - held < parts[0].weight.nbytes
    for part, weight in zip(parts, before, strict=True):
        np.testing.assert_array_equal(np.array(part.weight), weight)


def test_a_part_with_another_weight_is_joined_again():
    parts, x = _linears(bias=False), mx.random.normal((1, 64), key=mx.random.key(31))
    joined = Joined(*parts)
    joint = joined.ready()
    assert joined.ready() is joint
    parts[1].weight = 2 * parts[1].weight
    np.testing.assert_allclose(np.array(joined(x))[:, 64:96], np.array(parts[1](x)), rtol=1e-5, atol=1e-5)


def test_parts_packed_alike_are_joined_and_others_multiplied_one_by_one():
    alike = [packed(Linear, 4, 32)[0], packed(Linear, 4, 32)[0]]
    x = mx.random.normal((1, INPUTS), key=mx.random.key(32))
    expected = np.concatenate([np.array(part(x)) for part in alike], axis=-1)
    joined = Joined(*alike)
    assert joined.ready() is not None
    np.testing.assert_allclose(np.array(joined(x)), expected, rtol=1e-5, atol=1e-5)
    mixed = [packed(Linear, 4, 32)[0], packed(Linear, 8, 32)[0]]
    expected = np.concatenate([np.array(part(x)) for part in mixed], axis=-1)
    other = Joined(*mixed)
    assert other.ready() is None
    np.testing.assert_allclose(np.array(other(x, mx.ones(2 * OUTPUTS))), expected + 1, rtol=1e-5, atol=1e-5)


# ---- the order of numbers


def test_a_matrix_is_laid_out_by_columns_and_stays_itself():
    linear, joined_parts = _linears(bias=True)[0], _linears(bias=False, sizes=(512, 512))
    x, before = mx.random.normal((3, 64), key=mx.random.key(40)), np.array(linear.weight)
    expected = np.array(linear(x))

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.single, self.parts = linear, joined_parts
            self.gathered = GatheredLinear(64, 32, bias=False)
            self._joint = Joined(*joined_parts)

    holder = Holder()
    gathered = holder.gathered.weight
    lay_out(holder)
    np.testing.assert_array_equal(np.array(linear.weight), before)
    np.testing.assert_allclose(np.array(linear(x)), expected, rtol=1e-5, atol=1e-5)
    assert holder.gathered.weight is gathered
    joint = holder._joint.ready()
    for matrix in (linear, joint):
        assert memoryview(matrix.weight).strides == (4, 4 * matrix.weight.shape[0])  # a column's numbers are neighbours


def test_a_packed_matrix_stays_as_it_lies():
    module, _ = packed(Linear, 4, 64)
    before = module.weight
    lay_out(module)
    assert module.weight is before
