# SPDX-License-Identifier: Apache-2.0
"""Attention of every frame to its own block and a fixed number of neighbour blocks, without a mask.

A sequence is cut into blocks of `block_size` frames, the last of which may be partial. A query of block ``i`` sees the
keys of the blocks ``i - look_backward .. i + look_ahead`` that exist. The dense form is an ``n x n`` mask over full
attention; here

- all queries whose window lies wholly inside the sequence form one batch of equal windows. Their keys and values are an
  overlapping strided *view* of the inputs, so nothing is gathered or shifted;
- the few blocks at either end, whose windows are cut short, get a call of their own.

Every one of these calls is unmasked, so there is no mask to build and no row that could be fully masked. Time and
memory are linear in the length. All decisions are taken from shapes and strides, never from a tensor's content.

The neighbourhood is that of the Qwen2.5-Omni Token2Wav DiT (``DiTDecoderLayer`` in vLLM-Omni's
``qwen2_5_omni_token2wav.py``).
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_size: int,
    look_backward: int = 0,
    look_ahead: int = 0,
) -> Tensor:
    """Scaled dot-product attention restricted to each frame's own and neighbouring blocks.

    Equal to ``scaled_dot_product_attention`` with the mask
    ``-look_backward <= block(key) - block(query) <= look_ahead`` where ``block(frame) = frame // block_size``.

    Args:
        query: ``[batch, heads, frames, head_dim]``, any float dtype, any strides.
        key: as `query`.
        value: as `query`.
        block_size: frames in a block, at least 1.
        look_backward: blocks before its own that a frame sees, at least 0.
        look_ahead: blocks after its own that a frame sees, at least 0.

    Returns:
        ``[batch, heads, frames, head_dim]`` in the dtype of `query`.

    Raises:
        ValueError: for tensors that are not 4-D or differ in shape, or for a setting out of range.
    """
    _validate(query, key, value, block_size, look_backward, look_ahead)
    frames = query.shape[2]
    if frames <= block_size:
        return scaled_dot_product_attention(query, key, value)
    if look_backward == look_ahead == 0 and frames % block_size == 0:
        return _own_block_attention(query, key, value, block_size)
    return _windowed_attention(query, key, value, block_size, look_backward, look_ahead)


def _own_block_attention(query: Tensor, key: Tensor, value: Tensor, block_size: int) -> Tensor:
    """Own-block attention over whole blocks: blocks become batch entries, inputs and output stay views.

    That takes frames-first tensors, as a projection leaves them, or contiguous ones; others go the general way.
    """
    batch, heads, frames, _ = query.shape
    blocks = frames // block_size
    inputs = (query, key, value)
    if all(_frames_join_batch(tensor) for tensor in inputs):
        # As the projections of a transformer layer leave them, [batch, frames, heads, head_dim] in memory.
        folded = (
            tensor.unflatten(2, (blocks, block_size))
            .transpose(1, 2)
            .flatten(0, 1)  # [batch * blocks, heads, size, dim]
            for tensor in inputs
        )
        out = scaled_dot_product_attention(*folded)
        return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)
    if all(tensor.is_contiguous() for tensor in inputs):
        folded = (tensor.view(batch * heads * blocks, 1, block_size, -1) for tensor in inputs)
        return scaled_dot_product_attention(*folded).reshape(query.shape)
    return _windowed_attention(query, key, value, block_size, 0, 0)


def _windowed_attention(
    query: Tensor, key: Tensor, value: Tensor, block_size: int, look_backward: int, look_ahead: int
) -> Tensor:
    """The general form: one call a batch entry for the blocks with a full window, one call for each other block."""
    batch, heads, frames, _ = query.shape
    blocks = -(-frames // block_size)
    # Blocks [first, last) see a full window: look_backward whole blocks before and look_ahead whole blocks after.
    first = min(look_backward, blocks)
    last = max(first, frames // block_size - look_ahead)
    window = (look_backward + 1 + look_ahead) * block_size

    # Frames before heads in memory, so that the caller can merge the heads again without a copy.
    out = query.new_empty(batch, frames, heads, value.shape[3]).transpose(1, 2)
    if last > first:
        span = slice(first * block_size, last * block_size)
        for entry in range(batch):  # a batch dimension cannot be merged with the windows without copying them
            queries = query[entry, :, span].unflatten(1, (last - first, block_size)).transpose(0, 1)
            keys = _windows(key[entry], window, block_size, last - first)
            values = _windows(value[entry], window, block_size, last - first)
            attended = scaled_dot_product_attention(queries, keys, values)  # [windows, heads, block_size, head_dim]
            out[entry, :, span].unflatten(1, (last - first, block_size)).copy_(attended.transpose(0, 1))
    for block in (*range(first), *range(last, blocks)):
        span = slice(block * block_size, min((block + 1) * block_size, frames))
        seen = slice(max(block - look_backward, 0) * block_size, min((block + 1 + look_ahead) * block_size, frames))
        out[:, :, span] = scaled_dot_product_attention(query[:, :, span], key[:, :, seen], value[:, :, seen])
    return out


def _windows(tensor: Tensor, window: int, step: int, count: int) -> Tensor:
    """``[heads, frames, dim]`` -> view ``[count, heads, window, dim]``, windows starting `step` frames apart."""
    return tensor.unfold(1, window, step)[:, :count].permute(1, 0, 3, 2)


def _frames_join_batch(tensor: Tensor) -> bool:
    """Whether batch and frames are one dimension in memory, so that blocks can join the batch as a view."""
    batch, _, frames, _ = tensor.shape
    return batch == 1 or tensor.stride(0) == frames * tensor.stride(2)


def _validate(query: Tensor, key: Tensor, value: Tensor, block_size: int, look_backward: int, look_ahead: int) -> None:
    if query.ndim != 4 or query.shape != key.shape or query.shape != value.shape:
        raise ValueError(
            "block_sparse_attention needs query, key and value of one shape [batch, heads, frames, head_dim], "
            f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}.")
    if look_backward < 0 or look_ahead < 0:
        raise ValueError(
            "look_backward and look_ahead must be at least 0, "
            f"got look_backward={look_backward}, look_ahead={look_ahead}."
        )
