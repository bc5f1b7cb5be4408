"""Whether evidence shows a warm start: the one verdict that every form of a report and its exit code give.

A release is warm if each of its entries was called in a process that restored it, at every shape bucket, and each such process
looked up, hit every time, did no work of a build and gave eager's outputs. What is missing, or could not be counted, proves nothing
and is a fault like any other. Gates play no part: a gate may allow a compile, which makes a start acceptable, not warm; what a gate refused is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from cachepipe.domain.engine import LAYER
from cachepipe.domain.entry import bucket_label
from cachepipe.domain.evidence import BucketEvidence, EntryEvidence, Work
from cachepipe.domain.job import PROOF_STEPS

BUILD_WORK = (
    *("benchmarks", "tuning_runs", "triton_compiles", "ptxas_runs"),
    *("native_builds", "compiler_runs"),
)
"""Fields of `Work` that are 0 on a warm start. Version queries, and what no cache can hold (CUDA graphs), are none of a build."""
FREE_WORK = ("worker_kernels", "graph_captures")
"""Kinds of `Uncounted` on which nothing depends: no gate limits them."""
OURS = "cachepipe: "
"""Begins a line that cachepipe says inside of a tool that torch runs."""
WARM, NOT_WARM, NOT_PROVED = "warm: every lookup hit", "not warm", "not proved: not restored yet"


@dataclass(frozen=True)
class Fault:
    """One reason why the evidence does not show a warm start."""

    entry: str
    """Empty for what gates refused."""
    shape_bucket: str
    """Empty for what concerns a whole process."""
    step: str
    text: str
    is_lookup: bool = False
    """A lookup that did not hit; `explain` has its cause."""

    def __str__(self) -> str:
        return ": ".join(
            part for part in (" · ".join(filter(None, (self.entry, self.shape_bucket))), self.text) if part
        )


@dataclass(frozen=True)
class Verdict:
    faults: tuple[Fault, ...]
    is_proved: bool
    """Every entry was called in a restored process."""

    @property
    def is_ok(self) -> bool:
        return self.is_proved and not self.faults

    @property
    def words(self) -> str:
        return WARM if self.is_ok else NOT_WARM if self.is_proved else NOT_PROVED

    def at(self, entry: str, shape_bucket: str) -> tuple[Fault, ...]:
        """Returns the faults of one shape bucket; of a whole process with an empty one."""
        return tuple(fault for fault in self.faults if (fault.entry, fault.shape_bucket) == (entry, shape_bucket))


def verdict_of(entries: Mapping[str, Mapping[str, EntryEvidence]], violations: Sequence[str] = ()) -> Verdict:
    """Returns the verdict on a release.

    Args:
        entries: entry → step → evidence of that step's process.
        violations: what the gates of a build or a verification refused.
    """
    faults: list[Fault] = []
    for entry, steps in entries.items():
        faults += [
            Fault(entry, "", step, f"{step} stopped: {error_words(one.error)}")
            for step, one in steps.items()
            if one.error
        ]
        proofs = [steps[step] for step in PROOF_STEPS if step in steps]
        if not proofs:
            faults.append(Fault(entry, "", "", "no restored process is among the evidence"))
        wanted = dict.fromkeys(bucket_label(row.shape_bucket) for one in steps.values() for row in one.shape_buckets)
        graphs = _graphs(steps)
        for proof in proofs:
            faults += _proof_faults(proof, wanted, graphs)
    faults += [Fault("", "", "", f"refused: {text}") for text in violations]
    is_proved = bool(entries) and all(any(step in steps for step in PROOF_STEPS) for steps in entries.values())
    return Verdict(tuple(dict.fromkeys(faults)), is_proved)


def _graphs(steps: Mapping[str, EntryEvidence]) -> int:
    """Returns how many graphs the builder's last process left, all shape buckets together: the order of calls moves them."""
    built = next((steps[step] for step in ("trim", "settle", "tune") if step in steps), None)
    return sum(row.graphs for row in built.shape_buckets) if built else 0


def _proof_faults(proof: EntryEvidence, wanted: Iterable[str], graphs: int) -> list[Fault]:
    called = {bucket_label(row.shape_bucket): row for row in proof.shape_buckets}
    found = [
        Fault(proof.entry, label, proof.step, "was not called in the restored process")
        for label in wanted
        if label not in called or called[label].calls < 1
    ]
    found += [
        Fault(proof.entry, one.shape_bucket, proof.step, _lookup_words(one.layer, one.outcome, one.reason), True)
        for one in proof.lookups
        if one.outcome != "hit"
    ]
    looked_up = {one.shape_bucket for one in proof.lookups}
    for label, row in called.items():
        found += [Fault(proof.entry, label, proof.step, text) for text in _bucket_faults(row, label in looked_up)]
    shown = any(work_faults(row.work) for row in called.values())
    found += [Fault(proof.entry, "", proof.step, text) for text in _process_faults(proof, graphs, shown)]
    return found


def _lookup_words(layer: str, outcome: str, reason: str) -> str:
    return f"{layer} {outcome}" + (f" ({reason})" if reason else "")


def _bucket_faults(row: BucketEvidence, has_lookups: bool) -> list[str]:
    found = [*row.problems, *work_faults(row.work)]
    if row.is_close is False:
        found.append(f"outputs differ from eager by up to {row.max_abs_diff}")
    if row.is_close is None:
        found.append("outputs were not compared with eager")
    if row.graphs and not has_lookups:
        found.append(f"{row.graphs} graphs were traced, and nothing was looked up")
    return found


def error_words(error: str) -> str:
    """Returns an error in the words that help: torch quotes whole command lines of a compiler around what cachepipe says there."""
    ours = next((line for line in error.splitlines() if line.startswith(OURS)), "")
    return f"{error.partition(':')[0]}: {ours.removeprefix(OURS)}" if ours else error.strip()


def work_faults(work: Work) -> list[str]:
    """Returns the work of a build that a restored process did, in one line of words; [] for none."""
    counts = [
        f"{count} {name.replace('_', ' ')}" for name, count in asdict(work).items() if name in BUILD_WORK and count
    ]
    return [f"work was done: {', '.join(counts)}"] if counts else []


def _process_faults(proof: EntryEvidence, graphs: int, is_work_shown: bool) -> list[str]:
    found = []
    if not proof.shape_buckets:
        found.append("no shape bucket was called")
    if not proof.lookups:
        found.append("nothing was looked up")
    traced = sum(row.graphs for row in proof.shape_buckets)
    is_traced = not any(one.layer == LAYER for one in proof.lookups)  # native functions leave no graph
    if is_traced and traced < graphs:
        found.append(f"{traced} graphs, {graphs} were built: something ran eager")
    named = [item.what or item.kind for item in proof.work_items if item.kind in BUILD_WORK]
    named += [*proof.tuned_kernels, *(kernel.name for kernel in proof.tuned)]
    if not is_work_shown:
        found += work_faults(proof.work)
        if named and not work_faults(proof.work):
            found.append(f"work was done: {', '.join(dict.fromkeys(named[:8]))}")
    found += [f"could not be counted: {one}" for one in proof.uncounted if one.kind not in FREE_WORK]
    if proof.dropped:
        found.append(f"{proof.dropped} events were dropped: the evidence is not whole")
    return found
