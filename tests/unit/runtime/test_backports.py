"""Each back-port: applies to its versions alone, acts on restored files alone, changes nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from cachepipe.runtime.backports import TABLE, Backport, matching


@pytest.mark.parametrize("backport", TABLE, ids=lambda backport: backport.name)
def test_the_patched_module_exists_on_the_versions_it_names(backport: Backport) -> None:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    assert backport.first <= version <= backport.last
    assert import_module(backport.module)


@pytest.mark.parametrize("version", ["2.7.0", "2.12.1", "2.14.0", "3.0", "", "main", "2"])
def test_other_versions_are_left_alone(version: str) -> None:
    assert matching(version) == ()


PROBE = """
import sys, os, time
sys.path[:0] = {path!r}
from cachepipe.runtime import backports
import torch
import torch._inductor.cpu_vec_isa as module
calls = []
module.VecISA._probe_load = lambda self, path: calls.append(path) or False
backports.apply({root!r}, torch.__version__)
isa = module.VecAVX2()
new = os.path.join({root!r}, "new.so")
open(new, "w").close()
os.utime(new, ns=(time.time_ns() + 10**9,) * 2)
print(isa._probe_load({old!r}), isa._probe_load(new), isa._probe_load({outside!r}), isa._probe_load("/nonexistent"))
print(len(calls))
"""


def test_isa_probe_trusts_restored_objects_and_probes_every_other(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    old, outside = root / "old.so", tmp_path / "outside.so"
    for file in (old, outside):
        file.touch()
        os.utime(file, (1, 1))
    code = PROBE.format(path=sys.path, root=str(root), old=str(old), outside=str(outside))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "False", "False", "False", "3"], done.stderr
