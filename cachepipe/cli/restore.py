"""`cachepipe restore`: help and completion from the table of options; the work is the entrypoint's.

The entrypoint parses `restore` itself, before click is imported, because a wrong option must not keep a service down.
This command is reached for `--help`, for completion, and when it is called as a click command.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from cachepipe.workflows.restore_options import OPTIONS, STORE_VARIABLE, Option

EPILOG = """\b
Examples:
  cachepipe restore file:///srv/ml-cache --name text-encoder -- python serve.py
  cachepipe restore --name text-encoder --lock cachepipe.lock -- gunicorn app:app
  cachepipe restore --name text-encoder --lock cachepipe.lock --strict     (while an image is built)

\b
Whatever goes wrong, the command starts within the deadline, with a verified cache or with an empty private one; one
line on stderr says which. --strict exits with the reason's code instead. CACHEPIPE_DISABLE=1 starts it at once."""


def _parameter(option: Option) -> click.Option:
    kinds: dict[str, Any] = {"flag": {"is_flag": True}, "seconds": {"type": float}, "text": {}, "folder": {}}
    settings: dict[str, Any] = {**kinds[option.kind], "multiple": option.is_multiple, "help": option.help}
    if option.metavar:
        settings["metavar"] = option.metavar
    if option.flag in ("--lock", "--env-file"):
        settings["type"] = click.Path(dir_okay=False)
    elif option.flag in ("--dest", "--state-dir"):
        settings["type"] = click.Path(file_okay=False)
    return click.Option([option.flag, option.field], envvar=option.variable, show_envvar=True, **settings)


def _run(**_values: Any) -> None:
    from cachepipe.entrypoint import main

    sys.exit(main(["restore", *click.get_current_context().meta["cachepipe.words"]]))


class RestoreCommand(click.Command):
    """Keeps the words as they were given, for the parser of the entrypoint."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["cachepipe.words"] = list(args)
        return super().parse_args(ctx, args)


restore_command = RestoreCommand(
    "restore",
    callback=_run,
    params=[
        click.Argument(["store"], envvar=STORE_VARIABLE, required=False, metavar="[STORE]"),
        *map(_parameter, OPTIONS),
        click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND…]"),
    ],
    help="Restores the release NAME, then becomes COMMAND.",
    epilog=EPILOG,
)
