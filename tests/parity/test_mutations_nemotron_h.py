"""Plausible wrong trunks: each loads, runs and has the right shape, and the goldens must tell it from the right one."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from voicechat_core.nn import mamba2, nemotron_h
from voicechat_core.nn.mamba2 import CausalConv1d, GatedRMSNorm, Mamba2Mixer
from voicechat_core.nn.nemotron_h import NemotronH

# Of the parity test; a mutation must miss it tenfold.
TOLERANCE = 1e-5

step_sizes, ssm_scan, attend, conv_step = mamba2.step_sizes, mamba2.ssm_scan, nemotron_h.attend, CausalConv1d.step
split = Mamba2Mixer.split


def error(found, expected):
    """Largest difference relative to the largest expected value."""
    assert found.shape == expected.shape
    return (mx.abs(found - expected).max() / mx.abs(expected).max()).item()


def clamped_step_sizes(dt, bias):
    return mx.maximum(step_sizes(dt, bias), 1e-3)


def norm_before_gate(self, y, gate):
    grouped = mx.unflatten(y, -1, (self._groups, -1))
    normal = mx.fast.rms_norm(grouped, None, self._eps).reshape(y.shape)
    return normal * self.weight * nn.silu(gate)


def one_norm_for_all_groups(self, y, gate):
    return mx.fast.rms_norm(y * nn.silu(gate), self.weight, self._eps)


def swapped_b_and_c(self, channels):
    x, b, c = split(self, channels)
    return x, c, b


def groups_interleaved(x, delta, a, b, c, state, **options):
    """Head h reads group h % G instead of h // (H / G)."""
    groups, heads = b.shape[2], x.shape[2]
    order = mx.arange(heads).reshape(-1, groups).T.flatten()
    y, state = ssm_scan(x[:, :, order], delta[:, :, order], a[order], b, c, state[:, order], **options)
    back = mx.argsort(order)
    return y[:, :, back], state[:, back]


def forgetful_chunks(x, delta, a, b, c, state):
    """Each chunk starts from nothing."""
    parts = [(x[:, at], delta[:, at], a, b[:, at], c[:, at], state) for at in (slice(0, 16), slice(16, None))]
    ys = [ssm_scan(*part)[0] for part in parts]
    return mx.concatenate(ys, axis=1), state


def reversed_taps(self, x, past):
    flipped = CausalConv1d(*self.weight.shape[:2])
    flipped.weight, flipped.bias = self.weight[:, ::-1], self.bias
    return conv_step(flipped, x, past)


def unscaled(queries, keys, values, scale):
    return attend(queries, keys, values, 1.0)


def scaled_by_hidden_per_head(queries, keys, values, scale):
    """The head size a config without ``head_dim`` would suggest."""
    return attend(queries, keys, values, (0.875 * queries.shape[-1]) ** -0.5)


def interleaved_kv_heads(queries, keys, values, scale):
    """Query head h reads key head h % Hk instead of h // (Hq / Hk)."""
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = (mx.tile(x, (1, repeats, 1, 1)) for x in (keys, values))
    return attend(queries, keys, values, scale)


def rotated(queries, keys, values, scale):
    """Rotary positions, which this attention does not have."""
    rope = {"dims": queries.shape[-1], "traditional": False, "base": 1e4, "scale": 1.0, "offset": 0}
    return attend(mx.fast.rope(queries, **rope), mx.fast.rope(keys, **rope), values, scale)


MUTATIONS = {
    "step sizes clamped at 0.001": (mamba2, "step_sizes", clamped_step_sizes),
    "step sizes without their bias": (mamba2, "step_sizes", lambda dt, bias: step_sizes(dt, mx.zeros_like(bias))),
    "norm before gate": (GatedRMSNorm, "__call__", norm_before_gate),
    "one norm for all groups": (GatedRMSNorm, "__call__", one_norm_for_all_groups),
    "B and C swapped": (Mamba2Mixer, "split", swapped_b_and_c),
    "B and C groups interleaved": (mamba2, "ssm_scan", groups_interleaved),
    "state lost between chunks": (mamba2, "ssm_scan", forgetful_chunks),
    "convolution taps reversed": (CausalConv1d, "step", reversed_taps),
    "attention without its scale": (nemotron_h, "attend", unscaled),
    "attention scaled by another head size": (nemotron_h, "attend", scaled_by_hidden_per_head),
    "key heads interleaved": (nemotron_h, "attend", interleaved_kv_heads),
    "rotary positions": (nemotron_h, "attend", rotated),
    "relu instead of its square": (nemotron_h, "relu2", lambda x: mx.maximum(x, 0)),
    "square without relu": (nemotron_h, "relu2", mx.square),
}


@pytest.fixture
def hidden(golden):
    """Our hidden of the golden embeddings, computed when called."""
    trunk = golden.fill(NemotronH(golden.config.text_config), "stt_model.llm.")
    return lambda: trunk(golden.stage("llm")["inputs_embeds"])


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_goldens_tell(name, golden, hidden, monkeypatch):
    expected = golden.stage("llm")["hidden"]
    assert error(hidden(), expected) <= TOLERANCE
    monkeypatch.setattr(*MUTATIONS[name])
    assert error(hidden(), expected) > 10 * TOLERANCE


def test_the_clamp_is_the_one_difference_of_the_clamped_goldens(golden, hidden, monkeypatch):
    """The stored variant with a clamp at 0.001 is ours with that clamp, and not ours without."""
    clamped = golden.stage("llm")["hidden_dtmin_0.001"]
    assert error(hidden(), clamped) > 10 * TOLERANCE
    monkeypatch.setattr(mamba2, "step_sizes", clamped_step_sizes)
    assert error(hidden(), clamped) <= TOLERANCE


def test_steps_tell_the_clamp_too(golden, monkeypatch):
    stage = golden.stage("llm")
    trunk = golden.fill(NemotronH(golden.config.text_config), "stt_model.llm.")
    monkeypatch.setattr(mamba2, "step_sizes", clamped_step_sizes)
    state, outputs = trunk.new_state(), []
    for t in range(stage["inputs_embeds"].shape[1]):
        y, state = trunk.step(stage["inputs_embeds"][:, t : t + 1], state)
        outputs.append(y)
    assert error(mx.concatenate(outputs, axis=1), stage["hidden_cached"]) > 10 * TOLERANCE
