"""EAR-TTS: the character encoder, the voice-prompt warm-up, and steps with recorded noise."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nemo.collections.speechlm2.modules.ear_tts_model as ear_tts_module
import torch

from .. import signals
from ..model import Oracle
from ..noise import NoiseTape, code_margins, margins_by_step
from ..recording import Tensors, outputs_of
from ..settings import BOS, EOS, PAD, SPEAKER

FEW_QUANTIZERS = 8
ISOLATED_SEED = 1  # added to the noise seed


def record(oracle: Oracle, text: torch.Tensor) -> Tensors:
    """``tts``: the steps of ``[steps]`` text ids."""
    model = oracle.tts.tts_model
    prompt = voice_prompt(oracle)
    tensors = embeddings(oracle) | {f"init_{key}": value for key, value in prompt.items()}
    tensors |= generation(oracle, model, text, prompt, oracle.tts.codec_silence_tokens)
    tensors["masked_step_hidden"] = fully_masked_step(model, prompt)
    return tensors | isolated_heads(oracle)


def record_few_quantizers(oracle: Oracle, text: torch.Tensor) -> Tensors:
    """``tts_q8``: the same weights with the first eight codebooks only.

    At 31 quantizers a fusion that divides by their number cannot be told from NVIDIA's, which divides by the
    literal 31; here it can.
    """
    whole = oracle.tts.tts_model
    config = copy.deepcopy(whole.config)
    config.num_quantizers = FEW_QUANTIZERS
    model = ear_tts_module.RVQEARTTSModel(config, tokenizer=oracle.tts.tokenizer).eval()
    model.set_rvq_embs(whole.rvq_embs[:FEW_QUANTIZERS])
    rest = {name: tensor for name, tensor in whole.state_dict().items() if name != "rvq_embs"}
    torch.nn.Module.load_state_dict(model, rest | {"rvq_embs": model.rvq_embs}, strict=True)
    prompt = voice_prompt(oracle)
    prompt["code"] = prompt["code"][..., :FEW_QUANTIZERS]
    silence = oracle.tts.codec_silence_tokens[:FEW_QUANTIZERS]
    tensors = {f"init_{key}": value for key, value in prompt.items()}
    return tensors | generation(oracle, model, text, prompt, silence)


def voice_prompt(oracle: Oracle) -> Tensors:
    """The inputs of the 37 warm-up positions, with the cached speaker."""
    oracle.tts.set_init_inputs(speaker_name=SPEAKER)
    return {key: value for key, value in oracle.tts.get_init_inputs(B=1).items() if value is not None}


def embeddings(oracle: Oracle) -> Tensors:
    """Character-aware embeddings of special, byte and merged tokens, all of them and with three masked."""
    vocabulary, embed = oracle.vocab_size, oracle.tts.tts_model.embed_subword
    ids = torch.tensor([[0, BOS, EOS, PAD, 11, 20, 100, 271, vocabulary - 1, vocabulary - 5, 280, 290]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 3:6] = False
    return {
        "subword_ids": ids, "subword_emb": embed(ids, torch.ones_like(mask)),
        "subword_mask2": mask, "subword_emb_mask2": embed(ids, mask),
    }  # fmt: skip


def generation(oracle: Oracle, model: Any, ids: torch.Tensor, prompt: Tensors, silence: torch.Tensor) -> Tensors:
    """Warm-up, then one step a text token, each fed the codes of the one before (silence at EOS)."""
    sampling = oracle.tts._get_generation_config(True)
    rows: dict[str, list[torch.Tensor]] = {"prev_codes": [], "hidden": [], "codes": []}
    with outputs_of({"fused": model.gated_fusion_audio_text}) as seen, mixture_outputs(model) as mixture:
        warm = warm_up(model, prompt)
        code, cache = prompt["code"][:, -1:], warm.past_key_values
        with NoiseTape(oracle.settings.noise_seed) as tape, code_margins() as margins:
            for token in ids:
                previous = silence.view(1, 1, -1) if token == EOS else code
                out = step(model, previous, token.view(1, 1), cache, generation_config=sampling)
                code, cache = out.codes, out.past_key_values
                for key, value in (("prev_codes", previous), ("hidden", out.hidden_states), ("codes", code)):
                    rows[key].append(value)
    fused = seen["fused"]
    passes = len(tape.uniform) // len(ids)
    per_pass = tape.tensors() | {key: torch.stack(values) for key, values in mixture.items()}
    return {
        "warmup_hidden": warm.hidden_states, "warmup_fused": fused[0],
        "warmup_input_code_embed": model.embed_code(model.depthsum_embedding(prompt["code"])),
        "step_ids": ids[None], "step_fused": torch.cat(fused[1:], 1),
        "step_code_margin": margins_by_step(margins, len(ids)),
        **{f"step_{key}": torch.cat(values, 1) for key, values in rows.items()},
        **{key: value.view(len(ids), passes, *value.shape[1:]) for key, value in per_pass.items()},
    }  # fmt: skip


def warm_up(model: Any, prompt: Tensors) -> Any:
    """The conditional and unconditional branch over the voice prompt, with an empty cache."""
    return model(**prompt, use_cache=True, past_key_values=None, guidance_enabled=True)


def step(model: Any, code: torch.Tensor, token: torch.Tensor, cache: Any, mask: bool = True, **options: Any) -> Any:
    """One position of both branches."""
    return model(
        code=code, subword_ids=token, subword_mask=torch.full_like(token, mask, dtype=torch.bool),
        past_key_values=cache, use_cache=True, guidance_enabled=True, ignore_eos_flag_stop=True, **options,
    )  # fmt: skip


@contextmanager
def mixture_outputs(model: Any) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Mean and log-deviation of every mixture the head infers while the block runs."""
    seen: dict[str, list[torch.Tensor]] = {"mog_mu": [], "mog_logs": []}
    infer = model.mog_head.infer

    def recorded(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mu, logs = infer(*args, **kwargs)
        seen["mog_mu"].append(mu.clone())
        seen["mog_logs"].append(logs.clone())
        return mu, logs

    model.mog_head.infer = recorded
    try:
        yield seen
    finally:
        del model.mog_head.infer


def fully_masked_step(model: Any, prompt: Tensors) -> torch.Tensor:
    """A first step whose mask is all False: NVIDIA skips the text embedding, flags and BOS included."""
    cache = warm_up(model, prompt).past_key_values
    return step(model, prompt["code"][:, -1:], torch.tensor([[BOS]]), cache, mask=False).hidden_states


def isolated_heads(oracle: Oracle) -> Tensors:
    """Codes as a function of given hidden states and noise, and residual quantization alone."""
    model, sizes, rng = oracle.tts.tts_model, oracle.settings.tts, oracle.settings.inputs_for("heads")
    hidden = signals.normal((2, 1, sizes["hidden_size"]), rng, scale=2)
    latent = signals.normal((1, 5, sizes["latent_size"]), rng)
    with NoiseTape(oracle.settings.noise_seed + ISOLATED_SEED) as tape:
        codes, _, _ = model.generate_step(hidden, ignore_eos_flag_stop=True, **oracle.tts._get_generation_config(True))
    depth = sizes["num_quantizers"]
    empty = torch.full((1, 5, depth), sizes["codebook_size"])
    quantized = ear_tts_module.depthsum_encoding_step(model.rvq_embs, latent, empty, 0, depth)
    noise = {f"iso_{key}": value for key, value in tape.tensors().items()}
    return {"iso_hidden": hidden, "iso_codes": codes, "rvq_z": latent, "rvq_codes": quantized, **noise}
