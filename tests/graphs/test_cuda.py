# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: how it drives torch.cuda, over a stand-in for it; and, where there is a GPU, what comes of it."""

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.graphs import (
    Buckets,
    CaptureBudget,
    CaptureFailed,
    CudaGraphBackend,
    Fallback,
    GraphRunner,
    StaticInputs,
)
from vllm_omni_audio_perf.graphs.cuda import CudaGraph, CudaGraphPool

CUDA = torch.device("cuda")
Outputs = tuple[Tensor, ...]


class FakeCuda:
    """Stands in for torch.cuda: writes down what happens, and computes on the CPU.

    Memory: each capture that begins reserves `mib`, until its graph or its pool is given back.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.local = threading.local()
        self.pools = 0
        self.under_way: set[Any] = set()
        """Pools that the allocator takes for being captured into."""
        self.uses: dict[Any, int] = {}
        self.streams = 0
        self.fail_begin = self.fail_instantiate = False
        self.lost = False
        self.inside = 0
        self.most_inside = 0
        fake = self

        class Stream:
            def __init__(self) -> None:
                fake.streams += 1
                self.name = f"s{fake.streams}"

            def wait_stream(self, other: "Stream") -> None:
                fake.events.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: "Event") -> None:
                fake.events.append(f"{self.name} waits for event of {event.stream}")

        class Event:
            stream = "nothing"

            def record(self, stream: Stream) -> None:
                self.stream = stream.name
                fake.events.append(f"event on {stream.name}")

        class CUDAGraph:
            ended = False
            handle: Any = None

            def pool(self) -> Any:
                if not self.ended:
                    raise RuntimeError("called pool() without a preceding successful capture")
                return self.handle

            def replay(self) -> None:
                fake.events.append(f"replay on {fake.current().name}")

            def reset(self) -> None:
                fake.events.append("reset")
                if self.ended:
                    fake.release(self.handle)
                self.ended = False

        class graph:
            """As in torch 2.13, including what it leaves undone after a failure."""

            def __init__(self, graph: CUDAGraph, *, pool: Any, stream: Stream, capture_error_mode: str) -> None:
                fake.events.append(f"capture in pool {pool} on {stream.name}, {capture_error_mode}")
                self.graph, self.graph.handle, self.stream = graph, pool, stream

            def __enter__(self) -> None:
                self.before = fake.current()
                fake.local.stream = self.stream
                assert fake.uses.get(self.graph.handle) != 0, "torch: capture into an abandoned pool"
                fake.under_way.add(self.graph.handle)
                fake.uses[self.graph.handle] = fake.uses.get(self.graph.handle, 0) + 1
                if fake.fail_begin:
                    raise torch.AcceleratorError("cannot begin a capture")
                fake.inside += 1
                fake.most_inside = max(fake.most_inside, fake.inside)

            def __exit__(self, kind: Any, *args: Any) -> None:
                fake.inside -= 1
                if kind is torch.AcceleratorError:
                    raise torch.AcceleratorError("operation failed due to a previous error during capture")
                fake.under_way.remove(self.graph.handle)
                if kind is ZeroDivisionError:  # stands for torch's "Invalid capture."
                    raise RuntimeError("Invalid capture.")
                self.graph.ended = True
                if fake.fail_instantiate:
                    raise torch.AcceleratorError("out of memory in instantiate")
                fake.local.stream = self.before

        self.Stream, self.Event, self.CUDAGraph, self.graph = Stream, Event, CUDAGraph, graph

    def current(self) -> Any:
        if not hasattr(self.local, "stream"):
            self.local.stream = self.Stream()
        return self.local.stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.local.stream = self.current(), stream
        try:
            yield
        finally:
            self.local.stream = before

    def graph_pool_handle(self) -> tuple[int, int]:
        self.pools += 1
        return (0, self.pools)

    def release(self, handle: Any) -> None:
        self.uses[handle] -= 1
        assert self.uses[handle] >= 0

    def end_allocate(self, device: int, handle: Any) -> None:
        if handle not in self.under_way:
            raise RuntimeError("not currently recording to this pool")
        self.under_way.remove(handle)

    def synchronize(self) -> None:
        if self.lost:
            raise torch.AcceleratorError("the device is lost")
        self.events.append("synchronize")

    def memory_reserved(self) -> int:
        return sum(self.uses.values()) * 2**20


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Stream", "Event", "CUDAGraph", "graph", "stream", "graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.cuda, "memory_reserved", fake.memory_reserved)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fake.events.append("empty cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocate)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda device, handle: fake.release(handle))
    return fake


def zeros() -> StaticInputs:
    return StaticInputs([torch.zeros(3)])


def plus_one(x: Tensor) -> Outputs:
    return (x + 1,)


def test_nothing_of_cuda_is_made_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("made a CUDA object")

    for name in ("Stream", "Event", "CUDAGraph", "graph_pool_handle", "synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend = CudaGraphBackend()
    assert backend.unavailable(torch.device("cpu")) == "CUDA graphs do not run on cpu"
    assert backend.unavailable(CUDA) == "torch finds no CUDA device"
    assert backend.create_pool(CUDA).nbytes == 0


def test_mode_streams_and_shared_pool_of_captures(cuda: FakeCuda) -> None:
    pool = CudaGraphPool(CUDA)
    streams = []

    def function(x: Tensor) -> Outputs:
        streams.append(cuda.current().name)
        return (x + 1,)

    first, second = pool.capture(zeros, function, 2), pool.capture(zeros, function, 1)

    assert [event for event in cuda.events if event.startswith("capture")] == [
        "capture in pool (0, 1) on s2, thread_local"
    ] * 2
    assert cuda.current().name == "s1"
    assert streams == ["s2"] * 5
    # The side stream waits for the inputs, and the caller's for the warm-ups.
    assert cuda.events[2:4] == ["s2 waits for s1", "s1 waits for s2"]
    assert first.nbytes == second.nbytes == 2**20
    assert pool.nbytes == 2 * 2**20
    assert torch.equal(second.outputs[0], torch.ones(3))


def test_one_capture_at_a_time_in_the_process(cuda: FakeCuda) -> None:
    def slow(x: Tensor) -> Outputs:
        time.sleep(0.02)
        return (x + 1,)

    graphs: list[CudaGraph] = []
    threads = [
        threading.Thread(target=lambda: graphs.append(CudaGraphPool(CUDA).capture(zeros, slow, 1))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cuda.most_inside == 1
    assert [graph.nbytes for graph in graphs] == [2**20] * 4  # none counted another's


def test_waits_for_the_previous_user_on_another_stream(cuda: FakeCuda) -> None:
    pool = CudaGraphPool(CUDA)
    graph = pool.capture(zeros, plus_one, 1)
    cuda.events.clear()
    for _ in range(2):
        with cuda.stream(cuda.Stream()), pool.in_order():
            graph.replay()
    assert cuda.events == [
        "replay on s3",
        "event on s3",
        "s4 waits for event of s3",
        "replay on s4",
        "event on s4",
    ]


def test_marks_the_end_of_use_after_an_error(cuda: FakeCuda) -> None:
    pool = CudaGraphPool(CUDA)
    with pytest.raises(KeyError), pool.in_order():
        raise KeyError
    assert cuda.events == ["event on s1"]


def illegal(x: Tensor) -> None:
    raise torch.AcceleratorError("operation not permitted when stream is capturing")


def invalid(x: Tensor) -> None:
    raise ZeroDivisionError


def no_tuple(x: Tensor) -> Any:
    return x


def begins(cuda: FakeCuda) -> None:
    cuda.fail_begin = True


def instantiates(cuda: FakeCuda) -> None:
    cuda.fail_instantiate = True


FAILURES: dict[str, tuple[Callable[[Tensor], Any], Callable[[FakeCuda], None] | None, str]] = {
    "illegal operation": (illegal, None, "AcceleratorError: operation failed due to a previous error"),
    "invalid": (invalid, None, r"RuntimeError: Invalid capture\."),
    "begin": (lambda x: None, begins, "AcceleratorError: cannot begin a capture"),
    "instantiate": (lambda x: None, instantiates, "AcceleratorError: out of memory in instantiate"),
    "no tuple": (no_tuple, None, "TypeError: The function must return a tuple of tensors, got Tensor"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("others", [0, 1])
def test_failed_capture_leaves_nothing_behind(failure: str, others: int, cuda: FakeCuda) -> None:
    do, prepare, message = FAILURES[failure]
    pool = CudaGraphPool(CUDA)
    graphs = [pool.capture(zeros, plus_one, 1) for _ in range(others)]
    seen: list[weakref.ref[Tensor]] = []
    calls = 0

    def function(x: Tensor) -> Any:
        nonlocal calls
        local = x + 1
        seen.extend((weakref.ref(x), weakref.ref(local)))
        calls += 1
        return do(x) if calls == 3 else (local,)

    if prepare:
        prepare(cuda)
    gc.disable()  # nothing may hang on a cycle of ours
    try:
        with pytest.raises(CaptureFailed, match=message) as caught:
            pool.capture(zeros, function, 2)
        assert calls >= 2
        assert caught.value.__cause__ is caught.value.__context__ is None
        assert [reference() for reference in seen] == [None] * len(seen)
    finally:
        gc.enable()
    assert not cuda.under_way
    assert sum(cuda.uses.values()) == others
    assert cuda.current().name == "s1"
    assert cuda.events[-2:] == ["synchronize", "empty cache"]
    assert pool.nbytes == others * 2**20

    cuda.fail_begin = cuda.fail_instantiate = False
    graphs.append(pool.capture(zeros, plus_one, 2))
    pool.release(*graphs)
    assert sum(cuda.uses.values()) == pool.nbytes == 0


@pytest.mark.parametrize("where", ["inputs", "warm-up"])
def test_failure_before_the_capture_takes_nothing_from_others(where: str, cuda: FakeCuda) -> None:
    def fail(*args: Tensor) -> Any:
        raise torch.OutOfMemoryError("no room")

    pool = CudaGraphPool(CUDA)
    pool.capture(zeros, plus_one, 1)
    with pytest.raises(CaptureFailed, match="OutOfMemoryError: no room"):
        pool.capture(fail if where == "inputs" else zeros, fail, 1)
    assert cuda.uses == {(0, 1): 1}
    assert cuda.current().name == "s1"


def test_frames_of_a_failure_are_cleared_whoever_holds_it(cuda: FakeCuda) -> None:
    held: list[BaseException] = []
    seen: list[weakref.ref[Tensor]] = []

    def function(x: Tensor) -> Outputs:
        local = x + 1
        seen.append(weakref.ref(local))
        try:
            try:
                illegal(local)
            except RuntimeError as error:
                held.append(error)
                raise KeyError("one behind the other") from error
        except KeyError as error:
            held.append(error)
            raise
        return (local,)

    with pytest.raises(CaptureFailed):
        CudaGraphPool(CUDA).capture(zeros, function, 1)
    assert len(held) == 2
    assert [reference() for reference in seen] == [None]


def test_a_lost_device_is_not_a_failed_capture(cuda: FakeCuda) -> None:
    def lose(x: Tensor) -> Outputs:
        cuda.lost = True
        illegal(x)
        return (x,)

    with pytest.raises(torch.AcceleratorError, match="the device is lost"):
        CudaGraphPool(CUDA).capture(zeros, lose, 1)


def test_release_waits_for_the_device_first(cuda: FakeCuda) -> None:
    pool = CudaGraphPool(CUDA)
    graphs = [pool.capture(zeros, plus_one, 1) for _ in range(2)]
    output = weakref.ref(graphs[0].outputs[0])
    cuda.events.clear()
    pool.release(*graphs)
    assert cuda.events == ["synchronize", "empty cache", "reset", "reset", "synchronize", "empty cache"]
    assert output() is None
    assert pool.nbytes == cuda.uses[0, 1] == 0
    pool.capture(zeros, plus_one, 1)


def test_asks_torch_whether_a_capture_is_under_way(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaGraphBackend()
    assert not backend.capturing(CUDA)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert backend.capturing(CUDA)


# On a GPU


def model(codes: Tensor, scale: Tensor) -> Outputs:
    x = codes.float() * scale[:, None]
    for _ in range(20):
        x = torch.sin(x + x.sum(1, keepdim=True))
    return (x * (codes > 0),)


def gpu_runner(function: Callable[..., Outputs] = model, mib: float = 1000, **arguments: Any) -> GraphRunner:
    return GraphRunner(
        "on a GPU",
        function,
        lambda bucket: (torch.zeros(bucket, dtype=torch.long, device=CUDA), torch.ones(bucket[0], device=CUDA)),
        lambda outputs, shape: (outputs[0][: shape[0], : shape[1]],),
        buckets=Buckets([(1, 64), (4, 64), (4, 1024)]),
        backend=CudaGraphBackend(),
        device=CUDA,
        budget=CaptureBudget(60, mib),
        **arguments,
    )


def gpu_inputs(batch: int, length: int, seed: int = 0) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(1, 9, (batch, length), generator=generator).to(CUDA),
        torch.rand(batch, generator=generator).to(CUDA),
    )


def gpu_memory() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def reference(batch: int, length: int, seed: int = 0) -> Tensor:
    padded = torch.zeros(4, 1024, dtype=torch.long, device=CUDA)
    scale = torch.ones(4, device=CUDA)
    codes, given_scale = gpu_inputs(batch, length, seed)
    padded[:batch, :length] = codes
    scale[:batch] = given_scale
    return model(padded, scale)[0][:batch, :length]


def gpu_test(function: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(function))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@gpu_test
def test_gpu_replays_what_was_captured() -> None:
    runner = gpu_runner()
    assert len(runner.capture_all()) == 3
    assert runner.statistics.pool_mib > 0
    results = [
        (shape, seed, runner(shape, *gpu_inputs(*shape, seed))[0])
        for seed, shape in enumerate([(4, 1024), (1, 3), (2, 64), (3, 65), (1, 64), (4, 1)])
    ]
    for shape, seed, output in results:
        assert_close(output, reference(*shape, seed))
    assert runner.statistics.hits == 6


@gpu_test
def test_gpu_failed_capture_leaves_the_process_usable() -> None:
    gpu_runner().capture_all()  # what torch sets up once
    before = gpu_memory()

    def reads_back(codes: Tensor, scale: Tensor) -> Outputs:
        torch.empty(2**26, device=CUDA)
        outputs = model(codes, scale)
        return (outputs[0] * outputs[0].sum().item(),)

    runner = gpu_runner(reads_back)
    assert runner.capture_all() == ()
    assert runner.statistics.failed_captures == 3
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert runner((1, 3), *gpu_inputs(1, 3))[0].isfinite().all()
    assert runner.statistics.misses == {Fallback.SWITCHED_OFF: 1}
    torch.rand(3, device=CUDA)  # the generator is not left in the middle of a capture
    after = gpu_memory()
    assert after <= before + 2**21
    good = gpu_runner()
    assert len(good.capture_all()) == 3
    assert_close(good((2, 9), *gpu_inputs(2, 9))[0], reference(2, 9))


@gpu_test
def test_gpu_failure_beside_living_graphs() -> None:
    def fails_when_long(codes: Tensor, scale: Tensor) -> Outputs:
        outputs = model(codes, scale)
        return (outputs[0] * outputs[0].sum().item(),) if codes.shape == (4, 64) else outputs

    runner = gpu_runner(fails_when_long)
    assert runner.capture_all() == ((4, 1024), (1, 64))
    for shape in ((4, 1024), (1, 5)):
        assert_close(runner(shape, *gpu_inputs(*shape))[0], reference(*shape))
    assert runner.statistics.hits == 2


@gpu_test
def test_gpu_memory_comes_back() -> None:
    warm = gpu_runner()
    warm.capture_all()
    warm.release()
    before = gpu_memory()
    for _ in range(3):
        runner = gpu_runner()
        runner.capture_all()
        assert gpu_memory() > before
        runner.release()
        assert gpu_memory() <= before
    assert gpu_runner(mib=0).capture_all() == ()
    assert gpu_memory() <= before


@gpu_test
def test_gpu_callers_on_streams_of_their_own() -> None:
    runner = gpu_runner()
    runner.capture_all()
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                inputs = gpu_inputs(4, 700 + seed, seed)
                outputs = [runner((4, 700 + seed), *inputs)[0] for _ in range(50)]
                expected = reference(4, 700 + seed, seed)
            stream.synchronize()
            for output in outputs:
                assert_close(output, expected)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert runner.statistics.hits == 200


@gpu_test
def test_gpu_other_threads_may_wait_for_the_device_during_a_capture() -> None:
    stop = threading.Event()
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                torch.ones(1000, device=CUDA).sum().item()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        runners = [gpu_runner() for _ in range(3)]
        captured = [len(runner.capture_all()) for runner in runners]
    finally:
        stop.set()
        thread.join()
    assert not wrong
    assert captured == [3, 3, 3]


@gpu_test
def test_gpu_call_inside_another_capture() -> None:
    runner = gpu_runner()
    runner.capture_all()
    inputs = gpu_inputs(1, 3)
    runner((1, 3), *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (output,) = runner((1, 3), *inputs)
    graph.replay()
    assert_close(output, reference(1, 3))
    assert runner.statistics.misses == {Fallback.NESTED: 1}
