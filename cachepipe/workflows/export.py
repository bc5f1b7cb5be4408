"""Exports an entry with the engine `aot`: native functions beside the trimmed tree, made by a process of its own.

1 a worker exports every shape bucket, at the path at which services restore, with the trimmed tree in place; for a GPU with the tuned
  one, which holds every kernel that is tried: torch's records of what won have other keys there, so it times once more, alone
2 what it left beside the functions is dropped: the tree stays as it was trimmed
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace

from cachepipe.adapters.workdir import EntryDir
from cachepipe.domain.engine import FILE, FILE_BYTES, Description, EngineFile, engine_folder, in_words
from cachepipe.domain.entry import EntrySpec
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.record import read_record
from cachepipe.errors import IntegrityError
from cachepipe.workflows.jobs import Shop, run_job, worker_count
from cachepipe.workflows.quiet_gpu import tuned_quietly

STEP = "export"
DESCRIPTION = "eager.structure"
"""The module as the step `eager`, another process, describes it."""
_KEPT = "engine.partial"


def is_described(entry: EntryDir) -> bool:
    """Tells whether the step `eager` has left a description that can be read."""
    try:
        read_record(Description, entry.read(DESCRIPTION) or b"", DESCRIPTION, FILE_BYTES)
    except IntegrityError:
        return False
    return True


def export_functions(shop: Shop, spec: EntrySpec, entry: EntryDir, variables: Mapping[str, str]) -> EntryEvidence:
    """Returns the evidence of the step; the entry's tree `export` is the trimmed one with the functions in it.

    Args:
        shop: where.
        spec: the entry.
        entry: has the trees `tune` and `trim`, and the step `eager`.
        variables: what a restore would set for the root.

    Raises:
        BuildError: the model cannot be exported, or does what a native function cannot; torch's own words, or ours.
        Interrupted: SIGINT or SIGTERM.
    """
    done = entry.finished(STEP)
    if done is not None:
        return done
    # 1
    tuned = entry.tree("tune")
    shop.root.fill(tuned if spec.device == "cuda" and tuned.is_dir() else entry.tree("trim"))
    job = shop.job(STEP, spec, entry.pending(STEP))
    job = replace(job, engine=engine_folder(entry.path.name), description=str(entry.path / DESCRIPTION))
    environment = shop.environment(worker_count(), variables)
    tuned_quietly(shop, spec, STEP, entry, lambda: run_job(shop, job, STEP, entry, environment))
    facts = read_record(EngineFile, (shop.root.path / job.engine / FILE).read_bytes(), FILE, FILE_BYTES)
    if facts.unsteady:
        places = in_words(facts.unsteady)
        shop.progress.say(f"note: {spec.id}: not compared, since every process has another value: {places}")
    # 2
    kept = entry.path / _KEPT
    shutil.rmtree(kept, ignore_errors=True)
    shutil.move(shop.root.path / job.engine, kept)
    shop.root.fill(entry.tree("trim"))
    (shop.root.path / job.engine).parent.mkdir(mode=0o700)
    shutil.move(kept, shop.root.path / job.engine)
    return entry.finish(STEP, shop.root)
