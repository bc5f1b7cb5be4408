"""`verify --explain` where something misses: the sentence a person reads, and the exit code a pipeline gets."""

from __future__ import annotations

import json
import re
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


WRITES = """

@torch.compiler.assume_constant_result
def leaves_a_file():
    import pathlib

    file = pathlib.Path.home() / ".triton" / "cache" / "kernel.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")
    return 0
"""
"""Runs while the call is traced and leaves nothing in the graph."""


def changed(folder: Path, *changes: tuple[str, str], more: str = "") -> Path:
    """Returns the quickstart's manifest beside a model that has moved on since the build."""
    model = MANIFEST.with_name("quickstart_model.py")
    text = model.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (folder / model.name).write_text(text + more)
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
    called = "        x_bsd = self.tokens(tokens)"
    calls = (called, f"        leaves_a_file()\n{called}")
    manifest = changed(tmp_path, ("self.attention", "self.attn"), calls, more=WRITES)
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
    shown = lines_of(done.stdout)
    assert shown[-10:-2] == said and shown[-1] == "verdict: refused", done.stdout
    outside = (
        f"not covered: {ENTRY}: Triton's own folder (kernels outside of torch.compile; TRITON_HOME, TRITON_CACHE_DIR): "
    )
    assert shown[-2].startswith(f"{outside}1 files, 2 bytes, e.g. /") and shown[-2].endswith(
        "/.triton/cache/kernel.json"
    )
    assert "aotautograd 0/1 · fxgraph 1/1" in done.stdout  # the inner layer was found: only what differs is said
    assert f"error: stale: {ENTRY}: changed since the build: source:quickstart_model.py" in done.stderr
    gate = r"min_hit_rate: limit 1, found 0\.\d+ \(aotautograd miss at batch=4,seq=64; aotautograd miss at batch=1,seq=32\)"
    assert re.search(gate, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    explained = run_cachepipe("explain", str(report))  # from the evidence alone, of another process
    assert explained.returncode == 0 and lines_of(explained.stdout)[1:] == said, explained.stdout
    reported = run_cachepipe("report", str(report), "--json")
    details = json.loads(reported.stdout)["details"]
    assert reported.returncode == 18 and [row["explanation"]["cause"] for row in details["explained"]] == [RENAMED] * 2
    assert [row["file"]["path"].rpartition("/.")[2] for row in details["outside"]] == ["triton/cache/kernel.json"]


def test_a_miss_that_cannot_be_compiled_is_explained_though_its_process_stopped(
    quickstart_release: Release, tmp_path: Path
) -> None:
    manifest = changed(tmp_path, ("nn.GELU()", "nn.ReLU()"))
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
        "looks up: aotautograd of graph 0/0 (full_miss)"
    )
    (refused,) = [text for text in found["violations"] if text.startswith(stopped)]
    assert (
        "()" not in refused and document["error"]["exit_code"] == 18
    )  # torch gives no reason for a missed tuning record
    assert f"error: {refused}\n" in done.stderr
    failed = [one.text or "" for one in ElementTree.parse(junit).iter("failure")]
    assert any("there is no C++ compiler in this image" in text for text in failed)


def test_another_thread_count_is_refused_before_anything_is_restored(
    quickstart_release: Release, tmp_path: Path
) -> None:
    manifest = changed(tmp_path)
    variables = {"OMP_NUM_THREADS": "64", "MKL_DYNAMIC": "FALSE"}  # else never more than there are cores
    done = verified(quickstart_release, tmp_path, manifest, "--explain", **variables)
    assert done.returncode == 19 and done.stdout == ""
    assert "expected miss: threads " in done.stderr and " to 64 (set OMP_NUM_THREADS=" in done.stderr, done.stderr
    assert list((tmp_path / "cache").iterdir()) == []
