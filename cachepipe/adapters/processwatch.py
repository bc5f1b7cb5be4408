"""The compilers that a worker starts, counted by kind: what proves that a start needed none."""

from __future__ import annotations

import os
import sys
from typing import Any

from cachepipe.domain.evidence import Work

PTXAS = frozenset({"ptxas", "ptxas-blackwell"})
"""The second is Triton's for compute capability 10 and later; triton/backends/nvidia/compiler.py: `get_ptxas`, 3.6.0."""
COMPILERS = PTXAS | {"c++", "g++", "gcc", "cc", "clang", "clang++", "nvcc"}
QUERIES = frozenset({"--version", "-v", "-V", "-dumpversion", "-dumpfullversion", "-dumpmachine"})


class ProcessWatch:
    """Counts the compilers and ISA probes that this process starts by `subprocess`, as torch and Triton do. An audit hook
    cannot be removed, so it is for worker processes only."""

    def __init__(self) -> None:
        self.work = Work()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "subprocess.Popen":
            return
        words = [os.fsdecode(word) for word in args[1]] or [""]
        name = os.path.basename(words[0])
        if name in COMPILERS and set(words[1:]) <= QUERIES:
            self.work += Work(compiler_queries=1)
        elif name in PTXAS:
            self.work += Work(ptxas_runs=1)
        elif name in COMPILERS and "-E" not in words:  # the ISA question is answered by a preprocessor run
            self.work += Work(compiler_runs=1)
        elif "LoadLibrary" in words[-1]:
            self.work += Work(isa_probes=1)
