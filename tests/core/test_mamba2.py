"""The Mamba-2 mixer against its recurrence, written out position by position in float64."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map

from voicechat_core.config import TextConfig
from voicechat_core.nn import mamba2
from voicechat_core.nn import state as states
from voicechat_core.nn.mamba2 import (
    CHUNK,
    CausalConv1d,
    GatedRMSNorm,
    Mamba2Mixer,
    ssm_scan,
    ssm_step,
    step_sizes,
)

# float32 sums over at most one chunk and its incoming state, relative to the largest value: 1e-6 measured.
SCAN_TOLERANCE = 1e-5
# The same mixer by other kernels (one position against many): 6e-7 measured.
STEP_TOLERANCE = 5e-6

CONFIG = TextConfig(
    hidden_size=24, mamba_num_heads=6, mamba_head_dim=4, ssm_state_size=5, n_groups=3, conv_kernel=4
)  # fmt: skip


def error(found, expected):
    """Largest difference relative to the largest expected value."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


def recurrence(x, delta, a, b, c, state):
    """The defining loop, one head and one position at a time."""
    x, delta, a, b, c, state = (np.array(v, np.float64) for v in (x, delta, a, b, c, state))
    batch, n, heads, _ = x.shape
    per_group = heads // b.shape[2]
    y = np.zeros_like(x)
    for row in range(batch):
        for t in range(n):
            for h in range(heads):
                g = h // per_group
                decay = np.exp(delta[row, t, h] * a[h])
                state[row, h] = decay * state[row, h] + delta[row, t, h] * np.outer(x[row, t, h], b[row, t, g])
                y[row, t, h] = state[row, h] @ c[row, t, g]
    return y, state


def scan_inputs(n, batch=1, heads=6, head_dim=4, groups=2, size=5, seed=0):
    """Inputs whose step sizes span 1e-4 to 10, so that heads forget within one position or hardly at all."""
    rng = np.random.default_rng(seed)
    draw = (
        rng.normal(size=(batch, n, heads, head_dim)),
        np.exp(rng.uniform(np.log(1e-4), np.log(10), (batch, n, heads))),
        -rng.uniform(0.1, 16, heads),
        rng.normal(size=(batch, n, groups, size)),
        rng.normal(size=(batch, n, groups, size)),
        rng.normal(size=(batch, heads, head_dim, size)),
    )
    return tuple(mx.array(v.astype(np.float32)) for v in draw)


def random_mixer(config=CONFIG, seed=0):
    """A mixer with every parameter drawn, decays and step sizes widely spread."""
    mixer = Mamba2Mixer(config)
    mx.random.seed(seed)
    mixer.update(tree_map(lambda p: 0.5 * mx.random.normal(p.shape), mixer.parameters()))
    mixer.dt_bias = mx.random.uniform(-9, 2, mixer.dt_bias.shape)
    return mixer


@pytest.mark.parametrize("chunk", [16, CHUNK])
@pytest.mark.parametrize(("chunks", "extra"), [(0, 1), (1, -1), (1, 0), (1, 1), (3, 5)])
def test_scan_is_the_recurrence(chunks, extra, chunk):
    inputs = scan_inputs(chunks * chunk + extra, batch=2)
    y, state = ssm_scan(*inputs, chunk=chunk)
    expected_y, expected_state = recurrence(*inputs)
    assert error(y, expected_y) <= SCAN_TOLERANCE
    assert error(state, expected_state) <= SCAN_TOLERANCE


def test_step_is_the_recurrence():
    inputs = scan_inputs(1, batch=2)
    x, delta, a, *rest = inputs
    y, state = ssm_step(x, delta, mx.exp(delta * a), *rest)
    expected_y, expected_state = recurrence(*inputs)
    assert error(y, expected_y) <= SCAN_TOLERANCE
    assert error(state, expected_state) <= SCAN_TOLERANCE


