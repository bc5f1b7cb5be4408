"""Upkeep of a store: `gc`, `fsck`, and `copy` to another one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import click

from cachepipe.adapters.lock_file import read_lock_file
from cachepipe.cli.boundary import error_object, print_error
from cachepipe.cli.options import (
    FILE,
    json_option,
    opened,
    option,
    required_store,
    store_argument,
    time_of,
    trust_options,
)
from cachepipe.cli.output import print_json, print_lines, say
from cachepipe.domain.collect import DAY_S, FLOORS, Floors
from cachepipe.domain.finding import Finding
from cachepipe.domain.kms_log import Window
from cachepipe.domain.lock import Lock
from cachepipe.domain.printable import printable
from cachepipe.domain.record import to_json
from cachepipe.errors import IntegrityError, UsageError
from cachepipe.workflows import audit, collect, fsck, mirror
from cachepipe.workflows.inspect import size_text

GC_EPILOG = """\b
Examples:
  cachepipe gc file:///srv/ml-cache
  cachepipe gc file:///srv/ml-cache --keep-lock cachepipe.lock --delete
  cachepipe gc --keep-days 90 --json

Kept whatever its age: what a lock file given here names, what is being published, what the newest version of a channel or
one of its last ten names. Else an artifact is removed 30 days after it was published and last current, an unfinished one after a
day. Index versions are never removed. Give every lock file that is in use: gc cannot know them otherwise."""


@click.command("gc", epilog=GC_EPILOG)
@store_argument
@option("--keep-lock", "lock_files", type=FILE, multiple=True, metavar="FILE", help="Keep what this lock file names.")
@option(
    "--keep-days",
    type=click.IntRange(min=30),
    default=30,
    show_default=True,
    metavar="N",
    help="Since it was published and current.",
)
@option(
    "--keep-versions", type=click.IntRange(min=10), default=10, show_default=True, metavar="N", help="Of a channel."
)
@option("--delete", "deletes", is_flag=True, help="Remove it; without this nothing is written.")
@trust_options
@json_option
def gc_command(
    store: str | None, lock_files: tuple[Path, ...], keep_days: int, keep_versions: int, deletes: bool, is_json: bool
) -> None:
    """Says for every artifact of STORE whether it may be removed and why, and with --delete removes it."""
    floors = Floors(published_s=max(keep_days * DAY_S, FLOORS.published_s), versions=keep_versions)
    locks = _read_locks(lock_files)
    with opened(required_store(store)) as opened_store:
        done = collect.gc(opened_store, locks, floors, deletes=deletes, say=say)
    if is_json:
        print_json(done)
        return
    verb = "remove" if done.is_dry_run else "removed"
    print_lines(
        f"{verb if found.is_removed else 'keep':<7}  {found.artifact}  {size_text(found.size_bytes):>8}  {found.reason}"
        for found in done.decisions
    )
    print_lines(f"{verb:<7}  {key}  left by a crash" for key in done.announcements)
    for artifact in done.unknown_locked:
        say(f"a lock file names what the store does not have: {artifact}")
    if done.foreign:
        say(f"{len(done.foreign)} objects are none of ours and stay: {', '.join(done.foreign[:3])}")
    size = size_text(sum(found.size_bytes for found in done.removed))
    say(f"{len(done.removed)} of {len(done.decisions)} artifacts, {size}" + _what_next(done))


def _what_next(done: collect.Collection) -> str:
    if not done.is_dry_run:
        return " removed"
    return ": nothing was removed, `--delete` does it" if done.removed or done.announcements else ": nothing to remove"


FSCK_EPILOG = """\b
Examples:
  cachepipe fsck file:///srv/ml-cache
  cachepipe fsck file:///srv/ml-cache --deep --json
  cachepipe fsck s3://ml-cache/prod --kms-log logs/ --kms-key kms:alias/cachepipe-build --kms-key kms:alias/cachepipe-index --since 2d

Reads every index version and every statement, and looks for every pack; --deep reads every byte. Exits with 13 if a promise
is broken. Notes (unfinished uploads, what crashes left, objects of others) do not count. Nothing is written.

