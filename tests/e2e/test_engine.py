"""The engine `aot`: a real build of a small model, real restores, and every change that must not be answered blindly."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cachepipe.adapters.progress import Lines
from cachepipe.adapters.store import open_store
from cachepipe.adapters.torch_settings import set_matmul_precision
from cachepipe.adapters.workdir import read_evidence
from cachepipe.domain.engine import FILE, EngineFile, engine_folder, sealed
from cachepipe.domain.entry import EntrySpec
from cachepipe.domain.evidence import EntryEvidence, layer_counts
from cachepipe.domain.gates import GateLimits, judge
from cachepipe.domain.record import read_record
from cachepipe.domain.statement import EntryRecord
from cachepipe.runtime import engine as engine_module
from cachepipe.runtime.calling import build_model, calling_context, compile_model, flatten, prepare
from cachepipe.runtime.engine_module import EngineModule, engine_model
from cachepipe.runtime.inputs import example_inputs
from cachepipe.workflows.assemble import references
from cachepipe.workflows.build import BuildRequest, build
from cachepipe.workflows.fetch import read_artifact, read_channel
from cachepipe.workflows.report import report
from cachepipe.workflows.verify import VerifyRequest, verify
from tests.support.jobs import MODELS, run_job, spec_of

pytestmark = pytest.mark.slow

MANIFEST = """
version: 1
name: native
cache_root: {root}/cache
store: file://{root}/store
python_path: [{models}]
targets: [{{device: cpu}}]
models:
  - name: everything
    factory: engine_models:model
    dtypes: [float32]
    modes: [default]
    compile: {{engine: aot}}
    inputs:
      x: {{shape: [batch, 8]}}
      extra: {{bias: {{shape: [8]}}, pair: [{{shape: [batch, 8]}}, 2]}}
    shape_buckets: [{{batch: 4}}]
    tolerance: {{rtol: 0.001, atol: 0.001}}
gates: {{min_speedup: 1.0}}
"""


@dataclasses.dataclass
class Built:
    root: Path
    record: EntryRecord
    folder: Path
    """With the native functions, in the restored tree."""

    @property
    def spec(self) -> EntrySpec:
        return self.record.spec

    def evidence(self, step: str) -> EntryEvidence:
        found = read_evidence(self.root / "evidence" / f"everything_float32_default.cpu.{step}.json")
        assert found is not None
        return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    root = tmp_path_factory.mktemp("engine")
    (root / "cache").mkdir(mode=0o700)
    manifest = root / "manifest.yaml"
    manifest.write_text(MANIFEST.format(root=root, models=MODELS))
    request = BuildRequest(manifest, work=root / "work", report=root / "evidence")
    build(request, Lines(sys.stderr, time.monotonic), datetime.now(timezone.utc))
    store = open_store(f"file://{root}/store")
    index = read_channel(store, "native", "candidate", datetime.now(timezone.utc)).index
    (record,) = read_artifact(store, index.rows[0], "native").statement.entries
    folder = root / "elsewhere"  # another place than the builder's
    restore(root, folder, "true")
    sys.path.insert(0, str(MODELS))
    yield Built(root, record, folder / engine_folder(record.key))
    sys.path.remove(str(MODELS))


def restore(root: Path, folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "cachepipe", "restore", f"file://{root}/store", "--name", "native"]
    words += ["--channel", "candidate", "--dest", str(folder), "--strict", "--", *command]
    environment = {**os.environ, "PYTHONPATH": f"{MODELS}:{os.environ.get('PYTHONPATH', '')}", **variables}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True)


class Service:
    """The model in a service: which calls are answered natively, which fall back, and why."""

    def __init__(self, built: Built, model: nn.Module | None = None) -> None:
        self.spec = built.spec
        self.model = prepare(self.spec, model if model is not None else build_model(self.spec))
        self.hits: list[str] = []
        self.reasons: list[str] = []
        self.fallbacks = 0
        self.compiled = engine_model(self.model, built.folder, "cpu", self, lambda: self.traced)

    def on_engine(self, label: str, is_hit: bool, reason: str) -> None:
        (self.hits if is_hit else self.reasons).append(label if is_hit else reason)

    def on_capture(self, label: str, reason: str) -> None:
        raise AssertionError("there are no CUDA graphs on a CPU")

    def traced(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for torch.compile's function, which has its own guards."""
        self.fallbacks += 1
        return self.model(*args, **kwargs)

    def inputs(self) -> dict[str, Any]:
        return example_inputs(self.spec, {"batch": 4})[1]

    def call(self, **changes: Any) -> Any:
        with calling_context(self.spec):
            return self.compiled(**{**self.inputs(), **changes})

    def is_right(self, **changes: Any) -> bool:
        """Calls, and tells whether the outputs are eager's, in kind and number."""
        with calling_context(self.spec):
            wanted = self.model(**{**self.inputs(), **changes})
        found = self.call(**changes)
        assert [type(item) for item in found["more"]] == [type(item) for item in wanted["more"]]
        pairs = zip(flatten(found), flatten(wanted), strict=True)
        return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)


