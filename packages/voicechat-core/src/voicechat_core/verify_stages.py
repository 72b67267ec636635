"""How each stage of a goldens folder is computed here: golden inputs in, our tensors by golden name out.

Names are those that ``golden/generate.py`` writes. A stage says which of its tensors are inputs, and which are
NVIDIA's but no standard for us, with the reason.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import msgspec
import numpy as np

from voicechat_core.config import VoiceChatConfig
from voicechat_core.model import VoiceChatModel
from voicechat_core.nn import state as states
from voicechat_core.nn.ear_tts import Drawn, EarTTS, EarTtsState
from voicechat_core.nn.linear import matrices
from voicechat_core.nn.rnnt import greedy_decode
from voicechat_core.nn.sampler import Draws, quantize, square_norms
from voicechat_core.nn.subsampling import encoded_length
from voicechat_core.noise import RecordedNoise
from voicechat_core.offline import Timeline, run_timeline, speech
from voicechat_core.weights import named_parameters

__all__ = ["HIGHEST", "STAGES", "Stage", "Tensors"]

Tensors = dict[str, mx.array]

# The highest id of each kind that a stage can look up; the second of a pair stands for "none".
HIGHEST: dict[str, Callable[[VoiceChatConfig], int]] = {
    "text": lambda config: config.text_config.vocab_size - 1,
    "text or none": lambda config: config.text_config.vocab_size,
    "label": lambda config: config.rnnt_blank_id,
    "code": lambda config: config.codec_config.codebook_size - 1,
    "code or none": lambda config: config.codec_config.codebook_size,
}


@dataclass(frozen=True)
class Stage:
    """One kind of golden file. ``key`` names it in tolerances.toml; patterns match whole names."""

    key: str
    files: str
    run: Callable[[VoiceChatModel, Tensors], Tensors]
    inputs: tuple[str, ...]
    ids: dict[str, str] = field(default_factory=dict)  # integer inputs and their kind in ``HIGHEST``
    borrowed: dict[str, str] = field(default_factory=dict)  # inputs that stand in another golden file
    skipped: dict[str, str] = field(default_factory=dict)

    def reason_to_skip(self, name: str) -> str | None:
        """Why a tensor is not compared, or None."""
        return next((why for pattern, why in self.skipped.items() if re.fullmatch(pattern, name)), None)


def _int(*values: int) -> mx.array:
    return mx.array(values, dtype=mx.int32)


# ------------------------------------------------------------------------------------------ perception


def _perception(model: VoiceChatModel, t: Tensors) -> Tensors:
    perception = model.networks.stt_model.perception
    encoder, samples = perception.encoder, t["wav"]
    length = samples.shape[1] // perception.preprocessor.hop
    mel = perception.preprocessor(samples, mask_last=True)
    ours = {"mel": mel.swapaxes(1, 2), "mel_len": _int(length)}
    ours["pre_encode"] = encoder.pre_encode(mel, length)
    ours |= {f"layer{i}": x for i, x in enumerate(encoder.layer_outputs(mel, length))}
    heard = perception(samples, nvidia_edges=True)
    ours |= {"encoded": heard.encoded, "projected": heard.projected, "encoded_len": _int(encoded_length(length))}
    for name in t:
        if found := re.fullmatch(r"rnnt_(tokens|frames)_ms(\d+)", name):
            tokens, frames = _transcript(model, t["encoded"], t["encoded_len"], int(found[2]))
            ours[name] = tokens if found[1] == "tokens" else frames
    return ours


def _transcript(model: VoiceChatModel, encoded: mx.array, length: mx.array, symbols: int) -> tuple[mx.array, mx.array]:
    stt = model.networks.stt_model
    valid = encoded[:, : int(np.array(length)[0])]
    tokens, frames = greedy_decode(stt.rnnt_decoder, stt.rnnt_joint, valid, symbols)
    return _int(*tokens), _int(*frames)


def _rnnt(model: VoiceChatModel, t: Tensors) -> Tensors:
    stt = model.networks.stt_model
    predicted, (h, c) = stt.rnnt_decoder(t["targets"])
    frames = t["joint_logprobs"].shape[1]
    logits = stt.rnnt_joint(t["encoded"][:, :frames], predicted)
    return {
        "predictor": predicted,
        "state_h": h,
        "state_c": c,
        "joint_logprobs": logits - mx.logsumexp(logits, axis=-1, keepdims=True),
    }


# -------------------------------------------------------------------------------------------- language


def _llm(model: VoiceChatModel, t: Tensors) -> Tensors:
    stt, inputs = model.networks.stt_model, t["inputs_embeds"]
    hidden = stt.llm(inputs)
    state, steps = stt.llm.new_state(1), []
    for position in range(inputs.shape[1]):
        step, state = stt.llm.step(inputs[:, position : position + 1], state)
        steps.append(step)
    layers = {f"layer{i}": x for i, x in enumerate(stt.llm.layer_outputs(inputs))}
    unclamped = {name: hidden for name in t if name == "hidden_dtmin_0.0"}
    return (
        layers
        | unclamped
        | {
            "hidden": hidden,
            "text_logits": stt.lm_head(hidden),
            "function_logits": stt.function_head(hidden),
            "hidden_cached": mx.concatenate(steps, axis=1),
        }
    )


# ----------------------------------------------------------------------------------------------- codec


def _codec(model: VoiceChatModel, t: Tensors) -> Tensors:
    codec = model.networks.tts_model.audio_codec
    codes, frame = t["decode_codes"], codec.frame_samples
    latents = codec.encode(t["wav"][:, 0])
    zeros = mx.zeros((1, t["silence_codes_38"].shape[1] * frame))
    state, parts = codec.new_state(), []
    for index in range(codes.shape[1]):
        samples, state = codec.step(codes[:, index : index + 1], state)
        parts.append(samples)
    streamed = mx.concatenate(parts, axis=1)[:, None]
    return {
        "latents": latents,
        "codes": codec.quantize(latents),
        "code_margin": _code_margins(codec.prvq.mus_list, latents),
        "dequantized": codec.dequantize(codes),
        "decoded": codec.decode(codes)[:, None],
        "decoded_len": _int(codes.shape[1] * frame),
        "stream_decoded": streamed,
        "stream_decoded_flush": mx.concatenate([streamed, codec.flush(state)[:, None]], axis=2),
        "silence_codes_38": codec.quantize(codec.encode(zeros)),
        "codec_silence_tokens": codec.silence_codes(),
    }


def _code_margins(tables: Sequence[mx.array] | mx.array, latents: mx.array) -> mx.array:
    """At each level ``[K, L]`` how much nearer the nearest vector is than the next: ``[B, T, levels]``."""
    residual, margins = latents, []
    for vectors in (table.astype(mx.float32) for table in tables):
        nearness = 2 * (residual @ vectors.T) - mx.square(vectors).sum(axis=-1)
        margins.append(_margin(nearness))
        residual = residual - vectors[mx.argmax(nearness, axis=-1)]
    return mx.stack(margins, axis=-1)


# -------------------------------------------------------------------------------------- speech decoder


def _as_nvidia_runs_it(model: VoiceChatModel, levels: int) -> EarTTS:
    """The model's decoder with its first ``levels`` quantizers, and both rows of the guidance pair.

    With guidance off the second row counts for nothing and we do not run it; NVIDIA does, and goldens hold it. A
    guidance of 1e-30 is none in float32.
    """
    full = model.networks.tts_model.tts_model
    guidance = model.config.tts_config.guidance_scale or 1e-30
    config = msgspec.structs.replace(model.config.tts_config, num_quantizers=levels, guidance_scale=guidance)
    tts = EarTTS(config, model.config.text_config.vocab_size)
    for path, matrix in matrices(full).items():
        if matrix.quantization is not None:
            copy = matrices(tts)[path]
            copy.make_packed(matrix.quantization)
            copy.round_to(matrix.dtype)
    tts.load_weights(named_parameters(full), strict=False)
    tts.rvq_embs = full.rvq_embs[:levels]
    return tts


def _tts(model: VoiceChatModel, t: Tensors) -> Tensors:
    tts = _as_nvidia_runs_it(model, model.config.tts_config.num_quantizers)
    silence = model.networks.tts_model.codec_silence_tokens
    draws = RecordedNoise(t["iso_noise_u"], t["iso_noise_z"], model.config.tts_config).frame(0, 0)
    return _speech_decoder(model, tts, silence, t) | {
        "iso_codes": tts.sample(t["iso_hidden"], draws),
        "rvq_codes": _rvq_codes(tts, t["rvq_z"]),
    }


def _speech_decoder(model: VoiceChatModel, tts: EarTTS, silence: mx.array, t: Tensors) -> Tensors:
    """Conditioning, voice prompt, and the steps with NVIDIA's previous codes and draws."""
    config, chars = model.config, model.chars
    latents = model.networks.tts_model.audio_prompt_latents[config.speaker]
    prompt = tts.prompt_inputs(latents, silence, config.pad_token_id, config.eos_token_id, chars)
    hidden, warm = tts.advance(prompt.audio, prompt.condition, tts.new_state())
    masked = tts.embed_subword(np.array([[config.bos_token_id]]), np.zeros((1, 1), bool), chars)
    nothing = mx.full((1, 1, tts.config.num_quantizers), tts.config.codebook_size, dtype=mx.int32)
    ours = {
        "init_subword_ids": _int(*[config.pad_token_id] * (latents.shape[1] - 1), config.eos_token_id)[None],
        "init_subword_mask": _int(*[0] * (latents.shape[1] - 2), 1, 1)[None],
        "init_audio_prompt_lantent": latents,
        "warmup_input_code_embed": tts.embed_codes(t["init_code"]),
        "warmup_fused": tts.fuse(prompt.audio, prompt.condition),
        "warmup_hidden": hidden,
        "masked_step_hidden": tts.advance(tts.embed_codes(nothing), masked, states.copy(warm))[0],
    }
    for name, mask in (("subword_emb", None), ("subword_emb_mask2", "subword_mask2")):
        if name in t:
            ours[name] = _conditions(model, tts, t["subword_ids"], None if mask is None else t[mask])
    return ours | _speech_steps(model, tts, warm, t)


