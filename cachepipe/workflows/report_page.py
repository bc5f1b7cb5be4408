"""A report as plain values for the HTML page: rounded, ordered and worded; the template only places them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cachepipe import __version__
from cachepipe.domain.evidence import LAYERS
from cachepipe.domain.job import PROOF_STEPS
from cachepipe.domain.phases import Phases
from cachepipe.domain.printable import brief
from cachepipe.domain.verdict import error_words, work_faults
from cachepipe.workflows.report import BucketRow, Report, StepRow, process_faults, process_work
from cachepipe.workflows.report_compare import Comparison, compare
from cachepipe.workflows.report_details import CompileRow, TunedRow

PHASES = ("trace", "lookup", "load", "tune", "compile", "capture", "run")
STEPS = ("eager", "tune", "settle", "trim", "export", "fallback", "prove", "verify")
MAX_ROWS = 500
"""Of each kind on the page; the JSON document has all."""
Page = dict[str, Any]


def report_page(found: Report, against: Report | None = None, against_title: str = "") -> Page:
    """Returns the page's values.

    Args:
        found: the report.
        against: another release to compare with.
        against_title: what it is called.
    """
    details = found.details
    is_one_entry = (
        len({row.entry for one in (found, against) if one for row in one.steps}) == 1
    )  # whose name need not stand in every row
    return {
        **_head(found),
        "has_entries": not is_one_entry,
        "phases": PHASES,
        "faults": _faults(found),
        "calls": [_call(row, found) for row in found.shape_buckets[:MAX_ROWS]],
        "misses": _misses(found),
        "no_miss": "Every lookup hit." if found.hit_rate == 1.0 else "Nothing was looked up in a restored process.",
        "hits": _hits(found),
        "layers": _layers(found),
        "processes": [_process(row, _layers(found)) for row in sorted(found.steps, key=_order)],
        "comparison": _comparison(compare(against, found), against_title) if against else None,
        **_sizes(found),
        "tuned": [_tuned(row) for row in details.tuned[:MAX_ROWS]],
        "compiles": [_compile(row) for row in details.compiles[:MAX_ROWS]],
        "work": [
            {
                "where": f"{row.entry} · {row.item.shape_bucket} · {row.step}{' · in a child process' if row.item.process else ''}",
                "what": f"{row.item.count} × {row.item.kind.replace('_', ' ')}: {row.item.what or 'not named by torch'}",
                "text": f"{row.entry} {row.item.kind} {row.item.what}",
            }
            for row in details.work[:MAX_ROWS]
        ],
        "graph_breaks": details.graph_breaks[:MAX_ROWS],
        "outside": [asdict(row.file) for row in details.outside[:MAX_ROWS]],
        "settings": [(entry, sorted(values.items())) for entry, values in details.settings.items()],
        "footer": f"made by cachepipe {__version__} from evidence files; this page is one file and loads nothing",
    }


def _head(found: Report) -> Page:
    names = sorted({str(one.get("release", "")) for one in found.summaries} - {""})
    entries = list(dict.fromkeys(row.entry for row in found.steps))
    artifacts = sorted({str(one.get("artifact", "")) for one in found.summaries} - {""})
    subtitle = [*artifacts, f"torch {found.details.torch_version}" if found.details.torch_version else ""]
    return {
        "title": ", ".join(names) or ", ".join(entries[:3]),
        "subtitle": " · ".join(
            part
            for part in [
                *subtitle,
                _count(len(entries), "entry", "entries"),
                _count(len(found.shape_buckets), "shape bucket", "shape buckets"),
            ]
            if part
        ),
        "is_ok": found.verdict.is_ok,
        "verdict": found.verdict.words,
        "facts": _facts(found),
    }


def _faults(found: Report) -> list[str]:
    """Returns what no row of a shape bucket and no miss shows: whole processes, and what gates refused."""
    entries = dict.fromkeys(row.entry for row in found.steps)
    whole = [fault for entry in ("", *entries) for fault in process_faults(found, entry) if not fault.is_lookup]
    return list(dict.fromkeys(brief(str(fault)) for fault in whole))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _facts(found: Report) -> list[Page]:
    cold, restored, eager = (_total(found, name) for name in ("cold_s", "restored_s", "eager_s"))
    facts = [
        ("first calls cold", _seconds(cold)),
        ("first calls restored", _seconds(restored)),
        ("first calls eager", _seconds(eager)),
        ("cold ÷ restored", f"{cold / restored:.1f} ×" if cold and restored else None),
        ("lookups that hit", None if found.hit_rate is None else f"{100 * found.hit_rate:.0f} %"),
        ("restored files", _bytes(sum(one.size_bytes for one in found.details.sizes.values()))),
    ]
    return [{"label": label, "value": value} for label, value in facts if value]


def _total(found: Report, name: str) -> float | None:
    values = [getattr(row, name) for row in found.shape_buckets]
    return sum(values) if values and all(value is not None for value in values) else None


def _seconds(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{1000 * value:.0f} ms" if value < 0.0995 else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _bytes(count: int) -> str | None:
    if not count:
        return None
    return f"{count / 1e6:.1f} MB" if count >= 1_000_000 else f"{count / 1e3:.0f} kB" if count >= 1000 else f"{count} B"


def _call(row: BucketRow, found: Report) -> Page:
    calls = (
        ("cold", row.cold_s, row.cold_phases),
        ("restored", row.restored_s, row.phases),
        ("eager", row.eager_s, row.eager_phases),
    )
    longest = max((seconds for _, seconds, _ in calls if seconds), default=0.0)
    zoom = max((seconds for name, seconds, _ in calls if seconds and name != "cold"), default=longest)
    bars = [
        (name, {"seconds": seconds, "parts": _parts(phases or Phases(run_s=seconds), longest, zoom)})
        for name, seconds, phases in calls
        if seconds is not None
    ]
    is_missed = bool(found.verdict.at(row.entry, row.shape_bucket))
    return {
        "entry": row.entry,
        "shape_bucket": row.shape_bucket,
        "speedup": f"{row.speedup:.1f} × faster than cold" if row.speedup else "",
        "problems": row.problems,
        "bars": bars,
        "miss": int(is_missed),
        "text": f"{row.entry} {row.shape_bucket} {' '.join(row.problems)}",
    }


def _parts(phases: Phases, longest: float, zoom: float) -> list[Page]:
    seconds = asdict(phases)
    return [
        {
            "name": name,
            "seconds": seconds[f"{name}_s"],
            "share": 100 * seconds[f"{name}_s"] / longest if longest else 0.0,
            "zoom": 100 * seconds[f"{name}_s"] / zoom if zoom else 0.0,
        }
        for name in PHASES
        if seconds[f"{name}_s"] > 0
    ]


def _misses(found: Report) -> list[Page]:
    """Returns causes where they are known, else torch's own words."""
    rows = []
    for row in found.details.explained[:MAX_ROWS]:
        one = row.explanation
        where = " · ".join(
            part for part in (row.entry, one.shape_bucket, one.layer, one.graph and f"graph {one.graph}") if part
        )
        names = ", ".join(one.components[:12])
        rows.append(
            {"where": where, "cause": one.cause, "fix": one.fix, "components": names, "text": f"{where} {one.cause}"}
        )
    if rows:
        return rows
    return [{"where": "", "cause": text, "fix": "", "components": "", "text": text} for text in found.misses[:MAX_ROWS]]


