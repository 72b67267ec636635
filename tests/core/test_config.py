"""config.json: spellings that mean the same, and values that disagree."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from voicechat_core import ConfigError
from voicechat_core.config import PUBLISHED_PATTERN, VoiceChatConfig
from voicechat_core.quantization import Quantization

RELEASE: dict[str, Any] = {
    "model_type": "nemotron_voicechat",
    "text_config": {"model_type": "nemotron_h"},
    "tts_config": {"guidance_scale": 0.2, "top_p": 0.95, "noise_scale": 0.001},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """The release's config with one key, by dotted path, set to ``value`` (or removed if that is ``...``)."""
    data = copy.deepcopy(RELEASE)
    *parents, last = path.split(".")
    part = data
    for name in parents:
        part = part.setdefault(name, {})
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return data


def test_defaults_are_the_release() -> None:
    config = VoiceChatConfig.from_dict(RELEASE)
    assert config.input_frame_samples == 1280
    assert config.output_frame_samples == 1764
    assert config.prompt_frames == 37
    assert config.text_config.num_hidden_layers == 56
    assert (config.text_config.mamba_dim, config.text_config.conv_dim) == (10240, 12288)
    kinds = [config.text_config.hybrid_override_pattern.count(kind) for kind in "M-*"]
    assert kinds == [27, 25, 4]
    assert [i for i in range(28) if config.tts_config.is_global(i)] == [5, 11, 17, 23]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.time_step_limit", None),
        ("text_config.time_step_limit", [0.0, float("inf")]),
        ("text_config.time_step_limit", [0.0, {"__float__": "Infinity"}]),
        ("text_config.hybrid_override_pattern", list(PUBLISHED_PATTERN)),
        ("text_config.hybrid_override_pattern", None),
        ("text_config.layers_block_type", [{"M": "mamba", "*": "attention", "-": "mlp"}[c] for c in PUBLISHED_PATTERN]),
        ("text_config.num_hidden_layers", 4),
        ("audio_config.encoder", {"att_context_size": [[70, 0]]}),
        ("audio_config.encoder", {"att_context_size": [70, 0], "dropout_att": 0.1}),
        ("audio_config.preprocessor", {"dither": 1e-5}),
        ("quantization", None),
        ("a_key_of_tomorrow", {"deep": [1, float("nan")], "wide": float("inf")}),
        ("text_config.rope_scaling", {"factor": float("inf")}),
    ],
)
def test_spellings_of_the_same_config(path: str, value: object) -> None:
    assert VoiceChatConfig.from_dict(changed(path, value)) == VoiceChatConfig.from_dict(RELEASE)


def test_the_character_encoders_rope_by_its_other_name() -> None:
    config = VoiceChatConfig.from_dict(changed("tts_config.character_encoder", {"rope_theta": 100.0}))
    assert config.tts_config.character_encoder.rope_base == 100


