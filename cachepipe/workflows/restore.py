"""Restore: from a published release to a private folder that torch reads.

    1 present   is it already there? then nothing is fetched
    2 rows      the channel's index or the lock file: which artifacts are current
    3 select    this machine's fingerprint against each row; a mismatch refuses before any download
    4 artifacts read and check the statements
    5 place     the first private, writable, executable folder with room; other restores into it wait
    6 write     file tables and packs into a temporary sibling, group files naming the final folder
    7 finish    statements, compiler stub, a write and a read test; the marker is the last file
    8 swap      one rename; then a shared lease says that the folder is in use

A crash at any instant leaves a complete folder or none. What is raised here becomes a cold start in `serve.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cachepipe.adapters import cachedir
from cachepipe.adapters.cold_folder import SWEEP_S, sweep_cold
from cachepipe.adapters.execute import check_variables, write_compiler_stub
from cachepipe.adapters.materialise import fetching
from cachepipe.adapters.store import Store, TrustChoice, open_store, view
from cachepipe.domain import marker as marks
from cachepipe.domain.index import IndexRow
from cachepipe.domain.layout import pack_key
from cachepipe.domain.marker import MarkedFile, Marker, marker_bytes
from cachepipe.domain.record import sha256
from cachepipe.domain.statement import Statement
from cachepipe.errors import IntegrityError, NoRoomError, TrustError, UnsafePathError, UsageError
from cachepipe.failpoints import reached
from cachepipe.workflows import present
from cachepipe.workflows.fetch import Artifact, read_artifact, read_file_table
from cachepipe.workflows.host import host_tag, this_machine
from cachepipe.workflows.offered import Source, bound, offered, warnings
from cachepipe.workflows.outcome import RestoreOutcome, RestoreRequest, outcome_of, refuse_quarantined
from cachepipe.workflows.place import Place, candidates, refusal, reserve

FAIL_POINTS = (
    "restore.after_rows",
    "restore.after_statement",
    "restore.after_place",
    "restore.after_table",
    "restore.pack",
    "restore.before_marker",
    "restore.after_marker",
    "restore.after_swap",
)
_PARTS = ".cachepipe/parts"
_BELOW = ("inductor/", "triton/", "engine/")
"""Where an artifact's files lie; beside them the folder holds what is ours, which no artifact may write."""


class _Present(NamedTuple):
    """A folder that is complete already, and its marker as this start judges it: not the one that wrote it."""

    outcome: RestoreOutcome
    renewed: Marker


def restore(request: RestoreRequest) -> RestoreOutcome:
    """Returns a complete private folder that holds the wanted releases, leased to this process.

    Raises:
        UsageError: no release or no store is named, or a lock file is not for it.
        MissError, TrustError, StoreError, IntegrityError: what the store has cannot be used.
        FingerprintMismatchError: built for another machine.
        UnsafePathError, NoRoomError: no folder is private, writable, executable and large enough.
        VerificationError: the artifact is quarantined.
        DeadlineError: time ran out.
    """
    # 1 present
    return present.find(request) or restore_absent(request)


def restore_absent(request: RestoreRequest) -> RestoreOutcome:
    """As `restore`, when step 1 found nothing: the service side takes it before it imports this module."""
    # 2 rows
    store = _store(request)
    sources = offered(request, store)
    reached("restore.after_rows")
    # 3 select
    machine = this_machine([row for source in sources for row in source.rows])
    rows = [machine.select(source.rows, source.name, source.revoked) for source in sources]
    # 4 artifacts
    artifacts = [
        read_artifact(store, row, source.name, is_pinned=not source.channel)
        for row, source in zip(rows, sources, strict=True)
    ]
    statements = [artifact.statement for artifact in artifacts]
    digests = [artifact.digest for artifact in artifacts]
    variables = _joined_variables(statements)
    reached("restore.after_statement")
    # 5 place
    marker = _marker(request, sources, artifacts, variables, rows)
    placed = _place(request, statements, marker)
    if isinstance(placed, _Present):
        return _judged_present(request, sources, placed, store)
    place, notes = placed
    try:
        bound(request, store, sources, place.folder)
        refuse_quarantined(request.options, place.folder, digests)
        reached("restore.after_place")
        # 6 write
        temporary = cachedir.temporary_sibling(place.folder)
        try:
            with _sweeping(place.folder, request):
                written = _write(store, statements, Path(temporary), place.folder, request.deadline)
                # 7 finish
                own = _finish(Path(temporary), artifacts, marker, place.folder, written)
                # 8 swap
                cachedir.swap_in(temporary, place.folder, request.deadline)
                reached("restore.after_swap")
        except BaseException:
            _remove(temporary)
            raise
        opened = present.open_present(place.folder, digests, own=own)
        if opened is None:
            raise UnsafePathError(place.folder, "was changed by someone else while it was put in place")
        return outcome_of(request, "restored", place.folder, *opened, (*notes, *warnings(sources)))
    finally:
        place.release()


