"""The machine's facts, read from small trees that stand for other machines, and compared with torch on this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cachepipe.adapters.machine import (
    Host,
    builder_fingerprint,
    compiler_texts,
    cpu_flags,
    machine_fingerprint,
    thread_count,
    vector_isa,
)
from cachepipe.domain.fingerprint import RULES, UNKNOWN, differences
from cachepipe.errors import FingerprintMismatchError
from tests.support.nvml import Binding

AVX2 = ("avx", "avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512dq", "avx512bw", "avx512vl")
VERSION = "__version__ = '2.13.0+cpu'\ndebug = False\ncuda: Optional[str] = {cuda!r}\ngit_version = '{git}'\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cpuinfo(root: Path, flags: str, name: str = "flags") -> None:
    write(root / "proc/cpuinfo", f"processor\t: 0\n{name}\t\t: {flags}\n\nprocessor\t: 1\n{name}\t\t: other\n")


def cores(root: Path, *places: tuple[int, int]) -> None:
    for cpu, (package, core) in enumerate(places):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        write(folder / "physical_package_id", f"{package}\n")
        write(folder / "core_id", f"{core}\n")


def fake_torch(site: Path, git: str = "a" * 40, cuda: str | None = None) -> tuple[str, ...]:
    write(site / "torch/__init__.py", "raise ImportError('torch was imported')\n")
    write(site / "torch/version.py", "from typing import Optional\n" + VERSION.format(git=git, cuda=cuda))
    return (str(site),)


# --- torch ---------------------------------------------------------------------------------------------------------


def test_the_fingerprint_imports_neither_torch_nor_anything_heavy() -> None:
    code = (
        "import sys\nfrom cachepipe.adapters.machine import machine_fingerprint\n"
        "machine_fingerprint(['cpu', 'cuda'])\n"
        "print(sorted({'torch', 'triton', 'pydantic', 'boto3', 'rich', 'click', 'asyncio'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "[]\n"


def test_the_torch_parts_are_those_of_the_installed_torch() -> None:
    code = "import torch;print(torch.__version__, torch.version.git_version, torch.version.debug, torch.version.cuda)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found = machine_fingerprint(["cpu"], has_compiler_part=False)
    parts = [found.get(name) for name in ("torch", "torch_build", "torch_debug", "torch_cuda")]
    assert [part.replace("none", "None") for part in parts if part] == ran.stdout.split()


def test_case_b11_the_build_hash_of_torch_is_in_the_fingerprint(tmp_path: Path) -> None:
    one = builder_fingerprint("cpu", False, Host(python_path=fake_torch(tmp_path / "one")))
    two = machine_fingerprint(["cpu"], Host(python_path=fake_torch(tmp_path / "two", git="b" * 40)))
    assert [d.part for d in differences(one, two)] == ["torch_build"]
    assert one.digest != two.digest


def test_cuda_and_triton_of_the_installation_are_parts(tmp_path: Path) -> None:
    path = fake_torch(tmp_path, cuda="13.0")
    write(tmp_path / "triton/__init__.py", "__version__ = '3.7.0'\n")
    found = machine_fingerprint([], Host(python_path=path), has_compiler_part=False)
    assert (found.get("torch_cuda"), found.get("triton")) == ("13.0", "3.7.0")
    write(tmp_path / "pytorch_triton-3.7.1+git0.dist-info/METADATA", "")
    found = machine_fingerprint([], Host(python_path=path), has_compiler_part=False)
    assert found.get("triton") == "3.7.1+git0"


def test_a_machine_without_torch_has_no_torch_part(tmp_path: Path) -> None:
    host = Host(python_path=(str(tmp_path),))
    assert machine_fingerprint(["cpu"], host, has_compiler_part=False).get("torch") is None
    with pytest.raises(FingerprintMismatchError, match="torch: cannot be read"):
        builder_fingerprint("cpu", False, host)


# --- what goes in -----------------------------------------------------------------------------------------------------


def test_case_e8_the_builders_parts_are_exactly_those_that_a_machine_finds() -> None:
    for has_native_code in (False, True):
        built = builder_fingerprint("cpu", has_native_code)
        here = machine_fingerprint(["cpu"])
        assert differences(built, here) == ()
        assert all(here.get(part.name) == part.value for part in built.parts)


def test_a_statement_holds_native_parts_only_with_native_code() -> None:
    native = {"cpu_isa", "cpu_flags", "venv", "compiler"}
    plain = {part.name for part in builder_fingerprint("cpu", False).parts}
    assert not native & plain
    assert {part.name for part in builder_fingerprint("cpu", True).parts} == plain | native
    assert "threads" in plain


def test_parts_come_in_the_order_of_the_rules() -> None:
    names = [part.name for part in machine_fingerprint(["cpu"]).parts]
    assert names == [name for name in RULES if name in names]


def test_a_cpu_fingerprint_without_the_compiler_takes_less_than_30_ms() -> None:
    code = (
        "import time\nfrom cachepipe.adapters.machine import machine_fingerprint\n"
        "t = time.perf_counter()\nmachine_fingerprint(['cpu'], has_compiler_part=False)\n"
        "print(time.perf_counter() - t)"
    )
    best = min(
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(5)
    )
    assert best < 0.030


# --- CPU -------------------------------------------------------------------------------------------------------------


def test_case_b1_the_flags_that_kernels_can_use_are_read_from_the_first_processor(tmp_path: Path) -> None:
    cpuinfo(tmp_path, "fpu vme sse2 avx avx2 fma f16c bmi2 avx512f hypervisor rdseed\n")
    assert cpu_flags(Host(root=str(tmp_path), machine="x86_64")) == {"avx", "avx2", "fma", "f16c", "bmi2", "avx512f"}


def test_flags_of_arm_are_read_by_their_own_name(tmp_path: Path) -> None:
    cpuinfo(tmp_path, "fp asimd evtstrm aes atomics sve bf16", "Features")
    assert cpu_flags(Host(root=str(tmp_path), machine="aarch64")) == {"fp", "asimd", "atomics", "sve", "bf16"}


def test_a_machine_without_cpuinfo_has_no_flags(tmp_path: Path) -> None:
    host = Host(root=str(tmp_path), machine="x86_64")
    assert cpu_flags(host) == frozenset()
    assert machine_fingerprint([], host, has_compiler_part=False).get("cpu_isa") == "default"


@pytest.mark.parametrize(
    ("flags", "capability", "isa"),
    [
        ((), "", "default"),
        (("avx2",), "", "default"),
        (AVX2, "", "avx2"),
        ((*AVX2, "avx512f"), "", "avx2"),
        (AVX512, "", "avx512"),
        ((*AVX512, "avx512_bf16"), "", "avx512+bf16"),
        ((*AVX512, "avx512_vnni"), "", "avx512_vnni"),
        ((*AVX512, "avx512_vnni", "avx512_bf16"), "", "avx512_vnni+bf16"),
        ((*AVX512, "avx512_vnni", "avx512_bf16", "amx_tile"), "", "amx+bf16"),
        ((*AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_fp16"), "", "amx+bf16+fp16"),
        ((*AVX512, "amx_tile"), "", "avx512"),
        (AVX512, "avx2", "avx2"),
        (AVX512, "default", "default"),
        (AVX512, "avx512", "avx512"),
        (AVX2, "avx512", "avx2"),
        (AVX512, "nonsense", "avx512"),
        (("asimd", "fp"), "", "asimd"),
        (("asimd", "sve"), "", "asimd"),
        (("asimd", "sve", "bf16"), "", "sve256"),
        (("asimd", "sve", "sve2", "bf16"), "", "sve256+sve2"),
    ],
)
def test_the_vector_isa_is_the_one_that_torch_picks(flags: tuple[str, ...], capability: str, isa: str) -> None:
    assert vector_isa(flags, capability) == isa


def test_a_short_sve_vector_has_its_own_name(tmp_path: Path) -> None:
    cpuinfo(tmp_path, "asimd sve bf16", "Features")
    write(tmp_path / "proc/sys/abi/sve_default_vector_length", "16\n")
    host = Host(root=str(tmp_path), machine="aarch64")
    assert machine_fingerprint([], host, has_compiler_part=False).get("cpu_isa") == "sve128"


def test_torch_picks_the_same_vector_isa_here() -> None:
    code = (
        "import torch._inductor.cpu_vec_isa as c\n"
        "found = [i for i in c.supported_vec_isa_list if all(f in c.x86_isa_checker() for f in str(i).split())]\n"
        "for name in (None, 'avx2', 'default'):\n"
        "    print(c.get_isa_from_cpu_capability(name, found or [c.invalid_vec_isa], c.invalid_vec_isa))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names = {"INVALID_VEC_ISA": "default", "avx512 avx512_vnni": "avx512_vnni", "avx512 avx512_vnni amx_tile": "amx"}
    found = [vector_isa(cpu_flags(Host()), name).partition("+")[0] for name in ("", "avx2", "default")]
    assert found == [names.get(line, line) for line in ran.stdout.splitlines()]


# --- threads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, 2),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"MKL_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "1,4"}, 1),
        ({"OMP_NUM_THREADS": "64"}, 2),
        ({"OMP_NUM_THREADS": "0"}, 2),
        ({"OMP_NUM_THREADS": "many"}, 2),
        ({"OMP_NUM_THREADS": "8", "MKL_DYNAMIC": "FALSE"}, 8),
    ],
)
def test_threads_are_physical_cores_unless_a_variable_says_less(
    tmp_path: Path, environ: dict[str, str], threads: int
) -> None:
    cores(tmp_path, (0, 0), (0, 0), (0, 1), (0, 1))
    host = Host(root=str(tmp_path), environ=environ, cpus=frozenset(range(4)), machine="x86_64")
    assert thread_count(host) == threads


def test_cores_of_two_packages_and_hidden_topologies_are_told_apart(tmp_path: Path) -> None:
    cores(tmp_path, (0, 0), (1, 0))
    root = str(tmp_path)
    assert thread_count(Host(root=root, environ={}, cpus=frozenset({0, 1}), machine="x86_64")) == 2
    assert thread_count(Host(root=root, environ={}, cpus=frozenset({0}), machine="x86_64")) == 1
    assert thread_count(Host(root=root, environ={}, cpus=frozenset({7, 8, 9}), machine="x86_64")) == 3


def test_without_mkl_openmp_decides_and_every_cpu_counts(tmp_path: Path) -> None:
    cores(tmp_path, (0, 0), (0, 0))
    arm = {"root": str(tmp_path), "cpus": frozenset({0, 1}), "machine": "aarch64"}
    assert thread_count(Host(environ={}, **arm)) == 2  # type: ignore[arg-type]
    assert thread_count(Host(environ={"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "1"}, **arm)) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variables", "prefix"),
    [
        ({}, []),
        ({}, ["taskset", "-c", "0"]),
        ({"OMP_NUM_THREADS": "1"}, []),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}, []),
        ({"OMP_NUM_THREADS": "8"}, []),
    ],
)
def test_case_a6_the_thread_count_is_torchs_own(variables: dict[str, str], prefix: list[str]) -> None:
    code = (
        "from cachepipe.adapters.machine import Host, thread_count\nours = thread_count(Host())\n"
        "import torch\nprint(ours, torch.get_num_threads())"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
    ran = subprocess.run(
        [*prefix, sys.executable, "-c", code], env={**kept, **variables}, check=True, capture_output=True, text=True
    )
    ours, theirs = ran.stdout.split()
    assert ours == theirs


# --- compiler ---------------------------------------------------------------------------------------------------------


def compiler(folder: Path, name: str = "g++") -> Path:
    path = folder / name
    write(path, "#!/bin/sh\ncase $1 in --version) echo 'g++ 99';; -v) echo 'details' >&2;; *) exit 1;; esac\n")
    path.chmod(0o755)
    return path


def test_the_compilers_answers_are_kept_exactly(tmp_path: Path) -> None:
    compiler(tmp_path)
    assert compiler_texts({"PATH": str(tmp_path)}) == {"--version": "g++ 99\n", "-v": "details\n"}


def test_an_images_cxx_is_not_taken_for_the_builders_compiler(tmp_path: Path) -> None:
    image = compiler(tmp_path, "g++-of-the-image")
    image.write_text(image.read_text().replace("g++ 99", "g++-real 99"))
    compiler(tmp_path)
    for cxx in (str(image), image.name, "/nowhere/g++"):
        environ = {"PATH": str(tmp_path), "CXX": cxx}
        assert compiler_texts(environ)["--version"] == "g++ 99\n"
        assert machine_fingerprint([], Host(environ=environ)).get("compiler") == "g++ 99"
    assert compiler_texts({"PATH": "/nowhere", "CXX": str(image)}) == {}


def test_no_compiler_is_no_part_and_no_error(tmp_path: Path) -> None:
    assert compiler_texts({"PATH": str(tmp_path)}) == {}
    host = Host(environ={"PATH": str(tmp_path)})
    assert machine_fingerprint(["cpu"], host).get("compiler") is None
    with pytest.raises(FingerprintMismatchError, match=r"nothing can be built .* compiler: no C\+\+ compiler on PATH"):
        builder_fingerprint("cpu", True, host)


def test_the_compiler_is_asked_once_per_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    path = tmp_path / "g++"
    write(path, f"#!/bin/sh\necho asked >>{log}\n")
    path.chmod(0o755)
    for _ in range(3):
        compiler_texts({"PATH": str(tmp_path)})
    assert log.read_text().count("asked") == 2  # --version and -v


# --- GPU --------------------------------------------------------------------------------------------------------------


def test_the_gpus_facts_become_parts() -> None:
    host = Host(environ={"CUDA_VISIBLE_DEVICES": "0"}, nvml=Binding())
    found = machine_fingerprint(["cuda"], host, has_compiler_part=False)
    names = ("device", "gpu_name", "gpu_capability", "gpu_cores", "gpu_memory", "gpu_mig", "driver", "threads")
    assert [found.get(name) for name in names] == [
        "cuda", "NVIDIA H200", "9.0", "16896", "140 GiB", "none", "580.65.06", None,
    ]  # fmt: skip


def gpu_host(site: Path, visible: str | None = "0", cuda: str | None = "13.0") -> Host:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return Host(environ=environ, nvml=Binding(), python_path=fake_torch(site, cuda=cuda))


def test_a_builder_that_sees_several_models_is_refused_with_the_variable_that_chooses(tmp_path: Path) -> None:
    with pytest.raises(FingerprintMismatchError, match="several visible models") as caught:
        builder_fingerprint("cuda", False, gpu_host(tmp_path, visible=None))
    assert caught.value.hint.startswith("choose one GPU by CUDA_VISIBLE_DEVICES")


def test_a_torch_without_cuda_is_refused_before_anything_is_built_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(FingerprintMismatchError, match=r"torch_cuda: none: torch 2\.\S+ is a build without CUDA"):
        builder_fingerprint("cuda", False, gpu_host(tmp_path, cuda=None))
    assert builder_fingerprint("cpu", False, gpu_host(tmp_path, cuda=None)).get("torch_cuda") == "none"


def test_no_visible_gpu_is_a_difference_of_every_gpu_part(tmp_path: Path) -> None:
    built = builder_fingerprint("cuda", False, gpu_host(tmp_path))
    blind = machine_fingerprint(["cuda"], gpu_host(tmp_path, visible=""))
    assert {d.part for d in differences(built, blind)} == {
        "gpu_name", "gpu_capability", "gpu_cores", "gpu_memory", "gpu_mig", "driver",
    }  # fmt: skip


def unloaded() -> Binding:
    binding = Binding()
    binding.is_loaded = False
    return binding


def test_without_nvml_model_and_driver_come_from_proc_and_the_rest_is_left_to_the_service(tmp_path: Path) -> None:
    write(
        tmp_path / "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12.3.0\n",
    )
    write(tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 1\n")
    whole = gpu_host(tmp_path / "site")
    host = replace(whole, root=str(tmp_path), environ={}, nvml=unloaded(), machine="x86_64")
    found = machine_fingerprint(["cuda"], host, has_compiler_part=False)
    assert (found.get("gpu_name"), found.get("driver"), found.get("gpu_cores")) == ("NVIDIA H200", "580.65.06", UNKNOWN)
    built = builder_fingerprint("cuda", False, whole)
    assert differences(built, found) == ()
    with pytest.raises(FingerprintMismatchError, match="without NVML"):
        builder_fingerprint("cuda", False, host)
    hidden = Host(root=str(tmp_path), environ={"CUDA_VISIBLE_DEVICES": ""}, nvml=unloaded())
    assert machine_fingerprint(["cuda"], hidden, has_compiler_part=False).get("gpu_name") is None


def test_a_machine_without_a_gpu_has_no_gpu_parts(tmp_path: Path) -> None:
    start = time.perf_counter()
    found = machine_fingerprint(["cuda"], Host(root=str(tmp_path), nvml=unloaded()), has_compiler_part=False)
    assert time.perf_counter() - start < 5
    assert found.get("gpu_name") is None
