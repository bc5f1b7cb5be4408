"""What to do is told for every way in which an entry fails, and the reasons of torch are those that torch 2.13 writes."""

from __future__ import annotations

import pytest

from cachepipe.domain.remedies import bypass_remedy, late_remedy, remedy


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Cannot cache a graph with freezing enabled", "switch `freezing` off"),
        ("mkldnn tensors unpickleable", "switch `freezing` off"),
        (
            "Unsupported call_function target autograd_function_apply. Function module: torch.ops.higher_order",
            "autograd_cache_allow_custom_autograd_functions = True",
        ),
        ("Can't cache HigherOrderOperator: cond", "torch.where"),
        ("Unsupported call_function target cond. Function module: torch.ops.higher_order", "torch.where"),
        ("Unsupported call_function target <function f at 0x7f>. Function module: model", "custom operator"),
        ("Failed to pickle cache key", "cannot be pickled"),
        ("Cannot produce stable cache key for unpicklable type Lock", "cannot be pickled"),
        ("a reason of another torch", "see torch's reason"),
    ],
)
def test_case_g1_g3_g5_a_refusal_of_torch_has_the_known_way_round(reason: str, words: str) -> None:
    assert words in bypass_remedy(reason)
    assert words in (remedy([f"torch refuses to cache a graph: {reason}"]) or "")


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("no graph was compiled, it ran eager: `torch.compiler.set_stance` is `force_eager`", "undo the switch"),
        (
            "1 graphs were traced but none was looked up in torch's cache: `force_disable_caches` is set",
            "undo the switch",
        ),
        ("no graph was compiled, it ran eager: `TORCHDYNAMO_DISABLE` or `torch._dynamo.config.disable` is set", "undo"),
        ("none was looked up: `torch._inductor.config.fx_graph_cache` is off", "undo the switch"),
        ("`torch._dynamo.config.suppress_errors` is on: a failed compile would run eager unseen", "undo the switch"),
        ("no graph was compiled in this process", "called through torch.compile at all"),
        ("no graph was compiled in this shape bucket: its size changes nothing that is compiled", "`shape_buckets`"),
        ("torch's recompile limit is hit: 9 traces so far", "changes from call to call"),
        ("every call is traced anew, 3 graphs so far: a service would compile for ever", "changes from call to call"),
        ("outputs differ from eager: max_abs_diff 3.0", "raise `tolerance`"),
        ("outputs are NaN throughout", "inputs that give numbers"),
        (
            "RuntimeError: Found <class 'transformers.cache_utils.DynamicCache'> in output, which is not a known type.",
            "use_cache: {const: false}",
        ),
        ("`engine: aot`: a call reads what every process has anew: self.started", "make it an input"),
        ("m: max_graph_breaks: limit 0, found 1", "at the places named"),
        ("m: min_hit_rate: limit 1, found 0.5", "--fresh"),
        ("m: min_speedup: limit 2, found 1.1", "hardly slower"),
        ("ended after 2400 s without a result", "30 more for every shape bucket"),
    ],
)
def test_every_failure_says_what_to_do(problem: str, words: str) -> None:
    assert words in (remedy(["something else", problem]) or "")


def test_what_is_not_known_has_no_remedy() -> None:
    assert remedy(["something else"]) is None and remedy([]) is None


@pytest.mark.parametrize(
    ("reason", "settings", "is_restored", "words"),
    [
        ("tensor 'x' size mismatch at index 0", (), True, "shape_buckets"),
        ("GLOBAL_STATE changed: grad_mode", ("grad mode: inference_mode to grad",), True, "inside `entry.context()`"),
        ("tensor 'x' dispatch key set mismatch", (), True, "outside of `entry.context()`"),
        ("tensor 'x' dtype mismatch. expected Long, actual Int", (), True, "manifest's dtypes"),
        ("", (), True, "entry.warmup"),
        ("", (), False, "nothing is restored"),
        ("tensor 'x' size mismatch at index 0", ("threads: 2 to 1",), False, "nothing is restored"),
    ],
)
def test_a_refused_late_compile_is_answered_with_what_would_have_kept_it_away(
    reason: str, settings: tuple[str, ...], is_restored: bool, words: str
) -> None:
    found = late_remedy(reason, settings, is_restored)
    assert words in found and "\n" not in found
    assert all(setting in found for setting in settings if is_restored)
