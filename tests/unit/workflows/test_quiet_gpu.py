"""Tuning on a GPU that is not quiet is refused, in words; what was seen goes into the statement's facts."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachepipe.adapters.workdir import EntryDir
from cachepipe.domain.evidence import EntryEvidence, Work
from cachepipe.errors import BuildError
from cachepipe.workflows.jobs import Shop
from cachepipe.workflows.quiet_gpu import gpu_facts, tuned_quietly, turn
from tests.support.nvml import Binding
from tests.unit.domain.test_gates import spec

GPU = spec(device="cuda")


class Host(Binding):
    """One quiet H200; tests change what it tells."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.throttle = 0

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: object) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: object) -> int:  # noqa: N802
        return self.throttle


class Talk:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    host = Host()
    monkeypatch.setitem(sys.modules, "pynvml", host)  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("cachepipe.adapters.gpu_watch.INTERVAL_S", 0.001)
    monkeypatch.setattr("cachepipe.adapters.gpu_watch.SETTLING_S", 0.0)
    monkeypatch.setattr("cachepipe.adapters.gpu_watch.GpuWatch.strangers_before.__defaults__", (0.0,))
    monkeypatch.setattr("cachepipe.adapters.gpu_watch.GpuWatch.sampling.__wrapped__.__defaults__", (0.001,))
    return host


@pytest.fixture
def entry(tmp_path: Path) -> EntryDir:
    return EntryDir(tmp_path)


def shop(talk: Talk, **changes: Any) -> Shop:
    return replace(Shop(None, None, (), talk), **changes)  # type: ignore[arg-type]


def evidence(**work: int) -> EntryEvidence:
    return EntryEvidence("mlp/float32/default", "tune", "2.11.0", (), (), Work(**work), (), 0.0, 0.0, 0.0, {})


def tuning(host: Host, change: Callable[[], None] = lambda: None, **work: int) -> Callable[[], EntryEvidence]:
    """A step that runs until several samples were taken."""

    def tune() -> EntryEvidence:
        change()
        with TAKEN:
            wanted = len(SAMPLES) + 5
            assert TAKEN.wait_for(lambda: len(SAMPLES) >= wanted, 60)
        return evidence(**work)

    return tune


SAMPLES: list[int] = []
TAKEN = threading.Condition()


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from cachepipe.adapters.gpu_watch import GpuWatch

    sample = GpuWatch.sample

    def counted(self: GpuWatch) -> Any:
        with TAKEN:
            SAMPLES.append(1)
            TAKEN.notify_all()
        return sample(self)

    monkeypatch.setattr(GpuWatch, "sample", counted)


def test_a_quiet_gpu_tunes_and_its_facts_are_kept(host: Host, entry: EntryDir) -> None:
    talk = Talk()
    assert tuned_quietly(shop(talk), GPU, "tune", entry, tuning(host, benchmarks=9)).work.benchmarks == 9
    facts = gpu_facts(entry, rounds=1)["tune"]
    assert facts["driver"] == "580.65.06" and facts["noises"] == [] and facts["sm_mhz"] == [1980, 1980, 1980]
    assert talk.lines == []
    json.dumps(facts, allow_nan=False)


def test_a_process_that_comes_while_it_tunes_refuses_the_step_and_says_what_to_do(host: Host, entry: EntryDir) -> None:
    def comes() -> None:
        host.pids = [900_001, 900_002]

    with pytest.raises(BuildError) as caught:
        tuned_quietly(shop(Talk()), GPU, "tune", entry, tuning(host, comes, benchmarks=9))
    assert "the GPU is not quiet enough to tune: 1 other process used it" in str(caught.value)
    assert "`--allow-noisy`" in caught.value.hint and "nvidia-smi" in caught.value.hint


def test_a_process_that_was_there_before_refuses_at_once(host: Host, entry: EntryDir) -> None:
    host.pids = [900_001]
    with pytest.raises(BuildError, match="1 other process used it before"):
        tuned_quietly(shop(Talk()), GPU, "tune", entry, lambda: pytest.fail("it was tuned"))


def test_allowed_noise_is_a_warning_and_stands_in_the_facts(host: Host, entry: EntryDir) -> None:
    host.throttle, talk = 0x40, Talk()
    tuned_quietly(shop(talk, allows_noisy=True), GPU, "tune", entry, tuning(host, benchmarks=9))
    assert "warning" in talk.lines[0] and "too hot (hardware)" in talk.lines[0]
    assert gpu_facts(entry, 0)["tune"]["noises"] == ["throttled: too hot (hardware), up to 52 °C"]


def test_noise_disturbs_no_step_that_tuned_nothing(host: Host, entry: EntryDir) -> None:
    host.throttle = 0x40
    assert tuned_quietly(shop(Talk()), GPU, "settle-1", entry, tuning(host), is_alone=False).work == Work()


def test_a_shared_step_that_tuned_after_all_beside_others_is_done_again_alone(host: Host, entry: EntryDir) -> None:
    calls: list[int] = []

    def tune() -> EntryEvidence:
        calls.append(1)
        host.pids = [900_001, 900_002] if len(calls) == 1 else []
        tuning(host)()
        host.pids = []
        return evidence(benchmarks=2)

    found = tuned_quietly(shop(Talk()), GPU, "settle-1", entry, tune, is_alone=False)
    assert len(calls) == 2 and found.work.benchmarks == 2
    assert gpu_facts(entry, 1)["settle-1"]["noises"] == []


def test_without_nvml_a_note_says_that_nobody_knows(host: Host, entry: EntryDir) -> None:
    host.is_loaded, talk = False, Talk()
    tuned_quietly(shop(talk), GPU, "tune", entry, lambda: evidence(benchmarks=1))
    assert "NVML does not answer" in talk.lines[0]
    assert gpu_facts(entry, 0) == {}


def test_on_a_cpu_nothing_is_asked(host: Host, entry: EntryDir) -> None:
    host.pids = [1, 2, 3]
    tuned_quietly(shop(Talk()), spec(), "tune", entry, lambda: evidence(benchmarks=1))
    with turn(shop(Talk()), spec(), is_alone=True), turn(shop(Talk()), spec(), is_alone=True):
        pass


def test_a_step_that_tuned_without_one_sample_says_that_nobody_knows(host: Host, entry: EntryDir) -> None:
    def lost(_handle: object) -> list[Any]:
        raise AttributeError("of another version of the binding")

    host.nvmlDeviceGetComputeRunningProcesses = lost  # type: ignore[method-assign]
    for allows_noisy in (False, True):
        talk = Talk()
        tuned_quietly(shop(talk, allows_noisy=allows_noisy), GPU, "settle-1", entry, tuning(host, benchmarks=9))
        assert talk.lines == [
            "note: mlp/float32/default: settle-1: NVML gave no sample: nobody knows whether the GPU is quiet"
        ]
    assert gpu_facts(entry, rounds=1)["settle-1"]["samples"] == 0
