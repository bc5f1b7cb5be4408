"""What another user, a crash or a hostile store left where a restore works (T-DIR): it is not used, not followed, not harmed."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachepipe.adapters import cachedir, cold_folder
from cachepipe.adapters.execute import check_variables, has_compiler
from cachepipe.adapters.lease import lock_file
from cachepipe.adapters.materialise import materialise
from cachepipe.adapters.packs import pack_tree
from cachepipe.domain.layout import hint_key
from cachepipe.domain.limits import LIMITS
from cachepipe.domain.record import parse_json
from cachepipe.errors import DeadlineError, IntegrityError, MissError, NoRoomError, UnsafePathError
from cachepipe.runtime import attempts
from cachepipe.workflows import place as places
from cachepipe.workflows import serve
from cachepipe.workflows.restore_options import Options
from tests.support.release import clean_environment
from tests.support.restoring import Published, command, files_below, publish_release, run_restore

STARTED = command(["echo", "started"])
FOREIGN = 65534
DIGEST = "d" * 64
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's files")


@pytest.fixture
def demo(tmp_path: Path) -> Published:
    return publish_release(tmp_path)


def words(release: Published, *more: str) -> tuple[str, ...]:
    return (release.store.url, "--name", release.name, *more)


# --- folders of someone ------------------------------------------------------------------------------------------------


def test_a_folder_of_other_files_keeps_its_mode(tmp_path: Path, demo: Published) -> None:
    site = tmp_path / "site"
    site.mkdir()
    site.chmod(0o755)
    (site / "data").write_bytes(b"data")
    ran = run_restore(tmp_path, *words(demo, "--dest", str(site)), *STARTED)
    assert (ran.out, ran.line["outcome"]) == ("started\n", "restored")
    assert "holds what cachepipe did not make: `data`" in ran.line["reason"]
    assert stat.S_IMODE(site.stat().st_mode) == 0o755
    assert files_below(site) == {"data": b"data"}


def test_a_statement_that_names_a_folder_of_the_system_as_its_root_changes_nothing_there(tmp_path: Path) -> None:
    system = tmp_path / "etc"
    system.mkdir()
    system.chmod(0o755)
    (system / "passwd").write_bytes(b"root")
    release = publish_release(tmp_path, root=str(system))
    ran = run_restore(tmp_path, *words(release), *STARTED)
    assert ran.out == "started\n"
    assert stat.S_IMODE(system.stat().st_mode) == 0o755
    assert files_below(system) == {"passwd": b"root"}


@pytest.mark.parametrize("path", ["usr/x", "inductor"])
def test_a_table_that_names_a_file_beside_the_caches_is_refused_by_name(tmp_path: Path, path: str) -> None:
    release = publish_release(tmp_path, files={path: b"{}", "triton/0/K/a": b"a"})
    ran = run_restore(tmp_path, *words(release, "--strict"))
    assert ran.code == 13
    assert f"`{path}` is not below inductor/, triton/ or engine/" in ran.line["reason"]
    assert not os.path.lexists(release.root)


@is_root
def test_a_lock_that_another_user_holds_in_a_shared_folder_delays_nobody(tmp_path: Path, demo: Published) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    lock = shared / ".demo.lock"
    lock.touch()
    held = lock_file(str(lock), time.monotonic() + 1)
    os.chown(lock, FOREIGN, FOREIGN)
    try:
        ran = run_restore(tmp_path, *words(demo, "--dest", str(shared / "demo"), "--deadline", "20"), *STARTED)
    finally:
        os.close(held)
    assert (ran.out, ran.line["outcome"]) == ("started\n", "restored")
    assert "not a file of ours" in ran.line["reason"]
    assert ran.seconds < 10


def test_a_lock_file_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(UnsafePathError, match="not a file of ours"):
        lock_file(str(tmp_path / "lock"), time.monotonic() + 1)


def test_what_killed_restores_left_does_not_keep_a_full_disk_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    dead = tmp_path / "demo.tmp.1.aa"
    other = tmp_path / "demo2.tmp.1.aa"
    dead.mkdir()
    other.mkdir()
    real = cachedir.check_usable

    def full(folder: str, need: cachedir.Need) -> None:
        if dead.exists():
            raise NoRoomError("full")
        real(folder, need)

    monkeypatch.setattr(cachedir, "check_usable", full)
    held = lock_file(str(tmp_path / ".demo.lock"), time.monotonic() + 1)
    with pytest.raises(Exception, match="until the deadline"):  # a living restore's temporary is never removed
        places.reserve(str(tmp_path / "demo"), cachedir.Need(0, 0), time.monotonic())
    assert dead.exists()
    os.close(held)
    places.reserve(str(tmp_path / "demo"), cachedir.Need(0, 0), time.monotonic() + 5).release()
    assert (dead.exists(), other.exists()) == (False, True)


def test_a_full_place_gives_a_private_folder_rather_than_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)

    def full(folder: str, need: cachedir.Need) -> None:
        raise NoRoomError("full")

    monkeypatch.setattr(cold_folder, "check_usable", full)
    found = cold_folder.cold_folder([str(tmp_path / "a"), str(tmp_path / "b")])
    assert found is not None
    assert found.path.startswith(f"{tmp_path}/a/cold.")


@is_root
def test_who_takes_every_scratch_name_does_not_bring_a_cold_start_to_torchs_own_default(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    places = [str(tmp_path / name / "cachepipe-0") for name in ("tmp", "shm")]
    for place in places:
        os.makedirs(place)
        os.chmod(os.path.dirname(place), 0o1777)
        os.chown(place, FOREIGN, FOREIGN)
        for number in range(3):
            os.mkdir(f"{place}.{number:016x}")
            os.chown(f"{place}.{number:016x}", FOREIGN, FOREIGN)
    found = cold_folder.cold_folder(places)
    assert found is not None and found.lease is not None
    own = os.path.dirname(found.path)
    assert own.startswith(f"{places[0]}.") and stat.S_IMODE(os.stat(own).st_mode) == 0o700
    cachedir.check_private(found.path, closes=False)
    again = cold_folder.cold_folder(places)
    assert again is not None and os.path.dirname(again.path) == own, "the next start finds it again"
    found.lease.close()
    cold_folder.sweep_cold(places, time.time() + 7200)
    assert os.listdir(own) == [os.path.basename(again.path)]


def test_where_no_empty_folder_can_be_made_torch_is_sent_to_a_name_that_nobody_can_have_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(cachedir, "scratch_folders", lambda _environment: ("/proc/none/a", f"{tmp_path}/file/b"))
    (tmp_path / "file").write_text("no folder")
    options = Options(command=("true",))
    starts = [serve._cold(MissError("nothing is published"), options, {}, math.inf) for _ in range(2)]
    folders = {start.variables["TORCHINDUCTOR_CACHE_DIR"] for start in starts}
    assert len(folders) == 2 and not any(map(os.path.lexists, folders))
    for parent in map(os.path.dirname, folders):
        assert stat.S_IMODE(os.stat(parent).st_mode) == 0o700 and os.listdir(parent) == []
        os.rmdir(parent)
    assert {start.variables["TRITON_CACHE_DIR"].partition("/triton")[0] for start in starts} == {
        os.path.dirname(folder) for folder in folders
    }
    assert all("no scratch place takes an empty private folder" in start.reason for start in starts)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    assert "TORCHINDUCTOR_CACHE_DIR" not in serve._cold(MissError("x"), options, {}, math.inf).variables, (
        "the user's own stays"
    )


@pytest.mark.parametrize("answers", [True, False])
def test_an_env_file_gets_what_a_quick_folder_leaves_of_the_time_beyond_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], answers: bool
) -> None:
    path, never, write = tmp_path / "variables", threading.Event(), serve.write_env_file

    def slow(name: str, variables: Mapping[str, str]) -> str:
        never.wait(0.2 if answers else 60.0)
        return write(name, variables)

    monkeypatch.setattr(serve, "write_env_file", slow)
    monkeypatch.setattr(cachedir, "scratch_folders", lambda _environment: (f"{tmp_path}/scratch",))
    began, options = time.monotonic() - 5.0, Options(env_file=str(path), command=("true",), deadline_s=5.0)
    monkeypatch.setattr(serve, "become", lambda *_: None)
    try:
        serve._start(options, "0" * 32, began, DeadlineError("time ran out"))
    finally:
        seconds, is_written = time.monotonic() - began - 5.0, path.exists()
        never.set()
    assert seconds < 2.0
    assert (is_written, "its file system does not answer" in capfd.readouterr().err) == (answers, not answers)


def test_where_everything_hangs_folder_and_env_file_end_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=105.0, waits=0, time=time.time)
    clock.monotonic = lambda: clock.now

    def hang(_work: object, until: float) -> None:
        assert until > clock.now, "nothing is given up before it was tried"
        clock.now, clock.waits = until, clock.waits + 1

    monkeypatch.setattr(serve, "time", clock)
    monkeypatch.setattr(serve, "_bounded", hang)
    monkeypatch.setattr(serve, "become", lambda *_: None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    options = Options(env_file=str(tmp_path / "variables"), command=("true",), deadline_s=5.0)
    serve._start(options, "0" * 32, 100.0, DeadlineError("time ran out"))
    assert (clock.waits, clock.now < 100.0 + 5.0 + 1.9) == (5, True), "three tries of a folder, a look, the file"


def test_the_kill_switch_empties_the_env_file_also_where_no_thread_can_be_started(
    tmp_path: Path,
) -> None:
    path = tmp_path / "variables"
    path.write_text("TORCHINDUCTOR_CACHE_DIR=/old\n")
    program = (
        "import _thread, sys\nfrom cachepipe.entrypoint import main\n"
        'def refuse(*_): raise RuntimeError("can\'t start new thread")\n'
        "_thread.start_new_thread = refuse\nsys.exit(main(sys.argv[1:]))\n"
    )
    child = [sys.executable, "-c", program, "restore", "--env-file", str(path)]
    done = subprocess.run(
        child, env=clean_environment(CACHEPIPE_DISABLE="1"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == b""


@is_root
@pytest.mark.parametrize("is_relative", [False, True])
def test_a_link_of_ours_that_leads_over_a_link_of_another_user_is_refused(tmp_path: Path, is_relative: bool) -> None:
    tmp_path.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (tmp_path / "ours").mkdir(mode=0o700)
    (shared / "hop").symlink_to("../ours" if is_relative else tmp_path / "ours")
    (tmp_path / "link").symlink_to("shared/hop" if is_relative else shared / "hop")
    cachedir.check_ancestors(str(tmp_path / "link" / "demo"))
    os.chown(shared / "hop", FOREIGN, FOREIGN, follow_symlinks=False)
    with pytest.raises(UnsafePathError, match=f"hop: owned by uid {FOREIGN}"):
        cachedir.check_ancestors(str(tmp_path / "link" / "demo"))


def test_a_circle_of_links_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UnsafePathError):
        cachedir.make_private(str(tmp_path / "a" / "demo"))


# --- a folder that is there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_marker_that_is_no_file_is_made_anew_at_once(tmp_path: Path, demo: Published, kind: str) -> None:
    run_restore(tmp_path, *words(demo))
    marker = Path(demo.root, ".cachepipe/marker.json")
    if kind == "link":
        marker.rename(tmp_path / "marker")
        marker.symlink_to(tmp_path / "marker")
    else:
        marker.unlink()
        os.mkfifo(marker) if kind == "pipe" else marker.mkdir()
    ran = run_restore(tmp_path, *words(demo, "--lock", demo.lock, "--deadline", "20"), *STARTED)
    assert (ran.out, ran.line["outcome"], ran.line["folder"]) == ("started\n", "restored", demo.root)
    assert stat.S_ISREG(marker.lstat().st_mode)


def test_a_marker_whose_expiry_is_no_time_is_judged_by_the_store(tmp_path: Path, demo: Published) -> None:
    run_restore(tmp_path, *words(demo, "--dest", demo.root))
    marker = Path(demo.root, ".cachepipe/marker.json")
    text = re.sub('"seal":"[0-9a-f]*",', "", marker.read_text())  # as of before markers were sealed
    marker.write_text(text.replace('"expires_at":"2', '"expires_at":"x'))
    ran = run_restore(tmp_path, *words(demo, "--dest", demo.root), *STARTED)
    assert ran.line["outcome"] in ("present", "restored")


@pytest.mark.parametrize("harm", ["changed", "gone"])
def test_a_statement_that_was_harmed_is_not_given_to_a_service(tmp_path: Path, demo: Published, harm: str) -> None:
    run_restore(tmp_path, *words(demo, "--lock", demo.lock))
    (statement,) = Path(demo.root, ".cachepipe/statements").iterdir()
    whole = statement.read_bytes()
    statement.unlink() if harm == "gone" else statement.write_bytes(b"{}")
    ran = run_restore(tmp_path, *words(demo, "--lock", demo.lock), *STARTED)
    assert ran.line["outcome"] == "restored"
    assert Path(ran.line["folder"], ".cachepipe/statements", statement.name).read_bytes() == whole


@pytest.mark.parametrize("below", ["inductor", "triton/0"])
def test_a_folder_that_became_a_link_to_equal_files_elsewhere_is_not_used(
    tmp_path: Path, demo: Published, below: str
) -> None:
    run_restore(tmp_path, *words(demo, "--lock", demo.lock))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    moved = tmp_path / "open" / "moved"
    Path(demo.root, below).rename(moved)
    Path(demo.root, below).symlink_to(moved)
    ran = run_restore(tmp_path, *words(demo, "--lock", demo.lock), *STARTED)
    assert ran.line["outcome"] == "restored"
    assert not Path(ran.line["folder"], below).is_symlink()


def test_a_hint_of_any_length_costs_no_warm_start(tmp_path: Path, demo: Published) -> None:
    run_restore(tmp_path, *words(demo, "--dest", demo.root))
    (tmp_path / "store" / hint_key("demo", "stable")).write_bytes(b"1" * 200_000)
    ran = run_restore(tmp_path, *words(demo, "--dest", demo.root), *STARTED)
    assert (ran.out, ran.line["outcome"]) == ("started\n", "present")


# --- attempts ------------------------------------------------------------------------------------------------------------


def mark(folder: Path, name: str) -> Path:
    path = folder / "attempts" / DIGEST / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"pid": 1, "time": int(time.time())}))
    return path


@is_root
def test_marks_of_another_user_quarantine_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        os.chown(mark(tmp_path, name), FOREIGN, FOREIGN)
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time()) == 0
    own = tmp_path / "own"
    for name in ("a", "b"):
        mark(own, name)
    os.chown(own / "attempts", FOREIGN, FOREIGN)
    assert attempts.unfinished(str(own), DIGEST, time.time()) == 0


def test_a_mark_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "state").mkdir()
    (tmp_path / "state/attempts").symlink_to(tmp_path / "victim")
    attempts.begin(str(tmp_path / "state"), DIGEST, "a").finish()
    assert os.listdir(tmp_path / "victim") == []


def test_a_pipe_among_the_marks_holds_no_start(tmp_path: Path) -> None:
    path = tmp_path / "attempts" / DIGEST / "a"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time()) == 0
    attempts.clear(str(tmp_path), DIGEST)
    attempts.begin(str(tmp_path), DIGEST, "a").finish()


def test_the_processes_of_one_start_that_died_together_count_once(tmp_path: Path) -> None:
    for rank in range(8):
        mark(tmp_path, f"a.{rank}")
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time()) == 1
    mark(tmp_path, "b.1")
    assert attempts.unfinished(str(tmp_path), DIGEST, time.time()) == 2


# --- bytes of a hostile store ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b'{"a":"\\ud800"}', b'{"\\udfff":1}', b'["\\udc80x"]'])
def test_half_of_a_surrogate_pair_is_no_strict_json(text: bytes) -> None:
    with pytest.raises(IntegrityError, match="not strict JSON"):
        parse_json(text, "statement", 1000)
    assert parse_json(b'["\\ud83d\\ude00 \\u00e9"]', "statement", 1000) == ["\U0001f600 é"]


@pytest.mark.parametrize(
    "variables",
    [{"TORCH_X": "\ud800"}, {"TORCH_X": "x" * 140_000}, {"TORCH_" + "X" * 140_000: "1"}, {"TORCH_X": "a\rb"}],
    ids=["surrogate", "long value", "long name", "carriage return"],
)
def test_a_variable_with_which_nothing_can_be_executed_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(IntegrityError, match="too long"):
        check_variables(variables)


def test_a_variable_that_no_exec_takes_keeps_no_service_down(tmp_path: Path) -> None:
    release = publish_release(tmp_path, variables={"TORCH_X": "x" * 140_000})
    ran = run_restore(tmp_path, *words(release), *STARTED)
    assert (ran.out, ran.line["outcome"]) == ("started\n", "cold")


def test_a_folder_on_path_that_is_named_like_the_compiler_is_none(tmp_path: Path) -> None:
    (tmp_path / "g++").mkdir()
    assert not has_compiler({"PATH": str(tmp_path)})


# --- limits of the service ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [1, 0])
def test_a_limit_on_threads_costs_speed_and_not_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    packs = {name: os.urandom(100) for name in ("inductor/a.x", "inductor/b.y")}
    (tmp_path / "tree/inductor").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "target").mkdir()
    for name, data in packs.items():
        (tmp_path / "tree" / name).write_bytes(data)
    limits = replace(LIMITS, pack_raw_bytes=100)
    packed = pack_tree(tmp_path / "tree", dict.fromkeys(packs, (0,)), "/r", tmp_path / "out", limits)
    assert len(packed.packs) == 2
    real, left = threading.Thread.start, [allowed]

    def start(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    def run() -> None:
        materialise(
            lambda digest: (tmp_path / "out" / digest).read_bytes(),
            packed.packs,
            packed.table,
            tmp_path / "target",
            "/r",
            deadline=time.monotonic() + 20,
        )

    if allowed:
        run()
        assert files_below(tmp_path / "target") == packs
    else:
        with pytest.raises(NoRoomError, match="no thread can be started"):
            run()
