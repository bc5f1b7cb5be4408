"""Field cases of evidence that need no compile."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from cachepipe.domain.evidence import TunedKernel, Work, WorkItem
from cachepipe.domain.fingerprint import Fingerprint, describe, differences
from cachepipe.domain.gates import GateLimits, judge
from cachepipe.domain.index import IndexRow, select
from cachepipe.domain.record import from_json, to_json
from cachepipe.errors import FingerprintMismatchError, MissError
from tests.support.artifacts import CUDA_PARTS, fingerprint_of, parts_of
from tests.support.evidence_files import ENTRIES, WARM, evidence
from tests.support.jobs import spec_of
from tests.support.restoring import command, publish_release, run_restore


def test_case_a8_one_letter_of_the_gpus_name_refuses_before_any_download_and_is_no_miss(tmp_path: Path) -> None:
    row = publish_release(tmp_path).row
    other = dataclasses.replace(row, device="cuda", fingerprint=parts_of(CUDA_PARTS, gpu_name="NVIDIA H20O"))
    assert isinstance(from_json(IndexRow, to_json(other), "row"), IndexRow)
    with pytest.raises(FingerprintMismatchError) as caught:
        select([other], fingerprint_of(CUDA_PARTS), "demo@stable")
    assert "gpu_name: wanted NVIDIA H20O, found NVIDIA H200" in str(caught.value)
    assert caught.value.exit_code == 19 != MissError.exit_code


def test_case_a8_a_machine_without_a_gpu_is_told_what_an_artifact_wants() -> None:
    found = Fingerprint(tuple(part for part in parts_of(CUDA_PARTS) if not part.name.startswith("gpu")))
    text = " ".join(map(describe, differences(fingerprint_of(CUDA_PARTS), found)))
    assert "gpu_name: wanted NVIDIA H200, found none" in text


def test_case_c16_the_service_starts_after_the_restores_one_line_and_finds_the_folder_whole(tmp_path: Path) -> None:
    published = publish_release(tmp_path)
    code = (
        "import json, os, sys\n"
        "marker = os.path.join(os.environ['CACHEPIPE_ROOT'], '.cachepipe', 'marker.json')\n"
        "count = len(json.load(open(marker))['files'])\n"
        "sys.stderr.write(f'service began with {count} files\\n')\n"
    )
    words = (published.store.url, "--name", "demo", "--dest", str(tmp_path / "dest" / "demo"))
    ran = run_restore(tmp_path, *words, *command((sys.executable, "-c", code)))
    lines = [line for line in ran.err.splitlines() if line.startswith(("cachepipe restore", "service began"))]
    assert [line.split()[0] for line in lines] == ["cachepipe", "service"], ran.err
    assert "outcome=restored" in lines[0] and int(lines[1].split()[3]) >= len(published.files)


def test_case_h1_tuning_on_a_full_hit_is_a_refusal_that_names_the_kernel() -> None:
    spec = spec_of("mm_product", tuple({"batch": size} for size in (1, 8)))
    restored = evidence(ENTRIES[0], "verify", WARM)
    assert all(lookup.outcome == "hit" for lookup in restored.lookups)
    items = (
        WorkItem("benchmarks", "triton_red_fused_3", "0/0", "-", 46),
        WorkItem("triton_compiles", "triton_poi_1", "0/0", "-"),
    )
    again = dataclasses.replace(restored, work=Work(benchmarks=46, triton_compiles=1), work_items=items)
    told = "\n".join(judge(GateLimits(), spec, again, ()))
    assert "max_tuning_runs: limit 0, found 46 (triton_red_fused_3)" in told
    assert "max_compiles: limit 0, found 1 (triton_poi_1)" in told
    clean = "\n".join(judge(GateLimits(), spec, restored, ()))
    assert "max_tuning_runs" not in clean and "max_compiles" not in clean


def test_a_search_gains_what_its_baseline_cost_more() -> None:
    kernel = TunedKernel("mm", "a", 0.5, "b", 1.0, 3)
    assert kernel.gain == 2.0 and dataclasses.replace(kernel, best_ms=0.0).gain == 1.0