def slow_after_fast():
    """Half a chunk of decays near e^-1000 a position, then hardly any."""
    x, delta, a, b, c, state = scan_inputs(CHUNK, heads=2, groups=1)
    fast = mx.arange(CHUNK)[None, :, None] < CHUNK // 2
    return x, mx.where(fast, 1000.0, 1e-3 * delta), -mx.ones_like(a), b, c, state


def test_a_slow_decay_after_a_fast_one_keeps_its_digits():
    inputs = slow_after_fast()
    after = slice(CHUNK // 2, None)
    y, _ = ssm_scan(*inputs)
    expected, _ = recurrence(*inputs)
    assert error(y[:, after], expected[:, after]) <= SCAN_TOLERANCE


def test_a_difference_of_running_sums_would_lose_them(monkeypatch):
    def differences(values):
        sums = mx.cumsum(values, axis=-1)
        lower = mx.tril(mx.ones((values.shape[-1],) * 2, mx.bool_))
        return mx.where(lower, sums[..., :, None] - sums[..., None, :], -mx.inf)

    monkeypatch.setattr(mamba2, "_segment_sums", differences)
    inputs = slow_after_fast()
    after = slice(CHUNK // 2, None)
    y, _ = ssm_scan(*inputs)
    expected, _ = recurrence(*inputs)
    assert error(y[:, after], expected[:, after]) > 10 * SCAN_TOLERANCE


def test_step_sizes_are_not_clamped():
    found = step_sizes(mx.array([[[-12.0, -9.0, 0.5, 30.0]]]), mx.array([2.0, -1.0, 0.25, 10.0]))
    expected = np.log1p(np.exp([-10.0, -10.0, 0.75, 40.0]))
    assert np.allclose(np.array(found)[0, 0], expected, rtol=1e-6, atol=0)


def test_step_sizes_of_half_precision_are_float32():
    found = step_sizes(mx.array([0.5], mx.bfloat16), mx.array([-7.0], mx.bfloat16))
    assert found.dtype == mx.float32
    assert found.item() == pytest.approx(np.log1p(np.exp(-6.5)), rel=1e-6)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_last_weight_of_the_convolution_is_the_present(one_by_one):
    conv = CausalConv1d(3, 4)
    conv.weight = mx.arange(1.0, 13.0).reshape(3, 4, 1)
    conv.bias = mx.array([100.0, 200.0, 300.0])
    impulse = mx.zeros((1, 7, 3))
    impulse[:, 2] = 1.0
    past, outputs = mx.zeros((1, 3, 3)), []
    for x in mx.split(impulse, 7, axis=1) if one_by_one else [impulse]:
        y, past = conv.step(x, past)
        outputs.append(y)
    found = np.array(mx.concatenate(outputs, axis=1))[0] - np.array([100.0, 200.0, 300.0])
    for channel, taps in enumerate(np.arange(1.0, 13.0).reshape(3, 4)):
        assert found[:, channel].tolist() == [0, 0, *taps[::-1], 0]


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_the_convolution_remembers_its_last_inputs_oldest_first(n):
    conv = CausalConv1d(2, 4)
    past = mx.array([[[-3.0, -3.0], [-2.0, -2.0], [-1.0, -1.0]]])
    x = mx.broadcast_to(mx.arange(float(n))[None, :, None], (1, n, 2))
    _, tail = conv.step(x, past)
    assert tail[0, :, 0].tolist() == [float(t) for t in range(n - 3, n)]


def gated_norm(groups=4, dim=24, seed=3):
    mx.random.seed(seed)
    norm = GatedRMSNorm(dim, groups, 1e-5)
    norm.weight = mx.random.normal((dim,))
    return norm, mx.random.normal((2, 3, dim)), mx.random.normal((2, 3, dim))


def test_the_gate_comes_before_the_norm_of_each_group():
    norm, y, gate = gated_norm()
    v, z, w = (np.array(x, np.float64) for x in (y, gate, norm.weight))
    v = (v * z / (1 + np.exp(-z))).reshape(2, 3, 4, 6)
    expected = (v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-5)).reshape(2, 3, 24) * w
    assert error(norm(y, gate), expected) <= 1e-6


def test_a_loud_group_does_not_touch_the_others():
    norm, y, gate = gated_norm()
    loud = mx.concatenate([y[..., :6] * 1000, y[..., 6:]], axis=-1)
    quiet_out, loud_out = norm(y, gate), norm(loud, gate)
    assert mx.array_equal(quiet_out[..., 6:], loud_out[..., 6:])
    assert error(loud_out[..., :6], quiet_out[..., :6]) < 1e-3  # only eps tells them apart


def test_a_mixer_is_its_steps():
    mixer = random_mixer()
    x = mx.random.normal((2, 2 * CHUNK + 3, CONFIG.hidden_size))
    state, outputs = mixer.new_state(batch=2), []
    for t in range(x.shape[1]):
        y, state = mixer.step(x[:, t : t + 1], state)
        outputs.append(y)
    assert error(mx.concatenate(outputs, axis=1), mixer(x)) <= STEP_TOLERANCE


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 40), st.data())
def test_a_prefill_may_be_split_anywhere(n, data):
    at = data.draw(st.integers(1, n - 1))
    mixer = random_mixer()
    x = mx.random.normal((1, n, CONFIG.hidden_size))
    whole, end = mixer.step(x, mixer.new_state())
    first, state = mixer.step(x[:, :at], mixer.new_state())
    second, state = mixer.step(x[:, at:], state)
    assert error(mx.concatenate([first, second], axis=1), whole) <= STEP_TOLERANCE
    for (name, found), (_, expected) in zip(states.arrays(state), states.arrays(end), strict=True):
        assert error(found, expected) <= STEP_TOLERANCE, name


