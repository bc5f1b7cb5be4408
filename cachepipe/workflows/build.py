"""Builds a release: from a manifest to an artifact that is proved and published. One artifact per target.

1 plan      expand the manifest, find what is carried over, rehearse publishing, hold the folder at which services restore
2 tune      (entry_steps) compile and call every shape bucket
3 settle    (entry_steps) compile again from tuning records until nothing is tuned; drop what a start does not open
4 merge     (assemble) the trees of all entries become one
5 pack      (assemble) deterministic packs, file table, explain data, draft of the statement, staged in the work directory
6 prove     (prove) fresh process, no compiler on PATH, restored by the code that services use
7 gate      refuse unless the evidence passes the manifest's gates
8 publish   pin → packs → statement → index version of the channel → unpin

Finished steps stay in the work directory; a second run re-does only what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from cachepipe.adapters.manifest_file import load_manifest
from cachepipe.adapters.progress import Progress
from cachepipe.adapters.provenance import provenance
from cachepipe.adapters.store import NO_CHOICE, Store, TrustChoice, open_store
from cachepipe.adapters.workdir import Binding, EntryDir, WorkDir, build_root, write_evidence, write_json, write_whole
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.gates import GateLimits, latency_problems, refuse, speedup_of
from cachepipe.domain.lock import FORMAT, Lock, lock_bytes
from cachepipe.domain.manifest import Manifest, with_cache_root
from cachepipe.domain.policy import INDEX
from cachepipe.domain.record import Json, to_json
from cachepipe.domain.statement import Statement
from cachepipe.errors import UsageError
from cachepipe.workflows.assemble import (
    Piece,
    check_size,
    draft_statement,
    new_piece,
    pack,
    proved,
    references,
)
from cachepipe.workflows.carry import Earlier, carried_piece, earlier_artifact
from cachepipe.workflows.entry_steps import build_entry, is_settled, keeps_tuned
from cachepipe.workflows.fetch import read_file_table
from cachepipe.workflows.jobs import Shop
from cachepipe.workflows.latency import latency
from cachepipe.workflows.plan import Plan, PlannedEntry, chosen_entries, plan_release, release_fingerprint
from cachepipe.workflows.prove import RestoreSource, judge_proofs, prove_engines
from cachepipe.workflows.publish import PackedArtifact, missing_objects, publish, rehearse
from cachepipe.workflows.stage import open_stage
from cachepipe.workflows.targets import matching_devices

STAGING = "staging"
WORK_FOLDER = ".cachepipe"


@dataclass(frozen=True)
class BuildRequest:
    """The options of `cachepipe build`."""

    manifest: Path
    store: str | None = None
    """None: the manifest's."""
    work: Path | None = None
    """None: `.cachepipe/<release>` beside the manifest."""
    cache_root: str | None = None
    only: tuple[str, ...] = ()
    """`MODEL` or `MODEL:MODE`."""
    publishes: bool = True
    is_fresh: bool = False
    report: Path | None = None
    """Folder that gets the evidence files."""
    keeps_tuned: bool = False
    """See `Shop.keeps_tuned`."""
    allows_noisy: bool = False
    """See `Shop.allows_noisy`."""
    max_latency_ratio: float | None = None
    """In place of the manifest's gate."""
    trust: TrustChoice = NO_CHOICE
    """Keys that it does not name are the manifest's."""


@dataclass(frozen=True)
class BuiltEntry:
    entry: str
    is_carried: bool
    shape_buckets: int
    speedup: float
    """Σ cold ÷ Σ restored first calls."""
    max_abs_diff: float


@dataclass(frozen=True)
class BuildSummary:
    """What one target's build gave."""

    release: str
    device: str
    artifact: str
    statement: str
    """Digest of the published statement; empty when nothing was published."""
    channel: str
    is_unchanged: bool
    files: int
    unpacked_bytes: int
    packed_bytes: int
    tuned_bytes: int
    entries: tuple[BuiltEntry, ...]
    stage: str
    """Folder of the staged store."""


@dataclass(frozen=True)
class _Build:
    """What every step of one target's build needs."""

    request: BuildRequest
    manifest: Manifest
    plan: Plan
    shop: Shop
    store: Store | None
    now: datetime
    fingerprint: Fingerprint


