"""Looks at the GPU while something runs on it, a few times a second, through NVML: no CUDA context, no load.

Source: NVML API reference. In a container the driver tells process numbers of the host, which name none of ours: then one
process is taken for our worker, every further one for a stranger.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from cachepipe.adapters.gpu import binding, failures, opened, optional, visible_gpus
from cachepipe.adapters.guard import descendants
from cachepipe.domain.quiet import IDLE, GpuSample

INTERVAL_S = 0.25
SETTLING_S = 5.0
"""A process that has just ended may be listed for a moment."""


class GpuWatch:
    """Samples of one GPU; empty where NVML does not answer."""

    def __init__(self, nvml: Any, handle: Any, driver: str) -> None:
        self._nvml, self._handle = nvml, handle
        self._end = threading.Event()
        self._own: Callable[[], Collection[int]] = lambda: descendants(os.getpid())
        self.driver = driver
        self.samples: list[GpuSample] = []

    def strangers_before(self, patience_s: float = SETTLING_S) -> int:
        """Returns how many processes use the GPU before ours does, as far as NVML tells; one that is about to end is waited for."""
        deadline, found = time.monotonic() + patience_s, 0
        with contextlib.suppress(*failures(self._nvml)):
            while (found := len(self._pids())) and time.monotonic() < deadline:
                time.sleep(INTERVAL_S)
        return found

    @contextlib.contextmanager
    def sampling(self, interval_s: float = INTERVAL_S) -> Iterator[None]:
        """Takes samples while the body runs."""
        self._end.clear()
        thread = threading.Thread(target=self._run, args=(interval_s,), name="gpu-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join()

    def _run(self, interval_s: float) -> None:
        while not self._end.wait(interval_s):
            with contextlib.suppress(*failures(self._nvml)):
                self.samples.append(self.sample())

    def sample(self) -> GpuSample:
        """Returns one look; what this board does not tell is 0, or idle.

        Raises:
            NVMLError: the GPU is gone.
        """
        nvml, handle = self._nvml, self._handle
        pids = self._pids()
        own = set(self._own()) if pids else set()
        # without a process of ours in the list, one may be ours under another number
        strangers = len(pids - own) if pids & own else max(0, len(pids) - 1)
        return GpuSample(
            busy_percent=optional(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu), 0),
            sm_mhz=optional(nvml, lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), 0),
            memory_mhz=optional(nvml, lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)), 0),
            temperature_c=optional(
                nvml, lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)), 0
            ),
            power_w=optional(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 0.0),
            # a board that does not tell counts as idle unless its load says otherwise
            throttle=optional(nvml, lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)), IDLE),
            strangers=strangers,
        )

    def _pids(self) -> set[int]:
        ask = self._nvml.nvmlDeviceGetComputeRunningProcesses
        running: list[Any] = optional(self._nvml, lambda: ask(self._handle), [])
        return {int(process.pid) for process in running}


@contextlib.contextmanager
def open_watch(environ: Mapping[str, str], nvml: Any = None) -> Iterator[GpuWatch | None]:
    """Gives the watch of the first GPU that a process with these variables sees; None where there is no NVML or no GPU."""
    nvml = nvml or binding()
    gpus = visible_gpus(environ, nvml) if nvml is not None else None
    if gpus is None or not gpus.visible:
        yield None
        return
    with contextlib.ExitStack() as stack:
        watch = None
        with contextlib.suppress(*failures(nvml)):
            stack.enter_context(opened(nvml))
            watch = GpuWatch(nvml, nvml.nvmlDeviceGetHandleByUUID(gpus.visible[0].uuid), gpus.driver)
        yield watch
