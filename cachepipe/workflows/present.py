"""Is the release already there? The answer without fetching anything; with a lock file without any network.

A folder is used as it is when it is private, can be written, its marker names exactly the statements that are wanted
and was written for this very path, and every file is as it was: equal stat, or else equal SHA-256 (a copied layer).
Imports little: this is the path that every restart of a service takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice, product

from cachepipe.adapters import cachedir
from cachepipe.adapters.execute import check_variables, folder_variables, has_compiler, isa_variables
from cachepipe.adapters.lease import Lease
from cachepipe.domain import marker as marks
from cachepipe.domain.fingerprint import Fingerprint
from cachepipe.domain.index import IndexRow, parse_timestamp, select
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.lock import Lock, read_lock
from cachepipe.domain.marker import Marker, marker_bytes, read_marker
from cachepipe.domain.record import digest_parts
from cachepipe.errors import (
    CachepipeError,
    DeadlineError,
    FingerprintMismatchError,
    IntegrityError,
    UnsafePathError,
    UsageError,
    VerificationError,
)
from cachepipe.runtime import attempts
from cachepipe.workflows.restore_options import Options

TOLERANCE = timedelta(seconds=300)
_SET_CHOICES = 64


@dataclass(frozen=True)
class RestoreRequest:
    """One restore: what is wanted and the moment at which it is over."""

    options: Options
    environment: Mapping[str, str]
    """Of this process; what the service inherits."""
    now: datetime
    deadline: float
    """In seconds of `time.monotonic`."""
    start_id: str


@dataclass(frozen=True)
class RestoreOutcome:
    """A folder that can be used, and what its user needs in the environment."""

    outcome: str
    """`restored` or `present`."""
    folder: str
    names: tuple[str, ...]
    statements: tuple[str, ...]
    trust: str
    bytes: int
    """Compressed bytes that this restore fetched."""
    variables: Mapping[str, str]
    notes: tuple[str, ...]
    lease: Lease
    """Shared; the folder is not replaced while it is held."""


def read_locks(options: Options) -> tuple[Lock, ...]:
    """Returns the lock files of a command line, in the order of the names where both are given.

    Raises:
        UsageError: a file cannot be read, or is for a release that was not named.
        IntegrityError: not a lock file.
    """
    locks: dict[str, Lock] = {}
    for path in options.locks:
        try:
            with open(path, "rb") as file:
                data = file.read(LIMITS.index_bytes + 1)
        except OSError as error:
            raise UsageError(f"lock file `{path}` cannot be read ({error.strerror})") from error
        lock = read_lock(data)
        if options.names and lock.name not in options.names:
            raise UsageError(f"lock file `{path}` is for `{lock.name}`, not for `{', '.join(options.names)}`")
        locks[lock.name] = lock
    return tuple(locks[name] for name in (options.names or locks) if name in locks)


def set_digest(statements: Sequence[str]) -> str:
    """Returns what names a folder that holds several releases: the same set in another order is the same folder."""
    return digest_parts({str(number): digest for number, digest in enumerate(sorted(statements))})


def folder_name(names: Sequence[str], statements: Sequence[str]) -> str:
    """Returns the name of a folder of this content alone, `<name>.<digest12>` or `<set-digest12>`."""
    return f"{names[0]}.{statements[0][:12]}" if len(names) == 1 else set_digest(statements)[:12]


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
            **{name: environment.get(name, "") for name in (*variables, "CXX")},
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


def open_present(folder: str, statements: Sequence[str]) -> tuple[Marker, Lease] | None:
    """Returns marker and shared lease of a folder that holds exactly these statements, unharmed; None otherwise."""
    try:
        marker, lease = _open_marked(folder)
    except (CachepipeError, OSError):
        return None
    try:
        if sorted(marker.statements) == sorted(statements):
            _check_files(folder, marker)
            cachedir.write_and_read_test(folder)
            return marker, lease
    except (CachepipeError, OSError):
        pass
    lease.close()
    return None


def _open_marked(folder: str) -> tuple[Marker, Lease]:
    if not os.path.lexists(os.path.join(folder, marks.PATH)):
        raise UnsafePathError(folder, "has no marker")
    cachedir.check_private(folder)
    lease = Lease.take(folder, is_shared=True)
    if lease is None:
        raise UnsafePathError(folder, "is being replaced")
    try:
        with open(os.path.join(folder, marks.PATH), "rb") as file:
            marker = read_marker(file.read(LIMITS.table_raw_bytes + 1))
        if marker.root != os.path.abspath(folder):
            raise UnsafePathError(folder, f"was made for `{marker.root}`")
        check_variables(marker.variables)
    except (CachepipeError, OSError):
        lease.close()
        raise
    return marker, lease


def _check_files(folder: str, marker: Marker) -> None:
    """Compares every file's stat; where it changed, the bytes."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for row in marker.files:
            facts = os.stat(row.path, dir_fd=handle, follow_symlinks=False)
            if (facts.st_size, facts.st_mtime_ns, facts.st_ino) != (row.size_bytes, row.mtime_ns, row.inode):
                _check_bytes(handle, row)
    finally:
        os.close(handle)


