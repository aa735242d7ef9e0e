# SPDX-License-Identifier: Apache-2.0
"""Runs a convolutional vocoder over a long mel in pieces."""

from collections.abc import Callable

import torch
from torch import Tensor

OVERLAP_FRAMES = 20
"""Mel frames on either side of a piece that are computed and cut off again. The receptive field of Qwen2.5-Omni's
BigVGAN is 28 frames each side; at 20 what is missing is below float32's rounding."""


def vocode(
    vocoder: Callable[[Tensor], Tensor], mel: Tensor, *, piece_frames: int, overlap_frames: int = OVERLAP_FRAMES
) -> Tensor:
    """The waveform of one mel, equal to that of the whole but for rounding, in memory that does not grow with it.

    Args:
        vocoder: takes a mel ``[1, mel_dim, frames]`` and returns as many samples for each frame, in any shape.
        mel: ``[1, mel_dim, frames]``.
        piece_frames: longest mel that runs whole; longer ones run in pieces of at most so many new frames.
        overlap_frames: frames computed on either side of a piece.

    Returns:
        float32 ``[samples]`` on the CPU.
    """
    frames = mel.shape[2]
    pieces = []
    for start in range(0, frames, piece_frames):
        stop = min(start + piece_frames, frames)
        first, last = max(0, start - overlap_frames), min(frames, stop + overlap_frames)
        samples = vocoder(mel[:, :, first:last]).reshape(-1)
        hop = samples.shape[0] // (last - first)
        pieces.append(samples[(start - first) * hop : (stop - first) * hop].to("cpu", torch.float32))
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]