@pytest.fixture
def service(built: Built) -> Service:
    made = Service(built)
    assert made.is_right()
    assert (made.hits, made.reasons, made.fallbacks) == (["batch=4"], [], 0)
    return made


# the build


def test_the_proof_counts_native_functions_as_hits_and_traces_nothing(built: Built) -> None:
    prove = built.evidence("prove")
    assert layer_counts(prove) == {"engine": {"hit": 1, "miss": 0, "bypass": 0}}
    assert [bucket.graphs for bucket in prove.shape_buckets] == [0]
    assert prove.shape_buckets[0].is_close
    assert prove.work.new_files == prove.work.native_builds == 0


def test_the_evidence_of_both_proofs_is_that_of_a_warm_release(built: Built) -> None:
    verdict = report([built.root / "evidence"]).verdict
    assert verdict.is_ok, verdict.faults


def test_the_tree_to_which_calls_fall_back_is_proved_too(built: Built) -> None:
    fallback = built.evidence("fallback")
    assert fallback.shape_buckets[0].graphs == 1
    assert {row["miss"] for row in layer_counts(fallback).values()} == {0}
    assert "engine" not in layer_counts(fallback)


def test_the_artifact_names_its_native_files_as_a_kind(built: Built) -> None:
    assert built.record.kinds["engine"] == 2
    assert built.record.kinds["aotautograd"] >= 1
    assert "export" in built.record.tuning["seconds"]


def test_a_proof_that_fell_back_is_refused_with_the_reason(built: Built, tmp_path: Path) -> None:
    root = tmp_path / "root"
    restore(built.root, root, "true")
    engine = engine_folder(built.record.key)
    facts = read_record(EngineFile, (root / engine / FILE).read_bytes(), FILE, 1 << 26)
    changed = dataclasses.replace(facts, structure={**facts.structure, "self.times": "int 3"})
    (root / engine / FILE).write_bytes(sealed(changed))
    evidence = run_job(built.spec, tmp_path, "prove", root=str(root), engine=engine)
    found = judge(GateLimits(min_speedup=0), built.spec, evidence, references(built.record))
    text = "self.times: built int 3, here int 2"
    assert f"everything/float32/default · batch=4: engine `aot`: no native function answered: {text}" in found
    assert any(violation.startswith("everything/float32/default: min_hit_rate") for violation in found)


def test_what_every_process_has_anew_is_named_and_not_compared(built: Built) -> None:
    facts = read_record(EngineFile, (built.folder / FILE).read_bytes(), FILE, 1 << 26)
    assert facts.unsteady == ("self.origin",)
    assert "self.origin" not in facts.structure
    model = build_model(built.spec)
    model.origin += 1
    service = Service(built, model)
    assert service.is_right() and service.hits == ["batch=4"]
    service.model.times = 3
    assert service.is_right() and service.reasons == ["self.times: built int 2, here int 3"]


def test_the_proof_refuses_a_function_that_depends_on_a_value_that_is_not_compared(
    built: Built, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    restore(built.root, root, "true")
    engine = engine_folder(built.record.key)
    facts = read_record(EngineFile, (root / engine / FILE).read_bytes(), FILE, 1 << 26)
    structure = {place: text for place, text in facts.structure.items() if place != "self.times"}
    changed = dataclasses.replace(facts, structure=structure, unsteady=(*facts.unsteady, "self.times"))
    (root / engine / FILE).write_bytes(sealed(changed))
    spec = dataclasses.replace(built.spec, factory="engine_models:tripled")
    evidence = run_job(spec, tmp_path, "prove", root=str(root), engine=engine)
    assert layer_counts(evidence) == {"engine": {"hit": 1, "miss": 0, "bypass": 0}}
    found = judge(GateLimits(min_speedup=0), built.spec, evidence, references(built.record))
    assert any("outputs differ from eager" in violation for violation in found), found


def test_verify_shows_native_hits_and_judges_the_fallback_too(built: Built) -> None:
    request = VerifyRequest(built.root / "manifest.yaml", report=built.root / "verified", hides_compiler=True)
    (summary,) = verify(request, Lines(sys.stderr, time.monotonic), datetime.now(timezone.utc))
    assert summary.violations == ()
    (row,) = summary.shape_buckets
    assert (row.graphs, dict(row.hits)) == (0, {"engine": "1/1"})
    assert row.restored_s < row.cold_s
    steps = sorted(path.name.split(".")[-2] for path in (built.root / "verified").glob("everything*.json"))
    assert steps == ["fallback", "verify"]


def test_weights_are_not_in_the_artifact(built: Built) -> None:
    weight = build_model(built.spec).first.weight.detach().contiguous()
    data = bytes(weight.untyped_storage().tolist())
    assert len(data) == 8 * 8 * 4
    assert all(data not in path.read_bytes() for path in built.folder.iterdir())


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("drawing", "the model draws random numbers: aten.rand_like.default"),
        ("counting", "a call changes the module, which a native function does not: self.calls: built int"),
        ("writing", "a call writes into self.total, which a native function does not"),
        ("hooked", "a hook is registered, whose effects a native function does not have: self._forward_hooks[0]"),
        ("returning", "an output is one of the inputs or weights itself: `x`"),
        ("function", "returned builtin_function_or_method: `engine: aot` needs an nn.Module"),
    ],
)
def test_what_a_native_function_cannot_do_is_refused_in_words(tmp_path: Path, factory: str, reason: str) -> None:
    assert reason in refusal(tmp_path, factory, {})