With --kms-log every signature that AWS CloudTrail recorded of the keys must be in STORE, written right after it was made, and
every one in STORE in the log. What was signed or written from --since to --until counts; give logs from a day before it. CloudTrail
delivers late, so the end is 30 minutes ago. Times are as `2026-11-30T10:00:00Z`, or ages: `90m`, `36h`, `7d`. A key must sign for
one store alone. The log must hold events that only read: `Sign` is one."""


@click.command("fsck", epilog=FSCK_EPILOG)
@store_argument
@option("--deep", "is_deep", is_flag=True, help="Read every pack and compare its SHA-256.")
@option(
    "--kms-log",
    "logs",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="PATH",
    help="CloudTrail's log file, a folder of them, or the output of `aws cloudtrail lookup-events`; may be repeated.",
)
@option(
    "--kms-key",
    "keys",
    multiple=True,
    metavar="kms:KEY",
    help="Signing key to compare with the log; may be repeated.",
)
@option("--since", metavar="TIME", help="From when on nothing may be unpaired. [default: 24 hours before --until]")
@option("--until", default="30m", show_default=True, metavar="TIME", help="Until when.")
@trust_options
@json_option
def fsck_command(store: str | None, is_deep: bool, is_json: bool, **asked: Any) -> int:
    """Checks that STORE holds what its indexes and statements promise, and all that its keys have signed."""
    now = _now()
    request = _audit_request(now, **asked)
    with opened(required_store(store)) as opened_store:
        found = audit.audit(opened_store, request, now) if request else None
        health = fsck.fsck(opened_store, now, is_deep=is_deep, audit=found)
    refusal = _refusal(health, found.findings if found else ())
    if is_json:
        document = to_json(health)
        print_json(document if refusal is None else {**document, "error": error_object(refusal)})
    else:
        _print_health(health)
    if refusal is None:
        return 0
    print_error(refusal)
    return refusal.exit_code


def _audit_request(
    now: datetime, logs: Sequence[Path], keys: Sequence[str], since: str | None, until: str
) -> audit.AuditRequest | None:
    source = click.get_current_context().get_parameter_source("keys")
    if keys and not logs and source is not click.core.ParameterSource.COMMANDLINE:
        keys = ()  # a variable that serves many runs asks for nothing
    if bool(logs) != bool(keys):
        raise UsageError(
            "an audit wants both: `--kms-log PATH` and `--kms-key kms:…`", hint="see `cachepipe fsck --help`"
        )
    end = time_of(until, now)
    window = Window(time_of(since, now) if since else end - timedelta(days=1), end)
    if window.since >= window.until:
        raise UsageError(f"--since {since} is not before --until {until}", hint="see `cachepipe fsck --help`")
    return audit.AuditRequest(logs, keys, window) if logs else None


def _print_health(health: fsck.Health) -> None:
    print_lines(
        f"{'problem' if found.is_problem else 'note':<7}  {found.where}: {found.what}" for found in health.findings
    )
    for key in health.keys:
        say(f"{key.key}: {key.logged} signatures in the log, {key.stored} here, from {key.since} to {key.until}")
    say(
        f"{health.channels} channels with {health.versions} versions, {health.artifacts} artifacts, {health.objects} "
        f"objects of {size_text(health.size_bytes)}{', every byte read' if health.is_deep else ''}: "
        f"{len(health.problems)} problems, {len(health.findings) - len(health.problems)} notes"
    )


def _refusal(health: fsck.Health, audited: Sequence[Finding]) -> IntegrityError | None:
    if not health.problems:
        return None
    first = printable(f"{health.problems[0].where}: {health.problems[0].what}")  # a name of a store's may break lines
    problem = f"{len(health.problems)} problems, the first: {first}"
    error = IntegrityError(f"store {health.store}", problem)
    error.hint = "publish the releases again that the lines name; find out who else writes the store"
    if any(found.is_problem for found in audited):
        error.hint = (
            "a signature that nothing explains is an incident: disable the key in KMS, find out who used it, rotate it"
        )
    return error


COPY_EPILOG = """\b
Examples:
  cachepipe copy file:///srv/ml-cache file:///media/usb/ml-cache
  cachepipe copy file:///media/usb/ml-cache file:///srv/ml-cache text-encoder@stable
  cachepipe copy file:///srv/ml-cache file:///mnt/site-b --lock cachepipe.lock

Without REF and --lock every channel is copied. `name@channel` takes the channel's artifacts and its index versions as they are,
signatures included, so DST's channel must have no history of its own; any other REF takes artifacts alone. A run that was
stopped goes on where it was. Copy again after every `renew`: a copied channel expires as its origin does."""


@click.command("copy", epilog=COPY_EPILOG)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.argument("refs", nargs=-1, metavar="[REF…]")
@option("--lock", "lock_files", type=FILE, multiple=True, metavar="FILE", help="Copy what this lock file names.")
@trust_options
@json_option
def copy_command(source: str, target: str, refs: tuple[str, ...], lock_files: tuple[Path, ...], is_json: bool) -> None:
    """Copies releases from the store SRC to the store DST, byte for byte."""
    with opened(source) as from_store, opened(target) as to_store:
        done = mirror.copy(from_store, to_store, refs, _read_locks(lock_files), say)
    if is_json:
        print_json(done)
        return
    print_lines(f"{found.name}@{found.channel}:{found.version}" for found in done.channels)
    print_lines(f"{found.artifact}  {found.release}  {size_text(found.size_bytes)}" for found in done.artifacts)


def _read_locks(paths: Sequence[Path]) -> list[Lock]:
    """Returns the lock files; one that cannot be read is an error, never an empty one."""
    return [read_lock_file(path) for path in paths]


def _now() -> datetime:
    return datetime.now(timezone.utc)
