# SPDX-License-Identifier: Apache-2.0
"""How the clips of one solve lie in memory: cut into blocks, one after another, the last block of each padded."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_omni_audio_perf.ops import Restricted, visibility_mask, visible_frames

Neighbourhood = tuple[int, int]
"""Blocks that a layer looks backward and ahead."""


class Group(NamedTuple):
    """Consecutive blocks that are evaluated together, layer by layer."""

    start: int
    stop: int
    restricted: dict[Neighbourhood, Restricted]
    """The blocks of the group that see less than their whole window, by kind of layer. Key blocks are counted from
    `keys_start`."""

    def keys_start(self, look_backward: int) -> int:
        """The first block whose keys a layer of the group sees."""
        return max(0, self.start - look_backward)


class BlockLayout:
    """The blocks of several clips on one axis.

    Args:
        frames: mel frames of each clip, each at least 1.
        block_size: frames in a block.
        copies: how often the clips stand on the axis that is evaluated: 2 for conditional and unconditional ones.
        neighbourhoods: those that the layers have.
        group_blocks: most blocks in a group.
        device: where the tensors are.

    Raises:
        ValueError: for no clips or an empty one.
    """

    def __init__(
        self,
        frames: Sequence[int],
        *,
        block_size: int,
        copies: int,
        neighbourhoods: Iterable[Neighbourhood],
        group_blocks: int,
        device: torch.device,
    ) -> None:
        if not frames or min(frames) < 1:
            raise ValueError(f"A solve needs clips of at least one mel frame each, got {list(frames)}.")
        self.frames = tuple(frames)
        self.block_size = block_size
        counts = [-(-count // block_size) for count in self.frames]
        self.blocks = sum(counts)
        """Blocks of all clips, once."""

        clip = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        ends = torch.tensor(counts).cumsum(0)
        position = torch.arange(self.blocks) - (ends - torch.tensor(counts))[clip]
        valid = (torch.tensor(self.frames)[clip] - position * block_size).clamp(max=block_size)
        self.clip = clip.to(device)
        """``[blocks]`` int64, to which clip a block belongs."""
        self.position = position.to(device)
        """``[blocks]`` int64, which block of its clip it is."""
        self.block_frames = valid.to(device)
        """``[blocks]`` int64, its valid frames."""

        self.valid = valid.repeat(copies)
        """``[copies * blocks]`` int64 on the CPU, valid frames of each evaluated block."""
        self.sequence = torch.cat([clip + copy * len(counts) for copy in range(copies)])
        """``[copies * blocks]`` int64 on the CPU, equal for the blocks that may see each other."""
        self.groups = self._make_groups(neighbourhoods, group_blocks, device)

    def pack(self, clips: Sequence[Tensor]) -> Tensor:
        """Clips ``[frames, channels]`` each as one ``[blocks, block_size, channels]``, zero where no frame is."""
        packed = clips[0].new_zeros(self.blocks * self.block_size, clips[0].shape[1])
        for (start, stop), clip in zip(self._spans(), clips, strict=True):
            packed[start:stop] = clip
        return packed.unflatten(0, (self.blocks, self.block_size))

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """The reverse of :meth:`pack`, as views."""
        frames = packed.flatten(0, 1)
        return [frames[start:stop] for start, stop in self._spans()]

    def _spans(self) -> Iterable[tuple[int, int]]:
        start = 0
        for frames in self.frames:
            yield start, start + frames
            start += -(-frames // self.block_size) * self.block_size

    def _make_groups(
        self, neighbourhoods: Iterable[Neighbourhood], group_blocks: int, device: torch.device
    ) -> list[Group]:
        total = len(self.valid)
        groups = [Group(start, min(start + group_blocks, total), {}) for start in range(0, total, max(1, group_blocks))]
        for back, ahead in set(neighbourhoods):
            window, frames = visible_frames(self.valid, self.sequence, look_backward=back, look_ahead=ahead)
            restricted = (frames < self.block_size).any(1).nonzero().flatten()
            mask = visibility_mask(frames[restricted], self.block_size)
            bounds = torch.searchsorted(restricted, torch.tensor([0, *(group.stop for group in groups)])).tolist()
            for group, (first, last) in zip(groups, pairwise(bounds), strict=True):
                if last > first:
                    chosen = restricted[first:last]
                    # A replaced block may lie before the keys that the group has: any of those will do.
                    keys = (window[chosen] - group.keys_start(back)).clamp(min=0)
                    group.restricted[back, ahead] = Restricted(
                        (chosen - group.start).to(device), keys.to(device), mask[first:last].to(device)
                    )
        return groups
