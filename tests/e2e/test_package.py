"""What pip installs: the command, the attach file at the root of site-packages, and nothing left after uninstall."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.release import REPOSITORY, clean_environment

ATTACH = (
    'import os; (os.environ.get("CACHEPIPE_ATTACH") == "1" or "CACHEPIPE_WORK_LOG" in os.environ)'
    ' and __import__("cachepipe.runtime.pth")\n'
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, env=clean_environment(), cwd=folder)
    (found,) = folder.glob("cachepipe-*.whl")
    return found


def test_the_wheel_holds_the_attach_file_at_its_root(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert "cachepipe/adapters/templates/report.html.j2" in archive.namelist()
        assert archive.read("cachepipe-attach.pth").decode() == ATTACH
        assert "cachepipe/py.typed" in archive.namelist()
        assert not [name for name in archive.namelist() if name.startswith(("tests/", "ci/", "manifests/"))]


def test_install_puts_the_attach_file_where_the_interpreter_reads_it_and_uninstall_removes_it(
    wheel: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True, env=clean_environment())
    assert (site / "cachepipe-attach.pth").read_text() == ATTACH
    assert (tmp_path / "venv" / "bin" / "cachepipe").exists()
    shown = subprocess.run(
        [python, "-c", "import sys; print('cachepipe.runtime' in sys.modules)"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert (shown.stdout, shown.stderr) == ("False\n", ""), "without CACHEPIPE_ATTACH=1 nothing is loaded"
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "cachepipe"], check=True, env=clean_environment())
    assert not list(site.glob("cachepipe*"))
