"""The kernels for NVIDIA GPUs against their plain forms, where there is such a GPU."""

import mlx.core as mx
import numpy as np
import pytest

from voicechat_core.config import TextConfig
from voicechat_core.nn import cuda, norms
from voicechat_core.nn.mamba2 import Mamba2Mixer

pytestmark = pytest.mark.skipif(not mx.cuda.is_available(), reason="no NVIDIA GPU here: kernels are compared on one")

DTYPES = [mx.float32, mx.bfloat16]


def draws(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def largest(found: mx.array, expected: mx.array) -> float:
    """The largest difference, relative to the largest value."""
    a, b = (np.array(x.astype(mx.float32), np.float64) for x in (found, expected))
    return float(np.abs(a - b).max() / np.abs(b).max())


def bound(dtype: mx.Dtype) -> float:
    """Of float32 what sums in another order give; of bfloat16 a unit in the last place, where these round apart."""
    return 2e-6 if dtype == mx.float32 else 2.0**-7


@pytest.mark.parametrize("given", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("width", [16, 72, 1152, 4480])
def test_rms_norm(given: mx.Dtype, wanted: mx.Dtype, width: int) -> None:
    x, factors = draws(1, 2, 3, width, dtype=given), 1 + 0.3 * draws(2, width)
    expected = norms.rms_norm(x, factors, 1e-6, wanted)
    with cuda.allowed():
        found = norms.rms_norm(x, factors, 1e-6, wanted)
    assert found.dtype == expected.dtype == wanted
    assert largest(found, expected) <= bound(wanted)


@pytest.mark.parametrize("wanted", DTYPES)
def test_rms_norm_of_groups(wanted: mx.Dtype) -> None:
    x, factors = draws(1, 2, 1, 8, 1280), 1 + 0.3 * draws(2, 8, 1280)
    expected = norms.rms_norm(x, factors, 1e-5, wanted)
    with cuda.allowed():
        assert largest(norms.rms_norm(x, factors, 1e-5, wanted), expected) <= bound(wanted)


SIZES = [
    {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2},
    {"mamba_num_heads": 16, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8},
    {"mamba_num_heads": 6, "mamba_head_dim": 20, "ssm_state_size": 48, "n_groups": 1},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_mamba_step(dtype: mx.Dtype, sizes: dict[str, int], batch: int) -> None:
    """Ten steps, each form on its own state."""
    mixer = Mamba2Mixer(TextConfig(vocab_size=8, hidden_size=64, hybrid_override_pattern="M", **sizes))  # type: ignore[arg-type]
    mixer.update({
        "A_log": mx.log(1 + 7 * mx.abs(draws(1, *mixer.A_log.shape))),
        "dt_bias": draws(2, *mixer.dt_bias.shape) - 1,
        "D": 1 + draws(3, *mixer.D.shape),
    })  # fmt: skip
    mixer.conv1d.weight = (0.5 * draws(4, *mixer.conv1d.weight.shape)).astype(dtype)
    mixer.conv1d.bias = draws(5, *mixer.conv1d.bias.shape)
    mixer.in_proj.weight = (0.2 * draws(6, *mixer.in_proj.weight.shape)).astype(dtype)
    mixer.out_proj.weight = (0.2 * draws(7, *mixer.out_proj.weight.shape)).astype(dtype)
    plain, fast = mixer.new_state(batch), mixer.new_state(batch)
    for step in range(10):
        x = draws(10 + step, batch, 1, 64, dtype=dtype)
        expected, plain = mixer.step(x, plain)
        with cuda.allowed():
            found, fast = mixer.step(x, fast)
        mx.eval(found, fast.conv, fast.ssm)
        assert found.dtype == expected.dtype
        assert largest(found, expected) <= (1e-5 if dtype == mx.float32 else 2.0**-6)
        assert largest(fast.ssm, plain.ssm) <= 1e-5
        np.testing.assert_array_equal(np.array(fast.conv.astype(mx.float32)), np.array(plain.conv.astype(mx.float32)))


def test_nothing_is_used_unasked() -> None:
    assert not cuda.on_cuda()
    with cuda.allowed():
        assert cuda.on_cuda()
    assert not cuda.on_cuda()
