"""Makes the table and the record of `ci/gpu --merge` from the lines of one or several runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_journal

WORK = ("benchmarks", "tuning_runs", "triton_compiles", "native_builds")
COMPILERS = ("compiler_runs", "ptxas_runs")
"""Processes, which `verify` counts while no compiler is on PATH."""
PHASES = ("trace_s", "lookup_s", "load_s", "compile_s", "run_s")
Line = Mapping[str, Any]


MOST = 1e15
"""Seconds, bytes, ratios: what is larger was not measured."""


def measured(value: Any) -> float:
    """Returns a number that can have been measured; raises ValueError: it is none, and no verdict may rest on it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MOST:
        return float(value)
    raise ValueError(f"{str(value)[:40]!r} was not measured")


def counted(value: Any) -> int:
    """Returns a count; raises ValueError: it is none."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST:
        return value
    raise ValueError(f"{str(value)[:40]!r} was not counted")


class Target(NamedTuple):
    what: str
    wanted: str
    found: str
    is_met: bool


def read_lines(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the lines of several runs, the last one of each key, without failed ones that were made again."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for line in gpu_journal.read(path):
            if "error" not in line or line["key"] not in found:
                found[line["key"]] = line
    return list(found.values())


class Entry:
    """What the lines say of one entry."""

    def __init__(self, name: str, lines: Sequence[Line], eager_of: str) -> None:
        self.name, self.eager_of = name, eager_of
        self.lines = [line for line in lines if line["entry"] == name and "error" not in line]
        shared = [line for line in lines if line["entry"] == eager_of and "error" not in line]
        self.eager_lines = self.lines if not eager_of else shared
        self.build: Line = next((line for line in self.lines if line["variant"] == "build"), {})

    def runs(self, variant: str) -> list[Line]:
        lines = self.eager_lines if variant in ("eager", "trace") else self.lines
        return [line for line in lines if line["variant"] == variant]

    def seconds(self, variant: str, field: str = "first_calls_s") -> float | None:
        """Returns the median over processes; None: not measured."""
        values = [measured(run[field]) for run in self.runs(variant)]
        return statistics.median(values) if values else None

    def tuned(self) -> list[float]:
        """Returns the first calls of the build's tune step, a cold start with one ptxas for all of torch's processes."""
        return [measured(row["cold_s"]) for row in self.build.get("facts", [])]

    def tuned_s(self) -> float | None:
        """Returns their sum; None: not measured."""
        return sum(self.tuned()) or None

    def first_bucket(self, variant: str) -> float | None:
        """Returns the median of the first shape bucket's first call alone: nothing ran in the process before it."""
        values = [measured(run["calls_s"][0]) for run in self.runs(variant)]
        return statistics.median(values) if values else None

    def work(self) -> dict[str, int]:
        """Returns the most work that any restored process did."""
        rows = [run["work"] for run in self.runs("restored")]
        rows += [row["work"] for run in self.runs("verify") for row in run["shape_buckets"]]
        return {name: max((counted(row[name]) for row in rows), default=0) for name in WORK}

    def compilers(self) -> dict[str, int | None]:
        """Returns the most processes of a compiler that any verified start had; None: not verified."""
        rows = [row["work"] for run in self.runs("verify") for row in run["shape_buckets"]]
        return {name: max((counted(row[name]) for row in rows), default=None) for name in COMPILERS}

    def phases(self) -> dict[str, float] | None:
        """Returns where the restored first calls' time goes, as `verify` recorded it; seconds over all shape buckets."""
        parts = [row["phases"]["restored"] for run in self.runs("verify") for row in run["shape_buckets"]]
        return {name: sum(measured(part[name]) for part in parts) for name in PHASES} if parts else None

    def latency(self) -> list[Line]:
        rows: list[Line] = self.build.get("tuning", {}).get("latency", [])
        return [{**row, "ratio": measured(row["ratio"])} for row in rows]

    def sizes(self) -> dict[str, float]:
        """Returns bytes of the tuned folder, the bundle, what is packed."""
        return {name: measured(size) for name, size in self.build.get("bytes", {}).items()}


COLUMNS: Sequence[tuple[str, Callable[[Entry], str]]] = (
    ("entry", lambda e: e.name),
    ("torch's own, cold s", lambda e: number(e.seconds("cold"))),
    ("cold s", lambda e: number(e.tuned_s())),
    ("torch's own, moved s", lambda e: number(e.seconds("warm"))),
    ("bundle s", lambda e: number(e.seconds("bundle"))),
    ("**restored s**", lambda e: number(e.seconds("restored"))),
    ("cold ÷ restored", lambda e: times(e.tuned_s(), e.seconds("restored"))),
    ("moved ÷", lambda e: times(e.seconds("warm"), e.seconds("restored"))),
    ("bundle ÷", lambda e: times(e.seconds("bundle"), e.seconds("restored"))),
    ("floor s", lambda e: number(e.seconds("trace"))),
    (
        "ready restored / eager s",
        lambda e: f"{number(e.seconds('restored', 'ready_s'))} / {number(e.seconds('eager', 'ready_s'))}",
    ),
    ("work", lambda e: " ".join(str(value) for value in e.work().values())),
    ("tuned / bundle / packed", lambda e: sizes(e.sizes())),
    ("later calls ÷ tuned", lambda e: latency_text(e.latency())),
)


