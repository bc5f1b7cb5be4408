from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cachepipe.adapters.manifest_file import load_manifest
from cachepipe.domain.manifest import CommandModel, FactoryModel, Gates, Manifest
from cachepipe.domain.manifest_reader import read_manifest
from cachepipe.domain.manifest_rules import Problem
from cachepipe.errors import ManifestError
from tests.support.manifests import FULL, small_manifest, with_line, write_manifest


def _problems(folder: Path, text: str) -> tuple[str, ...]:
    path = write_manifest(folder, text)
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    assert caught.value.exit_code == 10
    return tuple(problem.removeprefix(f"{path}:") for problem in caught.value.problems)


def test_every_field_of_the_design_is_read(tmp_path: Path) -> None:
    manifest = load_manifest(write_manifest(tmp_path, FULL))
    bert, service = manifest.models
    assert (manifest.version, manifest.name, manifest.channel) == (1, "text-encoder", "candidate")
    assert (manifest.store, manifest.python_path) == ("s3://ml-cache/prod", (".",))
    assert manifest.root == "/var/cache/cachepipe/text-encoder"
    assert [(target.device, target.gpu) for target in manifest.targets] == [("cuda", "NVIDIA H200"), ("cpu", None)]
    assert isinstance(bert, FactoryModel)
    assert (bert.factory, bert.args, bert.sources) == ("service.models:bert", {"layers": 12}, ("service/**/*.py",))
    assert (bert.dtypes, bert.modes) == (("bfloat16",), ("max-autotune",))
    assert (bert.compile.fullgraph, bert.compile.dynamic, bert.compile.options) == (True, False, {})
    assert (bert.eval, bert.requires_grad, bert.method, bert.call) == (True, False, "forward", "kwargs")
    assert bert.context.model_dump() == {
        "grad": "inference_mode",
        "autocast": None,
        "matmul_precision": "highest",
        "deterministic": False,
    }
    assert (bert.memory_format, bert.train, bert.loss, bert.dynamic_dims) == ("contiguous", False, None, {})
    assert bert.inputs["input_ids"] == {"shape": ["batch", "seq"], "dtype": "int64", "low": 0, "high": 30000}
    assert bert.inputs["attention_mask"] == {"shape": ["batch", "seq"], "dtype": "int64", "fill": 1}
    assert [tuple(bucket.values()) for bucket in bert.shape_buckets] == [
        (1, 128),
        (1, 512),
        (8, 128),
        (8, 512),
        (32, 128),
    ]
    assert (bert.tolerance.rtol, bert.tolerance.atol) == (0.02, 0.02)
    assert isinstance(service, CommandModel)
    assert (service.command, service.timeout, service.sources) == (("python", "warmup.py"), 1800.0, ("warmup.py",))
    assert manifest.gates == Gates()
    assert manifest.trust is not None
    assert manifest.trust.statement_key == "kms:alias/cachepipe-build"


def test_a_short_manifest_has_the_defaults_of_the_design(tmp_path: Path) -> None:
    manifest = load_manifest(write_manifest(tmp_path, small_manifest()))
    (model,) = manifest.models
    assert isinstance(model, FactoryModel)
    assert (manifest.cache_root, manifest.channel, manifest.store) == ("/var/cache/cachepipe", "candidate", None)
    assert (model.modes, model.compile.fullgraph, model.compile.dynamic) == (("max-autotune",), True, False)
    assert (model.context.grad, model.eval, model.call) == ("inference_mode", True, "kwargs")


