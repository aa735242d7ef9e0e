# SPDX-License-Identifier: Apache-2.0
"""Noise of a request and noise of the stage."""

import pytest
import torch

from vllm_omni_audio_perf.token2wav.noise import request_noise, stage_noise


@pytest.mark.parametrize("frames", [0, 1, 23, 24, 25, 48, 49, 240])
def test_a_longer_clip_starts_with_the_noise_of_a_shorter_one(frames: int) -> None:
    noise = request_noise(7, frames, 80)
    assert noise.shape == (1, frames, 80)
    assert torch.equal(noise, request_noise(7, 480, 80)[:, :frames])


def test_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = request_noise(7, 50, 80)
    torch.manual_seed(2)
    assert torch.equal(first, request_noise(7, 50, 80))
    assert not torch.equal(first, request_noise(8, 50, 80))


def test_leaves_the_stages_random_state_alone() -> None:
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    request_noise(7, 50, 80)
    assert torch.equal(torch.randn(3), expected)


def test_is_standard_normal_and_does_not_repeat() -> None:
    noise = request_noise(3, 2400, 80)
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    assert not torch.equal(noise[:, :24], noise[:, 24:48])


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_takes_every_seed_of_64_bits(seed: int) -> None:
    assert request_noise(seed, 1, 80).isfinite().all()


def test_dtype() -> None:
    noise = request_noise(7, 25, 80, dtype=torch.bfloat16)
    assert torch.equal(noise, request_noise(7, 25, 80).bfloat16())


def test_stage_noise_is_the_second_of_upstreams_two_draws() -> None:
    torch.manual_seed(5)
    noise = stage_noise(74, 48, 80, device="cpu")
    torch.manual_seed(5)
    torch.randn(1, 74, 80)
    assert torch.equal(noise, torch.randn(1, 48, 80))
