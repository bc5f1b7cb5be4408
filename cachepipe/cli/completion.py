"""`cachepipe completion`: the script that teaches a shell our commands."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from cachepipe.cli.output import print_raw

EPILOG = """\b
Examples:
  eval "$(cachepipe completion bash)"
  cachepipe completion zsh > "${fpath[1]}/_cachepipe"
  cachepipe completion fish > ~/.config/fish/completions/cachepipe.fish"""


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Prints the completion script for SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    script = kind(root, {}, "cachepipe", "_CACHEPIPE_COMPLETE")
    print_raw(ShellComplete.source(script))