@pytest.mark.parametrize("factory", ["branching", "keeping"])
def test_a_call_that_reads_what_every_process_has_anew_is_refused_whatever_a_proof_would_see(
    tmp_path: Path, factory: str
) -> None:
    reason = refusal(tmp_path, factory, {"self.started": "float 1.5"})
    assert reason == "`engine: aot`: a call reads what every process has anew: self.started"


def test_what_the_first_call_sets_is_not_taken_for_what_every_process_has_anew(tmp_path: Path) -> None:
    """It is compared, so a service whose model was not called yet is traced."""
    assert "draws random numbers" in refusal(tmp_path, "settling", {"self.calls": "int 0"})


def refusal(tmp_path: Path, factory: str, elsewhere: dict[str, str]) -> str:
    """Returns why a model cannot be exported, of which another process described some places."""
    from cachepipe.adapters.torch_export import export_entry
    from cachepipe.errors import UsageError

    spec = spec_of("", ({"batch": 4},), fullgraph=True, engine="aot")
    spec = dataclasses.replace(spec, factory=f"engine_models:{factory}")
    sys.path.insert(0, str(MODELS))
    try:
        with pytest.raises(UsageError) as caught:
            export_entry(spec, prepare_any(spec), tmp_path / "engine", elsewhere)
    finally:
        sys.path.remove(str(MODELS))
    return str(caught.value)


def prepare_any(spec: EntrySpec) -> Any:
    return prepare(spec, build_model(spec))


# the service

CHILD = """
import json, os, sys
import cachepipe
import engine_models
before = {os.path.join(d, f) for d, _, names in os.walk(os.environ["CACHEPIPE_ROOT"]) for f in names}
entry = cachepipe.entry("everything")
model = entry.compile(engine_models.model())
with entry.context():
    entry.warmup(model)
after = {os.path.join(d, f) for d, _, names in os.walk(os.environ["CACHEPIPE_ROOT"]) for f in names}
cachepipe.ready()
imported = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
print(json.dumps({"imported": imported, "new": sorted(after - before), "report": cachepipe.report()}))
"""


def test_a_moved_service_starts_without_dynamo_compiler_or_writing_a_file(built: Built, tmp_path: Path) -> None:
    ran = restore(built.root, built.root / "moved", sys.executable, "-c", CHILD, PATH=str(tmp_path))
    found = json.loads(ran.stdout)
    assert found["imported"] == []
    assert found["new"] == []
    assert found["report"]["attached"]
    assert found["report"]["layers"] == {"engine": {"hit": 1, "miss": 0, "bypass": 0}}
    assert found["report"]["graphs"] == 0
    assert "cachepipe ready" in ran.stderr
    assert "expected_graphs=0" in ran.stderr
    assert "traced" not in ran.stderr


def test_the_switch_for_operators_traces_with_hits(built: Built) -> None:
    ran = restore(built.root, built.root / "cache/native", sys.executable, "-c", CHILD, CACHEPIPE_ENGINE="jit")
    found = json.loads(ran.stdout)["report"]
    assert "cachepipe engine entry=everything/float32/default outcome=traced" in ran.stderr
    assert found["graphs"] == 1
    assert found["layers"]["aotautograd"] == {"hit": 1, "miss": 0, "bypass": 0}
    assert found["native_builds"] == 0


def test_a_shape_that_was_not_built_is_compiled_by_torch(built: Built) -> None:
    made = Service(built)
    compiled = engine_model(made.model, built.folder, "cpu", made, lambda: torch.compile(made.model, backend="eager"))
    args = {"x": torch.randn(3, 8), "extra": {"bias": torch.randn(8), "pair": [torch.randn(3, 8), 2]}}
    with calling_context(built.spec):
        torch.testing.assert_close(compiled(**args)["y"], made.model(**args)["y"])
        compiled(**made.inputs())
    assert made.hits == ["batch=4"]
    assert made.reasons == ["no shape bucket of the artifact has arguments of this form"]


def without_digests(folder: Path) -> bytes:
    """Returns `engine.json` as releases wrote it that kept no digests."""
    facts = json.loads((folder / FILE).read_bytes())
    return json.dumps({name: facts[name] for name in facts if name not in ("files", "own")}).encode()


