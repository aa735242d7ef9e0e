# SPDX-License-Identifier: Apache-2.0
"""Inverse short-time Fourier transform of padded spectrograms, exact up to each one's last sample.

The "same" padding of Vocos (arXiv:2306.00814): a frame stands for `hop_length` samples, around which its window extends
equally far to both sides; what extends over the ends of the signal is cut off.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def overlap_add(frames: Tensor, hop_length: int) -> Tensor:
    """Sum overlapping frames, each of which starts `hop_length` samples after the one before.

    Args:
        frames: ``[batch, frames, window]``.
        hop_length: in samples.

    Returns:
        ``[batch, (frames - 1) * hop_length + window]``.
    """
    batch, count, window = frames.shape
    parts = -(-window // hop_length)
    hops = pad(frames, (0, parts * hop_length - window)).unflatten(2, (parts, hop_length))
    summed = frames.new_zeros(batch, count + parts - 1, hop_length)
    for part in range(parts):
        summed[:, part : part + count] += hops[:, :, part]
    return summed.flatten(1)[:, : (count - 1) * hop_length + window]


def inverse_stft(spectrum: Tensor, lengths: Tensor, *, window: Tensor, hop_length: int) -> Tensor:
    """The signal of each spectrogram as if it were not padded.

    Only valid frames are added up, and the sum is divided by the windows of those only. Capture-safe.

    Args:
        spectrum: complex ``[batch, frames, window // 2 + 1]``. What stands beyond a length is never used, not even NaN.
        lengths: int64 ``[batch]``, the valid frames of each; 0 is allowed.
        window: float ``[window]``; longer than `hop_length` by an even number of samples.
        hop_length: samples of a frame.

    Returns:
        ``[batch, frames * hop_length]`` in the real dtype of `spectrum`, zero beyond ``lengths * hop_length``.
    """
    frames, size = spectrum.shape[1], window.shape[0]
    valid = torch.arange(frames, device=spectrum.device) < lengths[:, None]  # [batch, frames]
    spectrum = spectrum.masked_fill(~valid[..., None], 0)
    trim = (size - hop_length) // 2
    kept = slice(trim, trim + frames * hop_length)
    summed = overlap_add(torch.fft.irfft(spectrum, size) * window, hop_length)[:, kept]
    envelope = overlap_add(valid[..., None] * window.square(), hop_length)[:, kept]
    padding = torch.arange(frames * hop_length, device=spectrum.device) >= (lengths * hop_length)[:, None]
    return (summed / envelope.masked_fill(padding, 1)).masked_fill(padding, 0)
