"""What NVML says about the GPUs that a CUDA process started here would see.

CUDA_VISIBLE_DEVICES is resolved here as the driver does it: numbers, `GPU-…` and `MIG-…` identifiers (unique prefixes
too), read up to the first that names nothing; empty means none, unset means all. A GPU in MIG mode stands for its first
instance. Numbers follow CUDA's own order, which is NVML's only with CUDA_DEVICE_ORDER=PCI_BUS_ID: on a
machine with different models, numbers without it count as all GPUs, so that the mixture is refused, not guessed.

Source: CUDA programming guide, "CUDA Environment Variables"; NVML API reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    uuid: str
    """`GPU-…`, or `MIG-…` for an instance."""
    name: str
    capability: str
    cores: str
    memory_bytes: int
    mig_profile: str
    """`none` for a whole GPU."""


@dataclass(frozen=True)
class Board:
    """A physical GPU with its MIG instances, in NVML's order."""

    gpu: Gpu
    instances: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Gpus:
    driver: str
    visible: tuple[Gpu, ...]


def visible_gpus(environ: Mapping[str, str], nvml: Any = None) -> Gpus | None:
    """Returns the driver version and the GPUs that a CUDA process with these variables sees; None: NVML does not answer.

    Args:
        environ: of the process that will use CUDA.
        nvml: the NVML binding; None: `pynvml`. One that does not work, an older package of the same name, say, counts as none.
    """
    nvml = nvml or binding()
    try:
        with opened(nvml):
            driver = _text(nvml.nvmlSystemGetDriverVersion())
            boards = [_board(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
    except failures(nvml):
        return None
    is_pci_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return Gpus(driver, select_visible(environ.get("CUDA_VISIBLE_DEVICES"), boards, is_pci_order))


def binding() -> Any:
    """Returns the NVML binding; None: it is not installed, or cannot be imported."""
    try:
        import pynvml
    except failures(None):
        return None
    return pynvml


@contextmanager
def opened(nvml: Any) -> Iterator[None]:
    """Has NVML answer while the body lasts; raises one of `failures`."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        with suppress(*failures(nvml)):
            nvml.nvmlShutdown()


def failures(nvml: Any) -> tuple[type[Exception], ...]:
    """Returns what a binding raises: the driver's answers as NVMLError; the rest where its package or library is damaged, cut off or
    another one, which must not keep a service from its cache: the driver is asked for no more than its facts."""
    told = getattr(nvml, "NVMLError", None)
    return (told, *_BROKEN) if isinstance(told, type) and issubclass(told, Exception) else _BROKEN


_BROKEN = (
    *(ImportError, SyntaxError, NameError, EOFError),  # when it is imported; an EOFError is a cut .pyc
    *(AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
)


def select_visible(wanted: str | None, boards: Sequence[Board], is_pci_order: bool) -> tuple[Gpu, ...]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES=`wanted` leaves visible; see the module's docstring."""
    everything = tuple(board.instances[0] if board.instances else board.gpu for board in boards)
    if wanted is None:
        return everything
    chosen: list[Gpu] = []
    for token in (part.strip() for part in wanted.split(",")):
        if _is_number(token) and not is_pci_order and len({board.gpu.name for board in boards}) > 1:
            return everything
        gpu = _named(token, boards, everything)
        if gpu is None:
            break
        if gpu in chosen:
            return ()  # the driver refuses a list that names one device twice
        chosen.append(gpu)
    return tuple(chosen)


def _named(token: str, boards: Sequence[Board], everything: Sequence[Gpu]) -> Gpu | None:
    if _is_number(token):
        return everything[int(token)] if int(token) < len(everything) else None
    if token.startswith("GPU-"):
        found = [first for board, first in zip(boards, everything, strict=True) if board.gpu.uuid.startswith(token)]
    elif token.startswith("MIG-"):
        found = [gpu for board in boards for gpu in board.instances if gpu.uuid.startswith(token)]
    else:
        found = []
    return found[0] if len(found) == 1 else None


def _is_number(token: str) -> bool:
    # one digit of another script is no number to the driver, and Python refuses to read thousands of digits
    return token.isascii() and token.isdecimal() and len(token) < 10


def _board(nvml: Any, handle: Any) -> Board:
    capability = "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle))
    gpu = _gpu(nvml, handle, capability, "none")
    if optional(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0) != 1:
        return Board(gpu)
    instances = (
        _instance(nvml, handle, number, capability) for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    )
    return Board(gpu, tuple(instance for instance in instances if instance is not None))


def _instance(nvml: Any, handle: Any, number: int, capability: str) -> Gpu | None:
    instance = optional(nvml, lambda: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number), None)
    if instance is None:
        return None
    # the driver names an instance `NVIDIA A100-SXM4-40GB MIG 1g.5gb`
    _, _, profile = _text(nvml.nvmlDeviceGetName(instance)).partition(" MIG ")
    return _gpu(nvml, instance, capability, profile or "unnamed")


def _gpu(nvml: Any, handle: Any, capability: str, profile: str) -> Gpu:
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=capability,
        cores=optional(nvml, lambda: str(nvml.nvmlDeviceGetNumGpuCores(handle)), "not told"),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        mig_profile=profile,
    )


def optional(nvml: Any, ask: Callable[[], T], otherwise: T) -> T:
    """Returns NVML's answer, or `otherwise`: older boards and MIG instances do not support every question."""
    try:
        return ask()
    except (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)):
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
