"""Is the release already there? The answer without fetching anything; with a lock file without any network.

A folder is used as it is when it is private, can be written and executed, its marker names exactly the statements that are wanted,
was written for this very path and under this very trust policy, and every file is as it was: equal stat, or else equal
SHA-256 (a copied layer). Under another policy the kept envelopes are judged again; only then is `cryptography` imported.
Imports little: this is the path that every restart of a service takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice, product

from cachepipe.adapters import cachedir
from cachepipe.adapters.execute import check_variables
from cachepipe.adapters.lease import Lease
from cachepipe.adapters.lock_file import read_lock_file
from cachepipe.adapters.policy_file import read_policy_file
from cachepipe.domain import marker as marks
from cachepipe.domain.index import IndexRow, parse_timestamp
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.lock import Lock
from cachepipe.domain.marker import Marker, marker_bytes, read_marker
from cachepipe.domain.record import digest_parts, sha256
from cachepipe.errors import (
    CachepipeError,
    FingerprintMismatchError,
    IntegrityError,
    StoreError,
    TrustError,
    UnsafePathError,
    UsageError,
)
from cachepipe.workflows.host import host_tag, this_machine
from cachepipe.workflows.outcome import RestoreOutcome, RestoreRequest, outcome_of
from cachepipe.workflows.restore_options import Options

TOLERANCE = timedelta(seconds=300)
_SET_CHOICES = 64
_OF_STORE = ", of store "


def read_locks(options: Options) -> tuple[Lock, ...]:
    """Returns the lock files of a command line, in the order of the names where both are given.

    Raises:
        UsageError: a file cannot be read, or is for a release that was not named.
        IntegrityError: not a lock file.
    """
    locks: dict[str, Lock] = {}
    for path in options.locks:
        lock = read_lock_file(path)
        if options.names and lock.name not in options.names:
            raise UsageError(f"lock file `{path}` is for `{lock.name}`, not for `{', '.join(options.names)}`")
        locks[lock.name] = lock
    return tuple(locks[name] for name in (options.names or locks) if name in locks)


def policy_tag(options: Options) -> str:
    """Returns by what a restore with these options judges signatures, for the marker.

    Raises:
        TrustError: the policy file cannot be used.
    """
    data = read_policy_file(options.trust)
    if data is not None:
        return sha256(data) + (" and unsigned" if options.accepts_unsigned else "")  # which the policy refuses
    return "none, unsigned accepted" if options.accepts_unsigned else "none"


def channel_tag(options: Options) -> str:
    """As `policy_tag`, for what a channel named: the same channel of another store is another one.

    Raises:
        TrustError: the policy file cannot be used.
    """
    return f"{policy_tag(options)}{_OF_STORE}{sha256(options.store.encode(errors='surrogatepass'))[:16]}"


def set_digest(statements: Sequence[str]) -> str:
    """Returns what names a folder that holds several releases: the same set in another order is the same folder."""
    return digest_parts({str(number): digest for number, digest in enumerate(sorted(statements))})


def folder_name(names: Sequence[str], statements: Sequence[str]) -> str:
    """Returns the name of a folder of this content alone, `<name>.<digest12>` or `<set-digest12>`."""
    return f"{names[0]}.{statements[0][:12]}" if len(names) == 1 else set_digest(statements)[:12]


def open_present(
    folder: str,
    statements: Sequence[str],
    refused: list[str] | None = None,
    own: tuple[Marker, bytes] | None = None,
) -> tuple[Marker, Lease] | None:
    """Returns marker and shared lease of a folder that holds exactly these statements, unharmed; None otherwise.

    Args:
        folder: that may hold them.
        statements: digests of all that it must hold.
        refused: gets the reason, if something is there.
        own: the marker that this process has just written there, and its bytes: they are compared, not read anew.
    """
    try:
        marker, lease = _open_marked(folder, own)
    except (CachepipeError, OSError) as error:
        _refuse(folder, error, refused)
        return None
    try:
        if sorted(marker.statements) == sorted(statements):
            _check_files(folder, marker)
            # a volume that one container filled may be mounted otherwise in the next
            cachedir.check_executable(folder, os.statvfs(folder))
            cachedir.write_and_read_test(folder)
            return marker, lease
    except (CachepipeError, OSError) as error:
        _refuse(folder, error, refused)
    lease.close()
    return None


def _refuse(folder: str, error: Exception, refused: list[str] | None) -> None:
    if refused is not None and os.path.lexists(os.path.join(folder, marks.PATH)):
        refused.append(f"{folder} was restored before and cannot be used: {str(error).removeprefix(f'{folder}: ')}")


def _open_marked(folder: str, own: tuple[Marker, bytes] | None = None) -> tuple[Marker, Lease]:
    if not os.path.lexists(os.path.join(folder, marks.PATH)):
        raise UnsafePathError(folder, "has no marker")
    cachedir.check_private(folder)
    lease = Lease.take(folder, is_shared=True)
    if lease is None:
        is_free = os.access(folder, os.W_OK, effective_ids=True)
        read_only = "read-only: mount something writable there, or name another folder by `--dest`"
        raise UnsafePathError(folder, "is being replaced" if is_free else read_only)
    try:
        data = cachedir.read_own(os.path.join(folder, marks.PATH), LIMITS.table_raw_bytes)
        marker = own[0] if own is not None and own[1] == data else read_marker(data)
        if marker.root != os.path.abspath(folder):
            raise UnsafePathError(folder, f"was made for `{marker.root}`")
        check_variables(marker.variables)
    except (CachepipeError, OSError):
        lease.close()
        raise
    return marker, lease


def _check_files(folder: str, marker: Marker) -> None:
    """Compares every file's stat; where it changed, the bytes. A link in place of a folder is a change, whatever it names."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for below in _folders_above(marker.files):
            if not stat.S_ISDIR(os.stat(below, dir_fd=handle, follow_symlinks=False).st_mode):
                raise IntegrityError(below, "no folder any more")
        for row in marker.files:
            facts = os.stat(row.path, dir_fd=handle, follow_symlinks=False)
            if (facts.st_size, facts.st_mtime_ns, facts.st_ino) != (row.size_bytes, row.mtime_ns, row.inode):
                _check_bytes(handle, row)
    finally:
        os.close(handle)


