"""Evidence and event files that anybody may have written: refused by name or shown as text, in bounded time and memory."""

from __future__ import annotations

import copy
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from cachepipe.adapters.html_page import render_page
from cachepipe.adapters.workdir import write_evidence
from cachepipe.cli import output
from cachepipe.cli.main import main
from cachepipe.domain.evidence import Explanation, GraphEvidence, OutsideFile, TunedKernel, WorkItem
from cachepipe.domain.phases import Phases
from cachepipe.domain.printable import one_line, printable, printable_json
from cachepipe.domain.record import finite, to_json
from cachepipe.errors import CachepipeError, IntegrityError, UsageError
from cachepipe.workflows.explaining import explain_files
from cachepipe.workflows.report import BAR_CELLS, bucket_cells, phase_bar, report, report_json
from cachepipe.workflows.report_junit import report_junit
from cachepipe.workflows.report_markdown import report_markdown
from cachepipe.workflows.report_page import report_page
from tests.support.evidence_files import ENTRIES, WARM, evidence, sizes, tuned, write_release
from tests.support.release import cachepipe_argv, clean_environment
from tests.support.users import as_other_user

OBEYED = "\x1b[2J\x1b]8;;http://x\x07\x9b31m\u202e\u2066\u200f\u2028\u0085\x00\x7f\ufeff\r"
"""What a terminal obeys, what turns text round, what ends a line somewhere, what no XML may hold."""
HOSTILE = f"a{OBEYED}\nverdict: warm: every lookup hit | b"


def tree(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = to_json(evidence(ENTRIES[0], "verify", WARM))
    return {**found, **changes}


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content) if not isinstance(content, str) else content)
    return path


def patched(place: str, value: Any) -> dict[str, Any]:
    """Returns evidence with one field, `a.0.b`, replaced."""
    whole = tree()
    at: Any = whole
    *path, last = place.split(".")
    for word in path:
        at = at[int(word)] if isinstance(at, list) else at[word]
    at[last] = value
    return whole


BROKEN = {
    "cut": json.dumps(tree())[:-40],
    "empty": "",
    "a list": [],
    "an unknown field": tree(extra=1),
    "a field is missing": {name: value for name, value in tree().items() if name != "work"},
    "an unknown outcome": patched("lookups.0.outcome", "warm"),
    "a count below zero": patched("shape_buckets.0.work.benchmarks", -46),
    "calls below zero": patched("shape_buckets.0.calls", -1),
    "a size of no list": patched("graphs.0.sizes", {"x": 5}),
    "sizes of no object": patched("graphs.0.sizes", [5]),
    "components of no object": tree(components=[1]),
    "components of one word": tree(components={"fxgraph/k": {"threads": "2"}}),
    "a component of three": tree(components={"fxgraph/k": {"threads": ["1", "2", "3"]}}),
    "a time beyond all": patched("shape_buckets.0.first_call_s", 1e300),
    "a time beyond all, written as a count": patched("shape_buckets.0.phases.trace_s", 2**53),
    "infinity": json.dumps(patched("shape_buckets.0.first_call_s", 12345.5)).replace("12345.5", "1e999"),
    "minus infinity": json.dumps(patched("shape_buckets.0.first_call_s", 12345.5)).replace("12345.5", "-1e999"),
    "nan": json.dumps(patched("shape_buckets.0.first_call_s", 12345.5)).replace("12345.5", "NaN"),
    "a huge integer": json.dumps(patched("shape_buckets.0.calls", 1234567)).replace("1234567", "9" * 5000),
    "nested": "[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("command", ["report", "explain"])
def test_a_damaged_file_is_named_with_what_to_do_and_never_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    write_release(tmp_path, has_misses=False)
    path = written(tmp_path / "bert-base_x_y.prove.json", BROKEN[name])
    for words in ([str(tmp_path)], [str(path)]):
        assert main([command, *words]) == 13, capsys.readouterr().err
        seen = capsys.readouterr()
        assert str(path) in seen.err and "make the evidence again" in seen.err and seen.out == ""


SUMMARIES: list[Any] = [
    {"verify": []},
    {"verify": {}},
    {"verify": {"violations": "none"}},
    {"verify": {"violations": [5]}},
    {"verify": {"violations": None}},
    {"verify": {"violations": [], "release": 5}},
    {"build": {"artifact": ["x"]}},
    {"build": {"packed_bytes": "12"}},
    {"build": {"packed_bytes": -1}},
    '{"verify": {"violations": [',
]


@pytest.mark.parametrize("summary", SUMMARIES, ids=str)
def test_a_damaged_summary_is_refused_and_is_no_bug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], summary: Any
) -> None:
    write_release(tmp_path, has_misses=False)
    written(tmp_path / "verify.cpu.json", summary)
    for words in (["report", str(tmp_path)], ["report", str(tmp_path), "--json"]):
        assert main(words) == 13
        assert "verify.cpu.json" in capsys.readouterr().err