def _check_bytes(folder: int, row: marks.MarkedFile) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a fifo in its place must not block
    with os.fdopen(os.open(row.path, flags, dir_fd=folder), "rb") as file:
        whole = hashlib.sha256()
        while chunk := file.read(1 << 20):
            whole.update(chunk)
    if whole.hexdigest() != row.sha256:
        raise IntegrityError(row.path, "changed since it was restored", wanted=row.sha256, found=whole.hexdigest())


def with_lock(request: RestoreRequest) -> RestoreOutcome | None:
    """Returns the folder that lock files pin, if it is already there and this host is as it was; offline.

    Raises:
        UsageError, IntegrityError: as `read_locks`.
        VerificationError: quarantined, see `outcome_of`.
    """
    locks = read_locks(request.options)
    names = tuple(lock.name for lock in locks)
    if not locks or (request.options.names and names != request.options.names):
        return None
    tag = host_tag(request.environment)
    choices = product(*(lock.rows for lock in locks))
    for rows in islice(choices, _SET_CHOICES):
        statements = [row.statement for row in rows]
        for folder in _likely_folders(request, locks, statements):
            found = open_present(folder, statements)
            if found is None:
                continue
            if found[0].host == tag or _still_fits(rows, request, tag, folder, found[0]):
                return outcome_of(request, "present", folder, *found)
            found[1].close()
    return None


def _likely_folders(request: RestoreRequest, locks: Sequence[Lock], statements: Sequence[str]) -> Iterator[str]:
    """Yields where a restore of this content may have put it, without asking a statement for its root."""
    names = [lock.name for lock in locks]
    own_name = folder_name(names, statements)
    if request.options.dest:
        yield os.path.abspath(request.options.dest)
    else:
        root = locks[0].root or os.path.join(cachedir.DEFAULT_CACHE_ROOT, names[0])
        if len(names) == 1:
            yield root
        yield os.path.join(os.path.dirname(root), own_name)
    for place in cachedir.scratch_folders(request.environment):
        yield os.path.join(place, own_name)


def _still_fits(rows: Sequence[IndexRow], request: RestoreRequest, tag: str, folder: str, marker: Marker) -> bool:
    """Compares fingerprints on a host that is not as it was, and remembers the new host in the marker."""
    try:
        for row in rows:
            this_machine([row]).require(row)
    except FingerprintMismatchError:
        return False
    renew_marker(folder, dataclasses.replace(marker, host=tag))
    return True


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


def renew_marker(folder: str, marker: Marker) -> None:
    """Replaces a folder's marker; a folder that cannot be written keeps the old one."""
    path = os.path.join(folder, marks.PATH)
    temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        with open(temporary, "xb") as file:
            file.write(marker_bytes(marker))
        os.replace(temporary, path)
    except OSError:
        return


def state_dir(options: Options, folder: str) -> str:
    return options.state_dir or os.path.join(os.path.dirname(folder), ".state")


