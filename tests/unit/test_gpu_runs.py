"""`ci/gpu`: the journal, the table with verdicts that can say no, and the wheels for a bare host."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.release import REPOSITORY, clean_environment

CI = REPOSITORY / "ci"
FACTS = {
    "device": "NVIDIA H200",
    "driver": "580.1",
    "versions": {"torch": "2.11.0+cu130"},
    "cores": 16,
    "python": "3.12",
}


def load(name: str) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(f"cachepipe_{name.replace('-', '_')}", str(CI / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> Any:
    before = list(sys.path)
    yield load("gpu")
    sys.path[:] = before


def lines(journal: Any, entry: str, restored_s: float = 3.0, **work: int) -> None:
    """Writes the lines of one entry: cold 60 + 20 s, restored as given."""
    counted = ("benchmarks", "tuning_runs", "triton_compiles", "native_builds", "compiler_runs", "ptxas_runs")
    done = dict.fromkeys(counted, 0) | work
    facts = [{"cold_s": 60.0, "shape_bucket": {"batch": 8}}, {"cold_s": 20.0, "shape_bucket": {"batch": 1}}]
    latency = [{"shape_bucket": {"batch": 8}, "ratio": 1.01}, {"shape_bucket": {"batch": 1}, "ratio": 0.99}]
    phases = {"trace_s": 1.5, "lookup_s": 1.0, "load_s": 0.25, "compile_s": 0.0, "run_s": 0.25}
    rows = [{"phases": {"restored": phases}, "work": done}] * 2
    journal.note(f"{entry} · verify", entry=entry, variant="verify", shape_buckets=rows, violations=[])
    sizes = {"packed": 1_000, "tuned": 74_000, "bundle": 6_000, "settled": 9_000}
    build = {"variant": "build", "facts": facts, "tuning": {"latency": latency}, "bytes": sizes}
    journal.note(f"{entry} · build", entry=entry, **build)
    seconds = {"cold": 90.0, "warm": 9.0, "bundle": 10.0, "restored": restored_s, "eager": 0.5, "trace": 3.0}
    for variant, total in seconds.items():
        for number in range(3 if variant in ("cold", "restored") else 1):
            run = {"first_calls_s": total + number, "calls_s": [total + number, 0.0], "ready_s": 6.0, "work": done}
            journal.note(f"{entry} · {variant} · {number + 1}", entry=entry, variant=variant, round=number + 1, **run)


def verdicts(script: Any, path: Path, *names: str) -> dict[str, tuple[str, bool]]:
    found = script.gpu_table.read_lines([path])
    entries = [script.gpu_table.Entry(name, found, "") for name in names]
    return {row.what: (row.found, row.is_met) for row in script.gpu_table.targets(entries[0], entries)}


def test_every_target_is_judged_by_medians_of_fresh_processes(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines(script.Journal(path, FACTS), "bert:max-autotune", restored_s=2.0)
    found = verdicts(script, path, "bert:max-autotune")
    assert found["bert:max-autotune, first shape bucket: torch's cold ÷ restored"] == ("30.3", True)
    assert found["the build's cold ÷ restored"] == ("20", True)
    assert found["moved folder ÷ restored"] == ("3", True)
    assert found["tuned bytes ÷ packed"] == ("74", True)
    assert found["Σ restored ÷ Σ (trace + eager)"] == ("1", True)
    assert found["latency, restored ÷ tuned, worst shape bucket"] == ("1.01", True)
    assert all(is_met for _, is_met in found.values())


def test_one_triton_compile_in_one_process_misses_the_target(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines(script.Journal(path, FACTS), "bert:max-autotune")
    lines(script.Journal(path, FACTS), "vit:max-autotune", triton_compiles=1)
    found = verdicts(script, path, "bert:max-autotune", "vit:max-autotune")
    assert found["all entries, restored: triton compiles"] == ("1", False)
    assert found["the build's cold ÷ restored"] == ("15", True)


@pytest.mark.parametrize("name", ["compiler_runs", "ptxas_runs"])
def test_one_compiler_process_in_one_verified_start_misses_the_target(script: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "lines.jsonl"
    lines(script.Journal(path, FACTS), "bert:max-autotune", restored_s=2.0)
    lines(script.Journal(path, FACTS), "vit:max-autotune", restored_s=2.0, **{name: 1})
    found = verdicts(script, path, "bert:max-autotune", "vit:max-autotune")
    missed = {what: text for what, (text, is_met) in found.items() if not is_met}
    assert missed == {f"all entries, verified: {name.replace('_', ' ')}": "1"}


def test_what_was_not_measured_is_missed_and_shown_as_such(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    script.Journal(path, FACTS).note("bert · verify", entry="bert", variant="verify", shape_buckets=[])
    found = verdicts(script, path, "bert")
    assert {is_met for _, is_met in found.values()} == {False}
    assert {text for text, _ in found.values()} == {"not measured"}


def test_a_journal_is_read_again_and_a_failed_measurement_is_made_again(script: Any, tmp_path: Path) -> None:
    journal = script.Journal(tmp_path / "lines.jsonl", FACTS)
    journal.note("a · eager · 1", entry="a", variant="eager", error=1)
    assert not journal.has("a · eager · 1")
    journal.note("a · eager · 1", entry="a", variant="eager", first_calls_s=1.0)
    again = script.Journal(tmp_path / "lines.jsonl", FACTS)
    assert again.has("a · eager · 1")
    (line,) = script.gpu_table.read_lines([tmp_path / "lines.jsonl"])
    assert (line["first_calls_s"], line["device"], line["driver"]) == (1.0, "NVIDIA H200", "580.1")
    assert line["date"].endswith("+00:00")


def test_merge_writes_table_and_record_of_several_runs(tmp_path: Path) -> None:
    script = load("gpu")
    one, other = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    lines(script.Journal(one, FACTS), "bert-base:max-autotune")
    lines(script.Journal(other, FACTS), "vit-b-16:max-autotune")
    output = tmp_path / "record.json"
    command = [sys.executable, str(CI / "gpu"), "--merge", str(one), str(other), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean_environment())
    assert "| vit-b-16:max-autotune | 91.00 | 80.00 | 9.00 | 10.00 | 4.00 | 20.0 × |" in done.stdout
    assert "| bundle bytes ÷ packed | >= 5 | 6 | met |" in done.stdout
    assert "| vit-b-16:max-autotune | 3.00 | 2.00 | 0.50 | 0.00 | 0.50 |" in done.stdout
    record = json.loads(output.read_text())
    assert record["machines"] == [{name: FACTS[name] for name in ("device", "driver", "versions")}]
    assert record["phases_s"]["vit-b-16:max-autotune"]["trace_s"] == 3.0
    assert len(record["lines"]) == 24 and record["medians_s"]["vit-b-16:max-autotune"]["restored"] == 4.0


RESULTS = CI / "results" / "h200-torch2.11.json"
ROWS = {
    "Llama-shaped 1.2 B, `max-autotune`": "llama-1b:max-autotune",
    "ViT-B/16, `max-autotune`": "vit-b-16:max-autotune",
    "ResNet-50, `max-autotune`": "resnet-50:max-autotune",
    "BERT-base, `max-autotune`": "bert-base:max-autotune",
    "BERT-base, `max-autotune`, `engine: aot`": "bert-base-aot:max-autotune",
    "BERT-base, `max-autotune-no-cudagraphs`": "bert-base:max-autotune-no-cudagraphs",
    "BERT-base, `default`": "bert-base:default",
    "BERT-base, `reduce-overhead`": "bert-base:reduce-overhead",
    "BERT, 4 layers, trained, `default`": "bert-train:default",
    "BERT, 4 layers, dynamic batch, `default`": "bert-dynamic:default",
}
"""README's names of the entries."""


