"""Verifies a published release on this machine: what a service would get, before a service gets it.

1 plan      expand the manifest, read the channel or lock file, choose this machine's artifact
2 compare   entry keys of manifest and artifact: has the source moved on
3 prove     (prove) per entry: restored by the code that services use into an empty folder, every bucket, fresh process
4 files     (with `--files`) SHA-256 of every restored file against the file table
5 judge     the gates; say of each miss which component of its key differs, and how to mend it

No process here has built, and none that built is alive: what passes does so from the store alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from cachepipe.adapters.lock_file import read_lock_file
from cachepipe.adapters.machine import machine_fingerprint
from cachepipe.adapters.manifest_file import load_manifest
from cachepipe.adapters.progress import Progress
from cachepipe.adapters.store import NO_CHOICE, Store, TrustChoice, open_store
from cachepipe.adapters.workdir import Binding, BuildRoot, EntryDir, WorkDir, build_root, write_evidence, write_json
from cachepipe.domain.artifact import ROOT_TOKEN, FileTable
from cachepipe.domain.entry import EntrySpec, bucket_label
from cachepipe.domain.evidence import BucketEvidence, EntryEvidence, Lookup, OutsideFile, Uncounted, Work
from cachepipe.domain.explain import explain, explanation_lines
from cachepipe.domain.gates import GateLimits, judge, refuse
from cachepipe.domain.index import IndexRow, select
from cachepipe.domain.manifest import Manifest
from cachepipe.domain.phases import Phases
from cachepipe.domain.record import sha256, to_json
from cachepipe.domain.statement import BucketFacts, EntryRecord, Statement
from cachepipe.errors import BuildError, UsageError
from cachepipe.workflows.assemble import references
from cachepipe.workflows.build import WORK_FOLDER
from cachepipe.workflows.carry import read_explain
from cachepipe.workflows.fetch import Artifact, read_artifact, read_channel, read_file_table
from cachepipe.workflows.jobs import Shop
from cachepipe.workflows.plan import Plan, plan_release
from cachepipe.workflows.prove import Proof, RestoreSource, prove_entry, ways
from cachepipe.workflows.targets import matching_devices


@dataclass(frozen=True)
class VerifyRequest:
    """The options of `cachepipe verify`."""

    manifest: Path
    store: str | None = None
    """None: the manifest's."""
    cache_root: str | None = None
    """Another place than the builder's: verifies relocation as well."""
    channel: str | None = None
    """None: the manifest's."""
    lock: Path | None = None
    hides_compiler: bool = False
    min_hit_rate: float | None = None
    min_speedup: float | None = None
    checks_files: bool = False
    explains: bool = False
    report: Path | None = None
    work: Path | None = None
    """None: `.cachepipe/<release>` beside the manifest."""
    trust: TrustChoice = NO_CHOICE


@dataclass(frozen=True)
class VerifiedBucket:
    """One row of the table; seconds of first calls."""

    entry: str
    shape_bucket: str
    graphs: int
    hits: Mapping[str, str]
    """Layer → `hits/lookups`."""
    work: Work
    cold_s: float
    restored_s: float
    eager_s: float
    phases: Mapping[str, Phases]
    """`cold`, `restored` and `eager` → their first call by where the time went."""
    max_abs_diff: float | None
    uncounted: tuple[Uncounted, ...]
    """What a count of 0 in `work` does not prove."""
    outputs: str
    """`as built`: bit for bit those of the build's proof; `close`: within tolerance of eager's; `differ`: neither, or not compared."""


@dataclass(frozen=True)
class VerifySummary:
    """What the verification of one target's artifact found."""

    release: str
    device: str
    artifact: str
    statement: str
    status: str
    """Of the signature, as `domain.trust.Verified.status`."""
    shape_buckets: tuple[VerifiedBucket, ...]
    checked_files: int
    violations: tuple[str, ...]
    explanations: tuple[str, ...]
    """Of every miss, with cause and fix."""
    outside: tuple[str, ...] = ()
    """Caches that the first calls filled and no artifact covers (H10), one line for each owner."""


@dataclass(frozen=True)
class _Verification:
    request: VerifyRequest
    plan: Plan
    store: Store
    artifact: Artifact
    source: RestoreSource
    limits: GateLimits


