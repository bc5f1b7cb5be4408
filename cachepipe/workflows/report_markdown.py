"""A report as GitHub-flavoured Markdown, for a job's step summary: verdict first, then tables, details folded."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from cachepipe.domain.job import PROOF_STEPS
from cachepipe.domain.phases import Phases
from cachepipe.domain.printable import brief, one_line
from cachepipe.domain.verdict import error_words
from cachepipe.workflows.report import Report, hits_text, process_work, work_text
from cachepipe.workflows.report_compare import compare
from cachepipe.workflows.report_page import report_page

MAX_ROWS = 100
"""Of a table: a step summary may have 1 MiB."""
_SPECIAL = re.compile(r"([\\`*_\[\]|~#$!])")


def report_markdown(found: Report, against: Report | None = None) -> str:
    """Returns the text; everything that comes from evidence is escaped, also against HTML."""
    page = report_page(found)
    lines = [
        f"## {'✅' if page['is_ok'] else '❌'} {_text(page['title'])}: {page['verdict']}",
        "",
        _text(page["subtitle"]),
        "",
    ]
    lines += [" · ".join(f"**{fact['value']}** {fact['label']}" for fact in page["facts"]), ""]
    lines += [f"- ❌ {_text(text)}" for text in page["faults"][:MAX_ROWS]] + [""]
    lines += _calls(found)
    lines += _misses(page["misses"])
    if against is not None:
        lines += _comparison(found, against)
    lines += _folded("Processes", _processes(found))
    lines += _folded("Tuned kernels", _tuned(found))
    lines += [f"- {_text(text)}" for text in found.details.graph_breaks[:MAX_ROWS]]
    lines += [
        f"- not covered: {_text(f'{row.file.path} ({row.file.owner})')}" for row in found.details.outside[:MAX_ROWS]
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _text(value: object) -> str:
    """Returns a value in one line that Markdown and HTML show as it is."""
    return _SPECIAL.sub(r"\\\1", html.escape(one_line(str(value)), quote=False))


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    shown = list(rows)
    if not shown:
        return []
    ruler = ["---:" if column.startswith(">") else "---" for column in columns]
    lines = [f"| {' | '.join(column.lstrip('>') for column in columns)} |", f"| {' | '.join(ruler)} |"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in shown[:MAX_ROWS]]
    return [*lines, *([f"\n… and {len(shown) - MAX_ROWS} more"] if len(shown) > MAX_ROWS else []), ""]


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else _text(value)


def _folded(title: str, lines: list[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "</details>", ""] if lines else []


def _calls(found: Report) -> list[str]:
    columns = (
        "entry",
        "shape bucket",
        ">cold s",
        ">restored s",
        ">eager s",
        ">cold ÷ restored",
        "restored by phase",
        "hits",
        "work",
    )
    return _table(
        columns,
        (
            (
                row.entry,
                row.shape_bucket,
                row.cold_s,
                row.restored_s,
                row.eager_s,
                f"{row.speedup:.1f} ×" if row.speedup else None,
                _phases(row.phases),
                hits_text(row.hits),
                "; ".join([work_text(row.work, row.uncounted), *row.problems]),
            )
            for row in found.shape_buckets
        ),
    )


def _phases(phases: Phases | None) -> str:
    if phases is None:
        return "–"
    parts = [(name.removesuffix("_s"), getattr(phases, name)) for name in phases.__dataclass_fields__]
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts if seconds >= 0.005) or "–"


def _misses(misses: Sequence[dict[str, str]]) -> list[str]:
    if not misses:
        return []
    lines = ["### Misses", ""]
    for miss in misses[:MAX_ROWS]:
        where = f"{_text(miss['where'])}: " if miss["where"] else ""
        lines.append(f"- {where}**{_text(miss['cause'])}**" + (f"  \n  → {_text(miss['fix'])}" if miss["fix"] else ""))
    return [*lines, ""]


def _comparison(found: Report, against: Report) -> list[str]:
    other = compare(against, found)
    rows = (
        (
            row.entry,
            row.shape_bucket,
            row.before_s,
            row.now_s,
            None if row.change is None else f"{100 * row.change:+.0f} %",
            row.verdict,
        )
        for row in other.shape_buckets
    )
    lines = ["### Compared", "", *_table(("entry", "shape bucket", ">before s", ">now s", ">change", ""), rows)]
    return [*lines, *(f"- ❌ misses now: {_text(text)}" for text in other.new_misses), ""]


def _processes(found: Report) -> list[str]:
    columns = ("entry", "step", ">hit rate", ">ready s", "work", "error")
    rows = (
        (
            row.entry,
            row.step,
            row.hit_rate if row.step in PROOF_STEPS else None,
            row.ready_s,
            process_work(row),
            brief(error_words(row.error)),
        )
        for row in found.steps
    )
    return _table(columns, rows)


def _tuned(found: Report) -> list[str]:
    columns = ("kernel", "chosen", ">best ms", "compared with", ">gain", ">tried")
    return _table(
        columns,
        (
            (
                row.kernel.name,
                row.kernel.chosen,
                f"{row.kernel.best_ms:.4g}",
                row.kernel.baseline,
                f"{row.gain:.2f} ×",
                row.kernel.candidates,
            )
            for row in found.details.tuned
        ),
    )
