from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from cachepipe.adapters.execute import (
    NOT_HELD,
    check_variables,
    has_compiler,
    isa_variables,
    write_compiler_stub,
    write_env_file,
)
from cachepipe.errors import IntegrityError, UsageError

TEXTS = {
    "--version": 'g++ (Debian 12.2.0-14) 12.2.0\nIt\'s free; see $HOME `x` "y" %s\n',
    "-v": "Target: x86_64\ngcc version 12.2.0\n",
}


def test_the_compiler_stub_answers_two_questions_exactly_and_refuses_all_else(tmp_path: Path) -> None:
    write_compiler_stub(str(tmp_path), TEXTS)
    run = {
        words: subprocess.run([tmp_path / "g++", *words], capture_output=True, text=True, env={}, check=False)
        for words in (("--version",), ("-v",), ("x.cpp", "-o", "x.so"), (), ("--version", "-v"))
    }
    assert (run[("--version",)].stdout, run[("--version",)].returncode) == (TEXTS["--version"], 0)
    assert (run[("-v",)].stderr, run[("-v",)].stdout, run[("-v",)].returncode) == (TEXTS["-v"], "", 0)
    for words in (("x.cpp", "-o", "x.so"), (), ("--version", "-v")):
        assert run[words].returncode == 1
        assert run[words].stdout == ""
        assert run[words].stderr.count("\n") == 1
        assert "no C++ compiler in this image" in run[words].stderr and NOT_HELD in run[words].stderr
    assert "g++ x.cpp -o x.so" in run[("x.cpp", "-o", "x.so")].stderr


def test_a_compiler_is_looked_for_as_in_builders(tmp_path: Path) -> None:
    assert not has_compiler({"PATH": str(tmp_path)})
    (tmp_path / "g++").touch(0o644)
    (tmp_path / "clang++").touch(0o755)
    assert not has_compiler({"PATH": str(tmp_path), "CXX": str(tmp_path / "clang++")})
    (tmp_path / "g++").chmod(0o755)
    assert has_compiler({"PATH": str(tmp_path), "CXX": "/nowhere/clang++"})


@pytest.mark.parametrize("name", ["PATH", "LD_PRELOAD", "PYTHONPATH", "torch_x", "TORCH X", "CACHEPIPE_STATE_DIR", ""])
def test_an_artifact_cannot_set_other_variables_than_those_of_torch(name: str) -> None:
    with pytest.raises(IntegrityError, match="is not one that an artifact may set"):
        check_variables({name: "1"})


@pytest.mark.parametrize("value", ["a\nb", "a\0b"])
def test_a_variable_that_no_environment_can_hold_is_refused(value: str) -> None:
    with pytest.raises(IntegrityError, match="line break or a zero byte"):
        check_variables({"TORCH_X": value})


@pytest.mark.parametrize(
    ("built", "here", "found"),
    [
        ("avx2", "avx512_vnni+bf16", "avx2"),
        ("avx2", "amx", "avx2"),
        ("avx2", "avx2", ""),
        ("avx512", "avx512", ""),
        ("", "amx", ""),
    ],
)
def test_a_lowered_isa_is_pinned(built: str, here: str, found: str) -> None:
    assert isa_variables(built, here) == ({"ATEN_CPU_CAPABILITY": found} if found else {})


def test_an_env_file_is_read_back_by_a_shell(tmp_path: Path) -> None:
    values = {"A": "plain/path", "B": 'it\'s $HOME "x" `y`', "C": ""}
    write_env_file(str(tmp_path / "env"), values)
    script = f'. {shlex.quote(str(tmp_path / "env"))}; printf \'%s|%s|%s\' "$A" "$B" "$C"'
    assert subprocess.check_output(["/bin/sh", "-c", script], text=True) == "|".join(values.values())
    assert (tmp_path / "env").read_text().startswith("A=plain/path\n")
    assert (tmp_path / "env").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["env"]


def test_an_env_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write_env_file(str(tmp_path / "absent" / "env"), {})
