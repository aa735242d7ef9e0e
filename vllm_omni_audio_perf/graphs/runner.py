# SPDX-License-Identifier: Apache-2.0
"""Runs a function by replaying a graph of it, and by calling it wherever that cannot be done.

- Graphs are captured for a bounded set of buckets, when the caller says so: never in the middle of a request.
- A call is padded to a bucket: its inputs are copied over the graph's own, the graph is replayed, and what was asked
  for is copied out, so that no caller ever holds a tensor of the graph's.
- Whatever stands in the way of a graph, the call gets the same result without one, and the reason is counted.
"""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from vllm_omni_audio_perf.graphs.backend import CaptureFailed, Function, Graph, GraphBackend, GraphPool, Outputs
from vllm_omni_audio_perf.graphs.buckets import Bucket, Buckets
from vllm_omni_audio_perf.graphs.static_inputs import StaticInputs
from vllm_omni_audio_perf.graphs.statistics import MIB, Fallback, GraphStatistics

logger = logging.getLogger(__name__)

_RUNNERS: "weakref.WeakSet[GraphRunner]" = weakref.WeakSet()


@dataclass(frozen=True)
class CaptureBudget:
    """What the captures of a runner may cost.

    Raises:
        ValueError: for a negative one.
    """

    seconds: float
    """No capture starts later than this after the first one."""

    mib: float
    """What the graphs may hold together, their inputs included."""

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("mib", self.mib)):
            if not value >= 0:
                raise ValueError(f"A capture budget of {name}={value} is not at least 0.")


@dataclass(frozen=True)
class _Miss:
    """A call for which no graph could be replayed."""

    reason: Fallback
    detail: str = ""


