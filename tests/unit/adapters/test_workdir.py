from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cachepipe.adapters.folders import MIN_FREE_BYTES
from cachepipe.adapters.workdir import Binding, BuildRoot, EntryDir, WorkDir, build_root, write_evidence
from cachepipe.domain.evidence import EntryEvidence, Work
from cachepipe.domain.record import record_bytes
from cachepipe.errors import CachepipeError, NoRoomError, UnsafePathError

BINDING = Binding("a" * 64, "f" * 64, "/var/cache/cachepipe/demo")


def evidence(step: str = "tune") -> EntryEvidence:
    return EntryEvidence("mlp/float32/default", step, "2.13.0", (), (), Work(), (), 0.0, 0.0, 0.0, {})


@pytest.fixture
def cache_root(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


def test_a_step_counts_only_when_its_tree_and_evidence_are_kept(tmp_path: Path, cache_root: Path) -> None:
    entry = WorkDir(tmp_path / "work").entry(BINDING)
    with build_root(cache_root / "demo") as root:
        (root.path / "inductor/x.py").write_text("x")
        entry.pending("tune").write_bytes(record_bytes(evidence()))
        assert WorkDir(tmp_path / "work").entry(BINDING).evidence("tune") is None
        assert entry.finish("tune", root) == evidence()
    again = WorkDir(tmp_path / "work").entry(BINDING)
    assert again.evidence("tune") == evidence()
    assert (again.tree("tune") / "inductor/x.py").read_text() == "x"
    assert again.evidence("settle-1") is None


@pytest.mark.parametrize(
    "other",
    [
        Binding(BINDING.key, "0" * 64, BINDING.root),
        Binding(BINDING.key, BINDING.fingerprint, "/elsewhere"),
        Binding(BINDING.key[:16] + "b" * 48, BINDING.fingerprint, BINDING.root),
        Binding(BINDING.key, BINDING.fingerprint, BINDING.root, format=2),
    ],
)
def test_results_of_another_key_machine_root_or_format_are_forgotten(tmp_path: Path, other: Binding) -> None:
    work = WorkDir(tmp_path / "work")
    entry = work.entry(BINDING)
    entry.pending("tune").write_bytes(record_bytes(evidence()))
    entry.finish("tune")
    assert work.entry(BINDING).evidence("tune") is not None
    assert work.entry(other).evidence("tune") is None


def test_fresh_forgets(tmp_path: Path) -> None:
    work = WorkDir(tmp_path / "work")
    entry = work.entry(BINDING)
    entry.pending("tune").write_bytes(record_bytes(evidence()))
    entry.finish("tune")
    assert work.entry(BINDING, is_fresh=True).evidence("tune") is None


def test_the_root_is_private_while_building_and_gone_afterwards(cache_root: Path) -> None:
    with build_root(cache_root / "demo") as root:
        assert root.path.stat().st_mode & 0o777 == 0o700
        assert (root.path / "triton/0").is_dir()
    assert not (cache_root / "demo").exists()


def test_the_cache_root_is_made_private(tmp_path: Path) -> None:
    with build_root(tmp_path / "new/demo"):
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_cache_root_that_cannot_be_made_names_the_command_that_makes_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsafePathError) as caught, build_root(tmp_path / "file/cachepipe/demo"):
        pass
    assert caught.value.exit_code == 17
    assert caught.value.hint.endswith(f" {tmp_path}/file/cachepipe")
    assert "install -d -m 0700 -o " in caught.value.hint


def test_a_cache_root_that_others_can_write_is_refused(cache_root: Path) -> None:
    cache_root.chmod(0o777)
    with pytest.raises(UnsafePathError), build_root(cache_root / "demo"):
        pass


def restored(cache_root: Path) -> Path:
    root = cache_root / "demo"
    (root / ".cachepipe").mkdir(parents=True)
    (root / ".cachepipe/marker.json").write_text("{}")
    (root / ".lease").touch()
    return root


def test_a_folder_that_a_running_service_uses_is_refused(cache_root: Path) -> None:
    root = restored(cache_root)
    with open(root / ".lease") as lease:
        fcntl.flock(lease, fcntl.LOCK_SH)
        with pytest.raises(UnsafePathError, match="service"), build_root(root):
            pass
    assert (root / ".cachepipe/marker.json").exists()


def test_a_restored_folder_without_a_service_is_replaced(cache_root: Path) -> None:
    root = restored(cache_root)
    with build_root(root):
        assert not (root / ".cachepipe").exists()


def test_foreign_files_are_refused_and_kept(cache_root: Path) -> None:
    (cache_root / "demo").mkdir()
    (cache_root / "demo/thesis.tex").write_text("years")
    with pytest.raises(UnsafePathError), build_root(cache_root / "demo"):
        pass
    assert (cache_root / "demo/thesis.tex").read_text() == "years"


