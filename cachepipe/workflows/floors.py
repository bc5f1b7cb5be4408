"""Which floors bound the channels of a start, and where a start leaves the versions that it saw.

A floor lies in the state folder: `--state-dir`, else `.state` beside the folder of the release. Where the options name neither that nor
`--dest`, the folder is known once a statement was read, and a start may end before that: all is revoked, nothing fits this machine. So such starts leave what they
see in the default cache root too, or else in scratch space: for their store alone, since another store's release of this name may belong
to another root, which has other floors.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from cachepipe.adapters import cachedir
from cachepipe.adapters.floors import Floor
from cachepipe.domain.record import sha256
from cachepipe.errors import UnsafePathError
from cachepipe.workflows.outcome import RestoreRequest, state_dir

_MOUNT_S = 0.3
"""For the answer of a mount that is asked to be sure alone."""


def floors(request: RestoreRequest, name: str, folder: str = "") -> Iterator[Floor]:
    """Yields the floors of the release's channel.

    Args:
        request: of this start.
        name: of the release.
        folder: where it lies or will lie; empty: not known yet.
    """
    options = request.options
    if folder:
        yield Floor(state_dir(options, folder), name, options.channel)
    if options.dest or options.state_dir:
        yield Floor(state_dir(options, os.path.abspath(options.dest)), name, options.channel)
        return
    # All of them: an earlier start may have found the better ones absent, or not writable, and have gone on to another.
    for home in _private_homes(request):
        yield _of_store(request, name, home)


def seen_version(request: RestoreRequest, name: str, folder: str) -> int:
    """Returns the highest version of the release's channel that this node has seen; 0: none."""
    return max((floor.seen() for floor in floors(request, name, folder)), default=0)


def remember(request: RestoreRequest, name: str, version: int, folder: str = "") -> None:
    """Remembers a version of the release's channel; where nothing can be written, nothing is.

    Args:
        request: of this start.
        name: of the release.
        version: that was verified.
        folder: as in `floors`.
    """
    options = request.options
    if options.state_dir:
        Floor(state_dir(options, ""), name, options.channel).remember(version)
    elif folder or options.dest:
        beside = state_dir(options, folder or os.path.abspath(options.dest))
        if os.path.isdir(os.path.dirname(beside)):  # a cache root is made by who restores into it
            Floor(beside, name, options.channel).remember(version)
    else:
        for home in _homes(request):
            if _is_usable(home) and _of_store(request, name, home).remember(version):
                return


def _is_usable(home: str) -> bool:
    try:
        if home != cachedir.DEFAULT_CACHE_ROOT:
            cachedir.make_private(home)
    except UnsafePathError:
        return False
    return _is_private(home)


def _homes(request: RestoreRequest) -> tuple[str, ...]:
    scratch = cachedir.scratch_folders(request.environment) if request.options.has_scratch else ()
    return (cachedir.DEFAULT_CACHE_ROOT, *scratch)


def _private_homes(request: RestoreRequest) -> list[str]:
    """Returns the homes that only we can change.

    What variables of the user name may be a mount that hangs. It is waited for without end only where the default cache root
    cannot be used, since then the release is looked for there too.
    """
    homes, private, asking = _homes(request), list[str](), list[threading.Thread]()
    safe = (cachedir.DEFAULT_CACHE_ROOT, *cachedir.scratch_folders({}))

    def ask(home: str) -> None:
        if _is_private(home):
            private.append(home)

    for home in homes:
        if home in safe or cachedir.DEFAULT_CACHE_ROOT not in private:
            ask(home)
            continue
        with suppress(RuntimeError):  # no thread to be had
            thread = threading.Thread(target=ask, args=(home,), daemon=True)
            thread.start()
            asking.append(thread)
    until = time.monotonic() + _MOUNT_S
    for thread in asking:
        thread.join(max(0.0, until - time.monotonic()))
    return list(private)


def _is_private(home: str) -> bool:
    try:
        cachedir.check_private(home, closes=False)
    except (UnsafePathError, OSError):
        return False
    return True


def _of_store(request: RestoreRequest, name: str, home: str) -> Floor:
    options = request.options
    tag = sha256(options.store.encode(errors="surrogatepass"))[:16]
    return Floor(os.path.join(home, ".state"), name, options.channel, tag)
