"""JUnit, Markdown and comparison of one release's evidence: what CI reads must be well-formed and say the same as the page."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cachepipe.adapters.html_page import render_page
from cachepipe.cli.main import main
from cachepipe.cli.report import write_junit
from cachepipe.errors import UsageError
from cachepipe.workflows.explaining import explain_files
from cachepipe.workflows.report import Report, report, report_json
from cachepipe.workflows.report_compare import compare
from cachepipe.workflows.report_junit import report_junit
from cachepipe.workflows.report_markdown import report_markdown
from cachepipe.workflows.report_page import report_page
from tests.support.evidence_files import ATTACK, EAGER, ENTRIES, SHAPES, evidence, write_release
from tests.support.evidence_files import write_evidence as write


@pytest.fixture
def missed(tmp_path: Path) -> Report:
    return report([write_release(tmp_path / "now")])


@pytest.fixture
def whole(tmp_path: Path) -> Report:
    return report([write_release(tmp_path / "before", has_misses=False, factor=1.5)])


def test_junit_has_a_case_per_shape_bucket_and_one_per_refusal(missed: Report) -> None:
    root = ElementTree.fromstring(report_junit(missed))
    suites = {suite.get("name"): suite for suite in root}
    assert set(suites) == {*ENTRIES, "gates"}
    assert [int(suites[name].get("tests", "")) for name in ENTRIES] == [len(SHAPES)] * 2
    assert [suites[name].get("failures") for name in (*ENTRIES, "gates")] == ["0", "1", "1"]
    (failure,) = suites[ENTRIES[1]].iter("failure")
    text = failure.text or ""
    assert (
        text.startswith("aotautograd miss\n")
        and "attribute renamed: encoder → enc → build again" in text
        and ATTACK in text
    )
    assert root.get("failures") == "2" and root.get("tests") == "7"


def test_junit_of_a_warm_release_passes_and_without_a_restored_process_proves_nothing(
    whole: Report, tmp_path: Path
) -> None:
    root = ElementTree.fromstring(report_junit(whole))
    assert root.get("failures") == root.get("skipped") == "0"
    write(tmp_path / "only", evidence(ENTRIES[0], "eager", EAGER))
    root = ElementTree.fromstring(report_junit(report([tmp_path / "only"])))
    assert (root.get("skipped"), root.get("failures"), root.get("tests")) == ("3", "1", "4")


def test_no_verdict_of_an_earlier_run_stands_for_one_that_left_no_evidence(tmp_path: Path) -> None:
    file = tmp_path / "gates.xml"
    write_junit(file, [write_release(tmp_path / "first", has_misses=False)])
    assert file.is_file()
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "x.verify.json").write_text("{")
    write_junit(file, [tmp_path / "second"])
    assert not file.exists()
    (tmp_path / "closed").write_text("no folder")
    with pytest.raises(UsageError, match="cannot write"):
        write_junit(tmp_path / "closed" / "gates.xml", [tmp_path / "first"])


def test_junit_survives_characters_that_no_xml_may_hold(tmp_path: Path) -> None:
    write(tmp_path, evidence(ENTRIES[0], "verify", EAGER, error="bad \x00\x1b[2J\ufffe <&>\"'"))
    root = ElementTree.fromstring(report_junit(report([tmp_path])))
    assert "bad \\x00\\x1b[2J\\ufffe <&>\"'" in (next(root.iter("failure")).text or "")


def test_markdown_says_verdict_causes_and_fixes_and_evidence_cannot_leave_its_cell(
    missed: Report, whole: Report
) -> None:
    text = report_markdown(missed, whole)
    assert text.startswith("## ❌ text-encoder: not warm")
    assert "**attribute renamed: encoder → enc**" in text and "→ build again: the names of attributes" in text
    assert "<script>" not in text and "&lt;script&gt;" in text and r"no \| pipe \* star" in text
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    widths = {line.replace(r"\|", "").count("|") for line in tables if line.startswith("| bert-base")}
    assert widths <= {10, 7}  # calls and processes, each with all its cells
    assert "misses now: " in text and "+510 %" in text
    assert "- not covered: /home/app/.nv/ComputeCache/7/c/9f2e (the CUDA driver" in text
    assert report_markdown(whole).startswith("## ✅ text-encoder: warm: every lookup hit")


def test_one_command_writes_every_form_and_a_second_one_appends_to_the_step_summary_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now, before = write_release(tmp_path / "now"), write_release(tmp_path / "before", has_misses=False)
    page, junit, summary = (tmp_path / name for name in ("out/report.html", "out/gates.xml", "summary.md"))
    summary.write_text("# what an earlier step of the job wrote\n")
    words = ["--html", str(page), "--junit", str(junit), "--markdown", str(summary), "--against", str(before)]
    for times in (1, 2):
        assert main(["report", str(now), *words]) == 18
        text = capsys.readouterr().out
        assert "verdict: not warm" in text and "against" in text and "misses now: " in text
        assert "not covered: /home/app/.nv/ComputeCache/7/c/9f2e" in text and "attribute renamed: encoder → enc" in text
        assert summary.read_text().startswith("# what an earlier step")
        assert summary.read_text().count("## ❌ text-encoder: not warm") == times
        assert ElementTree.parse(junit).getroot().get("failures") == "2"
        assert page.read_text().count("<!doctype html>") == 1 and "Compared with" in page.read_text()
    assert main(["report", str(before), "--junit", str(junit), "--json"]) == 0
    assert ElementTree.parse(junit).getroot().get("failures") == "0"


def test_two_releases_are_compared_by_shape_bucket_hits_and_size(missed: Report, whole: Report) -> None:
    found = compare(whole, missed)
    verdicts = {(row.entry, row.shape_bucket): row.verdict for row in found.shape_buckets}
    assert verdicts[ENTRIES[1], "batch=8,seq=128"] == "slower"
    assert sum(verdict == "same" for verdict in verdicts.values()) == 5
    assert (found.hit_rate_before, round(found.hit_rate_now or 0, 3)) == (1.0, 0.917)
    assert found.size_before > found.size_now and len(found.new_misses) == 1 and found.mended_misses == ()
    back = compare(missed, whole)
    assert back.mended_misses == found.new_misses and back.new_misses == ()


def test_entries_that_came_or_went_are_no_change_of_speed(whole: Report, tmp_path: Path) -> None:
    write(tmp_path / "one", evidence(ENTRIES[0], "verify", EAGER))
    one = report([tmp_path / "one"])
    assert {row.verdict for row in compare(one, whole).shape_buckets if row.entry == ENTRIES[1]} == {"new"}
    assert {row.verdict for row in compare(whole, one).shape_buckets if row.entry == ENTRIES[1]} == {"gone"}
    assert report_page(one)["has_entries"] is False and report_page(one, whole)["has_entries"] is True


def test_case_m1_e6_h7_the_json_document_has_phases_per_call_and_layers_per_compile(missed: Report) -> None:
    tree = report_json(missed)
    assert tree["hit_rate"] == pytest.approx(11 / 12) and len(tree["violations"]) == 1
    call = tree["shape_buckets"][0]
    assert call["cold_phases"]["tune_s"] > call["cold_phases"]["trace_s"] > 0 and call["phases"]["capture_s"] > 0
    compiled = next(row for row in tree["details"]["compiles"] if row["layers"]["aotautograd"] == "miss")
    assert compiled["compiled"]["recompile_reason"].startswith("0/0: tensor 'input_ids' size mismatch")
    assert tree["details"]["tuned"][0]["gain"] >= tree["details"]["tuned"][-1]["gain"]


def test_the_page_has_every_cause_and_no_markup_of_evidence(missed: Report, whole: Report) -> None:
    page = render_page(report_page(missed, whole, "release 41"))
    assert "attribute renamed: encoder → enc" in page and "release 41" in page
    assert "<script>alert" not in page and page.count("<script>") == 1 and "http" not in page.replace("http-equiv", "")


def test_what_verify_found_is_explained_from_its_files_alone(tmp_path: Path) -> None:
    answers = {answer.entry: answer for answer in explain_files([write_release(tmp_path)])}
    assert answers[ENTRIES[0]].lines() == (f"{ENTRIES[0]} · verify: 9 hits of 9 lookups",)
    lines = answers[ENTRIES[1]].lines()
    assert lines[0] == f"{ENTRIES[1]} · verify: 8 hits of 9 lookups"
    assert "  attribute renamed: encoder → enc" in lines and any(
        line.startswith("  fix: build again") for line in lines
    )


def test_a_report_is_written_into_a_pipe_and_through_a_link_and_replaces_neither(tmp_path: Path) -> None:
    from cachepipe.cli.report import _write

    pipe, link = tmp_path / "pipe", tmp_path / "link.html"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    _write(pipe, b"text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    os.close(reader)
    link.symlink_to(tmp_path / "page.html")
    _write(link, b"page")
    assert link.is_symlink() and (tmp_path / "page.html").read_bytes() == b"page"


def test_a_process_that_died_before_its_first_shape_bucket_fails(tmp_path: Path) -> None:
    write(
        tmp_path, dataclasses.replace(evidence(ENTRIES[0], "prove", EAGER, error="boom"), shape_buckets=(), lookups=())
    )
    root = ElementTree.fromstring(report_junit(report([tmp_path])))
    assert root.get("failures") == "1" and "boom" in (next(root.iter("failure")).text or "")


def test_outputs_that_differ_from_eager_fail_and_are_not_warm(tmp_path: Path) -> None:
    made = evidence(ENTRIES[0], "verify", EAGER)
    wrong = dataclasses.replace(made.shape_buckets[0], is_close=False, max_abs_diff=9e9)
    write(tmp_path, dataclasses.replace(made, shape_buckets=(wrong, *made.shape_buckets[1:])))
    found = report([tmp_path])
    root = ElementTree.fromstring(report_junit(found))
    assert root.get("failures") == "1" and "outputs differ" in (next(root.iter("failure")).text or "")
    assert not report_page(found)["is_ok"]
