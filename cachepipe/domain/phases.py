"""Where the time of a first call went; apart from the evidence, which a restore does not import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phases:
    """A first call by where its time went, `torch.compile` before it included; the sum is the wall time of both."""

    trace_s: float = 0.0
    """Dynamo: bytecode, guards."""
    lookup_s: float = 0.0
    """Key computation, cache reads, unpickling."""
    load_s: float = 0.0
    """Import of torch's compile stack and of wrappers, loading of native objects and cubins."""
    compile_s: float = 0.0
    """Lowering and compiling: what a miss costs."""
    run_s: float = 0.0
    """Everything else: the kernels themselves."""
    tune_s: float = 0.0
    """Timing of candidates, at compile time or at the first run of a kernel."""
    capture_s: float = 0.0
    """Recording of CUDA graphs, which no cache can hold (field case H7)."""

    def __add__(self, other: Phases) -> Phases:
        return Phases(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))
