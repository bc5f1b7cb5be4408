"""The manifest: what a release is built from, as frozen models that forbid what they do not know.

Rules that look into trees stand in `manifest_rules`, the reader that reports every problem in `manifest_reader`; lines
and files are the adapter's (`adapters/manifest_file.py`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cachepipe.domain.engine import ENGINES, JIT
from cachepipe.domain.manifest_rules import (
    FLOATING,
    REFERENCE,
    Problem,
    dimension_problems,
    dynamic_problems,
    engine_problems,
    nearest,
    plain_problems,
    read_inputs,
    read_shape_buckets,
)
from cachepipe.domain.names import check_name
from cachepipe.domain.record import Json
from cachepipe.domain.variables import NOT_COMPILED_IN, can_compile_in
from cachepipe.errors import UsageError

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DYNAMIC_NULL = (
    "null makes the result depend on the order of calls (the first shape is static, the second one dynamic), so a "
    "service that calls in another order compiles again: write `false`, `true`, or name dimensions in `dynamic_dims`"
)
FREEZING = "frozen weights become constants of the compiled code: never cached, or carried inside the artifact"

T = TypeVar("T")


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise PydanticCustomError("problems", "several problems", {"problems": problems})


def _one_of(known: tuple[str, ...], what: str) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"unknown {what} `{name[:80]}`{nearest(name, known)}")
        return name

    return check


def _unique(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values:
        raise ValueError("at least one is needed")
    _refuse([Problem((i,), "given twice") for i, value in enumerate(values) if value in values[:i]])
    return values


def _name(text: str) -> str:
    try:
        return check_name(text, "name")
    except UsageError as error:
        raise ValueError(str(error)) from error


def _reference(text: str) -> str:
    if REFERENCE.fullmatch(text) is None:
        raise ValueError(f"not `module:attribute`: `{text[:120]}`")
    return text


def _address(text: str) -> str:
    if found := re.search(r"[\x00-\x1f\x7f]", text):
        raise ValueError(f"a control character cannot be part of it: {found[0]!r}")
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/") or posixpath.normpath(text) != text or text == "/":
        raise ValueError(f"not an absolute path without `..` and a slash at its end: `{text[:120]}`")
    if not can_compile_in(_address(text)):
        raise ValueError(f"{NOT_COMPILED_IN}: `{text[:120]}`")
    return text


def _store(text: str) -> str:
    if re.fullmatch(r"s3://[^/]+(/.*)?|file:///.+|/.+", text) is None:
        raise ValueError(f"not `s3://…`, `file:///…` or an absolute path: `{text[:120]}`")
    return _address(text)


def _key(text: str) -> str:
    if re.fullmatch(r"(kms|file):.+", text) is None:
        raise ValueError(f"not `kms:…` or `file:…`: `{text[:120]}`")
    return _address(text)


def _pattern(text: str) -> str:
    if not text or text.startswith("/"):
        raise ValueError("not a pattern relative to the manifest's folder")
    return text


def _seconds(value: Json) -> float:
    if isinstance(value, float) and value > 0:
        return value
    found = re.fullmatch(r"([0-9]{1,9})(s|m|h)?", str(value)) if type(value) in (str, int) else None
    if found is None or int(found[1]) == 0:
        raise ValueError(f"not a time like `90s`, `30m`, `2h`: `{value}`")
    return float(int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2] or "s"])


def _not_null(value: Json) -> Json:
    if value is None:
        raise ValueError(DYNAMIC_NULL)
    return value


Name = Annotated[str, AfterValidator(_name)]
Reference = Annotated[str, AfterValidator(_reference)]
Dtype = Annotated[str, AfterValidator(_one_of(FLOATING, "dtype"))]
Mode = Annotated[str, AfterValidator(_one_of(MODES, "mode"))]
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Patterns = Annotated[tuple[Annotated[str, AfterValidator(_pattern)], ...], Strict(False)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Target(_Model):
    device: Annotated[str, AfterValidator(_one_of(("cpu", "cuda"), "device"))]
    gpu: str | None = None
    """NVML's name of the GPU, e.g. `NVIDIA H200`; None: any."""

    @field_validator("gpu")
    @classmethod
    def _only_with_cuda(cls, gpu: str | None, info: ValidationInfo) -> str | None:
        if gpu is not None and info.data.get("device") == "cpu":
            raise ValueError("only a target with `device: cuda` has a gpu")
        return gpu


