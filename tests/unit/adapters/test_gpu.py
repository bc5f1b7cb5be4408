"""Which GPUs CUDA_VISIBLE_DEVICES leaves, on boards told by a double of the NVML binding."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cachepipe.adapters.gpu import Board, Gpu, binding, select_visible, visible_gpus
from tests.support.nvml import Binding, FakeError


def gpu(number: int, name: str = "NVIDIA H200") -> Gpu:
    return Gpu(f"GPU-{number}{number}ab-cd", name, "9.0", "16896", 140 << 30, "none")


def instance(number: int) -> Gpu:
    return dataclasses.replace(gpu(0), uuid=f"MIG-{number}{number}ef", mig_profile="1g.18gb", memory_bytes=16 << 30)


ZERO, ONE, TWO = (gpu(number) for number in range(3))
BOARDS = [Board(ZERO), Board(ONE), Board(TWO)]
MIXED = [Board(ZERO), Board(gpu(1, "NVIDIA L4"))]
PARTED = [Board(ZERO, (instance(1), instance(2))), Board(ONE)]


@pytest.mark.parametrize(
    ("wanted", "visible"),
    [
        (None, (ZERO, ONE, TWO)),
        ("", ()),
        ("0", (ZERO,)),
        ("2,0", (TWO, ZERO)),
        (" 1 , 2 ", (ONE, TWO)),
        ("-1", ()),
        ("0,-1,2", (ZERO,)),
        ("0,9,1", (ZERO,)),
        ("1,1", ()),
        ("GPU-11ab-cd", (ONE,)),
        ("GPU-2", (TWO,)),
        ("GPU-", ()),
        ("GPU-ffff", ()),
        ("NoDevFiles", ()),
        ("0,GPU-11ab", (ZERO, ONE)),
        ("0," + "9" * 5_000, (ZERO,)),
        ("0,\N{FULLWIDTH DIGIT ONE},2", (ZERO,)),
        ("0,\N{SUPERSCRIPT TWO}", (ZERO,)),
    ],
)
def test_the_list_is_read_as_the_driver_reads_it(wanted: str | None, visible: tuple[Gpu, ...]) -> None:
    assert select_visible(wanted, BOARDS, False) == visible


def test_a_board_in_mig_mode_stands_for_its_first_instance() -> None:
    assert select_visible(None, PARTED, False) == (instance(1), ONE)
    assert select_visible("0", PARTED, False) == (instance(1),)
    assert select_visible("MIG-22", PARTED, False) == (instance(2),)
    assert select_visible("GPU-00", PARTED, False) == (instance(1),)
    assert select_visible("MIG-", PARTED, False) == ()


def test_numbers_on_a_mixed_machine_count_only_in_pci_order() -> None:
    assert len(select_visible("0", MIXED, False)) == 2
    assert select_visible("0", MIXED, True) == (ZERO,)
    assert select_visible("GPU-00", MIXED, False) == (ZERO,)


def test_boards_and_instances_are_read_from_nvml() -> None:
    binding = Binding()
    gpus = visible_gpus({}, binding)
    assert gpus is not None
    assert gpus.driver == "580.65.06"
    assert gpus.visible == (
        Gpu("GPU-0", "NVIDIA H200", "9.0", "16896", 140 << 30, "none"),
        Gpu("MIG-3", "NVIDIA H200 MIG 1g.18gb", "9.0", "not told", 16 << 30, "1g.18gb"),
    )
    assert binding.shutdowns == 1


def test_the_variable_decides_what_is_visible() -> None:
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-3"}, Binding())
    assert gpus is not None
    assert [g.uuid for g in gpus.visible] == ["MIG-3"]


def test_no_nvml_is_none_and_no_error() -> None:
    binding = Binding()
    binding.is_loaded = False
    assert visible_gpus({}, binding) is None


class Damaged(Binding):
    """A binding of which one function behaves as told."""

    def __init__(self, name: str, answer: Any) -> None:
        setattr(self, name, answer)


def raising(error: Exception) -> Any:
    def ask(*_: object) -> None:
        raise error

    return ask


@pytest.mark.parametrize(
    "error", [OSError("no library"), AttributeError("of another version"), RuntimeError(), TypeError(), KeyError("x")]
)
@pytest.mark.parametrize(
    "name", ["nvmlInit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetNumGpuCores", "nvmlDeviceGetUUID"]
)
def test_a_binding_that_does_not_work_is_no_nvml_and_no_error(name: str, error: Exception) -> None:
    assert visible_gpus({}, Damaged(name, raising(error))) is None


def test_answers_that_are_no_text_are_no_nvml() -> None:
    assert visible_gpus({}, Damaged("nvmlSystemGetDriverVersion", lambda: b"\xff\xfe")) is None


def test_an_empty_package_of_the_bindings_name_is_no_nvml() -> None:
    assert visible_gpus({}, ModuleType("pynvml")) is None


@pytest.mark.parametrize("word", [None, "NVMLError", int, KeyboardInterrupt])
def test_a_package_of_the_bindings_name_whose_error_is_none_is_no_nvml(word: Any) -> None:
    damaged = Damaged("nvmlDeviceGetUUID", raising(OSError("no library")))
    damaged.NVMLError = word
    assert visible_gpus({}, damaged) is None


def test_facts_that_were_told_count_though_the_end_fails() -> None:
    gpus = visible_gpus({}, Damaged("nvmlShutdown", raising(FakeError("gone"))))
    assert gpus is not None and gpus.driver == "580.65.06"


@pytest.mark.parametrize(
    "text",
    ["raise RuntimeError('broken')", "import no_such_module", "None.x", "def (", "none.x", "raise EOFError", "{}[0]"],
)
def test_a_binding_that_cannot_be_imported_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "pynvml.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert binding() is None
