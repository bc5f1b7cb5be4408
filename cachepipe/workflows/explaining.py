"""Answers "why was this not a hit" from files: evidence of `build` and `verify`, or a service's file of events.

1 read every file; a service's JSON lines give one piece of evidence per process
2 find what the builder had: an artifact's explain data, the builder's own evidence, or what `verify` already found
3 compare, and give one explanation per cause
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cachepipe.adapters.store import NO_CHOICE, TrustChoice, open_store
from cachepipe.adapters.workdir import EVIDENCE_BYTES
from cachepipe.domain.evidence import EntryEvidence, Explanation, Lookup, Work
from cachepipe.domain.explain import explain, explanation_lines
from cachepipe.domain.record import Json, from_json
from cachepipe.errors import IntegrityError, UsageError
from cachepipe.workflows.carry import read_explain
from cachepipe.workflows.fetch import resolve_ref
from cachepipe.workflows.report import read_all
from cachepipe.workflows.report_details import BUILT_STEP, built_data

SERVICE_STEP = "service"


@dataclass(frozen=True)
class Answer:
    """One process."""

    entry: str
    step: str
    hits: int
    lookups: int
    explanations: tuple[Explanation, ...]
    is_compared: bool
    """False: nothing of the builder was at hand, so that only torch's reasons are told."""

    def lines(self, has_names: bool = False) -> tuple[str, ...]:
        head = f"{self.entry} · {self.step}: {self.hits} hits of {self.lookups} lookups"
        note = ""
        if self.explanations and not self.is_compared:
            note = "; name the builder's evidence, or `--ref` and `--store`, for the components that differ"
        return (head + note, *explanation_lines(self.entry, self.explanations, has_names))


def explain_files(
    paths: Sequence[Path], store_url: str | None = None, ref: str | None = None, trust: TrustChoice = NO_CHOICE
) -> tuple[Answer, ...]:
    """Returns an answer for each process that was no builder's.

    Args:
        paths: evidence files, folders that hold some, or files of events (`CACHEPIPE_EVENTS`).
        store_url, ref: the artifact to compare with; None: the builder's evidence among the files.
        trust: under which the store is read.

    Raises:
        UsageError: a path that does not exist, or no evidence at all.
        IntegrityError: a named file that is neither.
        MissError, StoreError: the artifact cannot be read.
    """
    # 1
    evidences = [one for path in paths for one in (_events(path) if path.suffix == ".jsonl" else read_all(path))]
    if not evidences:
        raise UsageError(
            "no evidence files: " + ", ".join(map(str, paths)), hint="name the folder of `verify --report`"
        )
    # 2
    built = {one.entry: built_data(one) for one in evidences if one.step == BUILT_STEP}
    if store_url is not None and ref is not None:
        store = open_store(store_url, trust)
        built.update(read_explain(store, resolve_ref(store, ref)))
    # 3
    asked = [one for one in evidences if one.step in ("prove", "verify", SERVICE_STEP)]
    return tuple(_answer(one, built) for one in asked or evidences)


def _answer(evidence: EntryEvidence, built: Mapping[str, Json]) -> Answer:
    mine = _united(built) if evidence.step == SERVICE_STEP else built.get(evidence.entry)
    found = evidence.explanations or explain(evidence, mine or {})
    hits = sum(lookup.outcome == "hit" for lookup in evidence.lookups)
    is_compared = bool(mine) or bool(evidence.explanations)
    return Answer(evidence.entry, evidence.step, hits, len(evidence.lookups), found, is_compared)


def _united(built: Mapping[str, Json]) -> Json:
    """Returns the data of all entries as one: a service does not say which of its calls belongs to which entry."""
    whole: dict[str, Json] = {"components": {}, "settings": {}, "lookups": []}
    for part in built.values():
        whole["components"].update(part.get("components", {}))
        whole["settings"] = whole["settings"] or part.get("settings", {})
        whole["lookups"] += part.get("lookups", [])
    return whole if built else {}


def _events(path: Path) -> list[EntryEvidence]:
    """Returns the evidence in a service's file of events, one per process that became ready."""
    try:
        if path.stat().st_size > EVIDENCE_BYTES:
            raise IntegrityError(str(path), "too long", wanted=f"<= {EVIDENCE_BYTES} bytes", found=path.stat().st_size)
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"cannot be read: {path}: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise IntegrityError(f"{path}:{number}", f"no JSON line ({error})") from error
        if isinstance(row, dict) and row.get("event") == "evidence":
            found.append(_service_evidence(row, f"{path}:{number}"))
    return found


def _service_evidence(row: Mapping[str, Json], where: str) -> EntryEvidence:
    names = row.get("entries") or ["service"]
    settings, components = row.get("settings") or {}, row.get("components") or {}
    return EntryEvidence(
        entry=", ".join(map(str, names)),
        step=SERVICE_STEP,
        torch_version="",
        shape_buckets=(),
        lookups=tuple(from_json(Lookup, one, where) for one in row.get("lookups", [])),
        work=Work(),
        tuned_kernels=(),
        import_s=0.0,
        build_s=0.0,
        ready_s=0.0,
        settings={str(name): str(value) for name, value in settings.items()} if isinstance(settings, dict) else {},
        components=components if isinstance(components, dict) else {},
    )
