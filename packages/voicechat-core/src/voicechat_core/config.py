"""The checkpoint's ``config.json``: frozen, with every cross-check made on construction.

Keys and defaults are those of the published runtime schema. Unknown keys are ignored at every level, a
``null`` counts as absent. What a default may not decide (guidance, top-p, noise scale) has none.
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec

from voicechat_core.config_spellings import MODEL_TYPE, found_at, normalised, reject_other_layouts
from voicechat_core.errors import ConfigError
from voicechat_core.quantization import QuantizationMap

__all__ = [
    "AudioConfig",
    "CharacterEncoderConfig",
    "CodecConfig",
    "DecoderConfig",
    "EncoderConfig",
    "JointConfig",
    "MogHeadConfig",
    "PreprocessorConfig",
    "TextConfig",
    "TtsConfig",
    "VoiceChatConfig",
]

INPUT_SAMPLE_RATE = 16000  # hertz; what the mel front end was trained on
PUBLISHED_PATTERN = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"


# Ranges that hold for every model: a number outside them is a slip of the pen, and is named with its key.
Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
LAYERS = 1024
Layers = Annotated[int, msgspec.Meta(ge=1, le=LAYERS)]
Id = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Context = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Scale = Annotated[float, msgspec.Meta(ge=0, le=1e3)]
Real = Annotated[float, msgspec.Meta(ge=-1e3, le=1e3)]
# Of transforms and their bins: tables are computed from them when the networks are built.
Window = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
SPEAKER = re.compile(r"[^\W\d][\w-]*")  # a part of a tensor's name


def require_equal(name_a: str, a: object, name_b: str, b: object) -> None:
    """Raise ``ConfigError`` with both names and both values unless they are equal."""
    if a != b:
        raise ConfigError(f"{name_a} is {a!r} but {name_b} is {b!r}")


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """One object of config.json."""

    def require(self, **expected: Any) -> None:
        """Raise ``ConfigError`` for a field whose value this software does not implement."""
        for name, value in expected.items():
            found = getattr(self, name)
            if found != value:
                raise ConfigError(f"{name} is {found!r}; only {value!r} is supported")


class TextConfig(_Part, frozen=True):
    """``text_config``: the Nemotron-H trunk. Sizes count channels, heads or layers."""

    model_type: str = "nemotron_h"
    vocab_size: Size = 131072
    hidden_size: Size = 4480
    intermediate_size: Size = 15680
    max_position_embeddings: Size = 131072
    num_attention_heads: Size = 40
    num_key_value_heads: Size = 8
    head_dim: Size = 128
    mamba_num_heads: Size = 128
    mamba_head_dim: Size = 80
    ssm_state_size: Size = 128
    conv_kernel: Size = 4
    n_groups: Size = 8
    layer_norm_epsilon: Positive = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    use_bias: bool = False
    use_conv_bias: bool = True
    mamba_proj_bias: bool = False
    hybrid_override_pattern: str = PUBLISHED_PATTERN

    def __post_init__(self) -> None:
        self.require(model_type="nemotron_h", use_conv_bias=True)
        unknown = set(self.hybrid_override_pattern) - set("M-*")
        if len(self.hybrid_override_pattern) > LAYERS:
            raise ConfigError(f"hybrid_override_pattern has {len(self.hybrid_override_pattern)} layers, over {LAYERS}")
        if unknown or not self.hybrid_override_pattern:
            raise ConfigError(
                f"hybrid_override_pattern {self.hybrid_override_pattern!r} has layers other than M, - and *"
            )
        for name, whole, part in (
            ("num_attention_heads", self.num_attention_heads, self.num_key_value_heads),
            ("mamba_num_heads", self.mamba_num_heads, self.n_groups),
        ):
            if whole % part:
                raise ConfigError(f"{name} is {whole}, not a multiple of its {part} groups")

    @property
    def num_hidden_layers(self) -> int:
        """The pattern's length: it overrides whatever ``num_hidden_layers`` says."""
        return len(self.hybrid_override_pattern)

    @property
    def mamba_dim(self) -> int:
        """Inner channels of a Mamba mixer."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of its causal convolution: x, B and C."""
        return self.mamba_dim + 2 * self.n_groups * self.ssm_state_size


