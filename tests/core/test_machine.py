"""What a machine says of itself."""

import os
import platform
import sys

import pytest

from voicechat_core import machine
from voicechat_core.machine import Machine


def test_this_one() -> None:
    found = Machine.here()
    assert found.cpu == found.cpu.strip() != ""
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.system == platform.platform()
    assert str(found) == f"{found.cpu}, {found.cores} cores, {found.memory_bytes / 1e9:.1f} GB, {found.system}"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere another call says so")
def test_memory_is_what_linux_says() -> None:
    with open("/proc/meminfo") as file:  # noqa: PTH123
        [kilobytes] = [int(line.split()[1]) for line in file if line.startswith("MemTotal:")]
    assert Machine.here().memory_bytes == 1024 * kilobytes


def test_the_first_processor_has_the_name() -> None:
    listed = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD  EPYC 9\n\nprocessor\t: 1\nmodel name\t: other\n"
    assert machine._named(listed) == "AMD EPYC 9"
    assert machine._named("processor\t: 0\nBogoMIPS\t: 50.00\n") == ""
