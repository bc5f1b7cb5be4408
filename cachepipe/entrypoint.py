"""The console script. `restore` has a way of its own, on which a service's start depends on as little as possible.

CACHEPIPE_DISABLE=1      plain exec of the command: standard library only
cachepipe restore …      `workflows/serve.py`: no click
everything else          `cli/main.py`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_ON = ("1", "true", "yes", "on")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of a command line, unless this process becomes a service's command.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["restore"]:
        own = words[1 : words.index("--")] if "--" in words else words[1:]
        if os.environ.get("CACHEPIPE_DISABLE", "").lower() in _ON:
            return _plain(words, 'outcome=disabled reason="CACHEPIPE_DISABLE is set"', 0)
        if not {"--help", "-h"} & set(own):
            return _restore(words, own)
    from cachepipe.cli.main import main as cli_main

    return cli_main(words)


def _restore(words: list[str], own: list[str]) -> int:
    try:
        from cachepipe.workflows.serve import run

        return run(words[1:])
    except Exception as error:  # noqa: BLE001 - the boundary: a broken installation of ours keeps no service down
        reason = f"{type(error).__name__}: {error}".replace('"', "'").splitlines()[0]
        if "--strict" in own:
            words = own
        return _plain(words, f'outcome=cold reason="{reason}"', 1)


def _plain(words: list[str], what: str, exit_code: int) -> int:
    """Becomes the command in the words with nothing changed; without one, returns the exit code."""
    try:
        os.write(2, f"cachepipe restore {what}\n".encode(errors="backslashreplace"))
    except OSError:
        pass
    command = words[words.index("--") + 1 :] if "--" in words else []
    if not command:
        return exit_code
    import signal

    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec would hand that on
    try:
        os.execvp(command[0], command)
    except OSError as error:
        is_absent = isinstance(error, (FileNotFoundError, NotADirectoryError))
        os.write(2, f"cachepipe: cannot run `{command[0]}`: {error.strerror}\n".encode(errors="backslashreplace"))
        return 127 if is_absent else 126
