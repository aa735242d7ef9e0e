# SPDX-License-Identifier: Apache-2.0
"""Pure torch operators. Nothing here imports vLLM, vLLM-Omni or transformers."""

from vllm_omni_audio_perf.ops.block_sparse import block_sparse_attention

__all__ = ["block_sparse_attention"]
