"""A double of the NVML binding: a machine with two boards, the second one in MIG mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class FakeError(Exception):
    """Stands for pynvml.NVMLError."""


class Binding:
    """The NVML binding's functions that are used, over two boards, the second in MIG mode."""

    NVMLError = FakeError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    is_loaded = True
    shutdowns = 0

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": lambda: b"580.65.06",
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}" if isinstance(handle, int) else handle.encode(),
            "nvmlDeviceGetName": lambda h: "NVIDIA H200" if isinstance(h, int) else "NVIDIA H200 MIG 1g.18gb",
            "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(total=(140 if isinstance(h, int) else 16) << 30),
            "nvmlDeviceGetMaxMigDeviceCount": lambda _: 7,
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetClockInfo": lambda _, kind: {1: 1980, 2: 3201}[kind],
            "nvmlDeviceGetTemperature": lambda *_: 52,
            "nvmlDeviceGetPowerUsage": lambda _: 412_500,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 4,
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        }
        if name not in answers:
            raise AttributeError(name)
        return answers[name]

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.is_loaded:
            raise FakeError

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shutdowns += 1

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:  # noqa: N802
        if handle == 0:
            raise FakeError  # boards without MIG
        return (1, 1)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _handle: int, number: int) -> str:  # noqa: N802
        if number != 3:
            raise FakeError
        return "MIG-3"

    def nvmlDeviceGetNumGpuCores(self, handle: int | str) -> int:  # noqa: N802
        if isinstance(handle, str):
            raise FakeError
        return 16896
