"""What a worker process saw and measured while it called an entry, written as one JSON file per process.

Counts are of work that was really done (calls that were made), never of torch's own counters, which are replayed on
a hit. Seconds are wall time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cachepipe import errors
from cachepipe.domain.phases import Phases
from cachepipe.domain.record import Json

LAYERS = ("engine", "aotautograd", "fxgraph", "native", "tuning", "triton")
RATED = LAYERS[:-1]
"""What a hit rate is made of. Triton's kernels are not: a graph has hundreds, among which its own miss would not show, and each that
misses is a Triton compile, which has a gate of its own.
"""
"""Cache layers in the order of lookup."""


@dataclass(frozen=True)
class Work:
    """Work that a restored start must not do; each is a count of real calls."""

    benchmarks: int = 0
    """Timings of kernel candidates."""
    tuning_runs: int = 0
    """Searches: algorithm selection with benchmarks, coordinate descent."""
    triton_compiles: int = 0
    """Triton compiles that were not served from disk."""
    native_builds: int = 0
    """C++ objects built by the host compiler."""
    compiler_queries: int = 0
    """Runs of the host compiler that only ask for its version."""
    isa_probes: int = 0
    """Processes that load a probe object to test the vector ISA."""
    new_files: int = 0
    """Files written into the cache directory, lock files apart."""
    compiler_runs: int = 0
    """Processes of the host compiler that built something; of each native build, and of Triton's launcher stubs."""
    ptxas_runs: int = 0
    """Processes of ptxas that assembled a kernel."""
    worker_kernels: int = 0
    """Kernels that were handed to torch's compile workers, which look into Triton's cache before they compile."""
    graph_captures: int = 0
    """CUDA graphs recorded; they cannot be cached, so no gate counts them."""

    @property
    def compiles(self) -> int:
        """Kernels compiled and objects built: each is counted at the call and at its process, of which one may be missed."""
        return max(self.triton_compiles, self.ptxas_runs) + max(self.native_builds, self.compiler_runs)

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


CHILD_WORK = "child_work"
"""Kind of `Uncounted`: the work of torch's own child processes, whatever it is."""


@dataclass(frozen=True)
class Uncounted:
    """What could not be counted in a process: a count of 0 there proves nothing."""

    kind: str
    """A field of `Work`, a layer whose lookups are not seen, or `CHILD_WORK`."""
    name: str
    """The private name that this torch lacks."""

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} ({self.name})"


@dataclass(frozen=True)
class Lookup:
    """One cache lookup of one graph."""

    shape_bucket: str
    graph: str
    """torch's compile id, e.g. `0/1`, with `fw`/`bw` when torch names it."""
    layer: str
    outcome: str
    """`hit`, `miss` or `bypass`."""
    key: str = ""
    reason: str = ""
    """torch's own words for a miss or a bypass."""


@dataclass(frozen=True)
class GraphEvidence:
    """One compile, under torch's compile id."""

    graph: str
    shape_bucket: str
    place: str
    """Function, file and line of what was traced: `forward (/srv/model.py:31)`."""
    sizes: Json
    """Input → its sizes; symbolic ones by torch's name."""
    phases: Phases
    """`run_s` is not known per graph and 0."""
    operators: int = 0
    recompile_reason: str = ""
    """The guard that failed, in torch's words; empty for the first compile of a function."""
    failure: str = ""
    """torch's words where the compile ended with an error, or why it captures no CUDA graph."""


@dataclass(frozen=True)
class WorkItem:
    """Work of one kind on one thing, named."""

    kind: str
    """A field of `Work`."""
    what: str
    """Kernel, or object file."""
    graph: str
    """The graph that was being compiled; empty outside of a compile."""
    shape_bucket: str
    count: int = 1
    process: str = ""
    """`child` for work of torch's compile and tuning processes; empty: this process."""


@dataclass(frozen=True)
class TunedKernel:
    """One finished search."""

    name: str
    """Kernel, or operator with the sizes of its inputs."""
    chosen: str
    """The configuration or choice that won."""
    best_ms: float
    baseline: str
    """What it is compared with: the library's kernel, else the first configuration."""
    baseline_ms: float
    candidates: int
    graph: str = ""

    @property
    def gain(self) -> float:
        """Returns baseline ÷ best; 1.0 where nothing was gained."""
        return self.baseline_ms / self.best_ms if self.best_ms > 0 else 1.0


@dataclass(frozen=True)
class KindSize:
    """Files of one kind in a cache folder."""

    files: int
    size_bytes: int


@dataclass(frozen=True)
class OutsideFile:
    """A file that the first calls wrote where no artifact takes it from (field case H10)."""

    path: str
    size_bytes: int
    owner: str
    """What is known to write there, in words; `unknown` otherwise."""


