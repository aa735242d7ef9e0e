# SPDX-License-Identifier: Apache-2.0
"""The ODE solve of the Token2Wav: a time grid and a Runge-Kutta rule over a velocity function.

The maths is that of ``RungeKutta4ODESolver`` and ``Qwen2_5OmniToken2WavDiTModel.sample`` in vLLM-Omni's
``qwen2_5_omni_token2wav.py``; only the last state is kept instead of the whole trajectory.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]
"""``velocity(time [], state [...]) -> derivative [...]``"""


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


def solve_rk4(velocity: Velocity, initial: Tensor, times: Tensor) -> Tensor:
    """Integrate ``d state / d time = velocity(time, state)`` with the fourth-order 3/8 rule.

    Args:
        velocity: called four times an interval.
        initial: state at ``times[0]``, any shape.
        times: ``[points]``, on the device of the state; never read back.

    Returns:
        The state at ``times[-1]``, shaped as `initial`.
    """
    state = initial
    for start, end in pairwise(times):
        step = end - start
        k1 = velocity(start, state)
        k2 = velocity(start + step * (1 / 3), state + step * k1 * (1 / 3))
        k3 = velocity(start + step * (2 / 3), state + step * (k2 - k1 * (1 / 3)))
        k4 = velocity(end, state + step * (k1 - k2 + k3))
        state = state + (k1 + 3 * (k2 + k3) + k4) * step / 8
    return state
