"""Which GPUs CUDA_VISIBLE_DEVICES leaves, on boards told by a double of the NVML binding."""

from __future__ import annotations

import dataclasses

import pytest

from cachepipe.adapters.gpu import Board, Gpu, select_visible, visible_gpus
from tests.support.nvml import Binding


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
