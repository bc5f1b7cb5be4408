"""Reads a manifest file: safe YAML with line marks, every problem at once as `file:line: field: message`.

YAML is read with the scalars of YAML 1.2's core schema (`yes` and `2030-01-01` are text, `1e-3` is a number), anchors
and merge keys. A file is at most 1 MiB and 100,000 values after aliases, so that an alias bomb ends early.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cachepipe.adapters.regular_file import read_regular
from cachepipe.domain.limits import MIB
from cachepipe.domain.manifest import Manifest
from cachepipe.domain.manifest_reader import read_manifest
from cachepipe.domain.manifest_rules import Place, Problem
from cachepipe.domain.record import Json
from cachepipe.errors import ManifestError

MAX_BYTES = MIB
MAX_VALUES = 100_000
MAX_DEPTH = 64

_MERGE = "tag:yaml.org,2002:merge"
_RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]{0,18})", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf))|\.(?:nan|NaN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without YAML 1.1's surprises."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass
class _Document:
    """The tree of a file, the line of every place in it, and what was wrong with its form."""

    loader: _Loader
    lines: dict[Place, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    values: int = 0

    def read(self, node: yaml.Node, place: Place = ()) -> Json:
        """Returns the plain value of a node.

        Raises:
            yaml.YAMLError: a tag that is not safe, or too many or too deep values.
        """
        self.values += 1
        if self.values > MAX_VALUES or len(place) > MAX_DEPTH:
            limit = f"more than {MAX_VALUES} values or nested deeper than {MAX_DEPTH}, aliases included"
            raise yaml.MarkedYAMLError(problem=limit, problem_mark=node.start_mark)
        self.lines.setdefault(place, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode) and node.tag.endswith(":seq"):
            return [self.read(item, (*place, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag.endswith(":map"):
            return self._mapping(node, place)
        return self._scalar(node)

    def _scalar(self, node: yaml.Node) -> Json:
        allowed = {"tag:yaml.org,2002:str"}
        if isinstance(node, yaml.ScalarNode):
            allowed.add(self.loader.resolve(yaml.ScalarNode, node.value, (True, False)))  # type: ignore[no-untyped-call]
        if node.tag not in allowed or not isinstance(node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem=f"unknown tag `{node.tag}`", problem_mark=node.start_mark)
        value = self.loader.construct_object(node)
        if not isinstance(value, str):
            return value
        try:  # JSON writes what lies beyond 16 bits as two escapes, of which PyYAML makes two halves
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError as error:
            raise yaml.MarkedYAMLError(
                problem="half of a character is not text", problem_mark=node.start_mark
            ) from error

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Json]:
        tree: dict[str, Json] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            key = self.read(key_node, (*place, "?", line))
            where = (*place, key if isinstance(key, str) else _written(key_node))
            if not isinstance(key, str):
                self._problem(where, line, "the name is not text (quote it)")
            elif key in tree:
                self._problem((*where, ""), line, f"given twice, first in line {self.lines[where]}")
            else:
                self.lines[where] = line
                tree[key] = self.read(value_node, where)
        for other in merged:
            found = self.read(other, (*place, "<<"))
            if not isinstance(found, dict):
                raise yaml.MarkedYAMLError(problem="`<<` wants a mapping", problem_mark=other.start_mark)
            tree = {**found, **tree}
        return tree

    def _problem(self, place: Place, line: int, message: str) -> None:
        self.lines[place] = line
        self.problems.append(Problem(place, message))


def load_manifest(path: Path) -> Manifest:
    """Returns the manifest in a YAML file.

    Raises:
        ManifestError: the file cannot be read, is not YAML, or has problems; all of them are listed.
    """
    document, tree = _read(path)
    found = read_manifest(tree)
    if isinstance(found, Manifest) and not document.problems:
        return found
    problems = [*document.problems, *(() if isinstance(found, Manifest) else found)]
    raise _error(path, document.lines, problems)


def manifest_error(path: Path, problems: Iterable[Problem]) -> ManifestError:
    """Returns the error for problems that were found later, with the lines of the file at `path`."""
    document, _ = _read(path)
    return _error(path, document.lines, problems)


def _read(path: Path) -> tuple[_Document, Json]:
    text = _text(path)
    try:
        loader = _Loader(text)
        document = _Document(loader)
        node = loader.get_single_node()
        tree = None if node is None else document.read(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        words = ", ".join(part for part in (error.context, error.problem) if part)
        raise ManifestError([f"{path}:{mark.line + 1 if mark else 1}: not usable YAML: {words}"]) from error
    except yaml.YAMLError as error:
        raise ManifestError([f"{path}:1: not YAML: {error}".splitlines()[0]]) from error
    except RecursionError as error:
        raise ManifestError([f"{path}:1: not usable YAML: nested too deep"]) from error
    if not isinstance(tree, dict):
        what = "the file is empty" if tree is None else "the file is not a mapping"
        raise ManifestError([f"{path}:1: {what}: a manifest begins with `version: 1`"])
    return document, tree


def _text(path: Path) -> str:
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise ManifestError([f"{path}:1: cannot be read: {error.strerror or error}"]) from error
    if len(data) > MAX_BYTES:
        raise ManifestError([f"{path}:1: longer than {MAX_BYTES} bytes"])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ManifestError([f"{path}:{line}: not UTF-8: byte 0x{data[error.start]:02x}"]) from error


def _error(path: Path, lines: dict[Place, int], problems: Iterable[Problem]) -> ManifestError:
    rows = sorted({(_line(lines, problem.place), _field(problem.place), problem.message) for problem in problems})
    return ManifestError([f"{path}:{line}: {name}: {message}" for line, name, message in rows])


def _line(lines: dict[Place, int], place: Place) -> int:
    while place not in lines and place:
        place = place[:-1]
    return lines.get(place, 1)


def _written(key: yaml.Node) -> str:
    """Returns a key as the file has it, as far as it is one word."""
    return str(key.value) if isinstance(key, yaml.ScalarNode) else "?"


def _field(place: Place) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if part else ""
    return text.removeprefix(".") or "manifest"
