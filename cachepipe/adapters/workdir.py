"""What a build keeps between runs, and its hold on the folder at which it compiles.

    <work>/
      entries/<key16>/bound.json        what the results below belong to; something else: they are forgotten
                      <step>.json       evidence of a finished step, `<step>.log` beside it
                      <step>/           the cache tree after that step; `trim` is the one that is packed
                      facts.record      sizes and rounds, written when trim is finished
      bin/ home/ stage/                 PATH without compilers, HOME of workers, staged store
      seconds.json                      how long each step took, for estimates
    <cache_root>/.build.<release>.lock  held while building; its text says that <root> is a build's leftover

A step's evidence is written last, by rename: what is there is whole.
"""

from __future__ import annotations

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

from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.limits import LIMITS, MIB
from cachepipe.domain.record import canonical_bytes, read_record, record_bytes
from cachepipe.errors import IntegrityError, UnsafePathError

EVIDENCE_BYTES = 256 * MIB
FORMAT = 1
_COMPILER = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|cpp|clang|clang\+\+|icx|icpx|nvcc|ptxas)(-[0-9.]+)?")
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
        """Returns the evidence of a finished step, None if it was not finished."""
        return read_evidence(self.path / f"{step}.json")

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
        os.replace(self.path / f".{step}.pending", self.path / f"{step}.json")
        evidence = self.evidence(step)
        assert evidence is not None
        return evidence

    def write(self, name: str, data: bytes) -> None:
        write_whole(self.path / f"{name}.record", data)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / f"{name}.record").read_bytes()
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
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.home = path / "home"
        self.home.mkdir(mode=0o700, exist_ok=True)

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
        except (FileNotFoundError, ValueError):
            return {}
        return {str(name): float(seconds) for name, seconds in tree.items()} if isinstance(tree, dict) else {}

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


def read_evidence(path: Path) -> EntryEvidence | None:
    """Returns the evidence in a file, None if there is no such file.

    Raises:
        IntegrityError: another kind of file.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return read_record(EntryEvidence, data, str(path), EVIDENCE_BYTES)


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
    """Writes one evidence file of `--report DIR` and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{evidence.entry.replace('/', '_')}.{evidence.step}.json"
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
        for source in sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink()):
            relative = source.relative_to(tree)
            if keep(str(relative)):
                (self.path / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, self.path / relative)

    def move_to(self, target: Path) -> None:
        """Moves the content away; `target` appears whole, also on another file system."""
        partial = target.with_name(f".{target.name}.partial")
        for leftover in (partial, target):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.move(self.path, partial)
        os.rename(partial, target)


@contextmanager
def build_root(root: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[BuildRoot]:
    """Holds the folder at which services restore; it is gone afterwards.

    Args:
        root: `<cache_root>/<release>`.
        on_wait: called when another build holds it, before waiting for that one.

    Raises:
        UnsafePathError: `<cache_root>` cannot be made or is not private to us, or the folder is in use by a service
            or holds what no cachepipe made.
    """
    _private_parent(root)
    lock = os.open(
        root.parent / f".build.{root.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
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
