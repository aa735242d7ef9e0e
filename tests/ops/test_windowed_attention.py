# SPDX-License-Identifier: Apache-2.0
"""Windowed attention against softmax attention written out frame by frame."""

import itertools

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.ops import WindowedAttention
from vllm_omni_audio_perf.ops.windowed_attention import block_size, is_blocked
from vllm_omni_audio_perf.testing.capture_safety import assert_capture_safe

WINDOWS = [(-1, -1), (0, 0), (3, 0), (0, 5), (7, 2), (-1, 4), (6, -1), (40, 10), (1000, 1000)]


def reference(query: Tensor, key: Tensor, value: Tensor, length: int, window: tuple[int, int], causal: bool) -> Tensor:
    """One sequence, ``[heads, frames, head_dim]``, frame by frame."""
    out = torch.zeros_like(query)
    left, right = window
    for frame in range(length):
        first = 0 if left < 0 else max(0, frame - left)
        end = length if right < 0 else min(length, frame + right + 1)
        end = min(end, frame + 1) if causal else end
        scores = torch.einsum("hd,hkd->hk", query[:, frame], key[:, first:end]) / query.shape[-1] ** 0.5
        out[:, frame] = torch.einsum("hk,hkd->hd", scores.softmax(-1), value[:, first:end])
    return out


def tensors(lengths: list[int], frames: int, garbage: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value ``[batch, 2, frames, 8]`` with `garbage` beyond each length of key and value."""
    generator = torch.Generator().manual_seed(frames)
    made = [torch.randn(len(lengths), 2, frames, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    for tensor, (row, length) in itertools.product(made[1:], enumerate(lengths)):
        tensor[row, :, length:] = garbage
    return [tensor.to(dtype) for tensor in made]


def check(lengths: list[int], frames: int, window: tuple[int, int], causal: bool, garbage: float) -> None:
    query, key, value = tensors(lengths, frames, garbage)
    attend = WindowedAttention(torch.tensor(lengths), frames, window=window, causal=causal, dtype=torch.float64)
    out = attend(query, key, value)
    for row, length in enumerate(lengths):
        expected = reference(query[row], key[row], value[row], length, window, causal)
        assert torch.allclose(out[row, :, :length], expected[:, :length], rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_is_attention_within_the_window(window: tuple[int, int], causal: bool) -> None:
    for frames, garbage in ((1, 0.0), (13, torch.nan), (50, torch.inf)):
        check([frames, (frames + 1) // 2, 1, 0], frames, window, causal, garbage)


@pytest.mark.parametrize("window", [(40, 10), (10, 3), (0, 0), (5, 0)], ids=str)
def test_blocks_meet_at_every_length(window: tuple[int, int]) -> None:
    """Around whole numbers of blocks, where the last block is full, or has one frame, or all but one."""
    block = block_size(*window)
    fewest = next(frames for frames in itertools.count(1) if is_blocked(frames, *window))
    for blocks, change in itertools.product((1, 2), (-1, 0, 1)):
        frames = (fewest // block + blocks) * block + change
        assert is_blocked(frames, *window)
        check([frames, frames - 1, block, block + 1, 3], frames, window, False, torch.nan)


@pytest.mark.parametrize("frames", [30, 500])
@pytest.mark.parametrize("window", [window for window in WINDOWS if window != (-1, -1)], ids=str)
def test_no_row_sees_nothing(window: tuple[int, int], frames: int) -> None:
    """Softmax over nothing is NaN in some kernels, if not in torch 2.13's for CPUs."""
    attend = WindowedAttention(torch.tensor([frames, 7, 1, 0]), frames, window=window)
    assert attend._mask is None or (attend._mask == 0).any(dim=-1).all()


def test_short_and_unbounded_windows_are_dense() -> None:
    assert not is_blocked(50, 40, 10)
    assert not is_blocked(5000, -1, 10)
    assert not is_blocked(5000, 40, -1)
    assert is_blocked(1120, 40, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frames", [60, 400])
def test_lower_precision(dtype: torch.dtype, frames: int) -> None:
    lengths = [frames, frames // 3]
    query, key, value = tensors(lengths, frames, torch.nan, dtype)
    out = WindowedAttention(torch.tensor(lengths), frames, window=(40, 10), dtype=dtype)(query, key, value)
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for row, length in enumerate(lengths):
        expected = reference(*(tensor[row].double() for tensor in (query, key, value)), length, (40, 10), False)
        assert torch.allclose(out[row, :, :length].double(), expected[:, :length], rtol=0, atol=tolerance)


@pytest.mark.parametrize(("window", "causal"), [((-1, -1), True), ((40, 10), False), ((-1, 3), False)])
@pytest.mark.parametrize("frames", [30, 500])
def test_can_be_captured(window: tuple[int, int], causal: bool, frames: int) -> None:
    def attend(lengths: Tensor, *inputs: Tensor) -> Tensor:
        return WindowedAttention(lengths, frames, window=window, causal=causal)(*inputs)

    lengths = [frames, 3]
    inputs = tensors(lengths, frames, 0.0, torch.float32)
    assert_capture_safe(attend, [torch.tensor(lengths), *inputs])