class PreprocessorConfig(_Part, frozen=True):
    """``audio_config.preprocessor``: the log-mel front end. Windows in seconds."""

    sample_rate: Size = INPUT_SAMPLE_RATE
    normalize: str = "NA"
    window_size: Positive = 0.025
    window_stride: Positive = 0.01
    window: str = "hann"
    features: Window = 128
    n_fft: Window = 512
    log: bool = True
    frame_splicing: int = 1
    pad_to: int = 0
    pad_value: float = 0.0
    preemph: Scale = 0.97

    def __post_init__(self) -> None:
        self.require(sample_rate=INPUT_SAMPLE_RATE, normalize="NA", window="hann", log=True)
        self.require(frame_splicing=1, pad_to=0, pad_value=0.0)
        if self.n_fft < self.window_samples:
            raise ConfigError(f"n_fft is {self.n_fft}, shorter than the window's {self.window_samples} samples")

    @property
    def window_samples(self) -> int:
        """Samples under one window (400)."""
        return round(self.window_size * self.sample_rate)

    @property
    def hop_samples(self) -> int:
        """Samples from one mel frame to the next (160)."""
        return round(self.window_stride * self.sample_rate)


class EncoderConfig(_Part, frozen=True):
    """``audio_config.encoder``: the FastConformer."""

    feat_in: Size = 128
    n_layers: Layers = 24
    d_model: Size = 1024
    use_bias: bool = False
    subsampling: str = "dw_striding"
    subsampling_factor: int = 8
    subsampling_conv_channels: Size = 256
    causal_downsampling: bool = True
    ff_expansion_factor: Size = 4
    self_attention_model: str = "rel_pos"
    n_heads: Size = 8
    att_context_size: tuple[Context, Context] = (70, 0)
    att_context_style: str = "chunked_limited"
    xscaling: bool = False
    untie_biases: bool = True
    conv_kernel_size: Size = 9
    conv_norm_type: str = "layer_norm"
    conv_context_size: str = "causal"

    def __post_init__(self) -> None:
        self.require(subsampling="dw_striding", subsampling_factor=8, causal_downsampling=True, use_bias=False)
        self.require(self_attention_model="rel_pos", xscaling=False, untie_biases=True)
        self.require(conv_norm_type="layer_norm", conv_context_size="causal")
        left, right = self.att_context_size
        if left < 0 or right != 0:
            raise ConfigError(
                f"att_context_size is {[left, right]!r}; only a left context and right context 0 can stream"
            )
        if self.d_model % self.n_heads:
            raise ConfigError(f"d_model is {self.d_model}, not a multiple of n_heads {self.n_heads}")


class DecoderConfig(_Part, frozen=True):
    """``audio_config.decoder``: the RNNT prediction network."""

    pred_hidden: Size = 640
    pred_rnn_layers: Layers = 2
    vocab_size: Size = 1024
    blank_as_pad: bool = True

    def __post_init__(self) -> None:
        self.require(blank_as_pad=True)


class JointConfig(_Part, frozen=True):
    """``audio_config.joint``: the RNNT joint network."""

    joint_hidden: Size = 640
    activation: str = "relu"
    encoder_hidden: Size = 1024
    pred_hidden: Size = 640
    num_classes: Size = 1024

    def __post_init__(self) -> None:
        self.require(activation="relu")


class AudioConfig(_Part, frozen=True):
    """``audio_config``: perception and the transcript branch."""

    preprocessor: PreprocessorConfig = PreprocessorConfig()
    encoder: EncoderConfig = EncoderConfig()
    decoder: DecoderConfig = DecoderConfig()
    joint: JointConfig = JointConfig()
    output_dim: Size = 4480
    max_symbols: Size = 10

    def __post_init__(self) -> None:
        require_equal("encoder.feat_in", self.encoder.feat_in, "preprocessor.features", self.preprocessor.features)
        require_equal("joint.encoder_hidden", self.joint.encoder_hidden, "encoder.d_model", self.encoder.d_model)
        require_equal("joint.pred_hidden", self.joint.pred_hidden, "decoder.pred_hidden", self.decoder.pred_hidden)
        require_equal("joint.num_classes", self.joint.num_classes, "decoder.vocab_size", self.decoder.vocab_size)


def _require_multiple(part: "CharacterEncoderConfig | TtsConfig") -> None:
    """Grouped queries need whole groups, rotated heads whole pairs."""
    heads, groups = part.num_attention_heads, part.num_key_value_heads
    if heads % groups:
        raise ConfigError(f"num_attention_heads is {heads}, not a multiple of num_key_value_heads {groups}")
    if part.head_dim % 2:
        raise ConfigError(f"head_dim is {part.head_dim}; RoPE turns pairs, so it must be even")


