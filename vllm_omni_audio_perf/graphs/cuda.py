# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs.

- A capture runs on a side stream after some warm-ups, in thread-local mode, so that a synchronisation in another thread
  does not end it. One capture at a time in the process.
- All graphs of a pool share one memory pool, and are captured on one stream, without which torch would not share it.
- A failed capture is taken back by hand, since torch leaves its allocator and its current stream in mid-capture.

CUDA objects are made inside a capture only: they raise where there is no CUDA.
"""

import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vllm_omni_audio_perf import compat
from vllm_omni_audio_perf.graphs.backend import CaptureFailed, Function, Graph, Outputs
from vllm_omni_audio_perf.graphs.static_inputs import StaticInputs

# Reentrant, because a warm-up may make another runner capture its own graphs.
_CAPTURE_LOCK = threading.RLock()


class CudaGraphBackend:
    """The backend for CUDA devices."""

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"CUDA graphs do not run on {device}"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        return None

    def capturing(self, device: torch.device) -> bool:
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def create_pool(self, device: torch.device) -> "CudaGraphPool":
        return CudaGraphPool(device)


class CudaGraph:
    """One captured CUDA graph. See :class:`~vllm_omni_audio_perf.graphs.backend.Graph`."""

    nbytes = 0

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: StaticInputs, outputs: Outputs) -> None:
        self._graph = graph
        self.inputs = inputs
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()

    def clear(self) -> None:
        """Free everything, whoever still holds this object."""
        self._graph.reset()
        self.inputs = StaticInputs(())
        self.outputs = ()


class CudaGraphPool:
    """The pool of the graphs of one runner. See :class:`~vllm_omni_audio_perf.graphs.backend.GraphPool`.

    Memory is what torch reserves on the device before and after, so what other threads allocate meanwhile counts too.
    What a dropped graph held while others live stays reserved for the next captures, and goes with the last of them.

    Args:
        device: a CUDA device; without an index, the one that is current at each use.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._handle: torch.cuda._POOL_HANDLE | None = None
        self._alive = 0
        self._last_use: torch.cuda.Event | None = None

    def capture(self, make_inputs: Callable[[], StaticInputs], function: Function, warmups: int) -> CudaGraph:
        with _CAPTURE_LOCK, torch.cuda.device(self._device):
            before = self._reserved()
            reason = ""
            graph = None
            try:
                graph = self._capture(make_inputs, function, warmups)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                _drop_frames(error)
            if graph is None:
                gc.collect()  # a cycle through the function's frames would keep its tensors
                self._count_alive(0)
            else:
                self._count_alive(1)
            # Raises where the device is lost, which is no matter of this capture alone.
            grown = self._reserved() - before
            self.nbytes += grown
        if graph is None:
            raise CaptureFailed(reason)
        graph.nbytes = grown
        return graph

    def release(self, *graphs: Graph) -> None:
        with _CAPTURE_LOCK, torch.cuda.device(self._device):
            before = self._reserved()  # waits for replays that are under way
            for graph in graphs:
                assert isinstance(graph, CudaGraph)
                graph.clear()
            self._count_alive(-len(graphs))
            self.nbytes += self._reserved() - before

    @contextmanager
    def in_order(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if self._last_use is None:
                self._last_use = torch.cuda.Event()
            else:
                stream.wait_event(self._last_use)
            try:
                yield
            finally:
                self._last_use.record(stream)

    def _capture(self, make_inputs: Callable[[], StaticInputs], function: Function, warmups: int) -> CudaGraph:
        current = torch.cuda.current_stream()
        stream = self._stream = self._stream or torch.cuda.Stream()
        handle = self._handle = self._handle or torch.cuda.graph_pool_handle()
        inputs = make_inputs()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(warmups):
                function(*inputs.tensors)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        entered = False
        try:
            # The outer one restores the caller's stream where `torch.cuda.graph` fails to.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool=handle, stream=stream, capture_error_mode="thread_local"),
            ):
                entered = True
                outputs = function(*inputs.tensors)
        except BaseException:
            self._take_back(graph, handle, entered)
            raise
        if not isinstance(outputs, tuple) or not all(isinstance(output, Tensor) for output in outputs):
            graph.reset()
            raise TypeError(f"The function must return a tuple of tensors, got {type(outputs).__name__}.")
        return CudaGraph(graph, inputs, outputs)

    def _take_back(self, graph: torch.cuda.CUDAGraph, handle: torch.cuda._POOL_HANDLE, entered: bool) -> None:
        """Undo what torch 2.13 leaves of a failed capture.

        Where CUDA has invalidated a capture, ``CUDAGraph.capture_end`` raises before it takes its pool back from the
        allocator, and ``reset`` gives back only the pool of a capture that ended: the allocator would take the capture
        for still under way, return no memory to the device any more, and keep the pool for good.
        """
        index = torch.cuda.current_device()
        try:
            compat.end_allocation_to_pool(index, handle)
            begun = True
        except RuntimeError:  # torch has done it, or the capture did not begin
            begun = entered
        try:
            graph.pool()
        except RuntimeError:  # not a capture that ended, so `reset` leaves the pool alone
            if begun:
                compat.release_pool(index, handle)
        graph.reset()

    def _count_alive(self, change: int) -> None:
        self._alive += change
        if not self._alive:
            # Where anything still holds memory of an abandoned pool, torch refuses to capture into it again.
            self._handle = None

    def _reserved(self) -> int:
        """Bytes that torch holds on the device and cannot give back. Waits for the device."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()


def _drop_frames(error: BaseException) -> None:
    """Let go of the tensors in the frames that an exception and those behind it have passed through."""
    behind: list[BaseException | None] = [error]
    while behind:
        current = behind.pop()
        if current is not None and current.__traceback__ is not None:
            behind += [current.__cause__, current.__context__]
            traceback.clear_frames(current.__traceback__)
            current.__traceback__ = None
