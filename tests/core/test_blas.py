"""Which BLAS multiplies, and with how many threads: asked in a process of its own, since it is found out once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from voicechat_core import blas

ASK = "import json; from voicechat_core import blas; print(json.dumps([str(blas.library()), blas.threads()]))"
# What is asked of an OpenBLAS, and nothing that multiplies.
STAND_IN = "void cblas_sgemm(void) {}\nint openblas_get_num_threads(void) { return 3; }\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the linker of Linux is asked")


def asked(**environment: str) -> tuple[str, int]:
    words = [sys.executable, "-c", ASK]
    found = subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=True)
    library, threads = json.loads(found.stdout)
    return library, threads


def test_mlx_brings_one() -> None:
    """In a file that this process has loaded."""
    library = blas.library()
    assert library is not None
    assert os.fspath(library.resolve()) in Path("/proc/self/maps").read_text()
    assert asked() == (str(library), blas.threads())


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here to make a library with")
def test_one_that_was_loaded_before_is_the_one(tmp_path: Path) -> None:
    source, library = tmp_path / "blas.c", tmp_path / "libopenblas.so"
    source.write_text(STAND_IN)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert asked(LD_PRELOAD=str(library)) == (str(library), 3)
