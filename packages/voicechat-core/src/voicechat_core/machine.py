"""The machine that something was measured on: a processor, cores, memory, a system. No MLX."""

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """``cores`` are those that this process may use, ``memory_bytes`` all that is built in (0 where nobody says)."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str

    @classmethod
    def here(cls) -> "Machine":
        """This one."""
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(_cpu(), usable, _memory(), platform.platform())

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 1e9:.1f} GB, {self.system}"


def _cpu() -> str:
    """The processor's name as its maker writes it, else its family."""
    try:
        if platform.system() == "Darwin":
            words = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        return _named(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")) or platform.machine()
    except (OSError, subprocess.CalledProcessError):
        return platform.machine()


def _named(cpuinfo: str) -> str:
    """The first model name in Linux's list of processors; none on some of them."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((" ".join(value.split()) for key, _, value in lines if key.strip() == "model name"), "")


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
