"""Steps 4 and 5 of a build: from the trees of all entries to one packed artifact with its statement.

1 merge the trees into one: equal paths must hold equal bytes
2 pack the tree, write the explain data beside the packs
3 write the statement, whose measured part is filled in again after the proof
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from cachepipe.adapters.cachetree import merge_trees
from cachepipe.adapters.machine import compiler_texts
from cachepipe.adapters.packs import Packed, pack_tree, write_blob
from cachepipe.adapters.workdir import EntryDir
from cachepipe.domain.artifact import Blob
from cachepipe.domain.entry import bucket_label
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.gates import Reference
from cachepipe.domain.index import timestamp
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.record import Json, canonical_bytes, record_bytes, to_json
from cachepipe.domain.statement import FORMAT, BucketFacts, EntryRecord, Statement, statement_bytes
from cachepipe.domain.ulid import ulid
from cachepipe.domain.variables import pinned_variables
from cachepipe.errors import BuildError, IntegrityError
from cachepipe.workflows.entry_steps import EntryWork
from cachepipe.workflows.plan import Plan, PlannedEntry, release_fingerprint
from cachepipe.workflows.quiet_gpu import gpu_facts

_OWN_SETTINGS = ("variable TORCHINDUCTOR_COMPILE_THREADS",)
"""Set by the builder for its workers; no service has to have them."""


@dataclass(frozen=True)
class Piece:
    """One entry of the artifact: new, or carried over from an earlier one."""

    planned: PlannedEntry
    tree: Path
    record: EntryRecord
    explain: Json
    entry: EntryDir
    evidences: tuple[EntryEvidence, ...]
    is_carried: bool


def new_piece(planned: PlannedEntry, entry: EntryDir, done: EntryWork) -> Piece:
    """Returns the piece of an entry that was built here; what the proof measures is still zero."""
    spec = planned.spec
    cold, eager = _first_calls(done.tune), _first_calls(done.eager)
    phases = {bucket_label(bucket.shape_bucket): bucket.phases for bucket in done.tune.shape_buckets}
    graphs = {bucket_label(bucket.shape_bucket): bucket.graphs for bucket in done.trim.shape_buckets}
    labels = [bucket_label(shape_bucket) for shape_bucket in spec.shape_buckets]
    facts = tuple(
        BucketFacts(shape_bucket, graphs[label], cold[label], 0.0, eager[label], 0.0, "", phases[label])
        for label, shape_bucket in zip(labels, spec.shape_buckets, strict=True)
    )
    evidences = done.evidences
    tuning = {
        "benchmarks": done.tune.work.benchmarks,
        "tuning_runs": done.tune.work.tuning_runs,
        "settle_rounds": done.facts.settle_rounds,
        "seconds": {evidence.step: round(evidence.ready_s, 3) for evidence in evidences},
        "tuned_kernels": list(dict.fromkeys(done.tune.tuned_kernels))[:64],
        "tuned_bytes": done.facts.tuned_bytes,
        "settled_bytes": done.facts.settled_bytes,
        "dropped_files": done.facts.dropped_files,
        "gpu": gpu_facts(entry, done.facts.settle_rounds),
    }
    environment = {name: value for name, value in done.trim.settings.items() if name not in _OWN_SETTINGS}
    breaks = len(done.tune.graph_breaks)
    record = EntryRecord(spec, planned.key, planned.key_parts, done.kinds, facts, breaks, tuning, environment)
    explain = {
        "components": done.trim.components,
        "settings": dict(done.trim.settings),
        "lookups": to_json(done.trim.lookups),
        "work": {evidence.step: to_json(evidence.work) for evidence in evidences},
    }
    return Piece(planned, done.tree, record, explain, entry, evidences, is_carried=False)


def _first_calls(evidence: EntryEvidence) -> dict[str, float]:
    return {bucket_label(bucket.shape_bucket): bucket.first_call_s for bucket in evidence.shape_buckets}


def proved(piece: Piece, *evidences: EntryEvidence) -> Piece:
    """Returns the piece with what the last proof measured; a carried one keeps the numbers of its own build."""
    if piece.is_carried:
        return replace(piece, evidences=(*piece.evidences, *evidences))
    evidence = evidences[-1]
    measured = {bucket_label(bucket.shape_bucket): bucket for bucket in evidence.shape_buckets}
    facts = []
    for row in piece.record.shape_buckets:
        bucket = measured[bucket_label(row.shape_bucket)]
        difference = bucket.max_abs_diff or 0.0
        facts.append(
            replace(row, restored_s=bucket.first_call_s, max_abs_diff=difference, output_digest=bucket.output_digest)
        )
    record = replace(piece.record, shape_buckets=tuple(facts))
    return replace(piece, record=record, evidences=(*piece.evidences, *evidences))


def references(record: EntryRecord) -> tuple[Reference, ...]:
    """Returns the builder's numbers that the gates compare with."""
    return tuple(Reference(row.shape_bucket, row.graphs, row.cold_s) for row in record.shape_buckets)


