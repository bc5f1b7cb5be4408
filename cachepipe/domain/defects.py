"""Known defects of torch versions that cost a restored start something, and what is done about each.

Source: torch-internals of 2.7 to 2.14, measured on 2.11 (CUDA) and 2.13 (CPU); each row names the upstream thread or file.
"""

from __future__ import annotations

from typing import NamedTuple

Version = tuple[int, int]


class Defect(NamedTuple):
    first: Version
    last: Version
    """Versions `first` to `last`, both included, have it."""
    reference: str
    what: str
    remedy: str
    """What cachepipe does; the name of a back-port where there is one."""
    backport: str = ""


DEFECTS = (
    Defect(
        (2, 9), (2, 11), "pytorch/pytorch#172819",
        "a warm cache is tuned again: the mark of coordinate descent is lost when a kernel is stored",
        "the tuning record of a restored kernel decides", "tuning-record",
    ),
    Defect(
        (2, 9), (2, 11), "pytorch/pytorch#181789",
        "winners of dynamically scaled reduction blocks are tuned again at every start",
        "the tuning record of a restored kernel decides", "tuning-record",
    ),
    Defect(
        (2, 13), (2, 13), "torch/_inductor/cpu_vec_isa.py",
        "every start loads the probe objects of the vector ISA in processes of their own",
        "restored probes, whose CPU flags the fingerprint compares, count as loaded", "isa-probe",
    ),
    Defect(
        (2, 11), (2, 14), "torch/compiler/_cache.py: CacheArtifactManager.deserialize",
        "saving a mega-cache twice in one process loses what the first save held",
        "artifacts are made of the cache folder, never of a bundle",
    ),
    Defect(
        (2, 13), (2, 13), "torch/_dynamo/package.py",
        "`caching_precompile` ends in an AssertionError at a shape that was not built",
        "it is never switched on; leave it off in the service",
    ),
    Defect(
        (2, 13), (2, 14), "pytorch/pytorch#194918",
        "only winners are bundled, and a kernel that still names losers is dropped as a whole at load",
        "the settle step leaves winners only before anything is stored",
    ),
    Defect(
        (2, 7), (2, 14), "torch/_inductor/codecache.py: the key holds no CPU flags",
        "an entry with native code for a larger CPU is a hit on a smaller one, and computes NaN",
        "the fingerprint compares the CPU's flags before the first byte is fetched",
    ),
)  # fmt: skip


def defects_of(version: Version) -> tuple[Defect, ...]:
    """Returns the known defects of a torch version."""
    return tuple(defect for defect in DEFECTS if defect.first <= version <= defect.last)
