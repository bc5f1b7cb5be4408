from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from cachepipe.domain.entry import Context, DynamicDim, EntrySpec, bucket_label, traced_bucket
from cachepipe.domain.manifest import Manifest, with_cache_root
from cachepipe.domain.manifest_reader import read_manifest
from cachepipe.domain.plan import _PARTS, UNKEYED, entry_key, expand
from cachepipe.domain.record import read_record, record_bytes
from cachepipe.errors import UsageError
from tests.support.manifests import FULL, small_manifest


def _manifest(**changes: Any) -> Manifest:
    manifest = read_manifest(small_manifest(**changes))
    assert isinstance(manifest, Manifest), manifest
    return manifest


def _spec(**changes: Any) -> EntrySpec:
    (spec,) = expand(_manifest(**changes), "cpu")
    return spec


def test_entries_are_model_by_dtype_by_mode_in_the_order_of_the_manifest() -> None:
    tree = small_manifest(dtypes=["float32", "bfloat16"], modes=["max-autotune", "default"])
    tree["models"].append({"name": "program", "command": ["python", "warmup.py"]})
    tree["models"].append({**tree["models"][0], "name": "another", "dtypes": ["float16"], "modes": ["default"]})
    manifest = read_manifest(tree)
    assert isinstance(manifest, Manifest)
    assert [spec.id for spec in expand(manifest, "cuda")] == [
        "net/float32/max-autotune",
        "net/float32/default",
        "net/bfloat16/max-autotune",
        "net/bfloat16/default",
        "another/float16/default",
    ]
    assert {spec.device for spec in expand(manifest, "cuda")} == {"cuda"}


def test_every_setting_of_a_model_arrives_in_the_spec() -> None:
    spec = _spec(
        args={"layers": 2, "sizes": [1, 2.5, None]},
        compile={"fullgraph": False, "dynamic": True, "options": {"epilogue_fusion": True}},
        eval=False,
        requires_grad=True,
        method="encode",
        context={"grad": "no_grad", "autocast": "bfloat16", "matmul_precision": "high", "deterministic": True},
        memory_format="channels_last",
        tolerance={"rtol": 0.5, "atol": 0.25},
    )
    assert (spec.factory, spec.args) == ("models:net", {"layers": 2, "sizes": [1, 2.5, None]})
    assert (spec.fullgraph, spec.dynamic, spec.options) == (False, True, {"epilogue_fusion": True})
    assert (spec.eval, spec.requires_grad, spec.method, spec.call) == (False, True, "encode", "kwargs")
    assert spec.context == Context("no_grad", "bfloat16", "high", True)
    assert (spec.memory_format, spec.rtol, spec.atol, spec.train, spec.loss) == (
        "channels_last",
        0.5,
        0.25,
        False,
        None,
    )


def test_training_turns_grad_on() -> None:
    spec = _spec(train=True, loss="models:loss")
    assert (spec.train, spec.loss, spec.context.grad, spec.requires_grad) == (True, "models:loss", "grad", True)


def test_a_floating_input_without_dtype_has_the_entry_s() -> None:
    inputs = {"x": {"shape": ["batch"]}, "y": [{"shape": [1], "dtype": "float64"}, 3], "z": {"const": {"shape": [1]}}}
    spec = _spec(dtypes=["float16"], inputs=inputs)
    assert spec.inputs == {
        "x": {"shape": ["batch"], "dtype": "float16"},
        "y": [{"shape": [1], "dtype": "float64"}, {"const": 3}],
        "z": {"const": {"shape": [1]}},
    }


def test_inputs_by_position_keep_the_order_of_the_manifest() -> None:
    spec = _spec(call="args", inputs={"z": {"shape": ["batch"]}, "a": 1})
    assert spec.inputs == [{"shape": ["batch"], "dtype": "float32"}, {"const": 1}]


def test_a_service_reads_the_very_spec_from_the_statement() -> None:
    spec = _spec(
        inputs={"z": {"shape": ["seq", "batch"]}, "a": {"q": 1, "b": 2}},
        shape_buckets=[{"seq": [4, 8], "batch": 2}],
        dynamic_dims={"seq": {"max": 64}},
    )
    data = record_bytes(spec)
    read = read_record(EntrySpec, data, "spec", len(data))
    assert read == spec
    assert list(read.inputs) == list(spec.inputs)
    assert [bucket_label(bucket) for bucket in spec.shape_buckets] == ["batch=2,seq=4", "batch=2,seq=8"]
    assert [bucket_label(bucket) for bucket in read.shape_buckets] == ["batch=2,seq=4", "batch=2,seq=8"]


def test_size_one_of_a_dynamic_dimension_is_a_shape_bucket_of_its_own() -> None:
    spec = _spec(shape_buckets=[{"batch": [1, 8, 16]}], dynamic_dims={"batch": {"min": 2, "max": 64}})
    assert spec.dynamic_dims == {"batch": DynamicDim(2, 64)}
    traced = [traced_bucket(spec, bucket) for bucket in spec.shape_buckets]
    assert traced == [(("batch", 1),), (("batch", "dynamic"),), (("batch", "dynamic"),)]


