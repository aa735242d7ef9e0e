# SPDX-License-Identifier: Apache-2.0
"""The ODE solve of a flow-matching model: a time grid and a Runge-Kutta rule over a velocity function.

The times at which a solve evaluates the velocity are known before it starts (`evaluation_times`), so that whatever
depends on time alone can be computed before it; the velocity is asked for by the position of its time among them.

The grid and the 3/8 rule are those of ``Qwen2_5OmniToken2WavDiTModel.sample`` and ``RungeKutta4ODESolver`` in
vLLM-Omni's ``qwen2_5_omni_token2wav.py``, Euler's that of ``Qwen3TTSTokenizerV1DecoderDiTModel.sample``. Only the last
state is kept.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

Velocity = Callable[[int, Tensor], Tensor]
"""``velocity(position among the evaluation times, state [...]) -> derivative [...]``"""

Solver = Literal["rk4", "midpoint", "euler"]
"""A rule: the fourth-order 3/8 one with four evaluations an interval, the second-order midpoint rule with two, or
Euler's of first order with one."""

SOLVERS: tuple[str, ...] = get_args(Solver)

# Where in an interval a rule evaluates. An evaluation at its end is at the start of the next one.
_FRACTIONS: dict[str, tuple[float, ...]] = {"euler": (0.0,), "midpoint": (0.0, 1 / 2), "rk4": (0.0, 1 / 3, 2 / 3)}


def sway_time_grid(
    num_steps: int, sway_coefficient: float | None, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Times in [0, 1] at which the solve is divided.

    Args:
        num_steps: points of the grid, at least 2; the solve has one interval fewer.
        sway_coefficient: strength of sway sampling (F5-TTS, arXiv:2410.06885), which at -1 puts more points near 0;
            None for a uniform grid.
        device: device of the result.
        dtype: dtype of the result.

    Returns:
        ``[num_steps]``, increasing from 0 to 1.

    Raises:
        ValueError: for fewer than two points.
    """
    if num_steps < 2:
        raise ValueError(f"num_steps must be at least 2, got {num_steps}.")
    times = torch.linspace(0, 1, num_steps, device=device, dtype=dtype)
    if sway_coefficient is not None:
        times = times + sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)
    return times


def evaluation_times(grid: Tensor, solver: str) -> Tensor:
    """The distinct times at which a solve evaluates the velocity, in order.

    Args:
        grid: ``[points]``, as from `sway_time_grid`.
        solver: a `Solver`.

    Returns:
        ``[times]``: with the default of 10 points, 28 for ``rk4``, 18 for ``midpoint``, 9 for ``euler``.

    Raises:
        ValueError: for a solver that does not exist.
    """
    fractions = torch.tensor(_fractions(solver), device=grid.device, dtype=grid.dtype)
    starts, steps = grid[:-1, None], grid.diff()[:, None]
    times = (starts + steps * fractions).flatten()
    return torch.cat([times, grid[-1:]]) if solver == "rk4" else times


def solve(velocity: Velocity, initial: Tensor, grid: Tensor, solver: str = "rk4") -> Tensor:
    """Integrate ``d state / d time = velocity`` over a time grid.

    Args:
        velocity: called once for each evaluation, with the position of its time in `evaluation_times`.
        initial: state at ``grid[0]``, any shape.
        grid: ``[points]``, on the device of the state; never read back.
        solver: a `Solver`.

    Returns:
        The state at ``grid[-1]``, shaped as `initial`.

    Raises:
        ValueError: for a solver that does not exist.
    """
    evaluations = len(_fractions(solver))
    state = initial
    for interval, step in enumerate(grid.diff()):
        first = interval * evaluations
        if solver == "euler":
            state = state + velocity(first, state) * step
        elif solver == "midpoint":
            state = state + velocity(first + 1, state + velocity(first, state) * step / 2) * step
        else:
            k1 = velocity(first, state)
            k2 = velocity(first + 1, state + step * k1 * (1 / 3))
            k3 = velocity(first + 2, state + step * (k2 - k1 * (1 / 3)))
            k4 = velocity(first + 3, state + step * (k1 - k2 + k3))
            state = state + (k1 + 3 * (k2 + k3) + k4) * step / 8
    return state


def _fractions(solver: str) -> tuple[float, ...]:
    if solver not in _FRACTIONS:
        raise ValueError(f"There is no solver {solver!r}; allowed: {', '.join(SOLVERS)}.")
    return _FRACTIONS[solver]
