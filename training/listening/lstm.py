"""The prediction network over all labels at once: both LSTM layers as one wave, few kernels a label.

At step s the first layer reads label s and the second what the first made of label s - 1, so one product with a block
matrix serves both. What the labels themselves give is multiplied outside of the loop, and the weights' gradients after
the loop that goes back.
"""

from typing import cast

import mlx.core as mx

from voicechat_core.nn.rnnt import Lstm, RnntDecoder

__all__ = ["predictions"]

GATES = 4  # input, forget, cell, output


def predictions(decoder: RnntDecoder, labels: mx.array) -> mx.array:
    """Labels ``[B, U]`` -> outputs ``[B, U + 1, H]`` of a decoder of two layers, the first before any label."""
    table, lstm = decoder.prediction.embed.weight, decoder.prediction.dec_rnn.lstm
    known = mx.equal(mx.arange(table.shape[0]), labels[..., None])
    embedded = mx.pad(mx.matmul(known.astype(mx.float32), table), [(0, 0), (1, 0), (0, 0)])
    driven = embedded @ lstm.weight_ih_l0.T + (lstm.bias_ih_l0 + lstm.bias_hh_l0)
    # The second layer is one step behind; in the last step nobody hears the first.
    driven = mx.pad(driven, [(0, 0), (0, 1), (0, 0)])
    second = mx.broadcast_to(lstm.bias_ih_l1 + lstm.bias_hh_l1, driven.shape)
    gates = mx.concatenate([mx.unflatten(x, -1, (GATES, -1)) for x in (driven, second)], axis=-1)
    outputs, _, _ = cast(tuple[mx.array, ...], _wave(gates.swapaxes(0, 1), _block_matrix(lstm)))
    return outputs[1:, :, table.shape[1] :].swapaxes(0, 1)


def _block_matrix(lstm: Lstm) -> mx.array:
    """``[2 H, 4 * 2 H]``: from both layers' outputs to both layers' gates."""
    size = lstm.weight_hh_l0.shape[1]
    first, across, second = (
        mx.unflatten(lstm[name].T, -1, (GATES, size)) for name in ("weight_hh_l0", "weight_ih_l1", "weight_hh_l1")
    )
    upper = mx.concatenate([first, across], axis=-1)
    lower = mx.concatenate([mx.zeros_like(first), second], axis=-1)
    return mx.concatenate([upper, lower], axis=0).reshape(2 * size, -1)


@mx.custom_function
def _wave(gates: mx.array, matrix: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Inputs to the gates ``[S, B, 4, W]`` -> outputs of both layers ``[S, B, W]``; the second's first is zero.

    For the gradient also the cells and the sums that went into the gates. W is both layers' width, the first's first.
    """
    steps, batch, _, width = gates.shape
    driven, begun = _each(gates.reshape(steps, batch, -1)), _first_layer(width)
    hidden = cell = mx.zeros((batch, width))
    outputs, cells, sums = [], [], []
    for s in range(steps):
        sums.append(mx.addmm(driven[s], hidden, matrix).reshape(batch, GATES, width))
        i, f, o = (mx.sigmoid(sums[s][:, gate]) for gate in (0, 1, 3))
        cell = f * cell + i * mx.tanh(sums[s][:, 2])
        if s == 0:
            cell = cell * begun
        hidden = o * mx.tanh(cell)
        outputs.append(hidden)
        cells.append(cell)
    return mx.stack(outputs), mx.stack(cells), mx.stack(sums)


@_wave.vjp
def _wave_gradient(
    primals: tuple[mx.array, mx.array], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
) -> tuple[mx.array, mx.array]:
    gates, matrix = primals
    hidden = outputs[0]
    pulls, cells, sums = (_each(x) for x in (cotangents[0], *outputs[1:]))
    steps, batch, _, width = gates.shape
    back, nothing = matrix.T, mx.zeros((batch, width))
    # Which gate a row of [B, 4, W] is: one kernel computes all four, where four results would have to be joined.
    is_input, is_forget, is_cell, is_output = ((mx.arange(GATES) == gate)[:, None] for gate in range(GATES))
    by_hidden, by_cell, by_gates = pulls[-1], nothing, []
    for s in range(steps - 1, -1, -1):
        sounding, before = mx.tanh(cells[s]), cells[s - 1] if s else nothing
        by_cell = by_cell + by_hidden * mx.sigmoid(sums[s][:, 3]) * (1 - sounding * sounding)
        if s == 0:
            by_cell = by_cell * _first_layer(width)
        gate = mx.where(is_cell, mx.tanh(sums[s]), mx.sigmoid(sums[s]))
        slope = mx.where(is_cell, 1 - gate * gate, gate * (1 - gate))
        at_cell, at_hidden = by_cell[:, None], by_hidden[:, None]
        meets = mx.where(is_input, mx.tanh(sums[s][:, 2:3]), mx.where(is_cell, mx.sigmoid(sums[s][:, :1]), 0.0))
        meets = at_cell * mx.where(is_forget, before[:, None], meets)
        meets = mx.where(is_output, at_hidden * sounding[:, None], meets)
        by_gates.append((meets * slope).reshape(batch, -1))
        if s:
            by_hidden = mx.addmm(pulls[s - 1], by_gates[-1], back)
            by_cell = by_cell * mx.sigmoid(sums[s][:, 1])
    gradient = mx.stack(by_gates[::-1])
    earlier = mx.concatenate([nothing[None], hidden[:-1]]).reshape(-1, width)
    return gradient.reshape(gates.shape), earlier.T @ gradient.reshape(steps * batch, -1)


def _each(x: mx.array) -> list[mx.array]:
    """The parts along the first axis, as views: an index would be a kernel."""
    return [part.squeeze(0) for part in mx.split(x, x.shape[0])]


def _first_layer(width: int) -> mx.array:
    """1 for the first layer's half: at step 0 the second one has not begun."""
    return (mx.arange(width) < width // 2).astype(mx.float32)
