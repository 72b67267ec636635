"""The Nemotron-H trunk and its two heads, whole and one position at a time."""

import torch
from transformers import DynamicCache

from .. import signals
from ..model import Oracle, set_step_size_floor
from ..recording import Tensors, layers_of, outputs_of

WRONG_FLOOR = 0.001


def record(oracle: Oracle) -> Tensors:
    """``llm``. ``hidden_dtmin_0.001`` is what a floor under the step sizes gives: wrong, kept to be told apart."""
    stt, sizes = oracle.stt, oracle.settings
    shape = (1, sizes.inputs["llm_positions"], sizes.llm["hidden_size"])
    inputs = signals.normal(shape, sizes.inputs_for("llm"))
    with outputs_of(layers_of(stt.llm.layers)) as seen:
        answer = stt(inputs)
    tensors = {"inputs_embeds": inputs, **{key: outputs[0] for key, outputs in seen.items()}}
    tensors |= {key: answer[key] for key in ("hidden", "text_logits", "function_logits")}
    tensors["hidden_cached"] = step_by_step(stt.llm, inputs)
    set_step_size_floor(stt.llm, WRONG_FLOOR)
    tensors[f"hidden_dtmin_{WRONG_FLOOR}"] = stt(inputs)["hidden"]
    set_step_size_floor(stt.llm, 0.0)
    return tensors


def step_by_step(llm: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Final hidden states of one call a position, through the cache."""
    cache = DynamicCache(config=llm.config)
    steps = (llm(inputs_embeds=x, cache=cache, use_cache=True).last_hidden_state for x in inputs.split(1, dim=1))
    return torch.cat(list(steps), 1)
