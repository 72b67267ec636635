"""Log-mel front end, FastConformer, projection, and the greedy transcript."""

import torch

from .. import signals, transcript
from ..model import Oracle
from ..recording import Tensors, layers_of, outputs_of
from ..settings import FRAME_SAMPLES, SOURCE_RATE_HZ


def clip(oracle: Oracle, name: str) -> torch.Tensor:
    """``exact`` ends on a frame and outlasts the encoder's left context; ``odd`` does not end on a frame."""
    inputs = oracle.settings.inputs
    samples = {"exact": inputs["exact_frames"] * FRAME_SAMPLES, "odd": inputs["odd_samples"]}[name]
    return signals.speech_like(samples, SOURCE_RATE_HZ, oracle.settings.inputs_for(f"perception_{name}"))


def record(oracle: Oracle, name: str) -> Tensors:
    """``perception_<name>``."""
    wav, perception = clip(oracle, name), oracle.stt.perception
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