@dataclass(frozen=True)
class Explanation:
    """One answer to "why was this not a hit": a sentence, its cause, its mending."""

    shape_bucket: str
    graph: str
    layer: str
    """A cache layer, `settings` for what differs without a lookup of its own, or `late` for a compile after `ready()`."""
    cause: str
    """`grad mode: built inference_mode, called grad`."""
    fix: str
    components: tuple[str, ...] = ()
    """Names of the differing key components that this explains."""


@dataclass(frozen=True)
class BucketEvidence:
    shape_bucket: Mapping[str, int]
    calls: int
    first_call_s: float
    phases: Phases
    graphs: int
    """Graphs that were compiled or looked up at this shape bucket."""
    graph_breaks: int
    work: Work
    output_digest: str
    max_abs_diff: float | None = None
    """Against eager; None where it was not compared."""
    is_close: bool | None = None
    later_call_s: float = 0.0
    """Median of the calls after the first."""
    problems: tuple[str, ...] = ()
    """What makes this shape bucket unusable, in words: no graph, ran eager, recompile limit, bypass …"""


def kind_of(error: BaseException) -> str:
    """Returns the name of an error's class; a namesake of ours has its module before it (click too has a `UsageError`)."""
    kind = type(error)
    is_namesake = hasattr(errors, kind.__name__) and not isinstance(error, errors.CachepipeError)
    return f"{kind.__module__}.{kind.__name__}" if is_namesake else kind.__name__


def words_of(error: BaseException) -> str:
    """Returns the kind and the words of an error, of a class of the user's too, whose `__str__` may itself fail."""
    try:
        words = str(error)
    except Exception:  # noqa: BLE001 - the user's code, and its error is told all the same
        words = "its words cannot be read"
    return f"{kind_of(error)}: {words}"


@dataclass(frozen=True)
class EntryEvidence:
    """One process that called one entry."""

    entry: str
    step: str
    """`tune`, `settle`, `trim`, `export`, `fallback`, `prove`, `verify` or `eager`."""
    torch_version: str
    shape_buckets: tuple[BucketEvidence, ...]
    lookups: tuple[Lookup, ...]
    work: Work
    tuned_kernels: tuple[str, ...]
    """Names of what was benchmarked."""
    import_s: float
    """Interpreter start to torch imported."""
    build_s: float
    """The factory and the preparation of its module."""
    ready_s: float
    """Interpreter start to the last shape bucket's first call."""
    settings: Mapping[str, str]
    """Ambient torch settings inside the calls."""
    graph_breaks: tuple[str, ...] = ()
    """Reasons with their place in the user's code."""
    components: Json = field(default_factory=dict)
    """Layer/key → named component → [hash, text]; what explains a miss."""
    error: str = ""
    """Not empty: the process stopped with this error; `traceback` has the rest."""
    error_kind: str = ""
    traceback: str = ""
    graphs: tuple[GraphEvidence, ...] = ()
    work_items: tuple[WorkItem, ...] = ()
    tuned: tuple[TunedKernel, ...] = ()
    file_sizes: Mapping[str, KindSize] = field(default_factory=dict)
    """Kind of file → what the cache folder held at the end."""
    outside_files: tuple[OutsideFile, ...] = ()
    explanations: tuple[Explanation, ...] = ()
    """Filled in by `verify`, which has the builder's components."""
    uncounted: tuple[Uncounted, ...] = ()
    dropped: int = 0
    """Events beyond what is kept in memory."""
    device: str = ""
    """`cuda` or `cpu`: one builder may match both targets of a manifest. Empty in evidence that a service gave."""


def layer_counts(evidence: EntryEvidence) -> dict[str, dict[str, int]]:
    """Returns layer → outcome → count of one process."""
    return layer_counts_of(evidence.lookups)


def layer_counts_of(lookups: Iterable[Lookup]) -> dict[str, dict[str, int]]:
    """Returns layer → outcome → count of lookups."""
    counts: dict[str, dict[str, int]] = {}
    for lookup in lookups:
        row = counts.setdefault(lookup.layer, {"hit": 0, "miss": 0, "bypass": 0})
        row[lookup.outcome] += 1
    return counts


def hit_rate(evidence: EntryEvidence) -> float:
    """Returns hits ÷ lookups over the layers of `RATED`; 0 when nothing was looked up."""
    return rate_of(layer_counts(evidence)) or 0.0


def rate_of(layers: Mapping[str, Mapping[str, int]]) -> float | None:
    """Returns hits ÷ lookups over the layers of `RATED`; None when nothing was looked up.

    Args:
        layers: layer → outcome → count.
    """
    rows = [layers[layer] for layer in RATED if layer in layers]
    whole = sum(sum(row.values()) for row in rows)
    return sum(row["hit"] for row in rows) / whole if whole else None
