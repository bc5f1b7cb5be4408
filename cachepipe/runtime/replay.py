"""Replays a native function from a CUDA graph, in the compile modes in which torch.compile would.

 1 the first call runs as it is: it loads the kernels, and its outputs are the caller's
 2 the second is recorded, with copies of the inputs at addresses of their own and the weights where they lie
 3 every further one copies its inputs there, replays, and copies the outputs out: no later call overwrites them

A weight at another address is recorded anew; after `MAX_RECORDINGS` of them, or when nothing can be recorded, calls run as they are.
Written into in place, weights keep their addresses, and a replay reads them anew.

Source: docs.pytorch.org/docs/stable/notes/cuda.html ("CUDA Graphs").
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from cachepipe.adapters.torch_aoti import Run

MAX_RECORDINGS = 4
"""Of one shape bucket: a service that swaps its weights at every call would record at every call."""
_one_at_a_time = threading.Lock()
"""torch allows one recording at a time in a process."""


class Recording(Protocol):
    """What one call does to fixed addresses."""

    outputs: list[torch.Tensor]

    def replay(self) -> None: ...


class Graphs(Protocol):
    """Records and replays on a device."""

    def turn(self) -> AbstractContextManager[None]:
        """One thread at a time, and on the device one replay after the other, whatever their streams."""

    def record(self, work: Run, arguments: list[torch.Tensor]) -> Recording:
        """Runs the work once and records it, inside `turn`.

        Raises:
            RuntimeError: it does what cannot be recorded.
        """


class Replayed:
    """One shape bucket's native function: (weights, inputs) → outputs."""

    def __init__(self, run: Run, device: torch.device, graphs: Graphs, told: Callable[[str], None]) -> None:
        """Args:
        run: the function.
        device: on which all tensors must lie: a value on the CPU would be read once, when it is recorded.
        graphs: shared by the shape buckets of an entry.
        told: hears of each recording, and with a reason that there will be none.
        """
        self._run, self._device, self._graphs, self._told = run, device, graphs, told
        self._is_warm = self._is_plain = False
        self._recordings = 0
        self._recording: Recording | None = None
        self._places: list[int] = []
        """Addresses of the weights that are in the recording."""
        self._buffers: list[torch.Tensor] = []

    def __call__(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self._graphs.turn():
            if not self._is_plain and self._is_ready(weights, inputs):
                recording = self._recording
                assert recording is not None
                # 3
                for buffer, value in zip(self._buffers, inputs, strict=True):
                    buffer.copy_(value)
                recording.replay()
                return [_copied(output) for output in recording.outputs]
            # 1
            self._is_warm = True
            return self._run([*weights, *inputs])

    def _is_ready(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
        """Tells whether this call can be replayed; records it if it must be."""
        places = [weight.data_ptr() for weight in weights]
        if self._recording is not None and places == self._places:
            return True
        if self._recording is None and not self._is_warm:
            return False
        reason = self._why_not(weights, inputs)
        try:
            if not reason:
                self._record(weights, inputs)  # 2
        except RuntimeError as error:
            reason = f"no CUDA graph could be recorded: {str(error)[:200]}"
        if reason:
            self._is_plain, self._recording = True, None
        self._places = places
        self._told(reason)
        return not reason

    def _why_not(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> str:
        if self._recordings == MAX_RECORDINGS:
            return f"weights came to lie elsewhere {MAX_RECORDINGS} times: calls run without a CUDA graph"
        if any(tensor.device != self._device for tensor in (*weights, *inputs)):
            return f"no CUDA graph can be recorded: a tensor is not on {self._device}"
        return ""

    def _record(self, weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._recordings += 1
        # tensors of inference mode could not be written to outside of it
        with torch.inference_mode(False), torch.no_grad():
            self._buffers = [_copied(value) for value in inputs]
            # the one before it lives until then: memory that no graph holds is no pool any more
            self._recording = self._graphs.record(self._run, [*weights, *self._buffers])
            for output in self._recording.outputs:
                _copied(output)  # an output in which elements lie on one another cannot be


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the very strides, which `clone` keeps only where no element lies twice or apart from the others."""
    copy = tensor.clone()
    if copy.stride() != tensor.stride():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copy.copy_(tensor)
    return copy


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[torch.Tensor], kept: Any) -> None:
        self.outputs = outputs
        self.replay: Callable[[], None] = graph.replay
        self._kept = kept
        """The function holds kernels and constants that the graph uses, the arguments their memory."""


class CudaGraphs:
    """CUDA graphs that share one memory pool: they never run at the same time, and outputs are copied before the next one runs."""

    def __init__(self, device: torch.device) -> None:
        self._lock = threading.Lock()
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(stream)

    def record(self, work: Run, arguments: list[torch.Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        # the outer one gives the caller's stream back even when the recording fails
        with _one_at_a_time, torch.cuda.stream(self._stream):
            work(arguments)  # workspaces of libraries belong to a stream: not into the graph's memory
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = work(arguments)
        return _CudaRecording(graph, outputs, (work, arguments))
