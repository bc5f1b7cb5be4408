"""Runs the real worker on one entry, as the builder does."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachepipe.domain.entry import EntrySpec
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.job import Job
from cachepipe.domain.record import read_record, record_bytes
from cachepipe.domain.variables import cache_variables, pinned_variables
from tests.support.artifacts import entry_spec
from tests.support.zygote import Zygote

MODELS = Path(__file__).parent / "models"
LIMIT_S = 300


def spec_of(factory: str, shape_buckets: tuple[dict[str, int], ...] = ({"batch": 8},), **changes: Any) -> EntrySpec:
    """Returns an entry of `case_models` with input x: (batch, 8), mode default, inference mode."""
    spec = replace(
        entry_spec("case"),
        mode="default",
        factory=f"case_models:{factory}",
        fullgraph=False,
        inputs=[{"shape": ["batch", 8], "dtype": "float32"}],
        shape_buckets=shape_buckets,
        rtol=1e-4,
        atol=1e-4,
    )
    return replace(spec, **changes)


def run_job(
    spec: EntrySpec,
    folder: Path,
    step: str = "tune",
    order: tuple[int, ...] | None = None,
    variables: dict[str, str] | None = None,
    **changes: Any,
) -> EntryEvidence:
    """Returns the evidence of a process of its own; the cache folder is `folder/root` and is kept between calls.

    With `variables` it is a fresh interpreter, since torch reads some of them while it is imported; without, a fork of one
    that has imported torch.
    """
    root = folder / "root"
    result = folder / f"{step}.json"
    result.unlink(missing_ok=True)
    job = Job(
        step=step,
        spec=spec,
        bucket_order=order or tuple(range(len(spec.shape_buckets))),
        calls_per_bucket=2,
        python_path=(str(MODELS),),
        result=str(result),
        root=str(root),
        compare_with_eager=step == "prove",
        record_components=False,
    )
    job_file, log = folder / f"{step}.job", folder / f"{step}.log"
    job_file.write_bytes(record_bytes(replace(job, **changes)))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), **cache_variables(str(root))}
    environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
    if variables is None:
        zygote(is_restored=step in ("prove", "verify")).run("work", str(job_file), str(log), environment)
    else:
        run_fresh(job_file, log, {**environment, **variables})
    assert result.exists(), log.read_text()[-4000:]
    return read_record(EntryEvidence, result.read_bytes(), "evidence", 1 << 28)


@functools.cache
def zygote(is_restored: bool) -> Zygote:
    """Returns what starts workers, one for builds and one for restores: what is restored was built under another hash seed."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return Zygote(pinned_variables("cpu"), "worker_jobs", kept)


def run_fresh(job_file: Path, log: Path, environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "cachepipe.adapters.worker", str(job_file)]
    with log.open("w") as file:
        subprocess.run(words, env=environment, stdout=file, stderr=file, check=False, timeout=LIMIT_S)
