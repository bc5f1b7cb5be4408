"""`ci/gpu-wheels`: what a bare host lacks is collected whole, what it has must do, nobody else's wheels are touched."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.release import clean_environment
from tests.unit.test_gpu_runs import CI, load


@pytest.fixture(scope="module")
def wheels() -> Any:
    return load("gpu-wheels")


def run(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CI / "gpu-wheels"), *map(str, words)]
    env = clean_environment(**variables)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def made(folder: Path, name: str, version: str = "1.0", *requires: str) -> str:
    """Makes a wheel as a registry would serve it; returns its file's name."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        info = f"{name}-{version}.dist-info"
        head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        archive.writestr(f"{info}/METADATA", "\n".join([*head, *(f"Requires-Dist: {text}" for text in requires), ""]))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path.name


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only registry."""
    folder = tmp_path / "registry"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_measured_models_packages_are_collected_too(wheels: Any) -> None:
    assert "transformers" in {wheels.normal(text) for text in wheels.requirements()}


def test_a_new_collection_replaces_the_old_one_and_nothing_else(wheels: Any, registry: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    made(output, "ours")  # a wheelhouse of someone's: without a list none of it was collected here
    assert wheels.collected(output) == set()
    one, other, newer = made(registry, "one"), made(registry, "other"), made(registry, "other", "2.0")
    wheels.collect(output, [], ["one==1.0", "other==1.0"])
    assert names(output) == ["collected.txt", one, other, "ours-1.0-py3-none-any.whl"]
    wheels.collect(output, [], ["other==2.0"])
    assert names(output) == ["collected.txt", newer, "ours-1.0-py3-none-any.whl"]
    assert wheels.collected(output) == {newer}
    wheels.collect(output, [], [])
    assert names(output) == ["collected.txt", "ours-1.0-py3-none-any.whl"]


def test_a_download_that_fails_leaves_the_old_collection_whole(wheels: Any, registry: Path, tmp_path: Path) -> None:
    output, one = tmp_path / "out", made(registry, "one")
    wheels.collect(output, [], ["one==1.0"])
    with pytest.raises(SystemExit, match="gpu-wheels: pip download: exit 1"):
        wheels.collect(output, [], ["absent==1.0"])
    assert names(output) == ["collected.txt", one] and wheels.collected(output) == {one}


@pytest.mark.parametrize("listed", ["", "../kept-1.0-py3-none-any.whl\n"])
def test_a_folder_of_someone_elses_wheels_is_refused_untouched(tmp_path: Path, listed: str) -> None:
    output = tmp_path / "out"
    kept, theirs = made(tmp_path, "kept"), made(output, "theirs")
    (output / "collected.txt").write_text(listed)
    done = run("--output", output)
    assert done.returncode == 1 and f"{theirs}: not collected here: name another folder by --output" in done.stderr
    assert (tmp_path / kept).exists() and (output / theirs).exists()


def test_a_folder_that_cannot_be_made_is_told(wheels: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", ["gpu-wheels", "--output", str(tmp_path / "file" / "below")])
    monkeypatch.setattr(wheels, "closure", lambda *_: [])
    with pytest.raises(SystemExit, match=r"gpu-wheels: \[Errno 20\] Not a directory"):
        wheels.main()


def test_a_python_without_packaging_is_told_what_to_install() -> None:
    command = [sys.executable, "-I", "-S", str(CI / "gpu-wheels"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "has no `packaging`" in done.stderr and "Traceback" not in done.stderr


def test_what_the_host_has_in_a_version_that_does_not_do_is_named(wheels: Any, tmp_path: Path) -> None:
    path = tmp_path / "have"
    path.write_text(
        "PyYAML==5.4.1\ntorch==2.9.0+cu128\nclick==8.2.0\n-e git+https://x\n\npydantic\nrich==of-our-own\nboto3==1.0\n"
    )
    host = wheels.listed(path)
    assert {"pyyaml", "torch", "click", "pydantic", "rich"} <= host.keys()
    assert list(wheels.unfit(host, wheels.requirements(), "cachepipe", {}).values()) == [
        "torch 2.9.0+cu128 (cachepipe wants >=2.11)",
        "PyYAML 5.4.1 (cachepipe wants >=6.0.1)",
    ]


def test_what_a_collected_package_wants_of_the_host_is_asked_for_its_python_without_extras(wheels: Any) -> None:
    host = {"typing-extensions": "4.8.0", "numpy": "1.26.0", "idna": "2.0", "old": "1.0"}
    wants = [
        "typing_extensions>=4.14",
        "numpy>=1.17",
        'idna>=3; extra == "http"',
        'old>=2; python_version < "3.11"',
        "absent>=9",
        "not a requirement !",
    ]
    markers = {"python_version": "3.12", "python_full_version": "3.12.0"}
    assert wheels.unfit(host, wants, "pydantic", markers) == {
        "typing-extensions": "typing_extensions 4.8.0 (pydantic wants >=4.14)"
    }
    old = {"python_version": "3.10", "python_full_version": "3.10.0"}
    assert "old" in wheels.unfit(host, wants, "pydantic", old)


def test_an_older_package_that_fits_the_host_is_collected_in_place_of_the_newest(
    wheels: Any, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(registry, "one", "1.0", "held>=1")
    made(registry, "one", "2.0", "held>=2")
    made(registry, "held", "1.0")
    made(registry, "held", "2.0")
    monkeypatch.setattr(wheels, "requirements", lambda: ["one"])
    (found,) = wheels.fitting({"torch": "2.11", "held": "1.0"}, ["--only-binary=:all:"], {})
    assert (found.name, found.version) == ("one", "1.0")
    (found,) = wheels.fitting({"torch": "2.11", "held": "2.0"}, ["--only-binary=:all:"], {})
    assert (found.name, found.version) == ("one", "2.0")
    with pytest.raises(SystemExit, match="gpu-wheels: pip install: exit 1"):
        wheels.fitting({"torch": "2.11", "held": "0.5"}, ["--only-binary=:all:"], {})


@pytest.mark.parametrize("text", ["", "numpy==2.2.1\n", "bash: python3: command not found\n"])
def test_a_host_list_without_torch_is_no_list_of_a_host(tmp_path: Path, text: str) -> None:
    (tmp_path / "have").write_text(text)
    done = run("--have", tmp_path / "have", "--output", tmp_path / "w")
    assert done.returncode == 1 and "no torch, which the host must have" in done.stderr
    assert not (tmp_path / "w").exists()


def test_a_host_list_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run("--have", tmp_path / "have", "--output", tmp_path / "w")
    assert done.returncode == 1 and "No such file" in done.stderr and "Traceback" not in done.stderr