def test_a_native_function_that_cannot_be_loaded_costs_a_trace_only(built: Built, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(without_digests(built.folder))
    (tmp_path / "bucket-0.so").write_bytes(b"no object")
    made = Service(dataclasses.replace(built, folder=tmp_path))
    assert made.compiled == made.traced
    assert "bucket-0.so" in made.reasons[0]
    assert "changed" not in made.reasons[0]


def test_native_functions_without_digests_are_used_as_before(built: Built, tmp_path: Path) -> None:
    shutil.copytree(built.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / FILE).write_bytes(without_digests(built.folder))
    made = Service(dataclasses.replace(built, folder=tmp_path))
    assert made.is_right()
    assert made.hits == ["batch=4"]


@pytest.mark.parametrize("name", ["bucket-0.so", FILE])
@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_byte_flipped_under_an_unchanged_mtime_is_found_before_anything_is_loaded(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: float
) -> None:
    """`already present` looks at sizes and times alone, and native code with another byte ends the process."""
    shutil.copytree(built.folder, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / name).stat()
    data = bytearray((tmp_path / name).read_bytes())
    data[int(len(data) * at)] ^= 1
    (tmp_path / name).write_bytes(data)
    os.utime(tmp_path / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    loaded: list[str] = []
    monkeypatch.setattr("cachepipe.runtime.engine.load_native", loaded.append)
    made = Service(dataclasses.replace(built, folder=tmp_path))
    assert made.is_right()
    assert (made.compiled, loaded, made.hits) == (made.traced, [], [])
    assert name in made.reasons[0]


def test_a_function_whose_digest_was_left_out_is_not_loaded(built: Built, tmp_path: Path) -> None:
    facts = read_record(EngineFile, (built.folder / FILE).read_bytes(), FILE, 1 << 26)
    assert set(facts.files) == {path.name for path in built.folder.iterdir()} - {FILE}
    (tmp_path / FILE).write_bytes(sealed(dataclasses.replace(facts, files={"other.so": "0" * 64})))
    made = Service(dataclasses.replace(built, folder=tmp_path))
    assert made.compiled == made.traced
    assert "bucket-0.so: no digest in `engine.json`" in made.reasons[0]


@pytest.mark.parametrize(("field", "value"), [("format", 2), ("torch_version", "2.99.0")])
def test_native_functions_of_another_format_or_torch_are_not_used(
    built: Built, tmp_path: Path, field: str, value: Any
) -> None:
    facts = json.loads((built.folder / FILE).read_bytes())
    (tmp_path / FILE).write_text(json.dumps({**facts, field: value}))
    made = Service(dataclasses.replace(built, folder=tmp_path))
    assert made.compiled == made.traced
    assert str(value) in made.reasons[0]


def test_the_result_is_used_like_the_module_itself(service: Service) -> None:
    compiled, model = service.compiled, service.model
    assert isinstance(compiled, nn.Module)
    assert isinstance(compiled, EngineModule)
    assert compiled.config is model.config
    assert compiled._orig_mod is model
    optimized = torch.compile(model, backend="eager")
    assert list(compiled.state_dict()) == list(optimized.state_dict())
    assert [name for name, _ in compiled.named_modules()] == [name for name, _ in optimized.named_modules()]
    assert not compiled.training
    compiled.note = 5
    assert model.note == 5
    del compiled.note
    assert not hasattr(model, "note")
    assert {"config", "forward"} <= set(dir(compiled))


def test_a_hook_on_the_result_runs_as_on_torch_compiles(service: Service) -> None:
    seen: list[Any] = []
    handle = service.compiled.register_forward_hook(lambda module, args, output: seen.append(output))
    assert service.is_right()
    handle.remove()
    assert len(seen) == 1
    assert service.fallbacks == 0


def test_another_trace_goes_through_the_model_itself(service: Service) -> None:
    outer = torch.compile(lambda **inputs: service.compiled(**inputs)["y"], backend="eager", fullgraph=True)
    with calling_context(service.spec):
        inputs = service.inputs()
        torch.testing.assert_close(outer(**inputs), service.model(**inputs)["y"])


def test_positional_and_named_arguments_are_the_same_call(service: Service) -> None:
    inputs = service.inputs()
    with calling_context(service.spec):
        service.compiled(inputs["x"], inputs["extra"])
        service.compiled(inputs["x"], extra=inputs["extra"])
    assert service.fallbacks == 0


def test_both_kinds_of_no_grad_are_answered(service: Service) -> None:
    inputs = service.inputs()
    with torch.no_grad():
        found = service.compiled(**inputs)
        torch.testing.assert_close(found["y"], service.model(**inputs)["y"])
    assert service.fallbacks == 0
    assert not found["y"].is_inference()
    assert service.call()["y"].is_inference()


@pytest.mark.parametrize("told", ["nothing", "highest"])
def test_a_service_outside_the_context_is_answered_whether_it_told_torch_the_precision_it_starts_with_or_not(
    service: Service, told: str
) -> None:
    with ExitStack() as stack:
        stack.callback(set_matmul_precision("highest"))
        if told != "nothing":
            torch.set_float32_matmul_precision(told)
        with torch.inference_mode():
            service.compiled(**service.inputs())
    assert (service.fallbacks, service.reasons) == (0, [])


# what is no difference: the weights


def replaced(model: nn.Module) -> None:
    model.first.weight = model.second.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)


def data_swapped(model: nn.Module) -> None:
    model.second.bias.data = torch.randn(8)


def written(model: nn.Module) -> None:
    model.second.bias.copy_(torch.randn(8))


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
    model.first.weight.copy_(model.second.weight)


def buffer_replaced(model: nn.Module) -> None:
    model.inner.shift = torch.randn(8)


def attribute_replaced(model: nn.Module) -> None:
    model.mask = torch.tensor([0.0, 1.0] * 4)


def written_again(model: nn.Module) -> None:
    model.times, model.config.gain, model.steps[:] = 2, 3.0, [1, 2]


def copied_module(model: nn.Module) -> None:
    model.inner = copy.deepcopy(model.inner)


@pytest.mark.parametrize(
    "change",
    [replaced, data_swapped, written, loaded, buffer_replaced, attribute_replaced, written_again, copied_module],
)
def test_other_weights_are_answered_natively_and_right(service: Service, change: Callable[[nn.Module], None]) -> None:
    before = service.call()["y"]
    with torch.no_grad():
        change(service.model)
    assert service.is_right()
    assert (service.fallbacks, service.reasons) == (0, [])
    if change not in (written_again, copied_module):
        assert not torch.allclose(before, service.call()["y"])


# every change that torch's guards would see


def hook(model: nn.Module) -> None:
    model.inner.register_forward_hook(lambda module, args, output: output * 2)


def pre_hook(model: nn.Module) -> None:
    model.second.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def swapped(model: nn.Module) -> None:
    model.inner = nn.Identity().eval()


def reclassed(model: nn.Module) -> None:
    model.inner.__class__ = type("Other", (type(model.inner),), {"forward": lambda self, x: x})


def own_forward(model: nn.Module) -> None:
    model.inner.forward = types.MethodType(lambda self, x: x * 3, model.inner)


def untied(model: nn.Module) -> None:
    model.second.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)


