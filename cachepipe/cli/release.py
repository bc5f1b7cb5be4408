"""Making a release: `plan` says what would be built, `build` builds and publishes it."""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from cachepipe.adapters.progress import open_progress
from cachepipe.cli.options import (
    FOLDER,
    cache_root_option,
    finite,
    index_key_option,
    json_option,
    manifest_argument,
    option,
    report_option,
    statement_key_option,
    store_option,
    trust_choice,
    trust_options,
)
from cachepipe.cli.output import print_json, print_line, print_table
from cachepipe.domain.entry import bucket_label
from cachepipe.domain.record import Json
from cachepipe.workflows.build import BuildRequest, BuildSummary, build, summary_json
from cachepipe.workflows.inspect import size_text
from cachepipe.workflows.preview import Preview, preview

PLAN_EPILOG = """\b
Examples:
  cachepipe plan manifest.yaml
  cachepipe plan manifest.yaml --store file:///srv/ml-cache --json"""


@click.command("plan", epilog=PLAN_EPILOG)
@manifest_argument
@store_option
@cache_root_option
@trust_options
@json_option
def plan_command(manifest: Path, store: str | None, cache_root: str | None, is_json: bool) -> None:
    """Shows entries, shape buckets and entry keys of MANIFEST, and what the store already has."""
    previews = preview(manifest, store, cache_root, datetime.now(timezone.utc), trust_choice())
    if is_json:
        print_json({"targets": [_preview_json(target) for target in previews]})
        return
    for target in previews:
        _print_preview(target)


def _preview_json(target: Preview) -> Json:
    return {
        "name": target.plan.name,
        "device": target.plan.device,
        "root": target.plan.root,
        "store": target.store,
        "is_buildable": target.is_buildable,
        "entries": [
            {
                "entry": entry.spec.id,
                "shape_buckets": [dict(bucket) for bucket in entry.spec.shape_buckets],
                "key": entry.key,
                "key_parts": entry.key_parts,
                "held_by": target.held.get(entry.key),
            }
            for entry in target.plan.entries
        ],
    }


def _print_preview(target: Preview) -> None:
    plan = target.plan
    rows = [
        (entry.spec.id, bucket_label(bucket), entry.key[:12], target.held.get(entry.key, "–") if target.store else "–")
        for entry in plan.entries
        for bucket in entry.spec.shape_buckets
    ]
    where = "" if target.is_buildable else ", not on this machine"
    print_table(
        f"{plan.name} for {plan.device} at {plan.root}{where}", ("entry", "shape bucket", "key", "held by"), rows
    )


BUILD_EPILOG = """\b
Examples:
  cachepipe build manifest.yaml --store file:///srv/ml-cache
  cachepipe build manifest.yaml --only encoder:max-autotune --no-publish
  cachepipe build manifest.yaml --work /tmp/work --report evidence --json

A run that was stopped goes on where it was: finished steps stay in the work folder."""


@click.command("build", epilog=BUILD_EPILOG)
@manifest_argument
@store_option
@option("--only", multiple=True, metavar="MODEL[:MODE]", help="These entries alone; the others are carried over.")
@option("--work", type=FOLDER, metavar="DIR", help="Work folder. [default: .cachepipe/<release> beside the manifest]")
@cache_root_option
@option("--no-publish", is_flag=True, help="Stop after the gates; the staged store stays in the work folder.")
@option("--fresh", "is_fresh", is_flag=True, help="Build everything anew.")
@report_option
@option("--allow-noisy", "allows_noisy", is_flag=True, help="Tune although the GPU is shared, throttled or unsteady.")
@option(
    "--max-latency-ratio",
    type=click.FloatRange(min=0),
    callback=finite,
    metavar="R",
    help="In place of the manifest's gate: later calls, restored ÷ tuned.",
)
@option("--keep-tuned", "keeps_tuned", is_flag=True, help="Keep tuned folders and torch's own bundles, to compare.")
@statement_key_option
@index_key_option
@trust_options
@json_option
def build_command(manifest: Path, no_publish: bool, is_json: bool, **options: Any) -> None:
    """Tunes, settles, packs, proves and publishes the release of MANIFEST."""
    request = BuildRequest(manifest, publishes=not no_publish, trust=trust_choice(), **options)
    summaries = build(request, open_progress(sys.stderr), datetime.now(timezone.utc))
    if is_json:
        print_json(summary_json(summaries))
        return
    for summary in summaries:
        _print_summary(summary)


def _print_summary(summary: BuildSummary) -> None:
    where = f"{summary.release}@{summary.channel}" if summary.channel else "published, in no channel"
    where = where if summary.statement else f"staged in {summary.stage}"
    title = f"{summary.artifact} for {summary.device}: {where}{', unchanged' if summary.is_unchanged else ''}"
    if summary.entries:
        rows = [
            (
                entry.entry,
                entry.shape_buckets,
                "carried over" if entry.is_carried else "built",
                f"{entry.speedup:.1f} ×",
                f"{entry.max_abs_diff:.1e}",
            )
            for entry in summary.entries
        ]
        print_table(title, ("entry", ">shape buckets", "how", ">cold ÷ restored", ">max abs diff"), rows)
    else:
        print_line(title)
    print_line(
        f"{summary.files} files, tuned {size_text(summary.tuned_bytes)}, settled {size_text(summary.unpacked_bytes)}, "
        f"packed {size_text(summary.packed_bytes)}"
    )