def _hits(found: Report) -> str:
    return "" if found.hit_rate is None else f"{100 * found.hit_rate:.1f} % of the restored processes' lookups hit"


def _layers(found: Report) -> list[str]:
    seen = {layer for row in found.steps for layer in row.layers}
    return [layer for layer in LAYERS if layer in seen]


def _place(layer: str) -> int:
    return LAYERS.index(layer) if layer in LAYERS else len(LAYERS)


def _order(row: StepRow) -> tuple[str, int]:
    return row.entry, STEPS.index(row.step) if row.step in STEPS else len(STEPS)


def _process(row: StepRow, layers: list[str]) -> Page:
    is_restored = row.step in PROOF_STEPS
    cells = []
    for layer in layers:
        counts = row.layers.get(layer)
        words = f"{counts['hit']}/{sum(counts.values())}" if counts else ""
        is_full = counts is not None and counts["hit"] == sum(counts.values())
        cells.append({"layer": layer, "words": words, "tone": ("good" if is_full else "bad") if is_restored else ""})
    return {
        "entry": row.entry,
        "step": row.step,
        "layers": cells,
        "work": " · ".join(filter(None, (process_work(row), brief(error_words(row.error))))),
        "build_s": row.build_s,
        "ready_s": row.ready_s or None,  # it stopped before
        "miss": int(bool(row.error) or (is_restored and (bool(work_faults(row.work)) or row.hit_rate != 1.0))),
        "text": f"{row.entry} {row.step} {row.error}",
    }


