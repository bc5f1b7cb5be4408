"""What moves between channels: `promote`, `rollback`, `revoke`, `renew`, and `lock`, which pins a channel for an image."""

from __future__ import annotations

from collections.abc import Sequence
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
from cachepipe.cli.output import print_json, print_line, say
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
        promoted = channels.promote(opened_store, name, source, target, refs[0] if refs else None, _now())
    index = promoted.index
    _print_index(index, is_json)
    if not promoted.is_new:
        say(f"unchanged since {index.created_at}; it expires at {index.expires_at}: `cachepipe renew` re-dates it")


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


REVOKE_EPILOG = """\b
Examples:
  cachepipe revoke file:///srv/ml-cache --name text-encoder 01KB9WZDG0000000000000000A
  cachepipe revoke --name text-encoder --channel stable text-encoder@stable:42
  cachepipe revoke --name text-encoder 5f1d3c20

Services that start from a channel refuse the artifact from then on. A lock file that names it must be replaced. What the
channel had before is published again with `cachepipe rollback`."""


@click.command("revoke", epilog=REVOKE_EPILOG)
@click.argument("words", nargs=-1, metavar="[STORE] REF")
@default_store
@name_option
@option("--channel", metavar="CHANNEL", help="This channel alone. [default: every channel of the release]")
@index_key_option
@trust_options
@json_option
def revoke_command(words: tuple[str, ...], store: str | None, name: str, channel: str | None, is_json: bool) -> None:
    """Takes the artifact of REF out of its channels, and has it refused from now on."""
    url, (ref,) = split_store(words, store, 1, 1)
    with opened(url) as opened_store:
        if channel is None:
            indexes = channels.revoke_everywhere(opened_store, name, ref, _now())
        else:
            indexes = (channels.revoke(opened_store, name, channel, ref, _now()),)
    _print_indexes(indexes, is_json)


RENEW_EPILOG = """\b
Examples:
  cachepipe renew file:///srv/ml-cache --name text-encoder
  cachepipe renew --name text-encoder --channel stable --channel candidate

A channel expires 14 days after its newest version was written; ci/aws/renew.yaml renews it every week."""


@click.command("renew", epilog=RENEW_EPILOG)
@store_argument
@name_option
@option("--channel", "names", multiple=True, metavar="CHANNEL", default=("stable",), show_default=True, help="Renewed.")
@index_key_option
@trust_options
@json_option
def renew_command(store: str | None, name: str, names: tuple[str, ...], is_json: bool) -> None:
    """Publishes a channel's artifacts again with a fresh expiry."""
    with opened(required_store(store)) as opened_store:
        indexes = [channels.renew(opened_store, name, channel, _now()) for channel in dict.fromkeys(names)]
    _print_indexes(indexes, is_json)


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
    print_line(f"{index.name}@{index.channel}:{index.version}")
    for row in index.rows:
        say(f"  {row.artifact}  {row.device}  {row.statement[:12]}")


def _print_indexes(indexes: Sequence[Index], is_json: bool) -> None:
    if is_json:
        print_json({"indexes": indexes})
        return
    for index in indexes:
        _print_index(index, is_json)
        say(f"  expires {index.expires_at}")


def _print_pinned(lock: Lock, output: Path) -> None:
    print_line(str(output))
    say(f"pinned {lock.name}@{lock.channel}:{lock.version}")
    for row in lock.rows:
        say(f"  {row.artifact}  {row.device}  {row.statement[:12]}")
