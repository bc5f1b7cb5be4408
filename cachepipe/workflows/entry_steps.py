"""Steps 2 and 3 of a build, for one entry: from an empty folder to a tree that holds winners only.

1 tune    empty folder: compile and call every shape bucket
2 settle  only if something was tuned: empty folder seeded with the tuning records, compile again; repeat until quiet
3 trim    a fresh process uses the settled tree; what it does not open is dropped
4 eager   the same calls without torch.compile, for comparison
5 export  (export) only with the engine `aot`: native functions that start without a trace

Every step is a process of its own, at the very path at which services restore. A finished step is not done again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cachepipe.adapters.cachetree import CHOICE_SUFFIX, KINDS, kind_of, list_tree, name_cubins_in_full, read_choice
from cachepipe.adapters.execute import resolved_variables
from cachepipe.adapters.openwatch import OpenWatch
from cachepipe.adapters.workdir import BuildRoot, EntryDir
from cachepipe.domain.engine import AOT
from cachepipe.domain.entry import EntrySpec, bucket_label
from cachepipe.domain.evidence import EntryEvidence
from cachepipe.domain.gates import break_in_words, evidence_problems, graph_breaks, kind_problems, refuse
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.record import read_record, record_bytes
from cachepipe.domain.remedies import remedy
from cachepipe.domain.variables import cache_variables, pinned_variables
from cachepipe.errors import BuildError, IntegrityError
from cachepipe.workflows.export import DESCRIPTION, STEP, export_functions, is_described
from cachepipe.workflows.jobs import Shop, run_job, worker_count
from cachepipe.workflows.quiet_gpu import tuned_quietly, turn

MAX_ROUNDS = 3
FACTS = "facts.record"
BUNDLE = "tune.bundle"
KINDS_HINT = (
    "look whether the model differs from process to process (time, random numbers, order of sets), has nothing to compile, "
    "changes TORCHINDUCTOR_CACHE_DIR or removes that folder; else build it again with `--fresh`"
)


@dataclass(frozen=True)
class TreeFacts:
    """What is known of the trees when the steps are finished; written last."""

    tuned_bytes: int
    """Raw bytes of the tune step's tree."""
    settled_bytes: int
    """Raw bytes after the last round, before trim."""
    settle_rounds: int
    dropped_files: int
    """Files that trim dropped."""
    watched: bool
    """False: this system cannot tell which files are opened, so all were kept."""


@dataclass(frozen=True)
class EntryWork:
    """The finished steps of one entry."""

    tree: Path
    kinds: dict[str, int]
    facts: TreeFacts
    tune: EntryEvidence
    settle: EntryEvidence | None
    """The last round; None when nothing had to settle."""
    trim: EntryEvidence
    eager: EntryEvidence
    export: EntryEvidence | None = None
    """Of entries with the engine `aot`."""

    @property
    def evidences(self) -> tuple[EntryEvidence, ...]:
        """Of every step, in their order."""
        steps = (self.tune, self.settle, self.trim, self.eager, self.export)
        return tuple(evidence for evidence in steps if evidence is not None)


def build_entry(
    shop: Shop, spec: EntrySpec, entry: EntryDir, max_graph_breaks: float, siblings: Sequence[Path] = ()
) -> EntryWork:
    """Returns a tree in which nothing is left to tune, trimmed to what a start opens, with the evidence of each step.

    Args:
        shop: where.
        spec: the entry.
        entry: its folder; finished steps in it are used.
        max_graph_breaks: the gate, judged right after tuning since nothing later can mend it.
        siblings: trees of the release's entries so far: a kernel that one of them has is chosen as there.

    Raises:
        BuildError: a step failed; entry, shape bucket and step are named.
        VerificationError: more graph breaks than the gate allows.
        Interrupted: SIGINT or SIGTERM; finished steps are kept.
    """
    # 1
    facts = _finished_facts(entry)
    tune = _tune(shop, spec, entry) if facts is None else _kept(entry, "tune")
    _check_breaks(spec, tune, max_graph_breaks)
    # 2
    settle, rounds = None, 0
    if facts is None:
        settle, rounds = _settle(shop, spec, entry, tune, siblings)
    elif facts.settle_rounds:
        settle = _kept(entry, f"settle-{facts.settle_rounds}")
    # 3
    if facts is None:
        facts = _trim(shop, spec, entry, rounds)
    trim = _kept(entry, "trim")
    # 4
    eager = _eager(shop, spec, entry)
    # 5
    variables = variables_of(spec.device, str(shop.root.path))
    export = export_functions(shop, spec, entry, variables) if spec.engine == AOT else None
    tree = entry.tree(STEP if export else "trim")
    kinds = _kinds(tree)
    problems = kind_problems(spec, kinds)
    if problems:
        raise BuildError(spec.id, "trim", "; ".join(problems), hint=KINDS_HINT)
    return EntryWork(tree, kinds, facts, tune, settle, trim, eager, export)


