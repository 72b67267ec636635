"""NVIDIA's offline loop over a whole clip, with and without a system prompt."""

from typing import Any

import torch

from .. import transcript
from ..model import Oracle
from ..noise import NoiseTape, code_margins, margins_by_step
from ..recording import Tensors, margin
from ..settings import BOS, EOS

CLIP_SEED = 10  # added to the noise seed


def prompt_ids(oracle: Oracle) -> torch.Tensor:
    """``[1, P]``: BOS, the encoded prompt, EOS."""
    encoded = oracle.tokenizer.encode(oracle.settings.prompt_text, add_special_tokens=False).ids
    return torch.tensor([[BOS, *encoded, EOS]])


def record(oracle: Oracle, wav: torch.Tensor, prompted: bool) -> Tensors:
    """``e2e_plain`` or ``e2e_prompt`` of ``[1, samples]``.

    The timeline of NVIDIA's loop counts the prompt; its text is cut to the audio frames, its codes and audio are not.
    The speech decoder is not run at time 0, where the codes stay 0.
    """
    prompt = prompt_ids(oracle)
    options = {"prompt_tokens": prompt, "prompt_token_lens": torch.tensor([prompt.shape[1]])} if prompted else {}
    spoken: list[torch.Tensor] = []
    with NoiseTape(oracle.settings.noise_seed + CLIP_SEED) as tape, code_margins() as margins:
        result = run(oracle, wav, spoken, options)
    state = oracle.stt.streaming_inference.last_state
    logged = {key: torch.cat(values, 1) for key, values in state["log"].items()}
    codes = torch.cat(spoken, 1)
    encoded, encoded_len = oracle.encode(wav)
    tokens, frames = transcript.greedy(oracle.stt, encoded, encoded_len, oracle.settings.rnnt["max_symbols"])
    return {
        "wav": wav, "prompt_ids": prompt, "input_embeds": state["input_embeds"], **logged,
        "gen_text_timeline": state["gen_text"], "gen_function_timeline": state["gen_function"],
        "text_margin": margin(logged["text_logits"]), "function_margin": margin(logged["function_logits"]),
        "codes": torch.cat([torch.zeros_like(codes[:, :1]), codes], 1), "codes_from_t1": codes,
        "code_margin_from_t1": margins_by_step(margins, codes.shape[1]), **tape.tensors(),
        **{key: result[key] for key in ("tokens_text", "tokens_len", "audio", "audio_len")},
        "encoded": encoded, "encoded_len": encoded_len, "rnnt_tokens": tokens, "rnnt_frames": frames,
    }  # fmt: skip


def run(oracle: Oracle, wav: torch.Tensor, spoken: list[torch.Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """The loop itself; the codes of every speech step are appended to ``spoken``."""
    infer = oracle.tts.infer_codes_one_step

    def recorded(**inputs: Any) -> Any:
        codes, cache = infer(**inputs)
        spoken.append(codes.clone())
        return codes, cache

    oracle.tts.infer_codes_one_step = recorded
    try:
        return oracle.model.offline_inference(wav.clone(), torch.tensor([wav.shape[1]]), decode_audio=True, **options)
    finally:
        del oracle.tts.infer_codes_one_step
