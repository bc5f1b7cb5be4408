"""Field cases that a single worker process answers, on real torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachepipe.domain.entry import Context, DynamicDim
from cachepipe.domain.evidence import EntryEvidence, hit_rate
from cachepipe.domain.remedies import remedy
from cachepipe.workflows.jobs import failure
from cachepipe.workflows.plan import DYNAMIC_THREADS
from tests.support.jobs import run_job, spec_of

GRAD = Context("grad", None, "highest", False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EntryEvidence]:
    """A folder in which `small` was built, and the evidence of that; tests add nothing to its cache."""
    folder = tmp_path_factory.mktemp("small")
    return folder, run_job(spec_of("small"), folder, record_components=False)


def test_case_f1_more_buckets_than_the_recompile_limit_are_all_compiled(tmp_path: Path) -> None:
    spec = spec_of("mm_product", tuple({"batch": size} for size in range(2, 14)))
    evidence = run_job(spec, tmp_path)
    assert evidence.error == ""
    assert [bucket.graphs for bucket in evidence.shape_buckets] == [1] * 12
    assert not any(bucket.problems for bucket in evidence.shape_buckets)


def test_case_f1_the_limit_is_an_error_that_names_the_guard_and_what_to_do(tmp_path: Path) -> None:
    evidence = run_job(spec_of("mm_counts_in_python"), tmp_path, calls_per_bucket=12)
    assert len(evidence.graphs) >= 8 and evidence.shape_buckets == ()
    words = failure(evidence, 1, tmp_path / "log")
    assert words.startswith("torch's recompile limit is hit: ") and "self.calls" in words, words
    assert "changes from call to call" in (remedy([words]) or "")


def test_case_f1_a_model_that_is_traced_anew_at_every_call_is_refused_below_the_limit_too(tmp_path: Path) -> None:
    (bucket,) = run_job(spec_of("mm_counts_in_python"), tmp_path, calls_per_bucket=3).shape_buckets
    assert bucket.graphs == 3 and ["traced anew" in problem for problem in bucket.problems] == [True]


def test_case_f8_a_restored_start_in_another_order_hits_every_bucket(tmp_path: Path) -> None:
    spec = spec_of("mm_product", ({"batch": 4}, {"batch": 8}, {"batch": 16}))
    assert run_job(spec, tmp_path).error == ""
    evidence = run_job(spec, tmp_path, "prove", order=(1, 2, 0))
    assert hit_rate(evidence) == 1.0
    assert [bucket.shape_bucket["batch"] for bucket in evidence.shape_buckets] == [8, 16, 4]


def test_a_dynamic_dimension_is_one_graph_for_all_sizes_but_one(tmp_path: Path) -> None:
    sizes = ({"batch": 1}, {"batch": 4}, {"batch": 9})
    spec = spec_of("mm_product", sizes, dynamic_dims={"batch": DynamicDim(2, 64)})
    cold = run_job(spec, tmp_path)
    assert [bucket.graphs for bucket in cold.shape_buckets] == [1, 1, 0]
    assert not any(bucket.problems for bucket in cold.shape_buckets)
    restored = run_job(spec, tmp_path, "prove", order=(2, 1, 0))
    assert hit_rate(restored) == 1.0 and restored.error == ""


def test_beside_a_dynamic_dimension_the_others_stay_static_in_any_order(tmp_path: Path) -> None:
    sizes = ({"batch": 2, "seq": 16}, {"batch": 8, "seq": 64})
    inputs = [{"shape": ["batch", "seq", 8], "dtype": "float32"}]
    spec = spec_of("mm_batches", sizes, dynamic_dims={"batch": DynamicDim(2, 64)}, inputs=inputs)
    assert run_job(spec, tmp_path).error == ""
    restored = run_job(spec, tmp_path, "prove", order=(1, 0))
    assert hit_rate(restored) == 1.0 and restored.error == ""


@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        ("never_compiles_stance", "set_stance"),
        ("never_compiles_disabled", "config.disable"),
        ("never_caches", "force_disable_caches"),
    ],
)
def test_case_g8_e1_a_bucket_that_leaves_nothing_says_which_switch_did_it(
    tmp_path: Path, factory: str, cause: str
) -> None:
    evidence = run_job(spec_of(factory), tmp_path)
    problems = " ".join(problem for bucket in evidence.shape_buckets for problem in bucket.problems)
    assert cause in problems, evidence
    assert "undo the switch" in (remedy([problems]) or "")


def test_case_g8_hidden_compile_errors_are_refused_before_the_first_call(tmp_path: Path) -> None:
    evidence = run_job(spec_of("hides_errors"), tmp_path)
    assert "suppress_errors" in evidence.error and evidence.shape_buckets == ()


def test_case_g8_a_graph_break_is_counted_with_its_place(tmp_path: Path) -> None:
    evidence = run_job(spec_of("mm_graph_break"), tmp_path)
    assert evidence.shape_buckets[0].graph_breaks == 1
    assert evidence.shape_buckets[0].graphs == 2
    assert "case_models.py" in evidence.graph_breaks[0]


def test_case_g1_a_refused_autograd_function_carries_torchs_reason(tmp_path: Path) -> None:
    spec = spec_of("mm_autograd_function", context=GRAD, requires_grad=True, train=True)
    evidence = run_job(spec, tmp_path)
    problems = evidence.shape_buckets[0].problems
    assert any("refuses to cache" in problem and len(problem) > 60 for problem in problems)
    assert "autograd_cache_allow_custom_autograd_functions = True" in (remedy(problems) or "")


def test_case_g1_the_switch_that_is_named_makes_it_cacheable(tmp_path: Path) -> None:
    spec = spec_of("mm_autograd_function_allowed", context=GRAD, requires_grad=True, train=True)
    assert run_job(spec, tmp_path).shape_buckets[0].problems == ()
    restored = run_job(spec, tmp_path, "prove")
    assert hit_rate(restored) == 1.0 and restored.shape_buckets[0].is_close is True


def test_case_g5_a_higher_order_op_is_refused_with_torchs_reason(tmp_path: Path) -> None:
    evidence = run_job(spec_of("mm_conditional"), tmp_path)
    problems = evidence.shape_buckets[0].problems
    assert any("cond" in problem for problem in problems) and not any("\n" in problem for problem in problems), problems
    assert "torch.where" in (remedy(problems) or "")


def test_case_g3_freezing_is_a_named_refusal(tmp_path: Path) -> None:
    evidence = run_job(spec_of("mm_product", options={"freezing": True}), tmp_path)
    problems = " ".join(evidence.shape_buckets[0].problems)
    assert "refuses to cache" in problems and "never cached" in (remedy([problems]) or "")


def test_an_exception_of_the_factory_becomes_evidence(tmp_path: Path) -> None:
    evidence = run_job(spec_of("raises"), tmp_path)
    assert evidence.error_kind == "RuntimeError" and "weights are missing" in evidence.error
    assert "case_models.py" in evidence.traceback


def test_a_factory_that_ends_the_process_with_words_that_no_utf8_can_say_becomes_evidence(tmp_path: Path) -> None:
    evidence = run_job(spec_of("ends_the_process"), tmp_path)
    assert evidence.error == "SystemExit: no weights in /data/\\udcff"
    assert "in ends_the_process" in evidence.traceback


def test_case_a14_what_was_built_in_ci_is_found_outside_and_the_other_way_round(tmp_path: Path) -> None:
    spec = spec_of("mm_product", ({"batch": 4}, {"batch": 8}))
    assert run_job(spec, tmp_path, variables={"CI": "true"}).error == ""
    outside = run_job(spec, tmp_path, "verify")
    inside = run_job(spec, tmp_path, "prove", variables={"CI": "true"})
    assert hit_rate(outside) == hit_rate(inside) == 1.0


def test_case_a6_kernels_that_ask_for_the_thread_count_are_found_with_another_one(tmp_path: Path) -> None:
    spec = spec_of("small", options={DYNAMIC_THREADS: True})
    assert run_job(spec, tmp_path, variables={"OMP_NUM_THREADS": "2"}).error == ""
    variables = {"OMP_NUM_THREADS": "1", "MKL_DYNAMIC": "FALSE"}
    restored = run_job(spec, tmp_path, "prove", variables=variables)
    assert restored.settings["threads"] == "1" and hit_rate(restored) == 1.0
    assert restored.work.native_builds == 0 and restored.shape_buckets[0].is_close is True


def test_case_m2_e6_recording_components_keeps_the_hits_and_phases_add_up(
    small: tuple[Path, EntryEvidence],
) -> None:
    spec = spec_of("small")
    folder, cold = small
    assert cold.work.native_builds >= 1 and cold.error == ""
    builds = [item for item in cold.work_items if item.kind == "native_builds"]
    assert sum(item.count for item in builds) == cold.work.native_builds and all(item.what for item in builds)
    assert cold.graphs[0].graph in {item.graph for item in builds} and cold.file_sizes["native"].files >= 1
    plain = run_job(spec, folder, "verify", record_components=False)
    explained = run_job(spec, folder, "prove", record_components=True)
    for evidence in (plain, explained):
        assert hit_rate(evidence) == 1.0
        assert evidence.work.native_builds == 0 and evidence.work.benchmarks == 0
        first = evidence.shape_buckets[0]
        phases = first.phases
        parts = (phases.trace_s, phases.lookup_s, phases.load_s, phases.compile_s, phases.run_s)
        assert sum(parts) == pytest.approx(first.first_call_s, rel=0.01)
        assert phases.compile_s == 0.0 and phases.trace_s > 0.0
    assert [(one.layer, one.key) for one in plain.lookups] == [(one.layer, one.key) for one in explained.lookups]
    assert len(explained.components) >= 5 and plain.components == {}
    assert explained.shape_buckets[0].is_close is True


@pytest.mark.parametrize(("step", "rarely"), [("tune", False), ("settle", False), ("verify", True), ("prove", True)])
def test_a_proof_collects_garbage_as_rarely_as_a_service_and_a_build_as_torch_does(
    tmp_path: Path, step: str, rarely: bool
) -> None:
    assert run_job(spec_of("mm_collected", args={"rarely": rarely}), tmp_path, step).error == ""


def test_a_training_entry_runs_backward_and_compares_gradients(tmp_path: Path) -> None:
    spec = spec_of("small", context=GRAD, requires_grad=True, train=True, eval=False)
    assert run_job(spec, tmp_path).error == ""
    evidence = run_job(spec, tmp_path, "prove")
    assert hit_rate(evidence) == 1.0
    assert evidence.shape_buckets[0].is_close is True
    assert evidence.work.native_builds == 0


def test_case_b4_other_numbers_than_eager_are_seen(small: tuple[Path, EntryEvidence]) -> None:
    spec = spec_of("small", rtol=0.0, atol=0.0)
    evidence = run_job(spec, small[0], "prove")
    assert evidence.shape_buckets[0].is_close is False and (evidence.shape_buckets[0].max_abs_diff or 0) > 0


@pytest.mark.parametrize("factory", ["mm_counts_calls", "mm_writes_into_its_input"])
def test_a_model_that_changes_buffers_or_inputs_is_compared_with_eager_from_the_same_state(
    tmp_path: Path, factory: str
) -> None:
    evidence = run_job(spec_of(factory), tmp_path, "prove", calls_per_bucket=3)
    assert evidence.error == "" and [bucket.is_close for bucket in evidence.shape_buckets] == [True], evidence


def test_a_model_whose_outputs_nobody_can_look_into_does_not_pass_as_equal(tmp_path: Path) -> None:
    (bucket,) = run_job(spec_of("mm_opaque"), tmp_path, "prove").shape_buckets
    assert bucket.is_close is False and "nothing can be compared" in " ".join(bucket.problems)


def test_a_factory_that_forks_does_not_make_a_second_worker(tmp_path: Path) -> None:
    evidence = run_job(spec_of("mm_forks"), tmp_path, "eager")
    assert evidence.error == "" and (tmp_path / "forks").read_text() == "child\nparent\n"


def test_case_h10_files_of_caches_that_no_artifact_covers_are_named_with_their_owner(tmp_path: Path) -> None:
    evidence = run_job(spec_of("mm_writes_elsewhere"), tmp_path)
    assert evidence.error == ""
    found = {Path(file.path).relative_to(tmp_path).as_posix(): file for file in evidence.outside_files}
    ours = {name for name in found if name.startswith("root/")}
    assert ours == set() and "gone" not in found
    assert "Triton" in found[".triton/cache/kernel.json"].owner and found[".triton/cache/kernel.json"].size_bytes == 2
    assert "CUDA driver" in found[".nv/ComputeCache/1/k"].owner


def test_case_m1_every_compile_has_its_place_phases_and_the_guard_that_failed(tmp_path: Path) -> None:
    spec = spec_of("mm_product", ({"batch": 4}, {"batch": 8}))  # nothing to build by a C++ compiler
    cold = run_job(spec, tmp_path)
    assert [graph.shape_bucket for graph in cold.graphs] == ["batch=4", "batch=8"]
    first, second = cold.graphs
    assert "forward" in first.place and "case_models.py" in first.place and first.operators > 0
    assert first.sizes == {"x": [4, 8]} and second.sizes == {"x": [8, 8]}
    assert first.recompile_reason == "" and "size mismatch at index 0. expected 4, actual 8" in second.recompile_reason
    assert first.phases.trace_s > 0 and first.phases.compile_s > 0 and first.phases.lookup_s == 0
    assert cold.file_sizes["fxgraph"].size_bytes > 0 and "native" not in cold.file_sizes
    restored = run_job(spec, tmp_path, "prove")
    assert all(graph.phases.compile_s == 0 and graph.phases.load_s > 0 for graph in restored.graphs)
    assert restored.dropped == 0 and restored.uncounted == ()
