"""This machine's fingerprint, read from files and the driver: torch is never imported.

Everything comes through a `Host` (the roots of /proc and /sys, the variables, the interpreter), so that another machine is
a small folder. Texts of /proc and /sys are read once per process.

Source: torch/version.py; torch/_inductor/cpu_vec_isa.py and cpp_builder.py (vector ISA, `-march=native`, compiler search)
and aten/src/ATen/ParallelOpenMP.cpp (thread count), read in 2.11.0 and 2.13.0; thread counts compared with torch by test.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from cachepipe.adapters.gpu import Gpus, visible_gpus
from cachepipe.domain.fingerprint import RULES, SEVERAL, UNKNOWN, Fingerprint, Part
from cachepipe.domain.variables import COMPILER
from cachepipe.errors import FingerprintMismatchError

# What a compiler given -march=native may use in any kernel, vector code or not.
_X86_FLAGS = re.compile(
    r"avx\w*|amx\w*|fma|fma4|f16c|xop|pni|ssse3|sse4_1|sse4_2|popcnt|abm|bmi1|bmi2|movbe|adx|gfni|vaes"
)
_ARM_FLAGS = re.compile(r"asimd\w*|sve\w*|sme\w*|bf16|i8mm|fp|fphp|atomics|lrcpc|ilrcpc|fcma|jscvt")

_COMMON = (
    "device",
    "torch",
    "torch_build",
    "torch_debug",
    "torch_cuda",
    "triton",
    "python",
    "platform",
    "machine",
    "libc",
)
_GPU = ("gpu_name", "gpu_capability", "gpu_cores", "gpu_memory", "gpu_mig", "driver")
_NATIVE = ("cpu_isa", "cpu_flags", "venv", "compiler")


@dataclass(frozen=True)
class Host:
    """Where the facts are read."""

    root: str = "/"
    """Parent of `proc` and `sys`."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    python_path: tuple[str, ...] | None = None
    """Folders in which torch and triton are looked up; None: as an import here would."""
    cpus: frozenset[int] | None = None
    """CPUs that this process may use; None: its affinity mask."""
    machine: str = platform.machine()
    nvml: Any = None
    """NVML binding; None: pynvml."""


def machine_fingerprint(
    devices: Collection[str], host: Host | None = None, *, has_compiler_part: bool = True
) -> Fingerprint:
    """Returns all parts of this machine for these devices, in the order of `RULES`.

    Args:
        devices: `cpu`, `cuda`: what the service may run on.
        host: where to look; None: here.
        has_compiler_part: False saves one run of the host compiler when no row asks for `compiler`.
    """
    host = host or Host()
    facts: dict[str, str | None] = {**_software(host), **_native(host), "device": " ".join(sorted(devices))}
    if has_compiler_part:
        facts["compiler"] = compiler_texts(host.environ).get("--version", "").partition("\n")[0] or None
    if "cpu" in devices:
        facts["threads"] = str(thread_count(host))
    if "cuda" in devices:
        facts.update(_gpu_facts(host))
    return _fingerprint(facts)


def builder_fingerprint(device: str, has_native_code: bool, host: Host | None = None) -> Fingerprint:
    """Returns the parts that go into a statement: no more than the artifact depends on.

    Args:
        device: `cpu` or `cuda`.
        has_native_code: the artifact holds objects built by the host compiler.
        host: where to look; None: here.

    Raises:
        FingerprintMismatchError: visible GPUs differ, or a part of this machine cannot be read: what it builds could
            not be matched.
    """
    names = {*_COMMON, *(_GPU if device == "cuda" else ("threads",)), *(_NATIVE if has_native_code else ())}
    whole = machine_fingerprint([device], host, has_compiler_part=has_native_code)
    parts = tuple(part for part in whole.parts if part.name in names)
    problems = [
        "compiler: no C++ compiler on PATH" if name == "compiler" else f"{name}: cannot be read"
        for name in RULES
        if name in names and whole.get(name) is None
    ]
    problems += [f"{part.name}: cannot be read without NVML" for part in parts if part.value == UNKNOWN]
    several = [f"{part.name}: several visible models: {part.value}" for part in parts if SEVERAL in part.value]
    if device == "cuda" and whole.get("torch_cuda") == "none":
        problems.append(f"torch_cuda: none: torch {whole.get('torch')} is a build without CUDA")
    if problems or several:
        mend = "choose one GPU by CUDA_VISIBLE_DEVICES" if several else "mend what the lines name"
        mend += " (on Debian: `apt-get install g++`)" if any("compiler" in text for text in problems) else ""
        raise FingerprintMismatchError(
            problems + several,
            what="nothing can be built on this machine",
            hint=f"{mend}, or build on another machine",
        )
    return Fingerprint(parts)


def _fingerprint(facts: Mapping[str, str | None]) -> Fingerprint:
    known = ((name, facts.get(name)) for name in RULES)
    return Fingerprint(tuple(Part(name, value) for name, value in known if value is not None))


