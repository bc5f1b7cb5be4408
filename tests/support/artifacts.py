"""Small real artifacts without torch: a cache tree of a few files, packed as `build` packs, for the store tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cachepipe.adapters.packs import pack_tree, write_blob
from cachepipe.domain.entry import Context, EntrySpec
from cachepipe.domain.fingerprint import Fingerprint, Part
from cachepipe.domain.index import timestamp
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.record import digest_parts
from cachepipe.domain.statement import FORMAT, BucketFacts, EntryRecord, Statement
from cachepipe.domain.ulid import ulid
from cachepipe.workflows.publish import PackedArtifact

NOW = datetime(2026, 11, 30, 10, 0, 0, tzinfo=timezone.utc)
ROOT = "/var/cache/cachepipe/demo"

CPU_PARTS: Mapping[str, str] = {
    "device": "cpu",
    "torch": "2.13.0+cpu",
    "torch_build": "cf30153c4c131c8164ee7798e5022d810682e2cb",
    "torch_debug": "False",
    "torch_cuda": "none",
    "triton": "none",
    "python": "cpython 3.11",
    "platform": "linux",
    "machine": "x86_64",
    "libc": "glibc 2.36",
    "cpu_isa": "avx512",
    "cpu_flags": "avx avx2 avx512bw avx512dq avx512f avx512vl f16c fma",
    "venv": "/opt/venv",
    "compiler": "g++ (Debian 12.2.0-14) 12.2.0",
    "threads": "2",
}
CUDA_PARTS: Mapping[str, str] = {
    **{name: CPU_PARTS[name] for name in ("torch_build", "torch_debug", "python", "platform", "machine", "libc")},
    "device": "cuda",
    "torch": "2.13.0+cu130",
    "torch_cuda": "13.0",
    "triton": "3.7.0",
    "gpu_name": "NVIDIA H200",
    "gpu_capability": "9.0",
    "gpu_cores": "16896",
    "gpu_memory": "140 GiB",
    "gpu_mig": "none",
    "driver": "580.65.06",
}


def parts_of(facts: Mapping[str, str], **changes: str) -> tuple[Part, ...]:
    return tuple(Part(name, value) for name, value in {**facts, **changes}.items())


def fingerprint_of(facts: Mapping[str, str], **changes: str) -> Fingerprint:
    return Fingerprint(parts_of(facts, **changes))


def entry_spec(model: str = "net", device: str = "cpu", sizes: tuple[int, ...] = (1, 8)) -> EntrySpec:
    return EntrySpec(
        model=model,
        dtype="float32",
        mode="max-autotune",
        device=device,
        factory="demo:net",
        args={},
        method="forward",
        call="args",
        fullgraph=True,
        dynamic=False,
        options={},
        eval=True,
        requires_grad=False,
        memory_format="contiguous",
        context=Context("inference_mode", None, "highest", False),
        inputs={"x": {"shape": ["batch", 16], "dtype": "float32"}},
        shape_buckets=tuple({"batch": size} for size in sizes),
        dynamic_dims={},
        train=False,
        loss=None,
        rtol=0.01,
        atol=0.01,
    )


def entry_record(spec: EntrySpec, key_parts: Mapping[str, str] | None = None) -> EntryRecord:
    parts = dict(key_parts or {"factory": "f" * 64, "source:demo.py": "a" * 64})
    return EntryRecord(
        spec=spec,
        key=digest_parts(parts),
        key_parts=parts,
        kinds={"fxgraph": 2, "native": 1},
        shape_buckets=tuple(
            BucketFacts(shape_bucket, 1, 12.0, 0.5, 0.2, 0.0, "d" * 64) for shape_bucket in spec.shape_buckets
        ),
        graph_breaks=0,
        tuning={"benchmarks": 12},
        environment={"matmul_precision": "highest"},
    )


def make_artifact(
    folder: Path,
    number: int = 0,
    facts: Mapping[str, str] = CPU_PARTS,
    release: str = "demo",
    entries: tuple[EntryRecord, ...] | None = None,
) -> PackedArtifact:
    """Returns a packed artifact of a few files; another `number` gives other bytes and a later time."""
    tree, blobs = folder / f"tree-{number}", folder / f"blobs-{number}"
    for place in ("inductor/fxgraph/ab", "inductor/cd", "triton/0/KEY"):
        (tree / place).mkdir(parents=True)
    blobs.mkdir()
    (tree / "inductor/fxgraph/ab/graph").write_bytes(b"graph %d" % number * 50)
    (tree / "inductor/cd/kernel.so").write_bytes(bytes(range(256)) * 40)
    (tree / "triton/0/KEY/kernel.json").write_bytes(b'{"number":%d}' % number)
    names = ("inductor/fxgraph/ab/graph", "inductor/cd/kernel.so", "triton/0/KEY/kernel.json")
    packed = pack_tree(tree, dict.fromkeys(names, (0,)), ROOT, blobs)
    explain = write_blob(b"{}\n", blobs, LIMITS.explain_raw_bytes)
    created = NOW + timedelta(seconds=number)
    statement = Statement(
        format=FORMAT,
        artifact=ulid(created, digest_parts({**facts, "": str(number)}).encode()[:10]),
        release=release,
        root=ROOT,
        created_at=timestamp(created),
        device=facts["device"],
        fingerprint=parts_of(facts),
        entries=entries or (entry_record(entry_spec(device=facts["device"])),),
        packs=packed.packs,
        table=packed.table_blob,
        explain=explain,
        files=len(packed.table.files),
        unpacked_bytes=packed.table.unpacked_bytes,
        tuned_bytes=1_000_000,
        variables={"TORCHINDUCTOR_VEC_ISA_OK": "1"},
        compiler={},
        gates={"min_hit_rate": 1.0},
        builder={"cachepipe": "0.1.0"},
    )
    return PackedArtifact(statement, blobs)


def with_artifact_id(packed: PackedArtifact, artifact: str) -> PackedArtifact:
    return PackedArtifact(dataclasses.replace(packed.statement, artifact=artifact), packed.blobs)