def build(request: BuildRequest, progress: Progress, now: datetime) -> tuple[BuildSummary, ...]:
    """Returns one summary per target that this machine matches, after each was proved, gated and published.

    Args:
        request: the options.
        progress: talk.
        now: time of the statement and of the index version.

    Raises:
        ManifestError, UsageError: the manifest or the options have problems.
        UnsafePathError: the folder at which services restore cannot be held.
        BuildError: a step failed; entry, shape bucket and step are named.
        VerificationError: a gate refused; nothing was published.
        StoreError, ConflictError, IntegrityError, TrustError, NoRoomError: publishing failed.
        Interrupted: SIGINT or SIGTERM; finished steps are kept.
    """
    manifest = _manifest(request)
    url = request.store or manifest.store
    if url is None and request.publishes:
        raise UsageError(
            "no store is named", hint="give `--store`, set `store` in the manifest, or build with `--no-publish`"
        )
    store = open_store(url, _with_keys_of(manifest, request.trust), now) if url is not None else None
    summaries = []
    for device in matching_devices(manifest, progress.say):
        plan = plan_release(manifest, request.manifest, device)
        summaries.append(_build_target(request, manifest, plan, store, (progress, now)))
    return tuple(summaries)


def _manifest(request: BuildRequest) -> Manifest:
    """Returns the manifest with what the options give in place of it."""
    manifest = load_manifest(request.manifest)
    if request.max_latency_ratio is not None:
        gates = manifest.gates.model_copy(update={"max_latency_ratio": request.max_latency_ratio})
        manifest = manifest.model_copy(update={"gates": gates})
    if request.cache_root is not None:
        manifest = with_cache_root(manifest, request.cache_root)
    return manifest


def _build_target(
    request: BuildRequest, manifest: Manifest, plan: Plan, store: Store | None, talk: tuple[Progress, datetime]
) -> BuildSummary:
    progress = talk[0]
    work = WorkDir(request.work or request.manifest.absolute().parent / WORK_FOLDER / plan.name)
    with work.held(lambda: progress.say(f"waiting: another build holds {work.path}")):
        return _build_held(request, manifest, plan, store, (work, *talk))


def _build_held(
    request: BuildRequest, manifest: Manifest, plan: Plan, store: Store | None, held: tuple[WorkDir, Progress, datetime]
) -> BuildSummary:
    # 1
    work, progress, now = held
    chosen = chosen_entries(plan, request.only)
    # A GPU builder needs no host compiler to be matched, unless there are native functions.
    kinds = (True, False) if plan.has_host_code else (False,)
    fingerprints = tuple(release_fingerprint(plan, has_native_code) for has_native_code in kinds)
    earlier = None
    if store is not None and not request.is_fresh:
        earlier = earlier_artifact(store, plan, manifest.channel, fingerprints, now)
    if store is not None and earlier is not None and (lost := missing_objects(store, earlier.artifact.statement)):
        progress.say(f"warning: {earlier.artifact.statement.artifact} lost {lost} objects in the store: not used")
        earlier = None
    # Gates that were not judged then are judged now.
    is_judged = earlier is not None and dict(earlier.artifact.statement.gates) == _limits(manifest)
    if earlier is not None and is_judged and not request.only and earlier.is_the_same_release(plan):
        progress.say(f"unchanged: {earlier.artifact.statement.artifact} is already in {manifest.channel}")
        return _unchanged(earlier, manifest.channel)

    if store is not None and request.publishes:
        rehearse(store, plan.name, manifest.channel, now)
    with build_root(Path(plan.root), lambda: progress.say(f"waiting: another build holds {plan.root}")) as root:
        shop = Shop(work, root, plan.python_path, progress, request.keeps_tuned, request.allows_noisy)
        run = _Build(request, manifest, plan, shop, store, now, fingerprints[0])
        # 2, 3
        pieces = _pieces(run, earlier, chosen)
        # 4, 5
        statement, source = _stage(run, pieces)
        # 6
        pieces = _with_latency(run, _prove(run, pieces, source), source)
    # 7
    limits = _gate(run, pieces)
    statement = replace(statement, entries=tuple(piece.record for piece in pieces), gates=limits)
    check_size(statement)
    # 8
    return _publish(run, pieces, statement)


