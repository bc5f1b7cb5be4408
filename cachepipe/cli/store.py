"""Looking into a store: `ls`, `show`, `diff`."""

from __future__ import annotations

import click

from cachepipe.cli.options import (
    default_store,
    json_option,
    opened,
    option,
    required_store,
    split_store,
    store_argument,
    trust_options,
)
from cachepipe.cli.output import print_json, print_lines, say
from cachepipe.workflows import inspect

REF_HELP = "REF is `name@channel`, `name@channel:42`, an artifact id or a digest prefix of 8 digits or more."
words_argument = click.argument("words", nargs=-1, metavar="[STORE] REF")

LS_EPILOG = """\b
Examples:
  cachepipe ls file:///srv/ml-cache
  cachepipe ls --name text-encoder --json

A channel that cannot be read is named with the reason, after the others; the exit code is then the reason's (13, 14, 15)."""


@click.command("ls", epilog=LS_EPILOG)
@store_argument
@option("--name", metavar="NAME", help="This release only.")
@trust_options
@json_option
def ls_command(store: str | None, name: str | None, is_json: bool) -> int:
    """Lists releases and channels of STORE with their newest versions and targets."""
    with opened(required_store(store)) as opened_store:
        tree = inspect.ls(opened_store, name)
    print_json(tree) if is_json else print_lines(inspect.ls_lines(tree))
    bad = tree["unreadable"]
    if bad:
        say(
            f"{len(bad)} of {len(bad) + len(tree['channels'])} channels cannot be read: `cachepipe fsck` looks into each"
        )
    return int(bad[0]["exit_code"]) if bad else 0


SHOW_EPILOG = f"""\b
Examples:
  cachepipe show file:///srv/ml-cache text-encoder@candidate
  cachepipe show text-encoder@stable:42 --json

{REF_HELP}"""


@click.command("show", epilog=SHOW_EPILOG)
@words_argument
@default_store
@trust_options
@json_option
def show_command(words: tuple[str, ...], store: str | None, is_json: bool) -> None:
    """Shows sizes, fingerprint, coverage and evidence of the artifacts that REF names."""
    url, (ref,) = split_store(words, store, 1, 1)
    with opened(url) as opened_store:
        tree = inspect.show(opened_store, ref)
    print_json(tree) if is_json else print_lines(inspect.show_lines(tree))


DIFF_EPILOG = f"""\b
Examples:
  cachepipe diff file:///srv/ml-cache text-encoder@stable text-encoder@candidate
  cachepipe diff text-encoder@stable:41 text-encoder@stable:42 --json

{REF_HELP}"""


@click.command("diff", epilog=DIFF_EPILOG)
@click.argument("words", nargs=-1, metavar="[STORE] REF REF")
@default_store
@trust_options
@json_option
def diff_command(words: tuple[str, ...], store: str | None, is_json: bool) -> None:
    """Says in words what differs between two artifacts."""
    url, (left, right) = split_store(words, store, 2, 2)
    with opened(url) as opened_store:
        tree = inspect.diff(opened_store, left, right)
    print_json(tree) if is_json else print_lines(inspect.diff_lines(tree))
