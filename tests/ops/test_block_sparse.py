# SPDX-License-Identifier: Apache-2.0
"""`block_sparse_attention` against dense masked attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_omni_audio_perf.ops import block_sparse_attention

BLOCK = 24
HEADS = 2
HEAD_DIM = 16
LENGTHS = (1, 10, 23, 24, 25, 48, 49, 96, 97, 101, 241)
NEIGHBOURHOODS = {
    "own": (0, 0),
    "backward": (1, 0),
    "ahead": (0, 1),
    "both": (1, 1),
    "several": (3, 2),
    "more than there are": (40, 40),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, backward: int, ahead: int, block_size: int = BLOCK
) -> Tensor:
    block = torch.arange(query.shape[2]) // block_size
    difference = block[None, :] - block[:, None]
    mask = (difference >= -backward) & (difference <= ahead)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)


def frames_first(batch: int, frames: int) -> Tensor:
    """In memory [batch, frames, 3, heads, head_dim]: a fused projection's output."""
    fused = torch.randn(batch, frames, 3, HEADS, HEAD_DIM, dtype=torch.float64)
    return fused.permute(2, 0, 3, 1, 4)


def contiguous(batch: int, frames: int) -> Tensor:
    return torch.randn(3, batch, HEADS, frames, HEAD_DIM, dtype=torch.float64)


def every_other_frame(batch: int, frames: int) -> Tensor:
    return torch.randn(3, batch, HEADS, 2 * frames, HEAD_DIM, dtype=torch.float64)[..., ::2, :]


def cut_from_longer(batch: int, frames: int) -> Tensor:
    return frames_first(batch, frames + 7)[..., 3 : frames + 3, :]


def expanded_batch(batch: int, frames: int) -> Tensor:
    return contiguous(1, frames).expand(3, batch, HEADS, frames, HEAD_DIM)


LAYOUTS = (frames_first, contiguous, every_other_frame, cut_from_longer, expanded_batch)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("neighbourhood", NEIGHBOURHOODS)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_equals_dense(batch: int, neighbourhood: str, dtype: torch.dtype) -> None:
    backward, ahead = NEIGHBOURHOODS[neighbourhood]
    for frames in LENGTHS:
        for layout in LAYOUTS:
            inputs = layout(batch, frames).to(dtype)
            expected = dense_attention(*inputs.double(), backward, ahead)
            actual = block_sparse_attention(*inputs, block_size=BLOCK, look_backward=backward, look_ahead=ahead)
            assert actual.dtype == dtype
            assert actual.shape == expected.shape
            assert not actual.isnan().any()
            error = (actual.double() - expected).abs().max()
            assert error <= TOLERANCE[dtype], (frames, layout.__name__, float(error))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("neighbourhood", ["own", "backward", "ahead", "both", "several"])
@pytest.mark.parametrize(("frames", "batch"), [(4000, 1), (4000, 3), (24 * 166, 2), (24 * 166 + 1, 1)])
def test_equals_dense_when_long(frames: int, batch: int, neighbourhood: str, dtype: torch.dtype) -> None:
    backward, ahead = NEIGHBOURHOODS[neighbourhood]
    inputs = frames_first(batch, frames).to(dtype)[:, :, :1]  # one head: the dense reference is slow
    expected = dense_attention(*inputs.double(), backward, ahead)
    actual = block_sparse_attention(*inputs, block_size=BLOCK, look_backward=backward, look_ahead=ahead)
    assert (actual.double() - expected).abs().max() <= TOLERANCE[dtype]


@settings(deadline=None)  # a shared machine may stall for longer than any deadline
@given(
    frames=st.integers(0, 130),
    batch=st.integers(1, 3),
    block_size=st.integers(1, 30),
    backward=st.integers(0, 5),
    ahead=st.integers(0, 5),
    order=st.permutations(range(4)),
)
def test_equals_dense_for_any_setting_and_memory_order(
    frames: int, batch: int, block_size: int, backward: int, ahead: int, order: list[int]
) -> None:
    shape = (batch, HEADS, frames, HEAD_DIM)
    stored = torch.randn(3, *(shape[axis] for axis in order), dtype=torch.float64)
    inputs = stored.permute(0, *(order.index(axis) + 1 for axis in range(4)))
    expected = dense_attention(*inputs, backward, ahead, block_size)
    actual = block_sparse_attention(*inputs, block_size=block_size, look_backward=backward, look_ahead=ahead)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[torch.float64])


