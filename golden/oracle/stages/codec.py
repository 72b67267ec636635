"""The RVQ-VAE codec: encode, quantize, decode at once and frame by frame."""

import torch
from nemo.collections.speechlm2.modules.ear_tts_vae_codec import CausalConv1dCache

from ..model import Oracle
from ..recording import Tensors, margin

SILENCE_FRAMES = 38  # the 37 of the voice prompt and the one cut off before it


def record(oracle: Oracle, wav: torch.Tensor, given: torch.Tensor) -> Tensors:
    """``codec``, of sound to encode and codes to decode.

    ``code_margin``: by how much each level's nearest codeword is nearer than the next.
    """
    codec = oracle.tts.audio_codec
    latents = codec.ae_encode(wav)
    codes, _ = codec.encode(wav, torch.tensor([wav.shape[-1]]))
    decoded, decoded_len = codec.decode(given, torch.tensor([given.shape[1]]))
    silence = torch.zeros(1, 1, codec.config.wav_to_token_ratio * SILENCE_FRAMES)
    return {
        "wav": wav, "latents": latents, "codes": codes, "code_margin": quantizer_margins(codec.prvq, latents),
        "decode_codes": given, "dequantized": codec.dequantize(given), "decoded": decoded, "decoded_len": decoded_len,
        "stream_decoded": frame_by_frame(codec, given, flush=False),
        "stream_decoded_flush": frame_by_frame(codec, given, flush=True),
        "silence_codes_38": codec.encode(silence, torch.tensor([silence.shape[-1]]))[0],
        "codec_silence_tokens": oracle.tts.codec_silence_tokens,
    }  # fmt: skip


def quantizer_margins(quantizer: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
    """``[1, frames, levels]`` squared distances between the two nearest codewords."""
    rest, margins = latents, []
    for table in quantizer.mus_list:
        distance = quantizer._dist_sq(rest, table)
        margins.append(margin(-distance))
        rest = rest - table[distance.argmin(-1)]
    return torch.stack(margins, -1)


def frame_by_frame(codec: torch.nn.Module, codes: torch.Tensor, flush: bool) -> torch.Tensor:
    """Streamed samples; ``flush`` drains the codec at the last frame."""
    cache, last = CausalConv1dCache(), codes.shape[1] - 1
    steps = [
        codec.decode(frame, None, cache=cache, flush=flush and index == last)[0]
        for index, frame in enumerate(codes.split(1, dim=1))
    ]
    return torch.cat(steps, -1)