def test_rows_of_a_batch_do_not_meet():
    mixer = random_mixer()
    x = mx.random.normal((3, 11, CONFIG.hidden_size))
    alone = mx.concatenate([mixer(row) for row in mx.split(x, 3)])
    assert error(mixer(x), alone) <= STEP_TOLERANCE


@pytest.mark.parametrize("n", [1, 9])
def test_half_precision_keeps_the_memory_in_float32(n):
    mixer = random_mixer()
    x = mx.random.normal((1, n, CONFIG.hidden_size))
    exact = mixer(x)
    mixer.update(tree_map(lambda p: p.astype(mx.bfloat16), mixer.parameters()))
    y, state = mixer.step(x.astype(mx.bfloat16), mixer.new_state())
    assert (y.dtype, state.conv.dtype, state.ssm.dtype) == (mx.bfloat16, mx.bfloat16, mx.float32)
    assert error(y.astype(mx.float32), exact) < 0.05  # eight bits through two projections


def test_parameters_are_named_as_in_the_checkpoint():
    names = {name for name, _ in tree_flatten(Mamba2Mixer(CONFIG).parameters())}
    assert names == {
        "in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias", "norm.weight", "out_proj.weight",
    }  # fmt: skip


def test_a_prefill_leaves_nothing_but_its_state():
    mixer = random_mixer()
    x = mx.random.normal((1, 2000, CONFIG.hidden_size))
    mx.eval(mixer.parameters(), x)
    before = mx.get_active_memory()
    y, state = mixer.step(x, mixer.new_state())
    mx.eval(y)
    states.evaluate(state)
    del y
    # The convolution's window alone would be 2000 rows.
    assert mx.get_active_memory() - before <= states.nbytes(state) + 2**16


def test_a_step_updates_the_memory_in_place():
    config = TextConfig(hidden_size=8, mamba_num_heads=16, mamba_head_dim=64, ssm_state_size=128, n_groups=2)
    mixer = random_mixer(config)
    x = mx.random.normal((1, 1, 8))
    state = mixer.new_state()
    mx.eval(mixer.parameters(), x)
    states.evaluate(state)
    size = state.ssm.nbytes
    for _ in range(5):
        y, state = mixer.step(x, state)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(y)
        states.evaluate(state)
        # One temporary of its size holds what the position adds; a second would be a copy of the memory.
        assert mx.get_peak_memory() - before < 1.5 * size
