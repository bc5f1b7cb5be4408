"""torch's ambient settings: read for comparison, set where builder and service must agree.

Source: torch/_dynamo/config.py, _inductor/config.py, _functorch/config.py, utils/_config_module.py,
_dynamo/eval_frame.py, _dynamo/decorators.py; checked against torch 2.13.0.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cachepipe.domain.record import Json
from cachepipe.domain.variables import TORCH
from cachepipe.errors import UsageError

KEY_VARIABLES = (
    *("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TRITON_", "LOG_TLPARSE", "CXX", "CC"),
    *("AOT_PARTITIONER_DEBUG", "FAKE_ALLOW_META", "PARTITIONER_MEMORY_BUDGET_"),
)
"""Prefixes of environment variables that can enter torch's keys."""


def ambient_settings(device: str) -> dict[str, str]:
    """Returns the process-wide settings that enter torch's keys, name → value in words.

    Read inside the calling context, they are what a service must have too (field case A14).
    """
    settings = {
        "autocast": _autocast(device),
        "default device": _default_device(),
        "default dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "grad mode": _grad_mode(),
        "matmul precision": _unless_mixed(torch.get_float32_matmul_precision),
        "fp32 precision": str(getattr(torch.backends.cuda.matmul, "fp32_precision", "none")),
        "tf32 matmul": _unless_mixed(lambda: torch.backends.cuda.matmul.allow_tf32),
        "fp16 reduction": str(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
        "bf16 reduction": str(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "threads": str(torch.get_num_threads()),
    }
    for name, value in sorted(os.environ.items()):
        if name.startswith(KEY_VARIABLES) and not name.endswith("_CACHE_DIR"):
            settings[f"variable {name}"] = value.replace(os.path.dirname(torch.__file__), TORCH)[:256]
    return settings


def _unless_mixed(read: Callable[[], Any]) -> str:
    """Returns what torch tells; `mixed` where it refuses, because `torch.backends.….fp32_precision` says what its older
    switches cannot.

    Source: aten/src/ATen/Context.cpp (`float32MatmulPrecision`, `allowTF32CuBLAS`), seen with torch 2.13.0.
    """
    try:
        return str(read())
    except RuntimeError:
        return "mixed"


def set_matmul_precision(wanted: str) -> Callable[[], None]:
    """Sets torch's matmul precision; returns what puts the earlier one back, in both of torch's ways to tell it.

    `highest` is left as torch starts: the older call makes `ieee` of the newer switches' `none`, which computes the same and is
    another key, so that a service that sets nothing would find nothing outside `entry.context()`. Where that is so already
    nothing is touched, not even for a moment in which another thread could look.
    """
    switches, before = _precision_switches(), _unless_mixed(torch.get_float32_matmul_precision)
    general = [(owner, precision) for owner, precision in _general_switches() if precision != "none"]
    told = before, switches
    if not (before == wanted == "highest" and all(precision == "none" for _, precision in switches)):
        before = _write_precision(before, wanted, switches, general)

    def put_back() -> None:
        if told == (_unless_mixed(torch.get_float32_matmul_precision), _precision_switches()):
            return
        if before != "mixed":
            torch.set_float32_matmul_precision(before)
        for switch, precision in (*general, *switches):
            switch.fp32_precision = "none"
            if switch.fp32_precision != precision:  # else it follows a general switch, and goes on to
                switch.fp32_precision = precision

    return put_back


def _write_precision(before: str, wanted: str, switches: list[tuple[Any, str]], general: list[tuple[Any, str]]) -> str:
    """Returns what the older way told before; `mixed` where torch refuses even after the newer one says nothing against it."""
    if before == "mixed":
        for switch, _ in switches:
            switch.fp32_precision = "ieee"
        before = _unless_mixed(torch.get_float32_matmul_precision)
    torch.set_float32_matmul_precision(wanted)
    for owner, _ in general if wanted == "highest" else ():  # which `none` would follow
        owner.fp32_precision = "none"
    for switch, _ in switches if wanted == "highest" else ():
        switch.fp32_precision = "none"
        if switch.fp32_precision != "none":
            switch.fp32_precision = "ieee"
    return before


def _general_switches() -> list[tuple[Any, str]]:
    """Returns the newer switches above those of products, each with its value: of all of torch, and of CUDA."""
    backends: Any = torch.backends
    owners: tuple[Any, ...] = (backends, getattr(backends, "cudnn", None))
    return [(owner, owner.fp32_precision) for owner in owners if hasattr(owner, "fp32_precision")]


def _precision_switches() -> list[tuple[Any, str]]:
    """Returns the newer switches that `set_float32_matmul_precision` writes, each with its value; none before torch 2.9."""
    backends: Any = torch.backends
    owners: list[Any] = [getattr(getattr(backends, name, None), "matmul", None) for name in ("cuda", "mkldnn")]
    return [(owner, owner.fp32_precision) for owner in owners if hasattr(owner, "fp32_precision")]


def set_determinism(wanted: bool) -> Callable[[], None]:
    """Switches deterministic algorithms (those that raise, not those that warn); returns what puts the earlier state back.

    Does nothing where it is so already: the call imports the whole of torch._inductor, 1 s that an eager process does not owe.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if before == (wanted, False):
        return lambda: None
    torch.use_deterministic_algorithms(wanted)
    return lambda: torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _grad_mode() -> str:
    if torch.is_inference_mode_enabled():
        return "inference_mode"
    return "grad" if torch.is_grad_enabled() else "no_grad"


def _default_device() -> str:
    """Returns the device of `torch.set_default_device`; a set one changes the graph even where it is the same device."""
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return "unset" if context is None else str(context.device)


def _autocast(device: str) -> str:
    if not torch.is_autocast_enabled(device):
        return "off"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def config_components() -> Json:
    """Returns `config/<module>` → name → [hash, text] of every compile setting.

    torch folds the whole functorch configuration into one key component; only a list of its values can say which differs.
    """
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    components: dict[str, dict[str, list[str]]] = {}
    for name, module in (("dynamo", dynamo), ("functorch", functorch), ("inductor", inductor)):
        values: Mapping[str, Any] = module.get_config_copy()
        components[f"config/{name}"] = {
            key: _component(value) for key, value in sorted(values.items()) if _is_plain(value)
        }
    return components


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (str, int, float, bool, type(None)))


def _component(value: Any) -> list[str]:
    text = repr(sorted(value, key=repr)) if isinstance(value, (set, frozenset)) else repr(value)
    return [hashlib.sha256(text.encode()).hexdigest()[:32], text[:200]]


def raise_recompile_limit(graphs: int) -> None:
    """Lets at least `graphs` shape buckets of one function be compiled; the limits are not part of any key (F1)."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, graphs + 1)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * (graphs + 1))


def fail_on_recompile_limit() -> None:
    """Turns the recompile limit, which torch passes over with one log line, into an error.

    Raises:
        UsageError: the model's code lets torch hide compile errors, which would leave nothing in the cache (G8).
    """
    from torch._dynamo import config

    if config.suppress_errors:
        raise UsageError("`torch._dynamo.config.suppress_errors` is on: a failed compile would run eager unseen")
    config.fail_on_recompile_limit_hit = True


def why_nothing_compiles() -> str:
    """Returns the switch that keeps torch.compile from compiling or caching here, in words; empty when none is set (G8)."""
    from torch._dynamo import config, eval_frame
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "default")
    switches = (
        (
            config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1",
            "`TORCHDYNAMO_DISABLE` or `torch._dynamo.config.disable` is set",
        ),
        (os.environ.get("TORCH_COMPILE_DISABLE") == "1", "`TORCH_COMPILE_DISABLE` is set"),
        (stance != "default", f"`torch.compiler.set_stance` is `{stance}`"),
        (inductor.force_disable_caches, "`force_disable_caches` is set"),
        (not inductor.fx_graph_cache, "`torch._inductor.config.fx_graph_cache` is off"),
        (not functorch.enable_autograd_cache, "`torch._functorch.config.enable_autograd_cache` is off"),
        (config.suppress_errors, "`torch._dynamo.config.suppress_errors` hides a compile error"),
    )
    return next((words for is_set, words in switches if is_set), "")


def mode_options(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `options` on top of the mode's own: torch.compile takes a mode or options, never both."""
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode), **options}


