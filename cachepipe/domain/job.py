"""What a worker process is told to do, as one JSON file; it answers with an `EntryEvidence` file."""

from __future__ import annotations

from dataclasses import dataclass

from cachepipe.domain.entry import EntrySpec

STEPS = ("tune", "settle", "trim", "export", "fallback", "prove", "verify", "eager", "latency")
PROOF_STEPS = ("verify", "prove", "fallback")
"""Processes that started from a restored artifact."""

UNTIMED_CALLS = 2
"""First calls of a timed block that are not for use: they find another process's data in the caches, and tell how long asking
the device takes."""


@dataclass(frozen=True)
class Job:
    step: str
    """One of `STEPS`; `eager` calls the module without torch.compile, `latency` goes on calling as it is told on stdin, `export`
    calls nothing, `fallback` proves the tree of an entry whose native functions are switched off."""
    spec: EntrySpec
    bucket_order: tuple[int, ...]
    """Numbers of the spec's shape buckets in the order of the calls."""
    calls_per_bucket: int
    python_path: tuple[str, ...]
    """Absolute folders, prepended to sys.path."""
    result: str
    """Absolute path of the `EntryEvidence` file; written whole or not at all."""
    root: str
    """The cache folder, `<root>/inductor` and `<root>/triton/0` below it; watched for new files."""
    compare_with_eager: bool
    """Call eager after the counts were taken, and compare outputs (and gradients of a training entry)."""
    record_components: bool
    """Collect the named components of every cache key."""
    bundle: str = ""
    """Absolute path of a file that gets torch's own bundle of the cache (`save_cache_artifacts`); empty: none is made."""
    engine: str = ""
    """Folder of the entry's native functions, relative to `root`; of entries with the engine `aot`.
    Where it is named, the export makes them and every other step calls them."""
    description: str = ""
    """Absolute path of a description of the module, place → text; of entries with the engine `aot`. Where it is named, `eager`
    writes it and `export`, another process, finds by it what differs from process to process."""

    @property
    def is_served(self) -> bool:
        """Tells whether torch compiles as in a service."""
        return self.step in PROOF_STEPS
