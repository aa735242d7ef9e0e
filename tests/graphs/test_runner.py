# SPDX-License-Identifier: Apache-2.0
"""`GraphRunner` on the CPU, over backends that keep the contract of CUDA graphs."""

import gc
import logging
import re
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.graphs import (
    Buckets,
    CaptureBudget,
    CudaGraphBackend,
    Fallback,
    GraphRunner,
    StaticInputs,
)
from vllm_omni_audio_perf.graphs import runner as runner_module
from vllm_omni_audio_perf.testing.graph_backends import ReexecutingBackend, TraceBackend

BUCKETS = ((1, 4), (1, 8), (2, 8), (4, 16))
LARGEST_FIRST = ((4, 16), (2, 8), (1, 8), (1, 4))
CPU = torch.device("cpu")
Outputs = tuple[Tensor, ...]


def toy(codes: Tensor, scale: Tensor) -> Outputs:
    """Two samples a code, each dependent on the whole row; zeros behind the end of a row change nothing."""
    total = codes.sum(1, keepdim=True)
    return ((codes + total) * scale[:, None]).float().repeat_interleave(2, dim=1), total.squeeze(1)


def make_inputs(bucket: tuple[int, ...]) -> Outputs:
    batch, length = bucket
    return torch.zeros(batch, length, dtype=torch.long), torch.ones(1).expand(batch)


def trim(outputs: Outputs, shape: tuple[int, ...]) -> Outputs:
    batch, length = shape
    samples, total = outputs
    return samples[:batch, : 2 * length], total[:batch]


def inputs_of(batch: int, length: int, seed: int = 0) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 100, (batch, length), generator=generator), torch.rand(batch, generator=generator) + 0.5


def make_runner(backend: Any, function: Callable[..., Outputs] = toy, **changes: Any) -> GraphRunner:
    arguments: dict[str, Any] = {
        "buckets": Buckets(BUCKETS),
        "device": CPU,
        "budget": CaptureBudget(seconds=60, mib=100),
        "warmups": 1,
    }
    return GraphRunner("toy", function, make_inputs, trim, backend=backend, **arguments | changes)


def call(runner: GraphRunner, batch: int, length: int, seed: int = 0) -> Outputs:
    return runner((batch, length), *inputs_of(batch, length, seed))


def assert_right(outputs: Outputs, batch: int, length: int, seed: int = 0) -> None:
    expected = toy(*inputs_of(batch, length, seed))
    assert isinstance(outputs, tuple)
    assert len(outputs) == len(expected)
    for actual, right in zip(outputs, expected, strict=True):
        assert actual.shape == right.shape
        assert torch.equal(actual, right)


@pytest.fixture(params=[ReexecutingBackend, TraceBackend])
def backend(request: pytest.FixtureRequest) -> ReexecutingBackend:
    return request.param()


def test_every_shape_equals_eager(backend: ReexecutingBackend) -> None:
    runner = make_runner(backend)
    assert runner.capture_all() == runner.captured == LARGEST_FIRST
    calls = 0
    for batch in range(1, 5):
        for length in range(1, 17):
            assert_right(call(runner, batch, length, seed=calls), batch, length, seed=calls)
            calls += 1
    assert runner.statistics.hits == backend.replays == calls
    assert not runner.statistics.misses
    assert backend.warmups == backend.captures == len(BUCKETS)


def test_nothing_of_an_earlier_longer_call_remains(backend: ReexecutingBackend) -> None:
    runner = make_runner(backend, buckets=Buckets([(4, 16)]))
    runner.capture_all()
    for batch, length in ((4, 16), (1, 3), (3, 16), (4, 1), (1, 1)):
        assert_right(call(runner, batch, length, seed=length), batch, length, seed=length)
    assert runner.statistics.hits == 5


def test_outputs_are_the_callers_own(backend: ReexecutingBackend) -> None:
    runner = make_runner(backend, buckets=Buckets([(4, 16)]))
    runner.capture_all()
    (graph,) = backend.pools[0].graphs
    static = {tensor.untyped_storage().data_ptr() for tensor in (*graph.outputs, *graph.inputs.tensors)}
    results = {(batch, length): call(runner, batch, length) for batch, length in ((4, 16), (2, 7), (1, 16))}
    for (batch, length), outputs in results.items():
        assert_right(outputs, batch, length)
        assert not static & {output.untyped_storage().data_ptr() for output in outputs}
        # A view of part of a larger clone would keep all of it.
        assert all(output.untyped_storage().nbytes() == output.nbytes for output in outputs)
        outputs[0].fill_(torch.nan)
    assert_right(call(runner, 4, 16), 4, 16)