def test_file_with_bare_infinity(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(changed("text_config.time_step_limit", [0.0, float("inf")])))
    assert "Infinity" in path.read_text()
    assert VoiceChatConfig.from_file(path) == VoiceChatConfig.from_dict(RELEASE)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("audio_config.output_dim", 64, ["output_dim", "64", "hidden_size", "4480"]),
        ("audio_config.joint", {"encoder_hidden": 8}, ["joint.encoder_hidden", "8", "encoder.d_model", "1024"]),
        ("audio_config.joint", {"pred_hidden": 8}, ["joint.pred_hidden", "8", "decoder.pred_hidden", "640"]),
        ("audio_config.joint", {"num_classes": 8}, ["joint.num_classes", "8", "decoder.vocab_size", "1024"]),
        ("rnnt_blank_id", 8, ["rnnt_blank_id", "8", "decoder.vocab_size", "1024"]),
        ("rnnt_vocabulary", ["a"], ["rnnt_vocabulary", "1", "rnnt_blank_id", "1024"]),
        ("codec_config.num_quantizers", 8, ["tts_config.num_quantizers", "31", "codec_config.num_quantizers", "8"]),
        ("codec_config.codebook_size", 8, ["codebook_size", "1024", "8"]),
        ("codec_config.latent_dim", 8, ["latent_size", "512", "latent_dim", "8"]),
        ("pad_token_id", 11, ["pad_token_id", "silence_token_id", "11"]),
        ("eos_token_id", 131072, ["eos_token_id", "131072", "vocab_size"]),
        ("input_sample_rate", 8000, ["input_sample_rate", "8000", "16000"]),
        ("frame_duration", 0.04, ["640", "1280"]),
        ("codec_config.downsample_rates", [7, 7, 8], ["1764", "1568"]),
        ("model_type", "moshi", ["model_type", "moshi", "nemotron_voicechat"]),
        ("text_config", ..., ["text_config"]),
        ("tts_config.top_p", ..., ["top_p", "tts_config"]),
        ("tts_config.guidance_scale", ..., ["guidance_scale"]),
        ("tts_config.noise_scale", ..., ["noise_scale"]),
        ("text_config.hidden_size", "wide", ["int", "str", "text_config.hidden_size"]),
        ("text_config.hybrid_override_pattern", "M-E", ["M-E"]),
        ("text_config.time_step_limit", [0.001, 0.1], ["time_step_limit", "0.001", "inf"]),
        ("text_config.time_step_limit", "none", ["time_step_limit", "none", "inf"]),
        ("text_config", "small", ["text_config", "object", "str"]),
        ("audio_config", [1], ["audio_config", "object", "array"]),
        ("audio_config.encoder", [1], ["audio_config.encoder", "object", "array"]),
        ("rnnt_vocabulary", [1], ["rnnt_vocabulary", "str", "int"]),
        ("text_config.num_key_value_heads", 7, ["num_attention_heads", "40", "7"]),
        ("text_config.n_groups", 0, ["n_groups", ">= 1", "found 0"]),
        ("text_config.intermediate_size", -1, ["text_config.intermediate_size", ">= 1", "found -1"]),
        ("text_config.head_dim", 10**18, ["text_config.head_dim", "<= 16777216", "found 1000000000000000000"]),
        ("tts_config.num_hidden_layers", 10**6, ["num_hidden_layers", "<= 1024", "found 1000000"]),
        ("tts_config.query_pre_attn_scalar", 0, ["query_pre_attn_scalar", "> 0", "found 0"]),
        ("tts_config.exponent", -2.0, ["exponent", "> 0", "found -2.0"]),
        ("tts_config.guidance_scale", float("nan"), ["tts_config.guidance_scale", "nan", ">= 0"]),
        ("tts_config.noise_scale", float("inf"), ["tts_config.noise_scale", "inf", "<= 1000"]),
        ("tts_config.noise_scale", -1, ["tts_config.noise_scale", "-1", ">= 0"]),
        ("frame_duration", float("nan"), ["frame_duration", "nan", "> 0"]),
        ("tts_config.audio_prompt_duration", 1e300, ["audio_prompt_duration", "1e+300", "<= 3600"]),
        ("codec_config.channel_multipliers", [1, -2, 4], ["channel_multipliers", ">= 1"]),
        ("codec_config.downsample_rates", [-7, -7, 9], ["downsample_rates", ">= 1"]),
        ("audio_config.encoder", {"att_context_size": [10**30, 0]}, ["att_context_size"]),
        ("audio_config.preprocessor", {"n_fft": 256}, ["n_fft", "256", "400"]),
        ("tts_config.num_attention_heads", 3, ["num_attention_heads", "3", "num_key_value_heads", "16"]),
        ("tts_config.head_dim", 71, ["head_dim", "71", "even"]),
        ("tts_config.top_p", 1.5, ["top_p", "1.5"]),
        ("tts_config.sliding_window", 1, ["sliding_window", "1", "at least 2"]),
        ("codec_config.n_fft", 8, ["n_fft", "8", "hop_length", "4"]),
        ("codec_config.n_fft", 18, ["n_fft", "18", "hop_length", "4"]),
        ("tts_config.top_p", 1, ["top_p", "integer 1", "top-k"]),
        ("audio_config.encoder", {"subsampling": "striding"}, ["subsampling", "striding", "dw_striding"]),
        ("audio_config.encoder", {"conv_norm_type": "batch_norm"}, ["conv_norm_type", "batch_norm", "layer_norm"]),
        ("audio_config.encoder", {"self_attention_model": "abs_pos"}, ["self_attention_model", "abs_pos"]),
        ("audio_config.encoder", {"att_context_size": [70, 13]}, ["att_context_size", "70, 13"]),
    ],
)
def test_disagreements_name_both_values(path: str, value: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        VoiceChatConfig.from_dict(changed(path, value))
    assert [word for word in words if word not in str(caught.value)] == []


def test_nemo_layout_says_convert_first(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model": {"stt": {"model": {"perception": {}}}}, "data": {}, "trainer": {}}))
    with pytest.raises(ConfigError, match="convert first") as caught:
        VoiceChatConfig.from_file(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff", "[" * 100_000])
def test_unreadable_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        VoiceChatConfig.from_file(path)
    assert str(path) in str(caught.value)


def test_the_quantization_map_by_either_name() -> None:
    said = {"group_size": 64, "bits": 4, "stt_model.lm_head": {"group_size": 32, "bits": 8}}
    for data in (
        {**RELEASE, "quantization": said},
        {**RELEASE, "quantization_config": said},
        {**RELEASE, "quantization": said, "quantization_config": {"group_size": 32, "bits": 2}},
    ):
        found = VoiceChatConfig.from_dict(data).quantization_map
        assert found.of("stt_model.lm_head") == Quantization(8, 32)
        assert found.of("stt_model.function_head") == Quantization(4, 64)
    assert VoiceChatConfig.from_dict(RELEASE).quantization_map.of("stt_model.lm_head") is None


@pytest.mark.parametrize("value", [3, [], {"bits": 5, "group_size": 7}, {"bits": 4, "group_size": 64, "mode": "nf4"}])
def test_a_quantization_map_that_means_nothing(value: object) -> None:
    with pytest.raises(ConfigError, match="quantization"):
        VoiceChatConfig.from_dict({**RELEASE, "quantization": value})
