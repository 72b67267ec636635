"""The trunk: its layers, its state over long utterances, and attention without positions."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map

from voicechat_core.config import TextConfig
from voicechat_core.nn import nemotron_h
from voicechat_core.nn import state as states
from voicechat_core.nn.kv_cache import BLOCK, KVCache
from voicechat_core.nn.mamba2 import MambaState
from voicechat_core.nn.nemotron_h import MLP, Attention, NemotronH, RMSNorm, attend, relu2

# One position and many take different kernels; float32 through five layers, relative to the largest: 7e-7 measured.
STEP_TOLERANCE = 5e-6
# float32 softmax and sums over a few hundred keys against float64: 3e-7 measured.
ATTENTION_TOLERANCE = 2e-6

CONFIG = TextConfig(
    hidden_size=32, intermediate_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
    mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=8, n_groups=2, hybrid_override_pattern="M-*M*",
)  # fmt: skip


def error(found, expected):
    """Largest difference relative to the largest expected value."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


def randomised(module, seed=0):
    mx.random.seed(seed)
    module.update(tree_map(lambda p: 0.3 * mx.random.normal(p.shape), module.parameters()))
    return module


def embeddings(n, batch=1):
    return mx.random.normal((batch, n, CONFIG.hidden_size))


def by_steps(module, x, size=1):
    """Outputs of ``module`` fed ``size`` positions at a time, and the last state."""
    state, outputs = module.new_state(x.shape[0]), []
    for start in range(0, x.shape[1], size):
        y, state = module.step(x[:, start : start + size], state)
        mx.eval(y)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1), state


def softmax_attention(q, k, v, scale):
    """Causal attention, one query head at a time, in float64."""
    q, k, v = (np.array(x, np.float64) for x in (q, k, v))
    (_, heads, n, _), m = q.shape, k.shape[2]
    y = np.zeros_like(q)
    for h in range(heads):
        kv = h // (heads // k.shape[1])
        for i in range(n):
            seen = m - n + i + 1
            scores = np.einsum("bd,bjd->bj", q[:, h, i], k[:, kv, :seen]) * scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            y[:, h, i] = np.einsum("bj,bjd->bd", weights / weights.sum(-1, keepdims=True), v[:, kv, :seen])
    return y


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (5, 5), (4, 9), (13, 13), (11, 30)])
def test_attention_is_its_definition(n, m, monkeypatch):
    monkeypatch.setattr(nemotron_h, "QUERY_BLOCK", 5)  # so that 11 and 13 queries take several, the last ragged
    mx.random.seed(n + m)
    q, k, v = (mx.random.normal((2, heads, length, 4)) for heads, length in ((6, n), (2, m), (2, m)))
    assert error(attend(q, k, v, 0.5), softmax_attention(q, k, v, 0.5)) <= ATTENTION_TOLERANCE


def test_attention_has_no_positions():
    attention = randomised(Attention(CONFIG))
    x = embeddings(12)
    order = mx.array([0, 1, 7, 3, 4, 5, 6, 2, 8, 9, 10, 11])
    plain, swapped = attention(x), attention(x[:, order])
    assert error(swapped[:, 8:], plain[:, 8:]) <= ATTENTION_TOLERANCE
    assert error(swapped[:, 2:8], plain[:, 2:8]) > 0.01  # those in between have seen other keys


def test_what_comes_later_changes_nothing():
    model = randomised(NemotronH(CONFIG))
    x = embeddings(20)
    other = mx.concatenate([x[:, :11], embeddings(9)], axis=1)
    assert error(model(other)[:, :11], model(x)[:, :11]) <= STEP_TOLERANCE
    assert error(model(other)[:, 11:], model(x)[:, 11:]) > 0.01


def test_relu2_is_zero_below_zero():
    assert relu2(mx.array([-3.0, 0.0, 0.5, 3.0])).tolist() == [0.0, 0.0, 0.25, 9.0]


def test_the_mlp_has_no_gate():
    mlp = randomised(MLP(CONFIG))
    x = embeddings(3)
    up, down = (np.array(layer.weight, np.float64) for layer in (mlp.up_proj, mlp.down_proj))
    hidden = np.maximum(np.array(x, np.float64) @ up.T, 0)
    assert error(mlp(x), hidden**2 @ down.T) <= 1e-6


def test_rms_norm_keeps_the_dtype_of_its_input():
    norm = RMSNorm(4, 1e-5)
    norm.weight = mx.array([1.0, 2.0, 3.0, 4.0])
    y = norm(mx.array([[100.0, -100.0, 100.0, -100.0]], mx.bfloat16))
    assert y.dtype == mx.bfloat16
    assert y.tolist() == [[1.0, -2.0, 3.0, -4.0]]


