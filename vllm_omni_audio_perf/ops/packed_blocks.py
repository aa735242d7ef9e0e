# SPDX-License-Identifier: Apache-2.0
"""Attention of blocks to themselves and a fixed number of neighbour blocks, over several sequences in one batch.

Sequences of different lengths are cut into blocks of equal size and laid one after another on one axis, the last block
of each padded. A query of block ``i`` sees the valid frames of the blocks ``i - look_backward .. i + look_ahead`` of
its own sequence.

- Blocks whose window is whole form one batch. Their keys and values are a *view* of the inputs, overlapping where there
  are neighbours: nothing is gathered, shifted or masked.
- The few others, at the ends of sequences, are gathered and computed again under a mask (`Restricted`).

The same restriction over all blocks, whose content a device computes, makes it a function of fixed shape.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Restricted(NamedTuple):
    """The query blocks that see less than a whole window."""

    blocks: Tensor | None
    """``[restricted]`` int64, their positions among the query blocks; None for all of them."""

    window: Tensor
    """``[restricted, window]`` int64, positions among the key blocks; any valid one where there is no block."""

    visible: Tensor
    """``[restricted, 1, 1, window * block_size]`` bool, at least one True in each row."""


def visible_frames(valid: Tensor, sequence: Tensor, *, look_backward: int, look_ahead: int) -> tuple[Tensor, Tensor]:
    """What each block of an axis sees of the blocks around it.

    Args:
        valid: ``[blocks]`` int64, valid frames of each block.
        sequence: ``[blocks]`` int64, to which sequence it belongs.
        look_backward: blocks before its own that a block sees.
        look_ahead: blocks after it.

    Returns:
        The blocks of each window, ``[blocks, window]`` int64, in which what is beyond the axis is replaced by its end;
        and the visible frames of each, 0 where it is of another sequence. Both on the device of the inputs.
    """
    blocks = valid.shape[0]
    own = torch.arange(blocks, device=valid.device).unsqueeze(1)
    offsets = torch.arange(-look_backward, look_ahead + 1, device=valid.device)
    wanted = own + offsets
    window = wanted.clamp(0, blocks - 1)
    flat = window.flatten()
    same = (sequence.index_select(0, flat).view_as(window) == sequence.unsqueeze(1)) & (window == wanted)
    return window, valid.index_select(0, flat).view_as(window) * same


def visibility_mask(frames: Tensor, block_size: int) -> Tensor:
    """Visible frames ``[blocks, window]`` as a mask ``[blocks, 1, 1, window * block_size]`` for attention."""
    mask = torch.arange(block_size, device=frames.device) < frames.unsqueeze(-1)
    return mask.flatten(1)[:, None, None]


def packed_block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    look_backward: int = 0,
    look_ahead: int = 0,
    first: int = 0,
    restricted: Restricted | None = None,
) -> Tensor:
    """Scaled dot-product attention of each block to its window.

    Args:
        query: ``[blocks, block_size, heads, head_dim]``, any float dtype, any strides.
        key: ``[key_blocks, block_size, heads, head_dim]``, the query's blocks and perhaps neighbours at either end.
            With neighbours in view, block and frame must be one dimension in memory.
        value: as `key`.
        look_backward: blocks before its own that a block sees, at least 0.
        look_ahead: blocks after its own, at least 0.
        first: position of the first query's own block among those of `key`.
        restricted: the blocks that see less. All whose window reaches beyond `key` must be among them.

    Returns:
        ``[blocks, block_size, heads, head_dim]`` in the dtype of `query`.

    Raises:
        ValueError: if windows reach beyond `key` and nothing is restricted, or cannot be viewed.
    """
    if restricted is not None and restricted.blocks is None:
        return _attend_restricted(query, key, value, restricted)
    blocks, size, heads, _ = query.shape
    start = max(0, look_backward - first)
    stop = min(blocks, key.shape[0] - first - look_ahead)
    if start == 0 and stop == blocks:
        out = _attend(query, *(_windows(t, first, blocks, look_backward, look_ahead) for t in (key, value)))
    else:
        if restricted is None:
            raise ValueError(
                f"The windows of {blocks} query blocks reach beyond the {key.shape[0]} key blocks; "
                "those that do must be restricted."
            )
        out = query.new_empty(blocks, size, heads, value.shape[3])
        if stop > start:
            windows = (_windows(t, first + start, stop - start, look_backward, look_ahead) for t in (key, value))
            out[start:stop] = _attend(query[start:stop], *windows)
    if restricted is not None:
        assert restricted.blocks is not None
        chosen = query.index_select(0, restricted.blocks)
        out.index_copy_(0, restricted.blocks, _attend_restricted(chosen, key, value, restricted))
    return out


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Over tensors ``[blocks, frames, heads, head_dim]``."""
    return scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask
    ).transpose(1, 2)


def _attend_restricted(query: Tensor, key: Tensor, value: Tensor, restricted: Restricted) -> Tensor:
    """Over the restricted blocks alone; `query` holds no other."""
    shape = restricted.window.shape
    if restricted.blocks is None and shape[1] == 1:  # every block, and its own block alone
        return _attend(query, key, value, restricted.visible)
    keys, values = (
        t.index_select(0, restricted.window.flatten()).unflatten(0, shape).flatten(1, 2) for t in (key, value)
    )
    return _attend(query, keys, values, restricted.visible)


def _windows(tensor: Tensor, first: int, count: int, look_backward: int, look_ahead: int) -> Tensor:
    """A view of the windows of `count` blocks from block `first` on: ``[count, window * block_size, heads, dim]``."""
    if look_backward == look_ahead == 0:
        return tensor[first : first + count]
    _, size, heads, head_dim = tensor.shape
    block_step, frame_step, head_step, step = tensor.stride()
    if block_step != size * frame_step:
        raise ValueError("Neighbour blocks in view need blocks and frames that are one dimension in memory.")
    return tensor.as_strided(
        (count, (look_backward + 1 + look_ahead) * size, heads, head_dim),
        (block_step, frame_step, head_step, step),
        tensor.storage_offset() + (first - look_backward) * block_step,
    )
