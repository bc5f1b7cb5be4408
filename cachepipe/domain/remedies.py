"""What to do about each way in which an entry fails, found by the words that say how it failed.

Source: torch/_functorch/_aot_autograd/autograd_cache.py (`check_node_safe`, `is_cacheable_function`), torch/_ops.py
(`HigherOrderOperator.cacheable`), torch/_inductor/codecache.py (`CacheabilityValidator`); checked against torch 2.13.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_LOOK = "look whether the model's trace depends on time, random numbers, the environment or the order of calls"

_BYPASSES = (
    ("freezing", "switch `freezing` off: a graph with frozen weights is never cached"),
    ("mkldnn", "switch `freezing` off: MKL-DNN tensors cannot be stored"),
    (
        "autograd_function_apply|autograd.function",
        "set `torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True` in the module of the factory, which "
        "builder and service import, or replace the autograd.Function by plain operators or a custom one (`torch.library`)",
    ),
    (
        "higher.?order|hop",
        "write it without the operator (`torch.where` in place of `torch.cond`), or keep it out of the compiled method",
    ),
    (
        "allow_in_graph|call_function target|call_method",
        "make the function a custom operator (`torch.library`): torch cannot see into it",
    ),
    ("pickl", "keep what cannot be pickled out of the graph"),
)
"""Words of torch's reason for not caching a graph → the known way round."""

_PROBLEMS = (
    (
        r"`[^`]+`( or `[^`]+`)? (is set|is off|is on\b|is `|hides)",
        "undo the switch that is named: the factory, or a module that it imports, sets it",
    ),
    (
        "its size changes nothing",
        "name this size no longer in `shape_buckets`, or look whether the model uses that input at all",
    ),
    (
        "no graph",
        "look whether the model is called through torch.compile at all: `fullgraph`, decorators, its fast path",
    ),
    (
        "recompile limit|traced anew",
        "make what the guard reads an input or a constant: a counter, flag or object that changes from call to call is traced "
        "anew every time; sizes that vary belong into `shape_buckets` or `dynamic_dims`",
    ),
    (
        "nothing can be compared|NaN throughout",
        "let the method return tensors (or lists, mappings, dataclasses of them), for inputs that give numbers",
    ),
    (
        "outputs differ",
        "raise `tolerance` if the difference is rounding; random numbers (dropout in training) and state outside of buffers "
        "cannot be compared; otherwise torch compiles this model wrongly here",
    ),
    (
        "reads what every process has anew",
        "set it to the same value in every process, or make it an input: a native function keeps what the builder read",
    ),
    (
        "in output, which is not a known type",  # of torch.export
        "let the method return tensors, lists, tuples and dicts alone: a generative model of transformers does with "
        "`use_cache: {const: false}` among its inputs",
    ),
    (
        r"could not be counted: \d+ events",  # of dropped ones alone
        "more happened in one process than is kept in memory: name fewer `shape_buckets` per entry (sizes that vary much belong "
        "into `dynamic_dims`, other models and methods into entries of their own); nothing was published",
    ),
    (
        "could not be counted",
        "cachepipe does not know this torch, or this container hides /proc from it: take a newer cachepipe, or a torch that this "
        "one knows; nothing was published",
    ),
    (
        "max_graph_breaks",
        "mend the code at the places named, or allow that many by `gates: {max_graph_breaks: …}`; nothing was published",
    ),
    (
        "a precompiled header",
        "add `compile: {options: {cpp_cache_precompile_headers: false}}` to the model: torch 2.11 has no variable for it, and runs the "
        "compiler at every start to look for its headers; nothing was published",
    ),
    (
        "min_hit_rate|max_compiles|max_tuning_runs|graphs at|torch compiles again",
        f"{_LOOK}; else build again with `--fresh`; nothing was published",
    ),
    (
        "min_speedup",
        "a start without the cache is hardly slower: leave this model out, or lower `gates: {min_speedup: …}`; "
        "nothing was published",
    ),
    (
        "without a result",
        "look in the log at what it waits for; a step has 10 minutes, and 30 more for every shape bucket",
    ),
)
"""Words of a problem or of a gate's refusal → what to do."""


def bypass_remedy(reason: str) -> str:
    """Returns the known way round a refusal of torch to cache a graph; without one, torch's reason has to do."""
    return next((remedy for words, remedy in _BYPASSES if re.search(words, reason, re.I)), "see torch's reason")


def remedy(problems: Iterable[str]) -> str | None:
    """Returns what to do about the first problem that is known here; None: about none of them."""
    for problem in problems:
        if "refuses to cache" in problem:
            return bypass_remedy(problem.partition("refuses to cache")[2])
        for words, text in _PROBLEMS:
            if re.search(words, problem):
                return text
    return None


def late_remedy(reason: str, settings: Sequence[str], is_restored: bool) -> str:
    """Returns what keeps a compile from being late.

    Args:
        reason: torch's words for the guard that failed; empty for a function's first compile.
        settings: ambient settings that are not those of the first compile, in words.
        is_restored: this process was started with an artifact.
    """
    if not is_restored:
        return "nothing is restored, so every first call compiles: the line `cachepipe restore` of this start says why"
    if settings:
        return f"call warm-up and requests alike, inside `entry.context()` ({'; '.join(settings)})"
    if "dispatch key set mismatch" in reason:
        return "make input tensors outside of `entry.context()`, as warm-up does"
    if "dtype mismatch" in reason:
        return "pass inputs of the manifest's dtypes"
    if not reason:
        return "call every shape bucket before `ready()` (`entry.warmup`)"
    return "call a covered shape (`entry.covered`), or add this one to `shape_buckets`"
