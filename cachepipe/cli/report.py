"""Showing what earlier runs left: `report` in every form, `explain` for the cause of each miss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from cachepipe.adapters.workdir import write_whole
from cachepipe.cli.boundary import error_object, print_error
from cachepipe.cli.options import NEW_FILE, json_option, option, trust_choice, trust_options
from cachepipe.cli.output import print_json, print_line, print_lines, print_table, say
from cachepipe.domain.printable import brief, one_line
from cachepipe.domain.record import to_json
from cachepipe.errors import CachepipeError, UsageError, VerificationError
from cachepipe.workflows import report as reports
from cachepipe.workflows.explaining import explain_files
from cachepipe.workflows.report_compare import Comparison, compare
from cachepipe.workflows.report_junit import report_junit
from cachepipe.workflows.report_markdown import report_markdown

REPORT_EPILOG = """\b
Examples:
  cachepipe report evidence
  cachepipe report evidence --html report.html --junit gates.xml
  cachepipe report evidence --markdown "$GITHUB_STEP_SUMMARY"
  cachepipe report evidence --against evidence-of-last-release --json

Exits with 18 unless the evidence shows that every entry started warm, after the tables."""
MAX_ERRORS = 50
"""Reasons that stderr lists; the tables and the JSON document have all."""
EVIDENCE = click.Path(path_type=Path)


@click.command("report", epilog=REPORT_EPILOG)
@click.argument("evidence", nargs=-1, required=True, type=EVIDENCE, metavar="EVIDENCE…")
@option("--html", type=NEW_FILE, metavar="FILE", help="Write one self-contained page.")
@option("--junit", type=NEW_FILE, metavar="FILE", help="Write JUnit XML, one case per shape bucket.")
@option("--markdown", type=NEW_FILE, metavar="FILE", help="Append GitHub-flavoured Markdown, e.g. to a step summary.")
@option("--against", type=EVIDENCE, metavar="EVIDENCE", help="Compare with the evidence of another release.")
@json_option
def report_command(
    evidence: tuple[Path, ...],
    html: Path | None,
    junit: Path | None,
    markdown: Path | None,
    against: Path | None,
    is_json: bool,
) -> int:
    """Shows evidence files, or all in folders, that `build --report` or `verify --report` left."""
    found = reports.report(evidence, say)
    other = reports.report([against], say) if against is not None else None
    if html is not None:
        from cachepipe.adapters.html_page import render_page
        from cachepipe.workflows.report_page import report_page

        _write(html, render_page(report_page(found, other, str(against or ""))).encode())
    if junit is not None:
        _write(junit, report_junit(found))
    if markdown is not None:
        _append(markdown, report_markdown(found, other))
    refusal = _refusal(found)
    if is_json:
        document = reports.report_json(found)
        document.update({} if refusal is None else {"error": error_object(refusal)})
        print_json({**document, "against": to_json(compare(other, found))} if other is not None else document)
    else:
        print_report(found)
        if other is not None:
            _print_comparison(compare(other, found))
    if refusal is None:
        return 0
    print_error(refusal)
    return refusal.exit_code


def _refusal(found: reports.Report) -> VerificationError | None:
    """Returns why the evidence does not show a warm start; told after everything that was asked for is written."""
    if found.verdict.is_ok:
        return None
    lines = list(dict.fromkeys(map(str, found.verdict.faults)))
    more = [f"and {len(lines) - MAX_ERRORS} more"] if len(lines) > MAX_ERRORS else []
    error = VerificationError([*map(brief, lines[:MAX_ERRORS]), *more])
    error.hint = "`cachepipe explain` with the same files names the cause of each miss"
    if not found.verdict.is_proved:
        error.hint = "`verify --report` restores the release and leaves the evidence that is missing"
    return error


def print_report(found: reports.Report) -> None:
    """Prints the tables of a report on stdout."""
    print_table("shape buckets", reports.BUCKET_COLUMNS, reports.bucket_cells(found))
    print_lines([reports.BAR_LEGEND, ""])
    print_table("processes", reports.STEP_COLUMNS, reports.step_cells(found))
    details = found.details
    if details.tuned:
        rows = [
            (row.kernel.name, row.kernel.chosen, f"{row.kernel.best_ms:.4g}", row.kernel.baseline, f"{row.gain:.2f} ×")
            for row in details.tuned[:50]
        ]
        print_table("\ntuned kernels", ("kernel", "chosen", ">best ms", "compared with", ">gain"), rows)
    if details.sizes:
        rows_of_sizes = [(kind, one.files, one.size_bytes) for kind, one in sorted(details.sizes.items())]
        print_table("\nrestored files", ("kind", ">files", ">bytes"), rows_of_sizes)
    if found.misses:
        print_lines(["", "misses", *map(one_line, found.misses)])
    for row in details.explained:
        one = row.explanation
        print_lines([f"  {row.entry} · {one.shape_bucket or 'all'}: {one_line(one.cause)}", f"    fix: {one.fix}"])
    print_lines(f"not covered: {row.file.path} ({row.file.owner})" for row in details.outside)
    print_line(f"verdict: {found.verdict.words}")


def _print_comparison(found: Comparison) -> None:
    rows = [
        (
            row.entry,
            row.shape_bucket,
            row.before_s,
            row.now_s,
            None if row.change is None else f"{100 * row.change:+.0f} %",
            row.verdict,
        )
        for row in found.shape_buckets
    ]
    print_table("\nagainst", ("entry", "shape bucket", ">before s", ">now s", ">change", "verdict"), rows)
    print_line(f"restored bytes: {found.size_before} → {found.size_now}")
    print_lines(f"misses now: {text}" for text in found.new_misses)
    print_lines(f"mended: {text}" for text in found.mended_misses)


def write_junit(path: Path, evidence: Sequence[Path]) -> None:
    """Writes the verdicts of a run; without whole evidence of it (its worker died) no file is left, nor that of an earlier run.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        verdicts = report_junit(reports.report(evidence))
    except CachepipeError as error:
        say(f"warning: {path} is not written: {error}")
        if path.is_file():
            path.unlink()
    else:
        _write(path, verdicts)


