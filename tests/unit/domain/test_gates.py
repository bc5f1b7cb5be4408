from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cachepipe.adapters.torch_work import NAMES
from cachepipe.domain.entry import Context, DynamicDim, EntrySpec
from cachepipe.domain.evidence import (
    CHILD_WORK,
    RATED,
    BucketEvidence,
    EntryEvidence,
    Lookup,
    Uncounted,
    Work,
    hit_rate,
)
from cachepipe.domain.gates import (
    _GATED,
    GateLimits,
    Reference,
    break_in_words,
    evidence_problems,
    judge,
    kind_problems,
    latency_problems,
    refuse,
)
from cachepipe.domain.phases import Phases
from cachepipe.domain.verdict import FREE_WORK
from cachepipe.errors import VerificationError

CONTEXT = Context("inference_mode", None, "highest", False)


def spec(**changes: Any) -> EntrySpec:
    base = EntrySpec(
        model="mlp", dtype="float32", mode="default", device="cpu", factory="m:f", args={}, method="forward", call="kwargs",
        fullgraph=True, dynamic=False, options={}, eval=True, requires_grad=False, memory_format="contiguous",
        context=CONTEXT, inputs={}, shape_buckets=({"batch": 1}, {"batch": 8}), dynamic_dims={}, train=False, loss=None,
        rtol=0.0, atol=0.0,
    )  # fmt: skip
    return replace(base, **changes)


def bucket(batch: int, **changes: Any) -> BucketEvidence:
    base = BucketEvidence({"batch": batch}, 3, 1.0, Phases(), 1, 0, Work(), "d", 0.0, True)
    return replace(base, **changes)


def evidence(*buckets: BucketEvidence, work: Work | None = None, outcomes: str = "hh") -> EntryEvidence:
    names = {"h": "hit", "m": "miss", "b": "bypass"}
    lookups = tuple(Lookup("batch=1", "0/0", "fxgraph", names[letter]) for letter in outcomes)
    total = sum((one.work for one in buckets), Work()) if work is None else work
    return EntryEvidence("mlp/float32/default", "prove", "2.13.0", buckets, lookups, total, (), 0.0, 0.0, 0.0, {})


REFERENCES = (Reference({"batch": 1}, 1, 5.0), Reference({"batch": 8}, 1, 5.0))
GOOD = (bucket(8), bucket(1))


def test_a_restored_start_without_work_passes() -> None:
    assert judge(GateLimits(), spec(), evidence(*GOOD), REFERENCES) == ()


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (evidence(bucket(8)), "batch=1: was not called"),
        (evidence(bucket(8), bucket(1, is_close=False, max_abs_diff=3.0)), "batch=1: outputs differ from eager"),
        (evidence(bucket(8), bucket(1, problems=("ran eager",))), "batch=1: ran eager"),
        (evidence(bucket(8), bucket(1, work=Work(benchmarks=46))), "batch=1: 46 benchmarks"),
        (evidence(bucket(8), bucket(1, work=Work(tuning_runs=1))), "max_tuning_runs: limit 0, found 1"),
        (evidence(bucket(8), bucket(1, work=Work(triton_compiles=2))), "max_compiles: limit 0, found 2"),
        (evidence(bucket(8), bucket(1, work=Work(native_builds=1))), "max_compiles: limit 0, found 1"),
        (evidence(*GOOD, work=Work(native_builds=1)), "max_compiles: limit 0, found 1"),
        (evidence(*GOOD, work=Work(compiler_runs=1)), "max_compiles: limit 0, found 1"),
        (evidence(*GOOD, work=Work(native_builds=1, compiler_runs=1)), "max_compiles: limit 0, found 1"),
        (evidence(*GOOD, work=Work(ptxas_runs=3, triton_compiles=2)), "max_compiles: limit 0, found 3"),
        (evidence(bucket(8), bucket(1, graph_breaks=1)), "max_graph_breaks: limit 0, found 1"),
        (evidence(*GOOD, outcomes="hm"), "min_hit_rate: limit 1, found 0.500 (fxgraph miss at batch=1)"),
        (evidence(*GOOD, outcomes="hhb"), "fxgraph bypass"),
        (evidence(*GOOD, outcomes=""), "nothing was looked up"),
        (evidence(bucket(8), bucket(1, graphs=0)), "graphs at batch=1: built 1, found 0"),
        (evidence(bucket(8), bucket(1, graphs=2)), "graphs at batch=1: built 1, found 2"),
        (evidence(bucket(8), bucket(1, first_call_s=9.0)), "min_speedup: limit 2, found 1.00"),
    ],
)
def test_each_violation_names_entry_gate_limit_and_value(found: EntryEvidence, word: str) -> None:
    violations = judge(GateLimits(), spec(), found, REFERENCES)
    assert any(word in violation for violation in violations)
    assert all(violation.startswith("mlp/float32/default") for violation in violations)