@cache
def _read(path: str) -> str:
    """Returns a file's text, or an empty one when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


# --- torch, Python, system ---------------------------------------------------------------------------------------


def _software(host: Host) -> dict[str, str | None]:
    torch = _assignments(_package_folder("torch", host), "version.py")
    return {
        "torch": torch.get("__version__"),
        "torch_build": torch.get("git_version"),
        "torch_debug": torch.get("debug"),
        "torch_cuda": "none" if torch.get("cuda") == "None" else torch.get("cuda"),
        "triton": _triton_version(host),
        "python": f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}{sys.abiflags}",
        "platform": sys.platform,
        "machine": host.machine,
        "libc": _libc(),
    }


def _package_folder(name: str, host: Host) -> str:
    """Returns a top-level package's folder without importing it; empty: there is none."""
    try:
        if host.python_path is None:
            spec = importlib.util.find_spec(name)
        else:
            spec = importlib.machinery.PathFinder.find_spec(name, list(host.python_path))
    except (ImportError, ValueError):
        return ""
    places = spec.submodule_search_locations if spec else None
    return next(iter(places), "") if places else ""


def _assignments(folder: str, name: str) -> dict[str, str]:
    """Returns the constants that a module assigns at its top, as text."""
    values: dict[str, str] = {}
    try:
        tree = ast.parse(_read(os.path.join(folder, name)) if folder else "")
    except (SyntaxError, ValueError):
        return values
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if isinstance(node.value, ast.Constant):
            values.update({target.id: str(node.value.value) for target in targets if isinstance(target, ast.Name)})
    return values


def _triton_version(host: Host) -> str:
    # The folder of the metadata names the version; importlib.metadata would cost ten times this listing.
    folder = _package_folder("triton", host)
    if not folder:
        return "none"
    for name in sorted(os.listdir(os.path.dirname(folder))):
        found = re.fullmatch(r"(?:pytorch_)?triton(?:_\w+)?-(.+)\.dist-info", name)
        if found:
            return found[1]
    return _assignments(folder, "__init__.py").get("__version__", "none")


@cache
def _libc() -> str:
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        name = None
    if name:
        return name
    # musl has no such name; its loader does, but only on standard error
    return "musl" if any(entry.startswith("ld-musl-") for entry in os.listdir("/lib")) else "other"


# --- CPU ---------------------------------------------------------------------------------------------------------


def _native(host: Host) -> dict[str, str | None]:
    flags = cpu_flags(host)
    return {
        "cpu_isa": vector_isa(flags, host.environ.get("ATEN_CPU_CAPABILITY", ""), _sve_bits(host)),
        "cpu_flags": " ".join(sorted(flags)),
        # not resolved: torch's compile commands hold the path as the interpreter has it
        "venv": os.path.abspath(sys.prefix),
    }


def cpu_flags(host: Host) -> frozenset[str]:
    """Returns the CPU's flags that generated code can depend on, by the kernel's names."""
    line = _flags_line(os.path.join(host.root, "proc/cpuinfo"))
    wanted = _ARM_FLAGS if host.machine == "aarch64" else _X86_FLAGS
    return frozenset(flag for flag in line.split() if wanted.fullmatch(flag))


@cache
def _flags_line(path: str) -> str:
    # Only the first processor: the kernel writes the rest of a big machine's list slowly.
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return value
    except OSError:
        pass
    return ""


def _sve_bits(host: Host) -> int:
    text = _read(os.path.join(host.root, "proc/sys/abi/sve_default_vector_length")).strip()
    return 8 * int(text) if text.isdecimal() else 0


def vector_isa(flags: Collection[str], capability: str = "", sve_bits: int = 0) -> str:
    """Returns the vector ISA that torch generates CPU code for.

    Args:
        flags: the kernel's names.
        capability: ATEN_CPU_CAPABILITY; what the CPU lacks, and unknown values, are ignored as torch does.
        sve_bits: length of an SVE vector.

    Returns:
        `amx`, `avx512_vnni`, `avx512`, `avx2`, `sve256`, `sve128`, `asimd` or `default`, with `+bf16`, `+fp16`, `+sve2`
        where they change the compiler's flags.
    """
    has = set(flags).__contains__
    if has("asimd"):
        is_sve = has("bf16") and (has("sve") or has("sve2"))
        return f"sve{128 if sve_bits == 128 else 256}{'+sve2' if has('sve2') else ''}" if is_sve else "asimd"
    is_avx2 = has("avx2") and has("fma")
    is_avx512 = is_avx2 and all(map(has, ("avx512f", "avx512dq", "avx512bw", "avx512vl")))
    if capability == "default" or not is_avx2:
        return "default"
    if capability == "avx2" or not is_avx512:
        return "avx2"
    bf16 = "+bf16" if has("avx512_bf16") else ""
    if not has("avx512_vnni"):
        return f"avx512{bf16}"
    if has("amx_tile"):
        return f"amx{bf16}{'+fp16' if has('amx_fp16') else ''}"
    return f"avx512_vnni{bf16}"


