"""The steps of the soak, taken by a publisher that lives long and tells what it weighs, or by processes that end in the middle."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from cachepipe.adapters.store import Store
from cachepipe.domain.collect import Floors
from cachepipe.errors import CachepipeError
from cachepipe.workflows import channels, collect, publish, serve
from tests.support import s3
from tests.support.restoring import REPOSITORY, packed_release, tree_files

FLOORS = Floors(unfinished_s=0.0, published_s=0.0, versions=2, pin_s=0.0, tomb_s=60.0)
"""One step at a time: what a killed one left is nobody's, and only what is current, or was until just now, stays."""
ROOM_BYTES = 3000
"""Of a full disk: a limit on file sizes stands for it, so that a write fails in the middle."""


class Answer(NamedTuple):
    error: str
    """Class of the error that a step ended with, or empty."""
    rss_kib: int
    open_files: int


def take(store: Store, root: str, step: str, number: int, has_room: bool = True) -> None:
    """Takes one step: `publish` number so and so, `promote` it, or `gc`."""
    now = datetime.now(timezone.utc)
    if step == "promote":
        channels.promote(store, "demo", "candidate", "stable", None, now)
    elif step == "gc":
        collect.gc(store, floors=FLOORS, deletes=True)
    else:
        with tempfile.TemporaryDirectory() as work:
            packed, _ = packed_release(Path(work), "demo", root, tree_files(root, number))
            limit_file_sizes(has_room)
            publish.publish(store, "demo", "candidate", packed, now)


def limit_file_sizes(has_room: bool) -> None:
    if not has_room:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, ROOM_BYTES))


def start_service(words: list[str], log: str, has_room: bool) -> None:
    """Becomes the service `true` by the code of `cachepipe restore`; its one line goes to `log`."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
    limit_file_sizes(has_room)
    os._exit(serve.run([*words, "--", "true"]))


class Publisher:
    """A process that takes the steps that it is asked for, all in one life."""

    def __init__(self, url: str, root: str, environment: Mapping[str, str]) -> None:
        words = [sys.executable, "-c", "from tests.support.soak import serve_steps; serve_steps()", url, root]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True, bufsize=1
        )

    def ask(self, step: str, number: int) -> Answer:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([step, number]) + "\n")
        self._process.stdin.flush()
        return Answer(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def serve_steps() -> None:
    """Answers until stdin ends."""
    store, root = s3.opened(sys.argv[1]), sys.argv[2]
    for line in sys.stdin:
        error = ""
        try:
            take(store, root, *json.loads(line))
        except CachepipeError as found:
            error = type(found).__name__
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        rss_kib = pages * resource.getpagesize() // 1024
        print(json.dumps(Answer(error, rss_kib, len(os.listdir("/proc/self/fd")))), flush=True)


class Mirror:
    """A store's objects in a folder, for the checker that knows the layout alone; a folder store is its own.

    All but the hints never changes, so only what is new is read, and what has another size; index versions are not even listed.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        self._store, self.folder, self._is_own = store, folder, store.url == f"file://{folder}"
        self._versions = {"candidate": 0, "stable": 0}

    def refresh(self) -> None:
        if self._is_own:
            return
        for name in ("artifacts", "pins", "tombs"):
            sizes = {found.key: found.size_bytes for found in self._store.list_objects(f"v1/{name}/")}
            for path in (self.folder / "v1" / name).rglob("*"):
                if path.is_file() and sizes.get(str(path.relative_to(self.folder))) != path.stat().st_size:
                    path.unlink()
            for key in sizes:
                if not (self.folder / key).exists():
                    self._copy(key)
        for channel in self._versions:
            place = f"v1/index/demo/{channel}"
            while self._copy(f"{place}/{self._versions[channel] + 1:010d}.dsse.json"):
                self._versions[channel] += 1
            self._copy(f"{place}/hint")

    def refresh_wholly(self) -> None:
        """Reads every object there is, whatever its name."""
        if not self._is_own:
            shutil.rmtree(self.folder)
            for key in self._store.list(""):
                self._copy(key)

    def _copy(self, key: str) -> bool:
        data = self._store.get(key, 1 << 30)
        if data is not None:
            (self.folder / key).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / key).write_bytes(data)
        return data is not None
