"""Transcript branch: an RNN transducer (Graves 2012) on the encoder's frames, decoded greedily.

The prediction network reads the labels said so far; the joint network adds its output to a frame and names the
next label, or blank to go on to the next frame. Everything is computed in float32 whatever the weights are: the
state runs on for a whole session, and in half precision it drifts.

The next label decides what is computed next, so the host waits for each. ``propose`` asks for a frame's first one and
waits for nothing, so that other work can be queued behind it; ``resolve`` waits and goes on while labels come.
"""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from voicechat_core.config import DecoderConfig, JointConfig
from voicechat_core.errors import ModelError
from voicechat_core.nn.derived import Derived
from voicechat_core.nn.linear import Embedding, Linear

__all__ = [
    "Pending", "Proposal", "RnntDecoder", "RnntJoint", "RnntState",
    "greedy_decode", "greedy_step", "propose", "resolve",
]  # fmt: skip


class Lstm(nn.Module):
    """Layers of ``torch.nn.LSTM``, one step at a time; gates in its order: input, forget, cell, output."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        for layer in range(layers):
            self[f"weight_ih_l{layer}"] = mx.zeros((4 * size, size))
            self[f"weight_hh_l{layer}"] = mx.zeros((4 * size, size))
            self[f"bias_ih_l{layer}"] = mx.zeros((4 * size,))
            self[f"bias_hh_l{layer}"] = mx.zeros((4 * size,))
        self._joint = [Derived(_one_product) for _ in range(layers)]

    def __call__(self, x: mx.array, h: mx.array, c: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Input ``[B, H]`` and state ``[L, B, H]`` -> the last layer's output ``[B, H]`` and the new state."""
        hidden, cells = [], []
        before = zip(mx.split(h, h.shape[0]), mx.split(c, c.shape[0]), strict=True)
        for layer, (own, cell) in enumerate(before):
            i, f, g, o = mx.split(self._gates(layer, x, own.squeeze(0)), 4, axis=-1)
            cells.append(mx.sigmoid(f) * cell.squeeze(0) + mx.sigmoid(i) * mx.tanh(g))
            x = mx.sigmoid(o) * mx.tanh(cells[-1])
            hidden.append(x)
        return x, mx.stack(hidden), mx.stack(cells)

    def _gates(self, layer: int, x: mx.array, h: mx.array) -> mx.array:
        names = (f"{kind}_l{layer}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        matrix, bias = self._joint[layer](*(self[name] for name in names))
        gates: mx.array = mx.addmm(bias, mx.concatenate([x, h], axis=-1), matrix)
        return gates


def _one_product(w_ih: mx.array, w_hh: mx.array, b_ih: mx.array, b_hh: mx.array) -> tuple[mx.array, mx.array]:
    """Both matrices one above the other ``[2 H, 4 H]``, as a product with rows reads them, and the bias; float32.

    A second copy, 26 MB at the published size. In the checkpoint's order a step takes two to three times as long on a
    CPU.
    """
    return mx.contiguous(mx.concatenate([w_ih, w_hh], axis=1).astype(mx.float32).T), (b_ih + b_hh).astype(mx.float32)


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


@dataclass
class Pending:
    """What a frame may say next: ``best`` [] int32, blank for nothing, -1 where a logit is not a number.

    Nothing of it was waited for. ``frame`` ``[1, J]`` is projected, ``state`` that before ``best``, whose prediction
    is ``proposal``.
    """

    best: mx.array
    frame: mx.array
    state: RnntState
    proposal: Proposal


def propose(decoder: RnntDecoder, joint: RnntJoint, encoded_frame: mx.array, state: RnntState) -> Pending:
    """What the frame ``[1, 1, D]`` says first. Waits for nothing."""
    return _pending(decoder, joint, joint.project_frames(encoded_frame).squeeze(0), state)


def resolve(
    decoder: RnntDecoder, joint: RnntJoint, pending: Pending, max_symbols: int, special: frozenset[int] = frozenset()
) -> tuple[list[int], RnntState, int]:
    """The labels of a proposed frame, without the special ones, the state after them, and how often it waited.

    At most ``max_symbols`` labels, special ones counted, and a wait for each of these and for a blank. Raises
    ``ModelError`` if a logit is not a number.
    """
    labels: list[int] = []
    for waits in range(1, max_symbols + 1):
        label, state, proposal = _number(pending.best), pending.state, pending.proposal
        if label == joint.blank:
            return labels, RnntState(state.label, state.h, state.c, proposal), waits
        state = RnntState(label, proposal.h, proposal.c)
        if label not in special:
            labels.append(label)
        if waits < max_symbols:
            pending = _pending(decoder, joint, pending.frame, state)
    return labels, state, max_symbols


def greedy_step(
    decoder: RnntDecoder,
    joint: RnntJoint,
    encoded_frame: mx.array,
    state: RnntState,
    max_symbols: int,
    special: frozenset[int] = frozenset(),
) -> tuple[list[int], RnntState]:
    """The labels of one frame ``[1, 1, D]``: ``propose`` and ``resolve`` at once, without the count."""
    labels, state, _ = resolve(decoder, joint, propose(decoder, joint, encoded_frame, state), max_symbols, special)
    return labels, state


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
    labels, state, _ = resolve(decoder, joint, _pending(decoder, joint, frame, state), max_symbols, special)
    return labels, state


def _pending(decoder: RnntDecoder, joint: RnntJoint, frame: mx.array, state: RnntState) -> Pending:
    proposal = state.proposal or _propose(decoder, joint, state)
    logits = joint.fuse(frame, proposal.projected)
    # The lowest of equals.
    best = mx.where(mx.any(mx.isnan(logits)), -1, mx.argmax(logits).astype(mx.int32))
    return Pending(best, frame, state, proposal)


def _propose(decoder: RnntDecoder, joint: RnntJoint, state: RnntState) -> Proposal:
    label = None if state.label is None else mx.array([state.label])
    predicted, h, c = decoder.step(label, state.h, state.c)
    return Proposal(joint.project_prediction(predicted), h, c)


def _number(best: mx.array) -> int:
    """Waits for the device."""
    label = cast(int, best.item())
    if label < 0:
        raise ModelError("a transcript logit is not a number")
    return label