def other_shape(model: nn.Module) -> None:
    model.mask = torch.ones(1)


class TellingLock:
    """A lock that tells before a second thread waits for it."""

    def __init__(self, lock: Any, told: threading.Event) -> None:
        self._lock, self._told, self._is_taken = lock, told, False

    def __enter__(self) -> None:
        if self._is_taken:
            self._told.set()
        self._lock.acquire()
        self._is_taken = True

    def __exit__(self, *error: object) -> None:
        self._is_taken = False
        self._lock.release()


def more_times(model: nn.Module) -> None:
    model.times += 1


@pytest.mark.parametrize(("place", "change"), [("_bind", replaced), ("differences", more_times)])
def test_a_call_never_sees_the_module_between_two_descriptions(
    service: Service, monkeypatch: pytest.MonkeyPatch, place: str, change: Callable[[nn.Module], None]
) -> None:
    """One thread stands where the new description is taken and its weights, or its verdict, are not; another one calls."""
    service.call()
    engine = service.compiled._engine
    is_between, moved = threading.Event(), threading.Event()
    owner: Any = engine if place == "_bind" else engine_module
    whole = getattr(owner, place)

    def halted(*words: Any) -> Any:
        if place == "_bind" or words[0] is engine._file.structure:
            is_between.set()
            assert moved.wait(30), "the other call neither came to the lock nor returned"
        return whole(*words)

    monkeypatch.setattr(owner, place, halted)
    monkeypatch.setattr(engine, "_lock", TellingLock(engine._lock, moved))
    with torch.no_grad():
        change(service.model)
    inputs = service.inputs()

    def call() -> Any:
        with calling_context(service.spec):
            return service.compiled(**inputs)["y"]

    def other_call() -> Any:
        assert is_between.wait(30)
        try:
            return call()
        finally:
            moved.set()

    with ThreadPoolExecutor(2) as pool:
        found = [one.result() for one in [pool.submit(call), pool.submit(other_call)]]
    with calling_context(service.spec):
        wanted = service.model(**inputs)["y"]
    for one in found:
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


def other_strides(model: nn.Module) -> None:
    model.first.weight.data = model.first.weight.data.t()