WRONG = [
    ("version: 1", "version: 2", 1, "version", "unknown version `2`"),
    ("version: 1", "version: one", 1, "version", "unknown version `one`"),
    ("version: 1", "version: '1'", 1, "version", "unknown version `1` as text"),
    ("store: s3://ml-cache/prod", 'store: "file:///a\\0"', 4, "store", "control character"),
    ("cache_root: /var/cache/cachepipe", 'cache_root: "/a\\0b"', 3, "cache_root", "control character"),
    ("cache_root: /var/cache/cachepipe", 'cache_root: "/a\\nb"', 3, "cache_root", "control character"),
    ("cache_root: /var/cache/cachepipe", "cache_root: /var/my cache", 3, "cache_root", "torch's compiler command"),
    ("low: 0, high: 30000", "low: 0, high: 9007199254740993", 25, "models[0].inputs.input_ids.high", "not a value of"),
    ("dtype: int64, fill: 1", "dtype: uint8, fill: -1", 26, "models[0].inputs.attention_mask.fill", "a uint8 tensor"),
    ("dtype: int64, fill: 1", "dtype: int8, high: 129", 26, "models[0].inputs.attention_mask.high", "a int8 tensor"),
    ("dtype: int64, fill: 1", "dtype: int16, fill: 32768", 26, "models[0].inputs.attention_mask.fill", "a int16"),
    ("{batch: 32, seq: 128}", "{batch: [], seq: 1}", 29, "models[0].shape_buckets[1].batch", "without a size"),
    ("name: text-encoder", "name: Text Encoder", 2, "name", "a-z 0-9"),
    ("name: text-encoder", "nmae: text-encoder", 2, "nmae", "unknown field; did you mean `name`?"),
    ("name: text-encoder", "# no name", 1, "name", "required"),
    ("cache_root: /var/cache/cachepipe", "cache_root: cache", 3, "cache_root", "not an absolute path"),
    ("cache_root: /var/cache/cachepipe", "cache_root: /var/../etc", 3, "cache_root", "`..`"),
    ("store: s3://ml-cache/prod", "store: ftp://x", 4, "store", "`file:///…`"),
    ("channel: candidate", "channel: ../x", 5, "channel", "a-z 0-9"),
    ("python_path: [.]", "python_path: .", 6, "python_path", "not a list"),
    ("{device: cuda, gpu: NVIDIA H200}", "{device: cudda}", 8, "targets[0].device", "did you mean `cuda`?"),
    ("{device: cpu}", "{device: cpu, gpu: X}", 9, "targets[1].gpu", "only a target with `device: cuda`"),
    ("{device: cpu}", "{device: cuda, gpu: NVIDIA H200}", 9, "targets[1]", "given twice"),
    ("{device: cpu}", "{gpus: X}", 9, "targets[1].device", "required"),
    ("service.models:bert", "service.models.bert", 12, "models[0].factory", "not `module:attribute`"),
    ("{layers: 12}", "{layers: .nan}", 13, "models[0].args.layers", "not a finite number"),
    ("{layers: 12}", "{layers: 9007199254740993}", 13, "models[0].args.layers", "beyond 2**53"),
    ("{layers: 12}", "[12]", 13, "models[0].args", "not a mapping"),
    ("[service/**/*.py]", "[/etc/passwd]", 14, "models[0].sources[0]", "relative to the manifest's folder"),
    ("[bfloat16]", "[bf16]", 15, "models[0].dtypes[0]", "unknown dtype `bf16`; did you mean `bfloat16`?"),
    ("[bfloat16]", "[float32, float32]", 15, "models[0].dtypes[1]", "given twice"),
    ("[bfloat16]", "[]", 15, "models[0].dtypes", "at least one"),
    ("[max-autotune]", "[max_autotune]", 16, "models[0].modes[0]", "did you mean `max-autotune`?"),
    ("dynamic: false", "dynamic: null", 17, "models[0].compile.dynamic", "order of calls"),
    ("dynamic: false", "dynamic: 'no'", 17, "models[0].compile.dynamic", "not `true` or `false`"),
    ("fullgraph: true", "full_graph: true", 17, "models[0].compile.full_graph", "did you mean `fullgraph`?"),
    ("options: {}", "options: {freezing: true}", 17, "models[0].compile.options.freezing", "constants"),
    ("options: {}", "options: {triton: {cudagraphs: true}}", 17, "models[0].compile.options.triton", "with a dot"),
    ("options: {}", "options: {fx_graph_cache: false}", 17, "models[0].compile.options.fx_graph_cache", "switches off"),
    ("eval: true", "eval: yes", 18, "models[0].eval", "not `true` or `false`"),
    ("method: forward", "method: a b", 20, "models[0].method", "not an identifier"),
    ("call: kwargs", "call: kwarg", 21, "models[0].call", "did you mean `kwargs`?"),
    ("grad: inference_mode", "grad: inference", 22, "models[0].context.grad", "did you mean `inference_mode`?"),
    ("autocast: null", "autocast: float32", 22, "models[0].context.autocast", "unknown autocast dtype"),
    ("memory_format: contiguous", "memory_format: nhwc", 23, "models[0].memory_format", "known: contiguous"),
    ("low: 0, high: 30000", "low: 0", 25, "models[0].inputs.input_ids", "needs `fill`, or `high`"),
    ("low: 0, high: 30000", "low: 9, high: 9", 25, "models[0].inputs.input_ids.high", "not above `low`"),
    ("low: 0, high: 30000", "hihg: 7, fill: 1", 25, "models[0].inputs.input_ids.hihg", "did you mean `high`?"),
    ("fill: 1", "fill: 1.5", 26, "models[0].inputs.attention_mask.fill", "not a value of a int64 tensor"),
    ("dtype: int64, fill: 1", "dtype: long, fill: 1", 26, "models[0].inputs.attention_mask.dtype", "unknown dtype"),
    (
        "attention_mask: {shape: [batch, seq]",
        "attention_mask: {shape: [batch, 0]",
        26,
        "models[0].inputs.attention_mask.shape[1]",
        "not a size",
    ),
    (
        "{batch: 32, seq: 128}",
        "{batch: 32}",
        29,
        "models[0].shape_buckets[1]",
        "dimension `seq` of `inputs` is missing",
    ),
    (
        "{batch: 32, seq: 128}",
        "{batch: 8, seq: 128}",
        29,
        "models[0].shape_buckets[1]",
        "given twice: batch: 8, seq: 128",
    ),
    ("{batch: 32, seq: 128}", "{batch: 0, seq: 1}", 29, "models[0].shape_buckets[1].batch", "above 0"),
    ("{batch: 32, seq: 128}", "{batch: 2, seq: 1, len: 4}", 29, "models[0].shape_buckets[1].len", "any tensor"),
    (
        "dynamic_dims: {}",
        "dynamic_dims: {bacth: {max: 9}}",
        30,
        "models[0].dynamic_dims.bacth",
        "did you mean `batch`?",
    ),
    (
        "dynamic_dims: {}",
        "dynamic_dims: {batch: {min: 1, max: 9}}",
        30,
        "models[0].dynamic_dims.batch.min",
        "equal to 2",
    ),
    ("dynamic_dims: {}", "dynamic_dims: {batch: {min: 5, max: 4}}", 30, "models[0].dynamic_dims.batch.max", "below"),
    ("dynamic_dims: {}", "dynamic_dims: {batch: {min: 2, max: 4}}", 30, "models[0].dynamic_dims.batch", "never traced"),
    (
        "dynamic_dims: {}",
        "dynamic_dims: {batch: {mx: 4}}",
        30,
        "models[0].dynamic_dims.batch.mx",
        "did you mean `max`?",
    ),
    ("train: false", "train: false\n    loss: m:loss", 32, "models[0].loss", "`train: true`"),
    ("rtol: 0.02", "rtol: -1", 32, "models[0].tolerance.rtol", "greater than or equal to 0"),
    ("name: image-service", "name: bert-base", 33, "models[1].name", "given twice: `bert-base`"),
    ("timeout: 30m", "timeout: 30 minutes", 35, "models[1].timeout", "`30m`"),
    ("[python, warmup.py]", "[]", 34, "models[1].command", "at least one"),
    ("command: [python", "factory: a:b\n    command: [python", 35, "models[1].command", "not both"),
    ("min_hit_rate: 1.0", "min_hit_rate: 1.5", 37, "gates.min_hit_rate", "less than or equal to 1"),
    ("max_tuning_runs: 0", "max_tuning_run: 0", 37, "gates.max_tuning_run", "did you mean `max_tuning_runs`?"),
    ("max_compiles: 0", "max_compiles: 0.5", 37, "gates.max_compiles", "not an integer"),
    ("statement_key: kms:alias/cachepipe-build", "statement_key: secret", 38, "trust.statement_key", "`kms:…`"),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "words"), WRONG, ids=[f"{row[3]}-{i}" for i, row in enumerate(WRONG)]
)
def test_a_problem_names_line_field_and_reason(
    tmp_path: Path, old: str, new: str, line: int, field: str, words: str
) -> None:
    problems = _problems(tmp_path, with_line(old, new))
    wanted = [problem for problem in problems if problem.startswith(f"{line}: {field}: ") and words in problem]
    assert wanted, problems


