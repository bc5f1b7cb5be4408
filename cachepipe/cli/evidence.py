"""Proof: `verify` restores a release and calls every shape bucket."""

from __future__ import annotations

import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from cachepipe.adapters.progress import open_progress
from cachepipe.cli.boundary import error_object, print_error
from cachepipe.cli.options import (
    FILE,
    FOLDER,
    NEW_FILE,
    cache_root_option,
    finite,
    json_option,
    made_around,
    manifest_argument,
    option,
    report_option,
    store_option,
    trust_choice,
    trust_options,
)
from cachepipe.cli.output import print_json, print_line, print_lines, print_table
from cachepipe.cli.report import write_junit
from cachepipe.domain.record import to_json
from cachepipe.errors import VerificationError
from cachepipe.workflows import report as reports
from cachepipe.workflows.verify import VerifyRequest, VerifySummary, refuse_violations, verify

VERIFY_EPILOG = """\b
Examples:
  cachepipe verify manifest.yaml --store file:///srv/ml-cache --no-compiler
  cachepipe verify manifest.yaml --lock cachepipe.lock --files --explain
  cachepipe verify manifest.yaml --channel stable --min-hit-rate 1.0 --min-speedup 5 --json

Exits with 18 if a gate refuses, after the table."""


@click.command("verify", epilog=VERIFY_EPILOG)
@manifest_argument
@store_option
@cache_root_option
@option("--channel", metavar="CHANNEL", help="Channel to verify. [default: the manifest's, candidate]")
@option("--lock", type=FILE, metavar="FILE", help="Verify what this lock file pins.")
@option("--no-compiler", "hides_compiler", is_flag=True, help="Hide host compilers from PATH: nothing may be built.")
@option(
    "--min-hit-rate", type=click.FloatRange(0, 1), callback=finite, metavar="R", help="In place of the manifest's gate."
)
@option(
    "--min-speedup", type=click.FloatRange(min=0), callback=finite, metavar="X", help="In place of the manifest's gate."
)
@option("--files", "checks_files", is_flag=True, help="Compare the SHA-256 of every restored file.")
@option("--explain", "explains", is_flag=True, help="Name the components of the key beside each cause of a miss.")
@report_option
@option(
    "--junit",
    type=NEW_FILE,
    callback=made_around,
    metavar="FILE",
    help="Write the verdicts as JUnit XML, one case per shape bucket.",
)
@option("--work", type=FOLDER, metavar="DIR", help="Work folder. [default: .cachepipe/<release> beside the manifest]")
@trust_options
@json_option
def verify_command(manifest: Path, is_json: bool, junit: Path | None, **options: Any) -> int:
    """Restores the release of MANIFEST and proves every shape bucket in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="cachepipe-verify-") as scratch:
        if junit is not None and options["report"] is None:
            options["report"] = Path(scratch)
        request = VerifyRequest(manifest, trust=trust_choice(), **options)
        summaries = verify(request, open_progress(sys.stderr), datetime.now(timezone.utc))
        if junit is not None:
            write_junit(junit, [options["report"]])
    refusal = _refusal(summaries)
    if is_json:
        document = {"verifications": to_json(summaries)}
        print_json(document if refusal is None else {**document, "error": error_object(refusal)})
    else:
        for summary in summaries:
            _print_summary(summary)
    if refusal is None:
        return 0
    print_error(refusal)
    return refusal.exit_code


def _refusal(summaries: tuple[VerifySummary, ...]) -> VerificationError | None:
    """Returns what the gates say; the table or the document is printed first, so that it shows the refused numbers."""
    try:
        refuse_violations(summaries)
    except VerificationError as error:
        return error
    return None


VERIFY_COLUMNS = ("entry", "shape bucket", ">graphs", "hits", "work", "outputs", ">cold ÷ restored")
PHASE_COLUMNS = (
    *("entry", "shape bucket", "first call", ">seconds"),
    *(">trace", ">lookup", ">load", ">tune", ">compile", ">capture", ">run"),
)


def _print_summary(summary: VerifySummary) -> None:
    rows = [
        (
            row.entry,
            row.shape_bucket,
            row.graphs,
            reports.hits_text(row.hits),
            reports.work_text(row.work, row.uncounted),
            row.outputs,
            f"{row.cold_s / row.restored_s:.1f} ×" if row.restored_s else None,
        )
        for row in summary.shape_buckets
    ]
    seconds = [
        (
            row.entry,
            row.shape_bucket,
            start,
            {"cold": row.cold_s, "restored": row.restored_s, "eager": row.eager_s}[start],
            *(phases.trace_s, phases.lookup_s, phases.load_s, phases.tune_s),
            *(phases.compile_s, phases.capture_s, phases.run_s),
        )
        for row in summary.shape_buckets
        for start, phases in row.phases.items()
    ]
    title = f"{summary.release} for {summary.device}: artifact {summary.artifact}, {summary.status}"
    print_table(title, VERIFY_COLUMNS, rows)
    print_table("first calls in seconds, by where the time went", PHASE_COLUMNS, seconds)
    if summary.checked_files:
        print_line(f"{summary.checked_files} files compared by SHA-256")
    print_lines(summary.explanations)
    print_lines(summary.outside)
    print_line(f"verdict: {'refused' if summary.violations else 'ok'}")
