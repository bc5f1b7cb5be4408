"""Work that torch's own child processes do: its compile workers and tuning processes.

The parent opens a file in memory and names it in `CACHEPIPE_WORK_LOG`; a child that inherits the variable counts with the
same wrapped calls as the parent and appends one line per unit of work:

    triton_compiles triton_poi_fused_add_0

The variable enters no key of torch. A child finds us through the wheel's `.pth` file, as services do. Where the file cannot
be made or opened (no /proc, another user id) the recorder says that children go uncounted. A child writes only into a
file that proves to be such a log: the number in the variable may have become any other open file of the parent.
"""

from __future__ import annotations

import contextlib
import os

VARIABLE = "CACHEPIPE_WORK_LOG"
MAX_BYTES = 4 << 20
"""Of a log: about 50,000 units of work; what comes later is not written."""
_NAME = "cachepipe-work"
_NOEXEC = 8
"""MFD_NOEXEC_SEAL, without which a hardened kernel (`vm.memfd_noexec=2`) makes no such file; others (before 6.3) do not know it."""
_FIELDS = ("benchmarks", "tuning_runs", "triton_compiles", "native_builds")


class ChildWork:
    """The parent's side."""

    def __init__(self) -> None:
        self._fd = -1
        self._pid = 0
        self._position = 0
        self._rest = b""

    def open(self) -> None:
        """Makes the log and names it to children that are started from now on."""
        if self._fd < 0 or self._pid != os.getpid():
            if not hasattr(os, "memfd_create"):
                return
            self._fd = _new_log()
            if self._fd < 0:
                return
            self._pid, self._position, self._rest = os.getpid(), 0, b""
        os.environ[VARIABLE] = f"/proc/{self._pid}/fd/{self._fd}"

    @property
    def is_open(self) -> bool:
        """Children that are started now can write into the log."""
        return self._fd >= 0 and os.access(f"/proc/{self._pid}/fd/{self._fd}", os.W_OK)

    @property
    def is_full(self) -> bool:
        """Work may have been done that is not in the log."""
        return self._position >= MAX_BYTES

    def take(self) -> list[tuple[str, str]]:
        """Returns (field of `Work`, name) of what was written since the last call; nothing in a fork of the parent."""
        if self._fd < 0 or self._pid != os.getpid():
            return []
        try:
            data = os.pread(self._fd, 2 * MAX_BYTES, self._position)  # the last line may lie beyond the bound
        except OSError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        words = [line.decode(errors="replace").partition(" ") for line in lines]
        return [(field, what) for field, _, what in words if field in _FIELDS]

    def close(self) -> None:
        """Stops naming the log; the file itself stays open, for the children that know it."""
        if self._pid == os.getpid() and os.environ.get(VARIABLE) == f"/proc/{self._pid}/fd/{self._fd}":
            del os.environ[VARIABLE]


def _new_log() -> int:
    """Returns a new file in memory; -1: none can be made."""
    for flags in (os.MFD_CLOEXEC | _NOEXEC, os.MFD_CLOEXEC):
        with contextlib.suppress(OSError):
            return os.memfd_create(_NAME, flags)
    return -1


class ChildSink:
    """The child's side: writes what it counts; a log that is full or gone is no error."""

    def __init__(self, path: str) -> None:
        self._path = path

    def on_work(self, field: str, what: str) -> None:
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            return
        try:
            is_log = os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}")
            if is_log and os.fstat(fd).st_size < MAX_BYTES:
                os.write(fd, f"{field} {' '.join(what.split())[:200]}\n".encode())
        except OSError:
            pass
        finally:
            os.close(fd)

    def on_layer_lookup(self, layer: str, is_hit: bool, key: str) -> None:
        """Lookups are the parent's: what a child looks up, it looks up for the parent's miss."""


def count_in_child(path: str) -> None:
    """Counts from now on in this process, which is a child of a recorded one."""
    from cachepipe.adapters.torch_work import WorkCounter

    WorkCounter(ChildSink(path)).install()
