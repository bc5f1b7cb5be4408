"""Reads evidence from bytes that anybody may have written: what has the right types must also make sense.

A JSON file of `--report DIR` is one process's evidence (domain/evidence.py), or what a command summed up:

    {"verify": {"release": "text-encoder", "artifact": "01J…", "violations": ["…"], …}}      or "build"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.limits import MIB
from cachepipe.domain.record import Json, from_json, parse_json, to_json
from cachepipe.errors import IntegrityError

EVIDENCE_BYTES = 256 * MIB
HINT = "make the evidence again (`build --report`, `verify --report`), or move this file out of the folder"
SUMMARIES = ("build", "verify")
STEPS = ("tune", "settle", "trim", "export", "fallback", "prove", "verify", "eager")
"""Last part of the name of an evidence file, before `.json`."""
OUTCOMES = ("hit", "miss", "bypass")
MOST = 1e9
"""Of seconds and milliseconds: thirty years, so that sums of them stay finite."""
_FREE = ("components", "sizes", "settings")
"""Fields whose content is text, whatever it looks like."""
_UNBOUNDED = ("max_abs_diff",)


class Told(NamedTuple):
    """What one file holds: one of the two, or neither, when it is JSON of somebody else."""

    evidence: EntryEvidence | None = None
    summary: Mapping[str, Json] | None = None
    """With `kind`: `build` or `verify`."""


def read_told(data: bytes, what: str, is_ours: bool) -> Told:
    """Returns what a file of a folder with evidence holds.

    Args:
        data: the whole file.
        what: its path, for messages.
        is_ours: its name says that it is evidence; then JSON of somebody else is refused, too.

    Raises:
        IntegrityError: not JSON, or evidence or a summary that is not whole.
    """
    try:
        tree = parse_json(data, what, EVIDENCE_BYTES)
        keys = set(tree) if isinstance(tree, dict) else set()
        if len(keys) == 1 and keys <= set(SUMMARIES):
            (kind,) = keys
            return Told(summary=_summary(tree[kind], kind, what))
        if is_ours or {"entry", "step"} <= keys:
            return Told(evidence=_evidence(tree, what))
        return Told()
    except IntegrityError as error:
        error.hint = HINT
        raise


def _evidence(tree: Json, what: str) -> EntryEvidence:
    evidence = from_json(EntryEvidence, tree, what)
    _check_numbers(to_json(evidence), what, "")  # of the record, where a time is a float however it was written
    for lookup in evidence.lookups:
        if lookup.outcome not in OUTCOMES:
            raise IntegrityError(
                f"{what}.lookups", "unknown outcome", wanted=" or ".join(OUTCOMES), found=lookup.outcome
            )
    for graph in evidence.graphs:
        if not isinstance(graph.sizes, dict) or not all(isinstance(size, list) for size in graph.sizes.values()):
            raise IntegrityError(f"{what}.graphs", "`sizes` is no object of lists")
    check_components(evidence.components, what)
    return evidence


def check_components(tree: Json, what: str) -> None:
    """Returns if a tree is layer/key → component → [hash, text].

    Raises:
        IntegrityError: it is not.
    """
    groups = tree.values() if isinstance(tree, dict) else (None,)
    rows = [row for group in groups for row in (group.values() if isinstance(group, dict) else (None,))]
    if not all(isinstance(row, list) and len(row) == 2 and all(isinstance(word, str) for word in row) for row in rows):
        raise IntegrityError(f"{what}.components", "not key → component → [hash, text]")


def _check_numbers(tree: Json, where: str, name: str) -> None:
    """Refuses counts below zero, which would take away from a sum, and times that no run has."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key not in _FREE:
                _check_numbers(value, f"{where}.{key[:64]}", key)
    elif isinstance(tree, list):
        for value in tree:
            _check_numbers(value, where, name)
    elif type(tree) is int and tree < 0:
        raise IntegrityError(where, "a count below zero", wanted=">= 0", found=tree)
    elif isinstance(tree, float) and abs(tree) > MOST and name not in _UNBOUNDED:
        raise IntegrityError(where, "not a time that was measured", wanted=f"<= {MOST:g}", found=tree)


def _summary(tree: Json, kind: str, what: str) -> Mapping[str, Json]:
    if not isinstance(tree, dict):
        raise IntegrityError(f"{what}.{kind}", "not an object", wanted="object", found=type(tree).__name__)
    for name in ("release", "artifact"):
        if not isinstance(tree.get(name, ""), str):
            raise IntegrityError(f"{what}.{kind}.{name}", "wrong type", wanted="str", found=type(tree[name]).__name__)
    violations = tree.get("violations", [])
    if not isinstance(violations, list) or not all(isinstance(text, str) for text in violations):
        raise IntegrityError(f"{what}.{kind}.violations", "not a list of texts")
    if kind == "verify" and "violations" not in tree:
        raise IntegrityError(f"{what}.verify", "field `violations` is missing")
    size = tree.get("packed_bytes", 0)
    if type(size) is not int or size < 0:
        raise IntegrityError(f"{what}.{kind}.packed_bytes", "not a size in bytes", found=size)
    return {**tree, "kind": kind}
