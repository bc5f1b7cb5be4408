"""Native functions that are replayed: what is recorded when, which addresses count, and whose outputs are whose.

The device is a stand-in that "records" a function on the CPU: a replay writes into the same outputs from the same arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cachepipe.adapters.torch_aoti import Run
from cachepipe.domain.engine import replays_graphs
from cachepipe.runtime.replay import MAX_RECORDINGS, Replayed

CPU = torch.device("cpu")


class HostGraphs:
    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.failure = ""
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            yield

    def record(self, work: Run, arguments: list[torch.Tensor]) -> HostRecording:
        work(arguments)
        if self.failure:
            raise RuntimeError(self.failure)
        self.recorded += 1
        return HostRecording(self, work, arguments)


class HostRecording:
    def __init__(self, graphs: HostGraphs, work: Run, arguments: list[torch.Tensor]) -> None:
        self._graphs, self._work, self._arguments = graphs, work, arguments
        made = work(arguments)
        self.outputs = [torch.empty_strided(one.shape, one.stride()) for one in made]

    def replay(self) -> None:
        self._graphs.replayed += 1
        for output, found in zip(self.outputs, self._work(self._arguments), strict=True):
            output.copy_(found)


def product(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[0] * tensors[1]]


class Native:
    """A native function `weight * input`."""

    def __init__(self) -> None:
        self.graphs, self.told = HostGraphs(), [""][:0]
        self.weight = torch.full((4,), 2.0)
        self.function = Replayed(product, CPU, self.graphs, self.told.append)

    def call(self, value: float) -> torch.Tensor:
        (output,) = self.function([self.weight], [torch.full((4,), value)])
        return output

    def counts(self) -> tuple[int, int]:
        return self.graphs.recorded, self.graphs.replayed


@pytest.fixture
def native() -> Native:
    return Native()


def test_the_first_call_runs_the_second_is_recorded_and_all_further_ones_are_replayed(native: Native) -> None:
    found = []
    for value in (1.0, 2.0, 3.0, 4.0):
        found.append((native.call(value)[0].item(), native.counts()))
    assert found == [(2.0, (0, 0)), (4.0, (1, 1)), (6.0, (1, 2)), (8.0, (1, 3))]
    assert native.told == [""]


def test_a_later_call_writes_into_no_output_of_an_earlier_one(native: Native) -> None:
    outputs = [native.call(value) for value in (1.0, 2.0, 3.0)]
    assert [output[0].item() for output in outputs] == [2.0, 4.0, 6.0]


def test_a_weight_written_in_place_is_read_anew_without_another_recording(native: Native) -> None:
    native.call(1.0), native.call(1.0)
    native.weight.fill_(5.0)
    assert native.call(1.0)[0].item() == 5.0
    assert native.counts() == (1, 2)


def test_a_weight_at_another_address_is_recorded_anew(native: Native) -> None:
    native.call(1.0), native.call(1.0)
    native.weight = torch.full((4,), 7.0)
    assert native.call(1.0)[0].item() == 7.0
    assert native.counts() == (2, 2)
    assert native.told == ["", ""]


def test_weights_that_move_at_every_call_end_the_recordings_and_stay_right(native: Native) -> None:
    kept = [native.weight]
    for value in range(MAX_RECORDINGS + 4):
        kept.append(torch.full((4,), float(value)))
        native.weight = kept[-1]
        assert native.call(3.0)[0].item() == 3.0 * value
    assert native.graphs.recorded == MAX_RECORDINGS
    assert native.told[:-1] == [""] * MAX_RECORDINGS
    assert native.told[-1].startswith("weights came to lie elsewhere")


def test_what_cannot_be_recorded_runs_as_it_is_and_is_told_once(native: Native) -> None:
    native.graphs.failure = "operation not permitted when stream is capturing"
    assert [native.call(value)[0].item() for value in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    assert native.counts() == (0, 0)
    assert native.told == ["no CUDA graph could be recorded: operation not permitted when stream is capturing"]


def test_a_tensor_elsewhere_is_no_part_of_a_recording(native: Native) -> None:
    function = Replayed(product, torch.device("meta"), native.graphs, native.told.append)
    for _ in range(3):
        (output,) = function([native.weight], [torch.ones(4)])
        assert output[0].item() == 2.0
    assert native.told == ["no CUDA graph can be recorded: a tensor is not on meta"]


def test_what_was_recorded_in_inference_mode_can_be_fed_outside_of_it_and_the_other_way_round(native: Native) -> None:
    with torch.inference_mode():
        native.call(1.0), native.call(1.0)
    with torch.no_grad():
        outside = native.call(3.0)
    with torch.inference_mode():
        inside = native.call(4.0)
    assert (outside[0].item(), outside.is_inference()) == (6.0, False)
    assert (inside[0].item(), inside.is_inference()) == (8.0, True)


@pytest.mark.parametrize(
    "strided",
    [torch.ones(3, 4).T, torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.ones(4, 6)[:, :2]],
    ids=["transposed", "channels_last", "part"],
)
def test_outputs_keep_their_strides(strided: torch.Tensor) -> None:
    graphs, told = HostGraphs(), [""][:0]
    function = Replayed(lambda tensors: [strided], CPU, graphs, told.append)
    for _ in range(3):
        (output,) = function([], [])
        assert output.stride() == strided.stride() and torch.equal(output, strided)
    assert output.data_ptr() != strided.data_ptr()


def test_an_expanded_output_or_input_is_never_recorded(native: Native) -> None:
    function = Replayed(lambda tensors: [tensors[0].expand(3, 4)], CPU, native.graphs, native.told.append)
    for _ in range(3):
        (output,) = function([], [torch.ones(1, 4)])
        assert output.stride() == (0, 1) and torch.equal(output, torch.ones(3, 4))
    function = Replayed(lambda tensors: [tensors[0] * 2], CPU, native.graphs, native.told.append)
    for value in (1.0, 2.0, 3.0):
        (output,) = function([], [torch.full((1, 4), value).expand(3, 4)])
        assert torch.equal(output, torch.full((3, 4), 2 * value))
    assert [reason[:36] for reason in native.told] == ["no CUDA graph could be recorded: uns"] * 2


def test_threads_get_their_own_outputs(native: Native) -> None:
    wrong: list[float] = []

    def work(value: float) -> None:
        for _ in range(200):
            output = native.call(value)
            if not torch.equal(output, torch.full((4,), 2 * value)):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(number),)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and native.graphs.recorded == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_native_functions_are_replayed_in_the_modes_in_which_torch_records(mode: str) -> None:
    from torch._inductor import list_mode_options

    assert replays_graphs("cuda", mode, {}) == list_mode_options(mode).get("triton.cudagraphs", False)
    assert not replays_graphs("cpu", mode, {})
    assert replays_graphs("cuda", mode, {"triton.cudagraphs": True})
    assert not replays_graphs("cuda", mode, {"triton.cudagraphs": False})
