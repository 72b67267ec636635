"""What a process computes with: versions, the libraries that it has really loaded, the device."""

import hashlib
import os
import platform
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import mlx.core as mx

__all__ = ["backend_facts", "machine_facts"]

PARTS = ("libmlx", "libblas", "liblapack", "libopenblas", "libcublas", "libcudart")
MAPS = Path("/proc/self/maps")


def backend_facts() -> dict[str, Any]:
    """What must be the same on both sides, or the comparison is of two backends."""
    versions = {d.name: d.version for d in distributions() if d.name.lower().startswith("mlx")}
    return {
        "device": str(mx.default_device()),
        "mlx": mx.__version__,
        "mlx_wheels": {
            name: version for name, version in sorted(versions.items()) if "-v" not in name and "-a" not in name
        },
        "libraries": _libraries(),
    }


@cache
def _libraries() -> dict[str, str]:
    """MLX's and BLAS's files as loaded, by content; empty where the system does not list them."""
    mx.eval(mx.ones((2, 2)) @ mx.ones((2, 2)))  # now they are
    if not MAPS.exists():
        return {}
    paths = {Path(line.split()[-1]) for line in MAPS.read_text().splitlines() if "/" in line}
    wanted = sorted(path for path in paths if path.name.startswith(PARTS) and path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in wanted}


def machine_facts() -> dict[str, Any]:
    """What a reader needs to place the numbers."""
    cpus = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "python": f"Python {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpus[0].split(":", 1)[1].strip() if cpus else platform.processor(),
        "cores": f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores",
        "gpu": mx.device_info().get("device_name") if mx.default_device() == mx.Device(mx.gpu) else None,
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
