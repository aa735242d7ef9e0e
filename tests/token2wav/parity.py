# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share."""

import torch
from torch import Tensor, nn

from vllm_omni_audio_perf.token2wav import Clip

MAX_REL_ERROR = 1e-5
# Codes of 2 mel frames: one, odd counts, less than a block, whole blocks of 12 codes, one code over, many blocks.
CODE_COUNTS = (1, 2, 5, 11, 12, 13, 24, 25, 37, 61, 120)


def rel_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def random_codes(count: int) -> Tensor:
    return torch.randint(0, 8193, (count,), generator=torch.Generator().manual_seed(count))


def random_noise(frames: int, seed: int = 7) -> Tensor:
    return torch.randn(1, frames, 80, generator=torch.Generator().manual_seed(seed))


def random_clip(codes: int, voice: tuple[Tensor, Tensor], seed: int = 7) -> Clip:
    return Clip(random_codes(codes), *voice, random_noise(2 * codes, seed))


def other_voice(seed: int, reference_frames: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 192, generator=generator), torch.randn(1, reference_frames, 80, generator=generator)


def evaluate_upstream(dit: nn.Module, clip: Clip, time: Tensor) -> Tensor:
    """One guided evaluation of upstream's class: ``[2, frames, mel_dim]``, conditional first."""
    speaker = clip.speaker.unsqueeze(1).expand(1, clip.noise.shape[1], -1)
    return dit(
        hidden_states=clip.noise,
        condition_vector=clip.reference_mel,
        speaker_embedding=speaker,
        quantized_code=clip.codes.unsqueeze(0),
        time_step=time,
    )
