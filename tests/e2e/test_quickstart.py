"""What the quickstart shows on a CPU: native objects, tuning, nothing left to tune, and a start that does no work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cachepipe.adapters.store import open_store
from cachepipe.adapters.workdir import read_evidence
from cachepipe.domain.evidence import EntryEvidence, hit_rate
from cachepipe.domain.statement import Statement
from cachepipe.workflows.fetch import resolve_ref
from tests.support.release import MANIFEST, Release, clean_environment, run_cachepipe

pytestmark = pytest.mark.slow


@pytest.fixture
def statement(quickstart_release: Release) -> Statement:
    return resolve_ref(open_store(quickstart_release.store), "quickstart@candidate").statement


@pytest.fixture
def steps(quickstart_release: Release) -> dict[str, EntryEvidence]:
    found = [read_evidence(path) for path in Path(quickstart_release.evidence).glob("encoder*.json")]
    return {evidence.step: evidence for evidence in found if evidence is not None}


def test_the_build_makes_native_objects_and_tunes(statement: Statement, steps: dict[str, EntryEvidence]) -> None:
    assert statement.entries[0].kinds["native"] >= 3
    assert steps["tune"].work.benchmarks >= 1
    assert steps["tune"].work.native_builds >= 3


def test_the_last_settle_round_tunes_nothing(steps: dict[str, EntryEvidence]) -> None:
    assert steps["settle"].work.benchmarks == 0
    assert steps["settle"].work.tuning_runs == 0


def test_case_e3_the_proof_without_a_compiler_does_no_work_at_all(steps: dict[str, EntryEvidence]) -> None:
    proof = steps["prove"]
    done = proof.work
    assert (done.benchmarks, done.tuning_runs, done.native_builds, done.triton_compiles, done.new_files) == (0,) * 5
    assert hit_rate(proof) == 1.0
    assert {lookup.layer for lookup in proof.lookups} >= {"aotautograd", "fxgraph", "native"}


def test_cold_is_at_least_five_times_restored(statement: Statement) -> None:
    facts = statement.entries[0].shape_buckets
    assert sum(bucket.cold_s for bucket in facts) >= 5 * sum(bucket.restored_s for bucket in facts)


def test_the_artifact_is_smaller_than_what_was_tuned(statement: Statement) -> None:
    packed = sum(blob.size_bytes for blob in (*statement.packs, statement.table))
    assert packed < statement.unpacked_bytes < statement.tuned_bytes


def test_case_b4_outputs_were_compared_with_eager(statement: Statement, steps: dict[str, EntryEvidence]) -> None:
    for bucket in steps["prove"].shape_buckets:
        assert bucket.is_close
        assert bucket.calls >= 3
    assert all(bucket.output_digest for bucket in statement.entries[0].shape_buckets)


def test_an_unchanged_manifest_is_not_built_again(quickstart_release: Release) -> None:
    release = quickstart_release
    words = ["--store", release.store, "--cache-root", release.cache_root, "--work", release.work, "--json"]
    done = run_cachepipe("build", str(MANIFEST), *words)
    assert done.returncode == 0, done.stderr
    (again,) = json.loads(done.stdout)["builds"]
    (first,) = release.build["builds"]
    assert again["is_unchanged"]
    assert again["artifact"] == first["artifact"]
    planned = run_cachepipe("plan", str(MANIFEST), *words[:4], "--json")
    (target,) = json.loads(planned.stdout)["targets"]
    assert [entry["held_by"] for entry in target["entries"]] == [first["artifact"]]


def verified(release: Release, tmp_path: Path, *words: str) -> tuple[int, Any]:
    options = ["--store", release.store, "--work", str(tmp_path / "work"), "--json", *words]
    done = run_cachepipe("verify", str(MANIFEST), "--cache-root", str(tmp_path / "cache"), *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_case_a2_verify_at_another_root_without_a_compiler_passes(quickstart_release: Release, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    code, document = verified(quickstart_release, tmp_path, "--no-compiler", "--files", "--min-hit-rate", "1.0")
    assert code == 0, document
    (found,) = document["verifications"]
    assert found["violations"] == []
    assert found["checked_files"] > 0
    assert {row["shape_bucket"] for row in found["shape_buckets"]} == {"batch=1,seq=32", "batch=4,seq=64"}


def test_a_refused_gate_is_exit_18_with_the_numbers_and_the_error_in_one_document(
    quickstart_release: Release, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    junit, report = str(tmp_path / "gates.xml"), str(tmp_path / "evidence")
    code, document = verified(
        quickstart_release, tmp_path, "--min-speedup", "100000", "--junit", junit, "--report", report
    )
    assert code == 18
    suites = {suite.get("name"): suite.get("failures") for suite in ElementTree.parse(junit).getroot()}
    assert suites == {"encoder/float32/max-autotune": "0", "gates": "1"}
    assert document["verifications"][0]["outside"] == []
    done = run_cachepipe("explain", report)
    assert done.returncode == 0 and done.stdout.startswith("encoder/float32/max-autotune · verify: "), done.stderr
    page = tmp_path / "report.html"
    shown = run_cachepipe("report", report, "--html", str(page), "--against", quickstart_release.evidence)
    assert shown.returncode == 18 and "refused: " in shown.stderr and "verdict: not warm" in shown.stdout
    assert "100000" in page.read_text() and "Compared with" in page.read_text()
    assert document["verifications"][0]["shape_buckets"]
    assert document["error"]["kind"] == "VerificationError"
    assert "100000" in document["error"]["message"]


def served(release: Release, tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a service's script behind a restore."""
    dest = tmp_path / "dest"
    dest.mkdir(mode=0o700)
    words = ["restore", release.store, "--name", release.name, "--channel", "candidate", "--dest", str(dest / "it")]
    python_path = os.pathsep.join([str(MANIFEST.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = clean_environment(PYTHONPATH=python_path)
    done = run_cachepipe(*words, "--strict", "--", sys.executable, "-c", script, env=env)
    assert done.returncode == 0, done.stderr
    return done


OUTSIDE = """
import json, torch, cachepipe
from quickstart_model import encoder
entry = cachepipe.entry("encoder")
model = entry.compile(encoder(layers=1))
args, kwargs = entry.inputs(batch=1, seq=32)
with torch.inference_mode():
    model(*args, **kwargs)
cachepipe.ready()
found = cachepipe.report()
print(json.dumps([found["misses"], found["native_builds"], found["setting_differences"]]))
"""


def test_a_service_that_sets_nothing_finds_its_graphs_outside_the_context_too(
    quickstart_release: Release, tmp_path: Path
) -> None:
    done = served(quickstart_release, tmp_path, OUTSIDE)
    assert json.loads(done.stdout) == [0, 0, []], done.stderr


ODD_SHAPES = """
import json, os, torch, cachepipe
from quickstart_model import encoder
entry = cachepipe.entry("encoder")
model = entry.compile(encoder(layers=1))
with entry.context():
    entry.warmup(model)
cachepipe.ready()
torch._dynamo.config.recompile_limit = 2  # what is built; a compile more takes half a minute
answers = []
with entry.context():
    for batch in (2, 3, 5, 1, 4):
        args, kwargs = entry.inputs(batch=batch, seq={1: 32, 4: 64}.get(batch, 8))
        answers.append(tuple(model(*args, **kwargs).shape)[0])
print(json.dumps([answers, cachepipe.report()["late_compiles"]]))
"""


def test_requests_of_more_shapes_than_torch_compiles_are_answered_eager_and_that_is_told(
    quickstart_release: Release, tmp_path: Path
) -> None:
    done = served(quickstart_release, tmp_path, ODD_SHAPES)
    answers, (late,) = json.loads(done.stdout)
    assert answers == [2, 3, 5, 1, 4]
    assert (late["outcome"], late["sizes"]) == ("eager", {"tokens": [2, 8]}), "what comes after it runs eager unseen"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("cachepipe late_compile")]
    assert "outcome=eager" in line and "expected 4, actual 2" in line


def test_report_shows_the_evidence_of_a_build(quickstart_release: Release) -> None:
    done = run_cachepipe("report", quickstart_release.evidence, env=clean_environment(NO_COLOR="1"))
    assert done.returncode == 0, done.stderr
    for word in ("batch=1,seq=32", "batch=4,seq=64", "tune", "prove", "eager", "none", "verdict: warm"):
        assert word in done.stdout
    tree = json.loads(run_cachepipe("report", quickstart_release.evidence, "--json").stdout)
    assert {step["step"] for step in tree["steps"]} >= {"tune", "prove", "eager"}
    details = tree["details"]
    assert len(details["tuned"]) >= 1 and all(row["kernel"]["baseline_ms"] > 0 for row in details["tuned"])
    assert {row["step"] for row in details["compiles"]} == {"prove"} and details["sizes"]["native"]["files"] >= 3
    assert details["explained"] == [] == tree["misses"]
