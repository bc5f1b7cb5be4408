"""`ci/gpu` is killed, meets a full disk, a damaged journal, another invocation: what was measured stays, what was not is told."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.release import clean_environment
from tests.unit.test_gpu_runs import CI, FACTS, lines, script

__all__ = ["script"]


def line(**changes: Any) -> bytes:
    whole = {"key": "a", "entry": "a", "variant": "eager", "date": "2026-01-01", **FACTS, **changes}
    return json.dumps({name: value for name, value in whole.items() if value is not None}).encode() + b"\n"


# --- the journal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, len(line()), 40))
def test_a_line_whose_writer_was_killed_is_taken_out_and_measured_again(script: Any, tmp_path: Path, size: int) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(line() + line(key="b")[:size])
    assert [row["key"] for row in script.gpu_table.read_lines([path])] == ["a"]
    journal = script.Journal(path, FACTS)
    assert journal.has("a") and not journal.has("b")
    journal.note("b", entry="b", variant="eager")
    assert [json.loads(text)["key"] for text in path.read_text().splitlines()] == ["a", "b"]


def test_a_whole_line_without_its_end_counts_and_the_next_one_stands_alone(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(line() + line(key="b").rstrip(b"\n"))
    assert [row["key"] for row in script.gpu_table.read_lines([path])] == ["a", "b"]
    journal = script.Journal(path, FACTS)
    assert journal.has("b")
    journal.note("c", entry="c", variant="eager")
    assert [row["key"] for row in script.Journal(path, FACTS).lines] == ["a", "b", "c"]


def test_what_a_full_disk_cut_off_is_no_line_and_the_journal_goes_on(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    journal = script.Journal(path, FACTS)
    journal.note("a", entry="a", variant="eager")
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with pytest.raises(script.Damaged, match=r"lines\.jsonl: file too large: `b` is not noted"):
            journal.note("b", entry="b", variant="eager")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not journal.has("b") and path.read_bytes().startswith(before)
    journal.note("c", entry="c", variant="eager")
    assert [row["key"] for row in script.Journal(path, FACTS).lines] == ["a", "c"]


def test_two_invocations_with_one_journal_lose_no_line(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    one, other = script.Journal(path, FACTS), script.Journal(path, FACTS)
    for key, journal in {"a": one, "b": other, "c": one, "d": one, "e": other}.items():
        journal.note(key, entry=key, variant="eager")
    assert [row["key"] for row in script.Journal(path, FACTS).lines] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("left", [None, b"", line(key="a")])
def test_lines_that_are_taken_out_meanwhile_leave_no_gap(script: Any, tmp_path: Path, left: bytes | None) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(line(key="a") + line(key="b"))
    journal = script.Journal(path, FACTS)
    path.unlink() if left is None else path.write_bytes(left)
    journal.note("c", entry="c", variant="eager")
    assert [row["key"] for row in script.Journal(path, FACTS).lines] == [*(["a"] if left else []), "c"]


@pytest.mark.parametrize(
    "damage",
    [
        b"{\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"null\n",
        b"[" * 100_000 + b"\n",
        line(key=None),
        line(entry=1),
        line(date=None),
        line(device=["NVIDIA H200"]),
        line(versions=None),
        line(versions={}),
        line(versions={"torch": 2.11}),
        line(first_calls_s=float("nan")),
        line(first_calls_s=float("inf")),
        line(first_calls_s=7).replace(b"7", b"1e999"),
    ],
)
def test_damage_in_the_midst_is_refused_by_file_and_line(script: Any, tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(line() + b"\n" + damage + line(key="b"))
    for read in (lambda: script.Journal(path, FACTS), lambda: script.gpu_table.read_lines([path])):
        with pytest.raises(script.Damaged, match=r"lines\.jsonl:3: .*: remove it, and it is measured again"):
            read()
    assert path.read_bytes().endswith(line(key="b"))


@pytest.mark.parametrize(
    "other",
    [{"device": "NVIDIA H100"}, {"versions": {"torch": "2.12.1+cu130"}}, {"versions": {"torch": "2.11.0+cu126"}}],
)
def test_measurements_of_another_gpu_or_torch_are_not_taken_for_this_ones(
    script: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(line(**other))
    with pytest.raises(script.Damaged, match=r"this is NVIDIA H200 with torch 2\.11\.0\+cu130: name another journal"):
        script.Journal(path, FACTS)
    path.write_bytes(line(driver="590.1", cores=8))
    assert script.Journal(path, FACTS).has("a")


def test_what_failed_where_no_gpu_was_visible_yet_keeps_no_later_measurement_out(script: Any, tmp_path: Path) -> None:
    path, other = tmp_path / "lines.jsonl", {"device": "AMD EPYC", "versions": {"torch": "2.11.0+cu130"}}
    failures = [f"{name} · failed" for name in ("bert-base:default", "vit-b-16:max-autotune")]
    path.write_bytes(b"".join(line(key=key, entry=key.split()[0], error="no GPU", **other) for key in failures))
    alone = merged("--merge", path, "--output", tmp_path / "record.json")
    assert alone.returncode == 1 and "measure no known entry" in alone.stderr
    lines(script.Journal(path, FACTS), "bert-base:default")
    done = merged("--merge", path, "--output", tmp_path / "record.json")
    assert done.returncode == 0 and "| bert-base:default |" in done.stdout, done.stderr
    assert "| vit-b-16:max-autotune | – |" in done.stdout  # a failure is no row less
    record = json.loads((tmp_path / "record.json").read_text())
    assert [machine["device"] for machine in record["machines"]] == ["NVIDIA H200"]


# --- the table ------------------------------------------------------------------------------------------------------


def merged(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CI / "gpu"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())


@pytest.mark.parametrize("other", [{"device": "NVIDIA H100"}, {"versions": {"torch": "2.12.1+cu130"}}])
def test_one_table_holds_one_gpu_and_one_torch(script: Any, tmp_path: Path, other: dict[str, Any]) -> None:
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    lines(script.Journal(one, FACTS), "bert-base:max-autotune")
    lines(script.Journal(two, {**FACTS, **other}), "vit-b-16:max-autotune")
    done = merged("--merge", one, two, "--output", tmp_path / "record.json")
    assert done.returncode == 1 and not (tmp_path / "record.json").exists()
    assert done.stderr.startswith("gpu: the lines are of NVIDIA H") and " and NVIDIA H" in done.stderr


def test_another_gpus_record_does_not_take_the_name_of_the_measured_one(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    lines(script.Journal(path, {**FACTS, "device": "NVIDIA L4", "versions": {"torch": "0.0.0"}}), "bert-base:default")
    done = merged("--merge", path)
    assert done.returncode == 1 and "of NVIDIA L4, not of NVIDIA H200: name the record by --output" in done.stderr
    assert not (CI / "results" / "h200-torch0.0.json").exists()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (line(entry="nothing of ours"), "measure no known entry"),
        (
            line(entry="bert-base:default", variant="restored"),
            "a line lacks what the table shows (KeyError: 'calls_s')",
        ),
        (line(entry="bert-base:default", variant="build", facts=7), "a line lacks what the table shows (TypeError"),
        (
            line(entry="bert-base:default", variant="build", tuning=[]),
            "a line lacks what the table shows (AttributeError",
        ),
    ],
)
def test_a_line_that_the_table_cannot_show_ends_in_words(tmp_path: Path, row: bytes, words: str) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(row)
    done = merged("--merge", path, "--output", tmp_path / "record.json")
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize(
    ("variant", "field"),
    [
        ("restored", "first_calls_s"),
        ("restored", "ready_s"),
        ("restored", "calls_s"),
        ("restored", "work"),
        ("build", "facts"),
        ("build", "bytes"),
        ("build", "tuning"),
        ("verify", "shape_buckets"),
    ],
)
@pytest.mark.parametrize("value", [pytest.param(10**400, id="huge"), -1, True, "nan", "0", None])
def test_no_verdict_rests_on_what_is_no_number(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], variant: str, field: str, value: Any
) -> None:
    def each(found: Any) -> Any:
        if isinstance(found, dict):
            return {name: each(inner) for name, inner in found.items()}
        return [each(inner) for inner in found] if isinstance(found, list) else value

    path = tmp_path / "lines.jsonl"
    lines(script.Journal(path, FACTS), "bert-base:default")
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    for row in rows:
        if row["variant"] == variant:
            row[field] = each(row[field])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(script.Damaged, match=r"a line lacks what the table shows .* was not (measured|counted)"):
        script.merge([path], script.H200, tmp_path / "record.json")
    assert not (tmp_path / "record.json").exists() and capsys.readouterr().out == ""


@pytest.mark.parametrize("output", ["", ".", "folder", "file/below"])
def test_a_record_that_cannot_stand_there_is_told(script: Any, tmp_path: Path, output: str) -> None:
    path = tmp_path / "lines.jsonl"
    lines(script.Journal(path, FACTS), "bert-base:default")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    command = [sys.executable, str(CI / "gpu"), "--merge", str(path), "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment(), cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("gpu: [Errno") and "Traceback" not in done.stderr
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", "folder", "lines.jsonl"]


def test_a_locale_that_lacks_the_tables_signs_gets_table_and_record(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines(script.Journal(path, FACTS), "bert-base:default")
    command = [sys.executable, str(CI / "gpu"), "--merge", str(path), "--output", str(tmp_path / "record.json")]
    env = clean_environment(PYTHONIOENCODING="ascii")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0 and "| cold ? restored |" in done.stdout, done.stderr
    assert "÷" in json.loads((tmp_path / "record.json").read_text())["targets"][0]["what"]


@pytest.mark.usefixtures("capsys")  # else the limit would meet pytest's own file for the table first
def test_a_record_that_finds_no_room_leaves_the_old_one(script: Any, tmp_path: Path) -> None:
    path, record = tmp_path / "lines.jsonl", tmp_path / "record.json"
    lines(script.Journal(path, FACTS), "bert-base:default")
    assert script.merge([path], script.H200, record) == 0
    before = record.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            script.merge([path], script.H200, record)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert record.read_bytes() == before
    assert sorted(found.name for found in tmp_path.iterdir()) == ["lines.jsonl", "record.json"]


# --- kills and neighbours -------------------------------------------------------------------------------------------


def test_what_a_killed_invocation_left_behind_keeps_the_next_one_out_until_it_ends(script: Any, tmp_path: Path) -> None:
    work, started = tmp_path / "work", tmp_path / "started"
    os.mkfifo(started)
    child = [sys.executable, "-c", f"open({str(started)!r}, 'w').close(); input()"]
    program = f"""
