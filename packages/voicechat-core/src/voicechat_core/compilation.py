"""Whether the steps of a frame are compiled: ``mx.compile`` traces a step once and fuses its elementwise operations.

On a GPU MLX compiles by itself. On a CPU it runs the system's ``g++``, which it looks for once in a process; where
there is none, what is to be compiled runs as it is written, without a word. A ``g++`` that fails (no headers, no place
for its files) ends every evaluation with an error, MLX's own activations included, which are compiled whatever is asked
for here: there compiling is switched off for the process, so that everything runs.
"""

import logging
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

import mlx.core as mx

from voicechat_core.errors import InputError

__all__ = ["COMPILES", "Compile", "check_compile", "say_what_takes_long", "wanted"]

log = logging.getLogger(__name__)

Compile = Literal["auto", "on", "off"]
COMPILES: tuple[Compile, ...] = get_args(Compile)

NO_COMPILER = "on a CPU MLX compiles with g++, which is not here (or MLX_DISABLE_COMPILE is)"
PROBED = (1.0, 2.0, 3.0)
# What "auto" is where compiling works. See docs/performance.md for the measurements.
AUTO_ON = {mx.cpu: True, mx.gpu: True}


def check_compile(compile: str) -> Compile:
    """A setting, if it exists; others are refused before anything is loaded.

    Raises:
        InputError: naming it and those that do.
    """
    if compile not in COMPILES:
        raise InputError(f"compile is {compile!r}; one of {', '.join(COMPILES)} is needed")
    return compile


def wanted(compile: str) -> bool:
    """Whether the steps are to be compiled on the default device. ``auto`` says once why not, where that is a lack.

    Raises:
        InputError: for a setting that does not exist, and for ``on`` where nothing can be compiled.
    """
    check_compile(compile)
    device = mx.default_device().type
    fault = _fault(device)  # also for "off", which must run where compiling fails
    if compile == "off" or (compile == "auto" and not AUTO_ON[device]):
        return False
    if fault is not None and compile == "on":
        raise InputError(f"compile is 'on', but {fault}")
    if fault is not None:
        _warn_once(fault)
    return fault is None


@cache
def _fault(device: mx.DeviceType) -> str | None:
    """Why nothing can be compiled, or None. Asks MLX itself, with two operations that it would fuse."""
    if device != mx.cpu:
        return None
    traces = []

    def probe(x: mx.array) -> mx.array:
        traces.append(x)
        return mx.exp(x) * 2.0

    compiled = mx.compile(probe)
    try:
        mx.eval([compiled(mx.array(number)) for number in PROBED])
    except RuntimeError as error:
        mx.disable_compile()
        return f"MLX cannot compile on this CPU: {str(error).splitlines()[0]}"
    # What is not compiled is called each time. The first trace of a process may be made anew by the second call.
    return None if len(traces) < len(PROBED) else NO_COMPILER


def say_what_takes_long(compile: str) -> None:
    """On a terminal: that what follows takes a while, where MLX has compiled nothing on this CPU yet."""
    kernels = Path(tempfile.gettempdir(), "mlx", version("mlx"), "cpu")  # where MLX keeps what g++ has made
    is_first = compile != "off" and mx.default_device() == mx.cpu and not kernels.exists()
    if is_first and sys.stderr.isatty():
        print(
            "compiling a frame's steps, once on this machine: up to a minute (not with --compile off)", file=sys.stderr
        )


@cache
def _warn_once(fault: str) -> None:
    log.warning("a frame's steps run uncompiled: %s", fault)
