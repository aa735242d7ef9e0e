# SPDX-License-Identifier: Apache-2.0
"""The ODE solve against closed forms, a fine reference in float64 and upstream's solvers."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.token2wav.solver import SOLVERS, evaluation_times, solve, sway_time_grid

CPU = torch.device("cpu")
ORDERS = {"rk4": 4, "midpoint": 2, "euler": 1}
EVALUATIONS = {"rk4": 4, "midpoint": 2, "euler": 1}


def of_time(function: Callable[[Tensor, Tensor], Tensor], grid: Tensor, solver: str) -> Callable[[int, Tensor], Tensor]:
    """A velocity that is given by time, as `solve` takes it."""
    times = evaluation_times(grid, solver)
    return lambda index, state: function(times[index], state)


def swinging(time: Tensor, state: Tensor) -> Tensor:
    """Has the solution ``exp(sin(2 * time) / 2)`` from 1."""
    return state * torch.cos(2 * time)


def test_every_solver_is_tested() -> None:
    assert set(ORDERS) == set(SOLVERS)


@pytest.mark.parametrize("sway", [None, -1.0])
@pytest.mark.parametrize("solver", SOLVERS)
def test_has_the_order_of_its_rule(solver: str, sway: float | None) -> None:
    """Against the closed form in float64."""

    def error(points: int) -> float:
        grid = sway_time_grid(points, sway, device=CPU, dtype=torch.float64)
        state = solve(of_time(swinging, grid, solver), torch.ones(1, dtype=torch.float64), grid, solver)
        return float((state - torch.exp(torch.sin(torch.tensor(2.0, dtype=torch.float64)) / 2)).abs())

    ratio = error(81) / error(161)
    assert ratio == pytest.approx(2 ** ORDERS[solver], rel=0.2)


@pytest.mark.parametrize("solver", SOLVERS)
def test_float32_stays_close_to_float64(solver: str) -> None:
    """The rule itself loses nothing: the same steps in float64 differ by rounding alone."""
    generator = torch.Generator().manual_seed(0)
    weight, initial = (torch.randn(*shape, generator=generator) for shape in ((8, 8), (2, 5, 8)))

    def solved(dtype: torch.dtype) -> Tensor:
        grid = sway_time_grid(10, -1.0, device=CPU).to(dtype)
        velocity = of_time(lambda time, state: torch.tanh(state @ weight.to(dtype) + time), grid, solver)
        return solve(velocity, initial.to(dtype), grid, solver)

    reference = solved(torch.float64)
    assert (solved(torch.float32) - reference).norm() / reference.norm() < 1e-6


@pytest.mark.parametrize("sway", [-1.0, None, 0.5])
def test_rk4_equals_upstream_bit_for_bit(sway: float | None) -> None:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 8, generator=generator)
    initial = torch.randn(2, 5, 8, generator=generator)

    def velocity(time: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(state @ weight + time)

    grid = sway_time_grid(10, sway, device=CPU)
    expected = RungeKutta4ODESolver(function=velocity, initial_value=initial).integrate(grid)[-1]
    assert torch.equal(solve(of_time(velocity, grid, "rk4"), initial, grid), expected)


def test_euler_is_the_plain_loop() -> None:
    grid = sway_time_grid(10, -1.0, device=CPU)
    state = torch.ones(3)
    for start, end in itertools.pairwise(grid):
        state = state + swinging(start, state) * (end - start)
    assert torch.equal(solve(of_time(swinging, grid, "euler"), torch.ones(3), grid, "euler"), state)


@pytest.mark.parametrize("points", [2, 5, 10])
@pytest.mark.parametrize("solver", SOLVERS)
def test_evaluates_each_listed_time(solver: str, points: int) -> None:
    """28 distinct times in 36 evaluations with upstream's settings."""
    grid = sway_time_grid(points, -1.0, device=CPU)
    asked: list[int] = []

    def velocity(index: int, state: Tensor) -> Tensor:
        asked.append(index)
        return state

    solve(velocity, torch.ones(1), grid, solver)
    times = evaluation_times(grid, solver)
    assert len(asked) == EVALUATIONS[solver] * (points - 1)
    assert sorted(set(asked)) == list(range(len(times)))
    assert (times.diff() > 0).all()
    if solver == "rk4" and points == 10:
        assert (len(asked), len(times)) == (36, 28)


def test_time_grid() -> None:
    times = sway_time_grid(10, -1.0, device=CPU)
    uniform = torch.linspace(0, 1, 10)
    assert times.dtype == torch.float32
    assert float(times[0]) == 0
    assert float(times[-1]) == pytest.approx(1)
    assert (times.diff() > 0).all()
    assert (times[1:-1] < uniform[1:-1]).all()  # more points near 0
    assert torch.equal(sway_time_grid(10, None, device=CPU), uniform)


def test_refuses_a_grid_without_an_interval() -> None:
    with pytest.raises(ValueError, match="num_steps must be at least 2, got 1"):
        sway_time_grid(1, None, device=CPU)


def test_refuses_an_unknown_solver() -> None:
    grid = sway_time_grid(3, None, device=CPU)
    for call in (lambda: evaluation_times(grid, "rk5"), lambda: solve(lambda i, s: s, grid, grid, "rk5")):
        with pytest.raises(ValueError, match="no solver 'rk5'; allowed: rk4, midpoint, euler"):
            call()