class CompileSettings(_Model):
    fullgraph: bool = True
    dynamic: Annotated[bool, BeforeValidator(_not_null)] = False
    options: Mapping[str, Any] = {}
    engine: Annotated[str, AfterValidator(_one_of(ENGINES, "engine"))] = JIT
    """`jit`: torch.compile, whose start traces; `aot`: per shape bucket a native function that starts without a trace."""

    @field_validator("options")
    @classmethod
    def _cacheable(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        problems = plain_problems(options)
        for name, value in options.items():
            if name.startswith("freezing") and value is not False:
                problems.append(Problem((name,), FREEZING))
            elif (name, value) in (("force_disable_caches", True), ("fx_graph_cache", False)):
                problems.append(Problem((name,), "switches off the cache that is to be built"))
            elif isinstance(value, Mapping):
                problems.append(Problem((name,), f"write nested options with a dot, e.g. `{name}.cudagraphs`"))
        _refuse(problems)
        return options


class ContextSettings(_Model):
    grad: Annotated[str, AfterValidator(_one_of(("inference_mode", "no_grad", "grad"), "grad mode"))] = "inference_mode"
    autocast: Annotated[str, AfterValidator(_one_of(("bfloat16", "float16"), "autocast dtype"))] | None = None
    matmul_precision: Annotated[str, AfterValidator(_one_of(("highest", "high", "medium"), "precision"))] = "highest"
    deterministic: bool = False


class ToleranceBounds(_Model):
    rtol: Amount = 0.02
    atol: Amount = 0.02


class Tolerance(ToleranceBounds):
    by_dtype: Mapping[Dtype, ToleranceBounds] = {}
    """Where one dtype rounds more than the others: eager rounds after every operation, a fused kernel once."""

    def of(self, dtype: str) -> ToleranceBounds:
        return self.by_dtype.get(dtype, self)


class DynamicBounds(_Model):
    min: Annotated[int, Field(ge=2)] = 2
    """Size 1 is always specialised by torch, so it is a shape bucket of its own."""
    max: Annotated[int, Field(ge=2)]


class FactoryModel(_Model):
    """A model made by a callable: one entry per dtype and mode, each with all shape buckets."""

    name: Name
    factory: Reference
    args: Mapping[str, Any] = {}
    sources: Patterns = ()
    dtypes: Annotated[tuple[Dtype, ...], Strict(False), AfterValidator(_unique)]
    modes: Annotated[tuple[Mode, ...], Strict(False), AfterValidator(_unique)] = ("max-autotune",)
    compile: CompileSettings = CompileSettings()
    eval: bool = True
    requires_grad: bool = False
    method: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] = "forward"
    call: Annotated[str, AfterValidator(_one_of(("kwargs", "args"), "way to call"))] = "kwargs"
    context: ContextSettings = ContextSettings()
    memory_format: Annotated[str, AfterValidator(_one_of(("contiguous", "channels_last"), "memory format"))] = (
        "contiguous"
    )
    inputs: Any
    """`module:function`, or a tree in the normal form of `read_inputs`."""
    shape_buckets: Annotated[Any, Field(validate_default=True)] = ({},)
    """Products expanded: `tuple[Mapping[str, int], ...]`."""
    dynamic_dims: Mapping[str, DynamicBounds] = {}
    train: bool = False
    loss: Reference | None = None
    tolerance: Tolerance = Tolerance()

    @model_validator(mode="after")
    def _engine_can(self) -> FactoryModel:
        _refuse(engine_problems(self))
        return self

    # A validator sees the fields above it that are right; a wrong one has been reported already.

    @field_validator("args")
    @classmethod
    def _plain(cls, args: Mapping[str, Any]) -> Mapping[str, Any]:
        _refuse(plain_problems(args))
        return args

    @field_validator("inputs", mode="plain")
    @classmethod
    def _inputs(cls, tree: Any, info: ValidationInfo) -> Any:
        if isinstance(tree, str):
            return _reference(tree)
        if not isinstance(tree, (Mapping, list)):
            raise ValueError("not a mapping, a list or `module:function`")
        problems: list[Problem] = []
        found = read_inputs(tree, problems)
        if isinstance(tree, list) and info.data.get("call") == "kwargs":
            problems.append(Problem((), "a list needs `call: args`"))
        _refuse(problems)
        return found

    @field_validator("shape_buckets", mode="plain")
    @classmethod
    def _shape_buckets(cls, rows: Any, info: ValidationInfo) -> Any:
        problems: list[Problem] = []
        buckets = read_shape_buckets(rows, problems)
        if "inputs" in info.data and buckets and all(isinstance(row, Mapping) for row in rows):
            problems += dimension_problems(rows, info.data["inputs"])
        _refuse(problems)
        return buckets

    @field_validator("dynamic_dims")
    @classmethod
    def _dynamic_dims(cls, dims: Mapping[str, DynamicBounds], info: ValidationInfo) -> Mapping[str, DynamicBounds]:
        if "inputs" in info.data and "shape_buckets" in info.data:
            bounds = {name: (bound.min, bound.max) for name, bound in dims.items()}
            _refuse(dynamic_problems(bounds, info.data["inputs"], info.data["shape_buckets"]))
        return dims

    @field_validator("loss")
    @classmethod
    def _only_with_train(cls, loss: str | None, info: ValidationInfo) -> str | None:
        if loss is not None and info.data.get("train") is False:
            raise ValueError("only a model with `train: true` has a loss")
        return loss


