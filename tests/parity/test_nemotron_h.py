"""The trunk and its two heads against PyTorch's, run as NVIDIA's GPU kernels run it: no clamp on the step sizes."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from voicechat_core.nn.nemotron_h import NemotronH

# float32 rounding through up to seven layers and a head, relative to the largest value: at most 1.4e-6 measured.
TOLERANCE = 1e-5

PREFIX = "stt_model.llm."


def error(found, expected):
    """Largest difference relative to the largest expected value."""
    assert found.shape == expected.shape
    return (mx.abs(found - expected).max() / mx.abs(expected).max()).item()


@pytest.fixture(scope="module")
def stage(golden):
    return golden.stage("llm")


@pytest.fixture(scope="module")
def trunk(golden):
    return golden.fill(NemotronH(golden.config.text_config), PREFIX)


def by_steps(trunk, x):
    state, outputs = trunk.new_state(), []
    for t in range(x.shape[1]):
        y, state = trunk.step(x[:, t : t + 1], state)
        outputs.append(y)
    return mx.concatenate(outputs, axis=1)


def test_parameters_are_those_of_the_checkpoint(golden, trunk):
    stored = {name.removeprefix(PREFIX) for name in golden.weights if name.startswith(PREFIX)}
    assert {name for name, _ in tree_flatten(trunk.parameters())} == stored


def test_every_layer(trunk, stage):
    outputs = trunk.layer_outputs(stage["inputs_embeds"])
    assert len(outputs) == sum(name.startswith("layer") for name in stage)
    for i, found in enumerate(outputs):
        assert error(found, stage[f"layer{i}"]) <= TOLERANCE, f"layer {i}"


def test_hidden(trunk, stage):
    assert error(trunk(stage["inputs_embeds"]), stage["hidden"]) <= TOLERANCE


@pytest.mark.parametrize("expected", ["hidden_cached", "hidden"])
def test_hidden_step_by_step(trunk, stage, expected):
    assert error(by_steps(trunk, stage["inputs_embeds"]), stage[expected]) <= TOLERANCE


@pytest.mark.parametrize(("head", "expected"), [("lm_head", "text_logits"), ("function_head", "function_logits")])
def test_both_heads(golden, trunk, stage, head, expected):
    hidden, logits = trunk(stage["inputs_embeds"]), stage[expected]
    linear = golden.fill(nn.Linear(hidden.shape[-1], logits.shape[-1], bias=False), f"stt_model.{head}.")
    found = linear(hidden)
    assert error(found, logits) <= TOLERANCE
    assert mx.array_equal(found.argmax(-1), logits.argmax(-1))