def _with_keys_of(manifest: Manifest, choice: TrustChoice) -> TrustChoice:
    named = manifest.trust
    if named is None or choice.statement_key or choice.index_key:
        return choice
    return replace(choice, statement_key=named.statement_key, index_key=named.index_key)


def _pieces(run: _Build, earlier: Earlier | None, chosen: frozenset[str]) -> list[Piece]:
    """Steps 2 and 3: every entry, carried over or built; with `--only` the others are carried over or left out.

    First those whose kernels are chosen already: the others choose alike where they share one.
    """
    say = run.shop.progress.say
    pieces: dict[str, Piece] = {}
    waiting: list[tuple[PlannedEntry, EntryDir]] = []
    table = None
    for planned in run.plan.entries:
        spec = planned.spec
        entry = _entry_dir(run, planned, is_fresh=run.request.is_fresh and spec.id in chosen)
        is_held = earlier is not None and planned.key in earlier.numbers
        if is_held and earlier is not None and run.store is not None:
            table = table or read_file_table(run.store, earlier.artifact.statement)
            pieces[spec.id] = carried_piece(run.store, earlier, planned, entry, table)
            say(f"carried over: {spec.id}: unchanged since {earlier.artifact.statement.artifact}")
        elif spec.id in chosen:
            waiting.append((planned, entry))
        else:
            say(f"warning: left out: {spec.id}: not chosen by `--only`, and the channel holds no unchanged one")
    for planned, entry in sorted(waiting, key=lambda one: not is_settled(one[1])):
        siblings = [piece.tree for piece in pieces.values()]
        done = build_entry(run.shop, planned.spec, entry, run.manifest.gates.max_graph_breaks, siblings)
        _report(run, done.evidences)
        pieces[planned.spec.id] = new_piece(planned, entry, done)
    return [pieces[planned.spec.id] for planned in run.plan.entries if planned.spec.id in pieces]


def _entry_dir(run: _Build, planned: PlannedEntry, is_fresh: bool) -> EntryDir:
    return run.shop.work.entry(Binding(planned.key, run.fingerprint.digest, run.plan.root), is_fresh)


def _stage(run: _Build, pieces: Sequence[Piece]) -> tuple[Statement, RestoreSource]:
    """Steps 4 and 5: packs in a store of the work directory, with a lock file, as a service would find them."""
    work, plan = run.shop.work, run.plan
    blobs = work.empty("blobs")
    packed, explain = pack(plan, pieces, work.empty("merged"), blobs)
    if packed.notes:
        run.shop.progress.say(f"note: {len(packed.notes)} files name {plan.root}: services should restore there")
    statement = draft_statement(plan, pieces, packed, explain, run.now, provenance(run.request.manifest))
    check_size(statement)
    stage, policy = open_stage(work)
    row = publish(stage, plan.name, STAGING, PackedArtifact(statement, blobs), run.now)
    lock = work.path / "stage.lock"
    write_whole(lock, lock_bytes(Lock(FORMAT, plan.name, STAGING, 1, (row,))))
    return statement, RestoreSource(stage.url, plan.name, ("--lock", str(lock), "--trust", str(policy)))


def _prove(run: _Build, pieces: Sequence[Piece], source: RestoreSource) -> list[Piece]:
    """Step 6."""
    search_path = run.shop.work.path_without_compilers(os.environ.get("PATH", os.defpath))
    found = []
    for piece in pieces:
        proofs = prove_engines(run.shop, piece.planned.spec, piece.entry, source, "prove", search_path=search_path)
        _report(run, [proof.evidence for proof in proofs])
        found.append(proved(piece, *(proof.evidence for proof in proofs)))
    return found


