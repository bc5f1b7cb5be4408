"""The rows of a report below its tables of calls: compiles, searches, causes of misses, sizes, files outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cachepipe.domain.evidence import (
    EntryEvidence,
    Explanation,
    GraphEvidence,
    KindSize,
    OutsideFile,
    TunedKernel,
    WorkItem,
)
from cachepipe.domain.explain import explain
from cachepipe.domain.gates import break_in_words
from cachepipe.domain.record import Json, to_json

BUILT_STEP = "trim"
"""Recorded with components, from the tree that is packed."""


@dataclass(frozen=True)
class CompileRow:
    entry: str
    step: str
    compiled: GraphEvidence
    layers: Mapping[str, str]
    """Layer → outcome of this compile's lookup."""


@dataclass(frozen=True)
class TunedRow:
    entry: str
    kernel: TunedKernel
    gain: float
    """Baseline ÷ best."""


@dataclass(frozen=True)
class WorkRow:
    entry: str
    step: str
    item: WorkItem


@dataclass(frozen=True)
class ExplainedRow:
    entry: str
    step: str
    explanation: Explanation


@dataclass(frozen=True)
class OutsideRow:
    entry: str
    file: OutsideFile


@dataclass(frozen=True)
class Details:
    compiles: tuple[CompileRow, ...] = ()
    """Of the restored process of each entry, else of its tune step."""
    tuned: tuple[TunedRow, ...] = ()
    """Searches of the tune step, largest gain first."""
    work: tuple[WorkRow, ...] = ()
    """What a restored process did although it should not."""
    explained: tuple[ExplainedRow, ...] = ()
    outside: tuple[OutsideRow, ...] = ()
    graph_breaks: tuple[str, ...] = ()
    sizes: Mapping[str, KindSize] = field(default_factory=dict)
    """Kind of file → what is restored; of a release, whose entries share one folder."""
    tuned_sizes: Mapping[str, KindSize] = field(default_factory=dict)
    """The same after the tune steps, added up over the entries."""
    torch_version: str = ""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Entry → ambient torch settings inside its calls."""


def details_of(entries: Mapping[str, Mapping[str, EntryEvidence]], restored_steps: Sequence[str]) -> Details:
    """Returns the rows of all entries.

    Args:
        entries: entry → step → evidence.
        restored_steps: where restored facts are taken from, the first that is there.
    """
    shown = {entry: _first(steps, (*restored_steps, "tune")) for entry, steps in entries.items()}
    restored = {entry: _first(steps, restored_steps) for entry, steps in entries.items()}
    tunes = [steps["tune"] for steps in entries.values() if "tune" in steps]
    return Details(
        compiles=tuple(row for evidence in shown.values() if evidence for row in _compiles(evidence)),
        tuned=tuple(_tuned(tunes)),
        work=tuple(
            WorkRow(entry, one.step, item)
            for entry, one in restored.items()
            if one
            for item in one.work_items
            if item.kind in ("benchmarks", "tuning_runs", "triton_compiles", "native_builds")
        ),
        explained=tuple(_explained(entries, restored)),
        outside=tuple(OutsideRow(entry, file) for entry, one in shown.items() if one for file in one.outside_files),
        graph_breaks=tuple(
            f"{entry}: {text}"
            for entry, one in shown.items()
            if one
            for text in dict.fromkeys(map(break_in_words, one.graph_breaks))
        ),
        sizes=_largest([evidence.file_sizes for evidence in restored.values() if evidence]),
        tuned_sizes=_sum([evidence.file_sizes for evidence in tunes]),
        torch_version=next((one.torch_version for one in shown.values() if one), ""),
        settings={entry: one.settings for entry, one in shown.items() if one},
    )


def built_data(evidence: EntryEvidence) -> Json:
    """Returns a builder's evidence in the form of an artifact's explain data."""
    return {
        "components": evidence.components,
        "settings": dict(evidence.settings),
        "lookups": to_json(evidence.lookups),
    }


def _first(steps: Mapping[str, EntryEvidence], names: Sequence[str]) -> EntryEvidence | None:
    return next((steps[name] for name in names if name in steps), None)


def _compiles(evidence: EntryEvidence) -> list[CompileRow]:
    rows = []
    for graph in evidence.graphs:
        mine = [one for one in evidence.lookups if one.graph == graph.graph and one.shape_bucket == graph.shape_bucket]
        layers: dict[str, str] = {}
        for one in mine:
            # several lookups of one layer count as the worst of them
            layers[one.layer] = one.outcome if layers.get(one.layer, "hit") == "hit" else layers[one.layer]
        rows.append(CompileRow(evidence.entry, evidence.step, graph, layers))
    return rows


def _tuned(tunes: Sequence[EntryEvidence]) -> list[TunedRow]:
    rows = [TunedRow(one.entry, kernel, round(kernel.gain, 3)) for one in tunes for kernel in one.tuned]
    return sorted(rows, key=lambda row: row.gain, reverse=True)


def _explained(
    entries: Mapping[str, Mapping[str, EntryEvidence]], restored: Mapping[str, EntryEvidence | None]
) -> list[ExplainedRow]:
    """Returns causes: those that `verify` wrote, else a comparison with the builder's evidence, if that is among the files."""
    rows = []
    for entry, evidence in restored.items():
        if evidence is None:
            continue
        found = evidence.explanations
        if not found and BUILT_STEP in entries[entry]:
            found = explain(evidence, built_data(entries[entry][BUILT_STEP]))
        rows += [ExplainedRow(entry, evidence.step, one) for one in found]
    return rows


def _largest(sizes: Sequence[Mapping[str, KindSize]]) -> Mapping[str, KindSize]:
    return max(sizes, key=lambda kinds: sum(size.size_bytes for size in kinds.values()), default={})


def _sum(sizes: Sequence[Mapping[str, KindSize]]) -> Mapping[str, KindSize]:
    total: dict[str, KindSize] = {}
    for kinds in sizes:
        for kind, size in kinds.items():
            known = total.get(kind, KindSize(0, 0))
            total[kind] = KindSize(known.files + size.files, known.size_bytes + size.size_bytes)
    return total