def test_all_violations_are_listed_and_refused_together() -> None:
    found = evidence(bucket(8, work=Work(benchmarks=1)), bucket(1, is_close=False), outcomes="m")
    violations = judge(GateLimits(), spec(), found, REFERENCES)
    with pytest.raises(VerificationError) as caught:
        refuse(violations)
    assert caught.value.violations == violations and len(violations) >= 4
    refuse(())


def test_a_refused_build_names_the_step_and_what_to_do() -> None:
    with pytest.raises(VerificationError) as caught:
        refuse(judge(GateLimits(), spec(), evidence(*GOOD, outcomes="hm"), REFERENCES), "prove")
    assert caught.value.violations[0].startswith("prove: mlp/float32/default: min_hit_rate")
    assert "trace depends on" in caught.value.hint
    with pytest.raises(VerificationError) as caught:
        refuse(["mlp: a gate of tomorrow"], "prove")
    assert caught.value.hint == VerificationError.hint


def test_limits_of_the_manifest_count() -> None:
    limits = GateLimits(min_hit_rate=0.5, max_tuning_runs=46, max_compiles=1, max_graph_breaks=1, min_speedup=1.0)
    work = Work(benchmarks=45, tuning_runs=1, native_builds=1)
    found = evidence(bucket(8), bucket(1, work=work, graph_breaks=1, first_call_s=9.0), outcomes="hm")
    assert judge(limits, spec(), found, REFERENCES) == ()


@pytest.mark.parametrize(
    ("kind", "gates"),
    [
        *((kind, ["max_tuning_runs"]) for kind in ("benchmarks", "tuning_runs")),
        *((kind, ["max_compiles"]) for kind in ("triton_compiles", "native_builds")),
        (CHILD_WORK, ["max_tuning_runs", "max_compiles"]),
        *((layer, ["min_hit_rate"]) for layer in RATED),
        *((kind, []) for kind in FREE_WORK),
    ],
)
def test_a_gate_is_not_passed_by_what_could_not_be_counted(kind: str, gates: list[str]) -> None:
    found = replace(evidence(*GOOD), uncounted=(Uncounted(kind, "torch.gone"),))
    violations = judge(GateLimits(max_tuning_runs=9, max_compiles=9), spec(), found, REFERENCES)
    words = kind.replace("_", " ")
    assert [text.split(": ")[1] for text in violations] == gates
    assert all(f"could not be counted: {words} (torch.gone)" in text for text in violations)
    if violations:
        with pytest.raises(VerificationError) as caught:
            refuse(violations, "prove")
        assert "take a newer cachepipe" in caught.value.hint


def test_a_missed_graph_does_not_hide_behind_the_kernels_that_triton_found() -> None:
    graphs = [Lookup("batch=1", f"{number}/0", "fxgraph", "hit" if number else "miss", "f") for number in range(4)]
    kernels = [Lookup("batch=1", "", "triton", "hit", f"triton_poi_{number}") for number in range(400)]
    found = replace(evidence(*GOOD), lookups=(*graphs, *kernels))
    assert hit_rate(found) == 0.75
    (text,) = judge(GateLimits(min_hit_rate=0.9), spec(), found, REFERENCES)
    assert "min_hit_rate: limit 0.9, found 0.750 (fxgraph miss at batch=1)" in text


def test_a_kernel_that_triton_compiled_is_judged_by_the_gate_of_compiles_alone() -> None:
    lookups = (*evidence(*GOOD).lookups, Lookup("batch=1", "", "triton", "miss", "triton_mm_4"))
    found = replace(evidence(*GOOD), lookups=lookups, work=Work(triton_compiles=1))
    (text,) = judge(GateLimits(), spec(), found, REFERENCES)
    assert "max_compiles: limit 0, found 1" in text
    assert judge(GateLimits(max_compiles=1), spec(), found, REFERENCES) == ()


