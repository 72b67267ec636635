"""The prediction and joint networks on given labels, without the greedy loop."""

import torch

from .. import signals
from ..model import Oracle
from ..recording import Tensors

LABELS, FRAMES = 9, 6


def record(oracle: Oracle, wav: torch.Tensor) -> Tensors:
    """``rnnt``, the joint network with the first frames of ``wav``.

    NeMo's joint takes a log-softmax on the CPU, so these are log-probabilities.
    """
    decoder, joint = oracle.stt.rnnt_decoder, oracle.stt.rnnt_joint
    vocabulary = oracle.settings.rnnt["vocab_size"]
    targets = signals.integers(0, vocabulary, (1, LABELS), oracle.settings.inputs_for("rnnt"))
    predicted, _, (h, c) = decoder(targets=targets, target_length=torch.tensor([LABELS]))  # one more: a zero start
    predicted = predicted.transpose(1, 2)
    encoded, _ = oracle.encode(wav)
    logprobs = joint.joint_after_projection(
        joint.project_encoder(encoded[:, :FRAMES]), joint.project_prednet(predicted)
    )
    return {"targets": targets, "predictor": predicted, "state_h": h, "state_c": c, "joint_logprobs": logprobs}
