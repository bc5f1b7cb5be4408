"""The one place where an error becomes text and an exit code.

stderr gets `error: …` and `hint: …`; with `--json` stdout gets this object as well:

    {"error": {"exit_code": 12, "hint": "…", "kind": "MissError", "message": "…"}}
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from cachepipe.cli.output import print_json, say
from cachepipe.cli.stdout import OutputError, abandon, guard
from cachepipe.errors import CachepipeError, Interrupted, NoRoomError, UnsafePathError, UsageError

SIGPIPE_EXIT = 141
"""What the shell shows for a process that SIGPIPE ended; never 0, since the verdict may not have been read."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BoundedGroup(click.Group):
    """A group whose commands' own endings are seen by `run` before click turns them into its own.

    Why: click makes every closed pipe exit code 1, our code for a bug, and prints an empty line for an interrupt.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # not of stdout, which says OutputError
            raise _of_the_system(error) from error
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error


def run(group: BoundedGroup, words: Sequence[str], complete_variable: str) -> int:
    """Returns the exit code of `words`; whatever goes wrong is reported as the module's docstring says."""
    guard()
    is_json = _wants_json(words)
    try:
        if sys.stdout is None:
            hint = "open it, or send the answer to a file or to /dev/null"
            raise UsageError("stdout is closed: there is nowhere to print the answer", hint=hint)
        result = group.main(
            args=list(words), prog_name="cachepipe", complete_var=complete_variable, standalone_mode=False
        )
        sys.stdout.flush()
    except OutputError as error:
        return _unprinted(error.error)
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
        return _report(_unexpected(error), is_json)
    return result if isinstance(result, int) else 0


def _unprinted(error: OSError) -> int:
    """Returns the exit code of an answer that stdout did not take; a reader that went away wants no words."""
    code = SIGPIPE_EXIT
    if error.errno != errno.EPIPE:
        problem = f"{(error.strerror or str(error)).lower()}: the answer is not whole"
        hint = "what the command did is done: print the answer elsewhere"
        is_full = error.errno in _FULL
        found = (
            NoRoomError(f"stdout: {problem}", hint=hint) if is_full else UnsafePathError("stdout", problem, hint=hint)
        )
        print_error(found)
        code = found.exit_code
    abandon()
    return code


def _wants_json(words: Sequence[str]) -> bool:
    """Looks at the words alone: the option must be known even when the command line cannot be parsed."""
    own = words[: words.index("--")] if "--" in words else words
    return "--json" in own or os.environ.get("CACHEPIPE_JSON", "").lower() in ("1", "true", "yes", "on")


def _usage_error(error: click.ClickException) -> UsageError:
    context = getattr(error, "ctx", None)
    path = context.command_path if isinstance(context, click.Context) else "cachepipe"
    message = error.format_message().strip().rstrip(".")
    return UsageError(message[:1].lower() + message[1:], hint=f"see `{path} --help`")


def _unexpected(error: Exception) -> CachepipeError:
    if os.environ.get("CACHEPIPE_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL):
        return _of_the_system(error)
    if isinstance(error, UnicodeEncodeError):
        return UsageError(
            f"a name that this locale cannot say: {error.object[:200]!r}", hint="set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        )
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return CachepipeError(
        text, hint="this is a bug in cachepipe: run again with CACHEPIPE_DEBUG=1 and report the traceback"
    )


def _of_the_system(error: OSError) -> CachepipeError:
    """Returns what the operating system refused as an error with the path: no command is a bug because of a folder."""
    problem = (error.strerror or str(error)).lower()
    where = "the file system" if error.filename is None else os.fsdecode(error.filename)
    if error.errno in _FULL:
        return NoRoomError(f"{where}: {problem}", hint="free space there, or name a folder with room")
    return UnsafePathError(where, problem, hint="look at this path and its rights, or name another one")


def _report(error: CachepipeError, is_json: bool) -> int:
    try:
        if is_json and sys.stdout is not None:
            print_json({"error": error_object(error)})
    except (OutputError, BrokenPipeError):
        print_error(error)
        abandon()
    else:
        print_error(error)
    return error.exit_code


def error_object(error: CachepipeError) -> dict[str, str | int]:
    """Returns the object that `--json` prints for an error."""
    kind = type(error).__name__
    return {"exit_code": error.exit_code, "hint": error.hint, "kind": kind, "message": str(error)}


def print_error(error: CachepipeError) -> None:
    """Prints one `error:` line for each line of the message, and the hint, on stderr."""
    text = str(error).strip("\n") or type(error).__name__
    for line in text.split("\n"):  # nothing else breaks one: names may hold whatever `splitlines` goes by
        say(f"error: {line.expandtabs()}")
    say(f"hint: {error.hint}")