def test_all_problems_are_reported_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    text = (
        FULL.replace("[bfloat16]", "[fp32]").replace("dynamic: false", "dynamic: null").replace("channel:", "chanel:")
    )
    text = text.replace("seq: 128}", "seqq: 128}").replace("min_speedup", "min_speed_up")
    lines = [int(problem.split(":")[0]) for problem in _problems(tmp_path, text)]
    assert lines == sorted(lines)
    assert set(lines) == {5, 15, 17, 29, 37}


def test_messages_are_lower_case_without_full_stop(tmp_path: Path) -> None:
    for old, new, *_ in WRONG:
        for problem in _problems(tmp_path, with_line(old, new)):
            message = problem.split(": ", 2)[2]
            assert message[0] == message[0].lower(), problem
            assert not message.endswith("."), problem


def test_case_f8_dynamic_null_is_refused_with_the_reason(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, with_line("dynamic: false", "dynamic: null"))
    assert problem.startswith("17: models[0].compile.dynamic: null makes the result depend on the order of calls")


def test_case_f4_every_varying_dimension_must_be_in_every_shape_bucket(tmp_path: Path) -> None:
    problems = _problems(tmp_path, with_line("{batch: [1, 8], seq: [128, 512]}", "{batch: [1, 8]}"))
    assert problems == ("28: models[0].shape_buckets[0]: dimension `seq` of `inputs` is missing",)
    text = FULL.replace(
        "    shape_buckets:\n      - {batch: [1, 8], seq: [128, 512]}\n      - {batch: 32, seq: 128}\n", ""
    )
    assert {problem.split(": ", 2)[2] for problem in _problems(tmp_path, text)} == {
        "dimension `batch` of `inputs` is missing",
        "dimension `seq` of `inputs` is missing",
    }


