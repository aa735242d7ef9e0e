# SPDX-License-Identifier: Apache-2.0
"""Attention of padded sequences of different lengths, each frame to those within a window around it.

The window is flash-attn's: ``(left, right)`` frames before and after a frame, where a negative number is no limit and 0
leaves only the frame itself on that side; causal attention sees nothing after a frame, whatever the window says. Frames
beyond a sequence's length influence nothing: where the window could reach them they are masked, and their keys and
values are zeroed, for a zero weight times NaN would still be NaN.

Two forms of the same function, chosen by shape:

- dense: every query against every key, with a mask where causality alone does not do;
- blocked, for narrow windows: queries in blocks, each against the stretch of keys that its block can see. Time and
  memory are linear in the length.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

BLOCK = 30
"""Least queries in a block. With the window (40, 10) of the MiMo-Audio vocoder a stretch of keys is 80 long."""

KEY_MULTIPLE = 16
"""Stretches of keys are rounded up to it: CUDA's kernels copy a mask whose rows are not aligned."""

BLOCKED_FROM = 3
"""Sequences of this many stretches of keys and more take the blocked form."""
# Measured with the vocoder's 16 heads of 16 channels and window, float32, 2 CPU threads, dense / blocked in ms:
#   frames        48         192         288          480         1120
#   batch 1   0.12/0.23   0.59/0.62   1.04/0.80    2.6/1.2     12.5/3.0
#   batch 4   0.31/0.77   2.12/2.16   4.02/3.08   10.8/5.4     56/21
#   batch 8   0.95/2.07   7.97/8.21   16.3/13.3   40/21       193/75
# In bfloat16 both are equal at 288 frames, and blocked is twice to three times as fast at 1120.


class WindowedAttention:
    """Scaled dot-product attention within a window, prepared once for all layers that share it.

    Capture-safe: shapes and settings decide what is computed, never a tensor's content.

    Args:
        lengths: int64 ``[batch]``, the valid frames of each sequence, at most `frames`; 0 is allowed.
        frames: to which the sequences are padded.
        window: frames before and after a frame that it sees; negative for no limit, 0 for none.
        causal: whether a frame sees nothing after itself.
        dtype: of the queries, keys and values.
    """

    def __init__(
        self,
        lengths: Tensor,
        frames: int,
        *,
        window: tuple[int, int] = (-1, -1),
        causal: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.left = max(window[0], -1)
        self.right = 0 if causal else max(window[1], -1)
        self.frames = frames
        self.block = block_size(self.left, self.right) if is_blocked(frames, self.left, self.right) else None
        self._lengths = lengths
        self._positions = torch.arange(frames, device=lengths.device)
        self._padding = (self._positions >= lengths[:, None])[:, None, :, None]  # [batch, 1, frames, 1]
        seen = self._seen_blocked(self.block) if self.block else self._seen_dense()
        self._mask = (
            None if seen is None else torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf).unsqueeze(1)
        )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend.

        Args:
            query: ``[batch, heads, frames, head_dim]``, any strides.
            key: as `query`. What stands beyond a sequence's length is never used, not even NaN.
            value: as `key`.

        Returns:
            ``[batch, heads, frames, head_dim]``. Rows beyond a sequence's length mean nothing.
        """
        key, value = (tensor.masked_fill(self._padding, 0) for tensor in (key, value))
        if self.block:
            return self._attend_in_blocks(query, key, value, self.block)
        return scaled_dot_product_attention(query, key, value, attn_mask=self._mask, is_causal=self._mask is None)

    def _seen_dense(self) -> Tensor | None:
        """``[batch or 1, query, key]``, or None where it is the causal triangle."""
        if self.left < 0 and self.right == 0:
            return None
        distance = self._positions - self._positions[:, None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left >= 0:
            seen &= distance >= -self.left
        if self.right >= 0:
            seen &= distance <= self.right
        if self.right == 0:  # padding comes after all valid frames, which then do not see it
            return seen[None]
        # A frame of the padding keeps itself: the softmax of a row that sees nothing is NaN.
        return seen & ((self._positions < self._lengths[:, None, None]) | (distance == 0))

    def _seen_blocked(self, block: int) -> Tensor:
        """``[batch * blocks, query in block, key in stretch]``."""
        device = self._positions.device
        stretch = self.left + block + self.right
        starts = torch.arange(0, self.frames, block, device=device)
        distance = torch.arange(stretch, device=device) - self.left - torch.arange(block, device=device)[:, None]
        keys = (starts[:, None] - self.left + torch.arange(stretch, device=device))[:, None]  # [blocks, 1, stretch]
        valid = (keys >= 0) & (keys < self._lengths[:, None, None, None])
        in_window = (distance >= -self.left) & (distance <= self.right)
        return (in_window & (valid | (distance == 0))).flatten(0, 1)

    def _attend_in_blocks(self, query: Tensor, key: Tensor, value: Tensor, block: int) -> Tensor:
        batch, _, frames, _ = query.shape
        blocks = -(-frames // block)
        missing = blocks * block - frames
        stretch = self.left + block + self.right
        queries = pad(query, (0, 0, 0, missing)).unflatten(2, (blocks, block)).transpose(1, 2).flatten(0, 1)
        # The stretches overlap. For one sequence they stay views; several are copied once, so that none reaches into
        # its neighbour in the batch.
        keys, values = (
            pad(tensor, (0, 0, self.left, missing + self.right))
            .unfold(2, stretch, block)  # [batch, heads, blocks, head_dim, stretch]
            .permute(0, 2, 1, 4, 3)
            .flatten(0, 1)
            for tensor in (key, value)
        )
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=self._mask)
        return attended.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :frames]


def block_size(left: int, right: int) -> int:
    """Queries of a block: at least `BLOCK`, and so that its stretch of keys is a multiple of `KEY_MULTIPLE`."""
    return -(-(left + BLOCK + right) // KEY_MULTIPLE) * KEY_MULTIPLE - left - right


def is_blocked(frames: int, left: int, right: int) -> bool:
    """Whether sequences of so many frames take the blocked form."""
    return left >= 0 and right >= 0 and frames >= BLOCKED_FROM * (left + block_size(left, right) + right)