def verify(request: VerifyRequest, progress: Progress, now: datetime) -> tuple[VerifySummary, ...]:
    """Returns what was found, one summary per target that this machine matches; pass them to `refuse_violations`.

    Args:
        request: the options.
        progress: talk.
        now: time at which the channel's index must not have expired.

    Raises:
        ManifestError, UsageError: the manifest or the options have problems.
        MissError, FingerprintMismatchError: nothing is published for this machine.
        IntegrityError, TrustError, StoreError: what is published cannot be used.
        UnsafePathError: the folder at which services restore cannot be held.
        BuildError: no target matches this machine.
        Interrupted: SIGINT or SIGTERM.
    """
    # 1
    manifest = load_manifest(request.manifest)
    url = request.store or manifest.store
    if url is None:
        raise UsageError("no store is named", hint="give `--store`, or set `store` in the manifest")
    store = open_store(url, request.trust, now)
    summaries = []
    for device in matching_devices(manifest, progress.say):
        plan = plan_release(manifest, request.manifest, device)
        artifact = _choose(request, manifest, plan, store, now)
        channel = (
            ("--lock", str(request.lock.absolute())) if request.lock else ("--channel", _channel(request, manifest))
        )
        source = RestoreSource(_absolute(url), plan.name, (*channel, *_trust_words(request.trust)))
        limits = _limits(request, manifest)
        summaries.append(_verify_artifact(_Verification(request, plan, store, artifact, source, limits), progress))
    return tuple(summaries)


def refuse_violations(summaries: Sequence[VerifySummary]) -> None:
    """Raises:
    VerificationError: any summary has a violation; all of them are listed.
    """
    refuse([violation for summary in summaries for violation in summary.violations])


def _trust_words(choice: TrustChoice) -> tuple[str, ...]:
    policy = ("--trust", os.path.abspath(choice.policy_file)) if choice.policy_file else ()
    return (*policy, "--insecure-unsigned") if choice.accepts_unsigned else policy


def _channel(request: VerifyRequest, manifest: Manifest) -> str:
    return request.channel or manifest.channel


def _absolute(url: str) -> str:
    return url if "://" in url else f"file://{url}"


def _limits(request: VerifyRequest, manifest: Manifest) -> GateLimits:
    limits = GateLimits(**manifest.gates.model_dump())
    if request.min_hit_rate is not None:
        limits = replace(limits, min_hit_rate=request.min_hit_rate)
    return limits if request.min_speedup is None else replace(limits, min_speedup=request.min_speedup)


def _choose(request: VerifyRequest, manifest: Manifest, plan: Plan, store: Store, now: datetime) -> Artifact:
    machine = machine_fingerprint([plan.device])
    if request.lock is not None:
        row: IndexRow = select(read_lock_file(request.lock).rows, machine, str(request.lock))
    else:
        index = read_channel(store, plan.name, _channel(request, manifest), now).index
        revoked = (*index.revoked, *store.trust.policy.revoked)
        row = select(index.rows, machine, f"{plan.name}@{index.channel}", revoked)
    return read_artifact(store, row, plan.name, is_pinned=request.lock is not None)


def _verify_artifact(run: _Verification, progress: Progress) -> VerifySummary:
    statement, request = run.artifact.statement, run.request
    # 2
    violations = list(stale_entries(run.plan, statement))
    # A folder of its own: the results of a build are bound to the same entry keys, and must survive.
    work = WorkDir((request.work or request.manifest.absolute().parent / WORK_FOLDER / run.plan.name) / "verify")
    root_path = Path(request.cache_root, run.plan.name) if request.cache_root else Path(statement.root)
    buckets: list[VerifiedBucket] = []
    explanations: list[str] = []
    outside: list[str] = []
    checked = 0

    def waits(path: Path) -> Callable[[], None]:
        return lambda: progress.say(f"waiting: another build or verification holds {path}")

    with work.held(waits(work.path)), build_root(root_path, waits(root_path)) as root:
        search_path = work.path_without_compilers(os.environ.get("PATH", os.defpath)) if request.hides_compiler else ""
        shop = Shop(work, root, run.plan.python_path, progress)
        for number, record in enumerate(statement.entries):
            # 3
            entry = work.entry(Binding(record.key, f"verify {run.artifact.digest}", str(root_path)), is_fresh=True)
            proofs, stopped = [], ""
            for spec, step in ways(record.spec, "verify"):
                evidence, stopped = _proved(run, shop, record, entry, search_path, (spec, step))
                if evidence is not None:
                    proofs.append(Proof(spec, evidence))
                    explanations += explanation_lines(record.spec.id, evidence.explanations, request.explains)
                    outside += outside_lines(record.spec.id, evidence.outside_files)
                if stopped or evidence is None:
                    violations.append(stopped)
                    break
            if stopped or not proofs:
                continue
            # 4
            if request.checks_files and number == 0:
                table = read_file_table(run.store, statement)
                violations += wrong_files(root, table)
                checked = len(table.files)
            # 5
            for proof in proofs:
                violations += judge(run.limits, proof.spec, proof.evidence, references(record))
            buckets += _rows(record, proofs[-1].evidence)
    identity = (run.plan.name, run.plan.device, statement.artifact, run.artifact.digest, run.artifact.status)
    summary = VerifySummary(
        *identity, tuple(buckets), checked, tuple(violations), tuple(explanations), tuple(dict.fromkeys(outside))
    )
    if request.report is not None:
        write_json(request.report / f"verify.{run.plan.device}.json", {"verify": to_json(summary)})
    return summary


