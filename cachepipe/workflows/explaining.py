"""Answers "why was this not a hit" from files: evidence of `build` and `verify`, or a service's file of events.

1 read every file; a service's JSON lines give one piece of evidence per process
2 find what the builder had for the same target: an artifact's explain data, its own evidence, or what `verify` already found
3 compare, and give one explanation per cause
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from cachepipe.adapters.given_file import is_folder, read_given
from cachepipe.adapters.store import NO_CHOICE, Store, TrustChoice, open_store
from cachepipe.domain.evidence import EntryEvidence, Explanation, Lookup, Work
from cachepipe.domain.evidence_reader import EVIDENCE_BYTES, OUTCOMES, check_components
from cachepipe.domain.explain import LATE, explain, explanation_lines
from cachepipe.domain.record import Json, from_json, parse_json
from cachepipe.domain.remedies import late_remedy
from cachepipe.errors import IntegrityError, UsageError
from cachepipe.workflows.carry import read_explain
from cachepipe.workflows.evidence_files import Say, read_files, silent
from cachepipe.workflows.fetch import nothing_published, read_artifact, resolve_rows
from cachepipe.workflows.report_details import BUILT_STEP, built_data

SERVICE_STEP = "service"
EVENTS_HINT = "name a service's file of events as it was written (CACHEPIPE_EVENTS), or evidence of `verify --report`"


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
    paths: Sequence[Path],
    store_url: str | None = None,
    ref: str | None = None,
    trust: TrustChoice = NO_CHOICE,
    say: Say = silent,
) -> tuple[Answer, ...]:
    """Returns an answer for each process that was no builder's.

    Args:
        paths: evidence files, folders that hold some, or files of events (`CACHEPIPE_EVENTS`).
        store_url, ref: the artifact to compare with; None: the builder's evidence among the files.
        trust: under which the store is read.
        say: gets a line for what is left out.

    Raises:
        UsageError: a path that cannot be read, two files for one process, no evidence at all, `ref` without a store, or a
            `ref` with several targets where the evidence does not say its own.
        IntegrityError: a named file that is neither.
        MissError, StoreError: the artifact cannot be read.
    """
    # 1
    if ref is not None and store_url is None:
        raise UsageError("`--ref` without a store", hint="name the store as well: `--store URL`, or CACHEPIPE_STORE")
    events = [path for path in dict.fromkeys(paths) if not is_folder(path) and path.suffix == ".jsonl"]
    evidences = [one for path in events for one in _events(path, say)]
    evidences += read_files([path for path in paths if path not in events], say).evidences
    if not evidences:
        raise UsageError(
            "no evidence files: " + ", ".join(map(str, paths)), hint="name the folder of `verify --report`"
        )
    # 2
    builders = [one for one in evidences if one.step == BUILT_STEP]
    asked = [one for one in evidences if one.step in ("prove", "verify", SERVICE_STEP)] or evidences
    targets: dict[str, Mapping[str, Json]] = {}
    if store_url is not None and ref is not None:
        targets = _targets(open_store(store_url, trust), ref, {one.device for one in asked})
    # 3
    return tuple(_answer(one, {**_local(one, builders), **_of_ref(one, targets, ref or "", say)}) for one in asked)


def _targets(store: Store, ref: str, devices: Set[str]) -> dict[str, Mapping[str, Json]]:
    """Returns device → explain data, of every target that a reference names; read are those of `devices`, which may hold ""."""
    rows = resolve_rows(store, ref)
    if not rows:
        raise nothing_published(store, ref)
    found = {row.device: row for row in rows}
    asked = [row for row in rows if row.device in devices or "" in devices]
    if len({row.device for row in asked}) < len(asked) or ("" in devices and len(found) > 1):
        names = ", ".join(f"{row.artifact} ({row.device})" for row in rows)
        raise UsageError(f"{ref} has several targets: {names}", hint="name the one that was called by its artifact id")
    return {
        row.device: read_explain(store, read_artifact(store, row)) if row in asked else {} for row in found.values()
    }


def _local(evidence: EntryEvidence, builders: Sequence[EntryEvidence]) -> dict[str, Json]:
    """Returns what the builder's evidence among the files says of the entries of one target."""
    mine = [one for one in builders if not evidence.device or one.device in ("", evidence.device)]
    return {_plain(one): built_data(one) for one in mine}


def _of_ref(
    evidence: EntryEvidence, targets: Mapping[str, Mapping[str, Json]], ref: str, say: Say
) -> Mapping[str, Json]:
    """Returns the explain data of the target on which a process ran."""
    if not targets or evidence.device in targets:
        return targets.get(evidence.device, {})
    if evidence.device:
        names = ", ".join(sorted(targets))
        say(f"not compared: {evidence.entry}: it ran on {evidence.device}, and {ref} is for {names}")
        return {}
    (alone,) = targets.values()
    return alone


def _plain(evidence: EntryEvidence) -> str:
    """Returns the entry's id, without the device that tells targets apart in one folder."""
    return evidence.entry.removesuffix(f" on {evidence.device}")


