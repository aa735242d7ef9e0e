# SPDX-License-Identifier: Apache-2.0
"""The ODE solve against closed forms and upstream's solver."""

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.qwen2_5_omni.solver import solve_rk4, sway_time_grid

CPU = torch.device("cpu")


def test_is_of_fourth_order() -> None:
    def error(points: int) -> float:
        times = torch.linspace(0, 1, points, dtype=torch.float64)
        state = solve_rk4(lambda time, state: state * torch.cos(3 * time), torch.ones(1, dtype=torch.float64), times)
        return float((state - torch.exp(torch.sin(torch.tensor(3.0, dtype=torch.float64)) / 3)).abs())

    assert error(81) < 1e-8
    assert 12 < error(41) / error(81) < 20  # 2 ** 4


@pytest.mark.parametrize("sway", [-1.0, None, 0.5])
def test_equals_upstream_bit_for_bit(sway: float | None) -> None:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 8, generator=generator)
    initial = torch.randn(2, 5, 8, generator=generator)

    def velocity(time: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(state @ weight + time)

    times = sway_time_grid(10, sway, device=CPU)
    expected = RungeKutta4ODESolver(function=velocity, initial_value=initial).integrate(times)[-1]
    assert torch.equal(solve_rk4(velocity, initial, times), expected)


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
