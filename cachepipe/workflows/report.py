"""Shows evidence files: what `build --report` and `verify --report` left, as rows for every form of report.

1 read every evidence file that is named, and all in folders that are named, with the summaries beside them
2 put the steps of one entry beside each other, and judge them
3 give rows: per shape bucket, per step, per compile, per search, per miss with its cause
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cachepipe.domain.entry import bucket_label
from cachepipe.domain.evidence import BucketEvidence, EntryEvidence, Uncounted, Work, layer_counts, rate_of
from cachepipe.domain.job import PROOF_STEPS
from cachepipe.domain.phases import Phases
from cachepipe.domain.printable import brief
from cachepipe.domain.record import Json, to_json
from cachepipe.domain.verdict import Fault, Verdict, error_words, verdict_of
from cachepipe.errors import UsageError
from cachepipe.workflows.evidence_files import Say, read_files, silent
from cachepipe.workflows.report_details import Details, details_of

RESTORED_STEPS = ("verify", "prove")
"""Where the restored numbers are taken from: the first that is there."""
_BARS = (
    *(("trace_s", "t"), ("lookup_s", "l"), ("load_s", "o"), ("tune_s", "T"), ("compile_s", "C")),
    *(("capture_s", "g"), ("run_s", "r")),
)
BAR_LEGEND = "first call: t trace · l lookup · o load · T tune · C compile · g graph capture · r run"
BAR_CELLS = 24


@dataclass(frozen=True)
class BucketRow:
    """One shape bucket; seconds of first calls, None where a step is not among the files."""

    entry: str
    shape_bucket: str
    graphs: int
    cold_s: float | None
    restored_s: float | None
    eager_s: float | None
    speedup: float | None
    """cold ÷ restored; None where one of them found its graph ready because an earlier shape bucket shares it."""
    phases: Phases | None
    """Of the restored first call."""
    cold_phases: Phases | None
    eager_phases: Phases | None
    hits: Mapping[str, str]
    """Layer → `hits/lookups` in the restored process."""
    work: Work
    max_abs_diff: float | None
    problems: tuple[str, ...]
    """Why it is not warm, apart from lookups that did not hit."""
    uncounted: tuple[Uncounted, ...] = ()
    """In the process that `work` is of."""


@dataclass(frozen=True)
class StepRow:
    """One process."""

    entry: str
    step: str
    hit_rate: float | None
    """None: nothing was looked up."""
    layers: Mapping[str, Mapping[str, int]]
    work: Work
    import_s: float
    build_s: float
    ready_s: float
    error: str
    uncounted: tuple[Uncounted, ...] = ()


@dataclass(frozen=True)
class Report:
    shape_buckets: tuple[BucketRow, ...]
    steps: tuple[StepRow, ...]
    misses: tuple[str, ...]
    """Of restored processes, in words."""
    verdict: Verdict
    details: Details = field(default_factory=Details)
    summaries: tuple[Json, ...] = ()
    """What `build` and `verify` summed up, where their documents lie beside the evidence."""

    @property
    def hit_rate(self) -> float | None:
        """Returns hits ÷ lookups of the restored processes; None without any."""
        whole: dict[str, Counter[str]] = {}
        for row in self.steps:
            if row.step in PROOF_STEPS:
                for layer, counts in row.layers.items():
                    whole.setdefault(layer, Counter()).update(counts)
        return rate_of(whole)

    @property
    def violations(self) -> tuple[str, ...]:
        """Returns what the gates of a verification refused."""
        return tuple(text for summary in self.summaries for text in summary.get("violations", ()))


def report(paths: Sequence[Path], say: Say = silent) -> Report:
    """Returns what the evidence files say.

    Args:
        paths: evidence files, or folders that hold some.
        say: gets a line for each file of a folder that is left out.

    Raises:
        UsageError: a path that cannot be read, two files for one process, or no evidence at all.
        IntegrityError: a file that is no whole evidence.
    """
    # 1
    found = read_files(paths, say)
    if not found.evidences:
        raise UsageError("no evidence files: " + ", ".join(map(str, paths)), hint="name the folder of `build --report`")
    # 2
    entries: dict[str, dict[str, EntryEvidence]] = {}
    for evidence in found.evidences:
        entries.setdefault(evidence.entry, {})[evidence.step] = evidence
    verdict = verdict_of(entries, [text for summary in found.summaries for text in summary.get("violations", ())])
    # 3
    rows = tuple(row for entry, steps in entries.items() for row in _bucket_rows(entry, steps, verdict))
    steps = tuple(_step_row(evidence) for steps in entries.values() for evidence in steps.values())
    misses = tuple(dict.fromkeys(str(fault) for fault in verdict.faults if fault.is_lookup))
    return Report(rows, steps, misses, verdict, details_of(entries, RESTORED_STEPS), found.summaries)


def texts(faults: Sequence[Fault]) -> tuple[str, ...]:
    """Returns what faults say, apart from lookups that did not hit, each text once."""
    return tuple(dict.fromkeys(fault.text for fault in faults if not fault.is_lookup))


def process_faults(found: Report, entry: str) -> tuple[Fault, ...]:
    """Returns the faults of an entry that no row of a shape bucket shows."""
    shown = {row.shape_bucket for row in found.shape_buckets if row.entry == entry}
    return tuple(fault for fault in found.verdict.faults if fault.entry == entry and fault.shape_bucket not in shown)


def report_json(found: Report) -> Json:
    """Returns the document of `report --json`."""
    whole = to_json(found)
    verdict = {**whole["verdict"], "is_ok": found.verdict.is_ok, "words": found.verdict.words}
    return {**whole, "hit_rate": found.hit_rate, "violations": list(found.violations), "verdict": verdict}


def _bucket_rows(entry: str, steps: Mapping[str, EntryEvidence], verdict: Verdict) -> list[BucketRow]:
    restored_step = next((step for step in RESTORED_STEPS if step in steps), None)
    cold, eager = _by_label(steps.get("tune")), _by_label(steps.get("eager"))
    evidence = steps[restored_step] if restored_step else None
    restored = _by_label(evidence)
    rows = []
    for label in dict.fromkeys([*cold, *restored, *eager]):
        shown = restored.get(label) or cold.get(label) or eager[label]
        process = evidence if label in restored else steps.get("tune" if label in cold else "eager")
        rows.append(
            BucketRow(
                entry=entry,
                shape_bucket=label,
                graphs=shown.graphs,
                cold_s=_first(cold.get(label)),
                restored_s=_first(restored.get(label)),
                eager_s=_first(eager.get(label)),
                speedup=_speedup(cold.get(label), restored.get(label)),
                phases=_phases(restored.get(label)),
                cold_phases=_phases(cold.get(label)),
                eager_phases=_phases(eager.get(label)),
                hits=_hits(evidence, label),
                work=shown.work,
                max_abs_diff=shown.max_abs_diff,
                problems=texts(verdict.at(entry, label)),
                uncounted=process.uncounted if process else (),
            )
        )
    return rows


def _by_label(evidence: EntryEvidence | None) -> dict[str, BucketEvidence]:
    if evidence is None:
        return {}
    found = {bucket_label(bucket.shape_bucket): bucket for bucket in evidence.shape_buckets}
    # A proof calls in the opposite order; a reader wants the manifest's.
    return dict(reversed(found.items())) if evidence.step in RESTORED_STEPS else found


def _first(bucket: BucketEvidence | None) -> float | None:
    return None if bucket is None else bucket.first_call_s


def _phases(bucket: BucketEvidence | None) -> Phases | None:
    return None if bucket is None else bucket.phases


def _speedup(cold: BucketEvidence | None, restored: BucketEvidence | None) -> float | None:
    if cold is None or restored is None or not (cold.graphs and restored.graphs and restored.first_call_s):
        return None
    ratio = cold.first_call_s / restored.first_call_s
    return round(ratio, 2) if math.isfinite(ratio) else None


def _hits(evidence: EntryEvidence | None, label: str) -> dict[str, str]:
    totals: dict[str, list[int]] = {}
    for lookup in evidence.lookups if evidence else ():
        if lookup.shape_bucket == label:
            row = totals.setdefault(lookup.layer, [0, 0])
            row[0] += lookup.outcome == "hit"
            row[1] += 1
    return {layer: f"{hits}/{count}" for layer, (hits, count) in totals.items()}


def _step_row(evidence: EntryEvidence) -> StepRow:
    return StepRow(
        entry=evidence.entry,
        step=evidence.step,
        hit_rate=None if (rate := rate_of(layer_counts(evidence))) is None else round(rate, 4),
        layers=layer_counts(evidence),
        work=evidence.work,
        import_s=evidence.import_s,
        build_s=evidence.build_s,
        ready_s=evidence.ready_s,
        error=evidence.error,
        uncounted=evidence.uncounted,
    )


def work_text(work: Work, uncounted: Sequence[Uncounted] = ()) -> str:
    """Returns the work that was done, e.g. `3 benchmarks, 1 native builds`; `none` for a perfect start, where all was counted.

    >>> work_text(Work(benchmarks=3), [Uncounted("triton_compiles", "triton.knobs.compilation.listener")])
    '3 benchmarks; not counted: triton compiles'
    """
    words = [f"{count} {name.replace('_', ' ')}" for name, count in asdict(work).items() if count]
    kinds = dict.fromkeys(one.kind.replace("_", " ") for one in uncounted)
    known = ", ".join(words) or ("none seen" if kinds else "none")
    return f"{known}; not counted: {', '.join(kinds)}" if kinds else known


def process_work(row: StepRow) -> str:
    """Returns `work_text` of one process; an eager one compiles nothing, and nothing is counted in it."""
    return "–" if row.step == "eager" else work_text(row.work, row.uncounted)


def hits_text(hits: Mapping[str, str]) -> str:
    """Returns `aotautograd 1/1 · fxgraph 1/1`."""
    return " · ".join(f"{layer} {count}" for layer, count in sorted(hits.items())) or "–"


def phase_bar(phases: Phases, longest_s: float, cells: int = BAR_CELLS) -> str:
    """Returns a first call as a bar, one letter per phase, as long as its share of the longest call.

    >>> phase_bar(Phases(trace_s=1.0, lookup_s=0.5, load_s=0.5), 2.0, 8)
    'ttttlloo'
    """
    parts = asdict(phases)
    if longest_s <= 0:
        return ""
    edge, bar = 0.0, ""
    for phase, letter in _BARS:
        edge += parts[phase]
        # bounded before it becomes text: phases of evidence may be longer than every call
        bar += letter * (round(min(edge / longest_s, 1.0) * cells) - len(bar))
    return bar


BUCKET_COLUMNS = (
    "entry",
    "shape bucket",
    ">graphs",
    ">cold s",
    ">restored s",
    ">eager s",
    ">×",
    "hits",
    "work",
    "first call",
)


def bucket_cells(found: Report) -> list[tuple[object, ...]]:
    """Returns the cells of the table with `BUCKET_COLUMNS`, one row per shape bucket."""
    longest_s = max((row.restored_s or 0.0 for row in found.shape_buckets), default=0.0)
    return [
        (
            row.entry,
            row.shape_bucket,
            row.graphs,
            row.cold_s,
            row.restored_s,
            row.eager_s,
            None if row.speedup is None else f"{row.speedup:.1f}",
            hits_text(row.hits),
            work_text(row.work, row.uncounted),
            phase_bar(row.phases, longest_s) if row.phases else None,
        )
        for row in found.shape_buckets
    ]


STEP_COLUMNS = ("entry", "step", ">hit rate", ">import s", ">model s", ">ready s", "work", "error")


def step_cells(found: Report) -> list[tuple[object, ...]]:
    """Returns the cells of the table with `STEP_COLUMNS`, one row per process."""
    return [
        (
            row.entry,
            row.step,
            row.hit_rate,
            row.import_s,
            row.build_s,
            row.ready_s,
            process_work(row),
            brief(error_words(row.error)),
        )
        for row in found.steps
    ]
