from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cachepipe.adapters.workdir import Binding, BuildRoot, WorkDir, build_root, write_evidence
from cachepipe.domain.evidence import EntryEvidence, Work
from cachepipe.domain.record import record_bytes
from cachepipe.errors import UnsafePathError

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
    compilers = ["cc", "c++", "g++", "gcc-12", "x86_64-linux-gnu-g++-13", "clang", "clang++-18", "nvcc", "ptxas"]
    for name in [*compilers, "sh", "gccgo-helper", "accc", "python3"]:
        (tools / name).touch(mode=0o755)
    search_path = WorkDir(tmp_path / "work").path_without_compilers(f"{tools}{os.pathsep}/nowhere")
    assert not any(shutil.which(name, path=search_path) for name in compilers)
    assert sorted(os.listdir(search_path)) == ["accc", "gccgo-helper", "python3", "sh"]


def test_an_evidence_file_is_named_by_entry_and_step(tmp_path: Path) -> None:
    assert write_evidence(tmp_path / "out", evidence("prove")).name == "mlp_float32_default.prove.json"
