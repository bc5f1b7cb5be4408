"""Variables that name a tool of torch: in the statement by place, in a service by its path there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cachepipe.adapters.execute import check_variables, resolved_variables, torch_folder
from cachepipe.domain.variables import KEYED, pinned_variables


def torch_with_ptxas(folder: Path, mode: int = 0o755) -> Path:
    torch = folder / "torch"
    (torch / "bin").mkdir(parents=True)
    (torch / "version.py").write_text("")
    (torch / "bin" / "ptxas").write_text("#!/bin/sh\n")
    (torch / "bin" / "ptxas").chmod(mode)
    return torch


def test_a_cuda_artifact_pins_the_ptxas_of_the_torch_that_is_installed(tmp_path: Path) -> None:
    pinned = pinned_variables("cuda")
    check_variables(pinned)
    assert str(tmp_path) not in str(pinned)
    one, other = (torch_with_ptxas(tmp_path / name) for name in ("builder", "service"))
    for torch in (one, other):
        assert resolved_variables(pinned, str(torch))["TRITON_PTXAS_PATH"] == str(torch / "bin" / "ptxas")


def test_a_cpu_artifact_names_no_tool() -> None:
    assert pinned_variables("cpu") == KEYED


def test_a_torch_without_ptxas_leaves_triton_its_own(tmp_path: Path) -> None:
    torch = torch_with_ptxas(tmp_path, mode=0o644)
    assert resolved_variables(pinned_variables("cuda"), str(torch)) == KEYED
    (torch / "bin" / "ptxas").unlink()
    assert resolved_variables(pinned_variables("cuda"), str(torch)) == KEYED
    assert resolved_variables(pinned_variables("cuda"), "") == KEYED


def test_torch_is_found_as_an_import_finds_it(tmp_path: Path) -> None:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    assert torch_folder() == str(Path(spec.origin).parent)
    found = torch_with_ptxas(tmp_path / "b")
    assert torch_folder([str(tmp_path / "a"), str(tmp_path / "b")]) == str(found)
    assert torch_folder([str(tmp_path / "a")]) == ""
