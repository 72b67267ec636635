"""The BLAS that multiplies MLX's matrices on a CPU: the one it was built with, or one that was loaded before it."""

import ctypes
import os
from functools import cache
from pathlib import Path

import mlx.core as mx

__all__ = ["library", "threads"]

ROUTINE = "cblas_sgemm"  # what MLX calls for float32


class _Found(ctypes.Structure):
    """``Dl_info`` of dladdr(3): in which file an address lies."""

    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p),
    )  # fmt: skip


@cache
def library() -> Path | None:
    """The file that it is in; None where the system does not say.

    Looked up in the linker's order: what was loaded for all comes before what MLX brings.
    """
    for scope in (None, str(Path(mx.__file__).parent / "lib" / "libmlx.so")):
        try:
            routine = getattr(ctypes.CDLL(scope), ROUTINE)
            found, address = _Found(), ctypes.cast(routine, ctypes.c_void_p)
            if ctypes.CDLL(None).dladdr(address, ctypes.byref(found)):
                return Path(os.fsdecode(found.file))
        except (AttributeError, OSError, TypeError):  # not there; a system without it
            continue
    return None


@cache
def threads() -> int:
    """How many threads it multiplies with, as an OpenBLAS says; 1 of any other, such as the reference that MLX's wheels
    for Linux bring.
    """
    path = library()
    try:
        return 1 if path is None else int(ctypes.CDLL(str(path)).openblas_get_num_threads())
    except (AttributeError, OSError):
        return 1
