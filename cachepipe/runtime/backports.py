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
    is_for_trim: bool
    """Acts also while the builder finds out which files a start opens: it must not hide one of them."""


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


def _honour_tuning_record(module: ModuleType, root: str) -> None:
    """A settled kernel is pickled with its one config, without the mark that coordinate descent chose it, and torch passes
    over its record: the hash in it is that of all candidates, and a single config is not looked up at all. So it is tuned
    again at every start. Here the record decides, read below the restored folder and not at the builder's path."""
    original: Callable[[Any, Callable[[], Any]], None] = module.CachingAutotuner.recheck_autotune_cache

    def recheck_autotune_cache(self: Any, reload_kernel_from_src: Callable[[], Any]) -> None:
        record = _tuning_record(self, root)
        for result in self.compile_results if record else ():
            if _is_config(result.config, record):
                result.config.found_by_coordesc = bool(record.get("found_by_coordesc"))
                self.compile_results = [result]
                return
        original(self, reload_kernel_from_src)

    module.CachingAutotuner.recheck_autotune_cache = recheck_autotune_cache


def _tuning_record(kernel: Any, root: str) -> dict[str, Any]:
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    if not kernel.filename:
        return {}
    folder, name = os.path.split(kernel.filename)
    live = os.path.join(root, "inductor", os.path.basename(folder), name)
    if os.path.isdir(os.path.dirname(live)):
        kernel.filename = live
    cache = AutotuneCache.create(kernel.inductor_meta, kernel.filename, "")
    record: Any = cache._read() if cache else None
    return dict(record) if isinstance(record, dict) else {}


def _is_config(config: Any, record: dict[str, Any]) -> bool:
    chosen = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return all(name in record and record[name] == value for name, value in chosen.items())


TABLE = (
    Backport(
        name="tuning-record",
        first=(2, 11),
        last=(2, 11),
        reference="pytorch/pytorch#172819; torch/_inductor/runtime/triton_heuristics.py: recheck_autotune_cache, in 2.11.0",
        what="takes the tuning record of a restored kernel with one config for what it is: the end of its tuning",
        module="torch._inductor.runtime.triton_heuristics",
        patch=_honour_tuning_record,
        is_for_trim=True,
    ),
    Backport(
        name="isa-probe",
        first=(2, 13),
        last=(2, 13),
        reference="torch/_inductor/cpu_vec_isa.py: VecISA._probe_load, read in 2.13.0",
        what="does not load the restored probe objects of the vector instruction sets in processes of their own",
        module="torch._inductor.cpu_vec_isa",
        patch=_skip_isa_probe,
        is_for_trim=False,
    ),
)

_applied: list[str] = []


def apply(root: str, torch_version: str, is_trim: bool = False) -> list[str]:
    """Applies the back-ports of a version once per process, each when its module is imported.

    Args:
        root: the restored folder; empty on a cold start, which is left alone.
        torch_version: e.g. `2.13.0+cpu`.
        is_trim: this is the builder's trim step.

    Returns:
        The names of those that apply.
    """
    if not root or _applied:
        return _applied
    for backport in matching(torch_version):
        if is_trim and not backport.is_for_trim:
            continue
        _applied.append(backport.name)
        when_imported(backport.module, _with_root(backport, root))
    return _applied


def matching(torch_version: str) -> tuple[Backport, ...]:
    """Returns the back-ports of a version; none for a text that is no version."""
    try:
        major, minor = (int(part) for part in torch_version.split("+", maxsplit=1)[0].split(".")[:2])
    except ValueError:
        return ()
    return tuple(backport for backport in TABLE if backport.first <= (major, minor) <= backport.last)


def _with_root(backport: Backport, root: str) -> Callable[[ModuleType], None]:
    return lambda module: backport.patch(module, root)
