# SPDX-License-Identifier: Apache-2.0
"""Backends for `GraphRunner` that keep the contract of CUDA graphs on any device, to test without a GPU.

Outputs are the same tensors for every replay and hold nothing before the first. `ReexecutingBackend` calls the function
again at each replay; `TraceBackend` runs the operators that were recorded at the capture, so that, as in a real graph,
what Python does is not done again.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from vllm_omni_audio_perf.graphs import CaptureFailed, Graph, StaticInputs

MIB = 2**20
Outputs = tuple[Tensor, ...]
Function = Callable[..., Outputs]


class ReexecutingBackend:
    """Replays by calling the function again.

    Counts what it does, and fails and pretends as its attributes say, which may be changed at any time.

    Args:
        failing_captures: which captures fail, counted from 1.
        failing_replays: which replays fail, counted from 1.
        mib: what each capture pretends to hold; or a function of its static inputs.
        why_unavailable: what `unavailable` answers.
    """

    def __init__(
        self,
        *,
        failing_captures: Collection[int] = (),
        failing_replays: Collection[int] = (),
        mib: float | Callable[[tuple[Tensor, ...]], float] = 1.0,
        why_unavailable: str | None = None,
    ) -> None:
        self.failing_captures = failing_captures
        self.failing_replays = failing_replays
        self.replay_error: Exception = RuntimeError("this replay fails on request")
        self.mib = mib
        self.why_unavailable = why_unavailable
        self.pretend_capturing = False
        self.warmups = self.captures = self.replays = 0
        self.pools: list[PretendedPool] = []

    def unavailable(self, device: torch.device) -> str | None:
        return self.why_unavailable

    def capturing(self, device: torch.device) -> bool:
        return self.pretend_capturing

    def create_pool(self, device: torch.device) -> "PretendedPool":
        self.pools.append(PretendedPool(self))
        return self.pools[-1]

    def record(self, function: Function, inputs: StaticInputs) -> tuple[Callable[[], Outputs], Outputs]:
        """Capture a call: what a replay does, and outputs as it will give them."""
        return (lambda: function(*inputs.tensors)), function(*inputs.tensors)


class TraceBackend(ReexecutingBackend):
    """Replays the operators recorded at the capture, with the inputs and parameters as they are at the replay."""

    def record(self, function: Function, inputs: StaticInputs) -> tuple[Callable[[], Outputs], Outputs]:
        trace = make_fx(function)(*inputs.tensors)
        return (lambda: tuple(trace(*inputs.tensors))), tuple(trace(*inputs.tensors))


class PretendedGraph:
    """See :class:`~vllm_omni_audio_perf.graphs.backend.Graph`."""

    def __init__(
        self, backend: ReexecutingBackend, inputs: StaticInputs, compute: Callable[[], Outputs], outputs: Outputs
    ) -> None:
        mib = backend.mib(inputs.tensors) if callable(backend.mib) else backend.mib
        self.nbytes = round(mib * MIB)
        self.inputs = inputs
        self.outputs = outputs
        self._backend = backend
        self._compute: Callable[[], Outputs] | None = compute

    def replay(self) -> None:
        assert self._compute is not None, "replayed after its release"
        self._backend.replays += 1
        if self._backend.replays in self._backend.failing_replays:
            raise self._backend.replay_error
        for static, computed in zip(self.outputs, self._compute(), strict=True):
            static.copy_(computed)

    def clear(self) -> None:
        """Free everything."""
        self.inputs = StaticInputs(())
        self.outputs = ()
        self._compute = None


class PretendedPool:
    """See :class:`~vllm_omni_audio_perf.graphs.backend.GraphPool`."""

    def __init__(self, backend: ReexecutingBackend) -> None:
        self.nbytes = 0
        self.graphs: list[Graph] = []
        """Those not released."""
        self._backend = backend
        self._busy = False

    def capture(self, make_inputs: Callable[[], StaticInputs], function: Function, warmups: int) -> Graph:
        backend = self._backend
        backend.captures += 1
        reason = ""
        try:
            inputs = make_inputs()
            for _ in range(warmups):
                function(*inputs.tensors)
            backend.warmups += warmups
            if backend.captures in backend.failing_captures:
                raise RuntimeError("this capture fails on request")
            compute, example = backend.record(function, inputs)
            with torch.inference_mode(False):
                outputs = tuple(_poisoned(output) for output in example)
            graph = PretendedGraph(backend, inputs, compute, outputs)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:  # outside the handler: the error would be the context of this one and keep its frames
            raise CaptureFailed(reason)
        self.nbytes += graph.nbytes
        self.graphs.append(graph)
        return graph

    def release(self, *graphs: Graph) -> None:
        for graph in graphs:
            assert isinstance(graph, PretendedGraph)
            self.graphs.remove(graph)
            self.nbytes -= graph.nbytes
            graph.clear()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        assert not self._busy, "two callers use the static tensors at once"
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


def _poisoned(output: Tensor) -> Tensor:
    """A tensor like an output, with values that no computation should leave."""
    empty = torch.empty(output.shape, dtype=output.dtype, device=output.device)
    if empty.is_floating_point() or empty.is_complex():
        return empty.fill_(float("nan"))
    return empty.fill_(True if empty.dtype == torch.bool else torch.iinfo(empty.dtype).min)