@pytest.mark.parametrize("neighbourhood", NEIGHBOURHOODS)
@pytest.mark.parametrize("frames", [25, 96, 101])
def test_what_a_query_may_not_see_has_no_influence(frames: int, neighbourhood: str) -> None:
    """NaN outside the neighbourhood would leak through a mask's zero weight; here it is never read."""
    backward, ahead = NEIGHBOURHOODS[neighbourhood]
    query, key, value = frames_first(2, frames)
    block = torch.arange(frames) // BLOCK
    for own in range(int(block[-1]) + 1):
        seen = (block >= own - backward) & (block <= own + ahead)
        spoiled = [tensor.clone() for tensor in (key, value)]
        for tensor in spoiled:
            tensor[:, :, ~seen] = torch.nan
        out = block_sparse_attention(query, *spoiled, block_size=BLOCK, look_backward=backward, look_ahead=ahead)
        assert out[:, :, block == own].isfinite().all()


class AllocationSpy(TorchDispatchMode):
    """Records the bytes of the largest allocation, the inputs' own memory apart, and every operator called."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs.untyped_storage().data_ptr()
        self.largest = 0
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operators.add(func.overloadpacket.__name__)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() != self.inputs:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("neighbourhood", ["own", "backward", "ahead", "both", "several"])
@pytest.mark.parametrize("tail", [0, 1, 23])
def test_allocates_nothing_that_grows_with_the_square(tail: int, neighbourhood: str) -> None:
    backward, ahead = NEIGHBOURHOODS[neighbourhood]
    largest = {}
    for blocks in (20, 40):
        inputs = frames_first(2, blocks * BLOCK + tail)
        with AllocationSpy(inputs) as spy:
            block_sparse_attention(*inputs, block_size=BLOCK, look_backward=backward, look_ahead=ahead)
        largest[blocks] = spy.largest
    assert largest[40] <= 2.1 * largest[20]


def test_the_spy_sees_a_dense_mask() -> None:
    largest = {}
    for blocks in (20, 40):
        inputs = frames_first(2, blocks * BLOCK)
        with AllocationSpy(inputs) as spy:
            dense_attention(*inputs, 0, 0)
        largest[blocks] = spy.largest
    assert largest[40] > 2.1 * largest[20]


@pytest.mark.parametrize("layout", [frames_first, contiguous])
@pytest.mark.parametrize("batch", [1, 2])
def test_own_whole_blocks_copy_nothing_and_need_no_mask(batch: int, layout) -> None:
    inputs = layout(batch, 10 * BLOCK).float()
    with AllocationSpy(inputs) as spy:
        out = block_sparse_attention(*inputs, block_size=BLOCK)
    copies = {"clone", "copy_", "contiguous", "_to_copy", "cat", "stack", "empty", "new_empty"}
    assert not spy.operators & copies
    assert spy.largest == out.untyped_storage().nbytes()


@pytest.mark.parametrize("neighbourhood", ["own", "backward", "ahead", "both"])
@pytest.mark.parametrize("frames", [96, 101])
def test_never_passes_a_mask(frames: int, neighbourhood: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backward, ahead = NEIGHBOURHOODS[neighbourhood]
    module = "vllm_omni_audio_perf.ops.block_sparse.scaled_dot_product_attention"

    def without_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value)

    monkeypatch.setattr(module, without_mask)
    inputs = frames_first(2, frames)
    block_sparse_attention(*inputs, block_size=BLOCK, look_backward=backward, look_ahead=ahead)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"block_size": 24, "look_ahead": -1}, "look_ahead=-1"),
        ({"block_size": 24, "look_backward": -2}, "look_backward=-2"),
    ],
)
def test_refuses_bad_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(*frames_first(1, 10), **settings)


def test_refuses_other_shapes() -> None:
    query, key, value = frames_first(1, 10)
    with pytest.raises(ValueError, match=r"\(1, 2, 10, 16\), \(1, 2, 9, 16\)"):
        block_sparse_attention(query, key[:, :, 1:], value, block_size=BLOCK)
    with pytest.raises(ValueError, match="one shape"):
        block_sparse_attention(query[0], key[0], value[0], block_size=BLOCK)