def _answer(evidence: EntryEvidence, built: Mapping[str, Json]) -> Answer:
    mine = _united(built) if evidence.step == SERVICE_STEP else built.get(_plain(evidence))
    late = evidence.explanations if evidence.step == SERVICE_STEP else ()
    found = (*explain(evidence, mine or {}), *late) if late else evidence.explanations or explain(evidence, mine or {})
    hits = sum(lookup.outcome == "hit" for lookup in evidence.lookups)
    is_compared = bool(mine) or (bool(evidence.explanations) and found == evidence.explanations)
    return Answer(evidence.entry, evidence.step, hits, len(evidence.lookups), found, is_compared)


def _united(built: Mapping[str, Json]) -> Json:
    """Returns the data of all entries as one: a service does not say which of its calls belongs to which entry."""
    whole: dict[str, Json] = {"components": {}, "settings": {}, "lookups": []}
    for part in built.values():
        whole["components"].update(part.get("components", {}))
        whole["settings"] = whole["settings"] or part.get("settings", {})
        whole["lookups"] += part.get("lookups", [])
    return whole if built else {}


def _events(path: Path, say: Say) -> list[EntryEvidence]:
    """Returns the evidence in a service's file of events, one per process that became ready.

    A service that is killed leaves half a line, and the next one begins behind it: such lines cost themselves alone.
    """
    lines = [line for line in read_given(path, EVIDENCE_BYTES).split(b"\n") if line.strip()]
    found, late, bad = [], [], []
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            row = parse_json(line, where, EVIDENCE_BYTES)
        except IntegrityError as error:
            bad.append(error)
            continue
        if isinstance(row, dict) and row.get("event") == "evidence":
            found.append((row, _service_evidence(row, where)))
        elif isinstance(row, dict) and row.get("event") == "late_compile" and row.get("graph"):
            late.append(row)
    if bad and len(bad) == len(lines):
        bad[0].hint = EVENTS_HINT
        raise bad[0]
    if bad:
        say(f"left out: {len(bad)} of {len(lines)} lines of {path}: cut or damaged, the first is {bad[0]}")
    return [
        replace(one, explanations=_late(_of_process(row, found, late), bool(row.get("entries")))) for row, one in found
    ]


def _of_process(
    row: Mapping[str, Json],
    found: Sequence[tuple[Mapping[str, Json], EntryEvidence]],
    late: Iterable[Mapping[str, Json]],
) -> list[Mapping[str, Json]]:
    """Returns the late compiles of a process, and of those that it forked once it was ready: they leave no evidence of their own."""

    def place(one: Mapping[str, Json]) -> tuple[str, str]:
        return str(one.get("start")), str(one.get("pid"))

    others = {place(other) for other, _ in found} - {place(row)}
    return [one for one in late if place(one)[0] == place(row)[0] and place(one) not in others]


def _late(rows: Iterable[Mapping[str, Json]], is_restored: bool) -> tuple[Explanation, ...]:
    """Returns one explanation per place, inputs and reason, with how often and how long."""
    kinds: dict[tuple[str, ...], list[Mapping[str, Json]]] = {}
    for row in rows:
        kinds.setdefault(tuple(str(row.get(name, "")) for name in ("place", "inputs", "reason", "outcome")), []).append(
            row
        )
    found = []
    for (place, inputs, reason, outcome), same in kinds.items():
        seconds = sum(row["seconds"] for row in same if isinstance(row.get("seconds"), (int, float)))
        what = f"{place or 'a backward graph'}{f' with {inputs}' if inputs else ''}: {reason or 'its first compile'}"
        times = f"{len(same)} times, " if len(same) > 1 else ""
        settings = str(same[0].get("settings") or "")
        fix = late_remedy(reason, (settings,) if settings else (), is_restored)
        graph = str(same[0].get("graph"))
        found.append(Explanation("", graph, LATE, f"{what} ({times}{outcome}, {seconds:.2f} s)", fix))
    return tuple(found)


@dataclass(frozen=True)
class _Evidence:
    """What `explain` reads of a service's event `evidence`, which holds more."""

    lookups: tuple[Lookup, ...] = ()
    settings: Mapping[str, Json] = field(default_factory=dict)
    components: Json = field(default_factory=dict)
    entries: tuple[str, ...] = ()
    device: str = ""


def _service_evidence(row: Mapping[str, Json], where: str) -> EntryEvidence:
    try:
        told = from_json(
            _Evidence, {name: row[name] for name in _Evidence.__dataclass_fields__ if row.get(name)}, where
        )
        check_components(told.components, where)
        if any(one.outcome not in OUTCOMES for one in told.lookups):
            raise IntegrityError(where, "a lookup with an unknown outcome", wanted=" or ".join(OUTCOMES))
    except IntegrityError as error:
        error.hint = EVENTS_HINT
        raise
    return EntryEvidence(
        entry=", ".join(told.entries or ("service",)),
        step=SERVICE_STEP,
        torch_version="",
        shape_buckets=(),
        lookups=told.lookups,
        work=Work(),
        tuned_kernels=(),
        import_s=0.0,
        build_s=0.0,
        ready_s=0.0,
        settings={name: str(value) for name, value in told.settings.items()},
        components=told.components,
        device=told.device,
    )
