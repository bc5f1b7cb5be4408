from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cachepipe.domain.components import source_paths, tensor_facts
from cachepipe.domain.evidence import EntryEvidence, Lookup, Work
from cachepipe.domain.explain import explain, explain_misses, setting_differences
from cachepipe.domain.explain_rules import MAX_UNKNOWN

BUILT: Any = {
    "components": {
        "fxgraph/fbuilt": {"torch_version": ["1", "2.13"], "inductor_config[max_fusion_size]": ["2", "64"]},
        "config/inductor": {"debug": ["x", "False"]},
        "config/functorch": {"strict_autograd_cache": ["x", "False"]},
    },
    "settings": {"grad mode": "inference_mode"},
    "lookups": [
        {"layer": "aotautograd", "shape_bucket": "batch=1", "key": "abuilt"},
        {"layer": "fxgraph", "shape_bucket": "batch=1", "key": "fbuilt"},
    ],
}


def evidence(
    outcome: str, key: str, components: Any = None, layer: str = "fxgraph", reason: str = "full_miss", **settings: str
) -> EntryEvidence:
    lookups = (Lookup("batch=1", "0/0", layer, outcome, key, reason),)
    settings = settings or {"grad mode": "inference_mode"}
    return EntryEvidence(
        "mlp", "verify", "2.13.0", (), lookups, Work(), (), 0.0, 0.0, 0.0, settings, components=components or {}
    )


def test_a_hit_needs_no_explanation() -> None:
    assert explain_misses("mlp", evidence("hit", "other"), BUILT) == ()


def test_a_miss_is_told_as_place_cause_and_fix() -> None:
    here = {"fxgraph/other": {"torch_version": ["1", "2.13"], "inductor_config[max_fusion_size]": ["3", "32"]}}
    assert explain_misses("mlp", evidence("miss", "other", here), BUILT) == (
        "mlp · batch=1: fxgraph miss of graph 0/0",
        "  inductor config max_fusion_size: built 64, called 32",
        "  fix: set `torch._inductor.config.max_fusion_size` alike on both sides, or list it in the manifest's `options`",
    )


def test_a_missing_file_is_told_from_another_key() -> None:
    (one,) = explain(evidence("miss", "fbuilt"), BUILT)
    assert "the key is the builder's own" in one.cause and "verify --files" in one.fix


def test_a_guard_that_refused_the_entry_is_quoted() -> None:
    (one,) = explain(evidence("miss", "fbuilt", reason="guard_miss: 2 <= L['t0']"), BUILT)
    assert "2 <= L['t0']" in one.cause


def test_settings_that_differ_are_named_beside_a_miss() -> None:
    found = evidence("miss", "other", {"fxgraph/other": {"x": ["1", "a"]}}, **{"grad mode": "no_grad"})
    assert "grad mode: built inference_mode, called no_grad" in [one.cause for one in explain(found, BUILT)]


def test_an_unset_variable_and_an_unknown_setting_are_not_the_same() -> None:
    rows = setting_differences(
        {"threads": "2", "grad mode": "grad"}, {"threads": "1", "variable CXX": "g++", "new": "1"}
    )
    assert rows == [("threads", "2", "1"), ("variable CXX", "unset", "g++")]


def test_a_lookup_that_the_builder_never_made_is_said_to_be_new() -> None:
    (one,) = explain(evidence("miss", "k", layer="other"), BUILT)
    assert one.cause == "the builder looked up nothing here"


def test_case_h2_a_lost_tuning_record_is_a_miss_of_its_own_layer() -> None:
    (one,) = explain(evidence("miss", "bmm 8x8", layer="tuning"), BUILT)
    assert one.layer == "tuning" and "tuning record" in one.fix and "bmm 8x8" in one.cause


def test_what_a_missed_graph_tunes_and_builds_needs_no_reason_of_its_own() -> None:
    lookups = tuple(
        Lookup("batch=1", "0/0", layer, outcome, key, "")
        for layer, outcome, key in (("aotautograd", "miss", "a"), ("tuning", "miss", "bmm"), ("native", "miss", "k"))
    )
    missed = replace(evidence("hit", ""), lookups=lookups)
    assert {one.layer for one in explain(missed, BUILT)} == {"aotautograd"}
    found = replace(missed, lookups=(*lookups, Lookup("batch=1", "0/0", "fxgraph", "hit", "fbuilt")))
    assert {one.layer for one in explain(found, BUILT)} == {"aotautograd", "tuning", "native"}


