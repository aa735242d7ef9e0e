# SPDX-License-Identifier: Apache-2.0
"""Group normalisation of padded sequences against torch's of each sequence alone."""

import pytest
import torch

from vllm_omni_audio_perf.ops import masked_group_norm
from vllm_omni_audio_perf.testing.capture_safety import assert_capture_safe


@pytest.mark.parametrize("garbage", [0.0, 1e6, torch.nan, torch.inf])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_is_the_norm_of_the_valid_steps(garbage: float, offset: float) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 6, 40, generator=generator) + offset
    weight, bias = torch.randn(2, 6, generator=generator)
    lengths = [40, 17, 1, 0]
    for row, length in zip(hidden, lengths, strict=True):
        row[:, length:] = garbage
    normed = masked_group_norm(hidden, torch.tensor(lengths), weight, bias, eps=1e-5)
    assert torch.isfinite(normed).all()
    for row, length in enumerate(lengths):
        if length:
            alone = hidden[row : row + 1, :, :length].double()
            expected = torch.nn.functional.group_norm(alone, 1, weight.double(), bias.double())
            assert torch.allclose(normed[row, :, :length].double(), expected[0], rtol=0, atol=1e-4 if offset else 5e-6)


def test_keeps_the_dtype() -> None:
    hidden = torch.randn(2, 4, 9, dtype=torch.bfloat16)
    ones = torch.ones(4, dtype=torch.bfloat16)
    assert masked_group_norm(hidden, torch.tensor([9, 4]), ones, ones).dtype == torch.bfloat16


def test_can_be_captured() -> None:
    inputs = [torch.randn(2, 4, 9), torch.tensor([9, 4]), torch.ones(4), torch.zeros(4)]
    assert_capture_safe(masked_group_norm, inputs)
