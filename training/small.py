"""The sizes of ``voicechat-small``: the published architecture with a few million parameters.

Two vocabularies are fixed here by their sizes only; their contents follow from the domain (``vocabulary``).
"""

from collections.abc import Sequence
from typing import Any

from voicechat_core.config import VoiceChatConfig

__all__ = ["PATTERN", "RNNT_VOCABULARY", "SPEAKER", "TEXT_VOCABULARY", "small_config"]

TEXT_VOCABULARY = 640
RNNT_VOCABULARY = 128
PATTERN = "M-*-M-M-*-M-"
SPEAKER = "Aria"  # the one voice's name in every published checkpoint; a tensor is called by it

LATENT, CODEBOOK, QUANTIZERS = 64, 128, 31
LANGUAGE_WIDTH, PERCEPTION_WIDTH, TRANSCRIPT_WIDTH = 128, 112, 96
# A session may be far longer than the rows that are trained on, so no layer looks back farther than those are long.
SPEECH_LAYERS, WINDOW = 7, 128
SPEECH: dict[str, Any] = {
    "hidden_size": 160, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 40,
}  # fmt: skip


def _text() -> dict[str, Any]:
    return {
        "vocab_size": TEXT_VOCABULARY, "hidden_size": LANGUAGE_WIDTH, "intermediate_size": 384,
        "hybrid_override_pattern": PATTERN, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 2,
    }  # fmt: skip


def _audio() -> dict[str, Any]:
    return {
        "output_dim": LANGUAGE_WIDTH,
        "encoder": {"n_layers": 4, "d_model": PERCEPTION_WIDTH, "n_heads": 4, "subsampling_conv_channels": 32},
        "decoder": {"pred_hidden": TRANSCRIPT_WIDTH, "pred_rnn_layers": 2, "vocab_size": RNNT_VOCABULARY},
        "joint": {
            "joint_hidden": TRANSCRIPT_WIDTH, "encoder_hidden": PERCEPTION_WIDTH, "pred_hidden": TRANSCRIPT_WIDTH,
            "num_classes": RNNT_VOCABULARY,
        },
    }  # fmt: skip


def _tts() -> dict[str, Any]:
    return {
        "guidance_scale": 0.2, "top_p": 0.95, "noise_scale": 0.001,
        "num_hidden_layers": SPEECH_LAYERS, "sliding_window": WINDOW, "sliding_window_pattern": SPEECH_LAYERS + 1,
        "latent_size": LATENT, "codebook_size": CODEBOOK, "num_quantizers": QUANTIZERS,
        "character_encoder": SPEECH,
        "mog_head": {"intermediate_size": 256, "num_layers": 3, "low_rank": 16, "num_predictions": 64},
        **SPEECH,
    }  # fmt: skip


def small_config(rnnt_pieces: Sequence[str] | None = None) -> VoiceChatConfig:
    """The configuration of the small checkpoint.

    Args:
        rnnt_pieces: the transcript branch's 128 pieces, which a checkpoint's config.json holds; training needs none.
    """
    return VoiceChatConfig.from_dict(
        {
            "model_type": "nemotron_voicechat",
            "text_config": _text(),
            "audio_config": _audio(),
            "tts_config": _tts(),
            "codec_config": {
                "base_channels": 32, "latent_dim": LATENT, "codebook_size": CODEBOOK, "num_quantizers": QUANTIZERS,
            },
            "rnnt_blank_id": RNNT_VOCABULARY,
            "rnnt_vocabulary": None if rnnt_pieces is None else list(rnnt_pieces),
            "speaker": SPEAKER,
        }
    )  # fmt: skip
