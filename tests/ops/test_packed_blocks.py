# SPDX-License-Identifier: Apache-2.0
"""`packed_block_attention` against dense masked attention of each sequence alone."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_omni_audio_perf.ops import Restricted, packed_block_attention, visibility_mask, visible_frames

SIZE, HEADS, DIM = 6, 2, 8
NEIGHBOURHOODS = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (0, 3)]
# Frames of each sequence: one frame, one block, one frame over, several, ragged mixtures.
MIXES = [(1,), (6,), (7,), (18,), (23,), (6, 6), (5, 7), (1, 1, 1), (30, 2, 13), (12, 18, 6), (3, 40)]


class Packed:
    """Random sequences, packed, with garbage where there is no frame."""

    def __init__(self, frames: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(sum(frames))
        self.frames = frames
        self.counts = [-(-count // SIZE) for count in frames]
        # As a fused projection leaves them: query, key and value beside each other.
        fused = torch.randn(sum(self.counts), SIZE, 3, HEADS, DIM, generator=generator, dtype=torch.float64).to(dtype)
        self.query, self.key, self.value = fused.unbind(2)
        self.valid = torch.cat(
            [
                (count - SIZE * torch.arange(blocks)).clamp(max=SIZE)
                for count, blocks in zip(frames, self.counts, strict=True)
            ]
        )
        self.sequence = torch.arange(len(frames)).repeat_interleave(torch.tensor(self.counts))
        for tensor in (self.key, self.value):
            tensor[torch.arange(SIZE) >= self.valid[:, None]] = 1e4

    def restricted(self, back: int, ahead: int, *, everywhere: bool = False) -> Restricted:
        window, seen = visible_frames(self.valid, self.sequence, look_backward=back, look_ahead=ahead)
        if everywhere:
            return Restricted(None, window, visibility_mask(seen, SIZE))
        blocks = (seen < SIZE).any(1).nonzero().flatten()
        return Restricted(blocks, window[blocks], visibility_mask(seen[blocks], SIZE))

    def split(self, packed: Tensor) -> list[Tensor]:
        """``[frames, heads, dim]`` of each sequence."""
        parts = packed.flatten(0, 1).split([SIZE * count for count in self.counts])
        return [part[:frames] for part, frames in zip(parts, self.frames, strict=True)]

    def expected(self, back: int, ahead: int) -> list[Tensor]:
        out = []
        for query, key, value in zip(*map(self.split, (self.query, self.key, self.value)), strict=True):
            block = torch.arange(len(query)) // SIZE
            step = block[None] - block[:, None]
            mask = (step >= -back) & (step <= ahead)
            dense = (tensor.transpose(0, 1).double() for tensor in (query, key, value))
            out.append(scaled_dot_product_attention(*dense, attn_mask=mask).transpose(0, 1))
        return out


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("back", "ahead"), NEIGHBOURHOODS)
@pytest.mark.parametrize("frames", MIXES)
def test_equals_dense_attention(frames: tuple[int, ...], back: int, ahead: int, everywhere: bool) -> None:
    packed = Packed(frames)
    out = packed_block_attention(
        packed.query,
        packed.key,
        packed.value,
        look_backward=back,
        look_ahead=ahead,
        restricted=packed.restricted(back, ahead, everywhere=everywhere),
    )
    assert out.shape == packed.query.shape
    for actual, expected in zip(packed.split(out), packed.expected(back, ahead), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
def test_dtypes(dtype: torch.dtype, atol: float) -> None:
    packed = Packed((30, 2, 13), dtype)
    out = packed_block_attention(
        packed.query, packed.key, packed.value, look_backward=1, restricted=packed.restricted(1, 0)
    )
    assert out.dtype == dtype
    for actual, expected in zip(packed.split(out), packed.expected(1, 0), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("back", "ahead"), NEIGHBOURHOODS)
@pytest.mark.parametrize(("start", "stop"), [(0, 3), (2, 5), (4, 9), (8, 9)])
def test_part_of_the_blocks(start: int, stop: int, back: int, ahead: int) -> None:
    """Queries of a part of the axis, keys of that part and its neighbours."""
    packed = Packed((30, 2, 13))
    first_key, last_key = max(0, start - back), min(9, stop + ahead)
    whole = packed.restricted(back, ahead)
    assert whole.blocks is not None
    chosen = (whole.blocks >= start) & (whole.blocks < stop)
    out = packed_block_attention(
        packed.query[start:stop],
        packed.key[first_key:last_key],
        packed.value[first_key:last_key],
        look_backward=back,
        look_ahead=ahead,
        first=start - first_key,
        restricted=Restricted(
            whole.blocks[chosen] - start, (whole.window[chosen] - first_key).clamp(min=0), whole.visible[chosen]
        ),
    )
    everything = packed_block_attention(
        packed.query, packed.key, packed.value, look_backward=back, look_ahead=ahead, restricted=whole
    )
    torch.testing.assert_close(out, everything[start:stop], rtol=0, atol=1e-6)


def test_whole_windows_are_views_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own blocks join the batch where they are, and neighbours overlap in memory."""
    calls: list[tuple[Tensor, Tensor | None]] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        calls.append((key, attn_mask))
        return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)

    monkeypatch.setattr("vllm_omni_audio_perf.ops.packed_blocks.scaled_dot_product_attention", attention)
    packed = Packed((24,))
    packed_block_attention(packed.query, packed.key, packed.value)
    packed_block_attention(packed.query, packed.key, packed.value, look_backward=1, restricted=packed.restricted(1, 0))
    (own, own_mask), (windows, mask), (ends, ends_mask) = calls
    storage = packed.key.untyped_storage().data_ptr()
    assert own.shape[0] == 4
    assert own_mask is None
    assert own.untyped_storage().data_ptr() == storage
    assert windows.shape == (3, HEADS, 2 * SIZE, DIM)
    assert mask is None
    assert windows.untyped_storage().data_ptr() == storage
    assert ends.shape[0] == 1
    assert ends_mask is not None


def test_what_is_visible() -> None:
    """Two clips of 2 blocks, 8 and 9 frames, and one of 1 block."""
    valid, sequence = torch.tensor([6, 2, 6, 3, 6]), torch.tensor([0, 0, 1, 1, 2])
    window, frames = visible_frames(valid, sequence, look_backward=1, look_ahead=1)
    assert window.tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 4]]
    assert frames.tolist() == [[0, 6, 2], [6, 2, 0], [0, 6, 3], [6, 3, 0], [0, 6, 0]]
    mask = visibility_mask(frames[1:2], SIZE)
    assert mask.shape == (1, 1, 1, 18)
    assert mask.flatten().int().tolist() == [1] * 8 + [0] * 10


def test_refuses_keys_that_cannot_be_viewed() -> None:
    packed = Packed((24,))
    every_other = packed.key[:, ::2]
    with pytest.raises(ValueError, match="one dimension in memory"):
        packed_block_attention(packed.query[:3, :3], every_other[:, :2], every_other[:, :2], look_ahead=1)


@pytest.mark.parametrize(("back", "ahead"), [(1, 0), (0, 1)])
def test_refuses_windows_beyond_the_keys(back: int, ahead: int) -> None:
    packed = Packed((24,))
    with pytest.raises(ValueError, match="windows of 4 query blocks reach beyond the 4 key blocks"):
        packed_block_attention(packed.query, packed.key, packed.value, look_backward=back, look_ahead=ahead)
