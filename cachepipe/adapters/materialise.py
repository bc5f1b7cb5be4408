"""Our own bounded writer: the files of a table, from packs, into a fresh private folder.

Regular files only, names as in the table (already checked), every folder and file created exclusively and without
following links, modes 0644 or 0755 whatever the umask is. Fetchers are daemon threads: a read that hangs can hold
neither the caller beyond its deadline nor the process. They begin before the table is there: while it is on its way, read
and checked on one core, packs are fetched, verified and unpacked on the others.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from cachepipe.adapters.packs import open_blob, placed
from cachepipe.domain.artifact import Blob, FileRow, FileTable, Segment
from cachepipe.domain.limits import LIMITS, MIB
from cachepipe.domain.marker import MarkedFile
from cachepipe.domain.record import sha256
from cachepipe.errors import CachepipeError, DeadlineError, IntegrityError, NoRoomError, StoreError, UnsafePathError
from cachepipe.failpoints import reached

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_FILE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
IN_FLIGHT_BYTES = 40 * MIB
"""Of compressed packs at a time: enough for 12 fetchers of usual packs, and for four of those that hardly compress."""
BUFFERS = 6
"""Unpacking is bound by cores; more buffers than those and one only cost memory, 8 MiB each."""
_GROUP_FILE_BYTES = MIB
"""A group file names the dozen files of one kernel."""


class _Piece(NamedTuple):
    row: FileRow
    segment: Segment
    position: int
    """Offset in the file."""


def materialise(  # noqa: PLR0913 - two of the seven are keywords
    fetch: Callable[[str], bytes | memoryview],
    packs: Sequence[Blob],
    table: FileTable,
    target: Path,
    root: str,
    *,
    fetchers: int = 12,
    deadline: float,
) -> tuple[MarkedFile, ...]:
    """Writes every file of the table, exactly once and with exactly its bytes, or raises.

    Args:
        table: read by `read_table`, which checked names and segments.

    All else is as of `fetching`.
    """
    with fetching(fetch, packs, target, root, fetchers=fetchers, deadline=deadline) as writing:
        return writing.finish(table)


@contextmanager
def fetching(
    fetch: Callable[[str], bytes | memoryview],
    packs: Sequence[Blob],
    target: Path,
    root: str,
    *,
    fetchers: int = 12,
    deadline: float,
) -> Iterator[Writing]:
    """Gives what writes the packs' files once its `finish` is told the table; until then it fetches and unpacks ahead.

    Args:
        fetch: digest → compressed bytes as the store gives them; called from several threads.
        packs: the statement's packs.
        target: existing, private, empty folder; what is in it after an error must not be used.
        root: absolute folder that group files shall name: where the tree will finally lie.
        fetchers: threads; the biggest packs are fetched first, up to 4 tries around read and verification.
        deadline: in seconds of `time.monotonic`.

    Raises:
        IntegrityError: a pack is absent or not what its digest says after all tries, or something stands in the target.
        StoreError: the store failed after all tries.
        NoRoomError: the file system is full, or no thread can be started.
        UnsafePathError: the target cannot be written.
        DeadlineError: time ran out.
    """
    writing = Writing(fetch, packs, target, root, deadline)
    try:
        writing.start(min(fetchers, len(packs)))
        yield writing
    finally:
        writing.stop()


class Writing:
    """The state that fetchers share; why a class: seven things under one lock."""

    def __init__(
        self,
        fetch: Callable[[str], bytes | memoryview],
        packs: Sequence[Blob],
        target: Path,
        root: str,
        deadline: float,
    ) -> None:
        self._fetch, self._packs, self._root, self._deadline = fetch, packs, root, deadline
        self._pieces: dict[int, list[_Piece]] | None = None
        """Pack → what to write of it; None until the table is there and its folders are made."""
        self._queue = sorted(range(len(packs)), key=lambda number: packs[number].size_bytes)
        self._open_packs = len(packs)
        self._placed_digests: dict[str, str] = {}
        self._facts: dict[str, os.stat_result] = {}
        """Of files that were written as a whole, right after that."""
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._in_flight = 0
        """Compressed bytes that fetchers have asked for and not yet unpacked."""
        self._buffers: SimpleQueue[bytearray | None] = SimpleQueue()
        for _ in range(min(len(os.sched_getaffinity(0)) + 1, BUFFERS)):
            self._buffers.put(None)
        self._where = str(target)
        try:
            self._target = os.open(target, _FOLDER)
        except OSError as error:
            raise _translated(error, self._where) from error

    def start(self, fetchers: int) -> None:
        for number in range(fetchers):
            try:
                threading.Thread(target=self._serve, name=f"fetch-{number}", daemon=True).start()
            except RuntimeError as error:
                if number == 0:
                    raise NoRoomError(
                        "no thread can be started", hint="raise the service's limit of memory or of processes"
                    ) from error
                break  # a limit on processes or memory: those that run fetch all

    def finish(self, table: FileTable) -> tuple[MarkedFile, ...]:
        """Returns all files as they lie in the target now; see `fetching` for what it raises."""
        try:
            pieces = self._prepare(table)
        except OSError as error:
            raise _translated(error, self._where) from error
        with self._changed:
            self._pieces = pieces
            self._changed.notify_all()
            is_over = self._changed.wait_for(
                lambda: self._error is not None or self._open_packs == 0, max(0.0, self._deadline - time.monotonic())
            )
        if self._error is not None:
            raise self._error
        if not is_over:
            raise DeadlineError(f"time ran out with {self._open_packs} of {len(self._packs)} packs missing")
        return self._written(table)

    def stop(self) -> None:
        """Makes the fetchers end, each after what it is at; after a `finish` that succeeded there are none."""
        self._fail(DeadlineError("given up"))

    def _prepare(self, table: FileTable) -> dict[int, list[_Piece]]:
        """Creates all folders, all empty files and all files that are cut across packs."""
        pieces: dict[int, list[_Piece]] = defaultdict(list)
        folders = {""}
        for row in table.files:
            self._make_folders(row.path.rpartition("/")[0], folders)
            if row.has_root_token and (len(row.segments) > 1 or row.size_bytes > _GROUP_FILE_BYTES):
                wanted = f"one segment, <= {_GROUP_FILE_BYTES} bytes"
                raise IntegrityError(
                    row.path, "group file", wanted=wanted, found=f"{len(row.segments)}, {row.size_bytes}"
                )
            if len(row.segments) != 1:
                os.close(self._create(row))
            position = 0
            for segment in row.segments:
                pieces[segment.pack].append(_Piece(row, segment, position))
                position += segment.length
        return pieces

    def _make_folders(self, folder: str, made: set[str]) -> None:
        if folder in made:
            return
        self._make_folders(folder.rpartition("/")[0], made)
        os.mkdir(folder, 0o700, dir_fd=self._target)
        os.chmod(folder, 0o700, dir_fd=self._target)
        made.add(folder)

    def _create(self, row: FileRow) -> int:
        handle = os.open(row.path, _NEW_FILE, 0o600, dir_fd=self._target)
        os.fchmod(handle, row.mode)
        return handle

    def _serve(self) -> None:
        try:
            while (number := self._next()) is not None:
                self._one_pack(number)
                reached("restore.pack")
                with self._changed:
                    self._open_packs -= 1
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - of a thread: the caller raises it, nothing is swallowed
            self._fail(_translated(error, self._where) if isinstance(error, OSError) else error)

    def _next(self) -> int | None:
        with self._changed:
            while self._queue and self._error is None:
                size = self._packs[self._queue[-1]].size_bytes
                if self._in_flight == 0 or self._in_flight + size <= IN_FLIGHT_BYTES:
                    self._in_flight += size
                    return self._queue.pop()
                self._changed.wait()
            return None

    def _landed(self, number: int) -> None:
        with self._changed:
            self._in_flight -= self._packs[number].size_bytes
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _one_pack(self, number: int) -> None:
        """Fetches and verifies a pack with several tries, then writes its pieces once: what stands in their way stays there."""
        buffer, raw = self._unpacked(number)
        try:
            self._landed(number)
            self._write_pieces(number, raw)
        finally:
            self._buffers.put(buffer)

    def _unpacked(self, number: int) -> tuple[bytearray, memoryview]:
        """Returns a buffer, which the caller gives back, and the pack's content in it."""
        attempt = 0
        while True:
            attempt += 1
            try:
                data = self._fetch(self._packs[number].digest)
                buffer = self._buffers.get() or bytearray(max(pack.raw_bytes for pack in self._packs))
                try:
                    return buffer, open_blob(data, self._packs[number], buffer)
                except BaseException:
                    self._buffers.put(buffer)
                    raise
            except (IntegrityError, StoreError):
                pause_s = 0.05 * 2**attempt * (0.5 + random.random())
                if attempt == LIMITS.tries or time.monotonic() + pause_s > self._deadline:
                    raise
                time.sleep(pause_s)

    def _write_pieces(self, number: int, raw: memoryview) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._pieces is not None or self._error is not None)
        for piece in self._pieces[number] if self._pieces else ():
            if self._error is not None:
                return
            self._write(piece, raw[piece.segment.offset : piece.segment.offset + piece.segment.length])

    def _write(self, piece: _Piece, raw: memoryview) -> None:
        row = piece.row
        is_whole = len(row.segments) == 1
        if row.has_root_token:
            text = placed(bytes(raw), self._root)
            self._placed_digests[row.path] = sha256(text)
            raw = memoryview(text)
        handle = self._create(row) if is_whole else os.open(row.path, _OLD_FILE, dir_fd=self._target)
        try:
            done = 0
            while done < len(raw):
                done += os.pwrite(handle, raw[done:], piece.position + done)
            if is_whole:
                self._facts[row.path] = os.fstat(handle)
        finally:
            os.close(handle)

    def _written(self, table: FileTable) -> tuple[MarkedFile, ...]:
        rows = []
        try:
            for row in table.files:
                facts = self._facts.get(row.path) or os.stat(row.path, dir_fd=self._target, follow_symlinks=False)
                digest = self._placed_digests.get(row.path, row.sha256)
                rows.append(MarkedFile(row.path, facts.st_size, facts.st_mtime_ns, facts.st_ino, digest))
        except OSError as error:
            raise _translated(error, self._where) from error
        os.close(self._target)  # after an error a fetcher may still be at it
        return tuple(rows)


def _translated(error: OSError, where: str) -> CachepipeError:
    place = error.filename or where
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoRoomError(f"{place}: {os.strerror(error.errno)}")
    if error.errno == errno.EFBIG:
        hint = "raise the limit of file sizes (`ulimit -f`), or name a folder on another file system by `--dest`"
        return NoRoomError(f"{place}: {os.strerror(error.errno)}", hint=hint)
    if error.errno in (errno.EEXIST, errno.ELOOP, errno.ENOTDIR):
        return IntegrityError(str(place), f"something else stands there ({os.strerror(error.errno)})")
    return UnsafePathError(place, f"cannot be written ({error.strerror})")