def subclassed(model: nn.Module) -> None:
    class Tracking(torch.Tensor):
        pass

    model.mask = torch.ones(8).as_subclass(Tracking)


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: setattr(m, "times", 5), "self.times: built int 2, here int 5"),
    (lambda m: setattr(m, "times", True), "self.times: built int 2, here bool True"),
    (lambda m: setattr(m, "times", torch.tensor(3)), "self.times: built int 2, here tensor int64"),
    (lambda m: setattr(m, "sizes", (9, 8)), "self.sizes"),
    (lambda m: setattr(m.config, "gain", 4.0), "self.config.gain: built float 3.0, here float 4.0"),
    (lambda m: m.config.flags.update(relu=False), "self.config.flags"),
    (lambda m: m.steps.append(3), "self.steps"),
    (lambda m: m.steps.__setitem__(0, 7), "self.steps"),
    (lambda m: setattr(m, "steps", (1, 2)), "self.steps: built list"),
    (hook, "self.inner._forward_hooks[0]: not built"),
    (pre_hook, "self.second._forward_pre_hooks[0]: not built"),
    (swapped, "self.inner: built engine_models.Inner, eval, here torch.nn.modules.linear.Identity, eval"),
    (reclassed, "self.inner: built engine_models.Inner, eval, here"),
    (own_forward, "self.inner.forward: not built, here method"),
    (untied, "self.second.weight: built the parameter at self.first.weight, here parameter"),
    (lambda m: m.train(), "self: built engine_models.Model, eval, here engine_models.Model, training"),
    (lambda m: m.dropout.train(), "self.dropout: built torch.nn.modules.dropout.Dropout, eval"),
    (lambda m: m.requires_grad_(True), "requires_grad"),
    (lambda m: m.double(), "float64"),
    (lambda m: setattr(m.second.bias, "data", torch.randn(1)), "self.second.bias"),
    (
        lambda m: setattr(m.second, "bias", None),
        "self.second.bias: built parameter float32 (8,) strides (1,) cpu, here parameter None",
    ),
    (other_shape, "self.mask: built tensor float32 (8,) strides (1,) cpu, here tensor float32 (1,)"),
    (other_strides, "self.first.weight: built parameter float32 (8, 8) strides (8, 1) cpu, here"),
    (subclassed, "Tracking"),
    (lambda m: m.register_buffer("more", torch.ones(1)), "self.more: not built, here buffer"),
]


@pytest.mark.parametrize("change", range(len(CHANGES)), ids=[text[:40] for _, text in CHANGES])
def test_a_changed_module_falls_back_and_says_what_changed(service: Service, change: int) -> None:
    function, text = CHANGES[change]
    torch.manual_seed(0)
    function(service.model)
    inputs = service.inputs()
    if service.model.first.weight.dtype == torch.float64:
        inputs = {
            "x": inputs["x"].double(),
            "extra": {"bias": inputs["extra"]["bias"], "pair": inputs["extra"]["pair"]},
        }
    else:
        inputs = {}
    torch.manual_seed(1)
    service.call(**inputs)
    torch.manual_seed(1)
    service.call(**inputs)
    assert service.fallbacks == 2
    if inputs:
        with pytest.raises(RuntimeError):  # what was built, which the changed module cannot take
            service.call()
    assert text in service.reasons[-1]


@pytest.mark.parametrize("change", range(len(CHANGES)), ids=[text[:40] for _, text in CHANGES])
def test_a_module_that_differs_at_compile_is_traced(built: Built, change: int) -> None:
    function, text = CHANGES[change]

    class Changed(Service):
        """Changes between preparation and the engine."""

    model = prepare(built.spec, build_model(built.spec))
    function(model)
    made = Changed.__new__(Changed)
    made.spec, made.model, made.hits, made.reasons, made.fallbacks = built.spec, model, [], [], 0
    compiled = engine_model(model, built.folder, "cpu", made, lambda: made.traced)
    assert compiled == made.traced
    assert text in made.reasons[0]


def test_a_change_that_is_taken_back_is_answered_natively_again(service: Service) -> None:
    service.model.times = 5
    assert service.is_right()
    service.model.times = 2
    assert service.is_right()
    assert service.fallbacks == 1


CODE: list[tuple[str, str, Any]] = [
    ("engine_models", "SCALE", 3.0),
    ("engine_models", "TABLE", {"offset": 1.5}),
    ("engine_models", "scaled", lambda x: x),
    ("engine_models.Inner", "bias", 9.0),
    ("engine_models.Inner", "forward", lambda self, x: x),
    ("engine_models.Config", "gain", property(lambda self: 1.0, lambda self, value: None)),
    ("torch.nn.Linear", "forward", lambda self, x: x),
]


@pytest.mark.parametrize(("owner", "name", "value"), CODE, ids=[f"{owner}.{name}" for owner, name, _ in CODE])
def test_changed_code_and_globals_fall_back(
    service: Service, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, value: Any
) -> None:
    module, _, cls = owner.partition(".") if owner != "torch.nn.Linear" else ("torch.nn", "", "Linear")
    place = getattr(sys.modules[module], cls) if cls else sys.modules[module]
    monkeypatch.setattr(place, name, value, raising=False)
    assert service.is_right()
    assert service.fallbacks == 1


