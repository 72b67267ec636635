"""The transcript branch: greedy decoding, and joint weights under which it says something."""

from typing import TYPE_CHECKING, Any

import torch
from nemo.collections.asr.parts.submodules.rnnt_greedy_decoding import GreedyRNNTInfer

from . import signals
from .settings import FRAME_SAMPLES, SOURCE_RATE_HZ

BLANK_SHARE = 0.75

if TYPE_CHECKING:
    from .model import Oracle


@torch.no_grad()
def greedy(stt: Any, encoded: torch.Tensor, length: torch.Tensor, max_symbols: int) -> list[torch.Tensor]:
    """Labels and the frame of each, by NVIDIA's decoder over the first ``length`` frames of ``[1, frames, d]``."""
    blank = stt.rnnt_joint.num_classes_with_blank - 1
    decoder = GreedyRNNTInfer(stt.rnnt_decoder, stt.rnnt_joint, blank_index=blank, max_symbols_per_step=max_symbols)
    best = decoder(encoder_output=encoded.transpose(1, 2), encoded_lengths=length)[0][0]
    frames = best.timestamp["timestep"] if isinstance(best.timestamp, dict) else best.timestamp
    return [torch.tensor([int(value) for value in row], dtype=torch.int32) for row in (best.y_sequence, frames)]


@torch.no_grad()
def centre_joint(oracle: "Oracle") -> None:
    """Weights of the joint network under which frames and label history both decide, and blank often wins.

    A random encoder mostly repeats one direction, and a random joint prefers one label whatever it hears. Over one
    clip and every last label, the encoder's branch is therefore centred and rescaled, each label's mean score removed,
    and blank raised until it wins :data:`BLANK_SHARE` of the choices.
    """
    settings, joint = oracle.settings, oracle.stt.rnnt_joint
    samples = settings.inputs["exact_frames"] * FRAME_SAMPLES
    encoded, _ = oracle.encode(signals.speech_like(samples, SOURCE_RATE_HZ, settings.inputs_for("joint")))
    predicted = after_one_label(oracle)
    for branch, heard, deviation in ((joint.enc, encoded[0], 1.5), (joint.pred, predicted, 1.5)):
        spread = branch(heard).std(0).mean()
        branch.weight.mul_(deviation / spread)
        branch.bias.copy_(-(branch.weight @ heard.mean(0)))
    scores, bias = scores_after_one_label(oracle, encoded), joint.joint_net[-1].bias
    bias.sub_(scores.mean((0, 1)))
    scores = scores_after_one_label(oracle, encoded)
    lead = scores[..., :-1].amax(-1) - scores[..., -1]
    bias[-1] += lead.quantile(BLANK_SHARE)


def after_one_label(oracle: "Oracle") -> torch.Tensor:
    """``[labels, pred_hidden]``: the prediction network with each label as the whole history."""
    labels = torch.arange(oracle.settings.rnnt["vocab_size"])[:, None]
    predicted, _ = oracle.stt.rnnt_decoder.predict(labels, state=None, add_sos=False)
    return predicted[:, 0]


def scores_after_one_label(oracle: "Oracle", encoded: torch.Tensor) -> torch.Tensor:
    """``[frames, labels, labels + blank]`` log-probabilities."""
    joint = oracle.stt.rnnt_joint
    predicted = joint.project_prednet(after_one_label(oracle)[None])
    return joint.joint_after_projection(joint.project_encoder(encoded), predicted)[0]
