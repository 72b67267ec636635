"""Transcript branch: an RNN transducer (Graves 2012) on the encoder's frames, decoded greedily.

The prediction network reads the labels said so far; the joint network adds its output to a frame and names the
next label, or blank to go on to the next frame. Everything is computed in float32 whatever the weights are: the
state runs on for a whole session, and in half precision it drifts.
"""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import DecoderConfig, JointConfig
from voicechat_core.errors import ModelError
from voicechat_core.nn.linear import Embedding, Linear

__all__ = ["Proposal", "RnntDecoder", "RnntJoint", "RnntState", "greedy_decode", "greedy_step"]


class Lstm(nn.Module):
    """Layers of ``torch.nn.LSTM``, one step at a time; gates in its order: input, forget, cell, output."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        for layer in range(layers):
            self[f"weight_ih_l{layer}"] = mx.zeros((4 * size, size))
            self[f"weight_hh_l{layer}"] = mx.zeros((4 * size, size))
            self[f"bias_ih_l{layer}"] = mx.zeros((4 * size,))
            self[f"bias_hh_l{layer}"] = mx.zeros((4 * size,))

    def __call__(self, x: mx.array, h: mx.array, c: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Input ``[B, H]`` and state ``[L, B, H]`` -> the last layer's output ``[B, H]`` and the new state."""
        hidden, cells = [], []
        for layer in range(h.shape[0]):
            i, f, g, o = mx.split(self._gates(layer, x, h[layer]), 4, axis=-1)
            cells.append(mx.sigmoid(f) * c[layer] + mx.sigmoid(i) * mx.tanh(g))
            x = mx.sigmoid(o) * mx.tanh(cells[-1])
            hidden.append(x)
        return x, mx.stack(hidden), mx.stack(cells)

    def _gates(self, layer: int, x: mx.array, h: mx.array) -> mx.array:
        w_ih, w_hh, b_ih, b_hh = (
            self[f"{kind}_l{layer}"].astype(mx.float32) for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        gates: mx.array = x @ w_ih.T + h @ w_hh.T + (b_ih + b_hh)
        return gates


class RecurrentStack(nn.Module):
    """NeMo's wrapper around the LSTM; it only adds a name."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.lstm = Lstm(config.pred_hidden, config.pred_rnn_layers)


class Prediction(nn.Module):
    """Embedding (the last row is blank) and LSTM."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size + 1, config.pred_hidden)
        self.dec_rnn = RecurrentStack(config)


@dataclass
class Proposal:
    """The prediction ``[1, J]`` after the labels so far, projected, and the state to adopt with the next label."""

    projected: mx.array
    h: mx.array
    c: mx.array


@dataclass
class RnntState:
    """The last label (None before the first), h and c ``[L, B, H]``, and what was last computed from them.

    A prediction depends on nothing else, and most frames are blank: ``proposal`` is kept until a label comes.
    """

    label: int | None
    h: mx.array
    c: mx.array
    proposal: Proposal | None = None


class RnntDecoder(nn.Module):
    """Prediction network: the labels so far -> what is to be added to a frame (NeMo's ``RNNTDecoder``)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.prediction = Prediction(config)
        self._state_shape = (config.pred_rnn_layers, config.pred_hidden)

    def __call__(self, targets: mx.array) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        """Labels ``[B, U]`` -> outputs ``[B, U + 1, H]``, the first before any label, and h and c ``[L, B, H]``."""
        batch, labels = targets.shape
        state = self.new_state(batch)
        predicted, h, c = self.step(None, state.h, state.c)
        outputs = [predicted]
        for u in range(labels):
            predicted, h, c = self.step(targets[:, u], h, c)
            outputs.append(predicted)
        return mx.stack(outputs, axis=1), (h, c)

    def new_state(self, batch: int = 1) -> RnntState:
        """Nothing said yet."""
        layers, hidden = self._state_shape
        return RnntState(None, mx.zeros((layers, batch, hidden)), mx.zeros((layers, batch, hidden)))

    def step(self, label: mx.array | None, h: mx.array, c: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """One label ``[B]``, or None at the start, and the state -> output ``[B, H]`` and the new state."""
        x = mx.zeros(h.shape[1:]) if label is None else self.prediction.embed(label).astype(mx.float32)
        return self.prediction.dec_rnn.lstm(x, h, c)


class RnntJoint(nn.Module):
    """Joint network: ``W relu(W_e frame + W_p prediction)``, blank is the last class (NeMo's ``RNNTJoint``)."""

    def __init__(self, config: JointConfig) -> None:
        super().__init__()
        self.enc = Linear(config.encoder_hidden, config.joint_hidden)
        self.pred = Linear(config.pred_hidden, config.joint_hidden)
        # As a list because the checkpoint counts activation and dropout: the weights are joint_net.2.
        self.joint_net = [nn.ReLU(), nn.Identity(), Linear(config.joint_hidden, config.num_classes + 1)]
        self.blank = config.num_classes

    def __call__(self, encoded: mx.array, predicted: mx.array) -> mx.array:
        """Frames ``[B, T, D]`` and predictions ``[B, U, P]`` -> logits ``[B, T, U, classes + 1]``."""
        return self.fuse(self.project_frames(encoded)[:, :, None], self.project_prediction(predicted)[:, None])

    def project_frames(self, encoded: mx.array) -> mx.array:
        """The frames' share, once for each frame."""
        return self.enc(encoded.astype(mx.float32))

    def project_prediction(self, predicted: mx.array) -> mx.array:
        """The prediction's share, once for each label."""
        return self.pred(predicted)

    def fuse(self, frames: mx.array, predictions: mx.array) -> mx.array:
        """Logits of projected frames and predictions that broadcast together."""
        x = frames + predictions
        for layer in self.joint_net:
            x = layer(x)
        return x


def greedy_step(
    decoder: RnntDecoder,
    joint: RnntJoint,
    encoded_frame: mx.array,
    state: RnntState,
    max_symbols: int,
    special: frozenset[int] = frozenset(),
) -> tuple[list[int], RnntState]:
    """The labels of one frame ``[1, 1, D]``, without the special ones, and the state after them.

    At most ``max_symbols`` labels, special ones counted. Raises ``ModelError`` if a logit is not a number.
    """
    return _decode_frame(decoder, joint, joint.project_frames(encoded_frame)[0], state, max_symbols, special)


def greedy_decode(
    decoder: RnntDecoder,
    joint: RnntJoint,
    encoded: mx.array,
    max_symbols: int,
    special: frozenset[int] = frozenset(),
) -> tuple[list[int], list[int]]:
    """The labels of a whole clip ``[1, T, D]`` and for each the frame that it came from."""
    frames = joint.project_frames(encoded)[0]
    mx.eval(frames)
    state, labels, origins = decoder.new_state(), [], []
    for t in range(frames.shape[0]):
        found, state = _decode_frame(decoder, joint, frames[t : t + 1], state, max_symbols, special)
        labels += found
        origins += [t] * len(found)
    return labels, origins


def _decode_frame(
    decoder: RnntDecoder,
    joint: RnntJoint,
    frame: mx.array,
    state: RnntState,
    max_symbols: int,
    special: frozenset[int],
) -> tuple[list[int], RnntState]:
    labels: list[int] = []
    for _ in range(max_symbols):
        proposal = state.proposal or _propose(decoder, joint, state)
        label = _best(joint.fuse(frame, proposal.projected))
        if label == joint.blank:
            return labels, RnntState(state.label, state.h, state.c, proposal)
        state = RnntState(label, proposal.h, proposal.c)
        if label not in special:
            labels.append(label)
    return labels, state


def _propose(decoder: RnntDecoder, joint: RnntJoint, state: RnntState) -> Proposal:
    label = None if state.label is None else mx.array([state.label])
    predicted, h, c = decoder.step(label, state.h, state.c)
    return Proposal(joint.project_prediction(predicted), h, c)


def _best(logits: mx.array) -> int:
    """The highest logit's index, the lowest of equals; waits for the device."""
    best = mx.where(mx.any(mx.isnan(logits)), -1, mx.argmax(logits).astype(mx.int32))
    label = cast(int, best.item())
    if label < 0:
        raise ModelError("a transcript logit is not a number")
    return label
