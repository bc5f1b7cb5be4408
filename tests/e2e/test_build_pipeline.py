"""From a manifest to a verified release with a real, tiny model; about a minute on two cores."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from cachepipe.adapters.progress import Lines
from cachepipe.adapters.store import open_store
from cachepipe.adapters.workdir import read_evidence
from cachepipe.errors import BuildError, UnsafePathError, VerificationError
from cachepipe.workflows.build import BuildRequest, BuildSummary, build
from cachepipe.workflows.fetch import read_artifact, read_channel
from cachepipe.workflows.report import report
from cachepipe.workflows.verify import VerifyRequest, VerifySummary, refuse_violations, verify

pytestmark = pytest.mark.slow

MODEL = """
import os, signal
import torch

def mlp(width=16):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))

def linear(width=16):
    "Needs no C++ compiler, which takes seconds."
    torch.manual_seed(0)
    return torch.nn.Linear(width, 4)

class Uncompiled(torch.nn.Module):
    @torch.compiler.disable
    def forward(self, input):
        return input + 1

def uncompiled():
    return Uncompiled()

class Breaking(torch.nn.Linear):
    def forward(self, input):
        torch._dynamo.graph_break()
        return super().forward(input)

def breaking():
    return Breaking(16, 4)

def hanging():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(os.path.join(os.path.dirname(__file__), "hanging.tmp"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, file.name.replace(".tmp", ".pid"))
    signal.pause()

def dying():
    print("last words of the factory")
    os.kill(os.getpid(), signal.SIGSEGV)
"""
MANIFEST = """
version: 1
name: tiny
cache_root: {root}/cache
store: file://{root}/store
targets: [{{device: cuda, gpu: No Such GPU}}, {{device: cpu}}]
models:
{models}
gates: {{min_speedup: 1.0, max_graph_breaks: 0}}
"""
ONE = """
  - name: {name}
    factory: tiny_model:{factory}
    args: {args}
    dtypes: [float32]
    modes: [default]
    compile: {{fullgraph: false}}
    inputs: {{input: {{shape: [batch, 16]}}}}
    shape_buckets: [{{batch: 4}}]
"""


class Talk:
    """A stream that keeps what was said."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


class Project:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifest = root / "manifest.yaml"
        self.talk = Talk()
        (root / "tiny_model.py").write_text(MODEL)

    def declare(self, *models: tuple[str, str, str]) -> None:
        blocks = "".join(ONE.format(name=name, factory=factory, args=args) for name, factory, args in models)
        self.manifest.write_text(MANIFEST.format(root=self.root, models=blocks))

    def build(self, **options: object) -> tuple[BuildSummary, str]:
        talk = self.talk = Talk()
        request = dataclasses.replace(BuildRequest(self.manifest), **options)  # type: ignore[arg-type]
        (summary,) = build(request, Lines(talk, lambda: 0.0), datetime.now(timezone.utc))  # type: ignore[arg-type]
        return summary, talk.text

    def verify(self, **options: object) -> VerifySummary:
        request = dataclasses.replace(VerifyRequest(self.manifest), **options)  # type: ignore[arg-type]
        (summary,) = verify(request, Lines(Talk(), lambda: 0.0), datetime.now(timezone.utc))  # type: ignore[arg-type]
        return summary


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, BuildSummary, str]:
    """A published release; tests that change a project work on a copy."""
    project = Project(tmp_path_factory.mktemp("project"))
    project.declare(("mlp", "mlp", "{}"))
    summary, talk = project.build(report=project.root / "report", keeps_tuned=True)
    return project, summary, talk


def test_a_build_proves_and_publishes_and_leaves_the_root_empty(built: tuple[Project, BuildSummary, str]) -> None:
    project, summary, talk = built
    assert "target skipped: cuda No Such GPU: " in talk
    assert not (project.root / "cache/tiny").exists()
    assert summary.channel == "candidate" and not summary.is_unchanged
    store = open_store(f"file://{project.root}/store")
    index = read_channel(store, "tiny", "candidate", datetime.now(timezone.utc)).index
    statement = read_artifact(store, index.rows[0]).statement
    (entry,) = statement.entries
    (facts,) = entry.shape_buckets
    assert facts.graphs == 1 and facts.cold_s > facts.restored_s > 0 < facts.eager_s and len(facts.output_digest) == 64
    assert entry.kinds["fxgraph"] >= 1 and entry.kinds["aotautograd"] >= 1 and entry.kinds["native"] >= 1
    assert entry.tuning["benchmarks"] == 0 and statement.tuned_bytes > 0
    assert statement.compiler["--version"] and statement.variables["TORCHINDUCTOR_VEC_ISA_OK"] == "1"
    assert statement.gates["min_speedup"] == 1.0 and "variable TORCHINDUCTOR_COMPILE_THREADS" not in entry.environment