def test_a_hit_rate_of_lookups_that_were_dropped_does_not_pass_and_no_limit_asks_for_none() -> None:
    found = replace(evidence(*GOOD), dropped=3)
    (text,) = judge(GateLimits(), spec(), found, REFERENCES)
    assert text.endswith("min_hit_rate: limit 1, could not be counted: 3 events that were dropped")
    with pytest.raises(VerificationError) as caught:
        refuse([text], "prove")
    assert "fewer `shape_buckets`" in caught.value.hint and "newer cachepipe" not in caught.value.hint
    both = replace(found, uncounted=(Uncounted("fxgraph", "torch.gone"),))
    with pytest.raises(VerificationError) as caught:
        refuse(judge(GateLimits(), spec(), both, REFERENCES), "prove")
    assert "newer cachepipe" in caught.value.hint  # which is what comes first where both are true
    assert judge(GateLimits(min_hit_rate=0.0), spec(), found, REFERENCES) == ()


def test_every_kind_that_the_recorder_may_miss_is_gated_or_free() -> None:
    kinds = {field for _, _, field in NAMES if field} | {"tuning", CHILD_WORK}
    gated = {kind for kinds in _GATED.values() for kind in kinds}
    assert kinds <= gated | set(FREE_WORK) and not gated & set(FREE_WORK)


def test_queries_of_the_compiler_are_no_compiles() -> None:
    found = evidence(*GOOD, work=Work(compiler_queries=3, isa_probes=3))
    assert judge(GateLimits(), spec(), found, REFERENCES) == ()


def test_graphs_of_shape_buckets_that_are_traced_alike_are_counted_together() -> None:
    dynamic = spec(dynamic_dims={"batch": DynamicDim(2, 16)}, shape_buckets=({"batch": 4}, {"batch": 8}))
    built = (Reference({"batch": 4}, 1, 5.0), Reference({"batch": 8}, 0, 0.1))
    assert judge(GateLimits(), dynamic, evidence(bucket(8), bucket(4, graphs=0)), built) == ()


def test_case_e2_fewer_cache_entries_than_traced_shape_buckets_are_an_error() -> None:
    assert kind_problems(spec(), {"fxgraph": 2, "aotautograd": 2}) == ()
    assert kind_problems(spec(train=True), {"fxgraph": 4, "aotautograd": 2}) == ()
    assert len(kind_problems(spec(), {"fxgraph": 0, "aotautograd": 2})) == 1


def test_case_c9_a_partly_warm_save_is_noticed_by_its_count() -> None:
    (problem,) = kind_problems(spec(), {"fxgraph": 2, "aotautograd": 1})
    assert problem == "2 traced shape buckets left 1 `aotautograd` entries"
    dynamic = spec(dynamic_dims={"batch": DynamicDim(2, 16)}, shape_buckets=({"batch": 4}, {"batch": 8}))
    assert kind_problems(dynamic, {"fxgraph": 1, "aotautograd": 1}) == ()


def test_case_e1_a_process_that_compiled_nothing_is_named() -> None:
    found = evidence(bucket(1, graphs=0), bucket(8, graphs=0))
    assert evidence_problems(spec(), found) == (("", "no graph was compiled in this process"),)


def test_case_e1_a_shape_bucket_that_says_why_it_ran_eager_is_named_first() -> None:
    found = evidence(bucket(1, graphs=0, problems=("ran eager: `TORCHDYNAMO_DISABLE` is set",)), bucket(8, graphs=0))
    (shape_bucket, problem), (_, last) = evidence_problems(spec(), found)
    assert (shape_bucket, last) == ("batch=1", "no graph was compiled in this process") and "DISABLE" in problem


def test_case_e1_a_shape_bucket_that_compiled_nothing_is_named() -> None:
    ((shape_bucket, problem),) = evidence_problems(spec(), evidence(bucket(1), bucket(8, graphs=0)))
    assert shape_bucket == "batch=8" and "no graph was compiled" in problem
    assert evidence_problems(spec(), evidence(*GOOD)) == ()


def test_a_step_with_wrong_outputs_or_a_bypass_is_unusable() -> None:
    reason = "torch refuses to cache a graph: because"
    found = evidence(bucket(1, is_close=False), bucket(8, problems=(reason,)))
    assert [shape_bucket for shape_bucket, _ in evidence_problems(spec(), found)] == ["batch=8", "batch=1"]


def test_outputs_that_were_not_compared_do_not_pass() -> None:
    assert "not compared" in " ".join(
        judge(GateLimits(), spec(), evidence(bucket(8), bucket(1, is_close=None)), REFERENCES)
    )


@pytest.mark.parametrize("gate", ["min_hit_rate", "min_speedup"])
def test_a_limit_that_is_no_number_refuses(gate: str) -> None:
    limits = replace(GateLimits(), **{gate: float("nan")})
    assert any(gate in violation for violation in judge(limits, spec(), evidence(*GOOD), REFERENCES))


