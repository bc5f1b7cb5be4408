"""Arguments and options that several commands share, each with its environment variable."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click

from cachepipe.adapters.store import Store, TrustChoice, open_store
from cachepipe.cli.output import say
from cachepipe.domain.index import parse_timestamp
from cachepipe.errors import IntegrityError, UsageError

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)


_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def option(flag: str, *names: str, **settings: Any) -> Callable[[F], F]:
    """Returns a click option that can also be given as `CACHEPIPE_<FLAG>`."""
    variable = "CACHEPIPE_" + flag.lstrip("-").replace("-", "_").upper()
    return click.option(flag, *names, envvar=variable, show_envvar=True, **settings)


def _absolute(_context: click.Context, _parameter: click.Parameter, path: str | None) -> str | None:
    """Returns the folder without `..`; links stay, because the very path is part of what is built."""
    if path is None:
        return None
    absolute = os.path.abspath(path)
    if absolute == "/":
        raise click.BadParameter("the root folder cannot be a cache root")
    return absolute


def finite(_context: click.Context, _parameter: click.Parameter, number: float | None) -> float | None:
    """Refuses `nan` and `inf`, which click takes for numbers within any range: no comparison with them can fail."""
    if number is not None and not math.isfinite(number):
        raise click.BadParameter(f"{number} is not a finite number")
    return number


def time_of(text: str, now: datetime) -> datetime:
    """Returns the time that a command line names: `2026-11-30T10:00:00Z`, or an age such as `90m`, `36h`, `7d`.

    Raises:
        UsageError: neither.
    """
    age = re.fullmatch(r"([0-9]{1,5})([smhd])", text, re.ASCII)
    if age is not None:
        return now - int(age[1]) * timedelta(**{_UNITS[age[2]]: 1})
    try:
        return parse_timestamp(text, "time")
    except IntegrityError as error:
        raise UsageError(
            f"not a time: {text[:40]!r}", hint="as `2026-11-30T10:00:00Z`, or an age: `90m`, `36h`, `7d`"
        ) from error


def made(context: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Makes the folder in which results are left: that it cannot be is said before a build of hours, not after it."""
    if path is None or context.resilient_parsing:  # a shell that completes words wants nothing done
        return path
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{path}: not writable")
    return path


def made_around(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """As `made`, for the folder of a file; what is there (a device, a pipe) needs none of ours."""
    if path is not None and not os.path.lexists(path):
        made(context, parameter, path.parent)
    return path


report_option = option(
    "--report", type=FOLDER, callback=made, metavar="DIR", help="Leave evidence files there, for `cachepipe report`."
)
manifest_argument = click.argument("manifest", type=FILE, metavar="MANIFEST")
store_argument = click.argument("store", envvar="CACHEPIPE_STORE", required=False, metavar="[STORE]")
store_option = option(
    "--store", metavar="URL", help="Store in place of the manifest's: s3://bucket/prefix or file:///path."
)
cache_root_option = option(
    "--cache-root", callback=_absolute, metavar="DIR", help="Absolute folder in place of the manifest's cache_root."
)
default_store = click.option("--store", envvar="CACHEPIPE_STORE", hidden=True)
"""For commands whose words are told apart by `split_store`."""
name_option = option("--name", required=True, metavar="NAME", help="Release name.")
json_option = option("--json", "is_json", is_flag=True, help="Print one JSON document on stdout.")


_CHOICE = "cachepipe.trust"
INSECURE_WARNING = "warning: --insecure-unsigned: whoever can write the store decides what runs here"


def _choose(field: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(context: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value:
            context.meta[_CHOICE] = replace(context.meta.get(_CHOICE, TrustChoice()), **{field: value})

    return keep


def _key_option(flag: str, field: str, what: str) -> Callable[[F], F]:
    text = f"Key that signs {what}: file:PATH or kms:alias/…"
    return option(flag, expose_value=False, callback=_choose(field), metavar="KEY", help=text)


def trust_options(command: F) -> F:
    """Adds `--trust` and `--insecure-unsigned`; `trust_choice` and `opened` find what was given."""
    command = option(
        "--insecure-unsigned",
        is_flag=True,
        expose_value=False,
        callback=_choose("accepts_unsigned"),
        help="Accept what nobody signed; a trust policy refuses this.",
    )(command)
    path = click.Path(dir_okay=False)
    text = "Trust policy: whose signatures count. [default: /etc/cachepipe/trust.json, if it exists]"
    return option("--trust", type=path, expose_value=False, callback=_choose("policy_file"), metavar="FILE", help=text)(
        command
    )


def index_key_option(command: F) -> F:
    return _key_option("--index-key", "index_key", "channels")(command)


def statement_key_option(command: F) -> F:
    return _key_option("--statement-key", "statement_key", "artifacts")(command)


def trust_choice() -> TrustChoice:
    """Returns what this command line says about trust; warns each time when it wants none."""
    choice: TrustChoice = click.get_current_context().meta.get(_CHOICE, TrustChoice())
    if choice.accepts_unsigned:
        say(INSECURE_WARNING)
    return choice


@contextmanager
def opened(url: str) -> Iterator[Store]:
    """Gives the store under this command line's trust, and says afterwards whether a development key signed."""
    store = open_store(url, trust_choice())
    yield store
    for note in store.trust.notes:
        say(f"note: {note}")


def required_store(store: str | None) -> str:
    """Returns the store's URL.

    Raises:
        UsageError: neither the argument nor CACHEPIPE_STORE was given.
    """
    if not store:
        raise UsageError(
            "no store is given", hint="name it first, or set CACHEPIPE_STORE, as s3://bucket/prefix or file:///path"
        )
    return store


def split_store(words: tuple[str, ...], store: str | None, fewest: int, most: int) -> tuple[str, tuple[str, ...]]:
    """Returns the store's URL and the REFs of `[STORE] REF…`; a store is known by its `:/` or leading slash.

    Raises:
        UsageError: no store, or another number of REFs.
    """
    has_store = bool(words) and (words[0].startswith("/") or ":/" in words[0])
    refs = words[1:] if has_store else words
    if not fewest <= len(refs) <= most:
        wanted = str(most) if fewest == most else f"{fewest} to {most}"
        raise UsageError(
            f"{wanted} REF wanted, {len(refs)} given",
            hint="a REF is `name@channel`, `name@channel:42`, an artifact id or a digest prefix",
        )
    return required_store(words[0] if has_store else store), refs