def _conditions(model: VoiceChatModel, tts: EarTTS, ids: mx.array, mask: mx.array | None = None) -> mx.array:
    host = np.array(ids)
    return tts.embed_subword(host, np.ones(host.shape, bool) if mask is None else np.array(mask) != 0, model.chars)


def _speech_steps(model: VoiceChatModel, tts: EarTTS, state: EarTtsState, t: Tensors) -> Tensors:
    noise = RecordedNoise(t["noise_u"], t["noise_z"], tts.config)
    conditions, before = _conditions(model, tts, t["step_ids"]), t["step_prev_codes"]
    steps: dict[str, list[mx.array]] = {}
    for index in range(t["step_ids"].shape[1]):
        audio, condition = tts.embed_codes(before[:, index : index + 1]), conditions[:, index : index + 1]
        hidden, state = tts.advance(audio, condition, state)
        draws = noise.frame(index, index)
        # From NVIDIA's hidden state, which ours is compared with: else its rounding alone could tip a code.
        drawn = tts.draw(t["step_hidden"][:, index : index + 1], draws)
        results = {
            "step_fused": tts.fuse(audio, condition),
            "step_hidden": hidden,
            "step_codes": drawn.codes,
            "step_code_margin": _drawn_margins(tts, drawn, draws),
            "mog_mu": mx.stack(drawn.means),
            "mog_logs": mx.stack(drawn.log_stds),
        }
        mx.eval(results)
        for name, value in results.items():
            steps.setdefault(name, []).append(value)
    # The mixture's tensors are [steps, passes, ...], the others have the steps as their time axis.
    return {n: mx.stack(v) if n.startswith("mog_") else mx.concatenate(v, axis=1) for n, v in steps.items()}