DYNAMO_TEXT = """Graph break in user code at /srv/app/model.py:8
Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):

Failed to trace builtin operator
  Explanation: Dynamo does not know how to trace builtin operator `print`

      with these arguments
  Hint: Avoid calling builtin `print`.
  Hint: Please report an issue.

  Developer debug context: builtin print

User code traceback:
  File "/srv/app/model.py", line 8, in forward
Traceback (most recent call last):
torch._dynamo.exc.Unsupported: Failed to trace builtin operator
  Explanation: Dynamo does not know how to trace builtin operator `print`
"""


def test_a_graph_break_is_one_line_with_place_reason_and_first_hint() -> None:
    words = "Failed to trace builtin operator: Dynamo does not know how to trace builtin operator `print`"
    assert break_in_words(DYNAMO_TEXT) == f"/srv/app/model.py:8: {words} (Avoid calling builtin `print`.)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Graph break in user code at /m.py:1\nGraph Break Reason: X\n  Explanation: Y", "/m.py:1: X: Y"),
        ("\n a text that another torch writes \nmore", "a text that another torch writes"),
        ("", "no reason given"),
    ],
)
def test_a_graph_break_in_unknown_words_is_its_first_line(text: str, words: str) -> None:
    assert break_in_words(text) == words


def test_cuda_graphs_and_kernels_asked_of_compile_workers_are_counted_and_not_gated() -> None:
    work = Work(graph_captures=4, worker_kernels=2)
    assert judge(GateLimits(), spec(), evidence(*GOOD, work=work), REFERENCES) == ()


ROWS = [
    {"shape_bucket": {"batch": 1}, "ratio": 1.04, "restored_ms": 1.04, "tuned_ms": 1.0},
    {"shape_bucket": {"batch": 8}, "ratio": 1.06, "restored_ms": 5.3, "tuned_ms": 5.0},
]


def test_a_shape_bucket_that_is_slower_than_tuned_refuses_with_both_latencies() -> None:
    found = latency_problems(GateLimits(), spec(device="cuda"), ROWS)
    text = "max_latency_ratio: limit 1.05, found 1.060 (restored 5.3 ms, tuned 5 ms)"
    assert found == (f"mlp/float32/default · batch=8: {text}",)


def test_latency_is_judged_on_a_gpu_alone_and_a_ratio_that_is_no_number_refuses() -> None:
    assert latency_problems(GateLimits(), spec(), ROWS) == ()
    assert latency_problems(GateLimits(), spec(device="cuda"), []) == ()
    assert len(latency_problems(GateLimits(), spec(device="cuda"), [{**ROWS[0], "ratio": float("nan")}])) == 1


def native(*outcomes: tuple[str, str], graphs: int = 0) -> EntryEvidence:
    buckets = (bucket(8, graphs=graphs), bucket(1, graphs=0))
    lookups = tuple(Lookup(f"batch={batch}", "", "engine", outcome, "", "other") for batch, outcome in outcomes)
    return replace(evidence(*buckets), lookups=lookups)


AOT = spec(engine="aot")


def test_a_native_start_passes_without_a_graph() -> None:
    assert judge(GateLimits(), AOT, native(("8", "hit"), ("1", "hit")), REFERENCES) == ()


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (native(("8", "hit"), ("1", "miss")), "batch=1: engine `aot`: no native function answered: other"),
        (native(("8", "hit")), "batch=1: engine `aot`: no native function answered: no reason given"),
        (native(("8", "hit"), ("1", "hit"), graphs=1), "batch=8: engine `aot`: 1 graphs were traced: no reason given"),
        (native(("8", "hit"), ("8", "miss")), "batch=8: engine `aot`: later calls are not as built: other"),
        (native(), "batch=8: engine `aot`: no native function answered"),
    ],
)
def test_a_native_start_that_fell_back_is_refused(found: EntryEvidence, text: str) -> None:
    violations = judge(GateLimits(), AOT, found, REFERENCES)
    assert any(f"mlp/float32/default · {text}" in violation for violation in violations), violations


def test_a_traced_entry_that_was_answered_natively_is_refused() -> None:
    assert judge(GateLimits(), spec(), native(("8", "hit"), ("1", "hit")), REFERENCES) != ()


def test_a_native_entry_needs_a_function_per_shape_bucket_and_its_description() -> None:
    kinds = {"fxgraph": 2, "aotautograd": 2, "engine": 3}
    assert kind_problems(AOT, kinds) == ()
    assert kind_problems(AOT, {**kinds, "engine": 2}) == ("2 shape buckets left 2 `engine` files",)
    assert kind_problems(spec(), {**kinds, "engine": 0}) == ()
