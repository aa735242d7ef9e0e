# SPDX-License-Identifier: Apache-2.0
"""The backends for tests keep what CUDA graphs promise, and what they do not."""

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.graphs import CaptureFailed, StaticInputs
from vllm_omni_audio_perf.testing.graph_backends import PretendedPool, ReexecutingBackend, TraceBackend

CPU = torch.device("cpu")
Outputs = tuple[Tensor, ...]


def zeros() -> StaticInputs:
    return StaticInputs([torch.zeros(3)])


def plus_one(x: Tensor) -> Outputs:
    return x + 1, x.long(), x > 0


@pytest.fixture(params=[ReexecutingBackend, TraceBackend])
def backend(request: pytest.FixtureRequest) -> ReexecutingBackend:
    return request.param()


@pytest.fixture
def pool(backend: ReexecutingBackend) -> PretendedPool:
    return backend.create_pool(CPU)


def test_outputs_hold_nothing_before_the_first_replay(pool: PretendedPool) -> None:
    graph = pool.capture(zeros, plus_one, 2)
    floats, integers, flags = graph.outputs
    assert floats.isnan().all()
    assert (integers == torch.iinfo(torch.int64).min).all()
    assert flags.all()
    graph.replay()
    assert torch.equal(floats, torch.ones(3))
    assert torch.equal(integers, torch.zeros(3, dtype=torch.long))
    assert not flags.any()


def test_replays_overwrite_the_same_tensors_from_the_inputs(pool: PretendedPool) -> None:
    graph = pool.capture(zeros, plus_one, 1)
    outputs = graph.outputs
    for value in (4.0, 5.0):
        graph.inputs.fill([torch.full((2,), value)])
        graph.replay()
        assert graph.outputs is outputs
        assert torch.equal(outputs[0], torch.tensor([value + 1, value + 1, 1.0]))


def test_counts(backend: ReexecutingBackend, pool: PretendedPool) -> None:
    for _ in range(2):
        pool.capture(zeros, plus_one, 3).replay()
    assert (backend.captures, backend.warmups, backend.replays) == (2, 6, 2)
    assert backend.pools == [pool]


@pytest.mark.parametrize(("backend_class", "replayed"), [(ReexecutingBackend, 3.0), (TraceBackend, 2.0)])
def test_only_a_trace_freezes_python(backend_class: type[ReexecutingBackend], replayed: float) -> None:
    factor = 2.0
    graph = backend_class().create_pool(CPU).capture(zeros, lambda x: ((x + 1) * factor,), 1)
    factor = 3.0
    graph.replay()
    assert torch.equal(graph.outputs[0], torch.full((3,), replayed))


def test_a_trace_cannot_branch_on_a_value() -> None:
    pool = TraceBackend().create_pool(CPU)
    with pytest.raises(CaptureFailed):
        pool.capture(zeros, lambda x: (x if x.sum() > 0 else -x,), 1)


def test_fails_when_told_to(backend: ReexecutingBackend, pool: PretendedPool) -> None:
    backend.failing_captures, backend.failing_replays = {2}, {2, 3}
    graph = pool.capture(zeros, plus_one, 1)
    with pytest.raises(CaptureFailed, match="on request"):
        pool.capture(zeros, plus_one, 1)
    pool.capture(zeros, plus_one, 1)
    assert len(pool.graphs) == 2
    graph.replay()
    with pytest.raises(RuntimeError, match="on request"):
        graph.replay()
    backend.replay_error = torch.AcceleratorError("lost")
    with pytest.raises(torch.AcceleratorError):
        graph.replay()
    graph.replay()


def test_pretends_memory(backend: ReexecutingBackend, pool: PretendedPool) -> None:
    first = pool.capture(zeros, plus_one, 1)
    backend.mib = lambda inputs: inputs[0].numel() / 2
    second = pool.capture(zeros, plus_one, 1)
    assert (first.nbytes, second.nbytes, pool.nbytes) == (2**20, 1.5 * 2**20, 2.5 * 2**20)
    pool.release(first)
    assert pool.nbytes == second.nbytes
    assert pool.graphs == [second]
    with pytest.raises(AssertionError, match="after its release"):
        first.replay()


def test_pretends_to_be_capturing_or_unavailable(backend: ReexecutingBackend) -> None:
    assert not backend.capturing(CPU)
    backend.pretend_capturing = True
    assert backend.capturing(CPU)
    assert backend.unavailable(CPU) is None
    backend.why_unavailable = "no reason"
    assert backend.unavailable(CPU) == "no reason"


def test_notices_two_users_at_once(pool: PretendedPool) -> None:
    with pool.in_order(), pytest.raises(AssertionError, match="at once"), pool.in_order():
        pass
    with pool.in_order():
        pass