def _write(path: Path, data: bytes) -> None:
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a device or a pipe: written into, never replaced by a file
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path.resolve(), data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


EXPLAIN_EPILOG = """\b
Examples:
  cachepipe explain evidence  (what `verify --report evidence` found)
  cachepipe explain events.jsonl evidence  (a service's events, CACHEPIPE_EVENTS, with the builder's evidence)
  cachepipe explain events.jsonl --store file:///srv/ml-cache --ref encoder@stable"""


@click.command("explain", epilog=EXPLAIN_EPILOG)
@click.argument("evidence", nargs=-1, required=True, type=EVIDENCE, metavar="EVIDENCE…")
@option("--store", metavar="URL", help="Store that holds what to compare with.")
@option("--ref", metavar="REF", help="The artifact to compare with: `name@channel`, an id, a digest prefix.")
@trust_options
@json_option
def explain_command(evidence: tuple[Path, ...], store: str | None, ref: str | None, is_json: bool) -> None:
    """Says of every miss why it was one and how to mend it, from evidence files or a service's file of events."""
    source = click.get_current_context().get_parameter_source("store")
    if (
        store is not None and ref is None and source is ParameterSource.COMMANDLINE
    ):  # CACHEPIPE_STORE is for all commands
        raise UsageError("`--store` without an artifact", hint="name it as well: `--ref NAME@CHANNEL`")
    answers = explain_files(evidence, store, ref, trust_choice(), say)
    if is_json:
        print_json({"processes": [to_json(answer) for answer in answers]})
        return
    for answer in answers:
        print_lines(answer.lines(has_names=True))
