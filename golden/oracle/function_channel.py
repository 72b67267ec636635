"""The function channel, which nemo_toolkit 3.0.0 does not have and the released checkpoint does.

A second head over the same hidden states chooses a function token greedily; the previous one is fed back through the
text embedding with a weight of its own. NVIDIA's later release-branch code does the same. The loop of 3.0.0 is reused
through ``super()``: this file adds the head, the feedback and the recording.
"""

from typing import Any

import torch
from nemo.collections.speechlm2.streaming.duplex_stt_inference import DuplexSTTStreamingInference

LOGGED = ("text_logits", "function_logits", "hidden")


def add_function_outputs(stt: Any) -> None:
    """Make ``stt(inputs)`` return the final hidden states and the function logits as well."""
    plain_forward = stt.forward

    def forward(input_embeds: torch.Tensor, cache: Any = None) -> dict[str, torch.Tensor]:
        seen: list[torch.Tensor] = []
        hook = stt.llm.norm_f.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        answer = plain_forward(input_embeds, cache=cache)
        hook.remove()
        return answer | {"hidden": seen[-1], "function_logits": stt.function_head(seen[-1])}

    stt.forward = forward


class FunctionChannelInference(DuplexSTTStreamingInference):
    """NVIDIA's offline loop with the second channel. ``last_state`` keeps the timeline of the last run."""

    last_state: dict[str, Any]

    @property
    def _weight(self) -> float:
        return self.model.cfg.duplex_function_channel_weight

    def _init_inference(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super()._init_inference(*args, **kwargs)
        state["gen_function"] = torch.full_like(state["gen_text"], self.model.text_pad_id)
        # what the base class adds at time 0 under the name of BOS is the embedding of PAD
        state["input_embeds"][:, 0] += self._weight * self.model._get_bos_embedding()
        state["log"] = {name: [] for name in LOGGED}
        self.last_state = state
        return state

    def _step_zero(self, inference_state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        answer, state = super()._step_zero(inference_state)
        self._keep(0, state, answer)
        return answer, state

    def _step_inference(self, t: int, inference_state: dict[str, Any], ans: Any) -> dict[str, torch.Tensor]:
        previous = self.model.embed_tokens(inference_state["gen_function"][:, t - 1])
        inference_state["input_embeds"][:, t] += self._weight * previous
        answer = super()._step_inference(t, inference_state, ans)
        self._keep(t, inference_state, answer)
        return answer

    def _keep(self, t: int, state: dict[str, Any], answer: dict[str, torch.Tensor]) -> None:
        """Log position ``t`` and store its function token, which over the prompt stays PAD."""
        for name in LOGGED:
            state["log"][name].append(answer[name][:, -1:].clone())
        chosen = answer["function_logits"][:, -1].argmax(-1)
        state["gen_function"][:, t] = torch.where(
            state["is_prompt_position_mask"][:, t], state["gen_function"][:, t], chosen
        )


def install(stt: Any) -> None:
    """Give the model its function channel. ``stt.function_head`` must exist."""
    add_function_outputs(stt)
    stt.streaming_inference = FunctionChannelInference(stt)
