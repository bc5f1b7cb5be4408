"""What stands in a compile cache folder: which files are packed, of which kind, how trees become one.

    inductor/fxgraph/…       graphs (pickles)             inductor/cache/<system>   timings of GEMM templates (JSON)
    inductor/aotautograd/…   outer graphs (pickles)       inductor/<2>/*.best_config, *.kernel_perf   tuning records
    inductor/<2>/*.py, *.so  wrappers, native objects     triton/0/<key>/…          Triton kernels, `__grp__*.json`
    engine/<entry key>/…     native functions that need no trace (`domain/engine.py`)

Locks, temporaries and links are never part of an artifact: a held lock blocks a full hit, another rank's temporary is
read as a cut pickle.

Source: torch._inductor.codecache and triton.runtime.cache, read in torch 2.11.0 and 2.13.0, triton 3.6.0.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cachepipe.adapters.cubin import HOST_MODULE, TEXTS, is_object, running_digest
from cachepipe.domain.record import Json, sha256
from cachepipe.errors import IntegrityError

KINDS = ("fxgraph", "aotautograd", "native", "wrapper", "tuning", "triton", "engine", "other")
UNION_PREFIX = "inductor/cache/"
"""Files that every entry of a build extends: timings by kernel, keyed so that two files can be united."""

CHOICE_SUFFIX, TIMING_SUFFIX = ".best_config", ".kernel_perf"
_APART = "build them in one manifest, where they choose alike, or restore each into a folder of its own"
_SEARCH_MS = "time_taken_ms"
RECORD_SUFFIXES = (CHOICE_SUFFIX, TIMING_SUFFIX)

TRITON_NAME_CHARS = 150
FILE_NAME_BYTES = 255

_DROPPED_SUFFIXES = (".lock", ".tmp", ".pyc")
_DROPPED_FOLDERS = ("__pycache__", "locks")


class TreeFile(NamedTuple):
    path: str
    """Relative to the tree, with `/`."""
    size_bytes: int
    mode: int
    """0o644 or 0o755."""


def list_tree(root: Path) -> tuple[TreeFile, ...]:
    """Returns the files of a cache tree that belong into an artifact, sorted by path.

    Regular files only: locks, temporaries, dot files, bytecode, links and special files are left out.
    """
    return tuple(sorted(_walk(str(root), "")))


def _walk(folder: str, prefix: str) -> Iterator[TreeFile]:
    with os.scandir(folder) as found:
        for item in found:
            if item.is_dir(follow_symlinks=False):
                if not _is_dropped_folder(item.name):
                    yield from _walk(item.path, f"{prefix}{item.name}/")
                continue
            facts = item.stat(follow_symlinks=False)
            if stat.S_ISREG(facts.st_mode) and not _is_dropped(item.name):
                mode = 0o755 if facts.st_mode & stat.S_IXUSR else 0o644
                yield TreeFile(f"{prefix}{item.name}", facts.st_size, mode)


def _is_dropped_folder(name: str) -> bool:
    # Triton writes into `tmp.pid_…` folders and renames; one that is left over is a dead writer's.
    return name.startswith((".", "tmp.pid_")) or name in _DROPPED_FOLDERS


def _is_dropped(name: str) -> bool:
    return name.startswith((".", "tmp.pid_")) or name.endswith(_DROPPED_SUFFIXES) or ".tmp." in name


def kind_of(path: str) -> str:
    """Returns which of `KINDS` a file of a tree is."""
    if path.startswith("inductor/fxgraph/"):
        return "fxgraph"
    if path.startswith("inductor/aotautograd/"):
        return "aotautograd"
    if path.startswith(UNION_PREFIX) or path.endswith(RECORD_SUFFIXES):
        return "tuning"
    if path.startswith("triton/"):
        return "triton"
    if path.startswith("engine/"):
        return "engine"
    if path.endswith(".so"):
        return "native"
    if path.startswith("inductor/") and path.endswith(".py"):
        return "wrapper"
    return "other"


def merge_trees(sources: Mapping[int, Path], target: Path) -> Mapping[str, tuple[int, ...]]:
    """Makes one tree of several, in the empty or absent folder `target`.

    Args:
        sources: entry number → its tree; read in the order of the numbers.
        target: where files are copied to, modes 0644 or 0755.

    Returns:
        Path → numbers of the entries that brought it.

    Of two entries with the same kernel, compiled twice, the first one's files stay. Files below `inductor/cache/` become their deep union.

    Raises:
        IntegrityError: two trees hold different bytes at one path, and they do differ in what runs; the path and both entries are named.
    """
    serves: dict[str, tuple[int, ...]] = {}
    for number in sorted(sources):
        for file in list_tree(sources[number]):
            data = (sources[number] / file.path).read_bytes()
            there = target / file.path
            if file.path in serves:
                data = _united(file.path, there.read_bytes(), data, (serves[file.path][0], number))
            else:
                there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(data)
            there.chmod(file.mode)
            serves[file.path] = (*serves.get(file.path, ()), number)
    return serves


def _united(path: str, one: bytes, other: bytes, entries: tuple[int, int]) -> bytes:
    if one == other:
        return one
    where = f"{path} of entries {entries[0]} and {entries[1]}"
    if not path.startswith(UNION_PREFIX):
        if _is_same_kernel(path, one, other):
            return one
        raise IntegrityError(where, "different bytes", wanted=sha256(one)[:12], found=sha256(other)[:12], hint=_APART)
    try:
        united = _union(where, json.loads(one), json.loads(other))
    except ValueError as error:
        raise IntegrityError(where, "different bytes that are not JSON") from error
    # Not our canonical bytes: a choice that cannot run has the timing `Infinity`.
    return json.dumps(united, sort_keys=True, separators=(",", ":")).encode()


def _is_same_kernel(path: str, one: bytes, other: bytes) -> bool:
    """Tells whether two files of one kernel differ only in where its source lay, or in how long it took to find the same choice."""
    if path.endswith(TIMING_SUFFIX):
        return _is_timing(one) and _is_timing(other)
    if path.endswith(CHOICE_SUFFIX):
        choice = read_choice(one)
        return choice is not None and choice == read_choice(other)
    if not path.startswith("triton/"):
        return False
    if path.endswith(".cubin"):
        runs = running_digest(one)
        return runs is not None and runs == running_digest(other)
    if path.endswith(HOST_MODULE):
        return is_object(one) and is_object(other)
    return path.endswith(TEXTS)


def _is_timing(data: bytes) -> bool:
    """One number or several, in milliseconds."""
    try:
        return bool([float(number) for number in data.split()])
    except ValueError:
        return False


def read_choice(record: bytes) -> Mapping[str, Json] | None:
    """Returns what a tuning record says but for how long the search took; None if it cannot be read."""
    try:
        found = json.loads(record)
    except ValueError:
        return None
    return {name: value for name, value in found.items() if name != _SEARCH_MS} if isinstance(found, dict) else None


def _union(where: str, one: Json, other: Json) -> Json:
    if isinstance(one, dict) and isinstance(other, dict):
        both = one.keys() & other.keys()
        return {**one, **other, **{key: _union(f"{where}: {key}", one[key], other[key]) for key in both}}
    if type(one) is type(other) is float:
        # Both are timings of the same kernel, taken twice: the first is as good as the second.
        return one
    if one != other:
        raise IntegrityError(where, "different values", wanted=str(one)[:64], found=str(other)[:64])
    return one


def name_cubins_in_full(root: Path) -> tuple[str, ...]:
    """Gives each Triton kernel's cubin the name by which torch looks for it; returns the paths of the new copies.

    Triton cuts a kernel's name to 150 characters in the names of its files; torch's static launcher asks for the whole name, does not
    find it at a restored start, drops the kernel and compiles it anew.

    Source: triton/compiler/compiler.py (`compile`) 3.6.0; torch/_inductor/runtime/triton_heuristics.py
    (`reload_cubin_path`) 2.11.0.
    """
    import shutil  # costs milliseconds that a restore does not pay

    made = []
    for metadata in sorted(root.glob("triton/*/*/*.json")):
        if len(metadata.stem) < TRITON_NAME_CHARS or metadata.name.startswith("__grp__"):
            continue
        try:
            name = json.loads(metadata.read_bytes())["name"]
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(str(metadata), f"not the metadata of a Triton kernel ({error})") from error
        cubin, wanted = metadata.with_suffix(".cubin"), metadata.with_name(f"{name}.cubin")
        if len(wanted.name.encode()) <= FILE_NAME_BYTES and cubin.is_file() and not wanted.exists():
            shutil.copyfile(cubin, wanted)
            made.append(wanted.relative_to(root).as_posix())
    return tuple(made)
