"""The environment variables that builder and service set alike.

Source: torch/_inductor/config.py and runtime/cache_dir_utils.py, torch/_functorch/config.py, triton/knobs.py; read in
torch 2.11.0 and 2.13.0, triton 3.6.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from cachepipe.domain.record import Json

KEYED: Mapping[str, Json] = {
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING": "0",
}
"""Part of torch's keys: no dry compile to probe the vector ISA, no precompiled headers (they lie outside the cache), and
the last because its default follows whether `CI` is set: what is built in CI would miss everywhere else."""


COMPILER = "g++"
"""What torch calls in builders, which have no CXX, and in services, where the back-port `compiler-name` sees to it."""

TORCH = "{torch}"
"""Stands in a statement for the folder of the installed torch, which differs from machine to machine."""

_TOOLS: Mapping[str, Mapping[str, str]] = {"cuda": {"TRITON_PTXAS_PATH": f"{TORCH}/bin/ptxas"}}
"""Files of torch that Triton takes for its own. torch names its ptxas before it compiles a kernel but not before it loads one, and
the version of ptxas is part of Triton's key: without this, what was compiled on a miss is never found on a hit.

Source: torch/_inductor/async_compile.py and runtime/compile_tasks.py (`_set_triton_ptxas_path`) 2.11.0;
triton/backends/nvidia/compiler.py (`get_ptxas_version`) 3.6.0.
"""


NOT_COMPILED_IN = "torch's compiler command cannot name a path with a space, a quote or a backslash"


def can_compile_in(folder: str) -> bool:
    """Tells whether torch can compile native code in a cache folder: it joins the compiler's command line without quotes.

    Source: torch/_inductor/cpp_builder.py (`get_command_line`, `_run_compile_cmd`: `shlex.split`) 2.13.0.
    """
    return not set(folder) & set(" \t\r\n'\"\\")


def is_root(folder: str) -> bool:
    """Tells whether a text may name the folder of a release: an absolute path that goes straight down."""
    return folder.startswith("/") and "/../" not in f"{folder}/"


def pinned_variables(device: str) -> dict[str, str]:
    """Returns what a statement tells services to set beside the cache folders; values may hold `TORCH`."""
    return {**{name: str(value) for name, value in KEYED.items()}, **_TOOLS.get(device, {})}


def cache_variables(root: str) -> dict[str, str]:
    """Returns the variables that point torch and Triton at a cache folder, with those of `KEYED`.

    TRITON_CACHE_DIR is set in builder and service alike, so that Triton's folder does not depend on the device index
    that torch appends.
    """
    keyed = {name: str(value) for name, value in KEYED.items()}
    return {"TORCHINDUCTOR_CACHE_DIR": f"{root}/inductor", "TRITON_CACHE_DIR": f"{root}/triton/0", **keyed}