def _drawn_margins(tts: EarTTS, drawn: Drawn, draws: Draws) -> mx.array:
    """The margins ``[1, 1, Q]`` of one step's codes: each pass quantizes its own latent with its own levels."""
    margins, tables = [], tts.rvq_embs.astype(mx.float32)
    passes = zip(tts.passes, drawn.means, drawn.log_stds, draws[1], strict=True)
    for (start, count), mean, log_std, normals in passes:
        latent = mean + mx.exp(log_std) * normals * tts.config.noise_scale
        margins.append(_code_margins(tables[start : start + count], latent))
    return mx.concatenate(margins, axis=-1)


def _rvq_codes(tts: EarTTS, latents: mx.array) -> mx.array:
    tables = tts.rvq_embs.astype(mx.float32)
    levels, _ = quantize(latents, mx.zeros_like(latents), tables, square_norms(tables), 0, tables.shape[0])
    return mx.stack(levels, axis=-1).astype(mx.int32)


def _tts_first_levels(model: VoiceChatModel, t: Tensors) -> Tensors:
    """The same weights with fewer quantizers: what shows that the fusion divides by 31 whatever their number."""
    levels = t["step_prev_codes"].shape[-1]
    tts = _as_nvidia_runs_it(model, levels)
    return _speech_decoder(model, tts, model.networks.tts_model.codec_silence_tokens[:levels], t)


# ------------------------------------------------------------------------------------------ end to end


