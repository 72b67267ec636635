"""The process the goldens are made in: one thread, no network, no accelerator, and a description of the machine.

Import this before torch or nemo: it sets their environment variables.
"""

import os
import platform
import warnings
from importlib import metadata
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
warnings.filterwarnings("ignore")

import torch  # noqa: E402

LIBRARIES = ("torch", "nemo-toolkit", "transformers", "tokenizers", "numpy", "scipy", "librosa", "safetensors")
RELEVANT_FLAGS = {"avx", "avx2", "fma", "f16c"}
RELEVANT_PREFIXES = ("avx512", "avx_vnni", "amx", "asimd", "sve", "bf16", "i8mm")


def prepare() -> None:
    """One thread and deterministic kernels: sums are then added in one order."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)


def describe() -> dict[str, object]:
    """What decides the bits: library versions and the instruction sets kernels are chosen by."""
    versions = {name: metadata.version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), **versions, "threads": torch.get_num_threads(), "cpu": processor()}


def processor() -> dict[str, object]:
    """The processor's name, its vector instructions, and the level torch settled on."""
    info = cpuinfo()
    flags = info.get("flags", info.get("Features", "")).split()
    vector = sorted(flag for flag in flags if flag in RELEVANT_FLAGS or flag.startswith(RELEVANT_PREFIXES))
    return {
        "model": info.get("model name", platform.processor() or platform.machine()),
        "flags": " ".join(vector),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
    }


def cpuinfo() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; nothing where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}
