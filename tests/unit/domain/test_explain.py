from __future__ import annotations

from typing import Any

from cachepipe.domain.evidence import EntryEvidence, Lookup, Work
from cachepipe.domain.explain import MAX_COMPONENTS, explain_misses

BUILT: Any = {
    "components": {
        "fxgraph/fbuilt": {"torch_version": ["1", "2.13"], "config": ["2", "max_autotune=True"]},
        "config/inductor": {"debug": ["x", "False"]},
    },
    "settings": {"grad mode": "inference_mode"},
    "lookups": [
        {"layer": "aotautograd", "shape_bucket": "batch=1", "key": "abuilt"},
        {"layer": "fxgraph", "shape_bucket": "batch=1", "key": "fbuilt"},
    ],
}


def evidence(outcome: str, key: str, components: Any = None, layer: str = "fxgraph", **settings: str) -> EntryEvidence:
    lookups = (Lookup("batch=1", "0/0", layer, outcome, key, "its reason"),)
    settings = settings or {"grad mode": "inference_mode"}
    return EntryEvidence(
        "mlp", "verify", "2.13.0", (), lookups, Work(), (), 0.0, 0.0, 0.0, settings, components=components or {}
    )


def test_a_hit_needs_no_explanation() -> None:
    assert explain_misses("mlp", evidence("hit", "other"), BUILT) == ()


def test_the_differing_component_is_named_with_both_values() -> None:
    here = {"fxgraph/other": {"torch_version": ["1", "2.13"], "config": ["3", "max_autotune=False"]}}
    (line,) = explain_misses("mlp", evidence("miss", "other", here), BUILT)
    assert line == (
        "mlp · batch=1: fxgraph miss (its reason): config: built `max_autotune=True`, found `max_autotune=False`"
    )


def test_a_missing_file_is_told_from_another_key() -> None:
    (line,) = explain_misses("mlp", evidence("miss", "fbuilt"), BUILT)
    assert "the key is the builder's own" in line


def test_settings_and_compile_options_that_differ_are_named() -> None:
    here = {"config/inductor": {"debug": ["y", "True"]}}
    found = evidence("miss", "other", here, "aotautograd", **{"grad mode": "no_grad"})
    lines = explain_misses("mlp", found, BUILT)
    assert "mlp: setting grad mode: built `inference_mode`, found `no_grad`" in lines
    assert "mlp: config/inductor: debug: built `False`, found `True`" in lines


def test_a_lookup_that_the_builder_never_made_is_said_to_be_new() -> None:
    (line,) = explain_misses("mlp", evidence("miss", "k", layer="triton"), BUILT)
    assert line.endswith("the builder looked up nothing here")


def test_the_list_of_components_is_bounded() -> None:
    here = {"fxgraph/other": {f"c{number}": ["9", "new"] for number in range(100)}}
    (line,) = explain_misses("mlp", evidence("miss", "other", here), BUILT)
    assert line.count("built nothing") + line.count("found nothing") <= MAX_COMPONENTS and line.endswith(" more")


def test_data_of_another_shape_never_raises() -> None:
    assert explain_misses("mlp", evidence("miss", "k"), {})