def test_concurrent_callers_get_their_own(backend: ReexecutingBackend) -> None:
    def slow(codes: Tensor, scale: Tensor) -> Outputs:
        time.sleep(1e-3)
        return toy(codes, scale)

    runner = make_runner(backend, slow, buckets=Buckets([(4, 16)]))
    runner.capture_all()
    fill = StaticInputs.fill

    def slow_fill(self: StaticInputs, inputs: Any) -> None:
        fill(self, inputs)
        time.sleep(1e-3)  # lets another thread in, if anything does

    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for length in range(1, 9):
                assert_right(call(runner, 2, length, seed), 2, length, seed)
        except BaseException as error:
            wrong.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticInputs, "fill", slow_fill)
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert runner.statistics.hits == 32
    assert not runner.statistics.misses


def test_captures_only_when_told_to(backend: ReexecutingBackend) -> None:
    runner = make_runner(backend)
    assert_right(call(runner, 1, 3), 1, 3)
    assert backend.captures == 0
    assert runner.statistics.misses == {Fallback.NOT_CAPTURED: 1}
    runner.capture_all()
    for length in range(1, 30):
        assert_right(call(runner, 1, length), 1, length)
    assert backend.captures == len(BUCKETS)


def test_bucket_for() -> None:
    runner = make_runner(ReexecutingBackend(failing_captures={3}))
    assert runner.bucket_for((1, 3)) is None
    runner.capture_all()
    assert runner.bucket_for((1, 3)) == (1, 4)
    assert runner.bucket_for((3, 3)) == (4, 16)
    assert runner.bucket_for((1, 5)) is None  # its capture failed
    assert runner.bucket_for((1, 17)) is None
    with pytest.raises(ValueError, match="empty"):
        runner.bucket_for((1, 0))


def nested(runner: GraphRunner, backend: ReexecutingBackend) -> None:
    runner.capture_all()
    backend.pretend_capturing = True


FALLBACKS: dict[Fallback, tuple[dict[str, Any], dict[str, Any], tuple[int, int], Any]] = {
    Fallback.UNAVAILABLE: ({"why_unavailable": "there are none here"}, {}, (1, 3), None),
    Fallback.SWITCHED_OFF: ({}, {"enabled": False}, (1, 3), None),
    Fallback.NESTED: ({}, {}, (1, 3), nested),
    Fallback.NO_BUCKET: ({}, {}, (1, 17), None),
    Fallback.NOT_CAPTURED: ({"failing_captures": {4}}, {}, (1, 3), None),
    Fallback.REPLAY_FAILED: ({"failing_replays": {1, 2}}, {}, (1, 3), None),
}


@pytest.mark.parametrize("reason", Fallback)
@pytest.mark.parametrize("backend_class", [ReexecutingBackend, TraceBackend])
def test_falls_back_to_the_same_result(
    reason: Fallback, backend_class: type[ReexecutingBackend], caplog: pytest.LogCaptureFixture
) -> None:
    for_backend, for_runner, (batch, length), prepare = FALLBACKS[reason]
    backend = backend_class(**for_backend)
    runner = make_runner(backend, **for_runner)
    (prepare or (lambda runner, backend: runner.capture_all()))(runner, backend)
    caplog.set_level(logging.INFO)
    caplog.clear()
    assert_right(call(runner, batch, length), batch, length)
    assert runner.statistics.misses == {reason: 1}
    (record,) = caplog.records
    assert f"toy runs without a graph: {reason}" in record.message
    assert (record.levelno == logging.WARNING) == (reason == Fallback.REPLAY_FAILED)
    caplog.clear()
    assert_right(call(runner, batch, length, seed=1), batch, length, seed=1)
    if reason != Fallback.REPLAY_FAILED:  # which comes to be NOT_CAPTURED
        assert runner.statistics.misses == {reason: 2}
        assert not caplog.records
    assert runner.statistics.hits == 0


def test_runs_on_the_cpu_with_the_cuda_backend() -> None:
    runner = make_runner(CudaGraphBackend())
    assert runner.capture_all() == ()
    assert_right(call(runner, 2, 5), 2, 5)
    assert runner.statistics.misses == {Fallback.UNAVAILABLE: 1}


def test_captures_nothing_inside_another_capture(backend: ReexecutingBackend) -> None:
    backend.pretend_capturing = True
    runner = make_runner(backend)
    assert runner.capture_all() == ()
    assert backend.captures == 0
    backend.pretend_capturing = False
    assert runner.capture_all() == LARGEST_FIRST