def _sizes(found: Report) -> Page:
    sizes = found.details.sizes
    largest = max((one.size_bytes for one in sizes.values()), default=0)
    rows = [
        {
            "kind": kind,
            "files": one.files,
            "size_bytes": one.size_bytes,
            "share": 100 * one.size_bytes / largest if largest else 0,
        }
        for kind, one in sorted(sizes.items(), key=lambda item: -item[1].size_bytes)
    ]
    tuned = sum(one.size_bytes for one in found.details.tuned_sizes.values())
    packed = next((int(one["packed_bytes"]) for one in found.summaries if one.get("packed_bytes")), 0)
    words = [f"{sum(one.files for one in sizes.values())} files"]
    words += [f"{_bytes(tuned)} after tuning"] if tuned else []
    words += [f"{_bytes(packed)} packed"] if packed else []
    return {"sizes": rows, "size_note": ", ".join(words)}


def _tuned(row: TunedRow) -> Page:
    kernel = row.kernel
    return {
        "entry": row.entry,
        "name": kernel.name,
        "chosen": kernel.chosen,
        "best": f"{kernel.best_ms:.4g} ms",
        "baseline": kernel.baseline,
        "baseline_ms": f"{kernel.baseline_ms:.4g} ms",
        "gain": f"{row.gain:.2f} ×",
        "tone": "good" if row.gain >= 1.05 else "",
        "candidates": kernel.candidates,
        "text": f"{row.entry} {kernel.name} {kernel.chosen}",
    }


def _compile(row: CompileRow) -> Page:
    one, phases = row.compiled, row.compiled.phases
    what, _, place = one.place.partition(" (")
    inputs = ", ".join(f"{name} {'×'.join(map(str, size))}" for name, size in one.sizes.items())
    reason = one.recompile_reason.partition(": ")[2] or one.recompile_reason
    return {
        "entry": row.entry,
        "graph": one.graph,
        "shape_bucket": one.shape_bucket,
        "what": f"{what} · {one.operators} operators" if one.operators else what,
        "place": place.removesuffix(")"),
        "inputs": inputs,
        "trace_s": phases.trace_s,
        "backend_s": phases.lookup_s + phases.load_s + phases.tune_s + phases.compile_s,
        "layers": [
            {"words": f"{layer} {outcome}", "tone": "good" if outcome == "hit" else "bad"}
            for layer, outcome in sorted(row.layers.items(), key=lambda item: _place(item[0]))
        ],
        "reason": brief(error_words(one.failure) or reason.partition("\n")[0]),
        "miss": int(any(outcome != "hit" for outcome in row.layers.values())),
        "text": f"{row.entry} {one.graph} {one.shape_bucket} {one.place} {reason}",
    }


def _comparison(found: Comparison, title: str) -> Page:
    tones: Mapping[str, str] = {"faster": "good", "slower": "bad", "gone": "warn", "new": "warn"}
    rates = [f"{100 * rate:.0f} %" if rate is not None else "–" for rate in (found.hit_rate_before, found.hit_rate_now)]
    return {
        "title": title or "the other release",
        "subtitle": f"hits {rates[0]} → {rates[1]}, restored {_bytes(found.size_before) or '–'} → {_bytes(found.size_now) or '–'}, "
        f"torch {found.torch_versions[0]} → {found.torch_versions[1]}",
        "rows": [
            {
                **asdict(row),
                "change": "–" if row.change is None else f"{100 * row.change:+.0f} %",
                "tone": tones.get(row.verdict, ""),
                "text": f"{row.entry} {row.shape_bucket} {row.verdict}",
            }
            for row in found.shape_buckets
        ],
        "new_misses": found.new_misses,
        "mended_misses": found.mended_misses,
    }