def _proved(
    run: _Verification, shop: Shop, record: EntryRecord, entry: EntryDir, search_path: str, way: tuple[EntrySpec, str]
) -> tuple[EntryEvidence | None, str]:
    """Returns the evidence of one way of calling an entry, its misses explained, and why its process stopped; empty: it did not.

    A process that stopped has left evidence too, if it came to a lookup: without a compiler a miss is an error.
    """
    stopped = ""
    try:
        evidence: EntryEvidence | None = prove_entry(shop, way[0], entry, run.source, way[1], search_path=search_path)
    except BuildError as error:
        stopped, evidence = str(error), entry.read_pending(way[1])
    if evidence is not None:
        evidence = explained(run, record, evidence)
        if run.request.report is not None:
            write_evidence(run.request.report, evidence)
    return evidence, stopped


def explained(run: _Verification, record: EntryRecord, evidence: EntryEvidence) -> EntryEvidence:
    """Returns the evidence with the cause of each miss; the builder's components are fetched only if there is one."""
    if all(lookup.outcome == "hit" for lookup in evidence.lookups):
        return evidence
    built = read_explain(run.store, run.artifact).get(record.spec.id, {})
    return replace(evidence, explanations=explain(evidence, built))


def outside_lines(entry: str, files: Sequence[OutsideFile]) -> list[str]:
    """Returns one line for each cache that was filled outside of the restored folder."""
    owners: dict[str, list[OutsideFile]] = {}
    for file in files:
        owners.setdefault(file.owner, []).append(file)
    return [
        f"not covered: {entry}: {owner}: {len(found)} files, {sum(file.size_bytes for file in found)} bytes, e.g. {found[0].path}"
        for owner, found in owners.items()
    ]


def stale_entries(plan: Plan, statement: Statement) -> tuple[str, ...]:
    """Returns how the manifest has moved on since the artifact was built, in words; empty: it has not."""
    built = {record.spec.id: record for record in statement.entries}
    found = []
    for planned in plan.entries:
        record = built.pop(planned.spec.id, None)
        if record is None:
            found.append(f"stale: {planned.spec.id}: in the manifest, not in artifact {statement.artifact}")
        elif record.key != planned.key:
            names = sorted({*record.key_parts, *planned.key_parts})
            changed = [name for name in names if record.key_parts.get(name) != planned.key_parts.get(name)]
            found.append(f"stale: {planned.spec.id}: changed since the build: {', '.join(changed)}")
    found += [f"stale: {entry}: in artifact {statement.artifact}, not in the manifest" for entry in built]
    return tuple(found)


def wrong_files(root: BuildRoot, table: FileTable) -> list[str]:
    """Returns every file of the table that is missing in the restored folder or has other bytes."""
    found = []
    for row in table.files:
        try:
            data = (root.path / row.path).read_bytes()
        except OSError as error:
            found.append(f"file {row.path}: cannot be read ({error.strerror})")
            continue
        if row.has_root_token:
            data = data.replace(str(root.path).encode(), ROOT_TOKEN.encode())
        if sha256(data) != row.sha256:
            found.append(f"file {row.path}: SHA-256: wanted {row.sha256[:16]}, found {sha256(data)[:16]}")
    return found


def _rows(record: EntryRecord, evidence: EntryEvidence) -> list[VerifiedBucket]:
    facts = {bucket_label(row.shape_bucket): row for row in record.shape_buckets}
    rows = []
    # The proof calls in the opposite order; a reader wants the manifest's.
    for bucket in reversed(evidence.shape_buckets):
        label = bucket_label(bucket.shape_bucket)
        lookups = [lookup for lookup in evidence.lookups if lookup.shape_bucket == label]
        layers = dict.fromkeys(lookup.layer for lookup in lookups)
        hits = {layer: _count([lookup for lookup in lookups if lookup.layer == layer]) for layer in layers}
        row = VerifiedBucket(
            entry=record.spec.id,
            shape_bucket=label,
            graphs=bucket.graphs,
            hits=hits,
            work=bucket.work,
            cold_s=facts[label].cold_s,
            restored_s=bucket.first_call_s,
            eager_s=facts[label].eager_s,
            phases={
                "cold": facts[label].cold_phases,
                "restored": bucket.phases,
                "eager": Phases(run_s=facts[label].eager_s),
            },
            max_abs_diff=bucket.max_abs_diff,
            uncounted=evidence.uncounted,
            outputs=outputs_word(facts[label], bucket),
        )
        rows.append(row)
    return rows


def outputs_word(built: BucketFacts, found: BucketEvidence) -> str:
    """Returns `VerifiedBucket.outputs`; `close` where it was `as built` before tells a drift that no tolerance sees (B4).

    It refuses nothing: atomics of a GPU and weights from random numbers without a seed change bits as well.
    """
    if found.is_close is not True:
        return "differ"
    return "as built" if found.output_digest == built.output_digest else "close"


def _count(lookups: Sequence[Lookup]) -> str:
    return f"{sum(lookup.outcome == 'hit' for lookup in lookups)}/{len(lookups)}"
