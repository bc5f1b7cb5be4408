"""Keeps a build's timings honest: on a GPU nothing is tuned unless it is quiet before and meanwhile.

1 before: no other process uses the GPU
2 meanwhile: it is sampled
3 after: what disturbed it refuses the step, unless `--allow-noisy`; the samples' summary goes into the statement
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from cachepipe.adapters.gpu_watch import open_watch
from cachepipe.adapters.workdir import EntryDir
from cachepipe.domain.entry import EntrySpec
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.quiet import noises, summary
from cachepipe.domain.record import Json, canonical_bytes
from cachepipe.errors import BuildError
from cachepipe.workflows.jobs import Shop

HINT = (
    "the tuned choice would be one of chance: stop what else uses the GPU (`nvidia-smi` lists it), let it cool down, "
    "or accept the noise with `--allow-noisy`"
)


def tuned_quietly(
    shop: Shop, spec: EntrySpec, step: str, entry: EntryDir, tune: Callable[[], EntryEvidence]
) -> EntryEvidence:
    """Returns what `tune` gives, if it tuned nothing or the GPU was quiet; on a CPU nothing is watched.

    Args:
        shop: where; `allows_noisy` only warns.
        spec: the entry.
        step: its name in files and messages.
        entry: gets `<step>.gpu`, the summary of the samples.
        tune: runs the step.

    Raises:
        BuildError: the GPU was not quiet; the step and what disturbed it are named.
    """
    if spec.device != "cuda":
        return tune()
    with open_watch(os.environ) as watch:
        if watch is None:
            shop.progress.say(f"note: {spec.id}: NVML does not answer: nobody knows whether the GPU is quiet")
            return tune()
        # 1
        strangers = watch.strangers_before()
        if strangers:
            _refuse(shop, spec, step, f"{strangers} other processes use it")
        # 2
        with watch.sampling():
            evidence = tune()
        # 3
        entry.write(f"{step}.gpu", canonical_bytes({"driver": watch.driver, **summary(watch.samples)}))
        found = noises(watch.samples)
        if found and evidence.work.benchmarks + evidence.work.tuning_runs > 0:
            _refuse(shop, spec, step, "; ".join(found))
        return evidence


def _refuse(shop: Shop, spec: EntrySpec, step: str, reason: str) -> None:
    text = f"the GPU is not quiet enough to tune: {reason}"
    if not shop.allows_noisy:
        raise BuildError(spec.id, step, text, hint=HINT)
    shop.progress.say(f"warning: {spec.id}: {step}: {text}")


def gpu_facts(entry: EntryDir, rounds: int) -> dict[str, Json]:
    """Returns step → summary of its samples, of the steps that were watched."""
    steps = ("tune", *(f"settle-{number}" for number in range(1, rounds + 1)))
    found = {step: entry.read(f"{step}.gpu") for step in steps}
    return {step: json.loads(data) for step, data in found.items() if data is not None}
