"""What only a GPU can show: built, restored here, elsewhere and by another user, nothing tuned or compiled again; nine minutes on an H200."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from cachepipe.adapters.gpu import visible_gpus
from cachepipe.adapters.gpu_watch import open_watch
from cachepipe.adapters.progress import Lines
from cachepipe.adapters.workdir import read_evidence
from cachepipe.domain.evidence import EntryEvidence, Work
from cachepipe.workflows.build import BuildRequest, BuildSummary, build
from cachepipe.workflows.verify import VerifyRequest, verify


def has_gpu() -> bool:
    gpus = visible_gpus(os.environ)
    return gpus is not None and bool(gpus.visible)


pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not has_gpu(), reason="no GPU is visible")]

MODEL = """
import torch

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.RMSNorm(width)  # a reduction that is not persistent
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, input):
        return input + self.down(torch.nn.functional.gelu(self.up(self.norm(input))))

def blocks(width=2048):
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(width), Block(width))
"""
MANIFEST = """
version: 1
name: gpu
cache_root: {root}/cache
store: file://{root}/store
targets: [{{device: cuda}}]
models:
  - name: blocks
    factory: gpu_model:blocks
    dtypes: [bfloat16]
    modes: [{modes}]
    inputs: {{input: {{shape: [batch, 2048]}}}}
    shape_buckets: [{{batch: 512}}, {{batch: 64}}]
    tolerance: {{rtol: 0.1, atol: 0.1}}
gates: {{min_speedup: 1.0}}
"""
MODES = ("max-autotune", "max-autotune-no-cudagraphs", "default")
"""The first two tune the same kernels, each for itself: one release holds one choice of each."""
NOBODY = 65534


class Silence:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@dataclasses.dataclass
class Built:
    root: Path
    manifest: Path
    summary: BuildSummary

    def evidence(self, mode: str, step: str) -> EntryEvidence:
        found = read_evidence(self.root / "report" / f"blocks_bfloat16_{mode}.cuda.{step}.json")
        assert found is not None
        return found


def asked_modes(items: Iterable[pytest.Item]) -> list[str]:
    """Returns the modes that the chosen tests are about, all for a test that names none: each costs minutes on the GPU."""
    own = [item for item in items if isinstance(item, pytest.Function) and "built" in item.fixturenames]
    asked = {
        item.callspec.params["mode"] if hasattr(item, "callspec") else None
        for item in own
        if item.path == Path(__file__)
    }
    return [mode for mode in MODES if None in asked or mode in asked]


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("gpu")
    (root / "gpu_model.py").write_text(MODEL)
    manifest = root / "manifest.yaml"
    manifest.write_text(MANIFEST.format(root=root, modes=", ".join(asked_modes(request.session.items))))
    asked = BuildRequest(manifest, report=root / "report", allows_noisy=True)
    progress = Lines(Silence(), lambda: 0.0)  # type: ignore[arg-type]
    (summary,) = build(asked, progress, datetime.now(timezone.utc))
    return Built(root, manifest, summary)


@pytest.mark.parametrize("mode", MODES)
def test_a_restored_start_does_no_work(built: Built, mode: str) -> None:
    work = built.evidence(mode, "prove").work
    assert (work.benchmarks, work.tuning_runs, work.compiles, work.new_files) == (0, 0, 0, 0)
    assert built.evidence(mode, "tune").work.triton_compiles > 0


@pytest.mark.parametrize("mode", MODES)
def test_cuda_graphs_are_recorded_at_every_start_and_counted_apart(built: Built, mode: str) -> None:
    assert (built.evidence(mode, "prove").work.graph_captures > 0) == (mode == "max-autotune")


def test_at_another_path_it_does_no_work_either_and_nothing_is_written_at_the_builders(built: Built) -> None:
    request = VerifyRequest(built.manifest, cache_root=str(built.root / "elsewhere"), hides_compiler=True)
    (found,) = verify(request, Lines(Silence(), lambda: 0.0), datetime.now(timezone.utc))  # type: ignore[arg-type]
    assert found.violations == ()
    for row in found.shape_buckets:
        assert dataclasses.replace(row.work, compiler_queries=0, graph_captures=0, worker_kernels=0) == Work()
    assert not (built.root / "cache" / "gpu").exists()


SERVICE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import cachepipe
import gpu_model
entry = cachepipe.entry("blocks", mode=sys.argv[2])
model = entry.compile(gpu_model.blocks())
with entry.context():
    entry.warmup(model)
cachepipe.ready()
imported = [name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules]
print(json.dumps({"imported": imported, "report": cachepipe.report()}))
"""


@pytest.fixture
def others_home(built: Built) -> Iterator[Path]:
    """A folder of another user with a copy of the store, outside of pytest's own folders, which only their owner may enter."""
    home = Path(tempfile.mkdtemp(prefix="cachepipe-home-"))
    shutil.copytree(built.root / "store", home / "store")
    shutil.copy(built.root / "gpu_model.py", home)
    for path in (home, *home.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    yield home
    shutil.rmtree(home)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", MODES)
def test_another_user_at_a_path_of_his_own_does_no_work(others_home: Path, mode: str) -> None:
    words = [sys.executable, "-m", "cachepipe", "restore", f"file://{others_home}/store", "--name", "gpu"]
    words += ["--channel", "candidate", "--dest", str(others_home / "cache"), "--strict", "--"]
    words += [sys.executable, "-c", SERVICE, str(others_home), mode]
    ran = subprocess.run(
        words,
        env={**os.environ, "HOME": str(others_home)},
        cwd="/",
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)["report"]
    assert found["attached"] and found["hits"] > 0 and found["misses"] == 0, found["layers"]
    for work in ("benchmarks", "tuning_runs", "triton_compiles", "native_builds", "late"):
        assert found[work] == 0, (work, found[work])


@pytest.mark.parametrize("mode", MODES)
def test_the_gpu_was_watched_while_it_tuned_and_latencies_are_in_the_statement(built: Built, mode: str) -> None:
    from cachepipe.adapters.store import open_store
    from cachepipe.workflows.fetch import resolve_ref

    statement = resolve_ref(open_store(f"file://{built.root}/store"), "gpu@candidate").statement
    (record,) = (record for record in statement.entries if record.spec.mode == mode)
    facts = record.tuning["gpu"]["tune"]
    assert facts["samples"] > 4 and facts["driver"] and facts["temperature_c"][0] > 0, json.dumps(facts)
    assert [row["calls"] for row in record.tuning["latency"]] == [200, 200]
    assert statement.variables["TRITON_PTXAS_PATH"].endswith("/bin/ptxas")


def test_a_look_at_the_gpu_tells_clocks_and_heat() -> None:
    with open_watch(os.environ) as watch:
        assert watch is not None
        sample = watch.sample()
    assert sample.sm_mhz > 0 and sample.temperature_c > 0 and sample.power_w > 0


TRITON_KEY = """
import sys, time
from cachepipe.runtime import backports
if sys.argv[1] == "quick":
    backports.apply("/restored", "2.11.0")
import triton.runtime.autotuner as asks
begin = time.perf_counter()
print(asks.triton_key(), time.perf_counter() - begin)
"""


def test_the_digest_of_tritons_library_from_its_record_is_the_one_of_its_bytes() -> None:
    answers = [
        subprocess.run(
            [sys.executable, "-c", TRITON_KEY, how], capture_output=True, text=True, check=True
        ).stdout.split()
        for how in ("whole", "quick")
    ]
    (whole, whole_s), (quick, quick_s) = answers
    assert whole == quick and len(whole) > 1000
    assert float(quick_s) < float(whole_s)
