"""The training-side configuration NVIDIA's ``NemotronVoiceChat`` is constructed from.

Every key that shapes the network has the released value, except what the settings hold: the sizes, and of a stored
checkpoint all that its config.json says.
"""

from math import prod
from typing import Any

from .settings import (
    AUDIO_PROMPT_SECONDS,
    CODEC_CHANNEL_MULT,
    CODEC_HOP,
    CODEC_RATES,
    FRAME_SECONDS,
    SOURCE_RATE_HZ,
    SPEAKER,
    TARGET_RATE_HZ,
    Settings,
)

BACKBONE_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "sliding_window",
)  # fmt: skip
# What a checkpoint's config.json may say beyond the sizes, and what transformers calls it.
BACKBONE_SHAPE = {
    "sliding_window_pattern": "sliding_window_pattern", "rms_norm_eps": "rms_norm_eps",
    "query_pre_attn_scalar": "query_pre_attn_scalar", "rope_global_base_freq": "rope_theta",
    "rope_local_base_freq": "rope_local_base_freq",
}  # fmt: skip
CHARACTER_NAMES = {"rope_base": "rope_theta"}


def preprocessor(settings: Settings) -> dict[str, Any]:
    """The log-mel front end. Dither acts in training only."""
    return {
        "sample_rate": SOURCE_RATE_HZ, "normalize": "NA", "window_size": 0.025, "window_stride": 0.01, "window": "hann",
        "features": 128, "n_fft": 512, "log": True, "frame_splicing": 1, "dither": 1e-5, "pad_to": 0, "pad_value": 0.0,
        **settings.preprocessor,
    }  # fmt: skip


def encoder(settings: Settings) -> dict[str, Any]:
    """The FastConformer. Dropouts act in training only."""
    return {
        "feat_in": 128, "feat_out": -1, "use_bias": False,
        "subsampling": "dw_striding", "subsampling_factor": 8, "causal_downsampling": True,
        "reduction": None, "reduction_position": None, "reduction_factor": 1, "ff_expansion_factor": 4,
        "self_attention_model": "rel_pos", "att_context_size": [70, 0], "att_context_style": "chunked_limited",
        "xscaling": False, "untie_biases": True, "pos_emb_max_len": 5000,
        "conv_kernel_size": 9, "conv_norm_type": "layer_norm", "conv_context_size": "causal",
        "dropout": 0.1, "dropout_pre_encoder": 0.1, "dropout_emb": 0.0, "dropout_att": 0.1,
        "stochastic_depth_drop_prob": 0.0, "stochastic_depth_mode": "linear", "stochastic_depth_start_layer": 1,
        **settings.encoder,
    }  # fmt: skip


def codec(settings: Settings) -> dict[str, Any]:
    """The RVQ-VAE: 441 spectral columns of 4 samples under one 80 ms frame."""
    tts = settings.tts
    shape = {
        "latent_size": tts["latent_size"], "groups": 1, "codebook_size": tts["codebook_size"],
        "num_quantizers": tts["num_quantizers"], "channel_mult": list(CODEC_CHANNEL_MULT), "rates": list(CODEC_RATES),
        "kernel_size": 7, "n_fft": 16, "hop_length": CODEC_HOP, **settings.codec,
    }  # fmt: skip
    return shape | {"wav_to_token_ratio": prod(shape["rates"]) * shape["hop_length"]}


def backbone(tts: dict[str, Any]) -> dict[str, Any]:
    """The speech decoder's Gemma 3."""
    shape = {theirs: tts[ours] for ours, theirs in BACKBONE_SHAPE.items() if ours in tts}
    sizes = {key: tts[key] for key in BACKBONE_KEYS}
    return sizes | shape | {"vocab_size": 8, "attention_dropout": 0.1, "use_cache": False}


def characters(settings: Settings) -> dict[str, Any]:
    """The character encoder's T5Gemma; the size of its table follows from the tokenizer."""
    own = {CHARACTER_NAMES.get(key, key): value for key, value in settings.character_encoder.items()}
    return {"hidden_size": settings.tts["hidden_size"], "vocab_size": 8, **own}