def _tune(shop: Shop, spec: EntrySpec, entry: EntryDir) -> EntryEvidence:
    done = entry.finished("tune")
    if done is not None:
        return done
    shop.root.clear()
    job = shop.job("tune", spec, entry.pending("tune"))
    if shop.keeps_tuned:
        job = replace(job, bundle=str(entry.path / BUNDLE))
    environment = shop.environment(worker_count(), variables_of(spec.device, job.root))
    evidence = tuned_quietly(shop, spec, "tune", entry, lambda: run_job(shop, job, "tune", entry, environment))
    _check(spec, "tune", evidence)
    return entry.finish("tune", shop.root)


def _settle(
    shop: Shop, spec: EntrySpec, entry: EntryDir, tune: EntryEvidence, siblings: Sequence[Path]
) -> tuple[EntryEvidence | None, int]:
    """Returns the round in which nothing was tuned, and its number; (None, 0) if tune itself tuned nothing."""
    evidence: EntryEvidence | None = None
    last, number = tune, 0
    while last.work.benchmarks + last.work.tuning_runs > 0:
        if number == MAX_ROUNDS:
            kernels = ", ".join(dict.fromkeys(last.tuned_kernels)) or "not named by torch"
            raise BuildError(
                spec.id,
                f"settle-{number}",
                f"still tuning after {number} rounds: {last.work.benchmarks} benchmarks, kernels: {kernels}",
                hint="their choice differs from run to run: pin it by `options`, or use another mode for this model",
            )
        previous, number = f"settle-{number}" if number else "tune", number + 1
        evidence = last = _settle_round(shop, spec, entry, [*siblings, entry.tree(previous)], f"settle-{number}")
    return evidence, number


def _settle_round(shop: Shop, spec: EntrySpec, entry: EntryDir, trees: Sequence[Path], name: str) -> EntryEvidence:
    done = entry.finished(name)
    if done is not None:
        return done

    def compile_again() -> EntryEvidence:
        seed(shop.root, spec.device, trees)
        job = shop.job("settle", spec, entry.pending(name))
        # One compile process: kernels that a pool compiled would be stored for the pool's way to load them as well.
        return run_job(shop, job, name, entry, shop.environment(1, variables_of(spec.device, job.root)))

    evidence = tuned_quietly(shop, spec, name, entry, compile_again, is_alone=False)
    _check(spec, name, evidence)
    return entry.finish(name, shop.root)


def seed(root: BuildRoot, device: str, trees: Sequence[Path]) -> None:
    """Fills the root with what a settle round starts with.

    Args:
        root: is emptied.
        device: the entry's.
        trees: the last is that of the entry's round before; of the others, earlier ones first, come their choices for the same kernels,
            which else would be two choices in two entries of one release.
    """
    *siblings, own = trees
    root.fill(own, lambda path: is_seed(device, path))
    for sibling in reversed(siblings):
        for file in list_tree(sibling):
            there = root.path / file.path
            if file.path.endswith(CHOICE_SUFFIX) and there.exists():
                record = (sibling / file.path).read_bytes()
                if _is_same_search(there.read_bytes(), record):
                    there.write_bytes(record)


def _is_same_search(one: bytes, other: bytes) -> bool:
    """torch ignores a record of another list of configurations, and would search again."""
    hashes = [(read_choice(data) or {}).get("configs_hash") for data in (one, other)]
    return isinstance(hashes[0], str) and hashes[0] == hashes[1]


def is_seed(device: str, path: str) -> bool:
    """Tells whether a settle round starts with a file of the round before it.

    Tuning records always: a round keeps those it was given beside its own, so their union grows, and a fusion that falls
    out as it did in an earlier round finds its record. On a CPU native objects too: they are keyed by source and command, so
    the same ones only save the compiler's time.
    """
    return kind_of(path) in (("tuning", "native") if device == "cpu" else ("tuning",))


