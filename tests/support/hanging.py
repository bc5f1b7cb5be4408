"""Builds `hang.c` once per run: the preloaded library of calls that never return, also under the name of NVML's."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("hang.c")


@cache
def variables() -> dict[str, str]:
    """Returns the variables under which a process uses the library; `HANG` and `EPOCH` switch it on."""
    folder = Path(tempfile.mkdtemp(prefix="cachepipe-hang-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libhang.so"
    compiler = os.environ.get("CXX", "g++")
    words = [compiler, "-x", "c", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(words, check=True, capture_output=True)
    shutil.copy(library, folder / "libnvidia-ml.so.1")
    return {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(folder)}
