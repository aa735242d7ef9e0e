# SPDX-License-Identifier: Apache-2.0
"""What a runner asks of the thing that captures and replays, so that tests can put another in CUDA's place."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from vllm_omni_audio_perf.graphs.static_inputs import StaticInputs

Outputs = tuple[Tensor, ...]
Function = Callable[..., Outputs]


class CaptureFailed(RuntimeError):
    """A capture failed and what it held is freed. Without a cause: the frames of one would keep tensors alive."""


class Graph(Protocol):
    """One captured call of a function."""

    inputs: StaticInputs
    outputs: Outputs
    """The same tensors after every replay, which overwrites them."""

    nbytes: int
    """By how much its capture made the pool grow, its inputs included."""

    def replay(self) -> None:
        """Compute `outputs` from what `inputs` hold now."""


class GraphPool(Protocol):
    """The memory that the graphs of one runner share. Two of its graphs must not run at the same time."""

    nbytes: int
    """What its graphs and their inputs hold, and what dropped graphs could not give back yet."""

    def capture(self, make_inputs: Callable[[], StaticInputs], function: Function, warmups: int) -> Graph:
        """Capture a call of a function of static inputs.

        Args:
            make_inputs: makes the inputs; called once.
            function: called with the inputs' tensors, `warmups` times and then once under capture.
            warmups: how often the function runs before, so that what it sets up once is not captured.

        Raises:
            CaptureFailed: whatever went wrong. The pool can be used as before.
        """

    def release(self, *graphs: Graph) -> None:
        """Free graphs, which must not be replayed any more, with their inputs and outputs."""

    def in_order(self) -> AbstractContextManager[None]:
        """Put the work inside after that of the previous such block, whatever stream that one was on."""


class GraphBackend(Protocol):
    """A way to capture and replay."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why there are no graphs on a device, or None where there are."""

    def capturing(self, device: torch.device) -> bool:
        """Whether what the current thread runs on a device is being captured already."""

    def create_pool(self, device: torch.device) -> GraphPool:
        """An empty pool on a device where graphs are available."""
