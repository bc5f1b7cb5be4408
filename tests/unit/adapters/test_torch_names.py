"""Private names of torch that cachepipe relies on: each test fails on the version that takes one away."""

from __future__ import annotations

import logging
from importlib import import_module

import pytest
import torch

from cachepipe.adapters.torch_trace import COMPONENT_LOGGERS, parse_components
from cachepipe.adapters.torch_work import NAMES, WorkCounter


@pytest.mark.parametrize(("module", "path", "field"), NAMES, ids=str)
def test_a_counted_function_of_torch_exists(module: str, path: str, field: str) -> None:
    owner: object = import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    assert name in vars(owner)


def test_torchs_configuration_and_callbacks_have_the_names_we_use() -> None:
    from torch._dynamo import config as dynamo
    from torch._dynamo.callback import callback_handler
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch._inductor import list_mode_options

    for name in ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit", "suppress_errors"):
        assert hasattr(dynamo, name)
    for module in (dynamo, functorch, inductor):
        assert module.get_config_copy()
    assert hasattr(inductor, "force_disable_caches") and hasattr(inductor, "fx_graph_cache")
    assert hasattr(functorch, "enable_autograd_cache")
    assert list_mode_options("max-autotune")["max_autotune"] is True
    assert callback_handler.start_callbacks is not None and callback_handler.end_callbacks is not None


def test_the_component_logger_is_the_autograd_caches_own() -> None:
    from torch._functorch._aot_autograd import autograd_cache

    assert autograd_cache.log is logging.getLogger(COMPONENT_LOGGERS[0])


def test_uninstalling_the_counter_gives_torch_back_unchanged() -> None:
    from torch._inductor import codecache, cpp_builder

    before = (cpp_builder.run_compile_cmd, vars(codecache.CppCodeCache)["_load_library"])

    class Sink:
        def on_work(self, field: str, what: str) -> None: ...

        def on_layer_lookup(self, layer: str, is_hit: bool, key: str) -> None: ...

    counter = WorkCounter(Sink())
    counter.install()
    assert cpp_builder.run_compile_cmd is not before[0]
    counter.uninstall()
    assert (cpp_builder.run_compile_cmd, vars(codecache.CppCodeCache)["_load_library"]) == before
    assert counter.missing == []


def test_component_lines_are_split_into_name_hash_and_text() -> None:
    lines = ["[abc1] grad_enabled: False", "[def2] example_inputs[0]: TensorMetadata(a: b)", "no component"]
    assert parse_components(lines) == {
        "grad_enabled": ["abc1", "False"],
        "example_inputs[0]": ["def2", "TensorMetadata(a: b)"],
    }


def test_torch_has_the_guards_and_the_loader_that_native_functions_need() -> None:
    from torch._C._aoti import AOTIModelContainerRunnerCpu
    from torch._C._dynamo import guards
    from torch._inductor import aot_compile, config
    from torch.nn.modules import module

    watched: dict[str, int] = {}
    before = guards.dict_version(watched)
    watched["a"] = 1
    assert guards.dict_version(watched) != before
    assert guards.GlobalStateGuard().check()
    tensor = torch.ones(2)
    check = guards.TensorGuards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    assert check(tensor) and not check(tensor.double())
    assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._dispatch_keys(tensor).raw_repr() > 0
    assert callable(AOTIModelContainerRunnerCpu.run) and callable(aot_compile)
    for name in ("package", "precompile_headers", "enable_line_tables"):
        assert hasattr(config.aot_inductor, name)
    assert hasattr(module, "_global_forward_hooks") and hasattr(module, "_global_forward_pre_hooks")
    for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
        assert name in vars(torch.nn.Module())