class GraphRunner:
    """Runs `function` over static tensors from captured graphs, or eagerly.

    May be called from several threads and on several CUDA streams. A graph freezes what Python does at its capture, and
    the values of Python objects then; parameters are read anew at each replay.

    Args:
        name: for the log.
        function: what is captured. Takes the static inputs and returns a tuple of tensors whose shapes depend on those
            of the inputs alone.
        make_inputs: makes the inputs of a bucket on the device, filled with the values that pad a smaller input.
        trim: takes outputs of `function` and the shape asked for, and returns views of what was asked for. Leaves
            outputs of that shape as they are.
        buckets: what to capture.
        backend: what captures and replays.
        device: where the tensors are.
        budget: what captures may cost.
        eager: takes the inputs of a call as they are and returns what `trim` would leave; None to call `function` on
            them, and trim.
        enabled: False to do everything eagerly.
        warmups: calls of `function` before a capture, at least 1.
        max_failures: after so many failures of captures and replays the runner frees its graphs and turns itself off.

    Raises:
        ValueError: for `warmups` or `max_failures` below 1.
    """

    def __init__(
        self,
        name: str,
        function: Function,
        make_inputs: Callable[[Bucket], Sequence[Tensor]],
        trim: Callable[[Outputs, Bucket], Sequence[Tensor]],
        *,
        buckets: Buckets,
        backend: GraphBackend,
        device: torch.device,
        budget: CaptureBudget,
        eager: Function | None = None,
        enabled: bool = True,
        warmups: int = 2,
        max_failures: int = 3,
    ) -> None:
        for argument, value in (("warmups", warmups), ("max_failures", max_failures)):
            if value < 1:
                raise ValueError(f"{argument} must be at least 1, got {value}.")
        self.name = name
        self.statistics = GraphStatistics()
        self._function = function
        self._make_inputs = make_inputs
        self._trim = trim
        self._eager = eager
        self._buckets = buckets
        self._backend = backend
        self._device = torch.device(device)
        self._budget = budget
        self._warmups = warmups
        self._max_failures = max_failures
        self._unavailable = backend.unavailable(self._device)
        self._off = "" if enabled else "by configuration"
        self._enabled = enabled
        self._failures = 0
        self._graphs: dict[Bucket, Graph] = {}
        self._pool: GraphPool | None = None
        self._lock = threading.Lock()  # of the graphs and their static tensors
        self._setup_lock = threading.Lock()  # of `capture_all` and `release`; taken first
        self._calls_logged = 0
        _RUNNERS.add(self)

    @property
    def captured(self) -> tuple[Bucket, ...]:
        """The buckets that have a graph, largest first."""
        return tuple(bucket for bucket in self._buckets if bucket in self._graphs)

    def bucket_for(self, shape: Sequence[int]) -> Bucket | None:
        """The bucket whose graph a call for `shape` replays, or None where it runs eagerly.

        Raises:
            ValueError: for a shape with a size below 1 or of another rank than the buckets.
        """
        bucket = self._buckets.choose(shape)
        return bucket if bucket in self._graphs else None

    @torch.no_grad()
    def capture_all(self) -> tuple[Bucket, ...]:
        """Capture a graph for each bucket that has none, the largest first, within the budget.

        Logs what was captured and what was left out. A bucket that does not fit into the budget's memory is left out,
        smaller ones are still tried.

        Returns:
            :attr:`captured`.

        Raises:
            torch.AcceleratorError: if the device is lost. Any other failure leaves a bucket out.
        """
        with self._setup_lock:
            reason = self._why_no_capture()
            if reason:
                logger.info("%s: no graphs, %s.", self.name, reason)
                return self.captured
            missing = [bucket for bucket in self._buckets if bucket not in self._graphs]
            if self._pool is None:
                self._pool = self._backend.create_pool(self._device)
            left_out: dict[str, list[Bucket]] = {}
            start = time.perf_counter()
            for bucket in tqdm(missing, desc=f"Capturing {self.name}", unit="graph", disable=not missing):
                if self._off:
                    reason = f"switched off {self._off}"
                elif time.perf_counter() - start >= self._budget.seconds:
                    reason = f"over the budget of {self._budget.seconds:g} s"
                else:
                    reason = self._capture(bucket, self._pool)
                if reason:
                    left_out.setdefault(reason, []).append(bucket)
            seconds = time.perf_counter() - start
            self.statistics.capture_seconds += seconds
            self._log_captures(seconds, left_out)
            return self.captured

    @torch.no_grad()
    def __call__(self, shape: Sequence[int], *inputs: Tensor, eager: Callable[[], Outputs] | None = None) -> Outputs:
        """Run the function.

        Args:
            shape: what is asked for, of the buckets' rank; decides the bucket and what `trim` leaves.
            inputs: on the device, each at most as large as the static input of the bucket.
            eager: what to do without a graph, for a caller who knows more about this call than its inputs say; returns
                what `trim` would leave. None for the runner's own way.

        Returns:
            The outputs for `shape`, in tensors of the caller's own.

        Raises:
            ValueError: for a shape with a size below 1 or of another rank, or inputs that do not fit the bucket.
            torch.AcceleratorError: if the device is lost.
        """
        shape = tuple(shape)
        bucket = self._buckets.choose(shape)
        outcome = self._try_graph(bucket, shape, inputs)
        if not isinstance(outcome, _Miss):
            return outcome
        if self.statistics.record_miss(outcome.reason):
            detail = f" ({outcome.detail})" if outcome.detail else ""
            level = logging.WARNING if outcome.reason == Fallback.REPLAY_FAILED else logging.INFO
            logger.log(level, "%s runs without a graph: %s%s.", self.name, outcome.reason, detail)
        if eager is not None:
            return eager()
        if self._eager is not None:
            return self._eager(*inputs)
        return tuple(self._trim(self._function(*inputs), shape))

    def release(self) -> None:
        """Free all graphs. From here on everything runs eagerly, until :meth:`capture_all` is called again."""
        with self._setup_lock, self._lock:
            self._free()
            self._pool = None
            self._failures = 0
            self._off = "" if self._enabled else self._off

    def log_statistics(self) -> None:
        """Log one line of statistics. Happens at the end of the process for calls not logged by then."""
        self._calls_logged = self.statistics.calls
        logger.info("%s: %s.", self.name, self.statistics.summary())

    def _why_no_capture(self) -> str:
        if self._unavailable:
            return self._unavailable
        if self._off:
            return f"switched off {self._off}"
        return str(Fallback.NESTED) if self._backend.capturing(self._device) else ""

    def _capture(self, bucket: Bucket, pool: GraphPool) -> str:
        """Capture one bucket. Returns why it was left out, or nothing."""
        allowed = max(0.0, self._budget.mib * MIB - pool.nbytes)
        left_out = ""
        try:
            graph = pool.capture(lambda: StaticInputs(self._make_inputs(bucket)), self._function, self._warmups)
        except CaptureFailed as error:
            # As a string: a handler may keep the record, and the error would keep frames and so tensors.
            logger.warning("%s: the capture of %s failed: %s", self.name, _words(bucket), str(error))
            left_out = "failed"
            self.statistics.failed_captures += 1
            with self._lock:
                self._count_failure()
        else:
            if graph.nbytes > allowed:
                left_out = f"over the budget of {self._budget.mib:g} MiB"
                pool.release(graph)
            else:
                self.statistics.captures += 1
                with self._lock:
                    self._graphs[bucket] = graph
        self.statistics.pool_mib = pool.nbytes / MIB
        return left_out

    def _try_graph(self, bucket: Bucket | None, shape: Bucket, inputs: Sequence[Tensor]) -> "Outputs | _Miss":
        if self._unavailable:
            return _Miss(Fallback.UNAVAILABLE, self._unavailable)
        if self._off:
            return _Miss(Fallback.SWITCHED_OFF, self._off)
        if self._backend.capturing(self._device):
            return _Miss(Fallback.NESTED)
        if bucket is None:
            return _Miss(Fallback.NO_BUCKET, _words(shape))
        with self._lock:
            graph, pool = self._graphs.get(bucket), self._pool
            if graph is None or pool is None:
                return _Miss(Fallback.NOT_CAPTURED, _words(bucket))
            graph.inputs.check(inputs)
            try:
                with pool.in_order():
                    graph.inputs.fill(inputs)
                    graph.replay()
                    outputs = tuple(
                        output.clone(memory_format=torch.contiguous_format)
                        for output in self._trim(graph.outputs, shape)
                    )
            except torch.AcceleratorError:
                raise
            except Exception as error:
                miss = _Miss(Fallback.REPLAY_FAILED, f"{_words(bucket)}: {type(error).__name__}: {error}")
            else:
                self.statistics.record_hit(shape, bucket)
                return outputs
            del self._graphs[bucket]  # its state is unknown from here on
            pool.release(graph)
            self.statistics.pool_mib = pool.nbytes / MIB
            self._count_failure()
        return miss

    def _count_failure(self) -> None:
        """Turn off after the last failure that is tolerated. The lock is held."""
        self._failures += 1
        if self._failures >= self._max_failures and not self._off:
            self._off = f"after {self._failures} failures"
            self._free()
            logger.warning("%s: switched off %s.", self.name, self._off)

    def _free(self) -> None:
        """Free all graphs. The lock is held."""
        if self._pool is not None:
            self._pool.release(*self._graphs.values())
            self.statistics.pool_mib = self._pool.nbytes / MIB
        self._graphs.clear()

    def _log_captures(self, seconds: float, left_out: dict[str, list[Bucket]]) -> None:
        logger.info(
            "%s: graphs for %s (%d of %d buckets), in %.1f s, %.0f MiB%s.",
            self.name,
            _list(self.captured),
            len(self._graphs),
            len(self._buckets),
            seconds,
            self.statistics.pool_mib,
            "".join(f"; without {_list(buckets)}: {reason}" for reason, buckets in left_out.items()),
        )


def _words(bucket: Bucket) -> str:
    return "x".join(map(str, bucket))


def _list(buckets: Sequence[Bucket]) -> str:
    return ", ".join(map(_words, buckets)) or "none"


@atexit.register
def _log_statistics_at_exit() -> None:
    for runner in sorted(_RUNNERS, key=lambda runner: runner.name):
        if runner.statistics.calls > runner._calls_logged:
            runner.log_statistics()