def table(entries: Sequence[Entry]) -> str:
    """Returns the markdown table; what was not measured is `–`."""
    rows = [[name for name, _ in COLUMNS], ["---", *["---:"] * (len(COLUMNS) - 1)]]
    rows += [[cell(entry) for _, cell in COLUMNS] for entry in entries]
    legend = (
        "floor: Dynamo's trace with a backend that does nothing, and the eager calls; work: the most that a restored process did of "
        + ", ".join(name.replace("_", " ") for name in WORK)
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{legend}\n"


def profile(entries: Sequence[Entry]) -> str:
    """Returns the phases of the restored first calls, per entry; seconds."""
    heads = ["entry", *(name.removesuffix("_s") for name in PHASES)]
    rows = [heads, ["---", *["---:"] * len(PHASES)]]
    for entry in entries:
        phases = entry.phases() or {}
        rows.append([entry.name, *(number(phases.get(name)) for name in PHASES)])
    legend = (
        "lookup: keys, reads, unpickling, and the import of torch's compile stack, which an eager process does not need"
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{legend}\n"


def targets(main: Entry, entries: Sequence[Entry]) -> list[Target]:
    """Returns the targets of the release with their verdicts; one that cannot be judged is missed."""
    first = {variant: main.first_bucket(variant) for variant in ("cold", "warm", "bundle", "restored")}
    tuned = next(iter(main.tuned()), None)
    size = main.sizes()
    packed = size.get("packed")
    found = [
        at_least(
            f"{main.name}, first shape bucket: torch's cold ÷ restored", ratio(first["cold"], first["restored"]), 10.0
        ),
        at_least("the build's cold ÷ restored", ratio(tuned, first["restored"]), 10.0),
        at_least("moved folder ÷ restored", ratio(first["warm"], first["restored"]), 2.5),
        at_least("bundle ÷ restored", ratio(first["bundle"], first["restored"]), 2.5),
        at_least("tuned bytes ÷ packed", ratio(size.get("tuned"), packed), 50.0),
        at_least("bundle bytes ÷ packed", ratio(size.get("bundle"), packed), 5.0),
    ]
    for name in WORK:
        most = max((entry.work()[name] for entry in entries), default=None) if has_restored(entries) else None
        found.append(at_most(f"all entries, restored: {name.replace('_', ' ')}", most, 0))
    for name in COMPILERS:
        counts = [entry.compilers()[name] for entry in entries]
        most = None if None in counts else max(count for count in counts if count is not None)
        found.append(at_most(f"all entries, verified: {name.replace('_', ' ')}", most, 0))
    sums = {variant: total(entries, variant) for variant in ("restored", "trace")}
    found.append(at_most("Σ restored ÷ Σ (trace + eager)", ratio(sums["restored"], sums["trace"]), 1.25))
    ready = {variant: total(entries, variant, "ready_s") for variant in ("restored", "eager")}
    found.append(at_most("service ready, restored ÷ eager", ratio(ready["restored"], ready["eager"]), 1.10))
    slowest = max((row["ratio"] for entry in entries for row in entry.latency()), default=None)
    found.append(at_most("latency, restored ÷ tuned, worst shape bucket", slowest, 1.02))
    return found


def has_restored(entries: Sequence[Entry]) -> bool:
    return all(entry.runs("restored") for entry in entries)


def total(entries: Sequence[Entry], variant: str, field: str = "first_calls_s") -> float | None:
    values = [entry.seconds(variant, field) for entry in entries]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def at_least(what: str, found: float | None, limit: float) -> Target:
    return Target(what, f">= {limit:g}", shown(found), found is not None and found >= limit)


def at_most(what: str, found: float | None, limit: float) -> Target:
    return Target(what, f"<= {limit:g}", shown(found), found is not None and found <= limit)


def shown(found: float | None) -> str:
    return "not measured" if found is None else f"{found:.3g}"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def times(one: float | None, other: float | None) -> str:
    value = ratio(one, other)
    return "–" if value is None else f"{value:.1f} ×"


def sizes(found: Mapping[str, float]) -> str:
    return " / ".join(f"{found[name] / 1e6:.2f}" for name in ("tuned", "bundle", "packed")) + " MB" if found else "–"


def latency_text(rows: Sequence[Line]) -> str:
    return ", ".join(f"{row['ratio']:.3f}" for row in rows) or "–"


def target_text(rows: Sequence[Target]) -> str:
    lines = ["| target | wanted | found | |", "| --- | --- | ---: | --- |"]
    lines += [f"| {row.what} | {row.wanted} | {row.found} | {'met' if row.is_met else '**missed**'} |" for row in rows]
    return "\n".join(lines) + "\n"


def codes(lines: Sequence[Line]) -> list[str]:
    """Returns which states of the package were measured, by the digests that the lines name."""
    return sorted({line.get("sources", "not named") for line in lines if "error" not in line})


def record(entries: Sequence[Entry], rows: Sequence[Target], lines: Sequence[Line]) -> dict[str, Any]:
    """Returns the whole record: machine, targets, medians and every line."""
    machines = {
        json.dumps({name: line[name] for name in ("device", "driver", "versions")}, sort_keys=True)
        for line in lines
        if "error" not in line
    }
    variants = ("cold", "warm", "bundle", "restored", "eager", "trace")
    return {
        "machines": [json.loads(text) for text in sorted(machines)],
        "sources": {entry.name: codes([line for line in lines if line["entry"] == entry.name]) for entry in entries},
        "dates": sorted({line["date"][:10] for line in lines}),
        "targets": [row._asdict() for row in rows],
        "phases_s": {entry.name: entry.phases() for entry in entries},
        "medians_s": {entry.name: {variant: entry.seconds(variant) for variant in variants} for entry in entries},
        "lines": list(lines),
    }