def test_every_field_of_a_spec_is_keyed_or_named_as_harmless() -> None:
    keyed = [field for fields in _PARTS.values() for field in fields]
    assert sorted([*keyed, *UNKEYED, "engine"]) == sorted(field.name for field in dataclasses.fields(EntrySpec))


OTHER: dict[str, Any] = {
    "factory": "models:other",
    "args": {"layers": 3},
    "call": "args",
    "method": "encode",
    "fullgraph": False,
    "dynamic": True,
    "options": {"epilogue_fusion": True},
    "mode": "default",
    "dtype": "bfloat16",
    "device": "cuda",
    "eval": False,
    "requires_grad": True,
    "memory_format": "channels_last",
    "context": Context("grad", None, "highest", False),
    "inputs": {"x": {"shape": ["batch", 5], "dtype": "float32"}},
    "shape_buckets": ({"batch": 3},),
    "dynamic_dims": {"batch": DynamicDim(2, 4)},
    "train": True,
    "loss": "models:loss",
}


@pytest.mark.parametrize("field", OTHER)
def test_whatever_can_change_the_result_changes_the_key_and_only_its_part(field: str) -> None:
    spec = _spec()
    key, parts = entry_key(spec, {}, {})
    other_key, other_parts = entry_key(dataclasses.replace(spec, **{field: OTHER[field]}), {}, {})
    assert key != other_key
    (changed,) = [name for name in parts if parts[name] != other_parts[name]]
    assert field in _PARTS[changed]


def test_the_engine_is_a_part_of_the_key_that_the_default_does_not_have() -> None:
    key, parts = entry_key(_spec(), {}, {})
    other_key, other_parts = entry_key(_spec(compile={"engine": "aot"}), {}, {})
    assert key != other_key
    assert set(other_parts) - set(parts) == {"engine"}
    assert parts == {name: digest for name, digest in other_parts.items() if name != "engine"}


def test_a_native_model_has_native_functions_on_both_kinds_of_target() -> None:
    manifest = _manifest(compile={"engine": "aot"})
    assert [spec.engine for device in ("cpu", "cuda") for spec in expand(manifest, device)] == ["aot", "aot"]


@pytest.mark.parametrize("change", [{"model": "renamed"}, {"rtol": 0.5}, {"atol": 0.5}])
def test_name_and_tolerance_do_not_change_the_key(change: dict[str, Any]) -> None:
    spec = _spec()
    assert entry_key(spec, {"a.py": "1"}, {}) == entry_key(dataclasses.replace(spec, **change), {"a.py": "1"}, {})


def test_sources_and_versions_are_parts_of_the_key() -> None:
    spec = _spec()
    key, parts = entry_key(spec, {"a.py": "1"}, {"torch": "2.13.0"})
    assert {"source:a.py", "dist:torch"} < set(parts)
    assert key != entry_key(spec, {"a.py": "2"}, {"torch": "2.13.0"})[0]
    assert key != entry_key(spec, {"b.py": "1"}, {"torch": "2.13.0"})[0]
    assert key != entry_key(spec, {"a.py": "1"}, {"torch": "2.11.0"})[0]
    assert key != entry_key(spec, {"a.py": "1"}, {})[0]
    assert key == entry_key(spec, {"a.py": "1"}, {"torch": "2.13.0"})[0]


def test_the_order_of_shape_buckets_is_part_of_the_key() -> None:
    one, other = (_spec(shape_buckets=rows) for rows in ([{"batch": [2, 3]}], [{"batch": [3, 2]}]))
    assert entry_key(one, {}, {})[0] != entry_key(other, {}, {})[0]


def test_a_product_and_its_list_are_the_same_entry() -> None:
    one, other = (_spec(shape_buckets=rows) for rows in ([{"batch": [2, 3]}], [{"batch": 2}, {"batch": 3}]))
    assert entry_key(one, {}, {}) == entry_key(other, {}, {})


def test_a_manifest_survives_being_dumped_and_read() -> None:
    manifest = read_manifest(yaml.safe_load(FULL))
    assert isinstance(manifest, Manifest)
    assert read_manifest(manifest.model_dump()) == manifest


def test_another_cache_root_is_checked_like_the_manifest_s() -> None:
    manifest = _manifest()
    assert with_cache_root(manifest, "/opt/cache").root == "/opt/cache/demo"
    assert manifest.root == "/var/cache/cachepipe/demo"
    with pytest.raises(UsageError, match="cache root: not an absolute path"):
        with_cache_root(manifest, "cache")
    with pytest.raises(UsageError, match="cache root: torch's compiler command"):
        with_cache_root(manifest, "/my cache")