def test_a_kernel_that_triton_compiled_is_a_miss_of_its_own_layer_unless_its_graph_was_compiled_too() -> None:
    kernel = Lookup(
        "batch=1", "", "triton", "miss", "triton_mm_4"
    )  # at the first call, when no graph is compiled any more
    hit = Lookup("batch=1", "0/0", "fxgraph", "hit", "fbuilt")
    (one,) = explain(replace(evidence("hit", ""), lookups=(hit, kernel)), BUILT)
    assert (one.layer, one.cause) == ("triton", "triton lookup of triton_mm_4") and "not in the artifact" in one.fix
    missed = replace(evidence("hit", ""), lookups=(replace(hit, outcome="miss", key="fother"), kernel))
    assert {one.layer for one in explain(missed, BUILT)} == {"fxgraph"}


def test_a_refusal_carries_torchs_reason_and_the_known_way_out() -> None:
    reason = "Cannot cache a graph with freezing enabled"
    (one,) = explain(evidence("bypass", "", reason=reason), BUILT)
    assert reason in one.cause and "freezing` off" in one.fix


def test_the_nearest_of_several_built_keys_is_compared() -> None:
    built = {
        "lookups": [{"layer": "fxgraph", "shape_bucket": label, "key": label} for label in ("far", "near")],
        "components": {
            "fxgraph/far": {"a": ["1", ""], "b": ["1", ""], "cache_key_tag": ["1", "x"]},
            "fxgraph/near": {"a": ["2", ""], "b": ["2", ""], "cache_key_tag": ["1", "x"]},
        },
    }
    here = {"fxgraph/k": {"a": ["2", ""], "b": ["2", ""], "cache_key_tag": ["2", "y"]}}
    assert [one.cause for one in explain(evidence("miss", "k", here), built)] == ["cache key tag: built x, called y"]


def test_the_list_of_components_is_bounded() -> None:
    here = {"fxgraph/other": {f"c{number:03}": ["9", "new"] for number in range(100)}}
    causes = explain(evidence("miss", "other", here), BUILT)
    assert len(causes) <= MAX_UNKNOWN + 4 and "more components" in causes[-1].cause


def test_data_of_another_shape_never_raises() -> None:
    assert explain_misses("mlp", evidence("miss", "k"), {})


def test_a_layer_whose_components_nobody_recorded_says_so() -> None:
    (one,) = explain(evidence("miss", "k", layer="aotautograd"), BUILT)
    assert "not recorded" in one.cause


def test_an_input_is_read_as_a_person_writes_it() -> None:
    text = (
        "TensorMetadata(dtype=torch.float32, shape=torch.Size([4, 8]), stride=(8, 1), "
        "device=device(type='cuda', index=1), layout=torch.strided, storage_offset=0, requires_grad=False)"
    )
    facts = tensor_facts(text)
    assert (facts["dtype"], facts["shape"], facts["stride"]) == ("float32", "(4, 8)", "(8, 1)")
    assert (facts["device"], facts["requires_grad"]) == ("cuda:1", "False")
    assert tensor_facts("('s77',)") == {}


def test_the_paths_of_arguments_are_read_back() -> None:
    assert source_paths("(0, [self.a.weight, x], [0])") == ["self.a.weight", "x"]
    assert source_paths("nothing") == []


def outer(paths: list[str], chars: int | None = None) -> Any:
    """The components of an outer key whose graph has these arguments, of which torch_trace keeps so many characters."""
    text = f"(0, [{', '.join(paths)}], [0])"
    inputs = {
        f"example_inputs[{number}]": [path, f"TensorMetadata(shape=torch.Size([{len(path)}]))"]
        for number, path in enumerate(paths)
    }
    return {"aot_config": [text, text[:chars]], "gm": [text, "def forward"], **inputs}


def outer_causes(built: list[str], called: list[str], chars: int | None = None) -> list[Any]:
    builder = {
        "lookups": [{"layer": "aotautograd", "shape_bucket": "batch=1", "key": "abuilt"}],
        "components": {"aotautograd/abuilt": outer(built, chars)},
    }
    return list(explain(evidence("miss", "a", {"aotautograd/a": outer(called, chars)}, "aotautograd"), builder))


def test_a_graph_of_a_hook_is_told_as_such_and_not_as_a_shape_to_pad() -> None:
    (one,) = outer_causes(["self.a.weight", "self.a.bias", "x"], ["output"])
    assert one.cause.startswith("a graph that was not built") and "(output)" in one.cause and "hook" in one.fix


@pytest.mark.parametrize("chars", [None, 4_000])
def test_a_renamed_attribute_is_told_of_a_model_whose_arguments_are_too_many_to_keep(chars: int | None) -> None:
    def paths(name: str) -> list[str]:
        return [f"self.bert.{name}.layer.{number}.attention.self.query.weight" for number in range(400)] + ["x"]

    causes = [one.cause for one in outer_causes(paths("encoder"), paths("enc"), chars)]
    assert "attribute renamed: encoder → enc" in causes, causes
    assert not any("arguments of the graph" in cause or "not built" in cause for cause in causes), causes