def test_what_a_killed_build_left_is_not_foreign(cache_root: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from cachepipe.adapters.workdir import build_root\n"
        "with build_root(Path(sys.argv[1])) as root: (root.path / 'inductor/x').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(cache_root / "demo")], check=False)
    assert (cache_root / "demo/inductor/x").exists()
    with build_root(cache_root / "demo") as root:
        assert not (root.path / "inductor/x").exists()


def test_builds_at_one_path_are_serial(cache_root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cachepipe.adapters.workdir import build_root\n"
        "with build_root(Path(sys.argv[1]), lambda: print('waits', flush=True)): print('holds', flush=True)"
    )
    with build_root(cache_root / "demo"):
        other = subprocess.Popen(
            [sys.executable, "-c", code, str(cache_root / "demo")], stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        assert other.stdout.readline() == "waits\n"
        assert other.poll() is None
    with other:
        assert other.stdout.readline() == "holds\n"
    assert other.returncode == 0


def test_only_chosen_files_fill_the_root(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "inductor/ab").mkdir(parents=True)
    (tree / "inductor/ab/x.best_config").write_text("{}")
    (tree / "inductor/ab/x.py").write_text("")
    root = BuildRoot(tmp_path / "root")
    root.fill(tree, lambda path: path.endswith(".best_config"))
    assert [path.name for path in root.path.rglob("*") if path.is_file()] == ["x.best_config"]


def test_compilers_are_hidden_and_everything_else_is_there(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    compilers = ["cc", "c++", "g++", "gcc-12", "x86_64-linux-gnu-g++-13", "clang", "clang++-18", "nvcc"]
    compilers += ["ptxas", "ptxas-12.8", "ptxas-blackwell"]
    for name in [*compilers, "sh", "gccgo-helper", "accc", "python3"]:
        (tools / name).touch(mode=0o755)
    search_path = WorkDir(tmp_path / "work").path_without_compilers(f"{tools}{os.pathsep}/nowhere")
    assert not any(shutil.which(name, path=search_path) for name in compilers)
    assert sorted(os.listdir(search_path)) == ["accc", "gccgo-helper", "python3", "sh"]


def test_an_evidence_file_is_named_by_entry_and_step(tmp_path: Path) -> None:
    assert write_evidence(tmp_path / "out", evidence("prove")).name == "mlp_float32_default.prove.json"


def finished_step(tmp_path: Path, cache_root: Path) -> EntryDir:
    entry = WorkDir(tmp_path / "work").entry(BINDING)
    with build_root(cache_root / "demo") as root:
        (root.path / "inductor/x.py").write_text("x")
        entry.pending("tune").write_bytes(record_bytes(evidence()))
        entry.finish("tune", root)
    assert entry.finished("tune") == evidence()
    return entry


@pytest.mark.parametrize(
    "what", ["evidence", "emptied evidence", "missing file", "changed file", "added file", "no tree"]
)
def test_a_step_that_is_not_as_it_was_left_is_not_finished(tmp_path: Path, cache_root: Path, what: str) -> None:
    entry = finished_step(tmp_path, cache_root)
    file = entry.tree("tune") / "inductor/x.py"
    {
        "evidence": lambda: (entry.path / "tune.json").write_text('{"entry": "ml'),
        "emptied evidence": lambda: (entry.path / "tune.json").write_bytes(b""),
        "missing file": file.unlink,
        "changed file": lambda: file.write_text("y"),
        "added file": lambda: file.with_name("z.py").touch(),
        "no tree": lambda: entry.drop_tree("tune"),
    }[what]()
    assert entry.finished("tune") is None


def test_a_relative_work_directory_is_the_same_place_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert WorkDir(Path("work")).entry(BINDING).pending("tune").is_absolute()


def test_an_existing_work_directory_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    WorkDir(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_two_builds_do_not_work_in_one_work_directory_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cachepipe.adapters.workdir import WorkDir\n"
        "with WorkDir(Path(sys.argv[1])).held(lambda: print('waits', flush=True)): print('holds', flush=True)"
    )
    with WorkDir(tmp_path).held():
        other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "waits\n"
    with other:
        assert other.stdout.readline() == "holds\n"
    assert other.returncode == 0


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, NoRoomError), (errno.EROFS, UnsafePathError), (errno.EACCES, UnsafePathError)],
)
def test_a_full_or_read_only_disk_during_a_build_is_no_bug(
    tmp_path: Path, number: int, error: type[CachepipeError]
) -> None:
    with pytest.raises(error, match="some/file"), WorkDir(tmp_path).held():
        raise OSError(number, os.strerror(number), "some/file")


def test_a_work_directory_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnsafePathError, match="file"):
        WorkDir(tmp_path / "file")


@pytest.mark.parametrize("text", ["junk", "[1]", '{"a": "x", "b": [1], "c": 2.5}'])
def test_estimates_that_cannot_be_read_are_none(tmp_path: Path, text: str) -> None:
    work = WorkDir(tmp_path)
    (tmp_path / "seconds.json").write_text(text)
    work.note_estimate("net tune", 1.5)
    assert set(work.estimates()) <= {"c", "net tune"} and work.estimates()["net tune"] == 1.5


def test_a_folder_with_hardly_any_room_is_refused_before_anything_is_compiled(
    tmp_path: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=MIN_FREE_BYTES - 1))
    with pytest.raises(NoRoomError), WorkDir(tmp_path / "work").held():
        pytest.fail("the body began")
    with pytest.raises(NoRoomError), build_root(cache_root / "demo"):
        pytest.fail("the body began")
    assert not (cache_root / "demo").exists()


def test_a_tree_that_moves_to_another_file_system_is_whole_or_a_full_disk_has_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def across(source: str, target: str) -> None:
        raise OSError(errno.EXDEV, "another device")

    root = BuildRoot(tmp_path / "root")
    root.clear()
    (root.path / "inductor/x.py").write_text("x")
    renamed = os.rename
    monkeypatch.setattr(
        os, "rename", lambda source, target: (across if source == root.path else renamed)(source, target)
    )
    root.move_to(tmp_path / "tree")
    assert (tmp_path / "tree/inductor/x.py").read_text() == "x" and not root.path.exists()
    root.clear()
    (root.path / "inductor/x.py").write_text("x")

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "no space left on device", str(target))

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="no space") as caught:
        root.move_to(tmp_path / "tree")
    assert caught.value.errno == errno.ENOSPC and (root.path / "inductor/x.py").exists()
