"""What a process leaves in folders: sizes by kind inside the cache folder, and files outside, which no release covers.

Seen outside are: what Python code opens for writing, and what appears or changes below HOME, the temporary folder and the places
where compilers are known to keep caches, also when native code or a child process writes it. Files that are gone at the
end are nobody's cache.
"""

from __future__ import annotations

import os
import pwd
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cachepipe.adapters.cachetree import kind_of, list_tree
from cachepipe.domain.evidence import KindSize, OutsideFile

MAX_FILES = 20_000
"""That are looked at below one place: a home folder with more is not a cache that a start fills."""
MAX_FOUND = 1_000
_OWNERS = {
    "/.nv/ComputeCache/": "the CUDA driver's cache of assembled kernels (CUDA_CACHE_PATH)",
    "/nv/ComputeCache/": "the CUDA driver's cache of assembled kernels (CUDA_CACHE_PATH)",
    "/.triton/": "Triton's own folder (kernels outside of torch.compile; TRITON_HOME, TRITON_CACHE_DIR)",
    "/precompiled_headers/": "Inductor's precompiled headers (TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=0 keeps them away)",
    "/torchinductor_": "Inductor's default folder (something reset TORCHINDUCTOR_CACHE_DIR)",
    "/torch_compile_debug/": "debug output (TORCH_COMPILE_DEBUG, which also changes the keys)",
    "/torch_extensions/": "torch.utils.cpp_extension (TORCH_EXTENSIONS_DIR)",
    "/.cache/torch/kernels/": "torch's runtime-compiled kernels (PYTORCH_KERNEL_CACHE_PATH)",
    "/.cache/torch/": "torch.hub (TORCH_HOME)",
    "/.cache/huggingface/": "Hugging Face's hub (HF_HOME)",
    "/.cache/flashinfer/": "FlashInfer's kernels (FLASHINFER_WORKSPACE_BASE)",
    "/.tilelang/": "TileLang's kernels (TILELANG_CACHE_DIR)",
    "/.deep_gemm/": "DeepGEMM's kernels (DG_JIT_CACHE_DIR)",
    "/.cache/vllm/": "vLLM's compile cache (VLLM_CACHE_ROOT)",
    "/numba": "Numba's cache (NUMBA_CACHE_DIR)",
    "/__pycache__/": "Python's bytecode",
}
_KNOWN_FOLDERS = (
    *(".nv/ComputeCache", ".triton", ".tilelang", ".deep_gemm", ".cupy"),
    *(".cache/torch/kernels", ".cache/flashinfer", ".cache/vllm"),
)
"""Looked at in the real home, which native code finds without HOME: no more of it, since others write there as well."""


def folder_files(root: str) -> set[str]:
    """Returns the files below a cache folder, without locks and temporaries."""
    found: set[str] = set()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("locks", ".cachepipe", "__pycache__")]
        found.update(os.path.join(folder, name) for name in names if not name.endswith((".lock", ".tmp", ".lease")))
    return found


def kind_sizes(root: str) -> dict[str, KindSize]:
    """Returns kind → number and raw bytes of its files below a cache folder; {} for one that is not there."""
    sizes: dict[str, KindSize] = {}
    for file in list_tree(Path(root)) if os.path.isdir(root) else ():
        kind = kind_of(file.path)
        known = sizes.get(kind, KindSize(0, 0))
        sizes[kind] = KindSize(known.files + 1, known.size_bytes + file.size_bytes)
    return sizes


def owner_of(path: str) -> str:
    """Returns what is known to write a file, in words; `unknown` otherwise."""
    return next((owner for part, owner in _OWNERS.items() if part in path), "unknown")


class OutsideWatch:
    """Remembers what was there before the first call; an audit hook cannot be removed, so it is for worker processes only.

    Args:
        root: the cache folder; files below it are the artifact's own.
        environ: for HOME and the variables that name caches.
        ignored: further files and folders that are ours.
    """

    def __init__(self, root: str, environ: Mapping[str, str], ignored: tuple[str, ...] = ()) -> None:
        self._ignored = tuple(os.path.realpath(path) for path in (root, *ignored))
        self._places = tuple(_places(environ))
        self._before: dict[str, tuple[int, int]] = {}
        self._opened: set[str] = set()
        self._is_watching = False

    def begin(self) -> None:
        """Starts watching."""
        self._before = dict(self._files())
        self._is_watching = True
        sys.addaudithook(self._hook)

    def found(self) -> tuple[OutsideFile, ...]:
        """Returns the files that were written since `begin` and are still there, sorted by path."""
        if not self._is_watching:
            return ()
        self._is_watching = False
        changed = {path for path, facts in self._files() if self._before.get(path) != facts}
        rows = []
        for path in sorted(changed | {os.path.realpath(path) for path in self._opened}):
            facts = _facts(path)
            if facts is not None and not self._is_ignored(path):
                rows.append(OutsideFile(path, facts[1], owner_of(path)))
        return tuple(rows[:MAX_FOUND])

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not self._is_watching or len(self._opened) >= MAX_FOUND:
            return
        path, _, flags = args
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        is_write = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if is_write and isinstance(path, str) and not path.startswith(("/dev/", "/proc/")):
            self._opened.add(os.path.abspath(path))

    def _files(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for place in self._places:
            yield from self._walk(place)

    def _walk(self, place: str) -> Iterator[tuple[str, tuple[int, int]]]:
        seen = 0
        for folder, folders, names in os.walk(place):
            folders[:] = [name for name in folders if not self._is_ignored(os.path.join(folder, name))]
            for name in names:
                path = os.path.join(folder, name)
                facts = _facts(path)
                if facts is not None:
                    yield path, facts
            seen += len(names)
            if seen > MAX_FILES:
                return

    def _is_ignored(self, path: str) -> bool:
        return any(path == one or path.startswith(f"{one}/") for one in self._ignored)


def _facts(path: str) -> tuple[int, int] | None:
    """Returns (mtime in ns, size in bytes) of a regular file."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size) if os.path.isfile(path) and not os.path.islink(path) else None


def _places(environ: Mapping[str, str]) -> list[str]:
    """Returns folders without those below another one."""
    found = [environ.get("HOME", ""), environ.get("XDG_CACHE_HOME", ""), environ.get("CUDA_CACHE_PATH", "")]
    found += [tempfile.gettempdir(), environ.get("TRITON_HOME", "")]
    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        home = ""
    found += [os.path.join(home, name) for name in _KNOWN_FOLDERS if home]
    places = sorted({os.path.realpath(place) for place in found if place and os.path.isdir(place)} - {"/"})
    return [place for place in places if not any(place.startswith(f"{other}/") for other in places)]
