"""This machine, as far as a restore asks: cheap facts first, the fingerprint when they changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.index import IndexRow, select
from cachepipe.domain.record import digest_parts


def host_tag(environment: Mapping[str, str]) -> str:
    """Returns a digest of the cheap facts that a fingerprint depends on; equal on an unchanged host."""
    variables = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_DYNAMIC", "ATEN_CPU_CAPABILITY")
    return digest_parts(
        {
            "boot": _small_file("/proc/sys/kernel/random/boot_id"),
            "cpus": repr(sorted(os.sched_getaffinity(0))),
            "prefix": sys.prefix,
            "python": sys.version,
            "torch": _torch_stat(),
            **{name: environment.get(name, "") for name in variables},
        }
    )


def _small_file(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(4096)
    except (OSError, ValueError):
        return ""


def _torch_stat() -> str:
    for folder in sys.path:
        try:
            facts = os.stat(os.path.join(folder, "torch", "version.py"))
        except OSError:
            continue
        return f"{folder} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}"
    return ""


@dataclass(frozen=True)
class Machine:
    """This machine as far as some rows ask."""

    fingerprint: Fingerprint
    device: str

    def require(self, row: IndexRow) -> None:
        """Returns if the row fits.

        Raises:
            FingerprintMismatchError: it does not; the differences are named.
        """
        self.select([row], row.artifact)

    def select(self, rows: Sequence[IndexRow], what: str, revoked: Sequence[str] = ()) -> IndexRow:
        """Returns the newest row that fits; on a machine with a GPU only rows for GPUs count, if there are any."""
        own = [row for row in rows if row.device == self.device]
        return select(own or rows, self.fingerprint, what, revoked)


def this_machine(rows: Sequence[IndexRow]) -> Machine:
    """Returns this machine's fingerprint, reading no more than the rows ask for."""
    from cachepipe.adapters.machine import machine_fingerprint

    parts = {part.name for row in rows for part in row.fingerprint}
    devices = sorted({"cpu", *(row.device for row in rows)} & {"cpu", "cuda"})
    fingerprint = machine_fingerprint(devices, has_compiler_part="compiler" in parts)
    return Machine(fingerprint, "cuda" if fingerprint.get("gpu_name") else "cpu")
