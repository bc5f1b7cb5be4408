"""What a build keeps between runs, and its hold on the folder at which it compiles.

    <work>/
      entries/<key16>/bound.json        what the results below belong to; something else: they are forgotten
                      <step>.json       evidence of a finished step, `<step>.log` beside it
                      <step>/           the cache tree after that step; `trim` is the one that is packed
                      <step>.files      digest of that tree; a tree that changed since is made again
                      facts.record      sizes and rounds, written when trim is finished
      bin/ home/ stage/                 PATH without compilers, HOME of workers, staged store
      seconds.json                      how long each step took, for estimates
      .lock                             held while a build or a verification works in it
    <cache_root>/.build.<release>.lock  held while building; its text says that <root> is a build's leftover

A step's evidence is written last, by rename. What cannot be read, or is not as it was left, counts as not finished.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cachepipe.adapters.cachetree import list_tree
from cachepipe.adapters.folders import lock_file, require_room, usable
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.evidence_reader import EVIDENCE_BYTES
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.record import canonical_bytes, digest_parts, read_record, record_bytes, sha256
from cachepipe.errors import IntegrityError, UnsafePathError

FORMAT = 1
_COMPILER = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|cpp|clang|clang\+\+|icx|icpx|nvcc|ptxas|ptxas-blackwell)(-[0-9.]+)?")
_IN_USE = b"building\n"


@dataclass(frozen=True)
class Binding:
    """What must be equal for an entry's results to be used again."""

    key: str
    fingerprint: str
    root: str
    format: int = FORMAT


class EntryDir:
    """Finished steps of one entry."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def evidence(self, step: str) -> EntryEvidence | None:
        """Returns the evidence of a finished step, None if it was not finished or cannot be read."""
        try:
            return read_evidence(self.path / f"{step}.json")
        except IntegrityError:
            return None

    def finished(self, step: str) -> EntryEvidence | None:
        """Returns the evidence of a step whose tree is as it was left, None if any of it has to be made again."""
        evidence, tree = self.evidence(step), self.tree(step)
        is_whole = evidence is not None and tree.is_dir() and self.read(f"{step}.files") == _tree_digest(tree)
        return evidence if is_whole else None

    def read_pending(self, step: str) -> EntryEvidence | None:
        """Returns what a worker has just written, before the step counts as finished."""
        return read_evidence(self.path / f".{step}.pending")

    def tree(self, step: str) -> Path:
        return self.path / step

    def log(self, step: str) -> Path:
        return self.path / f"{step}.log"

    def pending(self, step: str) -> Path:
        """Where a worker writes its evidence; it counts only after `finish`. An old one is removed."""
        path = self.path / f".{step}.pending"
        path.unlink(missing_ok=True)
        return path

    def finish(self, step: str, root: BuildRoot | None = None) -> EntryEvidence:
        """Keeps the tree at `root` and the pending evidence of a step, in this order."""
        if root is not None:
            root.move_to(self.tree(step))
            self.write(f"{step}.files", _tree_digest(self.tree(step)))
        os.replace(self.path / f".{step}.pending", self.path / f"{step}.json")
        evidence = self.evidence(step)
        assert evidence is not None
        return evidence

    def write(self, name: str, data: bytes) -> None:
        write_whole(self.path / name, data)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def drop_tree(self, step: str) -> None:
        shutil.rmtree(self.tree(step), ignore_errors=True)

    def forget(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700, parents=True)


class WorkDir:
    """The work directory of one release."""

    def __init__(self, path: Path) -> None:
        # Workers have a working folder of their own: a relative path would be another place there.
        self.path = path.absolute()
        self.home = self.path / "home"
        with usable(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.home.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def held(self, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Holds the work directory: one build or verification at a time works in it.

        Args:
            on_wait: called when another one holds it, before waiting for that one.

        Raises:
            NoRoomError: hardly any space is left, or a file system became full in the body.
            UnsafePathError: a folder that the body needs cannot be written.
        """
        with usable(self.path), open(self.path / ".lock", "ab") as lock:
            lock_file(lock.fileno(), on_wait)
            require_room(self.path)
            yield

    def entry(self, binding: Binding, is_fresh: bool = False) -> EntryDir:
        """Returns the folder of an entry, emptied if it belongs to something else, cannot be read, or `is_fresh`."""
        entry = EntryDir(self.path / "entries" / binding.key[:16])
        bound = entry.path / "bound.json"
        if is_fresh or _read_binding(bound) != binding:
            entry.forget()
            write_whole(bound, record_bytes(binding))
        return entry

    def estimates(self) -> dict[str, float]:
        """Returns `<entry id> <step>` → seconds that it took last time."""
        try:
            tree = json.loads((self.path / "seconds.json").read_bytes())
        except (OSError, ValueError):
            return {}
        rows = tree.items() if isinstance(tree, dict) else ()
        return {name: seconds for name, seconds in rows if isinstance(seconds, float)}

    def note_estimate(self, name: str, seconds: float) -> None:
        write_json(self.path / "seconds.json", {**self.estimates(), name: seconds})

    def empty(self, name: str) -> Path:
        """Returns an empty folder of the work directory."""
        self.drop(name)
        folder = self.path / name
        folder.mkdir(mode=0o700)
        return folder

    def drop(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def path_without_compilers(self, search_path: str) -> str:
        """Returns a PATH of one folder with links to all that `search_path` has, except compilers."""
        folder = self.empty("bin")
        for place in search_path.split(os.pathsep):
            try:
                names = sorted(os.listdir(place or "."))
            except OSError:
                continue
            for name in names:
                link = folder / name
                if _COMPILER.fullmatch(name) is None and not os.path.lexists(link):
                    link.symlink_to(os.path.join(place, name))
        return str(folder)


def _tree_digest(tree: Path) -> bytes:
    rows = {file.path: f"{file.mode:o} {sha256((tree / file.path).read_bytes())}".encode() for file in list_tree(tree)}
    return digest_parts(rows).encode()


def read_evidence(path: Path) -> EntryEvidence | None:
    """Returns the evidence in a file, None if there is no such file.

    Raises:
        IntegrityError: another kind of file.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return read_record(EntryEvidence, data, str(path), EVIDENCE_BYTES)
    except IntegrityError as error:
        error.hint = "this is no evidence: name a file or the folder that `build --report` or `verify --report` left"
        raise


def _read_binding(path: Path) -> Binding | None:
    try:
        return read_record(Binding, path.read_bytes(), str(path), LIMITS.small_file_bytes)
    except (FileNotFoundError, IntegrityError):
        return None


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that is either as before or whole, whatever happens."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def write_evidence(folder: Path, evidence: EntryEvidence) -> Path:
    """Writes one evidence file of `--report DIR` and returns its path; the targets of one manifest have files of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = (evidence.entry.replace("/", "_"), evidence.device, evidence.step, "json")
    path = folder / ".".join(filter(None, parts))
    write_whole(path, record_bytes(evidence))
    return path


def write_json(path: Path, tree: object) -> None:
    """Writes canonical JSON, whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, canonical_bytes(tree))


class BuildRoot:
    """The folder at which services restore, held by one build at a time and left without a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self) -> None:
        """Leaves an empty folder with torch's and Triton's folders in it."""
        self.remove()
        for name in ("inductor", "triton/0"):
            (self.path / name).mkdir(mode=0o700, parents=True)
        os.chmod(self.path, 0o700)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self.path.exists():
            raise UnsafePathError(self.path, "cannot be emptied")

    def fill(self, tree: Path, keep: Callable[[str], bool] = lambda path: True) -> None:
        """Replaces the content by copies of the files of `tree` whose relative path `keep` accepts."""
        self.clear()
        _copy_files(tree, self.path, keep)

    def move_to(self, target: Path) -> None:
        """Moves the content away; `target` appears whole, also on another file system."""
        partial = target.with_name(f".{target.name}.partial")
        for leftover in (partial, target):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            os.rename(self.path, partial)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            partial.mkdir(mode=0o700)
            _copy_files(self.path, partial)
            self.remove()
        os.rename(partial, target)


