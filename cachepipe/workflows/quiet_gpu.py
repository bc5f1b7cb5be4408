"""Keeps a build's timings honest: on a GPU nothing is tuned unless it is quiet before and meanwhile.

1 turn: builds of this machine share the GPU, except while one tunes
2 before: no other process uses it
3 meanwhile: it is sampled
4 after: what disturbed it refuses the step, unless `--allow-noisy`; the samples' summary goes into the statement
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cachepipe.adapters.gpu import visible_gpus
from cachepipe.adapters.gpu_turn import gpu_turn
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
_UNKNOWN = "nobody knows whether the GPU is quiet"


@contextmanager
def turn(shop: Shop, spec: EntrySpec, is_alone: bool = False) -> Iterator[None]:
    """Holds the GPU for a step, shared with other builds or alone; on a CPU, or without NVML, there is no turn to take."""
    gpus = visible_gpus(os.environ) if spec.device == "cuda" else None
    if gpus is None or not gpus.visible:
        yield
        return

    def on_wait() -> None:
        shop.progress.say(f"waiting: {spec.id}: another build uses the GPU")

    with gpu_turn(gpus.visible[0].uuid, is_alone, on_wait):
        yield


def tuned_quietly(
    shop: Shop,
    spec: EntrySpec,
    step: str,
    entry: EntryDir,
    tune: Callable[[], EntryEvidence],
    *,
    is_alone: bool = True,
) -> EntryEvidence:
    """Returns what `tune` gives, if it tuned nothing or the GPU was quiet; on a CPU nothing is watched.

    Args:
        shop: where; with `allows_noisy` a noise is only a warning.
        spec: the entry.
        step: its name in files and messages.
        entry: gets `<step>.gpu`, the summary of the samples.
        tune: runs the step; called again if it shared the GPU, tuned after all and was disturbed.
        is_alone: False: most likely it tunes nothing, and other builds may go on.

    Raises:
        BuildError: the GPU was not quiet; the step and what disturbed it are named.
    """
    if spec.device != "cuda":
        return tune()
    # 1
    with turn(shop, spec, is_alone), open_watch(os.environ) as watch:
        if watch is None:
            shop.progress.say(f"note: {spec.id}: NVML does not answer: {_UNKNOWN}")
            return tune()
        # 2
        strangers = watch.strangers_before() if is_alone else 0
        before = (f"{strangers} other process{'es' if strangers > 1 else ''} used it before",) if strangers else ()
        if before and not shop.allows_noisy:
            raise _noisy(spec, step, before)
        # 3
        with watch.sampling():
            evidence = tune()
        entry.write(f"{step}.gpu", canonical_bytes({"driver": watch.driver, **summary(watch.samples)}))
        found = (*before, *noises(watch.samples))
    # 4
    if evidence.work.benchmarks + evidence.work.tuning_runs == 0:
        return evidence
    if not watch.samples:
        shop.progress.say(f"note: {spec.id}: {step}: NVML gave no sample: {_UNKNOWN}")
    if not found:
        return evidence
    if not is_alone:
        return tuned_quietly(shop, spec, step, entry, tune)
    if not shop.allows_noisy:
        raise _noisy(spec, step, found)
    shop.progress.say(f"warning: {_noisy(spec, step, found)}")
    return evidence


def _noisy(spec: EntrySpec, step: str, found: tuple[str, ...]) -> BuildError:
    return BuildError(spec.id, step, f"the GPU is not quiet enough to tune: {'; '.join(found)}", hint=HINT)


def gpu_facts(entry: EntryDir, rounds: int) -> dict[str, Json]:
    """Returns step → summary of its samples, of the steps that were watched."""
    steps = ("tune", *(f"settle-{number}" for number in range(1, rounds + 1)), "export")
    found = {step: entry.read(f"{step}.gpu") for step in steps}
    return {step: json.loads(data) for step, data in found.items() if data is not None}