def test_case_a2_every_step_is_a_process_of_its_own_and_the_proof_starts_from_an_empty_folder(
    built: tuple[Project, BuildSummary, str],
) -> None:
    project, _, _ = built
    found = report([project.root / "report"])
    assert {row.step for row in found.steps} == {"tune", "trim", "eager", "prove"}
    assert found.verdict.is_ok, found.verdict.faults
    proof = next(row for row in found.steps if row.step == "prove")
    assert proof.hit_rate == 1.0 and proof.work.native_builds == proof.work.new_files == 0
    job = json.loads(next(project.root.glob(".cachepipe/tiny/entries/*/prove.job")).read_text())
    assert job["root"] == f"{project.root}/cache/tiny"


def test_case_a2_verify_passes_without_a_compiler_from_an_empty_folder(
    built: tuple[Project, BuildSummary, str],
) -> None:
    project, summary, _ = built
    found = project.verify(hides_compiler=True, checks_files=True, explains=True, report=project.root / "verified")
    assert found.violations == () and found.explanations == ()
    assert (found.artifact, found.checked_files) == (summary.artifact, summary.files)
    (row,) = found.shape_buckets
    assert row.outputs == "as built"
    assert row.hits["aotautograd"] == "1/1" and row.work.native_builds == 0 and row.restored_s < row.cold_s
    for start, seconds in (("cold", row.cold_s), ("restored", row.restored_s), ("eager", row.eager_s)):
        assert sum(dataclasses.asdict(row.phases[start]).values()) == pytest.approx(seconds, abs=0.01)
    assert row.phases["cold"].compile_s > row.cold_s / 2  # empty folder: lowering and the C++ compiler
    assert row.phases["restored"].compile_s < row.phases["cold"].compile_s / 5
    refuse_violations([found])
    (path,) = (project.root / "verified").glob("*.verify.json")
    evidence = read_evidence(path)
    assert evidence is not None and evidence.step == "verify"


def test_restored_calls_are_timed_in_turns_with_tuned_ones_and_what_was_tuned_is_kept(
    built: tuple[Project, BuildSummary, str],
) -> None:
    project, _, _ = built
    store = open_store(f"file://{project.root}/store")
    index = read_channel(store, "tiny", "candidate", datetime.now(timezone.utc)).index
    (row,) = read_artifact(store, index.rows[0]).statement.entries[0].tuning["latency"]
    assert row["shape_bucket"] == {"batch": 4} and row["calls"] == 200
    assert row["ratio"] == pytest.approx(row["restored_ms"] / row["tuned_ms"], abs=0.001) and row["tuned_ms"] > 0
    (entry,) = project.root.glob(".cachepipe/tiny/entries/*/latency.record")
    assert (entry.parent / "tune" / "inductor").is_dir() and (entry.parent / "tune.bundle").stat().st_size > 0
    assert not list(entry.parent.glob(".latency-*")) and not (project.root / ".cachepipe/tiny/tuned").exists()


def test_an_unchanged_release_is_not_built_again(built: tuple[Project, BuildSummary, str]) -> None:
    project, first, _ = built
    summary, talk = project.build()
    assert summary.is_unchanged and summary.artifact == first.artifact
    assert f"unchanged: {first.artifact} is already in candidate" in talk


def test_gates_that_grew_stricter_refuse_an_unchanged_release(
    built: tuple[Project, BuildSummary, str], tmp_path: Path
) -> None:
    project = copy_of(built, tmp_path)
    shutil.copytree(built[0].root / "store", tmp_path / "store")
    text = project.manifest.read_text()
    project.manifest.write_text(text.replace("min_speedup: 1.0", "min_speedup: 1000"))
    with pytest.raises(VerificationError, match="min_speedup: limit 1000"):
        project.build(store=f"file://{tmp_path}/store")


def copy_of(built: tuple[Project, BuildSummary, str], target: Path) -> Project:
    """Returns a project with the same store, cache root and source, whose own files may be changed."""
    project = built[0]
    copy = Project(target)
    shutil.copy(project.manifest, copy.manifest)
    return copy