def _folders_above(files: Iterable[marks.MarkedFile]) -> list[str]:
    found: set[str] = set()
    for row in files:
        above = row.path.rpartition("/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return sorted(found)


def _check_bytes(folder: int, row: marks.MarkedFile) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a fifo in its place must not block
    with os.fdopen(os.open(row.path, flags, dir_fd=folder), "rb") as file:
        whole = hashlib.sha256()
        while chunk := file.read(1 << 20):
            whole.update(chunk)
    if whole.hexdigest() != row.sha256:
        raise IntegrityError(row.path, "changed since it was restored", wanted=row.sha256, found=whole.hexdigest())


def find(request: RestoreRequest) -> RestoreOutcome | None:
    """Returns the wanted folder if it is there already: `with_lock` or `in_channel`; None: it must be restored."""
    return with_lock(request) if request.options.locks else in_channel(request)


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
    tag, policy = host_tag(request.environment), policy_tag(request.options)
    choices = product(*(lock.rows for lock in locks))
    for rows in islice(choices, _SET_CHOICES):
        statements = [row.statement for row in rows]
        for folder in _likely_folders(request, locks, statements):
            found = open_present(folder, statements, request.refused)
            if found is None:
                continue
            judged: Marker | None = found[0]
            if found[0].policy.partition(_OF_STORE)[0] != policy:
                judged = _still_trusted(request.options, policy, folder, found[0])
            if judged is not None and (judged.host == tag or _still_fits(rows, tag, folder, judged)):
                return outcome_of(request, "present", folder, judged, found[1])
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
    for place in _scratch(request):
        yield os.path.join(place, own_name)


def _scratch(request: RestoreRequest) -> tuple[str, ...]:
    return cachedir.scratch_folders(request.environment) if request.options.has_scratch else ()


def is_in_scratch(request: RestoreRequest, folder: str) -> bool:
    """Tells whether a present folder is not where the release belongs."""
    return os.path.dirname(folder) in _scratch(request) and folder != request.options.dest


def _still_trusted(options: Options, policy: str, folder: str, marker: Marker) -> Marker | None:
    """Returns the marker as a policy file judges the kept envelopes that is not the one by which they were restored; None: not trusted."""
    data = read_policy_file(options.trust)
    if data is None or options.accepts_unsigned:
        return None  # the store has to be asked, or the whole restore refuses
    from cachepipe.domain.policy import read_policy
    from cachepipe.domain.trust import STATEMENT_PAYLOAD_TYPE, check_keys, verify

    judge = check_keys(read_policy(data))
    statuses = []
    for digest in marker.statements:
        try:
            envelope = cachedir.read_own(
                os.path.join(folder, marks.ENVELOPES, f"{digest}.json"), LIMITS.statement_bytes
            )
            if sha256(envelope) != digest or digest in judge.revoked:
                return None
            statuses.append(verify(envelope, STATEMENT_PAYLOAD_TYPE, "statement", judge, None).status)
        except (OSError, TrustError, IntegrityError):
            return None
    judged = dataclasses.replace(marker, policy=policy, trust=",".join(dict.fromkeys(statuses)))
    renew_marker(folder, judged)
    return judged


def _still_fits(rows: Sequence[IndexRow], tag: str, folder: str, marker: Marker) -> bool:
    """Compares fingerprints on a host that is not as it was, and remembers the new host in the marker."""
    try:
        for row in rows:
            this_machine([row]).require(row)
    except FingerprintMismatchError:
        return False
    renew_marker(folder, dataclasses.replace(marker, host=tag))
    return True


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


def in_channel(request: RestoreRequest) -> RestoreOutcome | None:
    """Returns the folder of the channel's newest version, if it is there: two requests, the hint and one probe.

    Raises:
        StoreError: the store fails.
        VerificationError: quarantined.
    """
    options = request.options
    if len(options.names) != 1:
        return None
    name, policy = options.names[0], channel_tag(options)
    for folder in _channel_folders(request, name):
        try:
            marker, lease = _open_marked(folder)
        except (CachepipeError, OSError) as error:
            _refuse(folder, error, request.refused)
            continue
        lease.close()
        is_wanted = (marker.names, marker.channel, marker.policy) == ((name,), options.channel, policy)
        is_same_host = marker.host == host_tag(request.environment)
        try:
            is_current = is_wanted and is_same_host and _is_newest(options, name, marker, request.now)
            is_current = is_current and not _is_outrun(request, name, marker, folder)
            warning = marker.age_warning(request.now) if is_current else ""
        except IntegrityError:
            continue  # of a marker, a hint or a probe: the whole restore judges them, step by step
        if is_current:
            found = open_present(folder, marker.statements, request.refused)
            if found is not None:
                return outcome_of(request, "present", folder, *found, [warning] if warning else ())
    return None


def _channel_folders(request: RestoreRequest, name: str) -> Iterator[str]:
    yield os.path.abspath(request.options.dest or os.path.join(cachedir.DEFAULT_CACHE_ROOT, name))
    for place in _scratch(request):
        try:
            with os.scandir(place) as found:
                yield from sorted(item.path for item in found if item.name.startswith(f"{name}."))
        except OSError:
            continue


def _is_outrun(request: RestoreRequest, name: str, marker: Marker, folder: str) -> bool:
    """Returns whether this node has seen a newer version than the folder's: then the whole restore judges what is offered."""
    from cachepipe.workflows.floors import seen_version

    return not marker.policy.startswith("none") and seen_version(request, name, folder) > marker.index_version


def _is_newest(options: Options, name: str, marker: Marker, now: datetime) -> bool:
    from cachepipe.adapters.store import is_absent_by_403, open_store
    from cachepipe.domain.layout import hint_key, index_key

    if now - TOLERANCE > parse_timestamp(marker.expires_at, "marker"):
        return False
    store = open_store(options.store)
    hint = store.get(hint_key(name, options.channel), LIMITS.small_file_bytes) or b""
    if hint.strip() != str(marker.index_version).encode():
        return False
    try:
        return store.get(index_key(name, options.channel, marker.index_version + 1), LIMITS.index_bytes) is None
    except StoreError as error:
        if is_absent_by_403(error):  # the hint beside it was read
            return True
        raise