def can_compile(root: str = "") -> bool:
    """Tells whether torch.compile can build anything in this process: for a GPU, or with a C++ compiler on PATH.

    Args:
        root: the restored folder; the stand-in below it answers a compiler's version and compiles nothing.
    """
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    is_real = compiler is not None and not (root and compiler.startswith(os.path.join(root, ".cachepipe", "")))
    return torch.cuda.is_available() or is_real


_RUNS_UNCOMPILABLE = "runs_uncompilable_graphs"
"""Marks our own function: a decorator that torch may put on its own leaves `__wrapped__` too."""


def run_uncompilable_graphs(tell: Callable[[], None]) -> None:
    """Has torch run a graph as it is where its backend cannot compile it, in this process and from now on.

    Graph by graph: when the backend gives up none of it has run, while calling the whole model again would repeat what came
    before a graph break.

    Args:
        tell: called for each such graph; that of the first call stays.

    Source: torch/__init__.py (`_TorchCompileInductorWrapper.__call__` imports the name at each call), _dynamo/exc.py
    (`BackendCompilerFailed`; other exceptions of its base steer the trace), read in 2.11.0 and 2.13.0.
    """
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
    from torch._inductor import compile_fx as imported

    module: Any = imported
    original: Callable[..., Any] = module.compile_fx
    if hasattr(original, _RUNS_UNCOMPILABLE):
        return

    @functools.wraps(original)
    def compile_fx(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(graph, *args, **kwargs)
        except TorchDynamoException as error:
            if not isinstance(error, BackendCompilerFailed):
                raise
        except Exception:  # noqa: BLE001 - whatever a compiler that is not there makes of it
            pass
        tell()
        return graph

    setattr(compile_fx, _RUNS_UNCOMPILABLE, True)
    module.compile_fx = compile_fx


def mark_dynamic(tensor: torch.Tensor, dim: int, low: int, high: int) -> None:
    """Marks one dimension of an input as dynamic within bounds, both included."""
    torch._dynamo.mark_dynamic(tensor, dim, min=low, max=high)


def hold_stream(seconds: float) -> None:
    """Lets the current CUDA stream wait for about as long before it goes on; returns at once.

    Source: torch.cuda._sleep, read in 2.11.0 and 2.13.0; it counts cycles, of which a GPU has at most some 2 billion a second.
    """
    import torch

    if seconds > 0:
        torch.cuda._sleep(int(seconds * 2e9))  # type: ignore[no-untyped-call]