def test_a_changed_dict_among_the_globals_falls_back(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["engine_models"].TABLE, "offset", 4.0)
    assert service.is_right()
    assert "global engine_models.TABLE: built dict" in service.reasons[0]


def test_what_a_service_writes_among_the_globals_of_the_models_file_is_no_difference(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = service.compiled._engine._structure
    monkeypatch.setattr(sys.modules["engine_models"], "REQUESTS", 1, raising=False)
    assert service.is_right()
    assert service.fallbacks == 0
    assert service.compiled._engine._structure is described


def test_a_closure_that_holds_another_value_falls_back(service: Service, built: Built) -> None:
    wrapper = type(service.model.inner).forward
    names = wrapper.__code__.co_freevars
    cell = wrapper.__closure__[names.index("power")]
    before, cell.cell_contents = cell.cell_contents, 3
    try:
        made = Service(built)
        assert made.compiled == made.traced
        assert "class engine_models.Inner" in made.reasons[0]
    finally:
        cell.cell_contents = before


def test_a_global_hook_falls_back(service: Service) -> None:
    with warnings.catch_warnings():
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
        try:
            assert service.is_right()
        finally:
            handle.remove()
    assert "global_forward_hooks[0]: not built" in service.reasons[0]
    assert service.is_right()
    assert service.fallbacks == 1


# torch's state around the call


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Setting:
    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> None:
        self.read, self.write, self.value = read, write, value

    def __enter__(self) -> None:
        self.before = self.read()
        self.write(self.value)

    def __exit__(self, *error: Any) -> None:
        self.write(self.before)


@contextmanager
def precision(told: str) -> Iterator[None]:
    put_back = set_matmul_precision(told)
    yield
    put_back()


STATES: list[tuple[Callable[[], Any], str]] = [
    (torch.enable_grad, "grad mode: built no_grad, here grad"),
    (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "autocast: built off, here bfloat16"),
    (
        lambda: precision("medium"),
        "matmul precision: built highest, here medium",
    ),
    (
        lambda: Setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        "deterministic algorithms: built False, here True",
    ),
    (lambda: Setting(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1), "threads"),
    (lambda: Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64), "default dtype"),
    (lambda: torch.device("cpu"), "torch-function or dispatch mode"),
    (Mode, "torch-function or dispatch mode"),
    (Dispatch, "torch-function or dispatch mode"),
]


@pytest.mark.parametrize(("state", "text"), STATES, ids=[text[:30] + str(i) for i, (_, text) in enumerate(STATES)])
def test_another_state_of_torch_falls_back_and_the_old_one_is_native_again(
    service: Service, state: Callable[[], Any], text: str
) -> None:
    inputs = service.inputs()
    with torch.no_grad(), state():
        service.compiled(**inputs)
        service.compiled(**inputs)
    assert service.fallbacks == 2
    assert len(service.reasons) == 1
    assert text in service.reasons[0]
    assert service.is_right()
    assert service.fallbacks == 2


# the arguments


def argument(name: str) -> Any:
    x = torch.randn(4, 8)
    with torch.inference_mode(False):
        found = {
            "other dtype": x.double(),
            "not contiguous": torch.randn(8, 4).t(),
            "other shape": torch.randn(4, 8, 1),
            "no batch": torch.randn(8),
            "parameter": nn.Parameter(x),
            "negated": torch.complex(x, x).conj().imag,
            "sparse": x.to_sparse(),
            "numpy": x.numpy(),
            "none": None,
            "number": 2.0,
        }
    return found[name]


@pytest.mark.parametrize(
    "name",
    [
        "other dtype",
        "not contiguous",
        "other shape",
        "no batch",
        "parameter",
        "negated",
        "sparse",
        "numpy",
        "none",
        "number",
    ],
)
def test_an_argument_of_another_form_falls_back(service: Service, name: str) -> None:
    try:
        service.call(x=argument(name))
    except (TypeError, RuntimeError, AttributeError):
        pass  # eager's own answer to what it cannot take
    assert service.fallbacks == 1
    assert len(service.reasons) == 1


def test_a_subclass_of_tensor_falls_back(service: Service) -> None:
    class Tracking(torch.Tensor):
        pass

    service.call(x=torch.randn(4, 8).as_subclass(Tracking))
    assert "an argument is a" in service.reasons[0]
    assert service.fallbacks == 1


def test_a_tensor_on_another_device_falls_back(service: Service) -> None:
    with pytest.raises(RuntimeError):
        service.call(x=torch.empty(4, 8, device="meta"))
    assert service.fallbacks == 1


def test_another_constant_inside_of_an_argument_falls_back(service: Service) -> None:
    extra = service.inputs()["extra"]
    for constant in (3, 2.0, True):
        assert service.is_right(extra={**extra, "pair": [extra["pair"][0], constant]})
    assert service.fallbacks == 3