def test_case_g3_freezing_is_refused(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, with_line("options: {}", "options: {freezing: true}"))
    assert "never cached" in problem


def _model(folder: Path, **changes: object) -> FactoryModel:
    (model,) = load_manifest(write_manifest(folder, small_manifest(**changes))).models
    assert isinstance(model, FactoryModel)
    return model


def _model_problems(folder: Path, **changes: object) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        _model(folder, **changes)
    return [problem.split(": ", 1)[1] for problem in caught.value.problems]


def test_inputs_nest_and_hold_constants(tmp_path: Path) -> None:
    tensor = {"shape": ["batch", 2]}
    inputs = {"images": [tensor, {"shape": ["batch"], "dtype": "bool", "fill": True}], "flag": True, "none": None}
    inputs |= {"deep": {"size": 3, "text": "a", "raw": {"const": {"shape": [1]}}}}
    model = _model(tmp_path, inputs=inputs)
    assert model.inputs == {
        "images": [{"shape": ["batch", 2], "dtype": None}, {"shape": ["batch"], "dtype": "bool", "fill": True}],
        "flag": {"const": True},
        "none": {"const": None},
        "deep": {"size": {"const": 3}, "text": {"const": "a"}, "raw": {"const": {"shape": [1]}}},
    }


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        ({"dtype": "int64", "fill": 1}, "a tensor needs `shape`"),
        ({"shape": ["batch"], "fill": 1, "low": 0}, "`fill` excludes"),
        ({"shape": ["batch"], "low": 0.5}, "go together"),
        ({"shape": ["batch"], "dtype": "bool"}, "needs `fill`"),
        ({"shape": ["batch"], "dtype": "bool", "fill": 1}, "not a value of a bool tensor"),
        ({"shape": ["batch"], "fill": float("inf")}, "not a value of a floating tensor"),
        ({"shape": ["batch", True]}, "not a size"),
        ({"shape": ["batch", "a-b"]}, "not a size"),
    ],
)
def test_a_wrong_tensor_is_refused(tmp_path: Path, leaf: object, words: str) -> None:
    assert any(words in problem for problem in _model_problems(tmp_path, inputs={"x": leaf}))


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": {"shape": ["batch"]}, "shape": [1, 2]},
        {"const": 3},
        {"x": {"const": 1, "y": 2}},
        {"x": {"shape": {"y": 1}}},
    ],
)
def test_names_that_mark_a_leaf_are_reserved(tmp_path: Path, inputs: object) -> None:
    assert any("needs a function" in problem for problem in _model_problems(tmp_path, inputs=inputs))


