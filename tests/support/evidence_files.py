"""Evidence as a build and a verification leave it: a release of two models, one of which missed after a change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cachepipe.adapters.workdir import write_evidence, write_json
from cachepipe.domain.evidence import (
    BucketEvidence,
    EntryEvidence,
    Explanation,
    GraphEvidence,
    KindSize,
    Lookup,
    OutsideFile,
    TunedKernel,
    Work,
    WorkItem,
)
from cachepipe.domain.phases import Phases

ENTRIES = ("bert-base/bfloat16/max-autotune", "reranker/float16/reduce-overhead")
SHAPES: tuple[dict[str, int], ...] = ({"batch": 1, "seq": 128}, {"batch": 8, "seq": 128}, {"batch": 8, "seq": 512})
ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script>"
COLD = (30.1, 34.6, 41.2)
WARM = (1.42, 1.18, 1.31)
EAGER = (0.81, 0.12, 0.34)


def _label(shape: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in shape.items())


def _bucket(shape: dict[str, int], seconds: float, phases: Phases, work: Work) -> BucketEvidence:
    known = phases.trace_s + phases.lookup_s + phases.load_s + phases.tune_s + phases.compile_s + phases.capture_s
    whole = replace(phases, run_s=max(0.0, seconds - known))
    return BucketEvidence(shape, 3, seconds, whole, 1, 0, work, "d", 0.004, True, seconds / 200)


def _phases(step: str, seconds: float) -> Phases:
    if step == "tune":
        return Phases(trace_s=1.6, lookup_s=0.2, tune_s=0.52 * seconds, compile_s=0.38 * seconds)
    if step == "eager":
        return Phases()
    return Phases(trace_s=0.52 * seconds, lookup_s=0.16 * seconds, load_s=0.12 * seconds, capture_s=0.07 * seconds)


def evidence(
    entry: str, step: str, seconds: tuple[float, ...], missed: int | None = None, **changes: Any
) -> EntryEvidence:
    """Returns one process; `missed` is the number of the shape bucket whose outer lookup missed."""
    outcome = {"tune": "miss"}.get(step, "hit")
    buckets, lookups, graphs = [], [], []
    for number, shape in enumerate(SHAPES):
        label, phases = _label(shape), _phases(step, seconds[number])
        work = Work(benchmarks=46, tuning_runs=9, triton_compiles=25) if step == "tune" else Work()
        found = dict.fromkeys(("aotautograd", "fxgraph", "triton"), outcome)
        if number == missed:
            found["aotautograd"] = "miss"
            work = Work(triton_compiles=2)
        buckets.append(_bucket(shape, seconds[number], phases, work))
        if step == "eager":
            continue
        lookups += [Lookup(label, f"0/{number}", layer, state, f"{layer}{number}") for layer, state in found.items()]
        reason = (
            ""
            if number == 0
            else f"0/0: tensor 'input_ids' size mismatch at index 0. expected 1, actual {shape['batch']}"
        )
        place = "forward (/srv/app/service/models.py:31)"
        graphs.append(
            GraphEvidence(f"0/{number}", label, place, {"input_ids": list(shape.values())}, phases, 214, reason)
        )
    return EntryEvidence(
        entry=entry,
        step=step,
        torch_version="2.13.0",
        shape_buckets=tuple(buckets),
        lookups=tuple(lookups),
        work=sum((bucket.work for bucket in buckets), Work()),
        tuned_kernels=(),
        import_s=1.8,
        build_s=0.6,
        ready_s=2.4 + sum(seconds),
        settings={"grad mode": "inference_mode", "matmul precision": "high", "threads": "8"},
        graphs=tuple(graphs),
        **changes,
    )


def tuned() -> tuple[TunedKernel, ...]:
    rows = (
        ("mm [1024, 768]x[768, 3072]", "triton_mm_17: BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8", 0.0412, "mm", 0.0587, 24),
        ("bmm [96, 128, 64]x[96, 64, 128]", "triton_bmm_4: BLOCK_M=64, BLOCK_N=128, BLOCK_K=32", 0.0193, "bmm", 0.0221, 20),
        ("triton_red_fused_add_native_layer_norm_3 (coordinate descent)", "XBLOCK=4, R0_BLOCK=1024, num_warps=4", 0.0061,
         "start: XBLOCK=1, R0_BLOCK=1024, num_warps=8", 0.0083, 46),
        ("addmm [1024, 768]", "addmm", 0.0302, "addmm", 0.0302, 22),
    )  # fmt: skip
    return tuple(TunedKernel(*row) for row in rows)


def sizes(factor: float) -> dict[str, KindSize]:
    rows = {
        "triton": (96, 4_210_000),
        "fxgraph": (6, 1_120_000),
        "aotautograd": (6, 410_000),
        "wrapper": (6, 260_000),
        "tuning": (21, 9_800),
    }
    return {kind: KindSize(files, int(size * factor)) for kind, (files, size) in rows.items()}


def write_release(
    folder: Path, *, has_misses: bool = True, warm: tuple[float, ...] = WARM, factor: float = 1.0
) -> Path:
    """Writes the evidence of a whole release into a folder and returns it."""
    why = Explanation(
        _label(SHAPES[1]), "0/1", "aotautograd", "attribute renamed: encoder → enc",
        "build again: the names of attributes are part of the key", ("aot_config",),
    )  # fmt: skip
    hostile = Explanation(
        _label(SHAPES[1]), "0/1", "aotautograd", f"inductor config {ATTACK}: built 1, called 2", "no | pipe * star", ()
    )
    for number, entry in enumerate(ENTRIES):
        is_missed = has_misses and number == 1
        cold = tuple(seconds * (1 - 0.2 * number) for seconds in COLD)
        write_evidence(folder, evidence(entry, "tune", cold, tuned=tuned(), file_sizes=sizes(9.5)))
        write_evidence(folder, evidence(entry, "eager", EAGER))
        restored = tuple(seconds * (6.1 if is_missed and place == 1 else 1.0) for place, seconds in enumerate(warm))
        changes: dict[str, Any] = {"file_sizes": sizes(factor)}
        if is_missed:
            changes["explanations"] = (why, hostile)
            changes["work_items"] = (
                WorkItem("triton_compiles", "triton_poi_fused_gelu_2", "0/1", _label(SHAPES[1]), 2, "child"),
            )
            changes["outside_files"] = (
                OutsideFile(
                    "/home/app/.nv/ComputeCache/7/c/9f2e",
                    18_432,
                    "the CUDA driver's cache of assembled kernels (CUDA_CACHE_PATH)",
                ),
            )
        write_evidence(folder, evidence(entry, "verify", restored, 1 if is_missed else None, **changes))
    refused = [
        "reranker/float16/reduce-overhead: min_hit_rate: limit 1, found 0.833 (aotautograd miss at batch=8,seq=128)"
    ]
    write_json(
        folder / "verify.cuda.json",
        {
            "verify": {
                "release": "text-encoder",
                "artifact": "01JT3V9X5QZ7N2M4K6R8S0W1YA",
                "violations": refused if has_misses else [],
            }
        },
    )
    write_json(
        folder / "build.cuda.json", {"build": {"release": "text-encoder", "packed_bytes": int(661_000 * factor)}}
    )
    return folder
