"""Native functions on a GPU: built, restored elsewhere without a compiler, replayed from CUDA graphs, right after every change."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from cachepipe.adapters.progress import Lines
from cachepipe.domain.evidence import Work, layer_counts
from cachepipe.workflows.build import BuildRequest, build
from cachepipe.workflows.verify import VerifyRequest, verify
from tests.gpu.test_gpu_release import MANIFEST, MODEL, SERVICE, Built, Silence, has_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not has_gpu(), reason="no GPU is visible")]

NATIVE = MANIFEST.replace("    inputs:", "    compile: {{engine: aot}}\n    inputs:")
MODES = ("max-autotune", "default")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("gpu-engine")
    (root / "gpu_model.py").write_text(MODEL)
    manifest = root / "manifest.yaml"
    manifest.write_text(NATIVE.format(root=root, modes=", ".join(MODES)))
    progress = Lines(Silence(), lambda: 0.0)  # type: ignore[arg-type]
    (summary,) = build(
        BuildRequest(manifest, report=root / "report", allows_noisy=True), progress, datetime.now(timezone.utc)
    )
    return Built(root, manifest, summary)


@pytest.mark.parametrize("mode", MODES)
def test_native_functions_answer_every_shape_bucket_and_do_no_work(native: Built, mode: str) -> None:
    prove = native.evidence(mode, "prove")
    assert layer_counts(prove) == {"engine": {"hit": 2, "miss": 0, "bypass": 0}}
    assert [bucket.graphs for bucket in prove.shape_buckets] == [0, 0]
    assert (prove.work.benchmarks, prove.work.tuning_runs, prove.work.compiles, prove.work.new_files) == (0, 0, 0, 0)
    assert prove.work.graph_captures == (2 if mode == "max-autotune" else 0)


def test_elsewhere_without_a_compiler_nothing_is_compiled_either(native: Built) -> None:
    request = VerifyRequest(native.manifest, cache_root=str(native.root / "elsewhere"), hides_compiler=True)
    (found,) = verify(request, Lines(Silence(), lambda: 0.0), datetime.now(timezone.utc))  # type: ignore[arg-type]
    assert found.violations == ()
    for row in found.shape_buckets:
        assert dataclasses.replace(row.work, graph_captures=0) == Work()


@pytest.mark.parametrize("mode", MODES)
def test_a_service_starts_without_dynamo_inductor_and_triton(native: Built, mode: str) -> None:
    words = [sys.executable, "-m", "cachepipe", "restore", f"file://{native.root}/store", "--name", "gpu"]
    words += ["--channel", "candidate", "--dest", str(native.root / f"service-{mode}"), "--strict", "--"]
    words += [sys.executable, "-c", SERVICE, str(native.root), mode]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["imported"] == []
    assert found["report"]["layers"] == {"engine": {"hit": 2, "miss": 0, "bypass": 0}}
    assert found["report"]["graphs"] == 0


# in one process: what a service may do between two calls


class Service:
    """The restored functions of one mode bound to a model in this process."""

    def __init__(self, native: Built, mode: str) -> None:
        from cachepipe.adapters.store import open_store
        from cachepipe.domain.engine import engine_folder, replays_graphs
        from cachepipe.runtime.calling import build_model, prepare
        from cachepipe.runtime.engine_module import engine_model
        from cachepipe.workflows.fetch import resolve_ref

        statement = resolve_ref(open_store(f"file://{native.root}/store"), "gpu@candidate").statement
        (record,) = (record for record in statement.entries if record.spec.mode == mode)
        self.spec = record.spec
        self.model: Any = prepare(self.spec, build_model(self.spec))
        self.captured: list[str] = []
        self.reasons: list[str] = []
        folder = native.root / "service-max-autotune" / engine_folder(record.key)
        replays = replays_graphs("cuda", mode, {})
        self.compiled = engine_model(self.model, folder, "cuda", self, lambda: self.model, replays)

    def on_engine(self, label: str, is_hit: bool, reason: str) -> None:
        if not is_hit:
            self.reasons.append(reason)

    def on_capture(self, label: str, reason: str) -> None:
        (self.reasons if reason else self.captured).append(reason or label)

    def is_right(self, value: Any) -> bool:
        import torch

        from cachepipe.runtime.calling import calling_context

        with calling_context(self.spec):
            return torch.allclose(self.compiled(value), self.model(value), rtol=0.1, atol=0.1)


@pytest.fixture(params=MODES)
def service(native: Built, request: pytest.FixtureRequest) -> Iterator[Service]:
    sys.path.insert(0, str(native.root))
    folder = native.root / "service-max-autotune"
    if not folder.exists():
        words = [sys.executable, "-m", "cachepipe", "restore", f"file://{native.root}/store", "--name", "gpu"]
        subprocess.run([*words, "--channel", "candidate", "--dest", str(folder), "--strict", "--", "true"], check=True)
    yield Service(native, request.param)
    sys.path.remove(str(native.root))


def batch(size: int, seed: int = 1) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, 2048, device="cuda", dtype=torch.bfloat16, generator=generator)


def moved(model: Any) -> None:
    import torch

    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) / 64


def written(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


@pytest.mark.parametrize("change", [moved, written])
def test_other_weights_give_other_and_right_outputs(service: Service, change: Callable[[Any], None]) -> None:
    import torch

    for seed in range(4):
        assert service.is_right(batch(64, seed))
    with torch.no_grad():
        change(service.model)
    for seed in range(4):
        assert service.is_right(batch(64, seed))
    assert service.reasons == []
    recordings = {"default": 0, "max-autotune": 2 if change is moved else 1}
    assert len(service.captured) == recordings[service.spec.mode]


def test_shape_buckets_in_turns_and_kept_outputs_stay_right(service: Service) -> None:
    import torch

    from cachepipe.runtime.calling import calling_context

    values = [batch(size, seed) for seed in range(4) for size in (512, 64)]
    with calling_context(service.spec):
        found = [service.compiled(value) for value in values]
        for value, output in zip(values, found, strict=True):
            torch.testing.assert_close(output, service.model(value), rtol=0.1, atol=0.1)
    assert service.reasons == []


def test_threads_on_streams_of_their_own_get_their_own_outputs(service: Service) -> None:
    import torch

    from cachepipe.runtime.calling import calling_context

    wrong: list[int] = []
    with calling_context(service.spec):
        for _ in range(3):
            service.compiled(batch(64))

    def work(seed: int) -> None:
        with calling_context(service.spec), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            value = batch(64, seed)
            wanted = service.model(value)
            for _ in range(50):
                if not torch.allclose(service.compiled(value), wanted, rtol=0.1, atol=0.1):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and service.reasons == []


def test_an_input_that_is_not_aligned_is_answered_right(service: Service) -> None:
    whole = batch(65).flatten()
    for _ in range(4):
        assert service.is_right(whole[1 : 1 + 64 * 2048].view(64, 2048))
    assert service.reasons == []


def test_a_callers_own_recording_goes_through_the_trace(service: Service) -> None:
    import torch

    from cachepipe.runtime.calling import calling_context

    value = batch(64)
    with calling_context(service.spec):
        for _ in range(3):
            service.compiled(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = service.compiled(value)
        graph.replay()
        torch.testing.assert_close(output, service.model(value), rtol=0.1, atol=0.1)
    assert service.reasons == ["the current stream is recorded as a CUDA graph"]


def test_the_shared_object_names_no_file_of_a_kernel(native: Built) -> None:
    found = list(Path(native.root / "service-default").rglob("bucket-*.so"))
    assert len(found) == 4
    assert all(b".cubin" not in path.read_bytes() for path in found)