def test_an_integer_tensor_with_high_starts_at_zero(tmp_path: Path) -> None:
    model = _model(tmp_path, inputs={"x": {"shape": ["batch"], "dtype": "int32", "high": 9}})
    assert model.inputs["x"] == {"shape": ["batch"], "dtype": "int32", "low": 0, "high": 9}


def test_inputs_may_be_a_function_and_then_name_the_dimensions_themselves(tmp_path: Path) -> None:
    model = _model(tmp_path, inputs="models:inputs", shape_buckets=[{"n": 1, "m": 2}, {"m": 3, "n": [4, 5]}])
    assert (model.inputs, len(model.shape_buckets)) == ("models:inputs", 3)
    problems = _model_problems(tmp_path, inputs="models:inputs", shape_buckets=[{"n": 1}, {"m": 3}])
    assert any("dimension `n` of the first shape bucket is missing" in problem for problem in problems)
    problems = _model_problems(
        tmp_path, inputs="models:inputs", shape_buckets=[{"n": 2}], dynamic_dims={"n": {"max": 4}}
    )
    assert any("needs `inputs` written out" in problem for problem in problems)
    assert any("not `module:attribute`" in problem for problem in _model_problems(tmp_path, inputs="models"))
    assert any("not a mapping, a list" in problem for problem in _model_problems(tmp_path, inputs=3))


def test_a_list_of_inputs_is_called_by_position(tmp_path: Path) -> None:
    inputs = [{"shape": ["batch"]}, 2]
    assert _model(tmp_path, inputs=inputs, call="args").inputs[1] == {"const": 2}
    assert any("needs `call: args`" in problem for problem in _model_problems(tmp_path, inputs=inputs))


def test_inputs_without_symbolic_dimensions_have_one_shape_bucket(tmp_path: Path) -> None:
    tree = small_manifest(inputs={"x": {"shape": [2, 4]}})
    del tree["models"][0]["shape_buckets"]
    (model,) = load_manifest(write_manifest(tmp_path, tree)).models
    assert isinstance(model, FactoryModel)
    assert model.shape_buckets == ({},)


@pytest.mark.parametrize(
    "rows", [[], {}, 3, [3], [{"batch": []}], [{"batch": [1, 1]}], [{"batch": "2"}], [{"batch": True}]]
)
def test_a_wrong_list_of_shape_buckets_is_refused(tmp_path: Path, rows: object) -> None:
    assert any("shape_buckets" in problem for problem in _model_problems(tmp_path, shape_buckets=rows))


def test_a_product_without_end_is_refused_before_it_is_expanded(tmp_path: Path) -> None:
    rows = [{name: list(range(1, 200)) for name in "abcdefgh"}]
    problems = _model_problems(tmp_path, inputs="models:inputs", shape_buckets=rows)
    assert any("more than 1000 shape buckets" in problem for problem in problems)


def test_a_training_model_has_a_loss_and_a_dynamic_dimension_its_bounds(tmp_path: Path) -> None:
    model = _model(tmp_path, train=True, loss="models:loss", dynamic_dims={"batch": {"min": 2, "max": 64}})
    assert (model.train, model.loss) == (True, "models:loss")
    assert (model.dynamic_dims["batch"].min, model.dynamic_dims["batch"].max) == (2, 64)


