"""Kernels for NVIDIA GPUs, each for a row of operations that is small work in many launches.

A frame there is bound by launches, some ten microseconds each, not by what they compute. Each function here says which
plain form, in its caller, it stands for; both are compared wherever there is such a GPU. All arithmetic is float32 and
every result is rounded once.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx

__all__ = ["allowed", "mamba_step", "on_cuda", "rms_norm"]

_here = threading.local()

THREADS = 256

SUMS = """
// The sum over a block, known to all of its threads.
__device__ float block_sum(float value) {
  __shared__ float parts[32];
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < (blockDim.x + 31) / 32; ++warp) total += parts[warp];
  return total;
}
"""

# One block a row. Row r is scaled by row r % GROUPS of the factors.
RMS_NORM = """
  const int row = blockIdx.x;
  float squares = 0;
  for (int i = threadIdx.x; i < D; i += blockDim.x) {
    const float v = static_cast<float>(x[row * D + i]);
    squares += v * v;
  }
  const float scale = rsqrtf(block_sum(squares) / D + eps[0]);
  for (int i = threadIdx.x; i < D; i += blockDim.x) {
    const float y = static_cast<float>(x[row * D + i]) * scale * static_cast<float>(factors[(row % GROUPS) * D + i]);
    out[row * D + i] = static_cast<U>(y);
  }
"""

CONVOLVED = """
__device__ float silu(float v) { return v / (1.0f + expf(-v)); }

// Channel c of the convolution, and its next past: K - 1 older inputs, then the present one.
template <int K, int C, typename T>
__device__ float convolved(
    int c, const T* now, const T* past, const float* taps, const float* bias, T* next, bool writes) {
  float sum = taps[0 * C + c] * static_cast<float>(K > 1 ? past[c] : now[c]);
  for (int k = 1; k < K; ++k) {
    const T input = k < K - 1 ? past[k * C + c] : now[c];
    sum += taps[k * C + c] * static_cast<float>(input);
    if (writes) next[(k - 1) * C + c] = input;
  }
  return silu(sum + bias[c]);
}
"""

# One block a head of a row, 8 warps. A warp takes every eighth row of the head's state, its lanes the columns.
MAMBA_STEP = """
  constexpr int C = H * P + 2 * G * N;
  const int b = blockIdx.x / H, h = blockIdx.x % H, g = h / (H / G);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* row = projected + b * (H * P + C + H);
  const T* now = row + H * P;
  const T* past = conv + b * (K - 1) * C;
  T* next = next_conv + b * (K - 1) * C;
  __shared__ float inputs[P], keys[N], queries[N];
  const bool first = h % (H / G) == 0;  // the group's channels are written once
  for (int p = threadIdx.x; p < P; p += blockDim.x)
    inputs[p] = convolved<K, C>(h * P + p, now, past, taps, conv_bias, next, true);
  for (int n = threadIdx.x; n < N; n += blockDim.x) {
    keys[n] = convolved<K, C>(H * P + g * N + n, now, past, taps, conv_bias, next, first);
    queries[n] = convolved<K, C>(H * P + (G + g) * N + n, now, past, taps, conv_bias, next, first);
  }
  __syncthreads();
  const float raw = static_cast<float>(row[H * P + C + h]) + dt_bias[h];
  const float delta = raw > 20.0f ? raw : log1pf(expf(raw));
  const float decay = expf(delta * rates[h]);
  for (int p = warp; p < P; p += blockDim.x / 32) {
    const float driven = delta * inputs[p];
    const float* before = ssm + ((b * H + h) * P + p) * N;
    float* after = next_ssm + ((b * H + h) * P + p) * N;
    float y = 0;
    for (int n = lane; n < N; n += 32) {
      const float s = decay * before[n] + driven * keys[n];
      after[n] = s;
      y += s * queries[n];
    }
    for (int step = 16; step; step /= 2) y += __shfl_xor_sync(0xffffffffu, y, step);
    if (lane == 0)
      gated[(b * H + h) * P + p] = (y + skip[h] * inputs[p]) * silu(static_cast<float>(row[h * P + p]));
  }
"""


@cache
def _available() -> bool:
    return mx.cuda.is_available()


@contextmanager
def allowed() -> Iterator[None]:
    """Where these kernels may stand for their plain forms: inside, and in this thread. They have no gradients."""
    before = getattr(_here, "allowed", False)
    _here.allowed = True
    try:
        yield
    finally:
        _here.allowed = before


def on_cuda() -> bool:
    """Whether these kernels are to be used now: they are allowed, and there is an NVIDIA GPU."""
    return getattr(_here, "allowed", False) and mx.default_device() == mx.gpu and _available()


@cache
def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, header: str) -> Any:
    return mx.fast.cuda_kernel(
        name=f"voicechat_{name}", input_names=list(inputs), output_names=list(outputs), source=source, header=header
    )


@cache
def _number(value: float) -> mx.array:
    number = mx.array([value], mx.float32)
    mx.eval(number)
    return number


def rms_norm(x: mx.array, factors: mx.array, eps: float, dtype: mx.Dtype) -> mx.array:
    """``x / rms(x) * factors`` over the last axis, in ``dtype``: ``nn.norms.rms_norm``.

    ``factors`` ``[D]``, or ``[G, D]`` where rows of x belong to G groups in turn.
    """
    rows, width = x.size // x.shape[-1], x.shape[-1]
    result: mx.array = _kernel("rms_norm", ("x", "factors", "eps"), ("out",), RMS_NORM, SUMS)(
        inputs=[x, factors, _number(eps)],
        template=[("U", dtype), ("D", width), ("GROUPS", factors.size // width)],
        grid=(rows * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[dtype],
    )[0]
    return result


def mamba_step(
    projected: mx.array, conv: mx.array, ssm: mx.array, weights: tuple[mx.array, ...], groups: int
) -> tuple[mx.array, mx.array, mx.array]:
    """One position of a Mamba-2 mixer between its two projections, but for the norm: ``Mamba2Mixer._one``.

    Args:
        projected: gate, convolution input and step sizes of one product, ``[B, 1, H P + C + H]``.
        conv: the convolution's past ``[B, K - 1, C]`` in the same dtype.
        ssm: the state ``[B, H, P, N]`` float32.
        weights: taps ``[K, C]`` and bias ``[C]`` of the convolution; rates, step size bias and skip factor ``[H]``. All
            float32.
        groups: how many share keys and queries.

    Returns:
        What the norm gets, ``[B, 1, H, P]`` float32, and the next ``conv`` and ``ssm``.
    """
    batch, heads, size, state = ssm.shape
    names = ("projected", "conv", "ssm", "taps", "conv_bias", "rates", "dt_bias", "skip")
    kernel = _kernel("mamba_step", names, ("gated", "next_conv", "next_ssm"), MAMBA_STEP, CONVOLVED)
    gated, next_conv, next_ssm = kernel(
        inputs=[projected, conv, ssm, *weights],
        template=[
            ("T", projected.dtype), ("H", heads), ("P", size), ("N", state), ("G", groups), ("K", conv.shape[1] + 1),
        ],
        grid=(batch * heads * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(batch, 1, heads, size), conv.shape, ssm.shape],
        output_dtypes=[mx.float32, conv.dtype, mx.float32],
    )  # fmt: skip
    return gated, next_conv, next_ssm
