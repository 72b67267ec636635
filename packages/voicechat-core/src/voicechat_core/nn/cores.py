"""A second core for what is large: MLX works a CPU stream off with one thread, however many cores there are.

Products come from a BLAS; that of MLX's wheels for Linux is the reference, on one thread: 8.3 multiplications and
additions a nanosecond here, at most. So the two halves of a large computation are given to two streams. On anything but
a CPU, for what is small, and where no core is free, since there is one or the BLAS has threads of its own, nothing is
divided: the graph is then that of one stream.
"""

import os
import threading
from collections.abc import Callable

import mlx.core as mx

from voicechat_core import blas

__all__ = ["by_halves"]

# A millisecond of one core's; two streams cost about 0.05 ms of waiting for each other.
WORTH_IT = 8_000_000  # multiplications and additions
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_own = threading.local()  # a stream belongs to the thread that made it


def by_halves(function: Callable[[mx.array], mx.array], x: mx.array, flops: int, before: int = 0) -> mx.array:
    """``function(x)``, its halves along axis 1 at once where that helps.

    Args:
        function: of ``[B, before + n, ...]``, whose row i depends on the rows ``i ... i + before`` of its argument; it
            may make several rows of each.
        x: ``[B, before + n, ...]``.
        flops: multiplications and additions of the whole.
        before: rows at the front that are only looked at.
    """
    rows = x.shape[1] - before
    if flops < WORTH_IT or rows < 2 or 2 * blas.threads() > CORES or mx.default_device() != mx.cpu:
        return function(x)
    half = rows // 2
    with mx.stream(_second_stream()):
        second = function(x[:, half:])
    return mx.concatenate([function(x[:, : before + half]), second], axis=1)


def _second_stream() -> mx.Stream:
    stream: mx.Stream | None = getattr(_own, "stream", None)
    if stream is None:
        stream = _own.stream = mx.new_stream(mx.cpu)
    return stream
