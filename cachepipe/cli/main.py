"""The group of all commands; a command's module is imported when it is invoked, not before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from cachepipe import __version__
from cachepipe.cli.boundary import BoundedGroup, run

COMPLETE_VARIABLE = "_CACHEPIPE_COMPLETE"


class Verb(NamedTuple):
    module: str
    help: str
    """One line, shown by `cachepipe --help` without importing the module."""


VERBS = {
    "plan": Verb("release", "Show entries, shape buckets and keys of a manifest, and what the store already has."),
    "build": Verb("release", "Tune, settle, pack, prove and publish a release."),
    "verify": Verb("evidence", "Restore a release and prove every shape bucket in fresh processes."),
    "report": Verb("report", "Show evidence files that `build --report` or `verify` left."),
    "explain": Verb("report", "Say of every miss why it was one, and how to mend it."),
    "restore": Verb("restore", "Restore a release, then become the service's command."),
    "ls": Verb("store", "List releases and channels of a store."),
    "show": Verb("store", "Show one artifact: sizes, fingerprint, coverage, evidence."),
    "diff": Verb("store", "Say in words what differs between two artifacts."),
    "lock": Verb("channels", "Pin a channel's artifacts by digest in a lock file."),
    "promote": Verb("channels", "Copy a channel's artifacts to another channel."),
    "rollback": Verb("channels", "Publish an earlier version of a channel again."),
    "keygen": Verb("keygen", "Make a signing key and list it in a trust policy."),
    "revoke": Verb("channels", "Take an artifact out of its channels, and have it refused from now on."),
    "renew": Verb("channels", "Give a channel a fresh expiry."),
    "copy": Verb("upkeep", "Copy releases to another store, byte for byte."),
    "gc": Verb("upkeep", "Say which artifacts nobody can want any more, and remove them."),
    "fsck": Verb("upkeep", "Check that a store holds what its indexes and statements promise."),
    "doctor": Verb("doctor", "Say whether a start on this machine would be warm, and why not."),
    "completion": Verb("completion", "Print the completion script for bash, zsh or fish."),
}


class LazyGroup(BoundedGroup):
    """Lists commands from `VERBS` and imports the one that is asked for.

    Why: click's own group needs every command object to print the top-level help, and those import pydantic and rich.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        command = getattr(import_module(f"cachepipe.cli.{verb.module}"), f"{cmd_name}_command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in VERBS if name.startswith(incomplete)]
        return [CompletionItem(name, help=VERBS[name].help) for name in names] or super().shell_complete(
            ctx, incomplete
        )


EPILOG = """\b
The life of a release:
  cachepipe plan manifest.yaml
  cachepipe build manifest.yaml --store file:///srv/ml-cache
  cachepipe promote file:///srv/ml-cache --name text-encoder
  cachepipe restore file:///srv/ml-cache --name text-encoder -- python serve.py

\b
Every long option can be given by a variable (--store: CACHEPIPE_STORE); STORE defaults to CACHEPIPE_STORE.
Exit codes: 0 ok, 1 bug, 2 usage, 10 manifest, 11 build, 12 miss, 13 integrity, 14 trust, 15 store, 16 conflict,
17 path, 18 gate, 19 fingerprint, 20 no room, 21 deadline, 126/127 command, 130 interrupted, 143 terminated."""


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, prog_name="cachepipe", message="%(prog)s %(version)s")
def cli() -> None:
    """Moves the cold start of torch.compile out of the service and into CI."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of one command line; never raises for anything that went wrong in it.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run(cli, words, COMPLETE_VARIABLE)
