"""Events: one logfmt line each, whole JSON lines in a bounded file, and nothing that hurts a service."""

from __future__ import annotations

import json
import os
import resource
import shlex
from pathlib import Path

import pytest

from cachepipe.runtime import events


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    monkeypatch.setattr(events, "_has_failed", False)
    monkeypatch.setattr(events, "_is_full", False)
    return tmp_path / "events.jsonl"


def test_an_event_is_one_logfmt_line_and_one_json_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events.say("late_compile", graph="0/1", reason='tensor "x"\nsize = 5', seconds=1.5)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cachepipe late_compile graph=0/1 ")
    assert shlex.split(line)[-1] == "seconds=1.5"
    (row,) = [json.loads(text) for text in file.read_text().splitlines()]
    assert row["event"] == "late_compile" and row["reason"] == 'tensor "x"\nsize = 5' and row["pid"] == os.getpid()
    assert row["time"].endswith("Z") and len(row["time"]) == 24


def test_a_number_that_json_does_not_have_is_null_and_costs_no_event(file: Path) -> None:
    events.note("late_compile", seconds=float("nan"), sizes={"x": [float("inf"), 5]}, where=Path("/x"))
    (row,) = [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]
    assert row["seconds"] is None and row["sizes"] == {"x": [None, 5]} and row["where"] == "/x"


def test_what_a_terminal_obeys_is_shown_in_the_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events.say("late_compile", reason='\x1b[2J\x9b31m\u202e\u2028\t "x" \\ \n', plain="größe")
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert line.isprintable() and line.endswith(" plain=größe")
    assert r'reason="\x1b[2J\x9b31m\u202e\u2028\t \"x\" \\ \n"' in line


def test_a_note_is_no_talk_and_may_hold_what_json_does_not_know(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events.note("evidence", settings={"device": Path("/x")}, text="\ud800")
    assert capsys.readouterr().err == ""
    assert json.loads(file.read_text())["settings"] == {"device": "/x"}


def test_the_file_is_bounded_and_its_end_is_told_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(events, "MAX_FILE_BYTES", 300)
    for _ in range(100):
        events.note("compile", place="x" * 50)
    (line,) = capsys.readouterr().err.splitlines()
    assert "events problem=" in line and "300 bytes are there" in line
    assert file.stat().st_size < 600
    assert all(json.loads(line) for line in file.read_text().splitlines())
    file.rename(file.with_suffix(".1"))  # as a rotation does
    events.note("ready")
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["ready"]


def test_a_disk_that_takes_half_an_event_is_told_and_gets_no_second_half(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events.note("ready")
    whole = file.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 20, before[1]))
    try:
        events.note("evidence", lookups=["x" * 100])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    events.note("late_compile")
    assert file.stat().st_size == whole + 20 and b"late_compile" not in file.read_bytes()
    (line,) = capsys.readouterr().err.splitlines()
    assert "events problem=" in line and "no room for a whole event" in line


def test_a_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(events.VARIABLE, str(tmp_path))
    monkeypatch.setattr(events, "_has_failed", False)
    for _ in range(3):
        events.note("ready")
    assert len([line for line in capsys.readouterr().err.splitlines() if "events problem=" in line]) == 1


def test_a_closed_stderr_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    events.say("ready", hits=1)
    assert json.loads(file.read_text())["hits"] == 1


def test_a_pipe_that_nobody_reads_does_not_hold_the_service(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(file)
    events.note("ready")
    assert "events problem" in capsys.readouterr().err
