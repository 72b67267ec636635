"""Log-mel front end, FastConformer, projection, and the greedy transcript."""

import torch

from .. import transcript
from ..model import Oracle
from ..recording import Tensors, layers_of, outputs_of


def record(oracle: Oracle, wav: torch.Tensor) -> Tensors:
    """``perception_*`` of ``[1, samples]``."""
    perception = oracle.stt.perception
    samples = torch.tensor([wav.shape[1]])
    mel, mel_len = perception.preprocessor(input_signal=wav, length=samples)
    watched = {"pre_encode": perception.encoder.pre_encode, **layers_of(perception.encoder.layers)}
    with outputs_of(watched) as seen:
        projected, length, encoded = perception(input_signal=wav, input_signal_length=samples, return_encoder_emb=True)
    tensors = {"wav": wav, "mel": mel, "mel_len": mel_len, "encoded": encoded, "encoded_len": length}
    tensors |= {"projected": projected, **{key: outputs[0] for key, outputs in seen.items()}}
    for max_symbols in (oracle.settings.rnnt["max_symbols"], 2):
        tokens, frames = transcript.greedy(oracle.stt, encoded, length, max_symbols)
        tensors |= {f"rnnt_tokens_ms{max_symbols}": tokens, f"rnnt_frames_ms{max_symbols}": frames}
    return tensors
