# SPDX-License-Identifier: Apache-2.0
"""Pure torch operators. Nothing here imports vLLM, vLLM-Omni or transformers."""

from vllm_omni_audio_perf.ops.block_sparse import block_sparse_attention
from vllm_omni_audio_perf.ops.masked_group_norm import masked_group_norm
from vllm_omni_audio_perf.ops.overlap_add import inverse_stft, overlap_add
from vllm_omni_audio_perf.ops.packed_blocks import (
    Restricted,
    packed_block_attention,
    visibility_mask,
    visible_frames,
)
from vllm_omni_audio_perf.ops.windowed_attention import WindowedAttention

__all__ = [
    "Restricted",
    "WindowedAttention",
    "block_sparse_attention",
    "inverse_stft",
    "masked_group_norm",
    "overlap_add",
    "packed_block_attention",
    "visibility_mask",
    "visible_frames",
]
