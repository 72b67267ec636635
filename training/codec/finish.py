"""After training: latents of spread one, weights as a checkpoint stores them, and how good they are.

The speech decoder's smallest deviation is fixed (``min_log_std``), so latents must have a fixed spread: what the
encoder gives is divided, what the decoder takes is multiplied. Then every number is rounded to float16, in which the
checkpoint keeps them, so that codes found before and after storing are the same.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np

from training.codec.audio import Clips
from training.codec.losses import log_mel_distance, number
from training.codec.network import CodecNetwork
from training.codec.steps import Coding
from voicechat_core.config import CodecConfig
from voicechat_core.nn.codec import Codec
from voicechat_core.nn.layout import checkpoint_axes, to_checkpoint
from voicechat_core.weights import assign, named_parameters

__all__ = ["PREFIX", "finished", "load", "measure", "save"]

PREFIX = "tts_model.audio_codec."
FEW_LEVELS = 8
AT_ONCE = 16  # clips through the networks together
SILENT_FRAMES, SETTLED = 12, 4  # of the silence that is measured, and before it is looked at


def finished(coding: Coding, samples: mx.array) -> tuple[Codec, float]:
    """The codec with latents of spread one (on ``samples`` ``[B, S]``), rounded to float16, and their spread before."""
    latents = coding.network.encode(samples)
    spread = number(mx.sqrt(latents.var()))
    codec = Codec(coding.config)
    codec.encoder.update(coding.network.encoder.parameters())
    codec.decoder.update(coding.network.decoder.parameters())
    codec.prvq.mus_list = list(coding.quantizer.centres / spread)
    codec.encoder.layers[-1].weight = codec.encoder.layers[-1].weight / spread
    codec.decoder.layers[0].weight = codec.decoder.layers[0].weight * spread
    rounded = [(name, value.astype(mx.float16).astype(mx.float32)) for name, value in named_parameters(codec)]
    codec.load_weights(rounded)
    mx.eval(codec.parameters())
    return codec, spread


def save(codec: Codec, file: Path) -> None:
    """The codec's tensors by a checkpoint's names and axes, whole or not at all; float32, of float16's values."""
    axes = dict(checkpoint_axes(codec))
    tensors = {PREFIX + name: mx.contiguous(to_checkpoint(v, axes.get(name))) for name, v in named_parameters(codec)}
    partial = file.with_name(f"partial.{file.name}")
    mx.save_safetensors(str(partial), tensors, {"format": "pt"})
    partial.replace(file)


def load(file: Path, config: CodecConfig) -> Codec:
    """What ``save`` wrote.

    Raises:
        CheckpointError: for a tensor that is missing or of another shape.
    """
    codec = Codec(config)
    assign(codec, dict(mx.load(str(file)).items()), PREFIX)  # type: ignore[union-attr]
    return codec


def measure(coding: Coding, codec: Codec, config: CodecConfig, held: Clips) -> dict[str, float]:
    """Distances on held-out clips with all levels, with eight, without codes; silence; and whether serving agrees.

    ``codes_equal`` and ``wave_difference`` compare what training computed for the first clip with the project's codec.
    """
    network = CodecNetwork(codec, config)
    parts = [held.samples[i : i + AT_ONCE] for i in range(0, held.samples.shape[0], AT_ONCE)]
    sums = dict.fromkeys(("mel", "mel_8", "mel_plain"), 0.0)
    for part in parts:
        latents = network.encode(part)
        codes = codec.quantize(latents)
        few = sum((book[codes[..., q]] for q, book in enumerate(codec.prvq.mus_list[:FEW_LEVELS])), mx.array(0.0))
        for name, heard in (("mel", codec.dequantize(codes)), ("mel_8", few), ("mel_plain", latents)):
            distance = log_mel_distance(network.decode(heard), part, config.sample_rate)
            sums[name] += distance * part.shape[0] / held.samples.shape[0]
    return sums | _silence(codec, config) | _agreement(coding, codec, held.samples[:1])


def _silence(codec: Codec, config: CodecConfig) -> dict[str, float]:
    frames = SILENT_FRAMES * config.frame_samples
    codes = codec.quantize(codec.encode(mx.zeros((1, frames))))
    steady = codec.decode(mx.broadcast_to(codec.silence_codes(), (1, SILENT_FRAMES, config.num_quantizers)))
    tail = np.array(steady[0, SETTLED * config.frame_samples :])
    constant = bool((codes[:, SETTLED:] == codec.silence_codes()).all().item())
    return {"silence_rms": float(np.sqrt(np.mean(np.square(tail)))), "silence_constant": float(constant)}


def _agreement(coding: Coding, codec: Codec, clip: mx.array) -> dict[str, float]:
    served = codec.quantize(codec.encode(clip))
    latents = coding.network.encode(clip)
    trained = coding.quantizer.search(latents.reshape(-1, latents.shape[2])).codes.T.reshape(served.shape)
    made = CodecNetwork(codec, coding.config).decode(codec.dequantize(served))
    return {
        "codes_equal": number((served == trained).mean()),
        "wave_difference": number(mx.abs(codec.decode(served) - made).max()),
    }