class CharacterEncoderConfig(_Part, frozen=True):
    """``tts_config.character_encoder``: the T5Gemma encoder over a token's characters."""

    hidden_size: Size = 1152
    intermediate_size: Size = 4608
    num_hidden_layers: Layers = 1
    num_attention_heads: Size = 16
    num_key_value_heads: Size = 16
    head_dim: Size = 72
    rms_norm_eps: Positive = 1e-6
    query_pre_attn_scalar: Positive = 256
    attn_logit_softcapping: Positive = 50.0
    rope_base: Positive = 1e4
    char_vocab_size: Size = 257

    def __post_init__(self) -> None:
        _require_multiple(self)


class MogHeadConfig(_Part, frozen=True):
    """``tts_config.mog_head``: the mixture-of-Gaussians head."""

    intermediate_size: Size = 4608
    num_layers: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 3
    low_rank: Size = 64
    num_predictions: Size = 1024
    min_log_std: Real = -4.0
    eps: Positive = 1e-6


class TtsConfig(_Part, frozen=True):
    """``tts_config``: the EAR-TTS speech decoder. ``audio_prompt_duration`` in seconds."""

    guidance_scale: Scale
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)]
    noise_scale: Scale
    hidden_size: Size = 1152
    intermediate_size: Size = 4608
    num_hidden_layers: Layers = 28
    num_attention_heads: Size = 16
    num_key_value_heads: Size = 16
    head_dim: Size = 72
    sliding_window: Size = 7500
    sliding_window_pattern: Size = 6
    rms_norm_eps: Positive = 1e-6
    query_pre_attn_scalar: Positive = 256
    rope_global_base_freq: Positive = 1e6
    rope_local_base_freq: Positive = 1e4
    latent_size: Size = 512
    num_quantizers: Layers = 31
    codebook_size: Size = 1024
    exponent: Positive = 3.0
    num_iterations: Size = 8
    audio_prompt_duration: Seconds = 3.0
    disable_eos_prediction: bool = True
    use_gated_fusion_for_text_audio: bool = True
    use_subword_flag_emb: bool = True
    use_bos_eos_emb: bool = True
    use_audio_prompt_frozen_projection: bool = True
    character_encoder: CharacterEncoderConfig = CharacterEncoderConfig()
    mog_head: MogHeadConfig = MogHeadConfig()

    def __post_init__(self) -> None:
        self.require(disable_eos_prediction=True, use_gated_fusion_for_text_audio=True, use_subword_flag_emb=True)
        self.require(use_bos_eos_emb=True, use_audio_prompt_frozen_projection=True)
        _require_multiple(self)
        require_equal(
            "character_encoder.hidden_size", self.character_encoder.hidden_size, "hidden_size", self.hidden_size
        )
        if self.sliding_window < 2:
            # NVIDIA's cache keeps everything at 1, its scan nothing: there is no behaviour to follow.
            raise ConfigError(f"sliding_window is {self.sliding_window}; at least 2 is needed")

    def is_global(self, layer: int) -> bool:
        """Whether a backbone layer attends to everything (every sixth) or to the sliding window."""
        return (layer + 1) % self.sliding_window_pattern == 0


class CodecConfig(_Part, frozen=True):
    """``codec_config``: the RVQ-VAE codec."""

    sample_rate: Size = 22050
    base_channels: Size = 384
    channel_multipliers: tuple[Size, ...] = (1, 2, 4)
    downsample_rates: tuple[Size, ...] = (7, 7, 9)
    blocks_per_stage: Layers = 3
    block_kernel_size: Size = 7
    latent_dim: Size = 512
    n_fft: Window = 16
    hop_length: Size = 4
    num_quantizers: Layers = 31
    codebook_size: Size = 1024

    def __post_init__(self) -> None:
        require_equal(
            "number of channel_multipliers", len(self.channel_multipliers),
            "number of downsample_rates", len(self.downsample_rates),
        )  # fmt: skip
        if self.n_fft % self.hop_length or self.n_fft < 3 * self.hop_length:
            # From three columns on, squared Hann windows overlap to a constant.
            raise ConfigError(f"n_fft is {self.n_fft}, not a multiple of hop_length {self.hop_length} by 3 or more")

    @property
    def columns_per_frame(self) -> int:
        """Spectral columns under one code frame (441)."""
        columns = 1
        for rate in self.downsample_rates:
            columns *= rate
        return columns

    @property
    def frame_samples(self) -> int:
        """Samples of one code frame (1764)."""
        return self.columns_per_frame * self.hop_length


