"""Random weights that make mistakes visible.

Every tensor is drawn from its own stream, keyed by the seed and its name. Nothing keeps a neutral value: norms are
offset, biases, gates and residual scales are not zero, the codec's zero-initialised convolutions are filled, and the
scales below put each network where its non-linearities act (attention that prefers some positions, a soft-cap that
caps, clamps that clamp, step sizes below the 1e-3 that a stray floor would raise).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from .settings import BOS, EOS, PAD, Settings, keyed_generator

KEPT = re.compile(r"perception\.preprocessor\.|rvq_embs$|audio_prompt_latents|inv_freq|pos_enc")


@dataclass(frozen=True)
class Draw:
    """One tensor to fill: its name, and standard normal numbers of its shape."""

    name: str
    z: np.ndarray
    depth: int

    @property
    def rows(self) -> int:
        """The length of the first axis."""
        return self.z.shape[0]

    def fan_in(self, gain: float = 1.0) -> np.ndarray:
        """Output of unit variance (times ``gain`` squared) for input of unit variance."""
        return gain * self.z / np.sqrt(prod(self.z.shape[1:]))


Maker = Callable[[Draw], np.ndarray]


def scaled(gain: float) -> Maker:
    """A matrix or convolution of the given gain."""
    return lambda draw: draw.fan_in(gain)


def around(mean: float, deviation: float) -> Maker:
    """Numbers about a mean: norm weights and biases."""
    return lambda draw: mean + deviation * draw.z


def ramp(first: float, last: float, transform: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Maker:
    """One value a head, spread from first to last."""
    return lambda draw: transform(np.linspace(first, last, draw.rows)) + 0.1 * draw.z


def table_with_zero_row(deviation: float) -> Maker:
    """An embedding whose last row is padding."""
    return lambda draw: deviation * draw.z * (np.arange(draw.rows) < draw.rows - 1)[:, None]


def codebook(draw: Draw) -> np.ndarray:
    """Codewords on a sphere that shrinks with the level, so that each level refines the one before."""
    level = int(draw.name.rsplit(".", 1)[-1])
    return 2 * (1 - 0.75 * level / draw.depth) * draw.z / np.linalg.norm(draw.z, axis=1, keepdims=True)


def spectrum(draw: Draw) -> np.ndarray:
    """The codec's last convolution: log-magnitudes above, phases below.

    The window clamp acts on a third of the samples and the soft limit of 100 on the loudest columns; phases reach a
    few radians only, where a cosine does not amplify rounding.
    """
    gains = np.where(np.arange(draw.rows) < draw.rows // 2, 0.3, 0.4)
    return gains[:, None, None] * draw.fan_in()


def decoder_convolution(draw: Draw) -> np.ndarray:
    """Transposed convolutions [in, out, k] with k equal to the stride, and the last 1x1."""
    return spectrum(draw) if draw.z.shape[-1] == 1 else draw.z / np.sqrt(draw.rows)


# The first pattern found in a name decides.
RULES: tuple[tuple[str, Maker], ...] = (
    (r"\.A_log$", ramp(1, 16, np.log)),
    (r"\.dt_bias$", ramp(-9, 1)),  # softplus(-9) is 1.2e-4
    (r"\.D$", around(1, 0.3)),
    (r"_variance_list", lambda draw: np.abs(1 + 0.1 * draw.z)),
    (r"mus_list", codebook),
    (r"pos_bias", around(0, 0.3)),
    (r"\.(gate|residual_scale)$", around(0, 0.5)),
    (r"\.(bos_emb|null_emb)$", around(0, 1)),
    (r"prediction\.embed\.weight$", table_with_zero_row(0.7)),
    (r"embed_subword\.embed_tokens\.weight$", table_with_zero_row(0.15)),  # multiplied by the root of its width
    (r"(embed_tokens|cont_emb|special_emb)\.weight$", around(0, 0.7)),
    # Gemma's score scale of 1/16 leaves attention almost uniform unless queries and keys are larger
    (r"tts_model\.tts_model\.backbone\.layers\.\d+\.self_attn\.[qk]_norm\.weight$", around(1.5, 0.3)),
    (r"embed_subword\.backbone\..*self_attn\.[qk]_proj\.weight$", scaled(12)),  # scores near the soft-cap of 50
    (r"embed_subword\.backbone\..*\.post_feedforward_layernorm\.weight$", around(2, 0.3)),  # a louder MLP
    (r"gated_fusion_audio_text\.audio_proj\.weight$", scaled(10)),  # its input is divided by 31
    (r"mog_head\.proj_logs\.weight$", scaled(0.6)),  # its output is exponentiated
    (r"mog_head\.low_mat$", lambda draw: draw.z / np.sqrt(draw.z.shape[-1])),
    (r"audio_codec\.decoder\.layers\.\d+\.weight$", decoder_convolution),
    (r"rnnt_joint\.joint_net\.2\.bias$", around(0, 0.1)),
    (r"(rnnt_joint\.joint_net.*|dec_rnn.*)weight", scaled(2)),
)  # fmt: skip


def value_of(draw: Draw) -> np.ndarray:
    """The values of one tensor: its rule, else by its shape."""
    for pattern, maker in RULES:
        if re.search(pattern, draw.name):
            return maker(draw)
    if draw.z.ndim > 1:
        return draw.fan_in()
    stored_as_offset = ".tts_model.tts_model." in f".{draw.name}"  # Gemma's norms multiply by 1 + weight
    is_norm = draw.name.endswith(".weight") and not stored_as_offset
    return (1.0 if is_norm else 0.0) + 0.2 * draw.z


@torch.no_grad()
def fill(model: torch.nn.Module, settings: Settings) -> None:
    """Overwrite every floating-point parameter and buffer, but those computed from the configuration."""
    for name, tensor in model.state_dict().items():
        if KEPT.search(name) or not tensor.is_floating_point():
            continue
        z = keyed_generator(settings.seed_of(name), name).standard_normal(tuple(tensor.shape)).astype(np.float32)
        value = value_of(Draw(name, z, settings.tts["num_quantizers"]))
        tensor.copy_(torch.from_numpy(np.asarray(value, dtype=np.float32).reshape(tuple(tensor.shape))))
    favour_special_tokens(model.stt_model)


def favour_special_tokens(stt: torch.nn.Module) -> None:
    """Longer head rows: greedy text then opens and closes turns and pauses, and the function channel idles at times."""
    stt.lm_head.weight[[BOS, EOS, PAD]] *= 2.5
    stt.function_head.weight[PAD] *= 2.5
