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
_OFF = ("", "0", "false", "no", "off")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of a command line, unless this process becomes a service's command.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["restore"]:
        own = words[1 : words.index("--")] if "--" in words else words[1:]
        if os.environ.get("CACHEPIPE_DISABLE", "").lower() in _ON:
            _bounded_empty_env_file(own)
            return _plain(words, 'outcome=disabled reason="CACHEPIPE_DISABLE is set"', 0)
        if not {"--help", "-h"} & set(own):
            return _restore(words, own)
    from cachepipe import streams

    streams.occupy()
    from cachepipe.cli.main import main as cli_main

    return cli_main(words)


def _restore(words: list[str], own: list[str]) -> int:
    import gc
    import signal

    gc.disable()  # this process is short and makes no rings to speak of; looking for them is a twentieth of its work
    # A thread that has fetched or unpacked waits no longer than this for one that parses the file table (default: 5 ms);
    # measured on two busy cores: a restore of 370 MB takes a sixth less time.
    sys.setswitchinterval(0.0002)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules are imported it ends us without a traceback
    try:
        from cachepipe import streams

        streams.occupy()
        from cachepipe.workflows.serve import run

        return run(words[1:])
    except Exception as error:  # noqa: BLE001 - the boundary: a broken installation of ours keeps no service down
        reason = f"{type(error).__name__}: {error}".replace('"', "'").splitlines()[0]
        if "--strict" in own or os.environ.get("CACHEPIPE_RESTORE_STRICT", "").lower() not in _OFF:
            words = own
        return _plain(words, f'outcome=cold reason="{reason}"', 1)


def _plain(words: list[str], what: str, exit_code: int) -> int:
    """Becomes the command in the words with nothing changed; without one, returns the exit code."""
    _say(f"cachepipe restore {what}\n")
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
        _say(f"cachepipe: cannot run `{command[0]}`: {error.strerror}\n")
        return 127 if is_absent else 126
    except ValueError:  # an empty word
        _say(f"cachepipe: cannot run `{command[0]}`\n")
        return 126


def _say(text: str) -> None:
    """Says a short text on stderr, unless it is closed or a full pipe that nobody reads."""
    import select

    try:
        if select.select([], [2], [], 0.1)[1]:
            os.write(2, text.encode(errors="backslashreplace")[: select.PIPE_BUF])
    except (OSError, ValueError):
        return


def _bounded_empty_env_file(own: list[str]) -> None:
    """As `_empty_env_file`, but waits a second at most: the file may lie on a mount that hangs."""
    import _thread

    done = _thread.allocate_lock()
    done.acquire()

    def empty() -> None:
        try:
            _empty_env_file(own)
        finally:
            done.release()

    try:
        _thread.start_new_thread(empty, ())
    except RuntimeError:  # no thread to be had
        _empty_env_file(own)
        return
    if not done.acquire(timeout=1.0):
        _say("cachepipe: `--env-file` cannot be emptied: its file system does not answer\n")


def _empty_env_file(own: list[str]) -> None:
    """Empties the file of `--env-file`: a shell that reads it must find neither none nor that of an earlier start."""
    given = [own[at + 1] for at, word in enumerate(own[:-1]) if word == "--env-file"]
    given += [word.partition("=")[2] for word in own if word.startswith("--env-file=")]
    for path in given or [os.environ.get("CACHEPIPE_ENV_FILE", "")]:
        try:
            if path:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
        except OSError as error:
            _say(f"cachepipe: `--env-file {path}` cannot be written ({error.strerror})\n")
