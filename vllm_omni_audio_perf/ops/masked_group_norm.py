# SPDX-License-Identifier: Apache-2.0
"""Group normalisation of padded sequences."""

import torch
from torch import Tensor


def masked_group_norm(hidden: Tensor, lengths: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """``GroupNorm(1, channels)`` of each sequence as if it were not padded.

    Mean and variance are those of all channels over the valid steps only. They are computed in float32, and the
    variance from the deviations, so that nothing cancels. Capture-safe.

    Args:
        hidden: ``[batch, channels, steps]``. What stands beyond a sequence's length is never used, not even NaN.
        lengths: int64 ``[batch]``, the valid steps of each sequence; what is over `steps` or negative counts as `steps`
            or 0.
        weight: ``[channels]``.
        bias: ``[channels]``.
        eps: added to the variance.

    Returns:
        ``[batch, channels, steps]`` in the dtype of `hidden`; the bias beyond each length.
    """
    _, channels, steps = hidden.shape
    padding = (torch.arange(steps, device=hidden.device) >= lengths[:, None])[:, None]  # [batch, 1, steps]
    count = lengths.clamp(1, steps)[:, None, None] * channels
    mean = hidden.float().masked_fill(padding, 0).sum((1, 2), keepdim=True) / count
    deviation = (hidden.float() - mean).masked_fill(padding, 0)
    variance = deviation.square().sum((1, 2), keepdim=True) / count
    normed = torch.addcmul(bias[:, None], deviation * torch.rsqrt(variance + eps), weight[:, None])
    return normed.to(hidden.dtype)
