"""A folder that behaves like S3: for one machine, a shared mount, a build's stage, tests.

An object is a file under its key. It is written under a temporary name in `.tmp`, synced, and given its name by link(2), which
refuses an existing name: so creation is atomic, complete and won by one. A kill leaves only a file in `.tmp`.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator

from cachepipe.adapters.regular_file import is_odd, open_regular
from cachepipe.adapters.store import NO_CHOICE, StoredObject, TrustChoice, Trusting, check_key
from cachepipe.errors import CachepipeError, IntegrityError, NoRoomError, StoreError
from cachepipe.failpoints import reached

_TEMPORARY = ".tmp"
_TRIES = 20
"""To make a folder and put a file into it, while others delete the last file beside it."""


class LocalStore(Trusting):
    """See `cachepipe.adapters.store.Store` for the promises."""

    def __init__(self, root: str | os.PathLike[str], choice: TrustChoice = NO_CHOICE) -> None:
        self.root = os.path.abspath(root)
        """Created by the first write; a store that does not exist yet is empty."""
        self.trust_choice = choice

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    def get(self, key: str, limit_bytes: int) -> bytes | None:
        try:
            with os.fdopen(open_regular(self._path(key)), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = file.read(limit_bytes + 1) if size <= limit_bytes else b""
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            self._check_root(error)
            return None
        except OSError as error:
            if is_odd(error):
                raise IntegrityError(f"object {key}", "not a regular file") from error
            raise self._translated(error, key) from error
        if max(size, len(data)) > limit_bytes:
            raise IntegrityError(f"object {key}", "too long", wanted=f"<= {limit_bytes} bytes", found=size)
        return data

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        if os.path.lexists(path):
            return False
        try:
            temporary = self._write_temporary(data)
            try:
                self._place(path, lambda: _link(temporary, path))
            except FileExistsError:
                return False
            finally:
                os.unlink(temporary)
        except OSError as error:
            raise self._translated(error, key) from error
        return True

    def put_hint(self, key: str, data: bytes) -> None:
        path = self._path(key)
        try:
            temporary = self._write_temporary(data)
            try:
                self._place(path, lambda: os.replace(temporary, path))
            except OSError:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise self._translated(error, key) from error

    def head(self, key: str) -> StoredObject | None:
        try:
            facts = os.stat(self._path(key))
        except (FileNotFoundError, NotADirectoryError) as error:
            self._check_root(error)
            return None
        except OSError as error:
            raise self._translated(error, key) from error
        return _stored(key, facts, time.time()) if stat.S_ISREG(facts.st_mode) else None

    def list(self, prefix: str) -> Iterator[str]:
        return self._keys(prefix)

    def list_objects(self, prefix: str) -> Iterator[StoredObject]:
        now = time.time()
        for key in self._keys(prefix):
            try:
                facts = os.stat(os.path.join(self.root, key))  # not `_path`: what others put there is listed too
            except FileNotFoundError:
                continue  # deleted since its name was read
            except OSError as error:
                raise self._translated(error, key) from error
            yield _stored(key, facts, now)

    def delete(self, key: str) -> None:
        folder, name = os.path.split(self._path(key))
        try:
            os.unlink(os.path.join(folder, name))
            _sync_folder(folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._check_root(error)
            return
        except OSError as error:
            raise self._translated(error, key) from error
        try:
            while folder != self.root:  # an empty folder is no object: of a removed artifact nothing is left
                os.rmdir(folder)
                folder = os.path.dirname(folder)
        except OSError:
            pass  # not empty, as a rule

    def delete_all(self, keys: Iterable[str]) -> int:
        named = tuple(keys)
        failed = []
        for key in named:
            try:
                self.delete(key)
            except StoreError as error:
                failed.append(error)
        if failed:
            raise StoreError(f"{len(failed)} of {len(named)} objects could not be removed: {failed[0]}") from failed[0]
        return len(named)

    def sweep(self, age_s: float) -> int:
        folder, now, count = os.path.join(self.root, _TEMPORARY), time.time(), 0
        try:
            names = os.listdir(folder)
            for name in names:
                path = os.path.join(folder, name)
                if now - os.lstat(path).st_mtime >= age_s:
                    os.unlink(path)
                    count += 1
        except FileNotFoundError:
            pass  # nothing was ever written, or its writer finished: the next run sees the rest
        except OSError as error:
            raise self._translated(error, _TEMPORARY) from error
        return count

    def _keys(self, prefix: str) -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(folder)
        found: list[str] = []
        try:
            top = os.path.join(self.root, folder)

            def onerror(error: OSError) -> None:
                # a folder below may vanish while we look, when its last object does; what else hides objects must not
                if not isinstance(error, FileNotFoundError) or error.filename == top:
                    raise error

            for place, folders, files in os.walk(top, onerror=onerror):
                folders[:] = [name for name in folders if not name.startswith(".")]
                base = os.path.relpath(place, self.root)
                keys = (name if base == "." else f"{base}/{name}" for name in files if not name.startswith("."))
                found += (key for key in keys if key.startswith(prefix))
        except (FileNotFoundError, NotADirectoryError) as error:
            self._check_root(error)
        except OSError as error:
            raise self._translated(error, prefix) from error
        return iter(sorted(found))

    def _path(self, key: str) -> str:
        return os.path.join(self.root, check_key(key))

    def _check_root(self, error: OSError) -> None:
        if os.path.lexists(self.root) and not os.path.isdir(self.root):
            raise StoreError(f"not a folder: `{self.url}`") from error

    def _place(self, path: str, act: Callable[[], None]) -> None:
        """Gives a file its name, in folders that a deletion beside us may take away again, and syncs the name."""
        folder = os.path.dirname(path)
        for attempt in range(_TRIES):
            try:
                self._make_folder(folder)
                act()
                break
            except FileNotFoundError:
                if attempt == _TRIES - 1:
                    raise
        try:
            _sync_folder(folder)
        except FileNotFoundError:
            pass  # the object was removed as soon as it was there

    def _write_temporary(self, data: bytes) -> str:
        folder = os.path.join(self.root, _TEMPORARY)
        self._make_folder(folder)
        path = os.path.join(folder, f"{os.getpid()}.{os.urandom(12).hex()}")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            os.unlink(path)
            raise
        return path

    def _make_folder(self, folder: str) -> None:
        """Creates a folder with its parents; each new name is synced in its parent."""
        if os.path.isdir(folder):
            return
        self._make_folder(os.path.dirname(folder))
        try:
            os.mkdir(folder)
        except FileExistsError:
            # gone again by now: FileNotFoundError, after which the caller begins anew
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", folder) from None
            return
        _sync_folder(os.path.dirname(folder))

    def _translated(self, error: OSError, key: str) -> CachepipeError:
        where = f"`{key}` in `{self.url}`"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return NoRoomError(f"the store is full: {where}", hint="free space in the store")
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK) and error.filename2 is not None:
            return StoreError(
                f"this file system has no hard links, so nothing can be created only if absent: {where}",
                hint="use a folder on a file system with hard links",
            )
        return StoreError(f"{(error.strerror or str(error)).lower()}: {where}")


def _stored(key: str, facts: os.stat_result, now: float) -> StoredObject:
    return StoredObject(key, facts.st_size, max(0.0, now - facts.st_mtime), "")


def _link(temporary: str, path: str) -> None:
    reached("store.before_link")
    os.link(temporary, path)
    reached("store.after_link")


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
