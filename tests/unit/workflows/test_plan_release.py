from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters.manifest_file import load_manifest
from cachepipe.errors import ManifestError, UsageError
from cachepipe.workflows.plan import Plan, plan_release, release_fingerprint
from tests.support.manifests import small_manifest, write_manifest, write_sources

MANIFESTS = Path(__file__).parents[3] / "manifests"
MODELS = "from parts import WIDTH\nSCALE = 2\ndef net(): return WIDTH * SCALE\ndef loss(x): return x\n"


def _plan(folder: Path, name: str = "manifest.yaml", tree: Any = None, **changes: Any) -> Plan:
    path = write_manifest(folder, tree or small_manifest(**changes), name)
    return plan_release(load_manifest(path), path, "cpu")


def _key(folder: Path, **changes: Any) -> str:
    (entry,) = _plan(folder, **changes).entries
    return entry.key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "app", models=MODELS, parts="WIDTH = 3\n")


def test_a_plan_names_root_entries_and_folders(folder: Path) -> None:
    plan = _plan(folder)
    assert (plan.name, plan.root, plan.device) == ("demo", "/var/cache/cachepipe/demo", "cpu")
    assert plan.python_path == (folder,)
    (entry,) = plan.entries
    assert {"source:models.py", "source:parts.py"} < set(entry.key_parts)


def test_what_cannot_change_the_result_keeps_the_key(folder: Path, tmp_path: Path) -> None:
    key = _key(folder)
    write_sources(folder, models="# comment\n\n" + MODELS.replace("\n", "\n\n"), unrelated="x = 1\n")
    assert _key(folder) == key
    assert _key(folder, name="renamed.yaml") == key
    assert _key(folder, tolerance={"rtol": 0.5}) == key
    tree = small_manifest()
    others = {"gates": {"min_speedup": 9.0}, "channel": "nightly", "store": "/srv/store", "cache_root": "/opt/cache"}
    assert _key(folder, tree={**tree, **others, "name": "other"}) == key
    moved = tmp_path / "elsewhere/deep"
    shutil.copytree(folder, moved)
    assert _key(moved) == key
    inner = moved / "manifests"
    inner.mkdir()
    assert _key(inner, tree={**tree, "python_path": [".."]}) == key


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": {"x": {"shape": ["batch", 5]}}},
        {"shape_buckets": [{"batch": 3}]},
        {"dtypes": ["bfloat16"]},
        {"modes": ["default"]},
        {"compile": {"options": {"epilogue_fusion": True}}},
        {"context": {"grad": "no_grad"}},
        {"args": {"layers": 1}},
        {"train": True, "loss": "models:loss"},
    ],
)
def test_what_can_change_the_result_changes_the_key(folder: Path, changes: dict[str, Any]) -> None:
    assert _key(folder, **changes) != _key(folder)


def test_case_a6_an_artifact_whose_kernels_ask_for_the_thread_count_fits_any(folder: Path) -> None:
    dynamic = {"options": {"cpp.dynamic_threads": True}}
    for changes, has_threads in ((dynamic, False), ({}, True), ({"options": {"cpp.dynamic_threads": False}}, True)):
        fingerprint = release_fingerprint(_plan(folder, compile=changes), has_native_code=False)
        assert (fingerprint.get("threads") is not None) == has_threads
    one, other = small_manifest(compile=dynamic), small_manifest(name="other")
    mixed = _plan(folder, tree={**one, "models": [*one["models"], *other["models"]]})
    assert release_fingerprint(mixed, has_native_code=False).get("threads") is not None


def test_case_b7_a_changed_model_source_is_another_key(folder: Path) -> None:
    key = _key(folder)
    write_sources(folder, models=MODELS.replace("SCALE = 2", "SCALE = 3"))
    changed = _key(folder)
    assert changed != key
    write_sources(folder, models=MODELS, parts="WIDTH = 4\n")
    assert _key(folder) not in (key, changed)
    write_sources(folder, parts="WIDTH = 3\n")
    assert _key(folder) == key


def test_what_the_manifest_names_and_nobody_has_is_reported_at_once_with_lines(folder: Path) -> None:
    tree = small_manifest(sources=["*.json"], factory="models:nett", inputs="gone:inputs")
    tree["models"].append({"name": "program", "command": ["python", "x.py"]})
    path = write_manifest(folder, {**tree, "python_path": [".", "lib"]})
    with pytest.raises(ManifestError) as caught:
        plan_release(load_manifest(path), path, "cpu")
    lines = path.read_text().splitlines()
    wanted = [
        ("- lib", "no such folder"),
        ("models:nett", "no `nett` in module `models`"),
        ("gone:inputs", "no module `gone`"),
        ("*.json", "no file matches `*.json`"),
        ("command", "not in this release"),
    ]
    assert len(caught.value.problems) == len(wanted)
    for text, words in wanted:
        (problem,) = [problem for problem in caught.value.problems if words in problem]
        assert text in lines[int(problem.removeprefix(f"{path}:").split(":")[0]) - 1]


def test_a_device_without_a_target_is_refused(folder: Path) -> None:
    path = write_manifest(folder, small_manifest())
    with pytest.raises(UsageError, match="no target for device `cuda`: declared: cpu"):
        plan_release(load_manifest(path), path, "cuda")


def test_the_manifests_of_the_repository_can_be_planned() -> None:
    quickstart = plan_release(load_manifest(MANIFESTS / "quickstart.yaml"), MANIFESTS / "quickstart.yaml", "cpu")
    assert [entry.spec.id for entry in quickstart.entries] == ["encoder/float32/max-autotune"]
    assert "dist:torch" in quickstart.entries[0].key_parts
    path = MANIFESTS / "transformers.yaml"
    for device in ("cpu", "cuda"):
        plan = plan_release(load_manifest(path), path, device)
        assert len({entry.key for entry in plan.entries}) == len(plan.entries) == 8
        assert all("dist:transformers" in entry.key_parts for entry in plan.entries)
        specs = [entry.spec for entry in plan.entries]
        assert {(spec.model, spec.dtype) for spec in specs} >= {
            (model, dtype) for model in ("bert-base", "vit", "resnet-18") for dtype in ("float32", "bfloat16")
        }
        assert all(len(spec.shape_buckets) == 2 for spec in specs)
        assert [spec.model for spec in specs if spec.train] == ["bert-train"]
        assert [spec.model for spec in specs if spec.dynamic_dims] == ["bert-dynamic"]


@pytest.mark.parametrize("name", ["a" * 5000, "zero\0byte", "missing"])
def test_a_name_that_no_system_accepts_is_a_problem_of_its_line(folder: Path, name: str) -> None:
    tree = small_manifest(factory=f"{name.replace(chr(0), 'x')}:net", sources=[name])
    tree["python_path"] = [".", name]
    with pytest.raises(ManifestError) as caught:
        _plan(folder, tree=tree)
    assert {problem.split(": ")[1] for problem in caught.value.problems} == {
        "python_path[1]",
        "models[0].factory",
        "models[0].sources[0]",
    }


def test_a_source_that_cannot_be_read_is_a_problem_of_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = small_manifest(sources=["mem"])
    (folder / "mem").symlink_to("/proc/self/mem")  # a regular file whose first byte nobody can read
    with pytest.raises(ManifestError, match="cannot be read"):
        _plan(folder, tree=tree)