def test_a_dtype_may_have_a_tolerance_of_its_own(tmp_path: Path) -> None:
    model = _model(tmp_path, tolerance={"rtol": 0.001, "by_dtype": {"bfloat16": {"rtol": 0.1, "atol": 0.2}}})
    assert (model.tolerance.of("bfloat16").rtol, model.tolerance.of("bfloat16").atol) == (0.1, 0.2)
    assert (model.tolerance.of("float32").rtol, model.tolerance.of("float32").atol) == (0.001, 0.02)
    tree = small_manifest(tolerance={"by_dtype": {"bfloat16": {"rtoll": 0.1}, "bfloat61": {}}})
    with pytest.raises(ManifestError) as caught:
        load_manifest(write_manifest(tmp_path, tree))
    first, second = (problem.partition(": models[0].tolerance.by_dtype.")[2] for problem in caught.value.problems)
    assert first == "bfloat16.rtoll: unknown field; did you mean `rtol`?"
    assert second == "bfloat61: unknown dtype `bfloat61`; did you mean `bfloat16`?"


def test_scalars_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    model = _model(tmp_path, tolerance={"rtol": 0, "atol": 1})
    assert (model.tolerance.rtol, model.tolerance.atol) == (0.0, 1.0)
    text = with_line("{rtol: 0.02, atol: 0.02}", "{rtol: 1e-3, atol: 2.5E-4}").replace(
        "{layers: 12}", "{a: yes, b: 2030-01-01, c: 010, d: 0x10, e: ~, f: -3, g: !!str 12}"
    )
    model_of_text = load_manifest(write_manifest(tmp_path, text)).models[0]
    assert isinstance(model_of_text, FactoryModel)
    assert (model_of_text.tolerance.rtol, model_of_text.tolerance.atol) == (0.001, 0.00025)
    wanted = {"a": "yes", "b": "2030-01-01", "c": "010", "d": "0x10", "e": None, "f": -3, "g": "12"}
    assert model_of_text.args == wanted


def test_text_and_bounds_are_what_json_and_torch_mean_by_them(tmp_path: Path) -> None:
    text = with_line("{layers: 12}", '{a: "\\ud83d\\ude00", "\\ud83d\\ude00": 1}')
    assert load_manifest(write_manifest(tmp_path, text)).models[0].args == {"a": "\U0001f600", "\U0001f600": 1}
    for dtype, low, high in (("int8", -128, 128), ("uint8", 0, 256), ("int32", -(2**31), 2**31)):
        _model(tmp_path, inputs={"x": {"shape": ["batch", 4], "dtype": dtype, "low": low, "high": high}})


def test_anchors_and_merge_keys_are_read(tmp_path: Path) -> None:
    text = with_line("args: {layers: 12}", "args: {one: &one {a: 1, b: 2}, two: {<<: *one, b: 3}, three: {<<: [*one]}}")
    model = load_manifest(write_manifest(tmp_path, text)).models[0]
    assert isinstance(model, FactoryModel)
    assert model.args == {"one": {"a": 1, "b": 2}, "two": {"a": 1, "b": 3}, "three": {"a": 1, "b": 2}}


BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(9))


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "the file is empty"),
        ("# only a comment\n", 1, "the file is empty"),
        ("- a\n- b\n", 1, "the file is not a mapping"),
        ("version: 1\nname: [a\n", 3, "not usable YAML"),
        ("version: 1\n\tname: a\n", 2, "not usable YAML"),
        ("version: 1\n---\nversion: 1\n", 2, "not usable YAML"),
        ("version: 1\nname: !!python/object/apply:os.system [id]\n", 2, "unknown tag"),
        ("version: 1\nname: !!python/name:os.system\n", 2, "unknown tag"),
        ("version: !!int abc\n", 1, "unknown tag"),
        ("version: !!timestamp x\n", 1, "unknown tag"),
        ("version: 1\nname: &a [*a]\n", 2, "nested deeper"),
        ("version: 1\nname: *a\n", 2, "undefined alias"),
        ("version: 1\n<<: 3\n", 2, "`<<` wants a mapping"),
        (BOMB, 1, "more than 100000 values"),
        ("version: 1\nname: " + "[" * 5000, 1, "nested too deep"),
        ("a: \x07\n", 1, "not YAML"),
        ('version: 1\nmodels: [{args: {a: "\\ud800"}}]\n', 2, "half of a character"),
        ('version: 1\n"\\udfff": 1\n', 2, "half of a character"),
    ],
)
def test_a_file_that_is_no_usable_yaml_is_refused_with_a_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    (problem,) = _problems(tmp_path, text)
    assert problem.startswith(f"{line}: ")
    assert words in problem


