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


def cache_variables(root: str) -> dict[str, str]:
    """Returns the variables that point torch and Triton at a cache folder.

    TRITON_CACHE_DIR is set in builder and service alike, so that Triton's folder does not depend on the device index
    that torch appends.
    """
    return {"TORCHINDUCTOR_CACHE_DIR": f"{root}/inductor", "TRITON_CACHE_DIR": f"{root}/triton/0", **KEYED}