import sys, pathlib; sys.path.insert(0, {str(CI)!r})
from gpu_processes import Processes
processes = Processes()
with processes.alone_in(pathlib.Path({str(work)!r})):
    processes.run({child!r}, {{}}, 600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as first:
        started.read_bytes()
        words = ["--cpu", "--work", work, "--lines", tmp_path / "lines.jsonl"]
        busy = merged(*words)
        first.kill()
        first.wait()
        with pytest.raises(script.Busy, match="another ci/gpu works there"), processes(script).alone_in(work):
            pass
        assert busy.returncode == 1 and "name another folder by --work" in busy.stderr
        assert merged(*words, "--list").returncode == 0
        first.communicate(b"\n")
    with (work / "ci-gpu.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the child has ended
    with processes(script).alone_in(work):
        pass


def processes(script: Any) -> Any:
    return script.gpu_runs.Processes()


@pytest.mark.parametrize("ignored", ["SIGINT", "SIGTERM"])
def test_a_process_that_outlasts_its_limit_is_ended_whatever_it_ignores(
    script: Any, monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    monkeypatch.setattr("gpu_processes.GRACE_S", 0.5)
    text = f"import signal; signal.signal(signal.{ignored}, signal.SIG_IGN); signal.pause()"
    with pytest.raises(script.gpu_runs.Outlasted, match="not over in 1 s"):
        processes(script).run([sys.executable, "-I", "-S", "-c", text], {}, 1.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_runs_starts_nothing_more_and_notes_no_failure(tmp_path: Path, number: int) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    program = f"""
import importlib.machinery, importlib.util, sys, time
from pathlib import Path
sys.path.insert(0, {str(CI)!r})
loader = importlib.machinery.SourceFileLoader("gpu", {str(CI / "gpu")!r})
gpu = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu", loader))
loader.exec_module(gpu)
from gpu_journal import Journal
work = Path({str(tmp_path)!r})
runs = gpu.Runs(work / "m.yaml", work, Journal(work / "lines.jsonl", {FACTS!r}), time.monotonic() + 600, False)
def build(entry):
    runs.processes.run([sys.executable, "-c", "import signal; open({str(started)!r}, 'w').close(); signal.pause()"], {{}}, 600)
runs.build_missing = build
sys.argv = ["gpu"]
sys.exit(gpu.measure(runs, list(gpu.H200), gpu.parse()))
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as stopped:
        started.read_bytes()
        stopped.send_signal(number)
        _, talk = stopped.communicate(timeout=60)
    assert stopped.returncode == 128 + number
    assert talk == "gpu: stopped: run again to go on\n"
    assert not (tmp_path / "lines.jsonl").exists()


def test_one_entrys_fault_of_any_kind_is_noted_and_the_others_go_on(script: Any, tmp_path: Path) -> None:
    journal = script.Journal(tmp_path / "lines.jsonl", FACTS)
    seen: list[str] = []

    def work(entry: Any) -> None:
        seen.append(entry.name)
        if len(seen) == 1:
            raise FileNotFoundError(2, "No such file or directory", "tuned")

    assert script.in_parallel(script.or_note(journal, work), list(script.H200[:3]), 1)
    assert len(seen) == 3
    (row,) = journal.lines
    assert row["error"] == "FileNotFoundError: [Errno 2] No such file or directory: 'tuned'"
    assert not journal.has(row["key"])


def test_a_journal_that_cannot_be_written_ends_the_invocation_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = merged("--cpu", "--list", "--lines", tmp_path)
    assert (done.returncode, done.stderr) == (1, f"gpu: {tmp_path}: is a directory: name the journal by --lines\n")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    done = merged("--cpu", "--work", tmp_path / "loop" / "below")
    assert done.returncode == 1 and done.stderr.startswith("gpu: ") and "Traceback" not in done.stderr
    done = merged("--cpu", "--work", tmp_path / "file" / "below", "--lines", tmp_path / "lines.jsonl")
    assert done.returncode == 1 and done.stderr.startswith("gpu: [Errno 20] Not a directory")


def test_a_build_killed_while_its_tuned_folder_was_put_aside_is_gone_on_with(script: Any, tmp_path: Path) -> None:
    def left_by_a_build(folder: Path) -> Path:
        own = folder / "work" / "entries" / "1234"
        (own / "tune" / "inductor").mkdir(parents=True)
        (own / "tune.bundle").write_text("bundle")
        return own

    def is_kept(folder: Path) -> bool:
        script.Runs.keep_tuned(folder)
        whole = (folder / "tuned" / "inductor").is_dir() and (folder / "bundle").read_text() == "bundle"
        return whole and not (folder / "work").exists()

    left_by_a_build(tmp_path / "1")
    assert is_kept(tmp_path / "1")
    assert is_kept(tmp_path / "1")  # killed after the work folder went
    left_by_a_build(tmp_path / "2").joinpath("tune").rename(tmp_path / "2" / "tuned")
    assert is_kept(tmp_path / "2")
    with pytest.raises(script.Failed, match="remove this folder, and it is built anew"):
        script.Runs.keep_tuned(tmp_path / "3")


def runs_in(script: Any, work: Path) -> Any:
    return script.Runs(
        work / "m.yaml", work, script.Journal(work / "lines.jsonl", FACTS), time.monotonic() + 600, False
    )


def begun(runs: Any, entry: Any, sources: str = "") -> Path:
    """Makes an entry's work folder as a build begins it."""
    folder: Path = runs.folder(entry)
    folder.mkdir()
    (folder / "sources").write_text(sources)
    return folder


def test_what_other_code_built_is_not_measured_as_this_ones_but_built_anew(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, entry = runs_in(script, tmp_path), script.H200[0]
    (begun(runs, entry, "before") / "built.json").write_text('{"build_s": 1}')
    seen: list[list[str]] = []

    def command(words: list[str], **_: object) -> str:
        seen.append([path.name for path in runs.folder(entry).iterdir() if path.name != "root"])
        raise script.Failed(words[0])

    monkeypatch.setattr(runs, "command", command)
    runs.measure_missing(entry)
    for _ in range(2):
        with pytest.raises(script.Failed, match="build"):
            runs.build_missing(entry)
        assert seen.pop() == ["sources"]
        assert not runs.gone(entry).exists() and runs.is_ours(entry)
    (runs.folder(entry) / "built.json").write_text('{"build_s": 1}')
    runs.build_missing(entry)
    assert runs.record(entry) and not seen and runs.journal.lines == []


@pytest.mark.parametrize("data", [b"", b'{"build_s": 1', b"\xff", b"[]"])
def test_a_build_whose_record_was_cut_off_is_built_again_and_not_measured(
    script: Any, tmp_path: Path, data: bytes
) -> None:
    runs, entry = runs_in(script, tmp_path), script.H200[0]
    begun(runs, entry)
    (runs.folder(entry) / "built.json").write_bytes(data)
    built = []
    runs.build = built.append
    runs.measure_missing(entry)
    runs.build_missing(entry)
    assert built == [entry] and runs.journal.lines == []


def test_what_is_measured_goes_whole_and_a_killed_removal_is_made_up_for(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = runs_in(script, tmp_path)
    one, other = (entry for entry in script.H200 if entry.name in ("bert-base:default", "bert-base:reduce-overhead"))
    for entry in (one, other):
        (begun(runs, entry) / "store").mkdir()
        (runs.folder(entry) / "built.json").write_text('{"build_s": 1}')
        for key, _, _ in runs.steps(entry):
            runs.journal.note(key, entry=entry.name, variant="eager")
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *_, **__: None)
        runs.measure_missing(one)
    assert not runs.folder(one).exists()
    runs.build_missing(one)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["bert-base.reduce-overhead"]


def test_the_journal_lies_in_the_work_folder_unless_it_is_named(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--work", "elsewhere"])
    assert script.parse().lines == Path("elsewhere/lines.jsonl")
    monkeypatch.setattr("sys.argv", ["gpu", "--lines", "named.jsonl"])
    assert script.parse().lines == Path("named.jsonl")


def test_a_trial_on_the_cpu_leaves_the_gpus_work_folder_alone(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    gpu = script.parse()
    monkeypatch.setattr("sys.argv", ["gpu", "--cpu"])
    cpu = script.parse()
    assert gpu.work == CI.parent / ".work" / "gpu" and cpu.work != gpu.work
    assert cpu.lines.parent == cpu.work


@pytest.mark.parametrize(
    "words",
    [["--jobs", "0"], ["--limit", "0"], ["--limit", "nan"], ["--limit", "inf"], ["--limit=-1"], ["--jobs", "x"]],
)
def test_a_number_that_means_nothing_is_a_usage_error(words: list[str]) -> None:
    done = merged("--list", *words)
    assert done.returncode == 2 and "invalid number value" in done.stderr


def test_a_limit_that_no_step_fits_in_is_told_and_not_tried_for_ever(tmp_path: Path) -> None:
    done = merged("bert-base:default", "--work", tmp_path, "--lines", tmp_path / "lines.jsonl", "--limit", "90")
    assert done.returncode == 1 and done.stderr == "gpu: the next step takes about 100 s: raise --limit\n"


# --- a bare host ----------------------------------------------------------------------------------------------------


def bare(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the script without site-packages: no cachepipe, no pip."""
    command = [sys.executable, "-I", "-S", str(CI / "gpu"), "--list", "--wheels", str(tmp_path / ".whl"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())


def test_a_host_without_cachepipe_and_wheels_is_told_both_ways(tmp_path: Path) -> None:
    done = bare(tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "has no cachepipe" in done.stderr and "pip install" in done.stderr and "ci/gpu-wheels" in done.stderr


def test_wheels_that_cannot_be_installed_are_told_with_the_way_round(tmp_path: Path) -> None:
    (tmp_path / ".whl").mkdir()
    (tmp_path / ".whl" / "nothing-1.0-py3-none-any.whl").touch()
    done = bare(tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "cannot be installed" in done.stderr and "python3 -m venv --system-site-packages" in done.stderr


@pytest.mark.parametrize("name", ["nothing.whl", "-1.0.whl", "nothing-.whl", "nothing-1.0.whl", "nothing--py3.whl"])
def test_a_file_that_is_named_like_no_wheel_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / ".whl").mkdir()
    (tmp_path / ".whl" / name).touch()
    done = bare(tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"{name}: not the name of a wheel: remove it" in done.stderr


def installed(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Installs into a folder of its own, which this interpreter sees; exit code 7 stands for the process that goes on after it."""
    program = f"""
import os, sys
from pathlib import Path
sys.path[:0] = [{str(CI)!r}]
packages = Path({str(tmp_path)!r}) / "packages"
if (packages / "a-cachepipe-checkout.pth").exists():
    sys.path.append((packages / "a-cachepipe-checkout.pth").read_text().strip())
import gpu_install
gpu_install._packages = lambda: packages
os.execve = lambda *words: sys.exit(7)
gpu_install.install(Path({str(tmp_path)!r}) / ".whl")
gpu_install.require_this_code()
"""
    command = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())


def test_an_empty_folder_of_wheels_is_a_host_that_lacks_none(tmp_path: Path) -> None:
    (tmp_path / ".whl").mkdir()
    done = installed(tmp_path)
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "packages" / "a-cachepipe-checkout.pth").read_text() == f"{CI.parent}\n"
    again = installed(tmp_path)
    assert again.returncode == 0, again.stderr


def test_a_host_that_knew_another_checkout_measures_this_one(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "other" / "cachepipe").mkdir(parents=True)
    (tmp_path / "other" / "cachepipe" / "__init__.py").touch()
    (tmp_path / "packages" / "a-cachepipe-checkout.pth").write_text(f"{tmp_path}/other\n")
    first, again = installed(tmp_path), installed(tmp_path)
    assert (first.returncode, again.returncode) == (7, 0), first.stderr + again.stderr


def test_an_installed_cachepipe_of_other_code_is_not_measured_under_this_ones_digest(tmp_path: Path) -> None:
    shutil.copytree(CI.parent / "cachepipe", tmp_path / "cachepipe", ignore=shutil.ignore_patterns("__pycache__"))
    env = clean_environment(PYTHONPATH=str(tmp_path))
    words = [sys.executable, str(CI / "gpu"), "bert-base:default", "--work", str(tmp_path / "work"), "--limit", "1"]
    same = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert "raise --limit" in same.stderr
    (tmp_path / "cachepipe" / "errors.py").open("a").write("# another\n")
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1 and f"{tmp_path}/cachepipe is not the code of this checkout" in done.stderr
    assert "pip install" in done.stderr
