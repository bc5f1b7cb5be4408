"""Calls an entry from a restored artifact, as a service does: the one proof that build and verify share.

1 the folder at which services restore is empty
2 `cachepipe restore … -- worker` in a fresh process: the code that services use, without help from this process
3 every shape bucket, in the opposite order; afterwards outputs are compared with eager
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cachepipe.adapters.workdir import EntryDir
from cachepipe.domain.engine import AOT, JIT, engine_folder
from cachepipe.domain.entry import EntrySpec
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.gates import GateLimits, Reference, judge
from cachepipe.workflows.jobs import Shop, in_order, run_job, worker_count
from cachepipe.workflows.quiet_gpu import turn

FALLBACK = "fallback"
"""The step that proves the tree of an entry whose calls native functions answer."""
RESTORE_DEADLINE_S = 600
"""A proof may wait for a slow store; a service has its own, shorter limit."""


@dataclass(frozen=True)
class RestoreSource:
    """What is restored."""

    store_url: str
    release: str
    choice: Sequence[str]
    """`--lock FILE` or `--channel NAME`."""


def prove_entry(
    shop: Shop, spec: EntrySpec, entry: EntryDir, source: RestoreSource, step: str, *, search_path: str = ""
) -> EntryEvidence:
    """Returns the evidence of a process that restored the artifact and called every shape bucket of one entry.

    Args:
        shop: where; the restored folder is left in place.
        spec: the entry.
        entry: gets job, log and evidence.
        source: store, release, lock file or channel.
        step: `prove`, or `verify`, which also records the components of every key.
        search_path: PATH without compilers; empty: as it is.

    Raises:
        BuildError: restore refused, or the worker died, hung or reported an error.
        Interrupted: SIGINT or SIGTERM.
    """
    # 1
    shop.root.remove()
    # 2
    restore = restore_words(shop, source)
    extra = {"PATH": search_path or os.environ.get("PATH", os.defpath), **store_variables(source.store_url)}
    # 3
    job = replace(
        shop.job(step, spec, entry.pending(step)), compare_with_eager=True, record_components=step == "verify"
    )
    job = in_order(job, tuple(reversed(job.bucket_order)))
    if spec.engine == AOT:
        job = replace(job, engine=engine_folder(entry.path.name))
    with turn(shop, spec):
        run_job(shop, job, step, entry, shop.environment(worker_count(), extra), restore)
    return entry.finish(step)


def store_variables(store_url: str) -> dict[str, str]:
    """Returns what `restore` needs of this process's environment to read the store; the worker gets none of it.

    Keys of a store are no business of the code that a manifest names, which runs in the worker.
    """
    if not store_url.startswith("s3://"):
        return {}
    proxies = ("http_proxy", "https_proxy", "no_proxy")
    given = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("AWS_", "CACHEPIPE_S3_", "SSL_CERT_")) or name.lower() in proxies
    }
    return {**given, "HOME": os.path.expanduser("~")}  # profiles and logins lie there


def worker_prefix(shop: Shop, store_url: str) -> tuple[str, ...]:
    """Returns the words that take `store_variables` from the worker."""
    names = sorted(set(store_variables(store_url)) - {"HOME"})
    return ("env", *(f"--unset={name}" for name in names), f"HOME={shop.work.home}") if names else ()


def restore_words(shop: Shop, source: RestoreSource) -> tuple[str, ...]:
    """Returns the command that restores and becomes the words after it."""
    return (
        *(sys.executable, "-m", "cachepipe", "restore", source.store_url, "--name", source.release, *source.choice),
        *("--dest", str(shop.root.path), "--strict", "--no-attach", "--deadline", str(RESTORE_DEADLINE_S)),
        *("--state-dir", str(shop.work.empty("state")), "--", *worker_prefix(shop, source.store_url)),
    )


class Proof(NamedTuple):
    """A proof, and the entry as it was called in it."""

    spec: EntrySpec
    evidence: EntryEvidence


def prove_engines(
    shop: Shop, spec: EntrySpec, entry: EntryDir, source: RestoreSource, step: str, *, search_path: str = ""
) -> tuple[Proof, ...]:
    """Returns the proofs of an entry: with the engine `aot` first of its tree alone, to which calls fall back, then of itself.

    Raises:
        As `prove_entry`.
    """
    found = []
    for one, name in ways(spec, step):
        found.append(Proof(one, prove_entry(shop, one, entry, source, name, search_path=search_path)))
    return tuple(found)


def judge_proofs(
    limits: GateLimits, spec: EntrySpec, evidences: Sequence[EntryEvidence], references: Sequence[Reference]
) -> tuple[str, ...]:
    """Returns every violation of the proofs of an entry; they are its last evidences, as `prove_engines` gave them."""
    specs = [one for one, _ in ways(spec, "")]
    proofs = zip(specs, evidences[-len(specs) :], strict=True)
    return tuple(text for one, evidence in proofs for text in judge(limits, one, evidence, references))


def ways(spec: EntrySpec, step: str) -> tuple[tuple[EntrySpec, str], ...]:
    """Returns how an entry is proved: as it is in `step`, with the engine `aot` before that by its tree alone."""
    own = ((spec, step),)
    return own if spec.engine == JIT else ((replace(spec, engine=JIT), FALLBACK), *own)