def _with_latency(run: _Build, pieces: Sequence[Piece], source: RestoreSource) -> list[Piece]:
    """Step 6, second half: the restored process's calls against the tuned one's; on a CPU only where the tuned is kept."""
    found = []
    for piece in pieces:
        spec = piece.planned.spec
        if not piece.is_carried and keeps_tuned(run.shop, spec):
            rows = latency(run.shop, spec, piece.entry, source)
            if not run.shop.keeps_tuned:
                piece.entry.drop_tree("tune")
            piece = replace(piece, record=replace(piece.record, tuning={**piece.record.tuning, "latency": rows}))  # noqa: PLW2901
        found.append(piece)
    return found


def _gate(run: _Build, pieces: Sequence[Piece]) -> Mapping[str, float]:
    """Step 7: returns the limits that were passed."""
    limits = GateLimits(**run.manifest.gates.model_dump())
    violations = [
        violation
        for piece in pieces
        for violation in (
            *judge_proofs(limits, piece.planned.spec, piece.evidences, references(piece.record)),
            *latency_problems(limits, piece.planned.spec, piece.record.tuning.get("latency", [])),
        )
    ]
    refuse(violations, "prove")
    return _limits(run.manifest)


def _limits(manifest: Manifest) -> dict[str, float]:
    """Returns the manifest's gates as a statement holds them."""
    return {name: float(value) for name, value in asdict(GateLimits(**manifest.gates.model_dump())).items()}


def _publish(run: _Build, pieces: Sequence[Piece], statement: Statement) -> BuildSummary:
    """Step 8; with `--no-publish` the staged store stays, holding the final statement."""
    work, plan = run.shop.work, run.plan
    packed = PackedArtifact(statement, work.path / "blobs")
    if run.request.publishes and run.store is not None:
        digest = publish(run.store, plan.name, run.manifest.channel, packed, run.now).statement
        channel = run.manifest.channel if run.store.trust.can_sign(INDEX) else ""
        where = f"in {channel} of {run.store.url}"
        if not channel:
            where = f"in no channel of {run.store.url}: there is no index key here; `cachepipe promote` with its id names it"
        work.drop("stage", "blobs", "merged")
        for line in (f"published: {statement.artifact} {where}", *run.store.trust.notes):
            run.shop.progress.say(line)
    else:
        publish(open_stage(work)[0], plan.name, STAGING, packed, run.now)
        digest, channel = "", STAGING
        run.shop.progress.say(f"staged, not published: {work.path / 'stage'}")
    summary = _summary(statement, digest, channel)
    summary = replace(
        summary, entries=tuple(map(_built_entry, pieces)), stage="" if digest else str(work.path / "stage")
    )
    if run.request.report is not None:
        write_json(run.request.report / f"build.{plan.device}.json", {"build": to_json(summary)})
    return summary


def _summary(statement: Statement, digest: str, channel: str) -> BuildSummary:
    return BuildSummary(
        release=statement.release,
        device=statement.device,
        artifact=statement.artifact,
        statement=digest,
        channel=channel,
        is_unchanged=False,
        files=statement.files,
        unpacked_bytes=statement.unpacked_bytes,
        packed_bytes=sum(blob.size_bytes for blob in statement.packs) + statement.table.size_bytes,
        tuned_bytes=statement.tuned_bytes,
        entries=(),
        stage="",
    )


def _unchanged(earlier: Earlier, channel: str) -> BuildSummary:
    return replace(_summary(earlier.artifact.statement, earlier.artifact.digest, channel), is_unchanged=True)


def _built_entry(piece: Piece) -> BuiltEntry:
    evidence = piece.evidences[-1]
    return BuiltEntry(
        entry=piece.planned.spec.id,
        is_carried=piece.is_carried,
        shape_buckets=len(piece.record.shape_buckets),
        speedup=round(speedup_of(references(piece.record), evidence), 2),
        max_abs_diff=max((bucket.max_abs_diff or 0.0 for bucket in evidence.shape_buckets), default=0.0),
    )


def _report(run: _Build, evidences: Sequence[EntryEvidence]) -> None:
    if run.request.report is not None:
        for evidence in evidences:
            write_evidence(run.request.report, evidence)


def summary_json(summaries: Sequence[BuildSummary]) -> Json:
    """Returns the document of `build --json`."""
    return {"builds": [to_json(summary) for summary in summaries]}
