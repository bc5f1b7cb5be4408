"""Every name of torch and Triton that is not public and that cachepipe uses, with the versions in which it was read.

The one table: `ci/torch-names` looks each of them up in a wheel without importing it, a test looks them up in the torch that is
installed, and another one that no module uses a name that is missing here. A name stands in this module's table alone, or in
`torch_work.NAMES` or `torch_tuning.NAMES` if its calls are counted or watched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cachepipe.adapters.torch_tuning import NAMES as WATCHED
from cachepipe.adapters.torch_work import NAMES as COUNTED
from cachepipe.adapters.torch_work import WORKER_COMPILE

Version = tuple[int, int]
FIRST: Version = (2, 11)
LAST: Version = (2, 13)


class Name(NamedTuple):
    module: str
    path: str
    """Attribute path in the module: a function, a class, `Class.method`, a setting."""
    first: Version = FIRST
    last: Version = LAST
    """Versions of torch in which it must exist, both included."""

    def is_in(self, version: Version) -> bool:
        return self.first <= version <= self.last


_DYNAMO_SETTINGS = (
    "accumulated_recompile_limit",
    "disable",
    "fail_on_recompile_limit_hit",
    "recompile_limit",
    "suppress_errors",
)
RECOMPILE_LIMIT = "FailOnRecompileLimitHit"
"""What a compile raises beyond the limit; a worker's evidence holds this name alone."""
_SINCE: Mapping[str, Version] = {"VecISA._probe_load": (2, 13)}
_RECORDS = "torch._inductor.runtime.autotune_cache"
_HEURISTICS = "torch._inductor.runtime.triton_heuristics"

TABLE: tuple[Name, ...] = (
    *(Name(module, path, _SINCE.get(path, FIRST)) for module, path, _ in COUNTED),
    *(Name(module, path) for module, path in WATCHED),
    *(Name("torch._dynamo.config", setting) for setting in _DYNAMO_SETTINGS),
    Name("torch", "_GLOBAL_DEVICE_CONTEXT"),
    Name("torch._C", "_dispatch_keys"),
    Name("torch._C", "_len_torch_dispatch_stack"),
    Name("torch._C", "_len_torch_function_stack"),
    Name("torch._C._aoti", "AOTIModelContainerRunnerCpu.run"),
    Name("torch._C._aoti", "AOTIModelContainerRunnerCuda.run"),
    Name("torch._C._dynamo.guards", "GlobalStateGuard.check"),
    Name("torch._C._dynamo.guards", "TensorGuards.check"),
    Name("torch._C._dynamo.guards", "dict_version"),
    Name("torch._dynamo", "mark_dynamic"),
    Name("torch._dynamo.exc", RECOMPILE_LIMIT),
    Name("torch._functorch.config", "autograd_cache_allow_custom_autograd_functions"),  # of `domain/remedies.py`
    Name("torch._dynamo.callback", "CompilationCallbackHandler.register_start_callback"),
    Name("torch._dynamo.callback", "CompilationCallbackHandler.register_end_callback"),
    Name("torch._dynamo.callback", "callback_handler"),
    Name("torch._dynamo.cache_size", "exceeds_recompile_limit"),  # convert_frame imports it
    Name("torch._dynamo.convert_frame", "_compile"),
    Name("torch._dynamo.eval_frame", "_stance"),
    Name("torch._dynamo.exc", "BackendCompilerFailed"),
    Name("torch._dynamo.exc", "UncapturedHigherOrderOpError"),
    Name("torch._dynamo.exc", "Unsupported"),
    Name("torch._dynamo.exc", "UserError"),
    Name("torch._functorch.config", "enable_autograd_cache"),
    Name("torch._functorch.config", "error_on_custom_op_aliasing"),
    Name("torch._functorch._aot_autograd.autograd_cache", "log"),
    Name("torch._inductor", "aot_compile"),
    Name("torch._inductor", "list_mode_options"),
    Name("torch._inductor.codegen.common", "KernelTemplate._template_from_string"),
    Name("torch._inductor.codegen.common", "jinja2_env"),
    Name("torch._dynamo.exc", "TorchDynamoException"),
    Name("torch._inductor.compile_fx", "compile_fx"),
    Name("torch._inductor.compile_fx", "fx_codegen_and_compile"),
    Name("torch._inductor.config", "aot_inductor.embed_kernel_binary"),
    Name("torch._inductor.config", "aot_inductor.enable_line_tables", (2, 13)),
    Name("torch._inductor.config", "aot_inductor.package"),
    Name("torch._inductor.config", "aot_inductor.precompile_headers"),
    Name("torch._inductor.config", "compile_threads"),
    Name("torch._inductor.config", "cpp.cxx"),
    Name("torch._inductor.config", "cpp.dynamic_threads"),
    Name("torch._inductor.config", "decide_compile_threads"),
    Name("torch._inductor.config", "force_disable_caches"),
    Name("torch._inductor.config", "fx_graph_cache"),
    Name("torch._inductor.runtime.compile_tasks", WORKER_COMPILE),
    Name("torch._inductor.runtime.compile_tasks", "_set_triton_ptxas_path"),
    Name("torch.cuda", "_sleep"),
    Name("torch.nn.modules.module", "_global_forward_hooks"),
    Name("torch.nn.modules.module", "_global_forward_pre_hooks"),
    Name("torch.utils._pytree", "treespec_dumps"),
    Name("torch.utils._pytree", "treespec_loads"),
    Name("torch.utils._config_module", "ConfigModule.get_config_copy"),
    Name(_RECORDS, "AutotuneCache.create"),
    Name(_RECORDS, "AutotuneCache.read_best"),
    Name(_RECORDS, "AutotuneCache.save"),
    Name(_RECORDS, "AutotuneCache._read"),
    Name(_RECORDS, "HAS_WARP_SPEC"),
    Name(_RECORDS, "_load_cached_autotuning"),
    Name(_HEURISTICS, "CachingAutotuner._dynamic_scale_rblock"),
    Name(_HEURISTICS, "CachingAutotuner.recheck_autotune_cache"),
    Name(_HEURISTICS, "AutotuneCache"),
    Name(_HEURISTICS, "check_autotune_cache"),
    Name(_HEURISTICS, "hash_configs"),
    Name("triton.runtime.cache", "triton_key"),
    Name("triton.knobs", "compilation"),
    Name("triton.knobs", "compilation_knobs.listener"),
)


def names_of(version: Version) -> tuple[Name, ...]:
    """Returns the names that a version of torch must have."""
    return tuple(dict.fromkeys(name for name in TABLE if name.is_in(version)))
