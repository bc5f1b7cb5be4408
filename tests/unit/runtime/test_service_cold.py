"""A cold start: the same lines work without an artifact, also in an image that cannot compile."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cachepipe
from cachepipe.domain.statement import statement_bytes
from tests.support.artifacts import entry_record, entry_spec, make_artifact
from tests.support.jobs import MODELS


def test_without_artifact_and_compiler_the_model_answers_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("CACHEPIPE_ROOT", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = torch.nn.Linear(2, 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    entry = cachepipe.entry("absent")
    with entry.context():
        assert entry.compile(model) is model
        assert entry.warmup(model) == 0.0
        assert model(torch.ones(1, 2)).shape == (1, 2)
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("cachepipe compile"))
    assert "entry=absent outcome=eager" in line and "no C++ compiler" in line


def test_without_artifact_but_with_a_compiler_the_model_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CACHEPIPE_ROOT", raising=False)
    (tmp_path / "any-cxx").touch(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "any-cxx"))
    model = torch.nn.Linear(2, 2)
    assert cachepipe.entry("absent").compile(model) is not model


def test_a_release_with_one_more_dtype_or_mode_takes_no_service_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = entry_spec()
    specs = (spec, replace(spec, dtype="bfloat16"), replace(spec, dtype="bfloat16", mode="reduce-overhead"))
    statement = make_artifact(tmp_path, entries=tuple(entry_record(one) for one in specs)).statement
    folder = tmp_path / ".cachepipe" / "statements"
    folder.mkdir(parents=True)
    (folder / "a.json").write_bytes(statement_bytes(statement))
    monkeypatch.setenv("CACHEPIPE_ROOT", str(tmp_path))
    assert cachepipe.entry("net", dtype=spec.dtype).spec == spec
    assert cachepipe.entry("net", mode="reduce-overhead").spec == specs[2]
    assert capfd.readouterr().err == ""
    for wish in ({}, {"dtype": "bfloat16"}):
        assert cachepipe.entry("net", **wish).spec is None
        line = capfd.readouterr().err
        assert "several entries fit `net`: name dtype and mode" in line and specs[1].id in line
    assert cachepipe.entry("net", dtype="float64").spec is None
    assert "`net` with dtype=float64 is not in the restored artifact" in capfd.readouterr().err


UNBUILT = """
import sys
sys.path[:0] = {path!r}
import torch
import case_models
from cachepipe.adapters.torch_settings import can_compile
from cachepipe.runtime.service import _run_uncompilable_graphs

assert not can_compile({root!r})
_run_uncompilable_graphs()
_run_uncompilable_graphs()

class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.log = 0, []
    def forward(self, x):
        y = torch.relu(x) + 1
        self.calls += 1
        self.log.append(len(x))  # twice if the whole call were repeated
        torch._dynamo.graph_break()
        return torch.tanh(y) * self.calls

def wrong():
    raise ZeroDivisionError
class Fails(torch.nn.Module):
    def forward(self, x):
        wrong()

with torch.inference_mode():
    for fullgraph in (True, False):
        torch._dynamo.reset()
        model = case_models.small().eval().requires_grad_(False)
        compiled = torch.compile(model, dynamic=False, fullgraph=fullgraph)
        for batch in (2, 3):
            x = torch.ones(batch, 8)
            assert torch.equal(compiled(x), model(x))
    counts, eager = Counts(), Counts()
    compiled = torch.compile(counts, dynamic=False)
    for batch in (2, 3, 2):
        x = torch.linspace(-1, 1, batch * 8).reshape(batch, 8)
        assert torch.equal(compiled(x), eager(x))
    assert (counts.calls, counts.log) == (eager.calls, eager.log) == (3, [2, 3, 2])
    try:
        torch.compile(Fails(), dynamic=False)(torch.ones(1))
    except ZeroDivisionError:
        print("theirs")
model = case_models.small()
torch.compile(model, dynamic=False)(torch.ones(5, 8)).sum().backward()
print(all(one.grad is not None for one in model.parameters()))
"""


def test_a_graph_that_nothing_can_compile_runs_eager_once_with_one_line_whatever_came_before_it(tmp_path: Path) -> None:
    stand_in = tmp_path / "root" / ".cachepipe" / "bin"
    stand_in.mkdir(parents=True)
    (stand_in / "g++").write_text("#!/bin/sh\nexit 1\n")
    (stand_in / "g++").chmod(0o755)
    code = UNBUILT.format(path=[str(MODELS), *sys.path], root=str(tmp_path / "root"))
    env = {
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": str(stand_in),
        "HOME": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, check=False, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["theirs", "True"]
    assert done.stderr.count("cachepipe compile outcome=eager") == 1