def test_a_key_given_twice_is_refused_and_the_first_line_named(tmp_path: Path) -> None:
    text = with_line("channel: candidate", "name: other")
    assert "5: name: given twice, first in line 2" in _problems(tmp_path, text)


def test_a_key_that_is_not_text_is_refused(tmp_path: Path) -> None:
    assert "5: true: the name is not text (quote it)" in _problems(tmp_path, with_line("channel: candidate", "true: x"))


def test_a_file_that_is_missing_too_long_or_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    with pytest.raises(ManifestError, match=r"m\.yaml:1: cannot be read: No such file"):
        load_manifest(path)
    path.write_bytes(b"version: 1\nname: \xff\n")
    with pytest.raises(ManifestError, match=r"m\.yaml:2: not UTF-8: byte 0xff"):
        load_manifest(path)
    path.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ManifestError, match="longer than 1048576 bytes"):
        load_manifest(path)
    with pytest.raises(ManifestError, match="cannot be read: Is a directory"):
        load_manifest(tmp_path)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "batch", "m:f", "shape", "int64"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["shape", "dtype", "const", "batch", "low", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def _places(tree: object, place: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place, *(found for key, item in items for found in _places(item, (*place, key)))]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_value_at_any_place_gives_a_manifest_or_problems(data: st.DataObject) -> None:
    tree = yaml.safe_load(FULL)
    *parents, last = data.draw(st.sampled_from([place for place in _places(tree) if place]))
    owner = tree
    for part in parents:
        owner = owner[part]
    owner[last] = data.draw(_VALUES)
    found = read_manifest(tree)
    assert isinstance(found, Manifest) or (found and all(isinstance(problem, Problem) for problem in found))


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(0, len(FULL)),
    length=st.integers(0, 9),
    text=st.text("{}[]&*!<>:-'\"#\n\t ab1~?|,%@`", max_size=6),
)
def test_any_damage_to_a_file_gives_a_manifest_or_a_manifest_error(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_text(FULL[:start] + text + FULL[start + length :], encoding="utf-8")
    try:
        load_manifest(path)
    except ManifestError as error:
        assert error.problems


def test_the_engine_is_torch_compiles_unless_named(tmp_path: Path) -> None:
    assert _model(tmp_path).compile.engine == "jit"
    assert _model(tmp_path, compile={"engine": "aot"}).compile.engine == "aot"
    (problem,) = _model_problems(tmp_path, compile={"engine": "no-trace"})
    assert "unknown engine `no-trace`; known: jit, aot" in problem


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compile": {"engine": "aot", "fullgraph": False}}, "compile.fullgraph: `engine: aot` needs one graph"),
        ({"compile": {"engine": "aot", "dynamic": True}}, "compile.dynamic: `engine: aot` needs static shapes"),
        ({"dynamic_dims": {"n": {"max": 8}}}, "dynamic_dims: `engine: aot` needs static shapes"),
        ({"train": True}, "train: `engine: aot` needs no backward"),
        ({"context": {"grad": "grad"}}, "context.grad: `engine: aot` needs `inference_mode` or `no_grad`"),
        ({"method": "encode"}, "method: `engine: aot` needs the method `forward`"),
    ],
)
def test_what_a_native_function_cannot_do_is_refused_by_the_manifest(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    known: dict[str, object] = {
        "compile": {"engine": "aot"},
        "inputs": {"x": {"shape": ["n"]}},
        "shape_buckets": [{"n": 4}],
    }
    assert any(words in problem for problem in _model_problems(tmp_path, **{**known, **changes}))