def test_the_record_is_what_merge_makes_of_its_lines(script: Any, tmp_path: Path) -> None:
    assert script.merge([RESULTS.with_suffix(".jsonl")], script.H200, tmp_path / "record.json") == 0
    assert (tmp_path / "record.json").read_text() == RESULTS.read_text()


def test_the_main_entry_is_measured_in_three_fresh_processes_of_every_variant(script: Any) -> None:
    assert script.H200[0].name == script.BERT
    assert set(script.H200[0].counts) == {3}


def test_a_table_of_several_states_of_the_code_says_so(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    lines(script.Journal(path, {**FACTS, "sources": "before"}), "bert-base:default")
    assert script.merge([path], script.H200, tmp_path / "record.json") == 0
    assert "states of the code" not in capsys.readouterr().err
    lines(script.Journal(path, {**FACTS, "sources": "after"}), "vit-b-16:max-autotune")
    assert script.merge([path], script.H200, tmp_path / "record.json") == 0
    assert "note: the lines are of 2 states of the code: after, before" in capsys.readouterr().err
    found = json.loads((tmp_path / "record.json").read_text())["sources"]
    assert found == {"bert-base:default": ["before"], "vit-b-16:max-autotune": ["after"]}


def test_every_number_of_the_readmes_gpu_table_is_the_records(script: Any) -> None:
    found = script.gpu_table.read_lines([RESULTS.with_suffix(".jsonl")])
    entries = {entry.name: script.gpu_table.Entry(entry.name, found, entry.eager_of) for entry in script.H200}
    section = (REPOSITORY / "README.md").read_text().partition("\n## On a GPU\n")[2].partition("\n## ")[0]
    rows = {
        row[1]: row[2:-1]
        for line in section.splitlines()
        if len(row := [cell.strip() for cell in line.split("|")]) == 11
    }
    assert set(ROWS) <= set(rows)
    for name, cells in rows.items():
        if name not in ROWS:
            continue
        entry = entries[ROWS[name]]
        seconds = [entry.tuned_s(), *(entry.seconds(variant) for variant in ("warm", "bundle", "restored", "trace"))]
        sizes = [entry.build["bytes"][kind] / 1e6 for kind in ("tuned", "bundle", "packed")]
        wanted = [
            *seconds,
            entry.tuned_s() / entry.seconds("restored"),
            *sizes,
            *(row["ratio"] for row in entry.latency()),
        ]
        shown = " ".join(cells).replace("*", "").replace("→", "").replace("×", "").replace(",", "").split()
        assert len(shown) == len(wanted), name
        for text, value in zip(shown, wanted, strict=True):
            decimals = len(text.partition(".")[2])
            assert text == ("–" if value is None else f"{value:.{decimals}f}"), (name, text, value)


def test_every_entry_of_the_manifest_is_measured(script: Any) -> None:
    from cachepipe.adapters.manifest_file import load_manifest

    manifest = load_manifest(REPOSITORY / "manifests" / "h200.yaml")
    declared = {f"{model.name}:{mode}" for model in manifest.models for mode in model.modes}
    assert {entry.name for entry in script.H200} == declared
    assert all(not entry.eager_of or entry.counts.eager == 0 for entry in script.H200)


def test_wheels_are_asked_for_by_the_projects_own_dependencies() -> None:
    wheels = load("gpu-wheels")
    names = {wheels.normal(text) for text in wheels.requirements()}
    assert {"torch", "pydantic", "pyyaml", "zstandard", "nvidia-ml-py"} <= names
    assert wheels.normal("PyYAML>=6.0.1") == "pyyaml" and wheels.normal("nvidia_ml.py == 1") == "nvidia-ml-py"