def pack(plan: Plan, pieces: Sequence[Piece], merged: Path, blobs: Path) -> tuple[Packed, Blob]:
    """Returns the packed tree of all pieces, and the explain data.

    Args:
        plan: of the release.
        pieces: in the order of the statement's entries.
        merged: empty folder for the merged tree.
        blobs: empty folder for packs, table and explain data.

    Raises:
        BuildError: two entries hold different bytes at one path, or the tree exceeds what a restore accepts.
    """
    step = "merge"
    try:
        # 1
        serves = merge_trees({number: piece.tree for number, piece in enumerate(pieces)}, merged)
        # 2
        step = "pack"
        packed = pack_tree(merged, serves, plan.root, blobs)
        return packed, write_blob(explain_bytes(pieces), blobs, LIMITS.explain_raw_bytes)
    except IntegrityError as error:
        hint = "build the entries again with `--fresh`; if it stays, put the models into two releases"
        raise BuildError(plan.name, step, str(error), hint=hint) from error


def explain_bytes(pieces: Sequence[Piece], limit_bytes: int = LIMITS.explain_raw_bytes) -> bytes:
    """Returns the explain data; without the keys' components if they do not fit: a release is worth more than words."""
    tree = {piece.planned.spec.id: piece.explain for piece in pieces}
    data = canonical_bytes(tree)
    if len(data) <= limit_bytes:
        return data
    return canonical_bytes({entry: {**part, "components": {}} for entry, part in tree.items()})


def draft_statement(
    plan: Plan, pieces: Sequence[Piece], packed: Packed, explain: Blob, now: datetime, builder: Mapping[str, str]
) -> Statement:
    """Returns the statement of an artifact that is not proved yet.

    Raises:
        FingerprintMismatchError: a part of this machine that services must match cannot be read.
    """
    has_native_code = any(piece.record.kinds.get(kind, 0) for piece in pieces for kind in ("native", "engine"))
    return Statement(
        format=FORMAT,
        artifact=ulid(now, os.urandom(10)),
        release=plan.name,
        root=plan.root,
        created_at=timestamp(now),
        device=plan.device,
        fingerprint=release_fingerprint(plan, has_native_code).parts,
        entries=tuple(piece.record for piece in pieces),
        packs=packed.packs,
        table=packed.table_blob,
        explain=explain,
        files=len(packed.table.files),
        unpacked_bytes=packed.table.unpacked_bytes,
        tuned_bytes=sum(int(piece.record.tuning.get("tuned_bytes", 0)) for piece in pieces),
        variables=pinned_variables(plan.device),
        compiler=compiler_texts() if has_native_code else {},
        gates={},
        builder=builder,
    )


def check_size(statement: Statement, limit_bytes: int = LIMITS.statement_bytes) -> None:
    """Refuses a statement that no restore would read.

    Raises:
        BuildError: too long; the largest part is named.
    """
    # The envelope is base64: four bytes for three.
    size = len(statement_bytes(statement)) * 4 // 3 + 1024
    if size <= limit_bytes:
        return
    parts = {f"entry {record.spec.id}": len(record_bytes(record)) for record in statement.entries}
    parts |= {
        field: len(canonical_bytes(to_json(getattr(statement, field))))
        for field in ("packs", "fingerprint", "compiler")
    }
    name, largest = max(parts.items(), key=lambda item: item[1])
    reason = f"the statement takes {size} bytes, a restore accepts {limit_bytes}; the largest part is {name}: {largest} bytes"
    raise BuildError(statement.release, "pack", reason, hint="divide the manifest into several releases")