class CommandModel(_Model):
    """A whole program in the place of a factory."""

    name: Name
    command: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False), Field(min_length=1)]
    timeout: Annotated[float, BeforeValidator(_seconds)] = 1800.0
    """Seconds; written like `30m`."""
    sources: Patterns = ()


class Gates(_Model):
    """What `prove` must reach before anything is published."""

    min_hit_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    max_tuning_runs: Count = 0
    max_compiles: Count = 0
    max_graph_breaks: Count = 0
    min_speedup: Amount = 2.0
    max_latency_ratio: Amount = 1.05


class Trust(_Model):
    statement_key: Annotated[str, AfterValidator(_key)]
    index_key: Annotated[str, AfterValidator(_key)]


def _kind(model: Any) -> str:
    is_command = isinstance(model, Mapping) and "command" in model and "factory" not in model
    return "command" if is_command or isinstance(model, CommandModel) else "factory"


AnyModel = Annotated[
    Annotated[FactoryModel, Tag("factory")] | Annotated[CommandModel, Tag("command")], Discriminator(_kind)
]


class Manifest(_Model):
    version: Literal[1]
    name: Name
    cache_root: Annotated[str, AfterValidator(_absolute)] = "/var/cache/cachepipe"
    store: Annotated[str, AfterValidator(_store)] | None = None
    channel: Name = "candidate"
    python_path: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)] = (".",)
    """Relative to the manifest's folder."""
    targets: Annotated[tuple[Target, ...], Strict(False), AfterValidator(_unique)]
    models: Annotated[tuple[AnyModel, ...], Strict(False), Field(min_length=1)]
    gates: Gates = Gates()
    trust: Trust | None = None

    @field_validator("models")
    @classmethod
    def _names(cls, models: tuple[AnyModel, ...]) -> tuple[AnyModel, ...]:
        names = [model.name for model in models]
        _refuse([Problem((i, "name"), f"given twice: `{name}`") for i, name in enumerate(names) if name in names[:i]])
        return models

    @property
    def root(self) -> str:
        """The folder where the builder compiles and services restore."""
        return f"{self.cache_root}/{self.name}"


def with_cache_root(manifest: Manifest, cache_root: str) -> Manifest:
    """Returns the manifest with another `cache_root`, as `--cache-root` gives it.

    Raises:
        UsageError: not an absolute path in its normal form.
    """
    try:
        return manifest.model_copy(update={"cache_root": _absolute(cache_root)})
    except ValueError as error:
        raise UsageError(f"cache root: {error}") from error
