"""Manifests and model folders for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FULL = """\
version: 1
name: text-encoder
cache_root: /var/cache/cachepipe
store: s3://ml-cache/prod
channel: candidate
python_path: [.]
targets:
  - {device: cuda, gpu: NVIDIA H200}
  - {device: cpu}
models:
  - name: bert-base
    factory: service.models:bert
    args: {layers: 12}
    sources: [service/**/*.py]
    dtypes: [bfloat16]
    modes: [max-autotune]
    compile: {fullgraph: true, dynamic: false, options: {}}
    eval: true
    requires_grad: false
    method: forward
    call: kwargs
    context: {grad: inference_mode, autocast: null, matmul_precision: highest, deterministic: false}
    memory_format: contiguous
    inputs:
      input_ids:      {shape: [batch, seq], dtype: int64, low: 0, high: 30000}
      attention_mask: {shape: [batch, seq], dtype: int64, fill: 1}
    shape_buckets:
      - {batch: [1, 8], seq: [128, 512]}
      - {batch: 32, seq: 128}
    dynamic_dims: {}
    train: false
    tolerance: {rtol: 0.02, atol: 0.02}
  - name: image-service
    command: [python, warmup.py]
    timeout: 30m
    sources: [warmup.py]
gates: {min_hit_rate: 1.0, max_tuning_runs: 0, max_compiles: 0, max_graph_breaks: 0, min_speedup: 2.0}
trust: {statement_key: kms:alias/cachepipe-build, index_key: kms:alias/cachepipe-index}
"""
"""The manifest of the design, with every field."""


def with_line(old: str, new: str) -> str:
    """Returns `FULL` with one text replaced, which must occur exactly once."""
    assert FULL.count(old) == 1, old
    return FULL.replace(old, new)


def small_manifest(**changes: Any) -> dict[str, Any]:
    """Returns the tree of a manifest with one model; `changes` are fields of the model."""
    model = {
        "name": "net",
        "factory": "models:net",
        "dtypes": ["float32"],
        "inputs": {"x": {"shape": ["batch", 4]}},
        "shape_buckets": [{"batch": 2}],
        **changes,
    }
    return {"version": 1, "name": "demo", "targets": [{"device": "cpu"}], "models": [model]}


def write_manifest(folder: Path, tree: Any, name: str = "manifest.yaml") -> Path:
    """Writes a manifest (a tree, or text as it is) and returns its path."""
    path = folder / name
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return path


def write_sources(folder: Path, **files: str) -> Path:
    """Writes Python modules; `a__b` is `a/b.py`, a name with a slash is taken as it is."""
    for name, text in files.items():
        path = folder / f"{name if '/' in name else name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
