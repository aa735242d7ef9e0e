# SPDX-License-Identifier: Apache-2.0
"""How clips are cut into blocks and groups."""

import itertools

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.token2wav.layout import BlockLayout

CPU = torch.device("cpu")
SIZE = 24


def layout(*frames: int, copies: int = 2, group_blocks: int = 1000) -> BlockLayout:
    return BlockLayout(
        frames,
        block_size=SIZE,
        copies=copies,
        neighbourhoods=[(0, 0), (1, 0), (0, 1)],
        group_blocks=group_blocks,
        device=CPU,
    )


def clip(frames: int) -> Tensor:
    return torch.randn(frames, 3, generator=torch.Generator().manual_seed(frames))


@pytest.mark.parametrize("frames", [(1,), (24,), (25,), (48, 1, 30), (2, 2, 2)])
def test_packs_and_unpacks(frames: tuple[int, ...]) -> None:
    clips = [clip(count) for count in frames]
    lay = layout(*frames)
    packed = lay.pack(clips)
    assert packed.shape == (lay.blocks, SIZE, 3)
    assert lay.blocks == sum(-(-count // SIZE) for count in frames)
    for actual, expected in zip(lay.unpack(packed), clips, strict=True):
        assert torch.equal(actual, expected)
    assert packed.count_nonzero() == sum(frames) * 3  # the rest is zero


def test_blocks_know_their_clip() -> None:
    lay = layout(48, 1, 30)
    assert lay.clip.tolist() == [0, 0, 1, 2, 2]
    assert lay.position.tolist() == [0, 1, 0, 0, 1]
    assert lay.valid.tolist() == [24, 24, 1, 24, 6] * 2
    assert lay.sequence.tolist() == [0, 0, 1, 2, 2, 3, 3, 4, 5, 5]
    assert layout(48, 1, 30, copies=1).valid.tolist() == [24, 24, 1, 24, 6]


def test_no_padding_to_the_longest() -> None:
    assert layout(30_000, 2).blocks == 1251


def test_whole_blocks_need_no_mask() -> None:
    (group,) = layout(48, 240).groups
    assert (0, 0) not in group.restricted


def test_only_ends_are_restricted() -> None:
    (group,) = layout(24_000, 100, group_blocks=10_000).groups
    counts = {kind: len(restricted.window) for kind, restricted in group.restricted.items()}
    # Two copies of two clips; the second one's last block is partial.
    assert counts == {(0, 0): 2, (1, 0): 2 * 2 + 2, (0, 1): 2 * 2 + 2}


@pytest.mark.parametrize("group_blocks", [1, 2, 3, 7])
def test_groups_cover_all_blocks_once(group_blocks: int) -> None:
    lay = layout(100, 30, 24, group_blocks=group_blocks)
    assert [group.start for group in lay.groups] == list(range(0, 16, group_blocks))
    for group, following in itertools.pairwise(lay.groups):
        assert group.stop == following.start
    assert lay.groups[-1].stop == 16
    for kind in [(0, 0), (1, 0), (0, 1)]:
        (whole,) = layout(100, 30, 24).groups
        expected = whole.restricted[kind].blocks
        found = [group.restricted[kind].blocks + group.start for group in lay.groups if kind in group.restricted]
        assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("frames", [(), (24, 0)])
def test_refuses_clips_without_frames(frames: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one mel frame each"):
        layout(*frames)
