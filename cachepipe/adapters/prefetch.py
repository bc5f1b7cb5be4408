"""The first packs, asked for while the file table is still on its way: it takes one round trip less to the finished tree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cachepipe.domain.artifact import Blob
from cachepipe.domain.limits import MIB

AHEAD_BYTES = 20 * MIB
AHEAD_PACKS = 6


class Prefetched:
    """A `fetch` that began before it was called; what failed then is fetched again, as if nothing had been tried."""

    def __init__(self, fetch: Callable[[str], bytes | memoryview], packs: Sequence[Blob]) -> None:
        self._fetch = fetch
        self._found: dict[str, bytes | memoryview] = {}
        self._threads: dict[str, threading.Thread] = {}
        total = 0
        for pack in sorted(packs, key=lambda pack: pack.size_bytes, reverse=True)[:AHEAD_PACKS]:
            total += pack.size_bytes
            if total > AHEAD_BYTES:
                break
            thread = threading.Thread(target=self._run, args=(pack.digest,), name="ahead", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break  # a limit on threads: the fetchers do without
            self._threads[pack.digest] = thread

    def _run(self, digest: str) -> None:
        try:
            self._found[digest] = self._fetch(digest)
        except Exception:  # noqa: BLE001 - of a thread that only tries: the call that needs the pack raises its own
            return

    def __call__(self, digest: str) -> bytes | memoryview:
        """Returns the compressed bytes of a pack; each is given out ahead once.

        Raises:
            Whatever `fetch` raises.
        """
        thread = self._threads.pop(digest, None)
        if thread is not None:
            thread.join()
        found = self._found.pop(digest, None)
        return self._fetch(digest) if found is None else found