def test_eager_is_given_the_inputs_as_they_are() -> None:
    seen: list[Outputs] = []

    def eager(*inputs: Tensor) -> Outputs:
        seen.append(inputs)
        return (inputs[0],)

    runner = make_runner(ReexecutingBackend(), eager=eager)
    inputs = inputs_of(1, 20)
    assert runner((1, 20), *inputs)[0] is inputs[0]
    assert all(given is own for given, own in zip(seen[0], inputs, strict=True))


def test_a_callers_own_eager_stands_over_the_runners() -> None:
    """And is called only where no graph is replayed, as after a replay that failed."""
    runner = make_runner(ReexecutingBackend(), eager=lambda *inputs: pytest.fail("the runner's own"))
    mine = (torch.ones(1),)
    assert runner((1, 4), *inputs_of(1, 4), eager=lambda: mine) is mine
    runner.capture_all()
    assert_right(runner((1, 4), *inputs_of(1, 4), eager=lambda: mine), 1, 4)
    (graph,) = (graph for bucket, graph in runner._graphs.items() if bucket == (1, 4))

    def fails() -> None:
        raise RuntimeError("odd")

    graph.replay = fails  # type: ignore[method-assign]
    assert runner((1, 4), *inputs_of(1, 4), eager=lambda: mine) is mine
    assert runner.statistics.misses[Fallback.REPLAY_FAILED] == 1


