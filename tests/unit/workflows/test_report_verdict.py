"""One verdict: evidence that shows work, or proves nothing, is green in no form of a report and in no exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cachepipe.adapters.html_page import render_page
from cachepipe.adapters.workdir import write_evidence, write_json
from cachepipe.cli.main import main
from cachepipe.domain.evidence import (
    CHILD_WORK,
    LAYERS,
    BucketEvidence,
    EntryEvidence,
    Lookup,
    TunedKernel,
    Uncounted,
    Work,
    WorkItem,
)
from cachepipe.domain.verdict import BUILD_WORK, FREE_WORK, error_words
from cachepipe.workflows.report import report
from cachepipe.workflows.report_junit import report_junit
from cachepipe.workflows.report_markdown import report_markdown
from cachepipe.workflows.report_page import report_page
from tests.support.evidence_files import COLD, ENTRIES, WARM, evidence

Change = Callable[[EntryEvidence], EntryEvidence]


def first(change: Callable[[BucketEvidence], BucketEvidence]) -> Change:
    return lambda one: replace(one, shape_buckets=(change(one.shape_buckets[0]), *one.shape_buckets[1:]))


def looked(*lookups: Lookup) -> Change:
    return lambda one: replace(one, lookups=(*one.lookups, *lookups))


FAULTS: dict[str, Change] = {
    **{f"{name} in a call": first(lambda row, name=name: replace(row, work=Work(**{name: 1}))) for name in BUILD_WORK},
    **{f"{name} outside": lambda one, name=name: replace(one, work=Work(**{name: 1})) for name in BUILD_WORK},
    "a named kernel": lambda one: replace(one, work_items=(WorkItem("triton_compiles", "triton_1", "0/0", "-"),)),
    "a named search": lambda one: replace(one, tuned=(TunedKernel("mm", "a", 1.0, "b", 1.0, 2),)),
    "a benchmark by name": lambda one: replace(one, tuned_kernels=("mm",)),
    "never called": first(lambda row: replace(row, calls=0)),
    "left out": lambda one: replace(one, shape_buckets=one.shape_buckets[1:]),
    "no shape bucket": lambda one: replace(one, shape_buckets=(), lookups=()),
    "no lookups": lambda one: replace(one, lookups=()),
    "no lookups in a call": lambda one: replace(
        one, lookups=tuple(row for row in one.lookups if row.shape_bucket != one.lookups[0].shape_bucket)
    ),
    "a miss": looked(Lookup("batch=1,seq=128", "0/9", "fxgraph", "miss", "k", "full_miss")),
    "a bypass": looked(Lookup("batch=1,seq=128", "0/9", "fxgraph", "bypass")),
    "a miss nowhere": looked(Lookup("-", "", "native", "miss")),
    "ran eager": first(lambda row: replace(row, graphs=0)),
    "other outputs": first(lambda row: replace(row, is_close=False)),
    "not compared": first(lambda row: replace(row, is_close=None, max_abs_diff=None)),
    "a problem": first(lambda row: replace(row, problems=("recompile limit",))),
    "an error": lambda one: replace(one, error="boom\nat once"),
    "events dropped": lambda one: replace(one, dropped=1),
    **{
        f"{kind} that nobody could count": lambda one, kind=kind: replace(one, uncounted=(Uncounted(kind, "torch.x"),))
        for kind in (*BUILD_WORK, *LAYERS, CHILD_WORK, "a kind of tomorrow")
    },
}


def folder_of(folder: Path, change: Change, step: str = "verify") -> Path:
    write_evidence(folder, evidence(ENTRIES[0], "tune", COLD))
    write_evidence(folder, evidence(ENTRIES[1], "verify", WARM))
    write_evidence(folder, change(evidence(ENTRIES[0], step, WARM)))
    return folder


def greens(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[bool]:
    """Returns whether terminal, JSON, exit code, JUnit, Markdown and page call the evidence warm."""
    code, text = main(["report", str(folder)]), capsys.readouterr().out
    also, document = main(["report", str(folder), "--json"]), json.loads(capsys.readouterr().out)
    assert code == also in (0, 18)
    found = report([folder])
    root = ElementTree.fromstring(report_junit(found))
    page = render_page(report_page(found))
    markdown = report_markdown(found)
    assert ("✅" in markdown) != ("❌" in markdown)
    return [
        "verdict: warm" in text,
        document["verdict"]["is_ok"],
        code == 0,
        root.get("failures") == root.get("skipped") == "0",
        markdown.startswith("## ✅"),
        'class="pill verdict good"' in page,
    ]


def test_a_warm_release_is_green_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert greens(folder_of(tmp_path, lambda one: one), capsys) == [True] * 6


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_red_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert greens(folder_of(tmp_path, FAULTS[name]), capsys) == [False] * 6


@pytest.mark.parametrize("step", ["prove", "fallback"])
@pytest.mark.parametrize("name", ["a miss", "no lookups", "compiler_runs outside"])
def test_every_restored_process_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, step: str
) -> None:
    assert greens(folder_of(tmp_path, FAULTS[name], step), capsys) == [False] * 6


def test_a_second_proof_does_not_hide_what_the_first_one_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, FAULTS["benchmarks in a call"], "prove")
    write_evidence(folder, evidence(ENTRIES[0], "verify", WARM))
    assert greens(folder, capsys) == [False] * 6


def test_what_was_never_restored_proves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_evidence(tmp_path, evidence(ENTRIES[0], "eager", WARM))
    assert greens(tmp_path, capsys) == [False] * 6
    write_evidence(tmp_path, evidence(ENTRIES[1], "verify", WARM))  # another entry's proof is none of this one
    assert greens(tmp_path, capsys) == [False] * 6


def test_what_gates_refused_is_red_although_every_lookup_hit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, lambda one: one)
    write_json(folder / "verify.cpu.json", {"verify": {"violations": ["min_speedup: limit 9, found 2.00"]}})
    assert greens(folder, capsys) == [False] * 6


def test_what_is_no_work_of_a_build_leaves_a_start_warm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = {field.name for field in fields(Work)} - set(BUILD_WORK)
    assert free == {"compiler_queries", "isa_probes", "new_files", "worker_kernels", "graph_captures"}
    work = Work(**dict.fromkeys(free, 2))
    assert greens(folder_of(tmp_path, first(lambda row: replace(row, work=work))), capsys) == [True] * 6


@pytest.mark.parametrize("kind", ["native_builds", *FREE_WORK])
def test_what_could_not_be_counted_is_named_in_every_form_and_is_never_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    name = "torch._inductor.cpp_builder.run_compile_cmd"
    folder = folder_of(tmp_path, lambda one: replace(one, uncounted=(Uncounted(kind, name),)))
    is_free = kind in FREE_WORK
    assert greens(folder, capsys) == [is_free] * 6  # nothing depends on a count that no gate limits
    words = f"not counted: {kind.replace('_', ' ')}"
    assert main(["report", str(folder)]) == (0 if is_free else 18)
    seen = capsys.readouterr()
    assert words in " ".join(seen.out.split())
    assert (f"could not be counted: native builds ({name})" in seen.err) != is_free
    main(["report", str(folder), "--json"])
    document = json.loads(capsys.readouterr().out)
    told = [row["uncounted"] for row in (*document["steps"], *document["shape_buckets"]) if row["entry"] == ENTRIES[0]]
    assert [{"kind": kind, "name": name}] in told
    found = report([folder])
    (row,) = ElementTree.fromstring(report_junit(found)).iter("property")
    assert (row.get("name"), row.get("value")) == ("not counted", f"{kind.replace('_', ' ')} ({name})")
    for text in (report_markdown(found), render_page(report_page(found))):
        assert f"none seen; {words}" in text and ("could not be counted" in text) != is_free


def test_an_error_of_torch_is_told_in_the_words_that_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = "there is no C++ compiler in this image"
    error = f"InductorError: CppCompileError: C++ compile error\nCommand:\n{'-D X ' * 400}\nOutput:\ncachepipe: {ours}\nmore"
    assert error_words(error) == f"InductorError: {ours}" and error_words(" boom\nat once ") == "boom\nat once"
    assert main(["report", str(folder_of(tmp_path, lambda one: replace(one, error=error)))]) == 18
    seen = capsys.readouterr()
    assert f"error: {ENTRIES[0]}: verify stopped: InductorError: {ours}\n" in seen.err
    assert "-D X" not in seen.out + seen.err and ours in " ".join(seen.out.split())
    folder = folder_of(tmp_path / "long", lambda one: replace(one, error="E: " + "x" * 5000))
    assert main(["report", str(folder)]) == 18
    assert max(map(len, capsys.readouterr().err.splitlines())) < 400
    assert "x" * 5000 in report_junit(report([folder])).decode()  # the document has all


def test_the_error_names_entry_shape_bucket_and_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, FAULTS["ptxas_runs in a call"])
    assert main(["report", str(folder), "--json"]) == 18
    seen = capsys.readouterr()
    line = f"{ENTRIES[0]} · batch=1,seq=128: work was done: 1 ptxas runs"
    assert f"error: {line}" in seen.err and json.loads(seen.out)["error"]["message"] == line
    assert json.loads(seen.out)["error"]["exit_code"] == 18