def thread_count(host: Host) -> int:
    """Returns what `torch.get_num_threads()` says in a fresh process on this host.

    MKL decides on x86: MKL_NUM_THREADS before OMP_NUM_THREADS, never more than the physical cores in the affinity mask
    unless MKL_DYNAMIC is off. Elsewhere OMP_NUM_THREADS before MKL_NUM_THREADS, else the CPUs in the mask.
    """
    cpus = host.cpus if host.cpus is not None else frozenset(os.sched_getaffinity(0))
    omp, mkl = (_first_number(host.environ.get(name, "")) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if host.machine != "x86_64":
        return omp or mkl or len(cpus)
    wanted = mkl or omp
    if wanted and host.environ.get("MKL_DYNAMIC", "").lower() in ("false", "0", "no", "off"):
        return wanted
    cores = _physical_cores(host.root, cpus)
    return min(wanted, cores) if wanted else cores


def _first_number(text: str) -> int:
    found = re.match(r"\s*([0-9]{1,6})\s*(?:,|$)", text)
    return int(found[1]) if found else 0


def _physical_cores(root: str, cpus: frozenset[int]) -> int:
    cores = set()
    for cpu in cpus:
        folder = os.path.join(root, f"sys/devices/system/cpu/cpu{cpu}/topology")
        package, core = (_read(os.path.join(folder, name)).strip() for name in ("physical_package_id", "core_id"))
        # a hidden topology (some sandboxes) leaves every CPU a core of its own
        cores.add((package, core) if core else ("cpu", str(cpu)))
    return max(1, len(cores))


def compiler_texts(environ: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """Returns what the C++ compiler that torch would use answers to `--version` and `-v`, exactly; {} without one.

    It is `g++` on PATH, whatever CXX names: builders have no CXX, and the back-port `compiler-name` makes services like them.
    """
    environ = os.environ if environ is None else environ
    return _compiler_texts(COMPILER, environ.get("PATH", os.defpath))


@cache
def _compiler_texts(compiler: str, path: str) -> Mapping[str, str]:
    import subprocess

    texts = {}
    for option in ("--version", "-v"):
        try:
            ran = subprocess.run(
                [compiler, option],
                check=True,
                capture_output=True,
                timeout=30,
                env={"PATH": path, "LC_ALL": "C"},
            )
        except (OSError, subprocess.SubprocessError):
            return {}
        texts[option] = (ran.stdout if option == "--version" else ran.stderr).decode(errors="replace")
    return texts


# --- GPU ---------------------------------------------------------------------------------------------------------


def _gpu_facts(host: Host) -> dict[str, str | None]:
    gpus = visible_gpus(host.environ, host.nvml)
    if gpus is None and host.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() not in ("", "-1"):
        return _gpu_facts_without_nvml(host.root)
    if gpus is None or not gpus.visible:
        return {}
    return {
        "gpu_name": _joined(gpus, "name"),
        "gpu_capability": _joined(gpus, "capability"),
        "gpu_cores": _joined(gpus, "cores"),
        "gpu_memory": SEVERAL.join(sorted({_gibibytes(gpu.memory_bytes) for gpu in gpus.visible})),
        "gpu_mig": _joined(gpus, "mig_profile"),
        "driver": gpus.driver,
    }


def _joined(gpus: Gpus, fact: str) -> str:
    return SEVERAL.join(sorted({str(getattr(gpu, fact)) for gpu in gpus.visible}))


def _gibibytes(size_bytes: int) -> str:
    # whole GiB: the last megabytes differ between drivers of one board
    return f"{round(size_bytes / 2**30)} GiB"


def _gpu_facts_without_nvml(root: str) -> dict[str, str | None]:
    """Containers without the `utility` capability have no NVML, but the driver still tells model and version in /proc."""
    version = _read(os.path.join(root, "proc/driver/nvidia/version"))
    driver = re.search(r"Kernel Module.*?\s([0-9]+(?:\.[0-9]+)+)\s", version)
    folder = os.path.join(root, "proc/driver/nvidia/gpus")
    if driver is None or not os.path.isdir(folder):
        return {}
    texts = [_read(os.path.join(folder, name, "information")) for name in sorted(os.listdir(folder))]
    models = {found[1].strip() for text in texts if (found := re.search(r"^Model:(.+)$", text, re.M))}
    if not models:
        return {}
    unknown = dict.fromkeys(("gpu_capability", "gpu_cores", "gpu_memory", "gpu_mig"), UNKNOWN)
    return {"gpu_name": SEVERAL.join(sorted(models)), **unknown, "driver": driver[1]}