def _copy_files(tree: Path, target: Path, keep: Callable[[str], bool] = lambda path: True) -> None:
    """Copies regular files one by one: a full disk is an OSError with its number, not shutil's list of texts."""
    for source in sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink()):
        relative = source.relative_to(tree)
        if keep(str(relative)):
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / relative)


@contextmanager
def build_root(root: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[BuildRoot]:
    """Holds the folder at which services restore; it is gone afterwards.

    Args:
        root: `<cache_root>/<release>`.
        on_wait: called when another build holds it, before waiting for that one.

    Raises:
        NoRoomError: hardly any space is left there.
        UnsafePathError: `<cache_root>` cannot be made or is not private to us, or the folder is in use by a service
            or holds what no cachepipe made.
    """
    _private_parent(root)
    lock = os.open(
        root.parent / f".build.{root.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        lock_file(lock, on_wait)
        require_room(root.parent)
        _refuse_foreign(root, is_leftover=os.pread(lock, len(_IN_USE), 0) == _IN_USE)
        os.pwrite(lock, _IN_USE, 0)
        held = BuildRoot(root)
        try:
            held.clear()
            yield held
        finally:
            held.remove()
            os.ftruncate(lock, 0)
    finally:
        os.close(lock)


def _private_parent(root: Path) -> None:
    parent = root.parent
    user = pwd.getpwuid(os.geteuid()).pw_name if _has_name(os.geteuid()) else str(os.geteuid())
    hint = f"run once: install -d -m 0700 -o {user} {parent}"
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UnsafePathError(parent, f"cannot be made ({error.strerror})", hint=hint) from error
    found = os.lstat(parent)
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafePathError(parent, "not a folder", hint=hint)
    if found.st_uid != os.geteuid():
        raise UnsafePathError(parent, "belongs to another user", hint=hint)
    if found.st_mode & 0o022:
        raise UnsafePathError(parent, "others may write in it", hint=hint)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UnsafePathError(parent, "not writable", hint=hint)


def _has_name(user: int) -> bool:
    try:
        pwd.getpwuid(user)
    except KeyError:
        return False
    return True


def _refuse_foreign(root: Path, is_leftover: bool) -> None:
    """A restored folder that no service uses may be replaced, as may a killed build's leftover; anything else not."""
    try:
        names = set(os.listdir(root))
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise UnsafePathError(root, "not a folder") from error
    if names and not is_leftover and not (root / ".cachepipe" / "marker.json").is_file():
        raise UnsafePathError(
            root, "holds files that cachepipe did not make", hint="move them away, or choose another `--cache-root`"
        )
    lease = root / ".lease"
    if lease.exists() and _is_leased(lease):
        raise UnsafePathError(
            root, "a running service uses it", hint="stop the service, or build elsewhere with `--cache-root`"
        )


def _is_leased(lease: Path) -> bool:
    fd = os.open(lease, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
