"""`verify --explain` where something misses: the sentence a person reads, and the exit code a pipeline gets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

import pytest

from tests.support.release import MANIFEST, Release, clean_environment, run_cachepipe

pytestmark = pytest.mark.slow

ENTRY = "encoder/float32/max-autotune"
SHAPES = ("batch=4,seq=64", "batch=1,seq=32")
RENAMED = "attribute renamed: attention → attn"
CODE = "the graph's code: built "


def changed(folder: Path, before: str, after: str) -> Path:
    """Returns the quickstart's manifest beside a model that has moved on since the build."""
    model = MANIFEST.with_name("quickstart_model.py")
    text = model.read_text()
    assert before in text
    (folder / model.name).write_text(text.replace(before, after))
    (folder / "cache").mkdir(mode=0o700)
    return Path(shutil.copy(MANIFEST, folder))


def verified(release: Release, folder: Path, manifest: Path, *words: str, **variables: str) -> CompletedProcess[str]:
    places = ["--store", release.store, "--work", str(folder / "work"), "--cache-root", str(folder / "cache")]
    env = clean_environment(NO_COLOR="1", COLUMNS="200", **variables)
    return run_cachepipe("verify", str(manifest), *places, *words, env=env)


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def test_case_a1_a_model_that_was_changed_is_refused_with_what_changed_and_how_to_mend_it(
    quickstart_release: Release, tmp_path: Path
) -> None:
    manifest = changed(tmp_path, "self.attention", "self.attn")
    report = tmp_path / "evidence"
    done = verified(quickstart_release, tmp_path, manifest, "--explain", "--report", str(report))
    assert done.returncode == 18, done.stderr
    said = [
        line
        for graph, shape in enumerate(SHAPES)
        for line in (
            f"{ENTRY} · {shape}: aotautograd miss of graph 0/{graph}",
            f"  {RENAMED}",
            "  fix: build again: the names of attributes are part of the key",
            "  key: aot_config",
        )
    ]
    assert "\n".join([*said, "verdict: refused"]) in "\n".join(lines_of(done.stdout)), done.stdout
    assert "aotautograd 0/1 · fxgraph 1/1" in done.stdout  # the inner layer was found: only what differs is said
    assert f"error: stale: {ENTRY}: changed since the build: source:quickstart_model.py" in done.stderr
    assert "min_hit_rate: limit 1, found 0.889 (aotautograd miss at batch=4,seq=64; " in done.stderr
    assert "Traceback" not in done.stderr
    explained = run_cachepipe("explain", str(report))  # from the evidence alone, of another process
    assert explained.returncode == 0 and lines_of(explained.stdout)[1:] == said, explained.stdout
    shown = run_cachepipe("report", str(report), "--json")
    causes = [row["explanation"]["cause"] for row in json.loads(shown.stdout)["details"]["explained"]]
    assert shown.returncode == 18 and causes == [RENAMED] * 2


def test_a_miss_that_cannot_be_compiled_is_explained_though_its_process_stopped(
    quickstart_release: Release, tmp_path: Path
) -> None:
    manifest = changed(tmp_path, "nn.GELU()", "nn.ReLU()")
    junit = tmp_path / "gates.xml"
    words = ("--no-compiler", "--explain", "--json", "--junit", str(junit))
    done = verified(quickstart_release, tmp_path, manifest, *words)
    assert done.returncode == 18, done.stderr
    document = json.loads(done.stdout)
    (found,) = document["verifications"]
    (cause,) = [line for line in found["explanations"] if CODE in line]
    assert "gelu" in cause.partition(", called ")[0] and "relu" in cause.partition(", called ")[2]
    assert f"{ENTRY} · {SHAPES[0]}: aotautograd miss of graph 0/0" in found["explanations"]
    assert "  key: gm" in found["explanations"]
    stopped = (
        f"verify failed: {ENTRY} · {SHAPES[0]}: torch compiles again, since the artifact does not hold what this call "
        "looks up: aotautograd of graph 0/0 (full_miss), tuning of graph 0/0"
    )
    assert stopped in found["violations"] and document["error"]["exit_code"] == 18
    assert f"error: {stopped}\n" in done.stderr
    failed = [one.text or "" for one in ElementTree.parse(junit).iter("failure")]
    assert any("there is no C++ compiler in this image" in text for text in failed)


def test_another_thread_count_is_refused_before_anything_is_restored(
    quickstart_release: Release, tmp_path: Path
) -> None:
    manifest = changed(tmp_path, "self.heads", "self.heads")
    before = str(json.loads(run_cachepipe("show", "quickstart@candidate", quickstart_release.store, "--json").stdout))
    assert "threads" in before
    done = verified(quickstart_release, tmp_path, manifest, "--explain", OMP_NUM_THREADS="64")
    assert done.returncode == 19 and done.stdout == ""
    assert "expected miss: threads " in done.stderr and " to 64 (set OMP_NUM_THREADS=" in done.stderr, done.stderr
    assert list((tmp_path / "cache").iterdir()) == []
