"""Finds the source files and distributions that a model is made from, without importing any of them.

Local sources are the modules that the manifest refers to (factory, inputs, loss), the packages around them, what they
import inside `python_path`, and so on, and whatever the patterns of `sources` match. Imports are found in the syntax
tree anywhere in a file; `import_module("constant")` counts too.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cachepipe.adapters.regular_file import read_regular
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.manifest_rules import Place, Problem, nearest
from cachepipe.domain.record import canonical_bytes, digest_parts, sha256


@dataclass
class Sources:
    """What was found for one model."""

    digests: dict[str, str] = field(default_factory=dict)
    """Path relative to its `python_path` folder (else to the manifest's folder) → digest."""
    imports: set[str] = field(default_factory=set)
    """Top-level names of modules that are neither local nor in the standard library."""
    problems: list[Problem] = field(default_factory=list)


def model_sources(
    references: Mapping[str, str], patterns: Sequence[str], manifest_dir: Path, python_path: Sequence[Path]
) -> Sources:
    """Returns the digests of a model's sources and the names of what else they import.

    Args:
        references: field of the manifest → `module:attribute`.
        patterns: the manifest's `sources`, relative to `manifest_dir`; files that match are digested, and followed
            when they are Python.
        manifest_dir: absolute.
        python_path: absolute folders, searched in this order.

    Returns:
        Sources with `problems`: a module or an attribute that does not exist, a pattern that matches nothing, a
        module that is not Python. A reference outside `python_path` must be installed; then only its
        distribution's version counts.
    """
    search = _Search(tuple(python_path), manifest_dir)
    for name, reference in references.items():
        search.add_reference(reference, (name,))
    for i, pattern in enumerate(patterns):
        files = _matches(pattern, manifest_dir)
        if not files:
            search.found.problems.append(Problem(("sources", i), f"no file matches `{pattern}`"))
        for file in files:
            search.add_file(file, ("sources", i))
    return search.found


def distribution_versions(imports: Collection[str]) -> Mapping[str, str]:
    """Returns the version of every distribution that provides one of the modules.

    A module without a distribution is `absent` (an optional import): installing it changes the version. Where a version
    does not fix the files, it gets an addition: the commit of a distribution installed from a repository, a digest of
    the Python sources of one that is installed editable.
    """
    owners = importlib.metadata.packages_distributions()
    versions: dict[str, set[str]] = {}
    for module in sorted(imports):
        for name in set(owners.get(module, ())):
            versions.setdefault(name.lower().replace("_", "-"), set()).add(_version(name, module))
        if module not in owners:
            versions.setdefault(module, set()).add("absent")
    return {name: " ".join(sorted(found)) for name, found in versions.items()}


def source_digest(data: bytes, is_python: bool) -> str:
    """Returns a digest that comments, blank lines and positions of Python code do not change; other bytes all count."""
    if is_python:
        try:
            tree = ast.parse(data)
            return digest_parts({"python": ast.dump(tree, annotate_fields=False, include_attributes=False)})
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # a template or a broken file: its bytes are what it is
    return digest_parts({"bytes": sha256(data)})


def absolute(path: Path) -> Path:
    """Returns a path without links and `..`; one that no system accepts stays as it is."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a name with a zero byte or too long, a loop of links
        return path


def is_folder(path: Path) -> bool:
    """Tells whether a folder is there; a path that no system accepts is not."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _matches(pattern: str, folder: Path) -> list[Path]:
    try:
        found = [Path(os.path.normpath(file)) for file in folder.glob(pattern) if file.is_file()]
    except (OSError, ValueError, NotImplementedError):  # not a pattern, e.g. `a**b`; a name that is too long
        return []
    return sorted(file for file in found if "__pycache__" not in file.parts)


class _Search:
    def __init__(self, python_path: tuple[Path, ...], manifest_dir: Path) -> None:
        self.python_path, self.manifest_dir = python_path, manifest_dir
        self.found = Sources()
        self.files: dict[str, Path] = {}

    def add_reference(self, reference: str, place: Place) -> None:
        module, attribute = reference.split(":")
        file = self._file_of(module)
        if file is None:
            top = module.partition(".")[0]
            if self._file_of(top) is not None or self._is_local_folder(top) or not _is_installed(top):
                where = ", ".join(str(folder) for folder in self.python_path)
                self.found.problems.append(Problem(place, f"no module `{module}` in {where} or installed"))
            else:
                self.found.imports.add(top)
            return
        self._add_module(module, place)
        names = _names(file)
        if names is not None and attribute.partition(".")[0] not in names:
            text = f"no `{attribute}` in module `{module}`{nearest(attribute, sorted(names))}"
            self.found.problems.append(Problem(place, text))

    def add_file(self, file: Path, place: Place) -> None:
        """Takes a file, and what it imports when it is Python."""
        name = self._relative(file)
        if self.files.get(name, file) != file:  # the same path below two folders
            name = self._outside(file)
        if name in self.files:
            return
        self.files[name] = file
        try:
            data = read_regular(file, LIMITS.file_bytes)
        except OSError as error:
            self.found.problems.append(Problem(place, f"{name}: cannot be read: {error.strerror or error}"))
            return
        self.found.digests[name] = source_digest(data, file.suffix == ".py")
        if file.suffix != ".py":
            return
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if place[0] != "sources":  # a file that only a pattern matches may be anything
                text = f"{name}, line {getattr(error, 'lineno', None) or 1}: not Python: {error}"
                self.found.problems.append(Problem(place, text))
            return
        for module in _imports(tree, _package(name)):
            self._add_module(module, place)

    def _add_module(self, module: str, place: Place) -> None:
        """Takes a local module with the packages around it; notes the top-level name of any other."""
        parts = module.split(".")
        files = [self._file_of(".".join(parts[: i + 1])) for i in range(len(parts))]
        for file in files:
            if file is not None:
                self.add_file(file, place)
        if not any(files) and not self._is_local_folder(parts[0]) and parts[0] not in sys.stdlib_module_names:
            self.found.imports.add(parts[0])

    def _file_of(self, module: str) -> Path | None:
        tail = module.replace(".", "/")
        for folder in self.python_path:
            for file in (folder / tail / "__init__.py", folder / f"{tail}.py"):
                if _is_file(file):
                    return file
        return None

    def _is_local_folder(self, top: str) -> bool:
        """Tells whether a name is a package without `__init__.py`."""
        folders = (folder / top for folder in self.python_path)
        return any(next(folder.glob("**/*.py"), None) is not None for folder in folders if is_folder(folder))

    def _relative(self, file: Path) -> str:
        for folder in self.python_path:
            if file.is_relative_to(folder):
                return file.relative_to(folder).as_posix()
        return self._outside(file)

    def _outside(self, file: Path) -> str:
        return Path(os.path.relpath(file, self.manifest_dir)).as_posix()


def _package(name: str) -> str:
    """Returns the package that a file's relative imports start from; empty: none."""
    parts = Path(name).parts[:-1]
    return "" if ".." in parts else ".".join(parts)


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _imports_from(node, package)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            module = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if called in ("import_module", "__import__") and isinstance(module, str) and module[:1] not in ("", "."):
                yield module


def _imports_from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    base = node.module or ""
    if node.level:
        parents = package.split(".")
        kept = parents[: len(parents) - node.level + 1]
        base = ".".join(part for part in (*kept, base) if part)
    if not base:  # a relative import beyond the top
        return
    yield base
    yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _names(file: Path) -> set[str] | None:
    """Returns the names that a module binds at its top level; None when it binds others that cannot be seen."""
    try:
        body = ast.parse(read_regular(file, LIMITS.file_bytes)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # `add_file` has said what is wrong with it
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif not isinstance(node, ast.Expr):
            return None
    return None if "*" in names or "__getattr__" in names else names


def _is_installed(top: str) -> bool:
    return top in sys.stdlib_module_names or top in importlib.metadata.packages_distributions()


def _version(name: str, module: str) -> str:
    distribution = importlib.metadata.distribution(name)
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    version = distribution.version
    if "vcs_info" in origin:
        version += f"+{origin['vcs_info'].get('commit_id', '')}"
    if origin.get("dir_info", {}).get("editable"):
        version += f"+{_package_digest(module)}"
    return version


def _package_digest(module: str) -> str:
    spec = importlib.util.find_spec(module)  # a top-level name: found, not imported
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [(file.relative_to(folder).as_posix(), file) for folder in folders for file in folder.rglob("*.py")]
    if not files and spec and spec.origin and spec.origin.endswith(".py"):
        files = [(module, Path(spec.origin))]
    return sha256(canonical_bytes({name: source_digest(file.read_bytes(), True) for name, file in files}))[:16]
