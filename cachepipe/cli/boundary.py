"""The one place where an error becomes text and an exit code.

stderr gets `error: …` and `hint: …`; with `--json` stdout gets this object as well:

    {"error": {"exit_code": 12, "hint": "…", "kind": "MissError", "message": "…"}}
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from cachepipe.domain.printable import printable, printable_json
from cachepipe.errors import CachepipeError, Interrupted, UsageError

SIGPIPE_EXIT = 141
"""What the shell shows for a process that SIGPIPE ended; never 0, since the verdict may not have been read."""


class ClosedPipe(Exception):
    """The reader of our output went away."""


class BoundedGroup(click.Group):
    """A group whose commands' own endings are seen by `run` before click turns them into its own.

    Why: click makes a closed pipe exit code 1, our code for a bug, and prints an empty line for an interrupt.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise ClosedPipe from error
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error
        return result


def run(group: BoundedGroup, words: Sequence[str], complete_variable: str) -> int:
    """Returns the exit code of `words`; whatever goes wrong is reported as the module's docstring says."""
    is_json = _wants_json(words)
    try:
        result = group.main(
            args=list(words), prog_name="cachepipe", complete_var=complete_variable, standalone_mode=False
        )
    except ClosedPipe:
        _abandon_stdout()
        return SIGPIPE_EXIT
    except (click.Abort, KeyboardInterrupt):
        return _report(Interrupted("interrupted"), is_json)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return UsageError.exit_code
    except click.ClickException as error:
        return _report(_usage_error(error), is_json)
    except CachepipeError as error:
        return _report(error, is_json)
    except Exception as error:  # noqa: BLE001 - the boundary: a bug is one line and exit code 1, not a wall of text
        return _report(_bug(error), is_json)
    return result if isinstance(result, int) else 0


def _wants_json(words: Sequence[str]) -> bool:
    """Looks at the words alone: the option must be known even when the command line cannot be parsed."""
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own or os.environ.get("CACHEPIPE_JSON", "").lower() in ("1", "true", "yes", "on")


def _usage_error(error: click.ClickException) -> UsageError:
    context = getattr(error, "ctx", None)
    path = context.command_path if isinstance(context, click.Context) else "cachepipe"
    message = error.format_message().strip().rstrip(".")
    return UsageError(message[:1].lower() + message[1:], hint=f"see `{path} --help`")


def _bug(error: Exception) -> CachepipeError:
    if os.environ.get("CACHEPIPE_DEBUG") == "1":
        traceback.print_exception(error)
    return CachepipeError(
        f"{type(error).__name__}: {error}".splitlines()[0],
        hint="this is a bug in cachepipe: run again with CACHEPIPE_DEBUG=1 and report the traceback",
    )


def _report(error: CachepipeError, is_json: bool) -> int:
    try:
        if is_json:
            print(printable_json({"error": error_object(error)}), flush=True)
        print_error(error)
    except BrokenPipeError:
        _abandon_stdout()
    return error.exit_code


def error_object(error: CachepipeError) -> dict[str, str | int]:
    """Returns the object that `--json` prints for an error."""
    kind = type(error).__name__
    return {"exit_code": error.exit_code, "hint": error.hint, "kind": kind, "message": str(error)}


def print_error(error: CachepipeError) -> None:
    """Prints one `error:` line for each line of the message, and the hint, on stderr."""
    for line in str(error).splitlines() or [type(error).__name__]:
        print(f"error: {printable(line.expandtabs())}", file=sys.stderr)
    print(f"hint: {printable(error.hint)}", file=sys.stderr, flush=True)


def _abandon_stdout() -> None:
    """Points stdout and stderr at nothing, so that the interpreter's last flush does not complain."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            os.dup2(nothing, stream.fileno())
        except (OSError, ValueError):
            continue
