"""Plausible mistakes in the speech decoder, each put in on purpose: the goldens must notice every one."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.conftest import Golden
from tests.parity.ear_tts_stages import Case, head_errors, prompt_errors, step_errors, text_errors
from voicechat_core.nn import char_encoder, ear_tts, gemma, mog_head, sampler
from voicechat_core.nn.char_encoder import CharAwareSubwordEncoder
from voicechat_core.nn.char_table import CharTable
from voicechat_core.nn.ear_tts import EarTTS, GatedFusion
from voicechat_core.nn.gemma import Decoder
from voicechat_core.nn.mog_head import MogHead

# Ten times the parity tests' tolerance; one differing code is enough where integers are compared.
CLEARLY_WRONG = 1e-4
INTEGERS = {"step_codes", "iso_codes", "rvq_codes"}
STEPS = 16  # up to the EOS step

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def case(golden: Golden) -> Case:
    return Case(golden, "tts")


def inputs_errors(case: Case, tts: EarTTS) -> dict[str, float]:
    """Text conditioning and voice prompt."""
    return text_errors(case, tts) | prompt_errors(case, tts)


def noticed(errors: dict[str, float], *stages: str) -> bool:
    """Whether each of these stages is clearly wrong."""
    return all(errors[stage] >= (1 if stage in INTEGERS else CLEARLY_WRONG) for stage in stages)


# --- wrong constants: the config says something else ---


@pytest.mark.parametrize("name", ["score_scale", "one_rope_base", "swapped_rope_bases", "window_of_one_more"])
def test_wrong_attention(name: str, case: Case) -> None:
    config = case.golden.config.tts_config
    local, wide = config.rope_local_base_freq, config.rope_global_base_freq
    wrong: dict[str, dict[str, Any]] = {
        "score_scale": {"query_pre_attn_scalar": config.head_dim},
        "one_rope_base": {"rope_global_base_freq": local},
        "swapped_rope_bases": {"rope_global_base_freq": local, "rope_local_base_freq": wide},
        "window_of_one_more": {"sliding_window": config.sliding_window + 1},
    }
    tts = case.build(**wrong[name])
    assert noticed(
        inputs_errors(case, tts) | step_errors(case, tts, STEPS), "warmup_hidden", "masked_step_hidden", "step_hidden"
    )


# --- wrong functions ---


def scaled_inputs(patch: Patch) -> None:
    step = Decoder.step
    patch.setattr(Decoder, "step", lambda self, x, caches: step(self, x * x.shape[-1] ** 0.5, caches))


def plain_norm_weight(patch: Patch) -> None:
    patch.setattr(gemma, "one_plus", lambda weight: weight)


def erf_gelu(patch: Patch) -> None:
    patch.setattr(gemma, "gelu", nn.gelu)


def divided_after_projection(patch: Patch) -> None:
    patch.setattr(GatedFusion, "audio_branch", lambda self, audio: self.audio_proj(audio) / 31)


def flags_dropped_at_masked_positions(patch: Patch) -> None:
    call = CharAwareSubwordEncoder.__call__

    def wrong(self: CharAwareSubwordEncoder, ids: Any, mask: Any, chars: CharTable) -> mx.array:
        return mx.where(mx.array(mask)[..., None], call(self, ids, mask, chars), 0)

    patch.setattr(CharAwareSubwordEncoder, "__call__", wrong)


def no_soft_cap(patch: Patch) -> None:
    patch.setattr(char_encoder, "soft_cap", lambda scores, cap: scores)


@pytest.mark.parametrize(
    ("mutate", "stages"),
    [
        (scaled_inputs, ("warmup_hidden", "masked_step_hidden")),
        (plain_norm_weight, ("subword_emb", "warmup_fused", "warmup_hidden")),
        (erf_gelu, ("warmup_hidden", "masked_step_hidden")),
        (divided_after_projection, ("warmup_fused", "warmup_hidden")),
        (flags_dropped_at_masked_positions, ("subword_emb_mask2", "warmup_fused", "warmup_hidden")),
        (no_soft_cap, ("subword_emb",)),
    ],
)
def test_wrong_function(
    mutate: Callable[[Patch], None], stages: tuple[str, ...], case: Case, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    assert noticed(inputs_errors(case, case.build()), *stages)


@pytest.mark.parametrize(("stage", "told_apart"), [("tts", False), ("tts_q8", True)])
def test_divisor_of_the_number_of_quantizers(stage: str, told_apart: bool, golden: Golden, monkeypatch: Patch) -> None:
    """Only with another number of quantizers than 31 can the two divisors be told apart."""
    case = Case(golden, stage)
    monkeypatch.setattr(ear_tts, "AUDIO_DIVISOR", case.levels)
    tts = case.build()
    errors = prompt_errors(case, tts) | step_errors(case, tts, STEPS)
    assert noticed(errors, "warmup_fused", "warmup_hidden", "step_fused", "step_hidden") == told_apart


# --- the voice prompt ---


def test_pad_at_the_last_prompt_position(case: Case) -> None:
    tts, pad = case.build(), case.golden.config.pad_token_id
    errors = prompt_errors(case, tts, last_id=pad) | step_errors(case, tts, STEPS, last_id=pad)
    assert noticed(errors, "warmup_fused", "warmup_hidden", "step_hidden")


def test_no_bos_vector(case: Case) -> None:
    tts = case.build()
    tts.bos_emb = mx.zeros_like(tts.bos_emb)
    assert noticed(
        prompt_errors(case, tts) | step_errors(case, tts, STEPS), "warmup_fused", "warmup_hidden", "step_hidden"
    )


def test_flags_on_the_unconditional_row(case: Case, monkeypatch: Patch) -> None:
    def wrong(self: EarTTS, audio: mx.array, condition: mx.array) -> mx.array:
        ids = mx.full(condition.shape[:2], case.golden.config.pad_token_id)
        unconditional = self.embed_subword.with_flags(mx.broadcast_to(self.null_emb, condition.shape), ids)
        return self.gated_fusion_audio_text(audio, mx.concatenate([condition, unconditional]))

    monkeypatch.setattr(EarTTS, "fuse", wrong)
    assert noticed(prompt_errors(case, case.build()), "warmup_fused", "warmup_hidden")


def test_flags_although_nothing_is_spelt(case: Case, monkeypatch: Patch) -> None:
    call = CharAwareSubwordEncoder.__call__

    def wrong(self: CharAwareSubwordEncoder, ids: Any, mask: np.ndarray, chars: CharTable) -> mx.array:
        vectors = call(self, ids, mask, chars)
        return vectors if mask.any() else self.with_flags(vectors, mx.array(ids))

    monkeypatch.setattr(CharAwareSubwordEncoder, "__call__", wrong)
    assert noticed(text_errors(case, case.build()), "masked_step_hidden")


# --- the sampler ---


def guidance_on_logits_only(patch: Patch) -> None:
    def wrong(self: MogHead, x: mx.array, u: mx.array) -> tuple[mx.array, mx.array]:
        for layer in self.mlp_stack:
            x = layer(x)
        logits = mog_head.guide(self.proj_logits(x), self.guidance_scale)
        component = sampler.choose_component(logits, self.top_p, u)
        return self.gaussian(x[:1], component, *self.project(x[:1])[1:])

    patch.setattr(MogHead, "__call__", wrong)


def no_guidance(patch: Patch) -> None:
    patch.setattr(mog_head, "guide", lambda x, scale: x[:1])


def no_lower_bound(patch: Patch) -> None:
    gaussian = MogHead.gaussian

    def wrong(self: MogHead, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        self.min_log_std = -1e9
        return gaussian(self, *arrays)

    patch.setattr(MogHead, "gaussian", wrong)


def no_top_p(patch: Patch) -> None:
    patch.setattr(sampler, "top_p", lambda logits, p: logits)


def quantized_from_level_0(patch: Patch) -> None:
    right = sampler.quantize

    def wrong(latent: mx.array, _: Any, tables: mx.array, norms: mx.array, start: int, count: int) -> Any:
        codes, total = right(latent, None, tables, norms, 0, start + count)
        return codes[start:], total

    patch.setattr(ear_tts, "quantize", wrong)


def draw_taken_as_the_full_latent(patch: Patch) -> None:
    right = sampler.quantize

    def wrong(latent: mx.array, depth: mx.array | None, *rest: Any) -> Any:
        return right(latent if depth is None else latent - depth, depth, *rest)

    patch.setattr(ear_tts, "quantize", wrong)


@pytest.mark.parametrize(
    ("mutate", "stages"),
    [
        (guidance_on_logits_only, ("mog_mu", "mog_logs", "step_codes")),
        (no_guidance, ("mog_mu", "mog_logs", "step_codes")),
        (quantized_from_level_0, ("step_codes", "iso_codes")),
        (draw_taken_as_the_full_latent, ("step_codes", "iso_codes")),
        (no_lower_bound, ("mog_mu", "mog_logs")),
        (no_top_p, ("mog_mu", "step_codes")),
    ],
)
def test_wrong_sampler(
    mutate: Callable[[Patch], None], stages: tuple[str, ...], case: Case, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    tts = case.build()
    assert noticed(step_errors(case, tts, STEPS) | head_errors(case, tts), *stages)
