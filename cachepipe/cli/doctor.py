"""`doctor`: one page of facts and verdicts about this machine and a store."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from cachepipe.cli.options import FOLDER, json_option, option, store_argument, trust_choice, trust_options
from cachepipe.cli.output import print_json, print_line, print_table
from cachepipe.domain.checkup import sections
from cachepipe.domain.record import to_json
from cachepipe.errors import VerificationError
from cachepipe.workflows.doctor import DoctorRequest, doctor

DOCTOR_EPILOG = """\b
Examples:
  cachepipe doctor
  cachepipe doctor file:///srv/ml-cache --name encoder --channel stable
  cachepipe doctor file:///srv/ml-cache --probe --json
  cachepipe doctor --name encoder --files

Exits with 18 if a verdict is `fail`: a start here will not be warm."""


@click.command("doctor", epilog=DOCTOR_EPILOG)
@store_argument
@option("--name", "names", multiple=True, metavar="NAME", help="Release to look at. [default: all that are found]")
@option("--channel", default="stable", show_default=True, metavar="CHANNEL", help="Channel of the named releases.")
@option("--cache-root", type=FOLDER, metavar="DIR", help="Where services restore. [default: /var/cache/cachepipe]")
@option("--state-dir", type=FOLDER, metavar="DIR", help="Where attempts are noted. [default: .state in the cache root]")
@option("--probe", "probes_store", is_flag=True, help="Write one object twice into the store, and remove it.")
@option(
    "--files", "reads_files", is_flag=True, help="Compare every byte of what is restored here with what was restored."
)
@trust_options
@json_option
def doctor_command(is_json: bool, cache_root: Path | None, state_dir: Path | None, **options: Any) -> int:
    """Says whether a start on this machine would be warm: machine, torch, folders, quarantine, store, trust."""
    if cache_root is not None:
        options["cache_root"] = str(cache_root.absolute())
    request = DoctorRequest(**options, trust=trust_choice(), state_dir=str(state_dir.absolute()) if state_dir else None)
    found = doctor(request, datetime.now(timezone.utc))
    if is_json:
        print_json({"checks": to_json(found.checks), "healthy": found.is_healthy})
    else:
        for section, checks in sections(found.checks).items():
            rows = [(check.verdict, check.name, check.value, check.advice) for check in checks]
            print_table(section, ("verdict", "what", "found", "advice"), rows)
            print_line()
        print_line(f"verdict: {'ok' if found.is_healthy else f'{len(found.failures)} failed'}")
    return 0 if found.is_healthy else VerificationError.exit_code