def test_rms_norm_adds_its_epsilon_to_the_mean_square():
    x = mx.full((1, 4), 1e-3)
    assert RMSNorm(4, 1e-5)(x)[0, 0].item() == pytest.approx(1e-3 / np.sqrt(1e-6 + 1e-5), rel=1e-5)


def test_the_pattern_names_the_layers():
    model = NemotronH(CONFIG)
    kinds = [type(state) for state in model.new_state().layers]
    assert kinds == [MambaState, type(None), KVCache, MambaState, KVCache]


def test_the_published_model_has_its_published_size():
    shapes = {name: array.shape for name, array in tree_flatten(NemotronH(TextConfig()).parameters())}
    assert len(shapes) == 339
    assert sum(np.prod(shape) for shape in shapes.values()) == 7_713_822_208
    assert shapes["layers.0.mixer.in_proj.weight"] == (22656, 4480)
    assert shapes["layers.1.mixer.up_proj.weight"] == (15680, 4480)
    assert [i for i in range(56) if f"layers.{i}.mixer.q_proj.weight" in shapes] == [14, 21, 30, 39]


def test_layer_outputs_end_in_the_hidden():
    model = randomised(NemotronH(CONFIG))
    x = embeddings(5)
    outputs = model.layer_outputs(x)
    assert len(outputs) == 5
    assert mx.array_equal(model.norm_f(outputs[-1]), model(x))


@pytest.mark.parametrize("size", [1, 7])
def test_an_utterance_by_steps_is_the_sequence(size):
    """Longer than a K/V block and than several chunks of the scan."""
    model = randomised(NemotronH(CONFIG))
    x = embeddings(BLOCK + 45)
    found, state = by_steps(model, x, size)
    assert error(found, model(x)) <= STEP_TOLERANCE
    assert state.layers[2].position == BLOCK + 45


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 40), st.data())
def test_a_prefill_may_be_split_anywhere(n, data):
    at = data.draw(st.integers(1, n - 1))
    model = randomised(NemotronH(CONFIG))
    x = embeddings(n)
    first, state = model.step(x[:, :at], model.new_state())
    second, _ = model.step(x[:, at:], state)
    assert error(mx.concatenate([first, second], axis=1), model(x)) <= STEP_TOLERANCE


def test_a_copied_state_may_be_continued_twice():
    model = randomised(NemotronH(CONFIG))
    _, state = model.step(embeddings(9), model.new_state())
    fork = states.copy(state)
    x, other = embeddings(1), embeddings(1)
    for _ in range(3):
        expected, state = model.step(x, state)
    model.step(other, states.copy(fork))
    for _ in range(3):
        found, fork = model.step(x, fork)
    assert mx.array_equal(found, expected)


def test_rows_of_a_batch_do_not_meet():
    model = randomised(NemotronH(CONFIG))
    x = embeddings(9, batch=2)
    together, _ = by_steps(model, x)
    assert error(together, mx.concatenate([model(row) for row in mx.split(x, 2)])) <= STEP_TOLERANCE


@pytest.mark.parametrize("n", [1, 9])
def test_half_precision_passes_through(n):
    model = randomised(NemotronH(CONFIG))
    x = embeddings(n)
    exact = model(x)
    model.update(tree_map(lambda p: p.astype(mx.bfloat16), model.parameters()))
    y, state = model.step(x.astype(mx.bfloat16), model.new_state())
    dtypes = {name: array.dtype for name, array in states.arrays(state)}
    assert y.dtype == mx.bfloat16
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("ssm")} == {mx.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("ssm")} == {mx.float32}
    assert error(y.astype(mx.float32), exact) < 0.1  # eight bits through five layers


def test_memory_does_not_grow_with_the_square_of_the_length():
    config = TextConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        mamba_num_heads=1, mamba_head_dim=8, ssm_state_size=8, n_groups=1, hybrid_override_pattern="M-*",
    )  # fmt: skip
    model, n = randomised(NemotronH(config)), 4096
    x = mx.random.normal((1, n, 8))
    mx.eval(model.parameters(), x)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(model(x))
    assert mx.get_peak_memory() - before < 4 * n * n  # the scores of one head, at once


def test_a_step_leaves_memory_as_it_was():
    model = randomised(NemotronH(CONFIG))
    x = embeddings(1)
    y, state = by_steps(model, embeddings(10))
    states.evaluate(state)
    mx.eval(x)
    del y
    before = mx.get_active_memory()
    for _ in range(50):
        y, state = model.step(x, state)
        mx.eval(y)
        states.evaluate(state)
    del y
    assert mx.get_active_memory() <= before + 2**12