class VoiceChatConfig(_Part, frozen=True):
    """The whole of config.json. ``frame_duration`` in seconds, sample rates in hertz."""

    text_config: TextConfig
    tts_config: TtsConfig
    audio_config: AudioConfig = AudioConfig()
    codec_config: CodecConfig = CodecConfig()
    model_type: str = MODEL_TYPE
    bos_token_id: Id = 1
    eos_token_id: Id = 2
    pad_token_id: Id = 12
    silence_token_id: Id = 11
    rnnt_blank_id: Id = 1024
    input_sample_rate: Size = INPUT_SAMPLE_RATE
    output_sample_rate: Size = 22050
    frame_duration: Positive = 0.08
    function_channel_weight: Real = 2.0
    default_system_prompt: str = ""
    rnnt_vocabulary: tuple[str, ...] | None = None
    speaker: str = "Aria"
    quantization: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None  # other software's name for the same

    def __post_init__(self) -> None:
        text, audio, tts, codec = self.text_config, self.audio_config, self.tts_config, self.codec_config
        require_equal("audio_config.output_dim", audio.output_dim, "text_config.hidden_size", text.hidden_size)
        require_equal("rnnt_blank_id", self.rnnt_blank_id, "audio_config.decoder.vocab_size", audio.decoder.vocab_size)
        if self.rnnt_vocabulary:
            require_equal(
                "the length of rnnt_vocabulary", len(self.rnnt_vocabulary), "rnnt_blank_id", self.rnnt_blank_id
            )
        for name in ("num_quantizers", "codebook_size"):
            require_equal(f"tts_config.{name}", getattr(tts, name), f"codec_config.{name}", getattr(codec, name))
        require_equal("tts_config.latent_size", tts.latent_size, "codec_config.latent_dim", codec.latent_dim)
        require_equal("output_sample_rate", self.output_sample_rate, "codec_config.sample_rate", codec.sample_rate)
        if not SPEAKER.fullmatch(self.speaker):
            raise ConfigError(f"speaker is {self.speaker!r}; letters, digits, _ and - after a letter are needed")
        self._check_ids()
        self._check_clock()
        _ = self.quantization_map

    def _check_ids(self) -> None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "silence_token_id"):
            value, size = getattr(self, name), self.text_config.vocab_size
            if not 0 <= value < size:
                raise ConfigError(f"{name} is {value}, outside text_config.vocab_size {size}")
        if self.pad_token_id == self.silence_token_id:
            raise ConfigError(f"pad_token_id and silence_token_id are both {self.pad_token_id}")

    def _check_clock(self) -> None:
        pre = self.audio_config.preprocessor
        stride = self.audio_config.encoder.subsampling_factor * pre.hop_samples
        require_equal("input_sample_rate", self.input_sample_rate, "preprocessor.sample_rate", pre.sample_rate)
        require_equal("input samples a frame", self.input_frame_samples, "subsampling_factor * hop", stride)
        require_equal(
            "output samples a frame",
            self.output_frame_samples,
            "codec samples a frame",
            self.codec_config.frame_samples,
        )

    @property
    def quantization_map(self) -> QuantizationMap:
        """Which modules are stored packed, and how."""
        return QuantizationMap.from_dict(self.quantization or self.quantization_config or {})

    @property
    def input_frame_samples(self) -> int:
        """Microphone samples of one frame (1280)."""
        return round(self.input_sample_rate * self.frame_duration)

    @property
    def output_frame_samples(self) -> int:
        """Speech samples of one frame (1764)."""
        return round(self.output_sample_rate * self.frame_duration)

    @property
    def prompt_frames(self) -> int:
        """Positions of the voice prompt (37)."""
        samples = int(self.tts_config.audio_prompt_duration * self.output_sample_rate)
        return samples // self.output_frame_samples

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Check and freeze a parsed config.json.

        Raises:
            ConfigError: naming the key, and both values where two disagree.
        """
        reject_other_layouts(data)
        try:
            return msgspec.convert(normalised(data), cls, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"config.json: {error}{found_at(data, str(error))}") from error
        except RecursionError as error:
            raise ConfigError("config.json: nested too deeply") from error

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read ``config.json``; the bare token ``Infinity`` is accepted as Python writes it.

        Raises:
            ConfigError: naming the file, and the key or values that are wrong.
        """
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a file")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"{path}: no such file; a checkpoint directory holds one") from error
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected a JSON object, found {type(data).__name__}")
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {str(error).removeprefix('config.json: ')}") from error