def test_function_as_eager_is_trimmed_too() -> None:
    def with_tail(codes: Tensor, scale: Tensor) -> Outputs:
        samples, total = toy(codes, scale)
        return torch.nn.functional.pad(samples, (0, 3)), total

    runner = make_runner(ReexecutingBackend(), with_tail)
    assert_right(call(runner, 1, 20), 1, 20)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("capture_mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_autograd(capture_mode: Any, mode: Any, backend: ReexecutingBackend) -> None:
    weight = torch.ones(1, requires_grad=True)

    def function(codes: Tensor, scale: Tensor) -> Outputs:
        samples, total = toy(codes, scale)
        return samples * weight, total

    runner = make_runner(backend, function)
    with capture_mode():
        runner.capture_all()
    with mode():
        for length in (3, 2, 40):
            outputs = call(runner, 1, length)
            assert_right(outputs, 1, length)
            assert not any(output.requires_grad for output in outputs)
    assert runner.statistics.hits == 2


def test_reads_parameters_anew(backend: ReexecutingBackend) -> None:
    layer = torch.nn.Linear(1, 1)

    def function(codes: Tensor, scale: Tensor) -> Outputs:
        samples, total = toy(codes, scale)
        return layer(samples[..., None])[..., 0], total

    runner = make_runner(backend, function)
    runner.capture_all()
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.fill_(0.0)
    assert torch.equal(call(runner, 1, 3)[0], 2 * toy(*inputs_of(1, 3))[0])


# Budgets


def mebibytes(inputs: tuple[Tensor, ...]) -> float:
    """A pretended size: one MiB an element of the codes."""
    return float(inputs[0].numel())


@pytest.mark.parametrize(
    ("mib", "captured"),
    [
        (64 + 16 + 8 + 4, LARGEST_FIRST),
        (64 + 16 + 8 + 3, LARGEST_FIRST[:3]),
        (64 + 8, ((4, 16), (1, 8))),  # a smaller one is still tried
        (63, LARGEST_FIRST[1:]),
        (5, ((1, 4),)),
        (0, ()),
    ],
)
def test_budget_of_memory(mib: float, captured: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = ReexecutingBackend(mib=mebibytes)
    runner = make_runner(backend, budget=CaptureBudget(60, mib))
    assert runner.capture_all() == captured
    (pool,) = backend.pools
    assert len(pool.graphs) == len(captured)
    assert pool.nbytes == runner.statistics.pool_mib * 2**20 <= mib * 2**20
    assert runner.statistics.captures == len(captured)
    assert runner.statistics.failed_captures == 0
    assert (f"over the budget of {mib} MiB" in caplog.text) == (captured != LARGEST_FIRST)
    for length in (3, 7, 16):
        assert_right(call(runner, 1, length), 1, length)


def test_budget_of_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    monkeypatch.setattr(runner_module.time, "perf_counter", lambda: now)

    def function(codes: Tensor, scale: Tensor) -> Outputs:
        nonlocal now
        now += 1  # twice a capture, with the warm-up
        return toy(codes, scale)

    runner = make_runner(ReexecutingBackend(), function, budget=CaptureBudget(3.5, 100))
    assert runner.capture_all() == LARGEST_FIRST[:2]
    assert runner.statistics.capture_seconds == 4
    assert "without 1x8, 1x4: over the budget of 3.5 s" in caplog.text
    assert runner.capture_all() == LARGEST_FIRST  # a budget of its own for what is missing


@pytest.mark.parametrize("arguments", [{"seconds": -1, "mib": 1}, {"seconds": 1, "mib": float("nan")}])
def test_refuses_budget(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not at least 0"):
        CaptureBudget(**arguments)


@pytest.mark.parametrize("argument", ["warmups", "max_failures"])
def test_refuses_count(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be at least 1, got 0"):
        make_runner(ReexecutingBackend(), **{argument: 0})


# Failures


def test_failed_capture_leaves_out_only_its_bucket(
    backend: ReexecutingBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    backend.failing_captures = {2}
    runner = make_runner(backend)
    assert runner.capture_all() == ((4, 16), (1, 8), (1, 4))
    assert runner.statistics.failed_captures == 1
    assert "the capture of 2x8 failed: RuntimeError: this capture fails on request" in caplog.text
    assert "without 2x8: failed" in caplog.text
    for batch, length in ((1, 3), (2, 8), (4, 16)):
        assert_right(call(runner, batch, length), batch, length)
    assert runner.statistics.misses == {Fallback.NOT_CAPTURED: 1}
    assert runner.capture_all() == LARGEST_FIRST  # tried again when told to


def test_failed_capture_frees_what_it_held(backend: ReexecutingBackend) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def function(codes: Tensor, scale: Tensor) -> Outputs:
        local = codes * 2
        seen.extend(weakref.ref(tensor) for tensor in (codes, scale, local))
        return toy(codes, scale)[0], local.sum(1)

    backend.failing_captures = {1, 2, 3, 4}
    gc.disable()
    try:
        runner = make_runner(backend, function, max_failures=9)
        assert runner.capture_all() == ()
        assert seen
        assert [reference() for reference in seen] == [None] * len(seen)
    finally:
        gc.enable()
    assert backend.pools[0].nbytes == 0


def test_turns_itself_off_after_failures(backend: ReexecutingBackend, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend.failing_captures = {2, 3}
    runner = make_runner(backend, max_failures=2)
    assert runner.capture_all() == ()
    assert backend.captures == 3
    assert "toy: switched off after 2 failures" in caplog.text
    assert "without 1x4: switched off after 2 failures" in caplog.text
    assert backend.pools[0].graphs == []
    assert runner.statistics.pool_mib == 0
    assert_right(call(runner, 4, 16), 4, 16)
    assert runner.statistics.misses == {Fallback.SWITCHED_OFF: 1}
    assert runner.capture_all() == ()
    assert backend.captures == 3


def test_failed_replay_loses_its_graph_and_no_request(backend: ReexecutingBackend) -> None:
    backend.failing_replays = {2}
    runner = make_runner(backend)
    runner.capture_all()
    for seed in range(4):
        assert_right(call(runner, 1, 3, seed), 1, 3, seed)
    assert runner.statistics.hits == 1
    assert runner.statistics.misses == {Fallback.REPLAY_FAILED: 1, Fallback.NOT_CAPTURED: 2}
    assert runner.captured == LARGEST_FIRST[:3]
    assert len(backend.pools[0].graphs) == 3
    assert runner.statistics.pool_mib == 3


def test_turns_itself_off_after_failed_replays(backend: ReexecutingBackend) -> None:
    backend.failing_replays = {1, 2}
    runner = make_runner(backend, max_failures=2)
    runner.capture_all()
    for length in (3, 7, 16):
        assert_right(call(runner, 1, length), 1, length)
    assert runner.statistics.misses == {Fallback.REPLAY_FAILED: 2, Fallback.SWITCHED_OFF: 1}
    assert backend.pools[0].graphs == []


def test_a_lost_device_is_not_hidden(backend: ReexecutingBackend) -> None:
    backend.failing_replays = {1}
    backend.replay_error = torch.AcceleratorError("the device is lost")
    runner = make_runner(backend)
    runner.capture_all()
    with pytest.raises(torch.AcceleratorError, match="lost"):
        call(runner, 1, 3)
    assert not runner.statistics.misses


def test_release_and_capture_again(backend: ReexecutingBackend) -> None:
    runner = make_runner(backend)
    runner.capture_all()
    buffers = [weakref.ref(tensor) for graph in backend.pools[0].graphs for tensor in graph.inputs.tensors]
    runner.release()
    assert [reference() for reference in buffers] == [None] * len(buffers)
    assert runner.captured == ()
    assert runner.statistics.pool_mib == backend.pools[0].nbytes == 0
    assert_right(call(runner, 1, 3), 1, 3)
    assert runner.statistics.misses == {Fallback.NOT_CAPTURED: 1}
    assert runner.capture_all() == LARGEST_FIRST
    assert_right(call(runner, 1, 3), 1, 3)
    assert runner.statistics.hits == 1


def test_release_forgets_failures_but_not_the_configuration() -> None:
    runner = make_runner(ReexecutingBackend(failing_captures={1}), max_failures=1)
    assert runner.capture_all() == ()
    runner.release()
    assert runner.capture_all() == LARGEST_FIRST
    off = make_runner(ReexecutingBackend(), enabled=False)
    off.release()
    assert off.capture_all() == ()


# Refused calls


@pytest.mark.parametrize("shape", [(0, 3), (1, 0)])
@pytest.mark.parametrize("why_unavailable", [None, "there are none here"])
def test_refuses_empty_shape(shape: tuple[int, int], why_unavailable: str | None) -> None:
    runner = make_runner(ReexecutingBackend(why_unavailable=why_unavailable))
    with pytest.raises(ValueError, match=re.escape(f"Shape {shape} is empty")):
        runner(shape, *inputs_of(1, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda codes, scale: (codes,), "Expected 2 inputs, got 1"),
        (lambda codes, scale: (codes.int(), scale), "Input 0 must be torch.int64 on cpu, got torch.int32 on cpu"),
        (lambda codes, scale: (codes, scale.to("meta")), "Input 1 must be torch.float32 on cpu, got .* on meta"),
        (lambda codes, scale: (codes[0], scale), r"Input 0 of shape \(3,\) does not fit its buffer of \(1, 4\)"),
        (lambda codes, scale: (codes.repeat(1, 2), scale), r"Input 0 of shape \(1, 6\) does not fit"),
    ],
)
def test_refuses_inputs(change: Any, message: str) -> None:
    runner = make_runner(ReexecutingBackend())
    runner.capture_all()
    with pytest.raises(ValueError, match=message):
        runner((1, 3), *change(*inputs_of(1, 3)))
    assert_right(call(runner, 1, 3), 1, 3)


# Reports


def test_one_line_about_captures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    make_runner(ReexecutingBackend(mib=2), budget=CaptureBudget(60, 6)).capture_all()
    (record,) = caplog.records
    assert re.fullmatch(
        r"toy: graphs for 4x16, 2x8, 1x8 \(3 of 4 buckets\), in \d\.\d s, 6 MiB; "
        r"without 1x4: over the budget of 6 MiB\.",
        record.message,
    )


def test_progress_is_shown_where_there_is_any(capsys: pytest.CaptureFixture[str]) -> None:
    runner = make_runner(ReexecutingBackend())
    runner.capture_all()
    shown = capsys.readouterr().err
    assert "Capturing toy" in shown
    assert "4/4" in shown
    runner.capture_all()
    make_runner(ReexecutingBackend(), buckets=Buckets([])).capture_all()
    make_runner(ReexecutingBackend(why_unavailable="no")).capture_all()
    assert capsys.readouterr().err == ""


def test_at_exit_logs_what_was_not_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(runner_module, "_RUNNERS", weakref.WeakSet())
    logged, unlogged, idle, dead = (make_runner(ReexecutingBackend()) for _ in range(4))
    for runner in (logged, unlogged, dead):
        call(runner, 1, 3)
    logged.log_statistics()
    unlogged.name = "unlogged"
    del dead, runner
    caplog.clear()
    runner_module._log_statistics_at_exit()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["unlogged"]
    runner_module._log_statistics_at_exit()
    assert len(caplog.records) == 1
    call(logged, 1, 3)
    runner_module._log_statistics_at_exit()
    assert len(caplog.records) == 2
    assert idle.statistics.calls == 0


def test_without_vllm_and_to_the_end_of_the_process() -> None:
    script = textwrap.dedent("""
        import logging, sys
        logging.basicConfig(level=logging.INFO)
        import torch
        from vllm_omni_audio_perf.graphs import *
        from vllm_omni_audio_perf.testing.graph_backends import ReexecutingBackend
        assert not {"vllm", "vllm_omni", "transformers"} & set(sys.modules)
        runner = GraphRunner("toy", lambda x: (x + 1,), lambda bucket: (torch.zeros(bucket),), lambda y, s: y,
            buckets=Buckets([(4,)]), backend=ReexecutingBackend(), device="cpu", budget=CaptureBudget(9, 9))
        runner.capture_all()
        runner((4,), torch.ones(4))
    """)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert run.stderr.count("toy: 1 of 1 calls replayed a graph") == 1
