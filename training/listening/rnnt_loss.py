"""The transducer's loss (Graves 2012): minus the logarithm of the sum over every way to say the labels.

Frames t and labels u make a lattice; blank leads from (t, u) to (t + 1, u), the next label to (t, u + 1). All cells
with the same t + u depend on those of the sum before only, so both sums, from the start and from the end, are a loop
over these diagonals. On CUDA each is one kernel, elsewhere a few operations a diagonal; ``agrees`` compares them.
"""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import numpy as np

from voicechat_core.nn.conformer import skew

__all__ = ["Lattice", "agrees", "kernel_lattice", "plain_lattice", "transducer_loss", "use_kernels"]

NONE = -1e30  # the logarithm of nothing; infinite values would make differences that are no numbers
WARP = 32  # threads of a block come in these

# Log probabilities ``blank`` and ``label`` [B, T, U + 1] and the labels' number [B] -> log likelihood [B] and how
# often each arc is taken on average, both [B, T, U + 1].
Lattice = Callable[[mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array]]


def plain_lattice(blank: mx.array, label: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The lattice by operations on whole diagonals; see ``Lattice``."""
    _, frames, places = blank.shape
    blank, label, diagonals = _by_diagonal(blank), _by_diagonal(label), frames + places - 1
    forward = _forward(blank, label, diagonals)
    # Behind the last blank of every sample stands a cell of likelihood one, on its own diagonal.
    place, end = mx.arange(places), lengths[:, None, None]
    ends = mx.where((place == end) & (mx.arange(diagonals + 1)[:, None] == frames + end), 0.0, NONE)
    after, blank_arcs, label_arcs = ends[:, diagonals], [], []
    for d in range(diagonals - 1, -1, -1):  # no number of the loop is a part of what is computed: one kernel serves all
        after = mx.maximum(after, ends[:, d + 1])
        above = mx.pad(after[:, 1:], [(0, 0), (0, 1)], constant_values=NONE)
        blank_arcs.append(blank[:, d] + after)
        label_arcs.append(label[:, d] + above)
        after = mx.logaddexp(blank_arcs[-1], label_arcs[-1])
    likelihood = after[:, 0]
    by_blank, by_label = (
        _by_frame(mx.exp(forward + mx.stack(through[::-1], axis=1) - likelihood[:, None, None]), frames)
        for through in (blank_arcs, label_arcs)
    )
    return likelihood, by_blank, by_label


def _forward(blank: mx.array, label: mx.array, diagonals: int) -> mx.array:
    """Log likelihood of reaching each cell: ``[B, D, U + 1]`` by diagonals."""
    row = mx.where(mx.arange(blank.shape[2]) == 0, 0.0, NONE) + mx.zeros((blank.shape[0], 1))
    rows = [row]
    for d in range(diagonals - 1):
        below = mx.pad((row + label[:, d])[:, :-1], [(0, 0), (1, 0)], constant_values=NONE)
        row = mx.logaddexp(row + blank[:, d], below)
        rows.append(row)
    return mx.stack(rows, axis=1)


def _by_diagonal(x: mx.array) -> mx.array:
    """``[B, T, U1]`` -> ``[B, T + U1 - 1, U1]``: entry (d, u) is frame d - u; nothing where there is no such frame."""
    frames, places = x.shape[1:]
    frame = mx.arange(frames + places - 1)[:, None] - mx.arange(places)[None]
    return mx.where((frame >= 0) & (frame < frames), skew(x.swapaxes(1, 2)).swapaxes(1, 2), NONE)


def _by_frame(x: mx.array, frames: int) -> mx.array:
    """The inverse of ``_by_diagonal``."""
    places = x.shape[2]
    diagonal = mx.arange(frames)[:, None] + mx.arange(places)[None]
    return mx.take_along_axis(x, mx.broadcast_to(diagonal, (x.shape[0], frames, places)), axis=1)


HEADER = """
__device__ __forceinline__ float log_add(float a, float b) {
  const float high = fmaxf(a, b), low = fminf(a, b);
  return high + log1pf(expf(low - high));
}
"""

# One block a sample, one thread a label place u; at diagonal d it stands at frame d - u. Its own cell of the diagonal
# before is in a register, its neighbour's in shared memory, in two rows by turns.
FORWARD = """
  __shared__ float rows[2][THREADS];
  const int sample = blockIdx.x, u = threadIdx.x, length = lengths[sample];
  const long long start = (long long)sample * FRAMES * PLACES;
  float mine = NOTHING;
  for (int d = 0; d < FRAMES + PLACES - 1; ++d) {
    const int t = d - u;
    float value = NOTHING;
    if (u < PLACES && t >= 0 && t < FRAMES) {
      const long long cell = start + (long long)t * PLACES + u;
      const float stay = t > 0 ? mine + blank[cell - PLACES] : NOTHING;
      const float below = u > 0 ? rows[(d + 1) & 1][u - 1] + label[cell - 1] : NOTHING;
      value = d == 0 ? 0.0f : log_add(stay, below);
      reached[cell] = value;
      if (t == FRAMES - 1 && u == length) likelihood[sample] = value + blank[cell];
    }
    mine = value;
    rows[d & 1][u] = value;
    __syncthreads();
  }
"""

BACKWARD = """
  __shared__ float rows[2][THREADS];
  const int sample = blockIdx.x, u = threadIdx.x, length = lengths[sample];
  const long long start = (long long)sample * FRAMES * PLACES;
  const float whole = likelihood[sample];
  float mine = NOTHING;
  for (int d = FRAMES + PLACES - 2; d >= 0; --d) {
    const int t = d - u;
    float value = NOTHING;
    if (u < PLACES && t >= 0 && t < FRAMES) {
      const long long cell = start + (long long)t * PLACES + u;
      const float behind = t < FRAMES - 1 ? mine : (u == length ? 0.0f : NOTHING);
      const float above = u < length ? rows[(d + 1) & 1][u + 1] : NOTHING;
      const float by_blank = blank[cell] + behind, by_label = label[cell] + above;
      value = log_add(by_blank, by_label);
      blank_arcs[cell] = expf(reached[cell] + by_blank - whole);
      label_arcs[cell] = expf(reached[cell] + by_label - whole);
    }
    mine = value;
    rows[d & 1][u] = value;
    __syncthreads();
  }
"""

_kernels: dict[str, Any] = {}


def _kernel(name: str, inputs: list[str], outputs: list[str], source: str) -> Any:
    if name not in _kernels:
        source = source.replace("NOTHING", f"{NONE}f")
        _kernels[name] = mx.fast.cuda_kernel(
            name=name, input_names=inputs, output_names=outputs, source=source, header=HEADER
        )
    return _kernels[name]


def kernel_lattice(blank: mx.array, label: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The lattice by two CUDA kernels; see ``Lattice``. For at most 1,023 labels."""
    batch, frames, places = blank.shape
    threads = -(-places // WARP) * WARP
    how: dict[str, Any] = {
        "template": [("FRAMES", frames), ("PLACES", places), ("THREADS", threads)],
        "grid": (batch * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
    }
    lengths, cells = lengths.astype(mx.int32), (batch, frames, places)
    forward = _kernel("rnnt_forward", ["blank", "label", "lengths"], ["reached", "likelihood"], FORWARD)
    reached, likelihood = forward(
        inputs=[blank, label, lengths], output_shapes=[cells, (batch,)], output_dtypes=[mx.float32] * 2, **how
    )
    backward = _kernel(
        "rnnt_backward",
        ["blank", "label", "lengths", "reached", "likelihood"],
        ["blank_arcs", "label_arcs"],
        BACKWARD,
    )
    blank_arcs, label_arcs = backward(
        inputs=[blank, label, lengths, reached, likelihood],
        output_shapes=[cells, cells],
        output_dtypes=[mx.float32] * 2,
        **how,
    )
    return likelihood, blank_arcs, label_arcs


_lattice: list[Lattice] = [plain_lattice]


def use_kernels(kernels: bool) -> None:
    """Compute every loss from now on by the CUDA kernels, or by plain operations."""
    _lattice[0] = kernel_lattice if kernels else plain_lattice


def agrees(tolerance: float = 5e-3, *, lattice: Lattice = kernel_lattice, places: int = 57) -> float:
    """How far a form of the lattice is from the plain one on random input: the largest difference.

    Raises:
        ArithmeticError: when it is more than ``tolerance``, or not a number.
    """
    batch, frames = 5, 150
    keys = mx.random.split(mx.random.key(7), 2)
    blank, label = (-3.0 * mx.random.uniform(shape=(batch, frames, places), key=key) for key in keys)
    lengths = mx.array([0, 1, 17 % places, places // 2, places - 1])
    label = mx.where(mx.arange(places) < lengths[:, None, None], label, NONE)
    pairs = zip(lattice(blank, label, lengths), plain_lattice(blank, label, lengths), strict=True)
    # A likelihood is some hundreds: it is compared by its share, the arcs as they are.
    worst = mx.stack([mx.abs((a - b) / mx.maximum(1.0, mx.abs(b))).max() for a, b in pairs]).max()
    far = float(np.array(worst))
    if not far <= tolerance:
        raise ArithmeticError(f"two forms of the transducer's lattice differ by {far}")
    return far


@mx.custom_function
def _negative_likelihood(
    logits: mx.array, labels: mx.array, lengths: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Losses ``[B]``; then, for the gradient, the logits' log sum and both arcs' shares ``[B, T, U + 1]``."""
    whole = mx.logsumexp(logits, axis=-1)
    index = mx.maximum(_padded(labels), 0)[:, None, :, None]
    shape = (*logits.shape[:-1], 1)
    label = mx.take_along_axis(logits, mx.broadcast_to(index, shape), axis=-1)[..., 0] - whole
    label = mx.where(mx.arange(logits.shape[2]) < lengths[:, None, None], label, NONE)
    likelihood, blank_arcs, label_arcs = _lattice[0](logits[..., -1] - whole, label, lengths)
    return -likelihood, whole, blank_arcs, label_arcs


@_negative_likelihood.vjp
def _gradient(
    primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    """What an arc takes away from its own logit, and every visit gives to all of them by their shares."""
    logits, labels, lengths = primals
    _, whole, blank_arcs, label_arcs = outputs
    labels = _padded(labels)[:, None, :, None]
    kind = mx.arange(logits.shape[-1])
    blank, label = blank_arcs[..., None], label_arcs[..., None]
    taken = mx.where(kind == logits.shape[-1] - 1, blank, 0.0) + mx.where(mx.equal(kind, labels), label, 0.0)
    gradient = (blank + label) * mx.exp(logits - whole[..., None]) - taken
    return cotangents[0][:, None, None, None] * gradient, mx.zeros_like(primals[1]), mx.zeros_like(lengths)


def _padded(labels: mx.array) -> mx.array:
    """After the last label there is none: ``[B, U] -> [B, U + 1]``."""
    return mx.pad(labels, [(0, 0), (0, 1)], constant_values=-1)


def transducer_loss(logits: mx.array, labels: mx.array, lengths: mx.array) -> mx.array:
    """Minus the log likelihood of each sample's labels: ``[B]``, with a gradient for the logits.

    Args:
        logits: ``[B, T, U + 1, classes + 1]`` float32; blank is the last class. Every sample has T frames.
        labels: ``[B, U]``, of which the first ``lengths`` count.
        lengths: ``[B]``, from 0 to U.
    """
    return cast(tuple[mx.array, ...], _negative_likelihood(logits, labels, lengths))[0]
