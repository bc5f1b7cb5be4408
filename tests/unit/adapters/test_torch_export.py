"""What native functions are compiled with: the entry's own options, by which torch.compile chooses, and ours on top."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cachepipe.adapters.torch_export import export_entry, native_options
from cachepipe.errors import UsageError
from tests.support.jobs import spec_of

MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_option_of_the_mode_holds_but_cuda_graphs(mode: str, device: str) -> None:
    found = native_options(spec_of("", mode=mode, device=device, engine="aot"))
    wanted = {**torch._inductor.list_mode_options(mode), "triton.cudagraphs": False}
    assert {name: found[name] for name in wanted} == wanted
    assert found.get("aot_inductor.embed_kernel_binary", False) == (device == "cuda")


def test_the_manifests_options_hold_too_and_cannot_record_cuda_graphs() -> None:
    options = {"epilogue_fusion": False, "triton.cudagraphs": True}
    found = native_options(spec_of("", device="cuda", options=options))
    assert (found["epilogue_fusion"], found["triton.cudagraphs"]) == (False, False)


def test_options_that_an_older_torch_does_not_have_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [name for name in torch._inductor.list_options() if name != "aot_inductor.enable_line_tables"]
    monkeypatch.setattr(torch._inductor, "list_options", lambda: known)
    found = native_options(spec_of("", mode="max-autotune"))
    assert "aot_inductor.enable_line_tables" not in found and found["aot_inductor.package"]


def test_libraries_that_the_manifest_links_are_kept() -> None:
    found = native_options(spec_of("", options={"aot_inductor.custom_op_libs": ["mine"]}))
    assert found["aot_inductor.custom_op_libs"] == ["mine", ":libstdc++.so.6"]


EXPORT = """
import sys
from pathlib import Path
import torch
from cachepipe.adapters.torch_aoti import load_native
from cachepipe.adapters.torch_export import export_entry
from tests.support.jobs import spec_of

torch.manual_seed(0)
model, x = torch.nn.Linear(8, 2), torch.ones(8, 8)
export_entry(spec_of("", engine="aot"), model, Path(sys.argv[1]))
run = load_native(sys.argv[1] + "/bucket-0.so", x.device)
print(torch.equal(run([*model.state_dict().values(), x])[0], model(x)))
"""


def test_a_compiler_with_a_static_runtime_alone_makes_functions_that_load(tmp_path: Path) -> None:
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    links = 'case " $* " in *" -c "*|*c++-header*|*" -E "*) ;; *) set -- "$@" -static-libstdc++ ;; esac'
    compiler.write_text(f'#!/bin/sh\n{links}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "CXX"}
    env |= {"PATH": f"{compiler.parent}:{env['PATH']}", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    words = [sys.executable, "-c", EXPORT, str(tmp_path / "engine")]
    ran = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == ["True"]


def test_a_missing_linker_is_named_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="binutils on PATH: no ld and no objcopy"):
        export_entry(spec_of("", device="cuda", engine="aot"), torch.nn.Linear(1, 1), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()
