"""Which files of a tree were opened while a child used it.

    with OpenWatch(root) as watch:
        run_child(…)
    watch.opened()   # {"inductor/ab/cab.py", …}, or None: cannot tell, keep everything

Why inotify and not access times: most file systems are mounted with relatime or noatime. Why not strace: it is not
there in a container and slows the child down.

Source: inotify(7), Linux.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from pathlib import Path
from types import TracebackType

IN_OPEN = 0x20
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_Q_OVERFLOW = 0x4000
IN_ISDIR = 0x40000000
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_HEADER = struct.Struct("iIII")


class OpenWatch:
    """Watches every folder of a tree, those included that appear meanwhile."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._folders: dict[int, str] = {}
        self._opened: set[str] = set()
        self._is_complete = True
        self._fd = -1
        self._stop_read, self._stop_write = -1, -1
        self._thread = threading.Thread(target=self._read, name="openwatch", daemon=True)

    def __enter__(self) -> OpenWatch:
        init = getattr(self._libc, "inotify_init1", None)
        self._fd = init(_FLAGS) if init is not None else -1
        self._stop_read, self._stop_write = os.pipe()
        if self._fd < 0:
            self._is_complete = False
            return self
        self._add("", is_new=False)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._stop_write)
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._stop_read)
        if self._fd >= 0:
            os.close(self._fd)

    def opened(self) -> frozenset[str] | None:
        """Returns the relative paths of the files that were opened; None when some may have been missed.

        Call it after the `with` block: the kernel queues an event before the open returns, so nothing is late.
        """
        return frozenset(self._opened) if self._is_complete else None

    def _add(self, folder: str, is_new: bool) -> None:
        """Watches a folder and all below it; what a new folder holds already may have been opened unseen."""
        path = self._root / folder
        mask = IN_OPEN | IN_CREATE | IN_MOVED_TO
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(path), mask)
        if number < 0:
            # Not a folder any more: nothing to keep. Out of watches (ENOSPC): cannot tell.
            self._is_complete = self._is_complete and not path.is_dir()
            return
        self._folders[number] = folder
        try:
            with os.scandir(path) as items:
                found = [
                    (f"{folder}/{item.name}" if folder else item.name, item.is_dir(follow_symlinks=False))
                    for item in items
                ]
        except FileNotFoundError:
            return  # a temporary folder (Triton writes into one and renames it): nothing to keep
        for name, is_folder in found:
            if is_folder:
                self._add(name, is_new)
            elif is_new:
                self._opened.add(name)

    def _read(self) -> None:
        try:
            self._read_until_stopped()
        except OSError:
            self._is_complete = False  # what is opened from now on goes unseen

    def _read_until_stopped(self) -> None:
        is_stopping = False
        while True:
            if not is_stopping:
                readable, _, _ = select.select([self._fd, self._stop_read], [], [])
                is_stopping = self._stop_read in readable
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                if is_stopping:
                    return
                continue
            self._take(data)

    def _take(self, data: bytes) -> None:
        position = 0
        while position < len(data):
            number, mask, _, length = _HEADER.unpack_from(data, position)
            position += _HEADER.size
            name = os.fsdecode(data[position : position + length].rstrip(b"\0"))
            position += length
            if mask & IN_Q_OVERFLOW:
                self._is_complete = False
            elif number in self._folders and name:
                self._note(mask, f"{self._folders[number]}/{name}".lstrip("/"))

    def _note(self, mask: int, path: str) -> None:
        if not mask & IN_ISDIR:
            # created or renamed into place: opened under another name, and needed all the same
            self._opened.add(path)
        elif mask & (IN_CREATE | IN_MOVED_TO):
            self._add(path, is_new=True)