def test_unchanged_entries_are_carried_over_with_their_facts_and_changed_ones_are_stale(
    built: tuple[Project, BuildSummary, str], tmp_path: Path
) -> None:
    project = copy_of(built, tmp_path)
    shutil.copytree(built[0].root / "store", tmp_path / "store")
    text = project.manifest.read_text()
    second = ONE.format(name="other", factory="linear", args="{}")
    project.manifest.write_text(text.replace("\ngates:", f"{second}\ngates:"))
    stale = project.verify()
    assert [line for line in stale.violations if "other/float32/default" in line and line.startswith("stale: ")]
    with pytest.raises(VerificationError):
        refuse_violations([stale])
    _, talk = project.build(store=f"file://{tmp_path}/store", only=("mlp",), publishes=False)
    assert "warning: left out: other/float32/default" in talk
    summary, talk = project.build(store=f"file://{tmp_path}/store")
    assert [(entry.entry, entry.is_carried) for entry in summary.entries] == [
        ("mlp/float32/default", True),
        ("other/float32/default", False),
    ]
    assert re.search(r"tune +other", talk) and not re.search(r"tune +mlp", talk)
    store = open_store(f"file://{tmp_path}/store")
    now = datetime.now(timezone.utc)
    rows = read_channel(store, "tiny", "candidate", now).index.rows
    old = read_artifact(
        store, read_channel(open_store(f"file://{built[0].root}/store"), "tiny", "candidate", now).index.rows[0]
    )
    new = read_artifact(store, rows[0])
    assert new.statement.entries[0] == old.statement.entries[0]


def published(root: Path) -> list[Path]:
    """Returns the files in the store; a build that rehearses before it compiles leaves a key and the store's format alone."""
    return [path for kind in ("artifacts", "index") for path in (root / "store/v1" / kind).rglob("*") if path.is_file()]


def test_case_e1_a_model_that_never_compiles_is_named(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.declare(("none", "uncompiled", "{}"))
    with pytest.raises(BuildError, match="no graph was compiled in this process") as caught:
        project.build(publishes=False)
    assert (caught.value.entry, caught.value.step) == ("none/float32/default", "tune")


def test_graph_breaks_are_refused_by_the_gate_with_their_reason(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.declare(("broken", "breaking", "{}"))
    with pytest.raises(VerificationError, match="broken/float32/default: max_graph_breaks: limit 0") as caught:
        project.build(publishes=False)
    text = str(caught.value)
    assert ".py:" in text and "Call to `torch._dynamo.graph_break()`" in text and "Traceback" not in text
    assert len(text.splitlines()) <= 4


def test_a_worker_that_dies_is_named_with_its_signal_and_last_words(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.declare(("dying", "dying", "{}"))
    with pytest.raises(BuildError) as caught:
        project.build(publishes=False)
    assert caught.value.exit_code == 11 and signal.SIGSEGV.name in caught.value.reason
    assert "last words of the factory" in caught.value.reason


def test_case_i1_an_interrupted_build_leaves_nothing_running_and_goes_on_where_it_was_as_does_one_that_a_gate_refused(
    tmp_path: Path,
) -> None:
    project = Project(tmp_path)
    project.declare(("linear", "linear", "{}"), ("hanging", "hanging", "{}"))
    words = [sys.executable, "-m", "cachepipe", "build", str(project.manifest), "--no-publish"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "hanging.pid").exists():
        assert process.poll() is None
        select.select([], [], [], 0.05)
    worker = os.pidfd_open(int((tmp_path / "hanging.pid").read_text()))
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    with process:
        _, talk = process.communicate(timeout=30)
    assert process.returncode == 130 and "hint: finished steps are kept" in talk
    assert time.monotonic() - begin < 10
    assert select.select([worker], [], [], 5) == ([worker], [], [])  # ended; init may not have reaped it yet
    os.close(worker)
    assert not (tmp_path / "cache/tiny").exists()
    project.declare(("linear", "linear", "{}"))
    sound = project.manifest.read_text()
    project.manifest.write_text(sound.replace("min_speedup: 1.0", "min_speedup: 1000"))
    with pytest.raises(VerificationError, match="linear/float32/default: min_speedup: limit 1000"):
        project.build()
    assert "tune" not in project.talk.text and "prove" in project.talk.text and not published(tmp_path)
    project.manifest.write_text(sound)
    summary, talk = project.build(publishes=False)
    assert "tune" not in talk and "trim" not in talk and "prove" in talk
    assert Path(summary.stage).is_dir() and not published(tmp_path) and not summary.statement


def test_a_cache_root_that_others_can_write_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.declare(("linear", "linear", "{}"))
    os.mkdir(tmp_path / "open")
    os.chmod(tmp_path / "open", 0o777)
    with pytest.raises(UnsafePathError) as caught:
        project.build(publishes=False, cache_root=str(tmp_path / "open"))
    assert "install -d -m 0700" in caught.value.hint
