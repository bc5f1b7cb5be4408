"""A14, A1, F10: every change that is known to lose an entry, with the sentence and the mending that a person gets.

Three processes: one builds, one makes every change in turn, one has all the variables that enter a key.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cachepipe.domain.evidence import EntryEvidence, Explanation, layer_counts
from cachepipe.domain.explain import explain
from cachepipe.domain.record import from_json
from cachepipe.domain.variables import KEYED
from tests.support.release import clean_environment

SCRIPT = Path(__file__).parents[1] / "support" / "key_matrix.py"
VARIABLES = {
    "CXX": "/usr/bin/g++",
    "LOG_TLPARSE": "1",
    "TORCHINDUCTOR_WORKER_LOGPATH": "/tmp/worker.log",
    "TORCHINDUCTOR_FILE_LOCK_TIMEOUT": "60",
    "TORCHINDUCTOR_COMPILE_WORKER_WAIT_TIMEOUT": "300",
    "TORCH_COMPILE_CACHE_KEY_TAG": "v2",
    "TORCH_COMPILE_DEBUG": "1",
}

Rows = dict[str, EntryEvidence]


def matrix(folder: Path, name: str, *words: str, **variables: str) -> Rows:
    target = folder / f"{name}.json"
    fixed = {str(key): str(value) for key, value in KEYED.items()}
    env = clean_environment(**fixed, HOME=str(folder), TMPDIR=str(folder), **variables)
    if "CXX" not in variables:
        env.pop("CXX", None)
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "cache"), str(target), *words],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {row: from_json(EntryEvidence, tree, row) for row, tree in json.loads(target.read_text()).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def built(folder: Path) -> Rows:
    return matrix(folder, "built", "base")


@pytest.fixture(scope="module")
def changed(folder: Path, built: Rows) -> Rows:
    return matrix(folder, "changed")


def explain_data(evidence: EntryEvidence) -> Any:
    rows = [{"layer": one.layer, "shape_bucket": one.shape_bucket, "key": one.key} for one in evidence.lookups]
    return {"lookups": rows, "components": evidence.components, "settings": dict(evidence.settings)}


def explained(built: Rows, evidence: EntryEvidence, base: str = "base") -> tuple[Explanation, ...]:
    return explain(evidence, explain_data(built[base]))


BOTH, OUTER = ("aotautograd", "fxgraph"), ("aotautograd",)
SENTENCES = {
    "attribute renamed": (OUTER, ["attribute renamed: encoder → enc"]),
    "net passed as argument": (OUTER, ["called through another function: weights built at self, called at model"]),
    "closure wrapper": (OUTER, ["called through another function: weights built at self, called at closure:net"]),
    "requires_grad": (OUTER, ["requires grad of self.encoder.weight: built True, called False"]),
    "grad mode": (BOTH, ["grad mode: built no_grad, called grad"]),
    "requires_grad, grad mode": (
        OUTER,
        [
            "grad mode: built no_grad, called grad",
            "requires grad of self.encoder.weight: built True, called False",
        ],
    ),
    "autocast": (BOTH, ["autocast: built off, called bfloat16"]),
    "functorch": (OUTER, ["functorch config: debug_partitioner: built False, called True"]),
    "strict cache": (OUTER, ["functorch config: strict_autograd_cache: built False, called True"]),
    "bundled": (OUTER, ["functorch config: bundled_autograd_cache: built False, called True"]),
    "cxx": (BOTH, ["inductor config cpp.cxx: built (None, 'g++'), called (None, '/usr/bin/g++')"]),
    "threads": (BOTH, ["threads: {threads} → {threads_more}"]),
    "key tag": (BOTH, ["cache key tag: built unset, called v2"]),
    "size_asserts": (BOTH, ["inductor config size_asserts: built True, called False"]),
    "debug": (BOTH, ["inductor config debug: built False, called True"]),
    "optimisation level": (BOTH, ["inductor config cutlass.compile_opt_level: built -O1, called -O3"]),
    "hooks": (BOTH, ["inductor config generate_intermediate_hooks: built False, called True"]),
    "matmul precision": (BOTH, ["matmul precision: built highest, called high"]),
    "precision told": (BOTH, ["fp32 precision: built none, called ieee"]),
    "tf32": (BOTH, ["matmul precision: built highest, called high"]),
    "fp16 reduction": (BOTH, ["fp16 reduction: built True, called False"]),
    "bf16 reduction": (BOTH, ["bf16 reduction: built True, called False"]),
    "deterministic": (BOTH, ["deterministic algorithms: built False, called True"]),
    "default dtype": (BOTH, ["default dtype: built float32, called float64"]),
    "reduce-overhead": (BOTH, ["compile mode: built default, called reduce-overhead"]),
    "max-autotune": (BOTH, ["compile mode: built default, called max-autotune"]),
    "max-autotune-no-cudagraphs": (BOTH, ["compile mode: built default, called max-autotune-no-cudagraphs"]),
    "dtype": (
        BOTH,
        ["dtype of self.encoder.weight and 1 more: built float32, called bfloat16"],
    ),
    "batch": (BOTH, ["shape (3, 8) of x not in coverage, nearest bucket batch=4 (4, 8)"]),
    "keyword": (
        BOTH,
        ["arguments of the graph: built 2 (self.encoder.weight, x), called 3 (self.encoder.weight, x, scale)"],
    ),
    "dynamic": (BOTH, ["dynamic shapes: built static, called dynamic (s"]),
    "stride": (BOTH, ["stride of x: built (8, 1), called (1, 4)"]),
    "freezing": (
        BOTH,
        [
            "torch refuses to cache the graph: Cannot cache a graph with freezing enabled",
            "torch refuses to cache the graph: mkldnn",
        ],
    ),
}
"""Row → layers that miss, and what is said of each cause: the beginning of the sentence."""


@pytest.mark.parametrize("row", SENTENCES)
def test_case_a14_a1_a_change_that_loses_the_entry_is_named_with_both_values(
    built: Rows, changed: Rows, row: str
) -> None:
    layers, sentences = SENTENCES[row]
    evidence = changed[row]
    missed = {one.layer for one in evidence.lookups if one.outcome != "hit"}
    assert missed & set(BOTH) == set(layers), evidence.lookups
    found = explained(built, evidence, "base positions" if row == "tf32" else "base")
    causes = list(dict.fromkeys(one.cause for one in found if one.layer != "settings"))
    threads = int(built["base"].settings["threads"])
    wanted = [text.format(threads=threads, threads_more=threads + 1) for text in sentences]
    assert all(any(cause.startswith(text) for cause in causes) for text in wanted), causes
    assert len(causes) == len(wanted), causes
    assert all(one.fix for one in found)


def test_case_a14_the_default_device_is_named_where_the_graph_makes_tensors(built: Rows, changed: Rows) -> None:
    assert layer_counts(changed["positions"])["aotautograd"]["miss"] == 0
    found = explained(built, changed["default device"], "base positions")
    assert [one.cause for one in found] == ["default device: built unset, called cpu"]


@pytest.mark.parametrize("row", ["same", "inference_mode"])
def test_case_f10_what_loses_nothing_needs_no_words(built: Rows, changed: Rows, row: str) -> None:
    assert {one.outcome for one in changed[row].lookups} == {"hit"}
    assert explained(built, changed[row]) == ()


def test_every_variable_that_enters_a_key_is_named(folder: Path, built: Rows) -> None:
    evidence = matrix(folder, "variables", "base", **VARIABLES)["base"]
    assert {one.outcome for one in evidence.lookups if one.layer in BOTH} == {"miss"}
    told = " ".join(one.cause for one in explained(built, evidence))
    fixes = " ".join(one.fix for one in explained(built, evidence))
    for name in ("CXX", *(name for name in VARIABLES if name.startswith(("TORCHINDUCTOR", "LOG")))):
        assert f"(variable {name})" in told and f"`{name}`" in fixes, (name, told)
    assert "TORCH_COMPILE_DEBUG: built unset, called 1" in told
    assert "cache key tag: built unset, called v2" in told