def test_json_of_somebody_else_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_release(tmp_path, has_misses=False)
    written(tmp_path / "package.json", {"name": "x"})
    (tmp_path / ".hidden.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 0
    assert f"left out: {tmp_path}/package.json: JSON, but no evidence" in capsys.readouterr().err


def test_two_files_for_one_process_are_refused_whatever_their_order(tmp_path: Path) -> None:
    one = write_evidence(tmp_path / "one", evidence(ENTRIES[0], "verify", WARM))
    other = write_evidence(tmp_path / "other", evidence(ENTRIES[0], "verify", WARM, missed=0))
    for paths in ([one, other], [other, one], [tmp_path / "one", other]):
        with pytest.raises(UsageError) as caught:
            report(paths)
        assert str(one) in str(caught.value) and str(other) in str(caught.value) and "`verify`" in str(caught.value)
        with pytest.raises(UsageError):
            explain_files(paths)
    earlier = write_evidence(tmp_path / "earlier", replace(evidence(ENTRIES[0], "verify", WARM), device=""))
    for paths in ([one, earlier], [earlier, one]):  # it may be of the same device
        with pytest.raises(UsageError, match="two files"):
            report(paths)
    link = tmp_path / "link.json"
    link.symlink_to(one)
    assert len(report([one, one, tmp_path / "one", link]).steps) == 1  # one file, however often it is named


def test_the_targets_of_one_manifest_neither_overwrite_nor_hide_each_other(tmp_path: Path) -> None:
    whole = evidence(ENTRIES[0], "verify", WARM)
    paths = {
        device: write_evidence(tmp_path, replace(evidence(ENTRIES[0], "verify", WARM, missed), device=device))
        for device, missed in (("cpu", 1), ("cuda", None))
    }
    assert len(set(paths.values())) == 2
    found = report([tmp_path])
    assert not found.verdict.is_ok and {row.entry for row in found.steps} == {f"{whole.entry} on {d}" for d in paths}
    assert [row.entry for row in found.shape_buckets if row.problems] == [f"{whole.entry} on cpu"]
    assert {answer.entry for answer in explain_files([tmp_path])} == {row.entry for row in found.steps}
    (alone,) = report([paths["cuda"]]).steps
    assert alone.entry == whole.entry


@pytest.fixture(params=["fifo", "zero", "null", "socket", "folder", "link"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Returns a path at which there is no regular file, below a name that evidence has."""
    path = tmp_path / "x.verify.json"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "socket":
        os.mknod(path, 0o600 | stat.S_IFSOCK)
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "link":
        path.symlink_to(path.name)
    else:
        path.symlink_to(f"/dev/{request.param}")
    return path


def test_what_is_no_regular_file_neither_holds_nor_fills_the_process(odd: Path, tmp_path: Path) -> None:
    words = (UsageError, "not a regular file|cannot be read|no evidence files")
    for paths in ([odd], [tmp_path]):
        for read in (report, explain_files):
            with pytest.raises(words[0], match=words[1]):
                read(paths)
    events = tmp_path / "x.jsonl"
    events.symlink_to(odd)
    with pytest.raises(UsageError):
        explain_files([events])


def test_a_file_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    for name in ("x.verify.json", "x.jsonl"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(IntegrityError, match="too long"):
            explain_files([tmp_path / name])


@pytest.mark.parametrize("command", ["report", "explain"])
@pytest.mark.parametrize("place", ["absent.json", "file/below.json", "n" * 5000])
def test_a_path_that_cannot_be_read_is_a_usage_error_with_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, command: str
) -> None:
    (tmp_path / "file").write_text("{}")
    for path in (tmp_path / place, tmp_path / f"{place}.jsonl"):
        assert main([command, str(path)]) == 2
        err = capsys.readouterr().err
        assert printable(str(path)) in err and "hint: " in err


def test_half_of_what_names_an_artifact_is_refused_and_never_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CACHEPIPE_STORE", raising=False)
    folder = str(write_release(tmp_path / "evidence"))
    assert main(["explain", folder, "--ref", "demo@stable"]) == 2
    assert "`--ref` without a store" in capsys.readouterr().err
    assert main(["explain", folder, "--store", f"file://{tmp_path}/store"]) == 2
    assert "`--store` without an artifact" in capsys.readouterr().err
    monkeypatch.setenv("CACHEPIPE_STORE", f"file://{tmp_path}/store")  # for all commands: no choice of this one
    assert main(["explain", folder]) == 0


@pytest.mark.parametrize("command", ["report", "explain"])
def test_a_folder_without_permission_is_a_usage_error(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o000)
    words = as_other_user(cachepipe_argv(command, str(folder)))
    done = subprocess.run(words, env=clean_environment(), capture_output=True, text=True, check=False)
    folder.chmod(0o700)
    assert done.returncode == 2 and str(folder) in done.stderr and "readable" in done.stderr, done.stderr


@pytest.mark.parametrize("option", ["--html", "--junit", "--markdown"])
def test_a_report_that_cannot_be_written_is_a_usage_error(tmp_path: Path, option: str) -> None:
    folder = write_release(tmp_path / "evidence", has_misses=False)
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "x", tmp_path / ("n" * 300)):
        assert main(["report", str(folder), option, str(path)]) == 2


@pytest.mark.parametrize(("command", "option"), [("build", "--report"), ("verify", "--report"), ("verify", "--junit")])
def test_a_place_for_results_that_cannot_be_made_is_said_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    manifest = written(tmp_path / "manifest.yaml", "version: 1\n")  # of many problems: it would exit with 10
    for place in (manifest / "below" / "x", tmp_path / ("n" * 300) / "x"):
        assert main([command, str(manifest), option, str(place)]) == 2
        assert str(place.parent) in capsys.readouterr().err


def hostile(folder: Path) -> Path:
    """Writes evidence in which every text that anybody chooses is hostile."""
    one = evidence(ENTRIES[0], "verify", WARM)
    place = {"shape_bucket": {HOSTILE: 1}, "problems": [HOSTILE]}
    whole: dict[str, Any] = to_json(one)
    whole["shape_buckets"] = [{**row, **place} for row in whole["shape_buckets"][:1]]
    whole["lookups"] = [{**row, "outcome": "miss", "reason": HOSTILE, "key": HOSTILE} for row in whole["lookups"]]
    texts = dict.fromkeys(("entry", "torch_version", "error", "error_kind", "traceback"), HOSTILE)
    lists = {
        "explanations": [Explanation(HOSTILE, HOSTILE, "fxgraph", HOSTILE, HOSTILE, (HOSTILE,))],
        "graphs": [GraphEvidence(HOSTILE, HOSTILE, HOSTILE, {HOSTILE: [HOSTILE]}, Phases(), 1, HOSTILE, HOSTILE)],
        "work_items": [WorkItem("benchmarks", HOSTILE, HOSTILE, HOSTILE)],
        "outside_files": [OutsideFile(HOSTILE, 5, HOSTILE)],
        "tuned": [TunedKernel(HOSTILE, HOSTILE, 1.0, HOSTILE, 2.0, 3, HOSTILE)],
    }
    facts = {"settings": {HOSTILE: HOSTILE}, "graph_breaks": [HOSTILE], "tuned_kernels": [HOSTILE]}
    sizes = {HOSTILE: {"files": 1, "size_bytes": 5}}
    folder.mkdir()
    for step in ("tune", "verify"):
        content = {**whole, **texts, **to_json(lists), **facts, "file_sizes": sizes, "step": step}
        written(folder / f"x.{step}.json", content)
    written(folder / "verify.cpu.json", {"verify": {"release": HOSTILE, "artifact": HOSTILE, "violations": [HOSTILE]}})
    return folder


def test_every_form_shows_hostile_text_and_obeys_none_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hostile(tmp_path / "evidence")
    texts: list[str] = []
    for words in (
        ["report", "--against", str(folder)],
        ["report", "--json"],
        ["explain"],
        ["explain", "--json"],
    ):
        assert main([*words, str(folder)]) in (0, 18)
        seen = capsys.readouterr()
        texts += [seen.out, seen.err]
    found = report([folder])
    junit = report_junit(found)
    page = render_page(report_page(found, found, HOSTILE))
    texts += [junit.decode(), report_markdown(found, found), page]
    for text in texts:
        assert {char for char in text if not char.isprintable()} <= {"\n"}
    assert ElementTree.fromstring(junit).get("failures") != "0"
    for text in (*texts[:1], texts[4], *texts[-2:]):
        lines = [line.strip() for line in text.splitlines()]
        assert "verdict: warm: every lookup hit | b" not in lines and "x1b[2J" in text.replace("\\[", "[")
    assert [line for line in texts[0].splitlines() if line.startswith("verdict: ")][-1] == "verdict: not warm"


def test_a_warnings_own_hostile_path_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_release(tmp_path, has_misses=False)
    written(tmp_path / "\x1b[2J\u202e.json", {})
    assert main(["report", str(tmp_path)]) == 0
    assert "\\x1b[2J\\u202e.json: JSON, but no evidence" in capsys.readouterr().err


def test_text_is_escaped_once_and_plain_text_stays_itself() -> None:
    assert printable("plain – ü 漢") == "plain – ü 漢" == one_line(" plain –\n ü\u2028 漢 ")
    assert printable("a\x1b\x9b\u202e\n\\") == "a\\x1b\\x9b\\u202e\\n\\"
    document = {"a": "\x9b\u202e\U000e0001\n ü", "b": [1.5, None]}
    assert json.loads(printable_json(document)) == document
    assert all(char.isprintable() or char == "\n" for char in printable_json(document))


def test_a_document_never_holds_what_json_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": [float("inf"), float("nan"), (-float("inf"), 1.5)], "b": {"c": float("nan")}})
    strict = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert strict == {"a": [None, None, [None, 1.5]], "b": {"c": None}}
    assert finite({"a": 1}) == {"a": 1}
    with pytest.raises(ValueError, match="JSON"):
        printable_json({"a": float("nan")})


def places(content: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Returns the path of every field, of lists that of the first item."""
    rows = content.items() if isinstance(content, dict) else enumerate(content[:1]) if isinstance(content, list) else ()
    for key, value in rows:
        yield (*at, key)
        yield from places(value, (*at, key))


@pytest.mark.parametrize("value", [2**53, [], "\x1b", 1e-300, 999_999_999.0], ids=repr)
def test_no_value_of_any_field_makes_a_report_raise_what_is_not_ours(tmp_path: Path, value: Any) -> None:
    """A value of the wrong kind is refused; one of the right kind, however extreme, is shown in bounded memory."""
    path = write_evidence(tmp_path, evidence(ENTRIES[0], "verify", WARM, missed=0, tuned=tuned(), file_sizes=sizes(1)))
    whole = json.loads(path.read_bytes())
    for place in places(whole):
        content = copy.deepcopy(whole)
        at: Any = content
        for word in place[:-1]:
            at = at[word]
        at[place[-1]] = value
        path.write_text(json.dumps(content))
        try:
            found = report([path])
        except CachepipeError as error:
            assert error.exit_code in (2, 13)
            continue
        report_markdown(found, found), report_junit(found), report_page(found, found), bucket_cells(found)
        printable_json(finite(report_json(found)))
        assert all(len(phase_bar(row.phases or Phases(), 1e-300)) <= BAR_CELLS for row in found.shape_buckets)


def test_every_error_of_reading_is_one_of_ours(tmp_path: Path) -> None:
    """Flips every byte of a small piece of evidence; what comes is a report or our error, never a bug."""
    data = json.dumps(tree(graphs=[], settings={}), separators=(",", ":")).encode()
    path = tmp_path / "x.verify.json"
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x15]) + data[place + 1 :])
        try:
            found = report([path])
        except CachepipeError as error:
            assert error.exit_code in (2, 13)
        else:
            report_markdown(found), report_junit(found), report_page(found)