def _judged_present(
    request: RestoreRequest, sources: Sequence[Source], found: _Present, store: Store
) -> RestoreOutcome:
    outcome, renewed = found
    try:
        bound(request, store, sources, outcome.folder)
    except TrustError:
        outcome.lease.close()
        raise
    # Next time without these requests: by the index version and the host that were just found to fit.
    present.renew_marker(outcome.folder, renewed)
    return replace(outcome, notes=(*outcome.notes, *warnings(sources)))


def _store(request: RestoreRequest) -> Store:
    options = request.options
    if not options.store:
        raise UsageError(
            "no store is given", hint="name it first, or set CACHEPIPE_STORE, as s3://bucket/prefix or file:///path"
        )
    return open_store(options.store, TrustChoice(options.trust, options.accepts_unsigned), request.now)


def _joined_variables(statements: Sequence[Statement]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for statement in statements:
        check_variables(statement.variables)
        for name, value in statement.variables.items():
            if joined.setdefault(name, value) != value:
                what = f"variable {name} of `{statement.release}`"
                raise IntegrityError(what, "releases want different values", wanted=joined[name], found=value)
    return joined


def _marker(
    request: RestoreRequest,
    sources: Sequence[Source],
    artifacts: Sequence[Artifact],
    variables: dict[str, str],
    rows: Sequence[IndexRow],
) -> Marker:
    """Returns the marker without folder and files."""
    isas = [part.value for a in artifacts for part in a.statement.fingerprint if part.name == "cpu_isa"]
    return Marker(
        format=marks.FORMAT,
        names=tuple(source.name for source in sources),
        statements=tuple(artifact.digest for artifact in artifacts),
        root="",
        host=host_tag(request.environment),
        channel=sources[0].channel,
        index_version=sources[0].version,
        expires_at=min([text for text in (sources[0].expires_at, artifacts[0].not_after) if text], default="")
        if sources[0].channel
        else "",
        policy=(present.channel_tag if sources[0].channel else present.policy_tag)(request.options),
        trust=",".join(dict.fromkeys(artifact.status for artifact in artifacts)),
        bytes=sum(row.packs_bytes + row.size_bytes for row in rows),
        variables=variables,
        cpu_isa=isas[0] if isas else "",
        has_compiler_stub=any(artifact.statement.compiler for artifact in artifacts),
        files=(),
        index_created_at=sources[0].created_at,
        index_ends_at=sources[0].ends_at,
    )


def _place(
    request: RestoreRequest, statements: Sequence[Statement], marker: Marker
) -> tuple[Place, tuple[str, ...]] | _Present:
    """Returns a folder to fill with the reasons against earlier ones, or one that is complete already.

    Raises:
        UnsafePathError, NoRoomError: no candidate can be used.
        DeadlineError: another restore held the folder for too long.
    """
    options, digests = request.options, marker.statements
    own_name = present.folder_name(marker.names, digests)
    root = statements[0].root if len(digests) == 1 else os.path.join(os.path.dirname(statements[0].root), own_name)
    final = os.path.abspath(options.dest or root)
    need = cachedir.Need(sum(s.unpacked_bytes for s in statements), sum(s.files for s in statements))
    problems: list[UnsafePathError | NoRoomError] = []
    for folder in candidates(final, own_name, options.has_scratch, request.environment):
        try:
            place = reserve(folder, need, request.deadline)
        except (UnsafePathError, NoRoomError) as error:
            problems.append(error)
            continue
        notes = tuple(dict.fromkeys(str(problem) for problem in problems))
        opened = present.open_present(folder, digests)
        if opened is not None:
            place.release()
            renewed = replace(marker, root=folder, files=opened[0].files, bytes=opened[0].bytes)
            return _Present(outcome_of(request, "present", folder, renewed, opened[1], notes), renewed)
        try:
            place.hold()
        except UnsafePathError as error:
            place.release()
            problems.append(error)
            continue
        return place, notes
    raise refusal(problems)


def _write(
    store: Store, statements: Sequence[Statement], temporary: Path, folder: str, deadline: float
) -> tuple[MarkedFile, ...]:
    """Writes all files; several releases are written apart and then become one tree.

    Raises:
        IntegrityError: two releases hold different bytes at one path; it is named.
    """
    if len(statements) == 1:
        return _write_one(store, statements[0], temporary, folder, deadline)
    parts = {number: temporary / _PARTS / str(number) for number in range(len(statements))}
    for number, part in parts.items():
        part.mkdir(parents=True)
        _write_one(store, statements[number], part, folder, deadline)
    from cachepipe.adapters.cachetree import merge_trees  # one release needs no merging, and imports less

    paths = sorted(merge_trees(parts, temporary))
    _remove(str(temporary / _PARTS))
    return tuple(_written(temporary / path, temporary) for path in paths)


def _write_one(
    store: Store, statement: Statement, target: Path, folder: str, deadline: float
) -> tuple[MarkedFile, ...]:
    sizes = {pack.digest: pack.size_bytes for pack in statement.packs}

    def fetch(digest: str) -> bytes | memoryview:
        data = view(store, pack_key(statement.artifact, digest), sizes[digest])
        if data is None:
            raise IntegrityError(f"pack {digest[:12]}", "missing in the store", wanted=digest, found="nothing")
        return data

    with fetching(fetch, statement.packs, target, folder, deadline=deadline) as writing:
        table = read_file_table(store, statement)
        foreign = [row.path for row in table.files if not row.path.startswith(_BELOW)]
        if foreign:
            raise IntegrityError("file table", f"`{foreign[0]}` is not below {', '.join(_BELOW[:-1])} or {_BELOW[-1]}")
        reached("restore.after_table")
        return writing.finish(table)


def _finish(
    temporary: Path, artifacts: Sequence[Artifact], marker: Marker, folder: str, written: Sequence[MarkedFile]
) -> tuple[Marker, bytes]:
    """Writes all that is ours into `.cachepipe`; the marker, which is returned with its bytes, is the last file."""
    try:
        for name in (marks.STATEMENTS, marks.ENVELOPES):
            (temporary / name).mkdir(parents=True, mode=0o700)
        for artifact in artifacts:
            (temporary / marks.STATEMENTS / f"{artifact.digest}.json").write_bytes(artifact.payload)
            (temporary / marks.ENVELOPES / f"{artifact.digest}.json").write_bytes(artifact.envelope)
        texts = [artifact.statement.compiler for artifact in artifacts if artifact.statement.compiler]
        if texts:
            (temporary / marks.BIN).mkdir(mode=0o700)
            write_compiler_stub(str(temporary / marks.BIN), texts[0])
        for name in ("inductor", "triton/0"):
            (temporary / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        cachedir.write_and_read_test(str(temporary))
        reached("restore.before_marker")
        own = [path for path in (temporary / marks.FOLDER).rglob("*") if path.is_file()]
        files = (*written, *(_written(path, temporary) for path in sorted(own)))
        whole = replace(marker, root=folder, files=files)
        data = marker_bytes(whole)
        (temporary / marks.PATH).write_bytes(data)
        reached("restore.after_marker")
        return whole, data
    except OSError as error:
        raise UnsafePathError(temporary, f"cannot be written ({error.strerror})") from error


def _written(path: Path, tree: Path) -> MarkedFile:
    facts = os.lstat(path)
    digest = sha256(path.read_bytes())
    return MarkedFile(str(path.relative_to(tree)), facts.st_size, facts.st_mtime_ns, facts.st_ino, digest)


@contextmanager
def _sweeping(folder: str, request: RestoreRequest) -> Iterator[None]:
    """Removes what earlier starts left while a tree is written, and for a moment more: a busy restore leaves a thread beside it little
    time, and replaced trees would pile up."""
    sweeper = threading.Thread(target=_sweep, args=(folder, request.environment), daemon=True)
    with suppress(RuntimeError):  # no thread to be had: what is old waits for the next restore
        sweeper.start()
    yield
    if sweeper.is_alive():
        sweeper.join(max(0.0, min(SWEEP_S, request.deadline - time.monotonic())))


def _sweep(folder: str, environment: Mapping[str, str]) -> None:
    """Removes what earlier starts left: beside the folder, and in scratch space."""
    cachedir.sweep(folder, time.time())
    sweep_cold(cachedir.scratch_folders(environment), time.time(), limit_s=30.0)


def _remove(folder: str) -> None:
    import shutil  # costs milliseconds that a start without failure does not pay

    shutil.rmtree(folder, ignore_errors=True)