def refuse_quarantined(options: Options, folder: str, statements: Sequence[str]) -> None:
    """Returns if no statement is quarantined; else clears its marks, so that the next start tries it again.

    Raises:
        VerificationError: two starts within 15 minutes never became ready.
    """
    state, now = state_dir(options, folder), time.time()
    for digest in statements:
        if attempts.unfinished(state, digest, now) >= attempts.MAX_UNFINISHED:
            attempts.clear(state, digest)
            what = f"{attempts.MAX_UNFINISHED} starts with {digest[:12]} within 15 minutes did not become ready"
            raise VerificationError([f"quarantined for this start: {what}"])


def outcome_of(
    request: RestoreRequest, outcome: str, folder: str, marker: Marker, lease: Lease, notes: Sequence[str] = ()
) -> RestoreOutcome:
    """Returns the outcome for a complete folder.

    Raises:
        VerificationError: its statements are quarantined.
        DeadlineError: time ran out.
    """
    options = request.options
    try:
        refuse_quarantined(options, folder, marker.statements)
        if time.monotonic() > request.deadline:
            raise DeadlineError("time ran out")
    except CachepipeError:
        lease.close()
        raise
    variables = {
        **marker.variables,
        **_isa(marker.cpu_isa),
        **folder_variables(folder),
        "CACHEPIPE_ROOT": folder,
        "CACHEPIPE_RESTORED": ",".join(marker.statements),
        "CACHEPIPE_STATE_DIR": state_dir(options, folder),
    }
    if marker.has_compiler_stub and not has_compiler(request.environment):
        path = request.environment.get("PATH", os.defpath)
        variables["PATH"] = os.pathsep.join([os.path.join(folder, marks.BIN), path])
    fetched = 0 if outcome == "present" else marker.bytes
    return RestoreOutcome(
        outcome, folder, marker.names, marker.statements, marker.trust, fetched, variables, tuple(notes), lease
    )


def _isa(built: str) -> dict[str, str]:
    if built != "avx2":
        return {}
    from cachepipe.adapters.machine import Host, cpu_flags, vector_isa

    return isa_variables(built, vector_isa(cpu_flags(Host())))


def in_channel(request: RestoreRequest) -> RestoreOutcome | None:
    """Returns the folder of the channel's newest version, if it is there: two requests, the hint and one probe.

    Raises:
        StoreError: the store fails.
        VerificationError: quarantined.
    """
    options = request.options
    if len(options.names) != 1:
        return None
    name = options.names[0]
    for folder in _channel_folders(request, name):
        try:
            marker, lease = _open_marked(folder)
        except (CachepipeError, OSError):
            continue
        lease.close()
        is_wanted = (marker.names, marker.channel) == ((name,), options.channel)
        is_same_host = marker.host == host_tag(request.environment)
        if is_wanted and is_same_host and _is_newest(options, name, marker, request.now):
            found = open_present(folder, marker.statements)
            if found is not None:
                return outcome_of(request, "present", folder, *found)
    return None


def _channel_folders(request: RestoreRequest, name: str) -> Iterator[str]:
    yield os.path.abspath(request.options.dest or os.path.join(cachedir.DEFAULT_CACHE_ROOT, name))
    for place in cachedir.scratch_folders(request.environment):
        try:
            with os.scandir(place) as found:
                yield from sorted(item.path for item in found if item.name.startswith(f"{name}."))
        except OSError:
            continue


def _is_newest(options: Options, name: str, marker: Marker, now: datetime) -> bool:
    from cachepipe.adapters.store import open_store
    from cachepipe.domain.layout import hint_key, index_key

    if now > parse_timestamp(marker.expires_at, "marker") + TOLERANCE:
        return False
    store = open_store(options.store)
    hint = store.get(hint_key(name, options.channel), LIMITS.small_file_bytes) or b""
    if hint.strip() != str(marker.index_version).encode():
        return False
    return store.get(index_key(name, options.channel, marker.index_version + 1), LIMITS.index_bytes) is None