def ear_tts(settings: Settings) -> dict[str, Any]:
    """The speech decoder: Gemma 3 backbone, T5Gemma character encoder, mixture-of-Gaussians head."""
    tts, encoder = settings.tts, characters(settings)
    released = {
        "use_audio_prompt_frozen_projection": True, "use_gated_fusion_for_text_audio": True,
        "disable_eos_prediction": True, "use_bos_eos_emb": True, "use_subword_flag_emb": True,
        "num_delay_speech_tokens": 2, "random_target_masking": False, "exponent": 3.0,
        "p_uncond": 0.1, "label_smoothing": 0.01, "max_training_rate": 0.8, "quantizer_dropout": 0.5,
        "context_hidden_size": None, "latent_size": tts["latent_size"], "codebook_size": tts["codebook_size"],
        "num_quantizers": tts["num_quantizers"],
        "backbone_type": "gemma3_text", "backbone_model_class": None, "backbone_config_class": None,
        "backbone_config": backbone(tts),
        "cas_config": {
            "backbone_type": "t5gemma", "backbone_model_class": None, "backbone_config_class": None,
            "backbone_config": {
                "is_encoder_decoder": False,
                "encoder": {"use_cache": False, "attention_dropout": 0.1, **encoder},
                "decoder": encoder,
            },
        },
        "mog_head_config": {"eps": 1e-6, **settings.mog_head},
    }  # fmt: skip
    return {key: tts.get(key, value) for key, value in released.items()}


def whole(settings: Settings, roles: dict[str, str], llm_folder: str, log_folder: str) -> dict[str, Any]:
    """The configuration of the whole model. ``llm_folder`` must contain "Nemotron": NeMo switches on the name."""
    text_tokens = {role: token for role, token in roles.items() if role != "unk_token"}
    logs = {"explicit_log_dir": log_folder}
    rates = {
        "frame_length": FRAME_SECONDS,
        "source_sample_rate": SOURCE_RATE_HZ,
        "target_sample_rate": TARGET_RATE_HZ,
    }
    speech = {
        "model": _speech_model(settings, llm_folder, text_tokens),
        "data": {"audio_prompt_duration": AUDIO_PROMPT_SECONDS, **rates},
        "exp_manager": logs,
    }
    stt = {"model": _stt_model(settings, llm_folder, text_tokens, log_folder)}
    model = {"scoring_asr": "none", "inference_speaker_name": SPEAKER, "stt": stt, "speech_generation": speech}
    return {"model": model, "data": rates, "exp_manager": logs}


def _stt_model(settings: Settings, llm_folder: str, tokens: dict[str, str], log_folder: str) -> dict[str, Any]:
    asr = "nemo.collections.asr.modules"
    connector = "nemo.collections.speechlm2.modules.perception.IdentityConnector"
    return {
        "pretrained_llm": llm_folder, "pretrained_weights": False, "trust_remote_code": False,
        # the names transformers' own Nemotron-H gives these two
        "llm_attr_name": "model", "embed_tokens_attr_name": "embeddings",
        "predict_user_text": False, "duplex_function_channel_weight": settings.function_channel_weight,
        "source_sample_rate": SOURCE_RATE_HZ, "validation_save_path": log_folder, **tokens,
        "perception": {
            "preprocessor": {"_target_": f"{asr}.AudioToMelSpectrogramPreprocessor", **preprocessor(settings)},
            "encoder": {"_target_": f"{asr}.ConformerEncoder", **encoder(settings)},
            "modality_adapter": {"_target_": connector, "d_model": settings.encoder["d_model"]},
            "output_dim": settings.llm["hidden_size"],
        },
    }  # fmt: skip


def _speech_model(settings: Settings, llm_folder: str, tokens: dict[str, str]) -> dict[str, Any]:
    sampling = settings.sampling
    return {
        "pretrained_lm_name": llm_folder, "audio_codec_run_dtype": "float32", **tokens,
        "inference_guidance_scale": sampling["guidance_scale"],
        "inference_noise_scale": sampling["noise_scale"],
        "inference_top_p_or_k": sampling["top_p"],
        "codec_config": codec(settings), "tts_config": ear_tts(settings),
    }  # fmt: skip
