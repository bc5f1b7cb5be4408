"""Sampling a GPU while something runs on it, on boards told by a double of the NVML binding."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from cachepipe.adapters.gpu_watch import GpuWatch, open_watch
from tests.support.nvml import Binding


class Running(Binding):
    """Tells which processes use the first board."""

    def __init__(self, *pids: int) -> None:
        self.pids = list(pids)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.pids]


def watch_of(nvml: Binding) -> GpuWatch:
    return GpuWatch(nvml, 0, "580.65.06")


def test_a_sample_holds_load_clocks_heat_power_and_throttling() -> None:
    sample = watch_of(Running()).sample()
    assert (sample.busy_percent, sample.sm_mhz, sample.memory_mhz) == (97, 1980, 3201)
    assert (sample.temperature_c, sample.power_w, sample.throttle, sample.strangers) == (52, 412.5, 4, 0)


def test_our_own_descendants_are_no_strangers() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert watch_of(Running(child.pid)).sample().strangers == 0
        others = {1, os.getppid()} - {os.getpid()}  # of a process that outlived its starter they are the same
        assert watch_of(Running(child.pid, *others)).sample().strangers == len(others)
        child.communicate(b"\n")


def test_a_containers_foreign_numbers_count_from_the_second_on() -> None:
    assert watch_of(Running(900_001)).sample().strangers == 0
    assert watch_of(Running(900_001, 900_002)).sample().strangers == 1


def test_before_ours_starts_every_process_is_a_stranger_unless_it_ends_soon() -> None:
    assert watch_of(Running(900_001)).strangers_before(patience_s=0.0) == 1
    assert watch_of(Running()).strangers_before() == 0
    ending = Running(900_001)
    asked = []

    def processes(_handle: int) -> list[Any]:
        asked.append(1)
        return [SimpleNamespace(pid=900_001)] if len(asked) == 1 else []

    ending.nvmlDeviceGetComputeRunningProcesses = processes  # type: ignore[method-assign]
    assert watch_of(ending).strangers_before(patience_s=60.0) == 0


def test_samples_are_taken_while_the_body_runs_and_no_longer() -> None:
    watch = watch_of(Running())
    with watch.sampling(interval_s=0.001):
        while len(watch.samples) < 3:
            pass
    count = len(watch.samples)
    assert count >= 3
    assert not [thread for thread in __import__("threading").enumerate() if thread.name == "gpu-watch"]


def test_a_mig_instance_is_watched_by_its_own_identifier() -> None:
    asked = []
    binding = Running()
    binding.nvmlDeviceGetHandleByUUID = lambda uuid: asked.append(uuid) or uuid  # type: ignore[attr-defined]
    with open_watch({"CUDA_VISIBLE_DEVICES": "MIG-3"}, binding) as watch:
        assert watch is not None and watch.driver == "580.65.06"
    assert asked == ["MIG-3"]
    assert binding.shutdowns == 2


def test_without_nvml_or_gpu_there_is_nothing_to_watch() -> None:
    binding = Running()
    with open_watch({"CUDA_VISIBLE_DEVICES": ""}, binding) as watch:
        assert watch is None
    binding.is_loaded = False
    with open_watch({}, binding) as watch:
        assert watch is None