def _trim(shop: Shop, spec: EntrySpec, entry: EntryDir, rounds: int) -> TreeFacts:
    source = entry.tree(f"settle-{rounds}" if rounds else "tune")
    shop.root.fill(source)
    name_cubins_in_full(shop.root.path)
    job = replace(
        shop.job("trim", spec, entry.pending("trim")),
        calls_per_bucket=1,
        compare_with_eager=True,
        record_components=True,
    )
    with turn(shop, spec), OpenWatch(shop.root.path) as watch:
        evidence = run_job(shop, job, "trim", entry, shop.environment(1, variables_of(spec.device, job.root)))
    _check(spec, "trim", evidence)
    opened = watch.opened()
    files = [file.path for file in list_tree(shop.root.path)]
    kept = files if opened is None else used_files(files, opened)
    for path in set(files) - set(kept):
        (shop.root.path / path).unlink()
    facts = TreeFacts(
        tuned_bytes=_size(entry.tree("tune")),
        settled_bytes=_size(source),
        settle_rounds=rounds,
        dropped_files=len(files) - len(kept),
        watched=opened is not None,
    )
    entry.finish("trim", shop.root)
    entry.write(FACTS, record_bytes(facts))
    # On a GPU the tuned tree is still compared with the restored one (latency.py).
    for step in (
        *(() if keeps_tuned(shop, spec) else ("tune",)),
        *(f"settle-{number}" for number in range(1, rounds + 1)),
    ):
        entry.drop_tree(step)
    return facts


def keeps_tuned(shop: Shop, spec: EntrySpec) -> bool:
    """Tells whether the tuned tree outlives trim."""
    return shop.keeps_tuned or spec.device == "cuda"


def used_files(files: Collection[str], opened: Collection[str]) -> list[str]:
    """Returns the files that were opened, and those beside one that share its stem.

    Why the stem: a kernel's `.json`, `.cubin` and `.source` belong together, though a start may read two of them only.
    """
    stems = {_stem(path) for path in opened}
    return [path for path in files if path in opened or _stem(path) in stems]


def _stem(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def _eager(shop: Shop, spec: EntrySpec, entry: EntryDir) -> EntryEvidence:
    done = entry.evidence("eager")
    if done is not None and (spec.engine != AOT or is_described(entry)):
        return done
    shop.root.clear()
    job = shop.job("eager", spec, entry.pending("eager"))
    if spec.engine == AOT:
        entry.drop_tree(STEP)  # an export by another description, or an earlier cachepipe's by none
        job = replace(job, description=str(entry.path / DESCRIPTION))
    with turn(shop, spec):
        run_job(shop, job, "eager", entry, shop.environment(1, variables_of(spec.device, job.root)))
    return entry.finish("eager")


def is_settled(entry: EntryDir) -> bool:
    """Tells whether an entry's kernels are chosen: its tree is taken as it is."""
    return _finished_facts(entry) is not None


def _finished_facts(entry: EntryDir) -> TreeFacts | None:
    """Returns the facts of a trimmed tree, None if the tree or what led to it has to be made again."""
    data = entry.read(FACTS)
    if data is None or entry.finished("trim") is None:
        return None
    try:
        facts = read_record(TreeFacts, data, str(entry.path / FACTS), LIMITS.small_file_bytes)
    except IntegrityError:
        return None
    earlier = ("tune", *((f"settle-{facts.settle_rounds}",) if facts.settle_rounds else ()))
    return facts if all(entry.evidence(step) is not None for step in earlier) else None


def _kept(entry: EntryDir, step: str) -> EntryEvidence:
    evidence = entry.evidence(step)
    assert evidence is not None
    return evidence


def variables_of(device: str, root: str) -> dict[str, str]:
    """Returns what a restore would set for a folder."""
    return {**resolved_variables(pinned_variables(device)), **cache_variables(root)}


def _check(spec: EntrySpec, step: str, evidence: EntryEvidence) -> None:
    problems = evidence_problems(spec, evidence)
    if problems:
        shape_bucket, reason = problems[0]
        others = "".join(f"; {label}: {text}" if label else f"; {text}" for label, text in problems[1:8])
        hint = remedy(text for _, text in problems)
        raise BuildError(spec.id, step, f"{reason}{others}", shape_bucket=shape_bucket, hint=hint)


def _check_breaks(spec: EntrySpec, tune: EntryEvidence, limit: float) -> None:
    if graph_breaks(tune) <= limit:
        return
    places = [
        f"{spec.id} · {bucket_label(bucket.shape_bucket)}: {bucket.graph_breaks} graph breaks"
        for bucket in tune.shape_buckets
        if bucket.graph_breaks
    ]
    reasons = [f"{spec.id}: graph break: {text}" for text in dict.fromkeys(map(break_in_words, tune.graph_breaks))]
    refuse([f"{spec.id}: max_graph_breaks: limit {limit:g}, found {graph_breaks(tune)}", *places, *reasons], "tune")


def _kinds(tree: Path) -> dict[str, int]:
    found = Counter(kind_of(file.path) for file in list_tree(tree))
    return {kind: found.get(kind, 0) for kind in KINDS}


def _size(tree: Path) -> int:
    return sum(file.size_bytes for file in list_tree(tree))
