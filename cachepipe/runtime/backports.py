"""What a restored start must not do and some versions of torch still do: one table, applied in the service's process.

A back-port acts only on files of the restored folder and only on the versions it was checked against; on every other
version nothing is changed and the service is told in one line which version it is. None of them enters a cache key.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cachepipe.importing import when_imported

Version = tuple[int, int]


@dataclass(frozen=True)
class Backport:
    name: str
    first: Version
    last: Version
    """Versions `first` to `last`, both included."""
    reference: str
    what: str
    module: str
    """Patched right after its import."""
    patch: Callable[[ModuleType, str], None]
    """Called with the module and the restored folder."""


def _skip_isa_probe(module: ModuleType, root: str) -> None:
    """The builder's probe object was loaded once on a CPU with the same flags (the fingerprint says so) and its bytes are
    the signed ones; loading it again costs one process with the whole of libtorch for each instruction set."""
    probe: Callable[[Any, str], bool] = module.VecISA._probe_load
    folder = os.path.join(os.path.realpath(root), "")
    applied_ns = time.time_ns()

    def probe_load(self: Any, output_path: str) -> bool:
        try:
            is_restored = os.path.realpath(output_path).startswith(folder)
            if is_restored and os.stat(output_path).st_mtime_ns < applied_ns:
                return True
        except OSError:
            pass
        return probe(self, output_path)

    module.VecISA._probe_load = probe_load


TABLE = (
    Backport(
        name="isa-probe",
        first=(2, 13),
        last=(2, 13),
        reference="torch/_inductor/cpu_vec_isa.py: VecISA._probe_load, read in 2.13.0",
        what="does not load the restored probe objects of the vector instruction sets in processes of their own",
        module="torch._inductor.cpu_vec_isa",
        patch=_skip_isa_probe,
    ),
)

_applied: list[str] = []


def apply(root: str, torch_version: str) -> list[str]:
    """Applies the back-ports of a version once per process, each when its module is imported.

    Args:
        root: the restored folder; empty on a cold start, which is left alone.
        torch_version: e.g. `2.13.0+cpu`.

    Returns:
        The names of those that apply.
    """
    if not root or _applied:
        return _applied
    for backport in matching(torch_version):
        _applied.append(backport.name)
        when_imported(backport.module, _with_root(backport, root))
    return _applied


def matching(torch_version: str) -> tuple[Backport, ...]:
    """Returns the back-ports of a version; none for a text that is no version."""
    try:
        major, minor = (int(part) for part in torch_version.split("+")[0].split(".")[:2])
    except ValueError:
        return ()
    return tuple(backport for backport in TABLE if backport.first <= (major, minor) <= backport.last)


def _with_root(backport: Backport, root: str) -> Callable[[ModuleType], None]:
    return lambda module: backport.patch(module, root)
