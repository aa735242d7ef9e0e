# SPDX-License-Identifier: Apache-2.0
"""The noise from which a solve starts."""

import torch
from torch import Tensor


def request_noise(
    seed: int,
    frames: int,
    mel_dim: int,
    *,
    block_size: int = 24,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Noise that depends on a request's seed alone: not on the device, on other requests or on the clip's length.

    Drawn on the CPU block by block, so that the first blocks are the same however many follow: a clip that is solved
    in chunks gets the noise of one that is solved at once.

    Args:
        seed: any whole number that a `torch.Generator` takes.
        frames: mel frames.
        mel_dim: mel channels.
        block_size: frames in a block of the DiT.
        device: where the result goes.
        dtype: its dtype; it is drawn in float32.

    Returns:
        ``[1, frames, mel_dim]``, standard normal.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = [torch.randn(block_size, mel_dim, generator=generator) for _ in range(-(-frames // block_size))]
    noise = torch.cat(blocks) if blocks else torch.zeros(0, mel_dim)
    return noise[:frames].unsqueeze(0).to(device=device, dtype=dtype)


def stage_noise(
    uncapped_frames: int,
    frames: int,
    mel_dim: int,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Noise as vLLM-Omni 0.30.0 draws it, from the stage's own random state, for comparisons with it.

    It draws twice: once for the whole clip in ``_codec_to_audio`` (``qwen2_5_omni.py``), which nothing uses, and once
    in ``sample`` (``qwen2_5_omni_token2wav.py``).

    Args:
        uncapped_frames: mel frames before the cap.
        frames: mel frames after it.
        mel_dim: mel channels.
        device: of the stage, whose random state is used.
        dtype: of the reference mel.

    Returns:
        ``[1, frames, mel_dim]``, standard normal.
    """
    torch.randn(1, uncapped_frames, mel_dim, device=device, dtype=dtype)
    return torch.randn(1, frames, mel_dim, device=device, dtype=dtype)