def test_other_nesting_falls_back(service: Service) -> None:
    extra = service.inputs()["extra"]
    assert service.is_right(extra={**extra, "pair": tuple(extra["pair"])})
    assert service.is_right(extra={**extra, "more": 1})
    assert service.fallbacks == 2


def test_an_extra_argument_falls_back_even_with_its_default(service: Service) -> None:
    assert service.is_right(double=True)
    assert service.is_right(double=False)
    assert service.fallbacks == 2
    with pytest.raises(TypeError):
        service.call(unknown=1)
    with pytest.raises(TypeError), calling_context(service.spec):
        service.compiled(service.inputs()["x"], **service.inputs())


def test_a_function_transform_falls_back(service: Service) -> None:
    inputs = service.inputs()
    with calling_context(service.spec):
        found = torch.func.vmap(lambda x: service.compiled(x, inputs["extra"])["y"])(torch.stack([inputs["x"]] * 2))
        torch.testing.assert_close(found[0], service.model(**inputs)["y"])
    assert service.fallbacks == 1


def test_weights_that_a_function_transform_wraps_fall_back(service: Service) -> None:
    inputs = service.inputs()
    weights = {name: torch.stack([value, value * 2]) for name, value in service.model.named_parameters()}

    def call(given: dict[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(service.compiled, given, (), inputs)["y"]
        return output

    with torch.no_grad():
        found = torch.func.vmap(call)({f"_orig_mod.{name}": value for name, value in weights.items()})
        torch.testing.assert_close(found[0], service.model(**inputs)["y"])
    assert service.fallbacks == 1


def test_weights_of_a_functional_call_are_used_natively(service: Service) -> None:
    inputs, before = service.inputs(), service.call()["y"]
    given = {f"_orig_mod.{name}": value * 2 for name, value in service.model.named_parameters()}
    with torch.no_grad():
        found = torch.func.functional_call(service.compiled, given, (), inputs)["y"]
        bare = {name.removeprefix("_orig_mod."): value for name, value in given.items()}
        torch.testing.assert_close(found, torch.func.functional_call(service.model, bare, (), inputs)["y"])
    assert not torch.equal(found, before)
    torch.testing.assert_close(service.call()["y"], before)
    assert service.fallbacks == 0


def test_reasons_are_said_once_and_not_without_end(service: Service) -> None:
    for number in range(40):
        service.model.times = 10 + number % 30
        service.call()
    assert service.fallbacks == 40
    assert len(service.reasons) == 16


def test_calls_from_many_threads_are_right_while_weights_are_replaced(service: Service) -> None:
    def one(number: int) -> bool:
        if number % 5 == 0:
            service.model.inner.shift = service.model.inner.shift.clone()
        return service.is_right()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(60)))
    assert service.fallbacks == 0


def other_strides(model: nn.Module) -> None:
    """A change in place: no dict of the module sees it."""
    weight = next(parameter for parameter in model.parameters() if parameter.dim() == 2 and min(parameter.shape) > 1)
    weight.data = weight.data.t().contiguous().t()


def test_a_tensor_that_changes_in_place_before_the_first_call_is_seen(built: Built) -> None:
    made = Service(built)
    other_strides(made.model)
    assert made.is_right() and made.fallbacks == 1 and made.hits == []


def test_a_tensor_that_changes_in_place_before_another_modes_first_call_is_seen(service: Service) -> None:
    other_strides(service.model)
    with torch.no_grad():
        answer = service.compiled(**service.inputs())
        assert torch.allclose(answer["y"], service.model(**service.inputs())["y"])
    assert service.fallbacks == 1


def test_modes_that_take_turns_are_described_once_each(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = service.compiled
    with torch.no_grad():
        engine(**service.inputs())
    described = []
    monkeypatch.setattr("cachepipe.runtime.engine.describe", lambda *words: described.append(words))
    for _ in range(3):
        service.call()
        with torch.no_grad():
            engine(**service.inputs())
    assert described == [] and service.fallbacks == 0


def test_two_builds_of_the_same_code_describe_it_alike(built: Built) -> None:
    """In another process: digests hold no address, no line number and no order of sets."""
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import engine_models\n"
        "from cachepipe.adapters.torch_structure import describe\n"
        "model = engine_models.model().eval().requires_grad_(False)\n"
        "print(json.dumps(describe(model, json.loads(sys.argv[2])).texts))"
    )
    file = read_record(EngineFile, (built.folder / FILE).read_bytes(), FILE, 1 << 26)
    words = [sys.executable, "-c", code, str(MODELS), json.dumps(file.code)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    found = json.loads(done.stdout)
    assert {place: text for place, text in found.items() if place not in file.unsteady} == dict(file.structure)


def test_torch_compile_of_the_same_entry_still_works_beside(built: Built) -> None:
    spec = dataclasses.replace(built.spec, engine="jit")
    assert callable(compile_model(spec, prepare_any(spec), is_served=True))
