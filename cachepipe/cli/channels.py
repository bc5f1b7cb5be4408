"""What moves between channels: `promote`, `rollback`, and `lock`, which pins a channel for an image."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import click

from cachepipe.cli.options import (
    NEW_FILE,
    default_store,
    index_key_option,
    json_option,
    name_option,
    opened,
    option,
    required_store,
    split_store,
    store_argument,
    trust_options,
)
from cachepipe.cli.output import print_json, say
from cachepipe.domain.index import Index
from cachepipe.domain.lock import Lock
from cachepipe.workflows import channels

PROMOTE_EPILOG = """\b
Examples:
  cachepipe promote file:///srv/ml-cache --name text-encoder
  cachepipe promote --name text-encoder --from candidate --to canary
  cachepipe promote --name text-encoder --to stable text-encoder@candidate:42"""


@click.command("promote", epilog=PROMOTE_EPILOG)
@click.argument("words", nargs=-1, metavar="[STORE] [REF]")
@default_store
@name_option
@option("--from", "source", metavar="CHANNEL", default="candidate", show_default=True, help="Copied from.")
@option("--to", "target", metavar="CHANNEL", default="stable", show_default=True, help="Copied to.")
@index_key_option
@trust_options
@json_option
def promote_command(
    words: tuple[str, ...], store: str | None, name: str, source: str, target: str, is_json: bool
) -> None:
    """Copies the artifacts of one channel to another; with REF, that artifact alone."""
    url, refs = split_store(words, store, 0, 1)
    with opened(url) as opened_store:
        index = channels.promote(opened_store, name, source, target, refs[0] if refs else None, _now())
    _print_index(index, is_json)


ROLLBACK_EPILOG = """\b
Examples:
  cachepipe rollback file:///srv/ml-cache --name text-encoder
  cachepipe rollback --name text-encoder --channel stable --to-version 41"""


@click.command("rollback", epilog=ROLLBACK_EPILOG)
@store_argument
@name_option
@option("--channel", metavar="CHANNEL", default="stable", show_default=True, help="Channel that goes back.")
@option("--to-version", type=click.IntRange(min=1), metavar="N", help="Default: the newest that differs.")
@index_key_option
@trust_options
@json_option
def rollback_command(store: str | None, name: str, channel: str, to_version: int | None, is_json: bool) -> None:
    """Publishes the artifacts of an earlier version of a channel again, as a new version."""
    with opened(required_store(store)) as opened_store:
        index = channels.rollback(opened_store, name, channel, to_version, _now())
    _print_index(index, is_json)


LOCK_EPILOG = """\b
Examples:
  cachepipe lock file:///srv/ml-cache --name text-encoder
  cachepipe lock --name text-encoder --channel candidate --output locks/text-encoder.lock"""


@click.command("lock", epilog=LOCK_EPILOG)
@store_argument
@name_option
@option("--channel", metavar="CHANNEL", default="stable", show_default=True, help="Channel that is pinned.")
@option("--output", type=NEW_FILE, default="cachepipe.lock", show_default=True, metavar="FILE", help="Lock file.")
@trust_options
@json_option
def lock_command(store: str | None, name: str, channel: str, output: Path, is_json: bool) -> None:
    """Writes a lock file: `restore --lock` then accepts these artifacts alone, by digest."""
    with opened(required_store(store)) as opened_store:
        lock = channels.write_lock(opened_store, name, channel, output, _now())
    if is_json:
        print_json(lock)
    else:
        _print_pinned(lock, output)


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _print_index(index: Index, is_json: bool) -> None:
    if is_json:
        print_json(index)
        return
    click.echo(f"{index.name}@{index.channel}:{index.version}")
    for row in index.rows:
        say(f"  {row.artifact}  {row.device}  {row.statement[:12]}")


def _print_pinned(lock: Lock, output: Path) -> None:
    click.echo(str(output))
    say(f"pinned {lock.name}@{lock.channel}:{lock.version}")
    for row in lock.rows:
        say(f"  {row.artifact}  {row.device}  {row.statement[:12]}")