def _end_to_end(model: VoiceChatModel, t: Tensors) -> Tensors:
    """NVIDIA's offline run: with its edges, its draws, and its sound of the prompt span too."""
    samples = np.array(t["wav"][0])
    prompt_ids = [int(i) for i in np.array(t["prompt_ids"][0])]
    heard = model.networks.stt_model.perception(t["wav"], nvidia_edges=True).encoded
    if t["gen_text_timeline"].shape[1] == heard.shape[1]:
        prompt_ids = []  # a run without a prompt stores the ids all the same
    noise = RecordedNoise(t["noise_u"], t["noise_z"], model.config.tts_config)
    timeline = run_timeline(model, samples, prompt_ids, noise, nvidia_edges=True, keep_logits=True)
    valid = encoded_length(len(samples) // model.config.audio_config.preprocessor.hop_samples)
    ours = _ids(timeline, len(prompt_ids), valid)
    codes = timeline.over_all("codes")
    audio = mx.array(speech(model, codes))[None]
    logits = {"text": timeline.over_all("text_logits"), "function": timeline.over_all("function_logits")}
    for channel, values in logits.items():
        ours |= {f"{channel}_logits": values, f"{channel}_margin": _margin(values)}
    symbols = model.config.audio_config.max_symbols
    ours["rnnt_tokens"], ours["rnnt_frames"] = _transcript(model, heard, _int(valid), symbols)
    return ours | {
        "encoded": heard,
        "encoded_len": _int(valid),
        "input_embeds": timeline.over_all("inputs"),
        "hidden": timeline.over_all("hidden"),
        "codes": codes,
        "codes_from_t1": codes[:, 1:],
        "audio": audio,
        "audio_len": _int(audio.shape[1]),
    }


def _ids(timeline: Timeline, prompt_length: int, valid_frames: int) -> Tensors:
    """Both channels. NVIDIA trims a prompted run to its valid frames and leaves zeros in the padded ones."""
    text = timeline.over_all("text")
    trimmed = text[:, prompt_length:]
    if prompt_length:
        trimmed = mx.where(mx.arange(trimmed.shape[1]) < valid_frames, trimmed, 0)
    return {
        "gen_text_timeline": text,
        "gen_function_timeline": timeline.over_all("function"),
        "tokens_text": trimmed,
        "tokens_len": _int(valid_frames),
    }


def _margin(logits: mx.array) -> mx.array:
    """How far the best is ahead of the second best."""
    top = mx.sort(logits, axis=-1)[..., -2:]
    return top[..., 1] - top[..., 0]


STREAM = "NVIDIA's cached stream pads its second step with zero mel frames and so differs from its own offline encoder"
CLAMP = "with the step sizes clamped as the transformers fallback does; the model's own code does not clamp"
MASKS = "masks of the training code without a counterpart here"
MARGIN = "how far NVIDIA's codes are from a tie: said where one of ours differs"

STEP_IDS = {"step_ids": "text or none", "init_code": "code or none", "step_prev_codes": "code or none"}

STAGES = (
    Stage(
        key="perception",
        files="perception_.*",
        run=_perception,
        inputs=("wav",),
        skipped={"stream_.*|cache_last_.*": STREAM},
    ),
    Stage(
        key="rnnt",
        files="rnnt",
        run=_rnnt,
        inputs=("targets",),
        ids={"targets": "label"},
        borrowed={"encoded": "perception_exact"},
    ),
    Stage(key="llm", files="llm", run=_llm, inputs=("inputs_embeds",), skipped={r"hidden_dtmin_(?!0\.0$).*": CLAMP}),
    Stage(key="codec", files="codec", run=_codec, inputs=("wav", "decode_codes"), ids={"decode_codes": "code"}),
    Stage(
        key="tts",
        files="tts",
        run=_tts,
        inputs=(
            "subword_ids", "subword_mask2", "init_code", "step_ids", "step_prev_codes", "noise_u", "noise_z",
            "iso_hidden", "iso_noise_u", "iso_noise_z", "rvq_z", "step_hidden",
        ),
        ids={"subword_ids": "text or none", **STEP_IDS},
        skipped={"init_audio_mask|init_non_prompt_mask": MASKS},
    ),
    Stage(
        key="tts",
        files="tts_q[0-9]+",
        run=_tts_first_levels,
        inputs=("init_code", "step_ids", "step_prev_codes", "noise_u", "noise_z", "step_hidden"),
        ids=STEP_IDS,
        skipped={"init_audio_mask|init_non_prompt_mask": MASKS},
    ),
    Stage(
        key="e2e",
        files="e2e_.*",
        run=_end_to_end,
        inputs=("wav", "prompt_ids", "noise_u", "noise_z", "gen_text_timeline"),
        ids={"prompt_ids": "text"},
        skipped={"code_margin_from_t1": MARGIN},
    ),
)  # fmt: skip
